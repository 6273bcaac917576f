"""Fails when two op libraries do not register the same ops: `compare_ops.py A.so B.so`."""

from __future__ import annotations

import subprocess
import sys

_LIST_OPS = """
import sys
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
library = pywrap_tf_session.TF_LoadLibrary(sys.argv[1])
ops = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetOpList(library))
print("\\n".join(sorted(str(op).replace("\\n", " ") for op in ops.op)))
"""


def registered_ops(library: str) -> set[str]:
  """Returns the full definition of every op in `library`, one line each.

  Each library is loaded in a process of its own: both register the same names.
  """
  process = subprocess.run(
    [sys.executable, "-c", _LIST_OPS, library], check=True, capture_output=True, text=True
  )
  return set(process.stdout.splitlines())


def main(first: str, second: str) -> int:
  ops = {library: registered_ops(library) for library in (first, second)}
  only = {first: ops[first] - ops[second], second: ops[second] - ops[first]}
  for library, names in only.items():
    for name in sorted(names):
      print(f"only in {library}: {name}", file=sys.stderr)
  if any(only.values()):
    return 1
  print(f"Both builds register the same {len(ops[first])} ops.")
  return 0


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:3]))
