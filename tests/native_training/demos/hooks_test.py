"""Tests the output of the demo while it trains, and Ctrl-C."""

import contextlib
import io
import signal

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import hash_table_ops
from monolith.native_training.demos import hooks

tf.compat.v1.disable_eager_execution()


class ProgressHookTest(absltest.TestCase):
  def _run(self, steps: int, interval_secs: float, num_ranks: int = 1) -> list[str]:
    """Trains on batches of four and returns the lines that were printed."""
    output = io.StringIO()
    with tf.Graph().as_default(), contextlib.redirect_stdout(output):
      step = tf.compat.v1.train.get_or_create_global_step()
      table = hash_table_ops.test_hash_table(1)
      updated = table.assign_add(tf.reshape(step, [1]), tf.constant([[1.0]])).as_op()
      with tf.control_dependencies([updated]):
        train_op = step.assign_add(1)
      hook = hooks.ProgressHook(
        tf.constant(0.25),
        tf.constant([0.0, 1.0, 0.0, 1.0]),
        tf.constant([0.1, 0.9, 0.2, 0.3]),
        interval_secs,
        num_ranks,
      )
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as session:
        for _ in range(steps):
          session.run(train_op)
    return output.getvalue().splitlines()

  def test_prints_at_the_end_what_was_not_printed_before(self):
    (line,) = self._run(3, interval_secs=1e6)

    self.assertRegex(
      line, r"^step      3 +[\d,]+ examples/s   loss 0.2500   AUC 1.0000   3 rows in tables$"
    )

  def test_prints_every_interval(self):
    lines = self._run(4, interval_secs=0.0)

    # The first step starts the clock, and the last line is not repeated.
    self.assertEqual([int(line.split()[1]) for line in lines], [2, 3, 4])

  def test_says_that_rows_are_those_of_a_rank(self):
    (line,) = self._run(2, interval_secs=1e6, num_ranks=2)

    self.assertEndsWith(line, "2 rows in tables of this rank")


class StopOnSignalTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    before = signal.getsignal(signal.SIGINT)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    self.addCleanup(hooks._stop_requested.clear)

  def test_first_signal_ends_the_training_and_the_second_the_process(self):
    hooks.stop_on_interrupt()
    self.assertFalse(hooks.is_stop_requested())
    with tf.Graph().as_default():
      step = tf.compat.v1.train.get_or_create_global_step()
      train_op = step.assign_add(1)
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hooks.StopOnSignalHook()]) as session:
        session.run(train_op)
        self.assertFalse(session.should_stop())
        with contextlib.redirect_stderr(io.StringIO()) as told:
          signal.raise_signal(signal.SIGINT)
        self.assertIn("the checkpoint is being written", told.getvalue())
        self.assertTrue(hooks.is_stop_requested())
        self.assertFalse(session.should_stop())
        session.run(train_op)
        self.assertTrue(session.should_stop())
    with self.assertRaises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
  absltest.main()
