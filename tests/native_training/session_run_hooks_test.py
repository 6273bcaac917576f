import datetime
import random
import time
from unittest import mock

import freezegun
import tensorflow as tf

from monolith.native_training import session_run_hooks

tf.compat.v1.disable_eager_execution()


class _RunContext:
  """Stands in for what a hook sees of a run."""

  def __init__(self, session):
    self.session = session
    self.stop_requested = False

  def request_stop(self):
    self.stop_requested = True


class GlobalStepWaiterHookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._global_step = tf.compat.v1.train.get_or_create_global_step()
    self._step_ph = tf.compat.v1.placeholder(tf.int64, [])
    self._set_step = self._global_step.assign(self._step_ph)

  def _start(self, hook, session):
    hook.begin()
    session.run(tf.compat.v1.global_variables_initializer())
    hook.after_create_session(session, None)
    return _RunContext(session)

  def test_not_wait_for_step_zero(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(wait_until_step=0)

    with self.session() as sess, mock.patch.object(time, "sleep") as sleep:
      context = self._start(hook, sess)
      self.assertIsNone(hook.before_run(context))

    sleep.assert_not_called()
    self.assertTrue(hook._worker_is_started)

  @freezegun.freeze_time("2020-01-01 10:00:00")
  def test_not_wait_if_tide_not_available(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(1000, 1, 0, 5, 0)

    with self.session() as sess, mock.patch.object(time, "sleep") as sleep:
      context = self._start(hook, sess)
      self.assertIsNone(hook.before_run(context))

    sleep.assert_not_called()
    self.assertTrue(context.stop_requested)
    self.assertFalse(hook._worker_is_started)

  def test_wait_for_step(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(wait_until_step=1000)

    with self.session() as sess:
      context = self._start(hook, sess)
      steps = iter([500, 1100])
      with mock.patch.object(
        time, "sleep", side_effect=lambda _: sess.run(self._set_step, {self._step_ph: next(steps)})
      ) as sleep:
        self.assertIsNone(hook.before_run(context))
        self.assertEqual(sleep.call_args_list, [mock.call(0.5)] * 2)
        # A worker waits only once.
        sess.run(self._set_step, {self._step_ph: 0})
        hook.before_run(context)
        self.assertEqual(sleep.call_count, 2)

    self.assertFalse(context.stop_requested)

  def test_step_zero_does_not_look_at_the_tide(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(0, 1, 0, 5, 0)

    with freezegun.freeze_time("2020-01-01 10:00:00"), self.session() as sess:
      context = self._start(hook, sess)
      hook.before_run(context)

    self.assertFalse(context.stop_requested)

  def test_step_is_reached_exactly(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(5)

    with self.session() as sess, mock.patch.object(time, "sleep") as sleep:
      context = self._start(hook, sess)
      sess.run(self._set_step, {self._step_ph: 5})
      hook.before_run(context)

    sleep.assert_not_called()

  def test_starts_anyway_after_a_while(self):
    with mock.patch.object(random, "randint", return_value=30) as randint:
      hook = session_run_hooks.CustomGlobalStepWaiterHook(1000, max_non_tide_wait_minute=1)
    randint.assert_called_once_with(0, 600)

    with self.session() as sess, freezegun.freeze_time("2020-01-01") as frozen:
      context = self._start(hook, sess)
      # The clock starts when training is seen to go on, and 90 s are not more than 90 s.
      steps = [1, 2] + [2] * 100
      slept = []

      def sleep(seconds):
        slept.append(seconds)
        sess.run(self._set_step, {self._step_ph: steps[len(slept) - 1]})
        frozen.tick(datetime.timedelta(seconds=45))

      with mock.patch.object(time, "sleep", sleep):
        hook.before_run(context)

    self.assertLen(slept, 5)
    self.assertTrue(hook._worker_is_started)

  def test_tide_ends_while_waiting(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(1000, 1, 0, 12, 0)

    with self.session() as sess, freezegun.freeze_time("2020-01-01 11:59:30") as frozen:
      context = self._start(hook, sess)
      with mock.patch.object(
        time, "sleep", side_effect=lambda _: frozen.tick(datetime.timedelta(seconds=20))
      ) as sleep:
        hook.before_run(context)

    self.assertEqual(sleep.call_count, 2)
    self.assertTrue(context.stop_requested)

  def test_log_lines_are_rare(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(1000)

    with self.session() as sess, freezegun.freeze_time("2020-01-01") as frozen:
      context = self._start(hook, sess)
      steps = iter([0] * 249 + [1000])

      def sleep(seconds):
        frozen.tick(datetime.timedelta(seconds=seconds))
        sess.run(self._set_step, {self._step_ph: next(steps)})

      with mock.patch.object(time, "sleep", sleep), self.assertLogs(level="INFO") as logs:
        hook.before_run(context)

    # The start, and two in 125 s.
    self.assertLen([line for line in logs.output if "Waiting for global step" in line], 3)

  def test_missing_global_step(self):
    hook = session_run_hooks.CustomGlobalStepWaiterHook(1)

    with (
      mock.patch.object(
        session_run_hooks.training_util, "_get_or_create_global_step_read", return_value=None
      ),
      self.assertRaisesWithLiteralMatch(
        RuntimeError, "Global step should be created to use _GlobalStepWaiterHook."
      ),
    ):
      hook.begin()

  def test_in_a_monitored_session(self):
    increment = self._global_step.assign_add(1)
    hook = session_run_hooks.CustomGlobalStepWaiterHook(0)

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      self.assertEqual(sess.run(increment), 1)


class TideStoppingHookTest(tf.test.TestCase):
  @freezegun.freeze_time("2020-01-01 10:00:00")
  def test_stop_if_tide_not_available(self):
    context = _RunContext(None)
    hook = session_run_hooks.TideStoppingHook(1, 0, 5, 0)

    with self.assertLogs(level="INFO") as logs:
      self.assertIsNone(hook.before_run(context))

    self.assertTrue(context.stop_requested)
    self.assertIn("Current UTC time: 10 : 0", logs.output[0])
    self.assertIn("Last hour in tide queue. Saving ckpt...", logs.output[1])

  @freezegun.freeze_time("2020-01-01 10:00:00")
  def test_do_not_stop_if_tide_available(self):
    context = _RunContext(None)

    session_run_hooks.TideStoppingHook(1, 0, 12, 0).before_run(context)

    self.assertFalse(context.stop_requested)

  @freezegun.freeze_time("2020-01-01 10:00:00")
  def test_without_both_hours_there_is_no_tide(self):
    for hours in ({}, {"tide_start_hour": 1}, {"tide_end_hour": 5}):
      context = _RunContext(None)

      session_run_hooks.TideStoppingHook(**hours).before_run(context)

      self.assertFalse(context.stop_requested)

  def test_stops_a_monitored_session(self):
    step = tf.compat.v1.train.get_or_create_global_step()
    increment = step.assign_add(1)
    hook = session_run_hooks.TideStoppingHook(1, 0, 5, 0)

    with freezegun.freeze_time("2020-01-01 04:59:59") as frozen:
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        sess.run(increment)
        self.assertFalse(sess.should_stop())
        frozen.tick(datetime.timedelta(seconds=1))
        sess.run(increment)
        self.assertTrue(sess.should_stop())


class TideAvailableTest(tf.test.TestCase):
  def test_before(self):
    self.assertTrue(session_run_hooks.before(1, 59, 2, 0))
    self.assertTrue(session_run_hooks.before(1, 0, 1, 1))
    self.assertFalse(session_run_hooks.before(1, 1, 1, 1))
    self.assertFalse(session_run_hooks.before(2, 0, 1, 59))

  def _available(self, now, *window):
    with freezegun.freeze_time(f"2020-01-01 {now}"):
      return session_run_hooks.tide_available_now(*window)

  def test_window_is_half_open(self):
    window = (1, 30, 5, 15)
    for now, expected in (
      ("01:29:59", False), ("01:30:00", True), ("05:14:59", True), ("05:15:00", False)
    ):  # fmt: skip
      self.assertEqual(self._available(now, *window), expected, now)

  def test_window_over_midnight(self):
    window = (22, 30, 5, 15)
    for now, expected in (
      ("22:29:00", False), ("22:30:00", True), ("23:59:59", True), ("00:00:00", True),
      ("05:14:00", True), ("05:15:00", False), ("12:00:00", False),
    ):  # fmt: skip
      self.assertEqual(self._available(now, *window), expected, now)

  def test_equal_ends_are_always_available(self):
    for now in ("00:00:00", "05:00:00", "23:59:00"):
      self.assertTrue(self._available(now, 5, 0, 5, 0))

  def test_utc_counts(self):
    with freezegun.freeze_time("2020-01-01 10:00:00", tz_offset=8):
      self.assertTrue(session_run_hooks.tide_available_now(9, 0, 11, 0))
      self.assertFalse(session_run_hooks.tide_available_now(17, 0, 19, 0))


if __name__ == "__main__":
  tf.test.main()
