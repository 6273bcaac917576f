"""Speed of a Keras model on our tables, against the same model in graph mode and in plain Keras.

  python benchmarks/keras.py [--rounds 7] [--steps 20]

The model and the data of `train.py`: 26 features with ids of a Zipf law over 10M, dimension 16,
batches of 4096, one dense tower; `fit` as a user calls it. All processes live at the same time, and
train in turn, a round each. It runs with the Keras that TensorFlow has, 2 or 3, and says which: the
examples per second of Keras 3 with TensorFlow 2.21 are to be at least 0.95 of those of Keras 2 with
2.15 on the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import tensorflow as tf
import train_process
from ratio_table import Row, print_rows
from train_rounds import Process, write_data

ROLES = ("monolith_keras", "local", "keras")


def measure(rounds: int, steps: int) -> list[Row]:
  """Returns the ratios, after printing the examples per second of each."""
  processes: dict[str, Process] = {}
  with tempfile.TemporaryDirectory() as folder:
    data = train_process.Data(folder)
    write_data(data)
    try:
      for role in ROLES:
        processes[role] = Process(role, data, steps)
        processes[role].answer()
      for _ in range(rounds):
        for process in processes.values():
          process.run_round()
    finally:
      for process in processes.values():
        process.stop()
  step = {role: statistics.median(p.seconds) / steps for role, p in processes.items()}
  cpu = {role: statistics.median(u.cpu for u in p.usages) / steps for role, p in processes.items()}
  for role, seconds in step.items():
    spread = max(processes[role].seconds) / min(processes[role].seconds)
    rate = data.batch / seconds
    print(
      f"{role:<15} {rate:>10,.0f} examples/s, slowest round {spread:.2f}x the fastest", flush=True
    )
  is_keras_3 = not issubclass(tf.keras.layers.Layer, tf.Module)
  print(f"TensorFlow {tf.__version__}, Keras {3 if is_keras_3 else 2}", flush=True)
  rows = []
  for peer_name, peer, wanted in (
    ("graph mode, local_train", "local", 0.9),
    (
      f"tf.keras, Hashing to {train_process.KERAS_BUCKETS:,} buckets",
      "keras",
      2.5 if is_keras_3 else 2.0,
    ),
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
