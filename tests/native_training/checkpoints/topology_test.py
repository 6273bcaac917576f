"""Who gets the newest checkpoint for another number of servers, and where it is written."""

import os

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.checkpoint import checkpoint_management

from monolith.native_training.checkpoints import restored, topology
from tests import written_checkpoint


class TopologyTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self._prefix = written_checkpoint.write_checkpoint(
      self._dir, tables={"user_0": [0, 2], "user_1": [1]}
    )

  def test_training_writes_into_its_own_folder(self):
    # The state file may name the checkpoint of another job.
    own = os.path.join(os.environ["TEST_TMPDIR"], "own")
    os.makedirs(own)
    checkpoint_management.update_checkpoint_state_internal(own, self._prefix)
    before = sorted(os.listdir(self._dir))

    topology.reshard_if_needed(own, 1)

    newest = tf.train.latest_checkpoint(own)
    self.assertEqual(os.path.dirname(newest), own)
    self.assertEqual(written_checkpoint.read_ids(newest), {"user_0": [0, 2, 1]})
    self.assertEqual(sorted(os.listdir(self._dir)), before)

  def test_checkpoint_that_fits_is_left_alone(self):
    topology.reshard_if_needed(self._dir, 2)

    self.assertIsNone(topology.copy_checkpoint_if_needed(self._prefix, 2))
    self.assertEqual(tf.train.latest_checkpoint(self._dir), self._prefix)

  def test_no_checkpoint(self):
    empty = os.path.join(os.environ["TEST_TMPDIR"], "empty")

    topology.reshard_if_needed(empty, 1)

    self.assertIsNone(topology.copy_checkpoint_if_needed(None, 1))
    self.assertFalse(os.path.exists(empty))

  def test_reader_gets_a_copy_that_is_deleted_after_the_restore(self):
    before = sorted(os.listdir(self._dir))

    listener = topology.CopyListener(self._dir, 0)
    with tf.compat.v1.Session() as session:
      listener.before_restore(session)

      copied = restored.find(session, self._dir)
      self.assertEqual(written_checkpoint.read_ids(copied), {"user": [0, 2, 1]})
      self.assertEqual(sorted(os.listdir(self._dir)), before)
      listener.after_restore(session)
      self.assertFalse(os.path.exists(os.path.dirname(copied)))
      self.assertEqual(restored.find(session, self._dir), self._prefix)

  def test_reader_copies_the_checkpoint_of_its_variables(self):
    newer = written_checkpoint.write_checkpoint(
      self._dir, tables={"user_0": [0, 2], "user_1": [1, 3]}, step=2
    )
    self.assertEqual(tf.train.latest_checkpoint(self._dir), newer)
    listener = topology.CopyListener(self._dir, 0)
    with tf.compat.v1.Session() as session:
      restored.begin(session, self._prefix)
      listener.before_restore(session)

      copied = restored.find(session, self._dir)
      self.assertEqual(written_checkpoint.read_ids(copied), {"user": [0, 2, 1]})

  def test_reader_on_other_servers_is_told_the_numbers(self):
    with self.assertRaisesRegex(ValueError, "saved on 2 servers, and num_ps is 3: use 0 or 2"):
      topology.copy_checkpoint_if_needed(self._prefix, 3)


if __name__ == "__main__":
  absltest.main()
