"""Tests of datasets whose position is not saved."""

import os

import tensorflow as tf

from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints

v1 = tf.compat.v1


class LeaveOutOfCheckpointsTest(tf.test.TestCase):
  def _save(self, prepare):
    """Saves the input of a graph after `prepare()`; returns the files that this left."""
    folder = self.create_tempdir().full_path
    with tf.Graph().as_default():
      iterator = v1.data.make_initializable_iterator(tf.data.Dataset.range(3))
      prepare()
      save = ckpt_hooks.WorkerCkptHelper(folder, 0).create_save_iterator_callback()
      with v1.Session() as sess:
        sess.run([iterator.initializer, v1.local_variables_initializer()])
        save(ckpt_hooks.SAVE_ACTION, sess)
    return os.listdir(folder)

  def test_iterators_of_the_graph_are_left_out(self):
    self.assertEqual(self._save(leave_out_of_checkpoints), [])
    # In that graph only.
    self.assertIn("checkpoint_input_worker_0", self._save(lambda: None))

  def test_nothing_changes_inside_a_function(self):
    def build_function():
      @tf.function
      def fn():
        leave_out_of_checkpoints()
        return tf.constant(0)

      fn()

    self.assertIn("checkpoint_input_worker_0", self._save(build_function))

  def test_nothing_happens_in_eager_mode(self):
    leave_out_of_checkpoints()

    self.assertIn("checkpoint_input_worker_0", self._save(lambda: None))


if __name__ == "__main__":
  tf.test.main()
