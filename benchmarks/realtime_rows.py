"""Rows per second into and out of the row log, and what publishing every second costs training.

  python benchmarks/realtime_rows.py [--rows 5000000] [--touched 1000000] [--only log|training]

The first rows are CPU time of one thread, beside plain lookups and assigns of the same rows
(row_log_benchmark.cc). The last one trains a table with and without a publisher, alternately, on
librdkafka's own broker in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

_GOAL_ROWS = 1.0  # million per second
_GOAL_RATIO = 0.5
_GOAL_COST = 0.05
_BATCH = 4096
_IDS = 200_000
_DIM = 16


def measure_log(rows: int = 5_000_000, touched: int = 1_000_000, dim: int = _DIM) -> dict:
  """Returns millions of rows per second: lookup, assign, to_log, from_log."""
  import native_build

  programs = native_build.build_cpp_programs("benchmarks")
  program = next(p for p in programs if p.endswith("/row_log_benchmark"))
  command = [str(ROOT / program), str(rows), str(touched), str(dim)]
  return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_training(seconds: float = 5.0, repeats: int = 5) -> tuple[float, float]:
  """Returns examples per second without and with a publisher that publishes every second."""
  import tensorflow as tf

  from monolith.native_training import entry, hash_table_ops
  from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
  from monolith.row_log import row_log
  from monolith.row_log.row_publisher import RowPublisher
  from tests.native_training.data.mock_kafka import MockKafka

  tf.compat.v1.disable_eager_execution()
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.cuckoo.SetInParent()
  config.entry_config.segments.append(
    entry.CombineAsSegment(
      _DIM, entry.RandomUniformInitializer(), entry.AdagradOptimizer(), entry.Fp32Compressor()
    )
  )
  client = row_log.row_log_client()
  table = hash_table_ops.hash_table_from_config(
    entry.HashTableConfigInstance(config, [0.1]), name_suffix="t", sync_client=client
  )
  # A small dense model beside the table, as training has.
  ids = tf.random.uniform([_BATCH], maxval=_IDS, dtype=tf.int64)
  weights = tf.compat.v1.get_variable("w", [_DIM, 256])
  rows = table.lookup(ids)
  loss = tf.reduce_mean(tf.square(tf.reduce_sum(tf.nn.relu(rows @ weights), axis=1) - 1.0))
  gradients, weight_gradients = tf.gradients(loss, [rows, weights])
  train = tf.group(
    table.apply_gradients(ids, gradients, tf.constant(0, tf.int64)).as_op(),
    weights.assign_sub(0.01 * weight_gradients),
  )
  writer = row_log.RowLogWriter(client)
  with MockKafka() as kafka, tf.compat.v1.Session() as session:
    kafka.create_topic("rows.m")
    session.run(tf.compat.v1.global_variables_initializer())
    writer.bind(session)

    def run() -> float:
      steps, start = 0, time.monotonic()
      while time.monotonic() - start < seconds:
        session.run(train)
        steps += 1
      return steps * _BATCH / (time.monotonic() - start)

    run()
    writer.mark("ready", [0, 0, 0, -1])
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
      speeds[False].append(run())
      publisher = RowPublisher(writer, kafka.servers, "m", interval_secs=1.0).start()
      publisher.flush(60)
      speeds[True].append(run())
      publisher.stop()
  return statistics.median(speeds[False]), statistics.median(speeds[True])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", type=int, default=5_000_000, help="rows in the tables")
  parser.add_argument("--touched", type=int, default=1_000_000, help="rows in a batch")
  parser.add_argument("--only", choices=("log", "training"))
  options = parser.parse_args()
  if options.only != "training":
    speeds = measure_log(options.rows, options.touched)
    for name, peer in (("to_log", "lookup"), ("from_log", "assign")):
      ratio = speeds[name] / speeds[peer]
      print(
        f"{name}: {speeds[name]:.2f} M rows/s (goal {_GOAL_ROWS}), {ratio:.2f} of {peer} "
        f"{speeds[peer]:.2f} (goal {_GOAL_RATIO})"
      )
  if options.only != "log":
    without, with_log = measure_training()
    print(
      f"publishing every second: {with_log:.0f} of {without:.0f} examples/s, cost "
      f"{1 - with_log / without:.1%} (goal {_GOAL_COST:.0%})"
    )


if __name__ == "__main__":
  main()
