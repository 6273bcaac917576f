"""Restart of a serving replica that follows a row log, and its answers while rows are applied.

  python benchmarks/realtime_replica.py [--rows 1000000] [--log_secs 600] [--rows_per_sec 1000000]
      [--crowded]

A broker, one server and its client share the machine. The model is
that of `serving.py`, with a million rows of dimension 16; the log has a batch of 5,000 rows for
each second. While answers are timed, with and without rows being applied, the broker and the writer
of the log run only where a core is idle, as if on machines of their own; with `--crowded` they
compete with the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import flags

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import serving as serving_benchmark  # noqa: E402

from examples.realtime import broker  # noqa: E402
from monolith.estimator import Estimator, RunConfig  # noqa: E402
from monolith.native_training import multi_hash_table_ops  # noqa: E402
from monolith.row_log import kafka_client, sync_state, topics  # noqa: E402
from tests.realtime import row_messages  # noqa: E402
from tests.serving import server_process  # noqa: E402

_MODEL = "m"
_BATCH_ROWS = 5_000
# About as many as a message can hold.
_MESSAGE_ROWS = 12_000
_RESTART_GOAL_SECS = 15.0
_LATENCY_GOAL = 2.0
# Rows that have to be applied for each that was wanted.
_APPLIED_SHARE = 0.9


class Model(serving_benchmark.Model):
  """Sees every id once, `num_ids` of each feature."""

  num_ids = 100_000

  def input_fn(self, mode):
    def to_features(index):
      ids = serving_benchmark._to_ragged(index)
      label = tf.cast(index % 2, tf.float32)
      return {**dict.fromkeys(serving_benchmark.NAMES, ids), "label": label}

    return tf.data.Dataset.range(self.num_ids).batch(5_000).map(to_features)


def export(folder: str, num_rows: int) -> str:
  """Returns the folder of an exported model with this many rows."""
  Model.num_ids = num_rows // len(serving_benchmark.NAMES)
  config = RunConfig(is_local=True, model_dir=folder).to_runner_config()
  config.model_name = _MODEL
  estimator = Estimator(Model(), config)
  estimator.train()
  return tf.compat.as_str(estimator.export_saved_model()["entry"])


def list_tables(path: str) -> dict[str, int]:
  """Returns the width of each table of an export by its name."""
  with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
    tf.compat.v1.saved_model.load(session, ["serve"], path)
    groups = graph.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
    return {
      name: dim
      for group in groups
      for name, dim in zip(group.table_names, group.get_table_dim_sizes())
    }


def make_message(seq: int, tables: dict[str, int], num_rows: int) -> bytes:
  """Returns a batch with rows of ids that the model has."""
  rng = np.random.default_rng(seq)
  rows = {}
  for name, dim in tables.items():
    ids = rng.integers(Model.num_ids, size=num_rows // len(tables))
    rows[name] = dict(zip(ids.tolist(), rng.random((len(ids), dim), np.float32)))
  (message,) = row_messages.make_batch(seq, rows, model=_MODEL)
  return message


def cpu_secs(server: server_process.ServerProcess) -> float:
  """Returns the processor time that a server has used, which does not depend on its neighbours."""
  fields = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(base: str, servers: str) -> tuple[server_process.ServerProcess, float]:
  """Returns a server, and how long it took until it answered."""
  begin = time.perf_counter()
  server = server_process.ServerProcess(
    f"--model_name={_MODEL}",
    f"--model_base_path={base}",
    f"--row_log_servers={servers}",
  )
  server.wait_until_listening().wait_until_available(_MODEL)
  return server, time.perf_counter() - begin


def give_way(pid: int) -> None:
  """Lets all threads of a process run only on cores that nobody else wants."""
  for task in os.listdir(f"/proc/{pid}/task"):
    os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))


def send(servers: str, messages: Sequence[bytes], rows_per_sec: int, crowded: bool) -> None:
  """Appends messages to the log at a rate; the body of a process."""
  if not crowded:
    give_way(os.getpid())
  topic = topics.rows_topic(_MODEL)
  producer = kafka_client.make_producer(servers)
  begin = time.monotonic()
  for index, message in enumerate(messages):
    producer.produce(topic, message, partition=0)
    producer.poll(0)
    ahead = index * _MESSAGE_ROWS / rows_per_sec - (time.monotonic() - begin)
    time.sleep(max(0.0, ahead))
  producer.flush()


def applied_rows(server: server_process.ServerProcess) -> float:
  """Returns how many rows a server has applied."""
  text = server.http("/monitoring/prometheus/metrics")[1].decode()
  (line,) = (line for line in text.splitlines() if line.startswith("monolith_sync_rows_total{"))
  return float(line.rpartition(" ")[2])


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--rows", type=int, default=1_000_000)
  parser.add_argument("--log_secs", type=int, default=600)
  parser.add_argument("--rows_per_sec", type=int, default=1_000_000)
  parser.add_argument("--busy_secs", type=int, default=5)
  parser.add_argument("--requests", type=int, default=2_000)
  parser.add_argument("--crowded", action="store_true", help="broker and writer take cores, too")
  options = parser.parse_args()
  flags.FLAGS(sys.argv[:1])
  tf.compat.v1.disable_eager_execution()
  with tempfile.TemporaryDirectory() as folder:
    kafka = broker.LocalBroker(f"{folder}/broker")
    kafka.start()
    try:
      return measure(kafka, folder, options)
    finally:
      kafka.stop()


def measure(kafka: broker.LocalBroker, folder: str, options: argparse.Namespace) -> int:
  """Prints the figures; returns 1 if a goal is missed."""
  topic = topics.rows_topic(_MODEL)
  kafka.create_topics({topic: 1})
  path = export(f"{folder}/model", options.rows)
  os.makedirs(f"{path}/assets.extra", exist_ok=True)
  state = sync_state.SyncState(0, 0, topic, 0, 0)
  pathlib.Path(path, "assets.extra", sync_state.SYNC_STATE).write_text(state.to_json())
  tables = list_tables(path)
  producer = kafka_client.make_producer(kafka.servers)
  for seq in range(1, options.log_secs + 1):
    producer.produce(topic, make_message(seq, tables, _BATCH_ROWS), partition=0)
    producer.poll(0)
  producer.flush()
  figures: dict[str, float] = {}
  server, figures["restart_secs"] = start(os.path.dirname(path), kafka.servers)
  server.kill()
  server, again = start(os.path.dirname(path), kafka.servers)
  figures["restart_secs"] = min(figures["restart_secs"], again)
  figures["restart_cpu_secs"] = cpu_secs(server)
  if not options.crowded:
    for pid in kafka.pids().values():
      give_way(pid)
  request = serving_benchmark.make_request(_MODEL, 1)
  quiet = serving_benchmark.latencies(server, request, options.requests)
  num_messages = options.rows_per_sec * options.busy_secs // _MESSAGE_ROWS
  messages = [
    make_message(options.log_secs + 1 + i, tables, _MESSAGE_ROWS) for i in range(num_messages)
  ]

  # A process of its own: a thread would hold the lock of the interpreter that times the answers.
  sender = multiprocessing.get_context("fork").Process(
    target=send, args=(kafka.servers, messages, options.rows_per_sec, options.crowded), daemon=True
  )
  before, begin = applied_rows(server), time.monotonic()
  sender.start()
  busy = []
  while sender.is_alive():
    busy += serving_benchmark.latencies(server, request, 50)
  figures["applied_rows_per_sec"] = (applied_rows(server) - before) / (time.monotonic() - begin)
  server.stop()
  for name, seconds in (("quiet", quiet), ("busy", busy)):
    figures[f"{name}_p50_ms"] = 1e3 * statistics.median(seconds)
    figures[f"{name}_p99_ms"] = 1e3 * float(np.quantile(seconds, 0.99))
  figures["p99_ratio"] = figures["busy_p99_ms"] / figures["quiet_p99_ms"]
  print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2))
  missed = [
    f"{name} is {figures[name]:.2f}, the goal {goal}"
    for name, goal in (("restart_secs", _RESTART_GOAL_SECS), ("p99_ratio", _LATENCY_GOAL))
    if figures[name] > goal
  ]
  if figures["applied_rows_per_sec"] < _APPLIED_SHARE * options.rows_per_sec:
    # Other programs took the cores from the broker and the writer: the answers say nothing.
    missed.append(
      f"{figures['applied_rows_per_sec']:,.0f} rows/s were applied, want {options.rows_per_sec:,}"
    )
  for line in missed:
    print(line)
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
