"""Runs the benchmarks of real-time training: `python benchmarks/realtime.py [part...]`.

`demo` measures freshness end to end and kills every process once; others measure one stage each.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent


def commands() -> dict[str, list[str]]:
  """Returns the command of each part: every `realtime_<part>.py` here, and the demo."""
  parts = {
    path.stem[len("realtime_") :]: [sys.executable, str(path)]
    for path in sorted(FOLDER.glob("realtime_*.py"))
  }
  return {**parts, "demo": [sys.executable, "-m", "examples.realtime.demo"]}


def main(wanted: list[str]) -> int:
  """Runs the named parts, or all of them, and returns 1 if one missed its goal."""
  known = commands()
  unknown = sorted(set(wanted) - set(known))
  if unknown:
    print(f"no such part: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
    return 2
  missed = []
  for name in wanted or known:
    print(f"\n===== {name}", flush=True)
    if subprocess.run(known[name], cwd=FOLDER.parent).returncode != 0:
      missed.append(name)
  for name in missed:
    print(f"missed its goal, or failed: {name}", file=sys.stderr)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
