"""Runs every test that needs a GPU, as `make gpu-test` does; says so where there is none.

python tests/gpu/run.py                    C++ tests of the kernels, then the tests of the ops
python tests/gpu/run.py --sanitizer        the C++ tests under compute-sanitizer, too
python tests/gpu/run.py --only-sanitizer   nothing else
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Files elsewhere whose tests use a GPU where TensorFlow finds one.
_FILES = (
  "tests/native_training/clip_ops_test.py",
  "tests/native_training/device_utils_test.py",
  "tests/native_training/distributed_ps_sync_test.py",
  "tests/native_training/distribution_ops_test.py",
  "tests/native_training/feature_utils_test.py",
  "tests/native_training/layers/layer_ops_test.py",
  "tests/native_training/optimizers/rmsprop_test.py",
  "tests/native_training/optimizers/rmspropv2_test.py",
  "tests/native_training/prefetch_queue_test.py",
  "tests/native_training/save_utils_test.py",
  "tests/native_training/tables/fused_embedding_to_layout_test.py",
  "tests/native_training/tables/layout_table_test.py",
)


def _has_gpu() -> bool:
  """Tells whether TensorFlow finds a GPU, asked in a process of its own."""
  program = "import sys, tensorflow as tf; sys.exit(not tf.config.list_physical_devices('GPU'))"
  return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def _environment() -> dict[str, str]:
  # Processes share the card: each takes what it needs, not all there is.
  return {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def _run(*command: object) -> bool:
  print("==", *command, flush=True)
  return subprocess.run(list(map(str, command)), cwd=ROOT, env=_environment()).returncode == 0


def _run_quietly(command: list[str]) -> tuple[bool, str]:
  """Returns whether a program succeeded, and what it printed."""
  done = subprocess.run(
    command,
    cwd=ROOT,
    env=_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  )
  return done.returncode == 0, done.stdout


def _sanitize() -> bool:
  """Runs the C++ tests under both tools, all at a time: they wait more than they compute."""
  sanitizer = shutil.which("compute-sanitizer")
  if not sanitizer:
    print("error: compute-sanitizer is not on PATH", file=sys.stderr)
    return False
  programs = sorted((ROOT / "build/gpu-tests/bin").rglob("*_test"))
  # Hundreds of requests take minutes: memcheck, whose matter bad offsets are, has those of two of
  # the eight configurations, and racecheck none; the other cases launch the same kernels.
  hundreds = "*FindsWhatTheEngineFinds"
  filters = {
    "memcheck": "-" + ":".join(f"{hundreds}/{i}" for i in range(2, 8)),
    "racecheck": f"-{hundreds}*",
  }
  commands = [
    [sanitizer, "--tool", tool, "--error-exitcode", "1", str(program)]
    + ["--gtest_brief=1", f"--gtest_filter={tests}"]
    for tool, tests in filters.items()
    for program in programs
  ]
  good = bool(programs)
  with concurrent.futures.ThreadPoolExecutor(len(commands) or 1) as pool:
    for command, (passed, output) in zip(commands, pool.map(_run_quietly, commands)):
      print("==", *command, "" if passed else "FAILED", flush=True)
      print(output, flush=True)
      good &= passed
  return good


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--sanitizer", action="store_true", help="run compute-sanitizer, too")
  parser.add_argument("--only-sanitizer", action="store_true", help="run nothing else")
  options = parser.parse_args()
  if not _has_gpu():
    print("No GPU: TensorFlow finds none here, so the GPU tests are left out.")
    return 0
  good = _run(sys.executable, "tools/native_build.py", "--gpu-tests")
  if options.sanitizer or options.only_sanitizer:
    good &= _sanitize()
  if options.only_sanitizer:
    return 0 if good else 1
  good &= _run(sys.executable, "-m", "pytest", "--file-jobs", 4, "tests/gpu", *_FILES)
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
