"""Replicas catch up with a row log and follow it: a real broker, a trained model, real servers.

Tests `replica`, `row_follower`, `dense_follower`, `log_follower`, `partition_reader`, `table_sink`,
and what `dense_sets` and `sync_state` write during training.
"""

import json
import os
import re
import shutil
import tempfile
import unittest

import numpy as np
import tensorflow as tf
from absl import flags

from monolith.native_training import multi_hash_table_ops
from monolith.realtime import broker, dense_sets, kafka_client, sync_state, topics
from tests.realtime import row_messages
from tests.serving import click_example, saved_models, server_process
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()

_MODEL = "clicks"
_TOPIC = topics.rows_topic(_MODEL)
_DENSE_TOPIC = topics.dense_topic(_MODEL)
_BIAS = -1.5


class ReplicaTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    if not flags.FLAGS.is_parsed():
      flags.FLAGS(["test"])
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.broker = broker.LocalBroker(f"{cls.folder}/broker")
    cls.addClassCleanup(cls.broker.stop)
    cls.broker.start()
    cls.broker.create_topics({_TOPIC: 1, _DENSE_TOPIC: 1})
    cls.producer = kafka_client.make_producer(cls.broker.servers)
    cls.seq = 0
    cls.send(*row_messages.make_batch(cls.next_seq(), {}))  # before the checkpoint
    cls.export = cls.train()
    cls.base = os.path.dirname(cls.export)
    cls.version = int(os.path.basename(cls.export))
    cls.tables = cls.list_tables(cls.export)
    cls.server = cls.start()

  @classmethod
  def train(cls):
    estimator = click_example.load().make_estimator(f"{cls.folder}/model")
    config = estimator._runner_conf
    config.enable_realtime_training = True
    config.realtime_kafka_servers = cls.broker.servers
    estimator.train(steps=10)
    return click_example._export(estimator)["entry"]

  @classmethod
  def list_tables(cls, export):
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
      tf.compat.v1.saved_model.load(session, ["serve"], export)
      (group,) = graph.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
      return dict(zip(group.table_names, group.get_table_dim_sizes()))

  @classmethod
  def start(cls):
    server = server_process.ServerProcess(
      f"--model_name={_MODEL}",
      f"--model_base_path={cls.base}",
      f"--row_log_servers={cls.broker.servers}",
      "--file_system_poll_wait_seconds=1",
    )
    cls.addClassCleanup(server.stop)
    server.wait_until_listening()
    server.wait_until_available(_MODEL)
    return server

  @classmethod
  def next_seq(cls):
    cls.seq += 1
    return cls.seq

  @classmethod
  def send(cls, *messages, topic=_TOPIC):
    for message in messages:
      cls.producer.produce(topic, message, partition=0)
    assert cls.producer.flush(60) == 0

  def make_rows(self, value, key, **fields):
    rows = {key: np.full(dim, value, np.float32) for dim in set(self.tables.values())}
    tables = {name: rows for name in self.tables}
    return row_messages.make_batch(self.next_seq(), tables, **fields)

  def ask(self, key, server=None):
    request = saved_models.make_request(_MODEL, user=np.array([key]), item=np.array([key]))
    (answer,) = (server or self.server).prediction.Predict(request).outputs.values()
    return float(tf.make_ndarray(answer).ravel()[0])

  def metric(self, name, server=None):
    text = (server or self.server).http("/monitoring/prometheus/metrics")[1].decode()
    found = re.search(rf'^{name}{{model="{_MODEL}",shard="0"}} (\S+)$', text, re.MULTILINE)
    return float(found.group(1)) if found else None

  def wait_for_seq(self, server=None):
    wait_until(lambda: self.metric("monolith_sync_seq", server) == self.seq)

  def test_exports_say_where_training_was_in_both_logs(self):
    rows = sync_state.load_export(self.export)
    dense = sync_state.load_export(self.export, sync_state.DENSE_STATE)

    self.assertEqual(rows, sync_state.SyncState(1, 1, _TOPIC, 0, 1))
    self.assertEqual((dense.topic, dense.partition), (_DENSE_TOPIC, 0))

  def test_rows_are_served_and_survive_the_replica(self):
    unknown = self.ask(1_000_001)
    self.send(*self.make_rows(0.25, 1_000_001, newest_event_time=1234))
    wait_until(lambda: self.ask(1_000_001) != unknown)
    self.wait_for_seq()
    known = self.ask(1_000_001)
    self.assertEqual(self.metric("monolith_sync_newest_event_time_seconds"), 1234)

    self.server.kill()
    type(self).server = self.start()  # AVAILABLE from its first answer on with the row

    self.assertEqual(self.ask(1_000_001), known)
    self.assertEqual(self.metric("monolith_sync_lag_messages"), 0)

  def test_repeated_torn_and_poisoned_messages_change_nothing(self):
    skipped = self.metric("monolith_sync_skipped_messages_total")
    good = self.make_rows(0.25, 1_000_002)
    self.send(*good)
    self.wait_for_seq()
    answer = self.ask(1_000_002)
    newer = self.make_rows(0.5, 1_000_002)
    self.send(*newer)
    wait_until(lambda: self.ask(1_000_002) != answer)
    answer = self.ask(1_000_002)
    torn = self.make_rows(0.75, 1_000_002, num_chunks=2)
    type(self).seq -= 1  # its writer died, and another one begins a new epoch
    rows = self.metric("monolith_sync_rows_total")

    self.send(*good, b"no batch", good[0][:-1] + b"x", torn[0], *newer)
    self.send(*row_messages.make_batch(self.next_seq(), {}))

    self.wait_for_seq()
    self.assertEqual(self.ask(1_000_002), answer)
    self.assertEqual(self.metric("monolith_sync_rows_total"), rows)
    self.assertEqual(self.metric("monolith_sync_skipped_messages_total"), skipped + 2)
    self.assertRegex(self.server.log(), rf"offset \d+ of {re.escape(_TOPIC)}\[0\]")

  def test_dense_variables_change_as_one_set(self):
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
      tf.compat.v1.saved_model.load(session, ["serve"], self.export)
      variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
      values = dense_sets.join_partitions(variables, session.run(variables))
    values = {name: value for name, value in values.items() if value.dtype == np.float32}
    values["global_step"] = np.array(1000, np.int64)
    (bias,) = [name for name in values if "bias" in name]
    values[bias] = np.float32(_BIAS)
    with_too_little = {name: value for name, value in values.items() if name != bias}
    skipped = self.metric("monolith_sync_dense_skipped_messages_total")

    self.send(
      *dense_sets.make_messages(_MODEL, 100, 1000, values),
      *dense_sets.make_messages(_MODEL, 100, 1001, with_too_little),
      topic=_DENSE_TOPIC,
    )

    wait_until(lambda: self.metric("monolith_sync_dense_version") == 1000)
    # Of ids that nobody knows, only the bias is left.
    self.assertAlmostEqual(self.ask(-77), 1 / (1 + np.exp(-_BIAS)), places=5)
    wait_until(lambda: self.metric("monolith_sync_dense_skipped_messages_total") == skipped + 1)
    self.assertIn(f"the set lacks '{bias}'", self.server.log())

  def test_position_that_is_gone_waits_for_a_newer_export(self):
    newest = max(int(name) for name in os.listdir(self.base) if name.isdigit())
    gone, good = newest + 1, newest + 2
    self.copy_export(gone, next_offset=1_000_000)

    wait_until(lambda: "is gone" in json.dumps(self.server.get(f"/v1/models/{_MODEL}")[1]))
    states = {
      s["version"]: s for s in self.server.get(f"/v1/models/{_MODEL}")[1]["model_version_status"]
    }
    self.assertEqual(states[str(gone)]["state"], "LOADING")
    self.assertIn("1000000 of rows.clicks[0] is gone", states[str(gone)]["status"]["error_message"])
    self.assertEqual(states[str(newest)]["state"], "AVAILABLE")
    self.ask(1)

    self.copy_export(good)
    self.server.wait_until_available(_MODEL, good)
    self.ask(1)
    self.wait_for_seq()

  def copy_export(self, version, **fields):
    target = f"{self.base}/{version}"
    shutil.copytree(self.export, f"{target}.tmp")
    path = f"{target}.tmp/assets.extra/{sync_state.SYNC_STATE}"
    with open(path) as file:
      state = json.load(file)
    with open(path, "w") as file:
      json.dump({**state, **fields}, file)
    os.rename(f"{target}.tmp", target)

  def test_broker_that_comes_back_is_followed_again(self):
    self.broker.kill_broker()
    self.ask(1)
    self.broker.start_broker()

    self.send(*self.make_rows(0.5, 1_000_003))

    self.wait_for_seq()


if __name__ == "__main__":
  unittest.main()
