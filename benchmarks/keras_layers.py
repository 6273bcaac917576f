"""Speed of a Keras model on our tables, against the same model in graph mode and in plain Keras.

  python benchmarks/keras.py [--rounds 7] [--steps 20]

The model and the data of `train.py`: 26 features with ids of a Zipf law over 10M, dimension 16,
batches of 4096, one dense tower; `fit` as a user calls it. All processes live at the same time, and
train in turn, a round each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import train
import train_process
from ratio_table import Row, print_rows

ROLES = ("monolith_keras", "local", "keras")


def measure(rounds: int, steps: int) -> list[Row]:
  """Returns the ratios, after printing the examples per second of each."""
  processes: dict[str, train.Process] = {}
  with tempfile.TemporaryDirectory() as folder:
    train.write_data(folder)
    try:
      for role in ROLES:
        processes[role] = train.Process(role, folder, steps)
        processes[role].answer()
      for _ in range(rounds):
        for process in processes.values():
          process.run_round()
    finally:
      for process in processes.values():
        process.stop()
  step = {role: statistics.median(p.seconds) / steps for role, p in processes.items()}
  cpu = {role: statistics.median(p.cpu_seconds) / steps for role, p in processes.items()}
  for role, seconds in step.items():
    spread = max(processes[role].seconds) / min(processes[role].seconds)
    rate = train_process.BATCH / seconds
    print(
      f"{role:<15} {rate:>10,.0f} examples/s, slowest round {spread:.2f}x the fastest", flush=True
    )
  rows = []
  for peer_name, peer, wanted in (
    ("graph mode, local_train", "local", 0.9),
    (f"tf.keras, Hashing to {train_process.KERAS_BUCKETS:,} buckets", "keras", 2.0),
  ):
    rows.append(Row("fit, a step", peer_name, step["monolith_keras"], step[peer], wanted))
    rows.append(Row("fit, CPU time of a step", "", cpu["monolith_keras"], cpu[peer], None))
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--steps", type=int, default=20, help="of a round")
  args = parser.parse_args()
  start = time.perf_counter()
  print_rows(measure(args.rounds, args.steps))
  print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
  main()
