"""Serves exported models.

    python -m monolith.serving.model_server --model_name=m --model_base_path=/models/m
        [--port=8500] [--rest_api_port=8501]

Listens on loopback; `--bind_address` chooses another interface. SIGTERM and SIGINT end it after the
requests that are under way. `--native` runs the server in C++ with the other flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import monolith
from monolith import _install
from monolith.serving import native_server, options


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a server until a signal ends it; returns the exit status."""
  arguments = sys.argv[1:] if arguments is None else arguments
  flags = options.parse(arguments)
  if flags.native and not flags.version:
    try:
      native_server.exec_server(options.without_native(arguments))
    except FileNotFoundError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
  # TensorFlow takes seconds to load, and the program in C++ has its own.
  import tensorflow as tf

  with _install.naming_extra("serving"):
    from monolith.serving import server

  if flags.version:
    print(f"monolith {monolith.__version__}, TensorFlow {tf.__version__}")
    return 0
  return server.run(flags)


if __name__ == "__main__":
  sys.exit(main())
