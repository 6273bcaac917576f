"""Runs every test that needs a GPU, as `make gpu-test` does; says so where there is none.

python tests/gpu/run.py                    C++ tests of the kernels, then the tests of the ops
python tests/gpu/run.py --sanitizer        the C++ tests under compute-sanitizer, too
python tests/gpu/run.py --only-sanitizer   nothing else
python tests/gpu/run.py --only-sanitizer --all-races   every test under racecheck: half an hour
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Files elsewhere whose tests use a GPU where TensorFlow finds one.
_FILES = (
  "tests/native_training/clip_ops_test.py",
  "tests/native_training/device_utils_test.py",
  "tests/native_training/distributed_ps_sync_test.py",
  "tests/native_training/distribution_ops_gather_test.py",
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

_SANITIZER_SECONDS = 120  # for each program of one tool; most end within a minute
_MEMCHECK_PARTS = {"gpu_table_test": 8}  # of programs that launch most; 1 of others
# Racecheck, which looks at the memory that lanes of a block share, takes half a minute for a dozen
# calls of a table. These filters have every kernel with such memory; `--all-races` has all tests.
_RACECHECK_FILTERS = {
  "gpu_table_test": (
    "*EqualsTheEngineAfterRandomCalls/1",
    "GpuTableOrderTest.*",
    "GpuTableGrowthTest.*",
    "*LetsInByChance",
  ),
  # The widest rows, in each of the three configurations.
  "layout_test": ("*/9:*/10:*/11-*FindsWhatTheEngineFinds/*",),
}
_ALL_RACES_SECONDS = 1800


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


@dataclasses.dataclass(frozen=True)
class _Sanitizing:
  """Tests of a program under one of compute-sanitizer's tools."""

  tool: str
  program: pathlib.Path
  tests: str = "*"
  part: int = 0
  parts: int = 1
  seconds: int = _SANITIZER_SECONDS

  @property
  def name(self) -> str:
    part = f" {self.part + 1}/{self.parts}" if self.parts > 1 else ""
    return f"{self.tool} {self.program.name} {self.tests}{part}"

  def run(self, sanitizer: str) -> tuple[str, str]:
    """Returns how it ended, "passed" or something else, and what it printed."""
    command = [sanitizer, "--tool", self.tool, "--error-exitcode", "1", str(self.program)]
    environment = {
      **_environment(),
      "MONOLITH_SANITIZED": "1",
      "GTEST_FILTER": self.tests,
      "GTEST_TOTAL_SHARDS": str(self.parts),
      "GTEST_SHARD_INDEX": str(self.part),
    }
    with tempfile.TemporaryFile() as output:
      # In a session of its own: the sanitizer starts the program, and both have to end.
      process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
      try:
        code = process.wait(self.seconds)
        ended = "passed" if code == 0 else f"FAILED with {code}"
      except subprocess.TimeoutExpired:
        ended = f"FAILED: not done after {self.seconds} s"
      finally:
        if process.poll() is None:
          os.killpg(process.pid, signal.SIGKILL)
          process.wait()
      output.seek(0)
      text = output.read().decode(errors="replace")
    passed = re.search(r"\[  PASSED  \] (\d+) test", text)
    if ended == "passed" and (passed is None or int(passed[1]) == 0):
      ended = "FAILED: no test ran"
    return ended, text


def _sanitizings(programs: list[pathlib.Path], all_races: bool) -> list[list[_Sanitizing]]:
  """Returns what runs together, one group after the other."""
  memcheck = [
    _Sanitizing("memcheck", program, part=part, parts=parts)
    for program in programs
    for parts in (_MEMCHECK_PARTS.get(program.name, 1),)
    for part in range(parts)
  ]
  if all_races:
    races = [_Sanitizing("racecheck", program, seconds=_ALL_RACES_SECONDS) for program in programs]
  else:
    races = [
      _Sanitizing("racecheck", program, tests)
      for program in programs
      for tests in _RACECHECK_FILTERS.get(program.name, ("*",))
    ]
  return [memcheck, races]


def _sanitize(all_races: bool) -> bool:
  """Runs the C++ tests under memcheck, then under racecheck, at sizes suited to them.

  What a tool has to do runs at a time: it waits more than it computes. Each program prints a line
  as it ends, and what it printed itself if it failed.
  """
  sanitizer = shutil.which("compute-sanitizer")
  if not sanitizer:
    print("error: compute-sanitizer is not on PATH", file=sys.stderr)
    return False
  programs = sorted((ROOT / "build/gpu-tests/bin").rglob("*_test"))
  good = bool(programs)
  for group in _sanitizings(programs, all_races):
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(group) or 1) as pool:
      ends = {pool.submit(run.run, sanitizer): run for run in group}
      for end in concurrent.futures.as_completed(ends):
        ended, output = end.result()
        print(f"== {ends[end].name}: {ended} ({time.monotonic() - start:.0f} s)", flush=True)
        if ended != "passed":
          print(output, flush=True)
          good = False
  return good


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--sanitizer", action="store_true", help="run compute-sanitizer, too")
  parser.add_argument("--only-sanitizer", action="store_true", help="run nothing else")
  parser.add_argument("--all-races", action="store_true", help="racecheck runs every test")
  options = parser.parse_args()
  if not _has_gpu():
    print("No GPU: TensorFlow finds none here, so the GPU tests are left out.")
    return 0
  good = _run(sys.executable, "tools/native_build.py", "--gpu-tests")
  if options.sanitizer or options.only_sanitizer:
    good &= _sanitize(options.all_races)
  if options.only_sanitizer:
    return 0 if good else 1
  good &= _run(sys.executable, "-m", "pytest", "--file-jobs", 4, "tests/gpu", *_FILES)
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
