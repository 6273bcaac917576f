"""Runs every benchmark, one after another: `make bench`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
# In the order of the README's tables; each prints ratios and takes minutes.
BENCHMARKS = (
  "foundation_ops",
  "embedding_table",
  "distribution",
  "checkpoint",
  "train",
  "keras_layers",
  "sync_train",
  "serving",
  "realtime",
)


def main() -> int:
  failed = []
  for name in BENCHMARKS:
    script = FOLDER / f"{name}.py"
    print(f"\n===== {script.name}", flush=True)
    if subprocess.run([sys.executable, script]).returncode != 0:
      failed.append(script.name)
  for name in failed:
    print(f"failed: {name}", file=sys.stderr)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
