"""Tests of barriers around checkpoints and of saved input state."""

import os
import threading
from unittest import mock

import tensorflow as tf

from monolith.native_training import barrier_ops
from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.hooks import ckpt_hooks_pb2

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


class _Case(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    v1.reset_default_graph()
    self.dir = os.environ["TEST_TMPDIR"]


class BarrierSaverListenerTest(_Case):
  def _init(self, sess):
    sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])

  def test_basic(self):
    actions = []
    barrier_op = barrier_ops.BarrierOp(
      2, wait_seconds=0.01, barrier_callbacks=[lambda action, _: actions.append(action)]
    )
    listener = ckpt_hooks.BarrierSaverListener(barrier_op, wait_seconds=0.01)
    with self.session() as sess:
      self._init(sess)
      worker = threading.Thread(target=self._wait_like_a_worker, args=(sess, barrier_op))
      worker.start()

      listener.before_save(sess, 10)

      self.assertTrue(barrier_op.is_all_blocked(sess))
      self.assertEqual(ckpt_hooks.get_ckpt_info(sess).global_step, 10)
      listener.after_save(sess, 10)
      worker.join()
      self.assertTrue(barrier_op.is_none_blocked(sess))
    self.assertEqual(actions, [ckpt_hooks.SAVE_ACTION] * 2)

  def _wait_like_a_worker(self, sess, barrier_op):
    with sess.graph.as_default():
      while not barrier_op.is_barrier_placed(sess):
        threading.Event().wait(0.01)
      barrier_op.wait_until_barrier_removed(sess, 1)

  def test_a_barrier_placed_elsewhere_is_not_removed(self):
    barrier_op = barrier_ops.BarrierOp(1)
    listener = ckpt_hooks.BarrierSaverListener(barrier_op, wait_seconds=0.01)
    with self.session() as sess:
      self._init(sess)
      barrier_op.place_barrier(sess)

      listener.before_save(sess, 1)
      listener.after_save(sess, 1)

      self.assertTrue(barrier_op.is_barrier_placed(sess))

  def test_a_barrier_that_could_not_be_removed_is_removed_after_the_next_save(self):
    barrier_op = barrier_ops.BarrierOp(1)
    listener = ckpt_hooks.BarrierSaverListener(barrier_op, wait_seconds=0.01)
    with self.session() as sess:
      self._init(sess)
      listener.before_save(sess, 1)
      cut_off = tf.errors.UnavailableError(None, None, "Connection reset by peer")
      with mock.patch.object(barrier_op, "remove_barrier", side_effect=cut_off):
        with self.assertRaises(tf.errors.UnavailableError):
          listener.after_save(sess, 1)
      self.assertTrue(barrier_op.is_barrier_placed(sess))

      listener.before_save(sess, 2)
      listener.after_save(sess, 2)

      self.assertFalse(barrier_op.is_barrier_placed(sess))

  def test_worker_that_never_waits(self):
    barrier_op = barrier_ops.BarrierOp(2)
    listener = ckpt_hooks.BarrierSaverListener(barrier_op, 0.01, max_pending_seconds=0.05)
    with self.session() as sess:
      self._init(sess)
      with self.assertLogs("absl", "WARNING") as logs:
        listener.before_save(sess, 1)
      self.assertIn("[1]", logs.output[0])
      listener.after_save(sess, 1)
      self.assertFalse(barrier_op.is_barrier_placed(sess))

  def test_only_workers_that_train_are_waited_for(self):
    barrier_op = barrier_ops.BarrierOp(4, wait_seconds=0.01)
    listener = ckpt_hooks.BarrierSaverListener(
      barrier_op, 0.01, max_pending_seconds=60, get_running_workers=lambda _: [1]
    )
    with self.session() as sess:
      self._init(sess)
      worker = threading.Thread(target=self._wait_like_a_worker, args=(sess, barrier_op))
      worker.start()

      with mock.patch.object(ckpt_hooks.logging, "warning") as warning:
        listener.before_save(sess, 1)

      warning.assert_not_called()
      self.assertEqual(barrier_op.get_blocked_indices(sess), [0, 1])
      listener.after_save(sess, 1)
      worker.join()

  def test_worker_that_trains_and_never_waits(self):
    barrier_op = barrier_ops.BarrierOp(4)
    listener = ckpt_hooks.BarrierSaverListener(
      barrier_op, 0.01, max_pending_seconds=0.05, get_running_workers=lambda _: [2]
    )
    with self.session() as sess:
      self._init(sess)
      with self.assertLogs("absl", "WARNING") as logs:
        listener.before_save(sess, 1)
      self.assertIn("do not wait: [2]", logs.output[0])


class WorkerCkptHelperTest(_Case):
  def _read_one(self, save_at_step=None, disabled=False, make_iterator=True):
    """Trains a worker for one step and returns what it read."""
    with tf.Graph().as_default():
      element = tf.constant(-1)
      if make_iterator:
        element = v1.data.make_one_shot_iterator(tf.data.Dataset.range(4))
        element = element.get_next()
      if disabled:
        ckpt_hooks.disable_iterator_save_restore()
      helper = ckpt_hooks.WorkerCkptHelper(self.dir, 0)
      callback = helper.create_save_iterator_callback()
      with v1.train.SingularMonitoredSession(hooks=[helper.create_restorer_hook()]) as sess:
        value = sess.run(element)
        if save_at_step is not None:
          raw = sess.raw_session()
          info = ckpt_hooks_pb2.WorkerCkptInfo(global_step=save_at_step)
          ckpt_hooks.assign_ckpt_info(raw, info)
          callback("Other", raw)
          self.assertEqual(os.listdir(self.dir), [])
          callback(ckpt_hooks.SAVE_ACTION, raw)
      return value

  def test_ckpt(self):
    self.assertEqual(self._read_one(save_at_step=10), 0)
    self.assertIn("input_worker_0.ckpt-10.index", os.listdir(self.dir))
    self.assertIn("checkpoint_input_worker_0", os.listdir(self.dir))
    self.assertNotIn("input_worker_0.ckpt-10.meta", os.listdir(self.dir))

    self.assertEqual(self._read_one(), 1)
    self.assertEqual(self._read_one(disabled=True), 0)

  def test_no_ckpt(self):
    self.assertEqual(self._read_one(), 0)

  def test_no_iterator(self):
    self.assertEqual(self._read_one(save_at_step=1, make_iterator=False), -1)
    self.assertEqual(os.listdir(self.dir), [])

  def test_input_that_cannot_be_saved(self):
    with tf.Graph().as_default():
      dataset = tf.data.Dataset.from_tensors(0).map(
        lambda x: tf.py_function(lambda x: x, [x], tf.int32)
      )
      iterator = v1.data.make_initializable_iterator(dataset.shuffle(2))
      helper = ckpt_hooks.WorkerCkptHelper(self.dir, 0)
      ckpt_hooks.BarrierSaverListener(barrier_ops.BarrierOp(1))
      with v1.Session() as sess:
        sess.run([iterator.initializer, v1.local_variables_initializer()])
        error = tf.errors.UnimplementedError(None, None, "not serialisable")
        with tf.compat.v1.test.mock.patch.object(helper._saver, "save", side_effect=error):
          with self.assertLogs("absl", "ERROR") as logs:
            helper.create_save_iterator_callback()(ckpt_hooks.SAVE_ACTION, sess)
      self.assertIn("not serialisable", logs.output[0])


if __name__ == "__main__":
  tf.test.main()
