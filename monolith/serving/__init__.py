"""Answers requests with exported models, over gRPC and HTTP, as TensorFlow Serving does.

    python -m monolith.serving.model_server --model_name=m --model_base_path=/models/m

`model_server` starts the server, a program in C++ in `native/`. The rest is a second command,
`predict`, which scores files: `sample_files` reads them, `scorer` scores batches with a SavedModel
(`servable`) or with a model of a server, and `remote_servers` tells an `entry` where its parameter
servers are.
"""

from monolith import _install

_install.refuse_strangers()
