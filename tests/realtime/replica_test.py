"""Replicas catch up with a row log and follow it: a real broker, a trained model, real servers.

Tests what `row_log/partition_reader.py`, `row_log/dense_sets.py` and `row_log/sync_state.py` do in
training, too.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
import unittest

import numpy as np
import pytest
import tensorflow as tf

from monolith.row_log import dense_sets, partition_reader, sync_state
from tests.realtime import followed_model, table_sink
from tests.realtime.followed_model import DENSE_TOPIC, MODEL, TOPIC
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_model: followed_model.FollowedModel


_resources = contextlib.ExitStack()  # of the module; pytest runs no cleanups of modules


def setUpModule():
  global _model
  followed_model.require_java()
  folder = _resources.enter_context(tempfile.TemporaryDirectory())
  _model = followed_model.FollowedModel(folder)
  _resources.callback(_model.close)


def tearDownModule():
  _resources.close()


class ReplicaTest(unittest.TestCase):
  """A client's view of a replica."""

  # Beyond the ids and steps of training.
  first_key = 1_000_000
  first_step = 1000

  @classmethod
  def setUpClass(cls):
    cls.model = _model
    cls.start()
    cls.addClassCleanup(lambda: cls.server.stop())

  @classmethod
  def start(cls):
    cls.server = cls.model.start_server().wait_until_listening()
    cls.server.wait_until_available(MODEL)

  def ask(self, key):
    return followed_model.ask(self.server, key)

  def metric(self, name):
    return followed_model.get_metric(self.server, name)

  def wait_for_seq(self):
    self.model.wait_for_seq(self.server)

  def test_rows_are_served_and_survive_the_replica(self):
    key = self.first_key + 1
    unknown = self.ask(key)
    newest = int(time.time()) + 1000  # newer than what training has sent
    self.model.send(*self.model.make_rows(0.25, key, newest_event_time=newest))
    wait_until(lambda: self.ask(key) != unknown)
    self.wait_for_seq()
    known = self.ask(key)
    self.assertEqual(self.metric("monolith_sync_newest_event_time_seconds"), newest)

    self.server.kill()
    self.start()  # AVAILABLE from its first answer on with the row

    self.assertEqual(self.ask(key), known)
    self.assertEqual(self.metric("monolith_sync_lag_messages"), 0)

  def test_repeated_torn_and_poisoned_messages_change_nothing(self):
    skipped = self.metric("monolith_sync_skipped_messages_total")
    key = self.first_key + 2
    good = self.model.make_rows(0.25, key)
    self.model.send(*good)
    self.wait_for_seq()
    answer = self.ask(key)
    newer = self.model.make_rows(0.5, key)
    self.model.send(*newer)
    self.wait_for_seq()
    self.assertNotEqual(self.ask(key), answer)
    answer = self.ask(key)
    torn = self.model.make_rows(0.75, key, num_chunks=2)
    self.model.epoch += 1  # its writer died, and another one begins
    rows = self.metric("monolith_sync_rows_total")

    self.model.send(*good, b"no batch", good[0][:-1] + b"x", torn[0], *newer)
    self.model.send(*self.model.make_batch({}))

    self.wait_for_seq()
    self.assertEqual(self.ask(key), answer)
    self.assertEqual(self.metric("monolith_sync_rows_total"), rows)
    self.assertEqual(self.metric("monolith_sync_skipped_messages_total"), skipped + 2)
    self.assertRegex(self.server.log(), rf"offset \d+ of {re.escape(TOPIC)}\[0\]")

  def test_tables_are_compared_with_those_of_the_writer(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      # A table that was restored from the same rows and reads the same log.
      tf.compat.v1.saved_model.load(session, ["serve"], self.model.export)
      state = sync_state.load_export(self.model.export)
      tables = table_sink.TableSink(session, state)
      reader = partition_reader.PartitionReader(self.model.broker.servers, TOPIC, 0)
      self.addCleanup(reader.close)
      reader.seek(state.next_offset)
      end = reader.bounds()[1]
      while end > state.next_offset:
        messages, met = reader.read(100, 1)
        for offset, message in messages:
          with contextlib.suppress(tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            tables.apply(message)
          met = max(met, offset + 1)
        if met >= end:
          break
      for _ in range(2):
        batch = self.model.make_rows(0.125, self.first_key + 1000 + self.model.seq)
        tables.apply(batch[0])
        self.model.send(*batch)
      right = tables.digests()
    self.assertEqual(sorted(right), sorted(self.model.tables))
    wrong = {name: (digest ^ 1, num_rows) for name, (digest, num_rows) in right.items()}

    self.model.send(*self.model.make_batch({}, digests=right))
    self.wait_for_seq()
    # The comparison's outcome is told after the number of the batch.
    wait_until(lambda: self.metric("monolith_sync_digest_ok") == 1)
    self.model.send(*self.model.make_batch({}, digests=wrong))
    self.wait_for_seq()
    wait_until(lambda: self.metric("monolith_sync_digest_ok") == 0)
    for name, (digest, num_rows) in right.items():
      told = f"digest {digest:016x} of {num_rows} rows, want {digest ^ 1:016x}"
      wait_until(lambda told=told: told in self.server.log())
      self.assertIn(f"Table {name} differs", self.server.log())

  def test_dense_variables_change_as_one_set(self):
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
      tf.compat.v1.saved_model.load(session, ["serve"], self.model.export)
      variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
      values = dense_sets.join_partitions(variables, session.run(variables))
    values = {name: value for name, value in values.items() if value.dtype == np.float32}
    step = self.first_step
    values["global_step"] = np.array(step, np.int64)
    (bias,) = (name for name in values if "bias" in name)
    values[bias] = np.float32(-step / 1000)
    with_too_little = {name: value for name, value in values.items() if name != bias}
    skipped = self.metric("monolith_sync_dense_skipped_messages_total")

    self.model.send(
      *dense_sets.make_messages(MODEL, 100, step, values),
      *dense_sets.make_messages(MODEL, 100, step + 1, with_too_little),
      topic=DENSE_TOPIC,
    )

    wait_until(lambda: self.metric("monolith_sync_dense_version") == step)
    # Only the bias is left of ids that nobody knows.
    self.assertAlmostEqual(self.ask(-77), 1 / (1 + np.exp(step / 1000)), places=5)
    wait_until(lambda: self.metric("monolith_sync_dense_skipped_messages_total") == skipped + 1)
    # Counted first, said then.
    wait_until(lambda: f"the set lacks '{bias}'" in self.server.log())

  def test_position_that_is_gone_waits_for_a_newer_export(self):
    newest = max(int(name) for name in os.listdir(self.model.base) if name.isdigit())
    gone, good = newest + 1, newest + 2
    self.copy_export(gone, next_offset=1_000_000)

    wait_until(lambda: "is gone" in json.dumps(self.server.get(f"/v1/models/{MODEL}")[1]))
    states = {
      s["version"]: s for s in self.server.get(f"/v1/models/{MODEL}")[1]["model_version_status"]
    }
    self.assertEqual(states[str(gone)]["state"], "LOADING")
    self.assertIn("1000000 of rows.clicks[0] is gone", states[str(gone)]["status"]["error_message"])
    self.assertEqual(states[str(newest)]["state"], "AVAILABLE")
    self.ask(1)

    self.copy_export(good)
    self.server.wait_until_available(MODEL, good)
    self.ask(1)
    self.wait_for_seq()

  def copy_export(self, version, **fields):
    target = f"{self.model.base}/{version}"
    shutil.copytree(self.model.export, f"{target}.tmp")
    path = f"{target}.tmp/assets.extra/{sync_state.SYNC_STATE}"
    with open(path) as file:
      state = json.load(file)
    with open(path, "w") as file:
      json.dump({**state, **fields}, file)
    os.rename(f"{target}.tmp", target)

  def test_broker_that_comes_back_is_followed_again(self):
    self.model.broker.kill_broker()
    self.ask(1)
    self.model.broker.start_broker()

    self.model.send(*self.model.make_rows(0.5, self.first_key + 3))

    self.wait_for_seq()

  def test_a_flag_lets_changes_wait(self):
    slow = self.model.start_server("--row_log_interval_secs=1000")
    self.addCleanup(slow.stop)
    slow.wait_until_listening().wait_until_available(MODEL)

    def waits():
      """Whether it leaves batches alone that the other server has; not before it is idle."""
      before = followed_model.get_metric(slow, "monolith_sync_seq")
      for _ in range(3):
        self.model.send(*self.model.make_batch({}))
        self.wait_for_seq()
      return followed_model.get_metric(slow, "monolith_sync_seq") == before

    wait_until(waits)

  def test_a_damaged_position_is_refused_with_its_path(self):
    newest = max(int(name) for name in os.listdir(self.model.base) if name.isdigit())
    self.copy_export(newest + 1, next_offset=-1)
    self.addCleanup(shutil.rmtree, f"{self.model.base}/{newest + 1}")

    wait_until(lambda: "next_offset" in json.dumps(self.server.get(f"/v1/models/{MODEL}")[1]))
    (status,) = (
      version
      for version in self.server.get(f"/v1/models/{MODEL}")[1]["model_version_status"]
      if version["version"] == str(newest + 1)
    )
    self.assertEqual((status["state"], status["status"]["error_code"]), ("END", "DATA_LOSS"))
    self.assertIn(f"{newest + 1}/assets.extra/{sync_state.SYNC_STATE}", str(status))
    self.ask(1)


class LogTest(unittest.TestCase):
  def test_exports_say_where_training_was_in_both_logs(self):
    rows = sync_state.load_export(_model.export)
    dense = sync_state.load_export(_model.export, sync_state.DENSE_STATE)

    self.assertEqual((rows.topic, rows.partition), (TOPIC, 0))
    self.assertGreaterEqual((rows.epoch, rows.seq), (1, 1))
    self.assertIn(rows.next_offset, range(1, _model.end.next_offset + 1))
    self.assertEqual((dense.topic, dense.partition), (DENSE_TOPIC, 0))


if __name__ == "__main__":
  unittest.main()
