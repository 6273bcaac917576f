"""Finds the model server in C++, which `make server` builds where nghttp2 is installed."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

_PROGRAM = pathlib.Path(__file__).resolve().parent / "native" / "monolith_model_server"


def find_binary() -> str:
  """Returns the path of the program.

  Raises:
    FileNotFoundError: it was not built.
  """
  if not os.access(_PROGRAM, os.X_OK):
    raise FileNotFoundError(
      f"{_PROGRAM} is not there: install nghttp2 (Debian and Ubuntu: apt-get install "
      "libnghttp2-dev) and run 'make server' in the checkout."
    )
  return str(_PROGRAM)


def exec_server(arguments: Sequence[str]) -> None:
  """Replaces this process by the program; does not return.

  Args:
    arguments: its flags, those of `python -m monolith.serving.model_server`. What only the server
      in Python implements is refused by the program, with exit status 2.

  Raises:
    FileNotFoundError: the program was not built.
  """
  program = find_binary()
  os.execv(program, [program, *arguments])
