"""Speed of whole training steps, against keras, and of its start, against importing TensorFlow.

  python benchmarks/train.py [--rounds 7] [--steps 20] [--skip-start]

26 features with ids of a Zipf law over 10M, dimension 16, batches of 4096, one dense tower, as in
`train_process.py`. All processes live at the same time, and train in turn, a round each.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import train_process
from ratio_table import Row, print_rows, record

FOLDER = pathlib.Path(__file__).resolve().parent
NUM_IDS = 10_000_000
# All are seen once before the first round, so that rows are updated and few are created, as in a
# training run that has gone on for a while.
NUM_BATCHES = 48

_FIRST_STEP = """
import time
start = time.perf_counter()
import monolith
import os, tempfile
from monolith.native_training import cpu_training
from monolith.native_training.demos import models as demo_models
import tensorflow as tf

class Hook(tf.compat.v1.train.SessionRunHook):
  def after_run(self, run_context, run_values):
    print(time.perf_counter() - start, flush=True)
    os._exit(0)

tf.compat.v1.disable_eager_execution()
params = demo_models.FFMTask.params()
params.name = "test_ffm_model"
conf = cpu_training.CpuTrainingConfig(embedding_prefetch_capacity=1, enable_embedding_postpush=True)
with tempfile.TemporaryDirectory() as folder:
  cpu_training.local_train_internal(params, conf, folder, 1, user_hooks=[Hook()])
"""
_IMPORT = """
import time
start = time.perf_counter()
import tensorflow
print(time.perf_counter() - start)
"""


class Process:
  """A child that trains in rounds."""

  def __init__(self, role: str, folder: str, steps: int):
    self.role = role
    self._log = open(os.path.join(folder, f"{role}.log"), "w+")
    self._process = subprocess.Popen(
      [sys.executable, FOLDER / "train_process.py", role, folder]
      + [f"--warm_up={NUM_BATCHES}", f"--steps={steps}"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      env={**os.environ, "CLOUDNATIVE_INET_ADDR": "127.0.0.1"},
    )
    self.seconds: list[float] = []
    self.cpu_seconds: list[float] = []

  def cpu_time(self) -> float:
    """Seconds of CPU time so far, of all threads."""
    fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  def answer(self) -> str:
    line = self._process.stdout.readline()
    if not line:
      self._log.seek(0)
      raise RuntimeError(f"{self.role} ended:\n{self._log.read()[-5000:]}")
    return line.strip()

  def run_round(self, helpers: Sequence[Process] = ()) -> None:
    """Trains one round; the CPU time is that of this process and of `helpers`."""
    before = sum(process.cpu_time() for process in (self, *helpers))
    print("", file=self._process.stdin, flush=True)
    self.seconds.append(float(self.answer()))
    self.cpu_seconds.append(sum(process.cpu_time() for process in (self, *helpers)) - before)

  def stop(self) -> None:
    self._process.stdin.close()
    self._process.kill()
    self._process.wait()


def write_data(folder: str) -> None:
  """Writes batches of ids, whose popular ones are spread over all int63, and random labels."""
  rng = np.random.default_rng(1)
  exponent = 1.05 - 1
  top = 1 - float(NUM_IDS + 1) ** -exponent
  with (
    open(os.path.join(folder, train_process.IDS_FILE), "wb") as ids_file,
    open(os.path.join(folder, train_process.LABELS_FILE), "wb") as labels_file,
  ):
    for _ in range(NUM_BATCHES):
      # As in embedding_table.py: the continuous law, inverted.
      uniform = rng.random([train_process.NUM_FEATURES, train_process.BATCH])
      ranks = ((1 - uniform * top) ** (-1 / exponent)).astype(np.uint64)
      ids = (ranks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(1)
      ids_file.write(ids.astype(np.int64).tobytes())
      labels = rng.integers(0, 2, train_process.BATCH)
      labels_file.write(labels.astype(np.float32).tobytes())


def measure_training(rounds: int, steps: int) -> list[Row]:
  processes: dict[str, Process] = {}
  with tempfile.TemporaryDirectory() as folder:
    write_data(folder)
    try:
      for role in ("local", "keras", "tuned_keras", "ps", "worker"):
        processes[role] = Process(role, folder, steps)
        if role != "ps":
          processes[role].answer()
      server = processes.pop("ps")
      try:
        for _ in range(rounds):
          for role, process in processes.items():
            process.run_round([server] if role == "worker" else [])
      finally:
        server.stop()
    finally:
      for process in processes.values():
        process.stop()
  step = {role: statistics.median(p.seconds) / steps for role, p in processes.items()}
  cpu = {role: statistics.median(p.cpu_seconds) / steps for role, p in processes.items()}
  for role, seconds in step.items():
    print(f"{role:<12} {train_process.BATCH / seconds:>10,.0f} examples/s", flush=True)
  buckets = f"{train_process.KERAS_BUCKETS:,} buckets"
  rows = []
  for name, role, peer_name, peer, wanted in (
    ("local training", "local", f"tf.keras, Hashing to {buckets}", "keras", 2.0),
    ("local training", "local", f"tf.keras, tuned, {buckets}", "tuned_keras", None),
    ("1 server + 1 worker", "worker", "local training", "local", 0.5),
  ):
    rows.append(Row(f"{name}, a step", peer_name, step[role], step[peer], wanted))
    rows.append(Row(f"{name}, CPU time of a step", "", cpu[role], cpu[peer], None))
  return rows


def measure_start(rounds: int) -> None:
  seconds: dict[str, list[float]] = {_FIRST_STEP: [], _IMPORT: []}
  for _ in range(rounds):
    for script, times in seconds.items():
      result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=FOLDER.parent,
      )
      times.append(float(result.stdout.split()[-1]))
  ours, peer = (statistics.median(times) for times in seconds.values())
  above = "" if ours < 3 * peer else "  ABOVE"
  print(
    f"\nimport monolith to the first step of the FFM demo: {ours:.2f} s; import tensorflow: "
    f"{peer:.2f} s; {ours / peer:.2f}x, want under 3x{above}"
  )
  record([("import monolith to the first step", "import tensorflow", ours / peer)])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--steps", type=int, default=20, help="of a round")
  parser.add_argument("--skip-start", action="store_true", help="measure training steps only")
  args = parser.parse_args()
  start = time.perf_counter()
  rows = measure_training(args.rounds, args.steps)
  print_rows(rows)
  if not args.skip_start:
    measure_start(3)
  print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
  main()
