"""Starts the model server, a program in C++.

    python -m monolith.serving.model_server --model_name=m --model_base_path=/models/m
        [--port=8500] [--rest_api_port=8501]

It listens on loopback; `--bind_address` chooses another interface. SIGTERM and SIGINT end it after
the requests that are under way. `--help` lists the flags, which are TensorFlow Serving's.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

import monolith

_PROGRAM = pathlib.Path(__file__).resolve().parent / "native" / "monolith_model_server"


def find_binary() -> str:
  """Returns the path of the program.

  Raises:
    FileNotFoundError: the program was not built; the message says what is missing.
  """
  if not os.access(_PROGRAM, os.X_OK):
    raise FileNotFoundError(
      f"{_PROGRAM} is not there: install nghttp2 (Debian and Ubuntu: apt-get install "
      "libnghttp2-dev libssl-dev), then build again: 'make build' in a checkout, otherwise pip "
      "install from source."
    )
  return str(_PROGRAM)


def make_environment(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment variables for the program.

  The program is linked to TensorFlow's libraries. It finds those of the TensorFlow that this Python
  would import, wherever that is installed.

  Args:
    environment: the variables of this process.
  """
  spec = importlib.util.find_spec("tensorflow")
  folders = list(spec.submodule_search_locations or ()) if spec else []
  paths = [*folders, *filter(None, [environment.get("LD_LIBRARY_PATH")])]
  return {**environment, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def main(arguments: Sequence[str] | None = None) -> int:
  """Replaces this process by the server; does not return if that succeeds.

  Args:
    arguments: its flags; those of the command line by default.

  Returns:
    1, if there is no program.
  """
  arguments = sys.argv[1:] if arguments is None else arguments
  try:
    program = find_binary()
  except FileNotFoundError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  if "--version" in arguments:
    print(f"monolith {monolith.__version__}", flush=True)
  os.execve(program, [program, *arguments], make_environment(os.environ))


if __name__ == "__main__":
  sys.exit(main())
