"""A trained model, a real broker with its logs, and servers that follow them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from examples.realtime import broker
from monolith.native_training import multi_hash_table_ops
from monolith.row_log import kafka_client, partition_reader, topics
from tests.realtime import row_messages
from tests.serving import click_example, saved_models, server_process
from tests.wait_until import wait_until

MODEL = "clicks"
TOPIC = topics.rows_topic(MODEL)
DENSE_TOPIC = topics.dense_topic(MODEL)


def require_java() -> None:
  """Skips the test where brokers cannot run; on CI that is a failure."""
  if shutil.which("java"):
    return
  message = "needs Java for a Kafka broker: apt-get install default-jre-headless"
  if os.environ.get("CI") == "true":
    pytest.fail(message)
  pytest.skip(message)


class FollowedModel:
  """The model, with a writer of its row log that goes on where training has ended.

  Args:
    folder: where everything goes.

  Attributes:
    broker: runs until `close`.
    epoch, seq: the last batch that was made.
    end: where the row log ended when training had.
    export: folder of the exported version.
    base: folder of all versions.
    tables: width of each table by name.
  """

  def __init__(self, folder: str):
    if not flags.FLAGS.is_parsed():
      flags.FLAGS(["test"])
    self.broker = broker.LocalBroker(f"{folder}/broker")
    self.epoch, self.seq = 1, 0
    self._servers: list[server_process.ServerProcess] = []
    try:
      self.broker.start()
      self.broker.create_topics({TOPIC: 1, DENSE_TOPIC: 1})
      self._producer = kafka_client.make_producer(self.broker.servers)
      self.send(*self.make_batch({}))  # before the checkpoint
      self.export = self._train(f"{folder}/model")
      # The writer of the log has ended meanwhile.
      (self.end,) = partition_reader.read_log_ends(self.broker.servers, TOPIC, 1)
      self.epoch = self.end.epoch + 1
    except BaseException:
      self.close()
      raise
    self.base = os.path.dirname(self.export)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
      tf.compat.v1.saved_model.load(session, ["serve"], self.export)
      (group,) = graph.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
      self.tables = dict(zip(group.table_names, group.get_table_dim_sizes()))

  def close(self) -> None:
    """Ends all processes."""
    for server in self._servers:
      server.stop()
    self.broker.stop()

  def start_server(self, *flags: str) -> server_process.ServerProcess:
    """Returns a server, with `flags` beside its own, that does not answer yet."""
    server = server_process.ServerProcess(
      f"--model_name={MODEL}",
      f"--model_base_path={self.base}",
      f"--row_log_servers={self.broker.servers}",
      "--file_system_poll_wait_seconds=1",
      *flags,
    )
    self._servers.append(server)
    return server

  def make_batch(
    self, tables: Mapping[str, Mapping[int, np.ndarray]], **fields: Any
  ) -> list[bytes]:
    """Returns the messages of the next batch."""
    self.seq += 1
    return row_messages.make_batch(self.seq, tables, epoch=self.epoch, **fields)

  def make_rows(self, value: float, key: int, **fields: Any) -> list[bytes]:
    """Returns the next batch, with one row in each table."""
    tables = {name: {key: np.full(dim, value, np.float32)} for name, dim in self.tables.items()}
    return self.make_batch(tables, **fields)

  def send(self, *messages: bytes, topic: str = TOPIC) -> None:
    """Writes messages to a log, and waits until the broker has them."""
    for message in messages:
      self._producer.produce(topic, message, partition=0)
    assert self._producer.flush(60) == 0

  def wait_for_seq(self, server: server_process.ServerProcess) -> None:
    """Returns when a server has applied the last batch."""
    wait_until(lambda: get_metric(server, "monolith_sync_seq") == self.seq)

  def _train(self, folder: str) -> str:
    estimator = click_example.load().make_estimator(folder)
    config = estimator._runner_conf
    config.enable_realtime_training = True
    config.realtime_kafka_servers = self.broker.servers
    estimator.train(steps=10)
    return click_example._export(estimator)["entry"]


def ask(server: server_process.ServerProcess, key: int) -> float:
  """Returns the answer for a user and an item of that id."""
  request = saved_models.make_request(MODEL, user=np.array([key]), item=np.array([key]))
  (answer,) = server.prediction.Predict(request, timeout=30).outputs.values()
  return float(tf.make_ndarray(answer).ravel()[0])


def get_metric(server: server_process.ServerProcess, name: str) -> float | None:
  """Returns a figure of a server's replica, None if it has none."""
  text = server.http("/monitoring/prometheus/metrics")[1].decode()
  found = re.search(rf'^{name}{{model="{MODEL}",shard="0"}} (\S+)$', text, re.MULTILINE)
  return float(found.group(1)) if found else None
