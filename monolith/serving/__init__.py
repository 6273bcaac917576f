"""Answers requests with exported models, over gRPC and HTTP, as TensorFlow Serving does.

    python -m monolith.serving.model_server --model_name=m --model_base_path=/models/m

`model_server` is the command. One concern per module, in the order in which a request meets them:
`options` (flags), `native_server` (the program in C++), `server` (the one in Python),
`model_config` (which models and versions), `version_scan` (what lies in a folder), `model_manager`
(loads, switches, unloads), `grpc_server` and `rest_server` (the two ways in), `prediction` (a
request to an answer), `tensors` and `json_tensors` (messages to arrays), `examples_api` (Classify
and its like), `batching`, `servable` (a SavedModel in a session), `warmup`, `remote_servers` (where
an `entry` finds its parameter servers), `metrics`.
`predict` is a second command: it scores files.
"""

from monolith import _install

_install.refuse_strangers()
