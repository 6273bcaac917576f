"""Speed of whole training steps, against keras, and of its start, against importing TensorFlow.

  python benchmarks/train.py [--rounds 7] [--steps 20] [--skip-start]
  python benchmarks/train.py --cores 1 4 16 [--where] [--roles local monolith_keras tuned_keras]
  python benchmarks/train.py --roles local --jobs 1+1 4+4

26 features with ids of a Zipf law over 10M, dimension 16, batches of 4096, one dense tower, as in
`train_process.py`. All processes live at the same time, and train in turn, a round each. `--cores`
and `--where` measure other numbers of cores instead, and where the time goes (`train_cores.py`).
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import train_cores
import train_process
from ratio_table import Row, print_rows, record
from train_rounds import Process, write_data

FOLDER = pathlib.Path(__file__).resolve().parent

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


def measure_training(rounds: int, steps: int) -> list[Row]:
  processes: dict[str, Process] = {}
  with tempfile.TemporaryDirectory() as folder:
    data = train_process.Data(folder)
    write_data(data)
    try:
      for role in ("local", "keras", "tuned_keras", "ps", "worker"):
        processes[role] = Process(role, data, steps)
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
  cpu = {role: statistics.median(u.cpu for u in p.usages) / steps for role, p in processes.items()}
  for role, seconds in step.items():
    print(f"{role:<12} {data.batch / seconds:>10,.0f} examples/s", flush=True)
  buckets = f"{train_process.KERAS_BUCKETS:,} buckets"
  rows = []
  for name, role, peer_name, peer, wanted in (
    ("local training", "local", f"tf.keras, Hashing to {buckets}", "keras", 3.5),
    ("local training", "local", f"tf.keras, tuned, {buckets}", "tuned_keras", 2.2),
    ("1 server + 1 worker", "worker", "local training", "local", 0.8),
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
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--steps", type=int, default=20, help="of a round")
  parser.add_argument("--skip-start", action="store_true", help="measure training steps only")
  train_cores.add_arguments(parser)
  args = parser.parse_args()
  start = time.perf_counter()
  if args.where or args.cores or args.jobs:
    train_cores.measure(args)
  else:
    rows = measure_training(args.rounds, args.steps)
    print_rows(rows)
    if not args.skip_start:
      measure_start(3)
  print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
  main()
