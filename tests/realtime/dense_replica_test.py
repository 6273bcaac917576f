"""Servers follow a log of dense variables, and say what is wrong with exports that name one.

Both servers, a broker that can tell its age, and a model that was made by hand: variables of both
kinds, one of them in parts. `replica_test` has a trained one.
"""

import json
import os
import shutil
import tempfile
import unittest

import numpy as np
import pytest
import tensorflow as tf

from monolith.realtime.row_log_pb2 import DenseSet
from monolith.row_log import dense_sets, framing
from tests.native_training.data.mock_kafka import MockKafka
from tests.serving import saved_models, server_process
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TOPIC = "dense.m"


def _write_model(folder, **states):
  """Saves a model with a variable of each kind; its answer is all of them."""
  v1 = tf.compat.v1
  with tf.Graph().as_default(), v1.Session() as session:
    step = v1.train.get_or_create_global_step()
    old = v1.get_variable("old", initializer=[1.0, 2.0], use_resource=False)
    parts = v1.get_variable(
      "parts",
      [3, 2],
      initializer=v1.zeros_initializer(),
      partitioner=v1.fixed_size_partitioner(2),
      use_resource=True,
    )
    x = v1.placeholder(tf.float32, [], "x")
    values = tf.concat([x + old, tf.reshape(tf.convert_to_tensor(parts), [-1])], 0)
    session.run([v1.global_variables_initializer(), step.assign(10)])
    builder = v1.saved_model.Builder(folder + ".tmp")
    definition = v1.saved_model.predict_signature_def({"x": x}, {"y": values})
    builder.add_meta_graph_and_variables(
      session, ["serve"], signature_def_map={"serving_default": definition}
    )
    builder.save()
  os.makedirs(f"{folder}.tmp/assets.extra")
  for name, state in states.items():
    with open(f"{folder}.tmp/assets.extra/{name}.json", "w") as file:
      json.dump(state, file)
  os.rename(folder + ".tmp", folder)


def _make_set(version, **changes):
  """Returns the messages of a set in which all floats are `version`."""
  values = {
    "global_step": np.array(version, np.int64),
    "old": np.full(2, version, np.float32),
    "parts": version + np.arange(6, dtype=np.float32).reshape(3, 2),
    "not_served": np.zeros(3, np.float32),
    **changes,
  }
  return dense_sets.make_messages(
    "m", 1, version, {name: value for name, value in values.items() if value is not None}
  )


class DenseReplicaTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.kafka = MockKafka()
    cls.addClassCleanup(cls.kafka.close)
    cls.kafka.create_topic(_TOPIC)
    cls.kafka.send(_TOPIC, _make_set(11))
    state = {"epoch": 0, "seq": 0, "topic": _TOPIC, "partition": 0, "next_offset": 0}
    _write_model(f"{cls.folder}/1", dense_state=state)
    cls.server = server_process.ServerProcess(
      "--model_name=m",
      f"--model_base_path={cls.folder}",
      f"--row_log_servers={cls.kafka.servers}",
    )
    cls.addClassCleanup(cls.server.stop)
    cls.server.wait_until_listening().wait_until_available("m")

  def ask(self):
    request = saved_models.make_request("m", x=np.float32(0))
    return tf.make_ndarray(self.server.prediction.Predict(request, timeout=60).outputs["y"])

  def assert_version(self, version):
    wanted = [version] * 2 + [version + i for i in range(6)]
    np.testing.assert_array_equal(self.ask(), np.array(wanted, np.float32))

  def test_sets_are_assigned_as_a_whole_or_not_at_all(self):
    self.assert_version(11)  # in the log before the server came

    self.kafka.send(_TOPIC, _make_set(9))  # older
    for bad in (
      _make_set(12, parts=None),
      _make_set(12, parts=np.zeros((2, 3), np.float32)),
      _make_set(12, old=np.zeros(2, np.float64)),
      [b"", b"no set", framing.frame(b"\xff")],
      [framing.frame(DenseSet(epoch=1, version=12, chunk=3, num_chunks=2).SerializeToString())],
      [self._make_huge_set()],
    ):
      self.kafka.send(_TOPIC, bad)
    wait_until(lambda: self.server.log().count("Skipped the message") == 8)
    self.assertIn("the set lacks 'parts'", self.server.log())
    # Refused by its shape, not by an allocator that may or may not say no.
    self.assertRegex(self.server.log(), r"'old' is float\w*\[1099511627776\], want float\w*\[2\]")
    self.assert_version(11)

    whole = _make_set(13, not_served=np.zeros(500_000, np.float32))
    self.assertGreater(len(whole), 1)
    self.kafka.send(_TOPIC, whole[:-1])
    self.kafka.send(_TOPIC, whole[:1])  # once more
    self.assert_version(11)
    self.kafka.send(_TOPIC, whole[-1:])
    wait_until(lambda: self.ask()[0] == 13)
    self.assert_version(13)
    metrics = self.server.http("/monitoring/prometheus/metrics")[1].decode()
    for line in ("dense_version", "dense_sets_total", "dense_skipped_messages_total"):
      self.assertIn(f'monolith_sync_{line}{{model="m",shard="0"}} ', metrics)

  def _make_huge_set(self):
    """Names a shape of 4 TiB in a few bytes."""
    tensor = tf.make_tensor_proto(1.0, tf.float32, [2])
    tensor.tensor_shape.dim[0].size = 1 << 40
    chunk = DenseSet(epoch=1, version=12, num_chunks=1)
    step = tf.make_tensor_proto(np.int64(12))
    for name, value in (("global_step", step), ("old", tensor), ("parts", tensor)):
      chunk.tensors.add(name=name, tensor=value.SerializeToString())
    return framing.frame(chunk.SerializeToString())

  def test_exports_that_say_something_impossible_are_refused(self):
    rows = {"epoch": 0, "seq": 0, "topic": "rows.m", "partition": 0, "next_offset": 0}
    for version, state, words in (
      (2, rows, ["rows.m[0]", "no tables"]),
      (3, {**rows, "epoch": "1"}, ["epoch", "sync_state.json"]),
      (4, [], ["not an object", "sync_state.json"]),
    ):
      with self.subTest(state):
        _write_model(f"{self.folder}/{version}", sync_state=state)
        status = self._wait_for_end(version)
        self.assertEqual(status["error_code"], "DATA_LOSS")
        for word in (f"{self.folder}/{version}", *words):
          self.assertIn(word, status["error_message"])
        shutil.rmtree(f"{self.folder}/{version}")
    self.ask()

  def _wait_for_end(self, version):
    found = {}

    def has_ended():
      status, answer = self.server.get(f"/v1/models/m/versions/{version}")
      if status != 200 or answer["model_version_status"][0]["state"] != "END":
        return False
      found.update(answer["model_version_status"][0]["status"])
      return bool(found["error_message"])

    wait_until(has_ended)
    return found


if __name__ == "__main__":
  unittest.main()
