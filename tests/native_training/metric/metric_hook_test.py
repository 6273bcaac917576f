"""Tests of hooks that report speed, losses, profiles and messages."""

from __future__ import annotations

import os
import time

import tensorflow as tf
from tensorflow.python.training import training_util

from monolith.native_training import utils
from monolith.native_training.metric import cli, metric_hook

tf.compat.v1.disable_eager_execution()


class _Sink:
  """Collects metrics."""

  def __init__(self):
    self.emitted = []

  def __call__(self, method, name, value, tagkv):
    self.emitted.append((method, name.rsplit(".training.", 1)[-1], value, tagkv))

  def named(self, name):
    return [value for _, metric, value, _ in self.emitted if metric == name]


class _HookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.sink = _Sink()
    cli.set_sink(self.sink)
    self.addCleanup(cli.set_sink, None)

  def _run(self, hook, steps, create_fetches=None, pause=0.0):
    with tf.Graph().as_default():
      global_step = tf.compat.v1.train.get_or_create_global_step()
      # Like an optimizer: every run reads the step before it advances.
      with tf.control_dependencies([training_util._get_or_create_global_step_read()]):
        train_op = tf.compat.v1.assign_add(global_step, 1)
      hook = hook() if callable(hook) else hook
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        for _ in range(steps):
          sess.run(train_op)
          if pause:
            time.sleep(pause)


class ThroughputMetricHookTest(_HookTest):
  def test_reports_start_and_speed(self):
    hook = metric_hook.ThroughputMetricHook("model", time.time() - 10, run_every_n_secs=0)

    self._run(hook, 4)

    self.assertLen(self.sink.named("run_start_elapsed_time.all"), 1)
    self.assertGreaterEqual(self.sink.named("run_start_elapsed_time.all")[0], 10)
    self.assertEqual(sum(self.sink.named("run_steps.all")), 3)
    self.assertLen(self.sink.named("run_steps_elapsed_time.all"), 3)
    self.assertEqual(self.sink.emitted[0][3], {"model_name": "model", "cluster_type": "stable"})

  def test_no_start_time(self):
    hook = metric_hook.ThroughputMetricHook("model", None, run_every_n_secs=1000)
    self._run(hook, 2)

    # Not before it has something to report.
    self.assertIsNone(hook.before_run(None))
    self.assertEmpty(self.sink.emitted)

  def test_step_that_does_not_move(self):
    with tf.Graph().as_default():
      tf.compat.v1.train.get_or_create_global_step()
      hook = metric_hook.ThroughputMetricHook("model", None, run_every_n_secs=0)
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        for _ in range(3):
          sess.run(tf.compat.v1.train.get_global_step())

    self.assertEmpty(self.sink.emitted)


class LossAndCustomMetricHookTest(_HookTest):
  def test_step_loss(self):
    self._run(lambda: metric_hook.StepLossMetricHook(tf.constant(0.5)), 2)

    self.assertEqual(self.sink.named("step_loss"), [0.5, 0.5])

  def test_custom_metrics(self):
    self._run(lambda: metric_hook.CustomMetricHook({"a": tf.constant(1.5), "b": tf.constant(2)}), 1)

    self.assertEqual(self.sink.named("a"), [1.5])
    self.assertEqual(self.sink.named("b"), [2])

  def test_bad_custom_metrics(self):
    with self.assertRaisesRegex(ValueError, "empty"):
      metric_hook.CustomMetricHook({})
    with self.assertRaisesRegex(ValueError, "scalar"):
      metric_hook.CustomMetricHook({"a": tf.constant([1.0])})
    with self.assertRaisesRegex(ValueError, "float32 or int32"):
      metric_hook.CustomMetricHook({"a": tf.constant("text")})


class Tf2ProfilerHookTest(_HookTest):
  def _count_profiles(self, logdir):
    folder = os.path.join(logdir, "plugins", "profile")
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0

  def _profile(self, steps, pause=0.0, **kwargs):
    logdir = os.path.join(utils.get_test_tmp_dir(), self.id(), str(steps))
    self._run(metric_hook.Tf2ProfilerHook(logdir, [0, 10], **kwargs), steps, pause=pause)
    return self._count_profiles(logdir)

  def test_one_profile(self):
    self.assertEqual(self._profile(30, save_steps=30), 1)

  def test_two_profiles(self):
    # Folder names have a resolution of one second.
    self.assertEqual(self._profile(31, pause=0.1, save_steps=30), 2)

  def test_single_step(self):
    self.assertEqual(self._profile(1, save_steps=30), 1)

  def test_profiles_by_time(self):
    self.assertGreaterEqual(self._profile(21, pause=0.15, save_secs=3), 2)

  def test_late_window(self):
    logdir = os.path.join(utils.get_test_tmp_dir(), self.id())
    self._run(metric_hook.Tf2ProfilerHook(logdir, [None, None], save_steps=30), 20)
    self.assertEqual(self._count_profiles(logdir), 0)

  def test_slow_steps_are_profiled_soon(self):
    folders = []
    for i, window in enumerate(([None, None], [100, 110])):
      folders.append(os.path.join(utils.get_test_tmp_dir(), self.id(), str(i)))
      hook = metric_hook.Tf2ProfilerHook(folders[i], window, save_steps=30, first_within_secs=0)
      self._run(hook, 20)

    # A window that was asked for stays where it is.
    self.assertEqual([self._count_profiles(folder) for folder in folders], [1, 0])

  def test_bad_windows(self):
    for window in ([1, None], [5, 5], [5, 4]):
      with self.assertRaisesRegex(ValueError, "End step invalid"):
        metric_hook.Tf2ProfilerHook("", window, save_steps=30)
    with self.assertRaisesRegex(ValueError, "save_steps is 10"):
      metric_hook.Tf2ProfilerHook("", [0, 10], save_steps=10)


class KafkaMetricHookTest(tf.test.TestCase):
  def test_inactive_without_environment(self):
    self.assertNotIn("KAFKA_BROKER_LIST", os.environ)
    hook = metric_hook.KafkaMetricHook(tf.constant([b"message"]))

    self.assertIsNone(hook.before_run(None))
    hook.end(None)


if __name__ == "__main__":
  tf.test.main()
