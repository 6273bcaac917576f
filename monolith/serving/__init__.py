"""Answers requests with exported models, over gRPC and HTTP, as TensorFlow Serving does.

    python -m monolith.serving.model_server --model_name=m --model_base_path=/models/m

`model_server` starts the server, a program in C++ in `native/`. The rest is a second command,
`predict`, which scores files: `sample_files` reads them, `scorer` scores batches with a SavedModel
(`servable`) or asks a server (`tensors` are its messages), and `remote_servers` says where an
`entry` finds its parameter servers.
"""

from monolith import _install

_install.refuse_strangers()
