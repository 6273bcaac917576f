"""Stages run exactly as often as steps ask for them."""

import threading

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import prefetch_queue
from monolith.native_training.ranks import pipeline_hooks

tf.compat.v1.disable_eager_execution()


class StageThreadTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._coord = tf.train.Coordinator()
    self._runs = 0
    self._cancelled = threading.Event()

  def _thread(self, run):
    thread = pipeline_hooks._StageThread(self._coord, run, self._cancelled.set)
    self.addCleanup(thread.stop)
    return thread

  def _run(self):
    self._runs += 1
    return True

  def test_runs_as_often_as_asked(self):
    thread = self._thread(self._run)
    thread.ask_for(3)
    thread.wait()
    self.assertEqual(self._runs, 3)
    thread.ask_for(2)
    thread.wait()
    self.assertEqual(self._runs, 5)
    self.assertFalse(thread.is_finished)

  def test_nothing_is_done_after_the_end_of_the_data(self):
    thread = self._thread(lambda: self._run() and self._runs < 2)
    thread.ask_for(5)
    thread.wait()

    self.assertEqual(self._runs, 2)
    self.assertTrue(thread.is_finished)
    self.assertFalse(self._cancelled.is_set())

  def test_error_stops_training_and_wakes_up_what_waits(self):
    def fail():
      raise tf.errors.UnavailableError(None, None, "a rank is gone")

    thread = self._thread(fail)
    thread.ask_for(2)
    thread.wait()

    self.assertTrue(self._cancelled.is_set())
    self.assertTrue(thread.is_finished)
    with self.assertRaisesRegex(tf.errors.UnavailableError, "a rank is gone"):
      self._coord.raise_requested_exception()


class LockstepTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    context = tf.Graph().as_default()
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)

  def _count(self, name):
    """Returns a counter and an op that increments it."""
    counter = tf.compat.v1.get_variable(
      name, [], tf.int64, tf.compat.v1.zeros_initializer(), use_resource=True, trainable=False
    )
    return counter, counter.assign_add(1).op

  def test_queue_is_filled_by_the_same_number_ahead_of_every_step(self):
    made, make = self._count("made")
    with tf.control_dependencies([make]):
      element = tf.identity(made.read_value())
    (element,), queue = prefetch_queue.enqueue_dicts_with_queue_return((element,), capacity=2)
    hook = pipeline_hooks.LockstepEnqueueHook(queue, ahead=2, consumer=element.op)
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
      raw = session._tf_sess()
      self.assertEqual(raw.run(made), 0)
      for step in range(1, 4):
        self.assertEqual(session.run(element), step)
        hook._thread.wait()
        self.assertEqual(raw.run(made), step + 2)
      # A run that takes no element asks for none.
      session.run(made)
      hook._thread.wait()
      self.assertEqual(raw.run(made), 5)

  def test_what_a_step_left_is_pushed_once_during_the_next_one_and_at_the_end(self):
    pushed, push = self._count("pushed")
    queue = prefetch_queue.enqueue_dicts_with_queue_return((tf.constant(1),), capacity=2)[1]
    with tf.control_dependencies([queue.dequeue()[0]]):
      push = tf.group(pushed.assign_add(1))
    hook = pipeline_hooks.LockstepPushHook(queue, push, queue.enqueue_op)
    seen = []

    class EndHook(tf.compat.v1.train.SessionRunHook):
      def end(self, session):
        seen.append(int(session.run(pushed)))

    with tf.compat.v1.train.MonitoredSession(hooks=[hook, EndHook()]) as session:
      for _ in range(3):
        session.run(queue.enqueue_op)
        seen.append(int(session._tf_sess().run(pushed)))

    self.assertEqual(seen, [0, 1, 2, 3])


if __name__ == "__main__":
  absltest.main()
