"""Tells the end of training from a failure that looks like it."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training import prefetch_queue
from monolith.native_training.driver import hooks as training_hooks

tf.compat.v1.disable_eager_execution()


class _EndHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self):
    self.has_ended = False

  def end(self, session):
    self.has_ended = True


class FinishAsyncHookTest(tf.test.TestCase):
  def _train(self, make_element):
    """Takes elements from a queue that another thread fills until there are none."""
    with tf.Graph().as_default():
      element, queue = prefetch_queue.enqueue_dicts_with_queue_return(make_element())
      end_hook = _EndHook()
      hooks = [
        training_hooks._FinishAsyncHook([]),
        prefetch_queue.EnqueueHook(queue),
        end_hook,
      ]
      try:
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
          while not session.should_stop():
            session.run(element)
      finally:
        self._has_ended = end_hook.has_ended

  def test_end_of_data(self):
    dataset = tf.data.Dataset.range(3)

    self._train(lambda: tf.compat.v1.data.make_one_shot_iterator(dataset).get_next())

    self.assertTrue(self._has_ended)

  def test_failure_in_the_background_is_no_end(self):
    def make_element():
      value = tf.data.Dataset.range(3).map(lambda i: tf.debugging.check_numerics(1 / (2 - i), ""))
      return tf.compat.v1.data.make_one_shot_iterator(value).get_next()

    with self.assertRaises(tf.errors.InvalidArgumentError):
      self._train(make_element)

    self.assertFalse(self._has_ended)


if __name__ == "__main__":
  tf.test.main()
