"""Row logs that released versions wrote, `golden/VERSION`, are read forever."""

import json
import os
import tempfile
import unittest

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

import monolith
from monolith.realtime.row_log_pb2 import DenseSet
from monolith.row_log import framing
from monolith.row_log.sync_state import SYNC_STATE, SyncState
from tests.realtime.row_log_tables import DIM, ServedTable
from tests.row_log import write_golden_log

tf.compat.v1.disable_eager_execution()


def _read(*parts):
  with open(os.path.join(*parts), encoding="utf-8") as file:
    return file.read()


def _records(path):
  return list(tf.compat.v1.io.tf_record_iterator(path))


class GoldenLogTest(unittest.TestCase):
  def _folders(self):
    versions = sorted(os.listdir(write_golden_log.FOLDER))
    self.assertIn(monolith.__version__, versions)
    return [os.path.join(write_golden_log.FOLDER, version) for version in versions]

  def test_rows_of_each_version_arrive(self):
    for folder in self._folders():
      with self.subTest(folder):
        expected = json.loads(_read(folder, "expected.json"))
        rows = {int(id_): value for id_, value in expected["rows"].items()}
        served = ServedTable()
        self.addCleanup(served.close)

        states = [
          served.follower.apply([message])
          for message in _records(os.path.join(folder, "rows.tfrecord"))
        ]

        np.testing.assert_array_equal(
          served.lookup(list(rows)), [[value] * DIM for value in rows.values()]
        )
        digests = {name: tuple(found) for name, found in expected["digests"].items()}
        self.assertEqual(served.follower.digests(scan=True), digests)
        self.assertEqual([state.digest_ok for state in states], [1] * len(states))
        self.assertEqual(states[-1].newest_event_time, expected["newest_event_time"])
        state = SyncState.from_json(_read(folder, SYNC_STATE))
        self.assertEqual((state.epoch, state.seq), (states[-1].epoch, states[-1].seq))
        self.assertEqual((state.topic, state.next_offset), ("rows.m", len(states)))

  def test_dense_variables_of_each_version_arrive(self):
    for folder in self._folders():
      with self.subTest(folder):
        (message,) = _records(os.path.join(folder, "dense.tfrecord"))
        found = DenseSet.FromString(framing.unframe(message))

        self.assertEqual((found.epoch, found.version, found.num_chunks), (1, 5, 1))
        arrays = {
          tensor.name: tf.make_ndarray(tensor_pb2.TensorProto.FromString(tensor.tensor))
          for tensor in found.tensors
        }
        self.assertEqual(sorted(arrays), sorted(write_golden_log.DENSE))
        for name, wanted in write_golden_log.DENSE.items():
          np.testing.assert_array_equal(arrays[name], wanted)

  def test_files_of_a_version_are_not_written_again(self):
    with tempfile.TemporaryDirectory() as folder, self.assertRaises(FileExistsError):
      write_golden_log.write(folder)


if __name__ == "__main__":
  unittest.main()
