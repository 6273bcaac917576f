"""The hooks that show and report a run: which there are, and what they add to the graph."""

from __future__ import annotations

import tensorflow as tf

from monolith.core import hyperparams
from monolith.native_training import graph_estimator, hash_table_ops, multi_hash_table_ops
from monolith.native_training.driver import observers
from monolith.native_training.hooks import progress
from monolith.native_training.metric import metric_hook
from monolith.native_training.settings.training_config import CpuTrainingConfig

tf.compat.v1.disable_eager_execution()


class _OwnProgressHook(tf.compat.v1.train.SessionRunHook):
  shows_progress = True


def _spec(hooks=()):
  loss = tf.constant(6.0)
  return graph_estimator.EstimatorSpec(
    graph_estimator.ModeKeys.TRAIN, loss=loss, train_op=tf.no_op(), training_hooks=hooks
  )


def _metrics(**enabled):
  metrics = hyperparams.Params()
  for name in ("enable_tf2_profiler_hook", "enable_throughput_hook"):
    metrics.define(name, enabled.get(name, False), "")
  return metrics


class ObserversTest(tf.test.TestCase):
  def test_progress_is_shown_once(self):
    with tf.Graph().as_default():
      own = observers.get_progress_hooks(_spec([_OwnProgressHook()]), CpuTrainingConfig(), "")
      self.assertEmpty(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES))

      ours = observers.get_progress_hooks(_spec(), CpuTrainingConfig(), self.get_temp_dir())

      self.assertLen(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES), 1)
    self.assertEqual(own, [])
    self.assertEqual([type(hook) for hook in ours], [progress.ProgressHook])

  def test_numbers_of_a_table_are_added_over_servers(self):
    with tf.Graph().as_default(), self.session() as session:
      for server in range(2):
        table = hash_table_ops.test_hash_table(2, name_suffix=f"user_{server}")
        rows = table.assign(tf.range(server + 3, dtype=tf.int64), tf.ones([server + 3, 2]))
        session.run(rows.as_op())
      groups = tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
      self.assertEmpty(groups)

      stats = session.run(observers._get_table_stats())

    (name,) = stats
    self.assertEndsWith(name, "user")
    self.assertEqual(stats[name][0], 7)

  def test_metric_hooks_are_those_asked_for(self):
    config = CpuTrainingConfig(profile_with_nvprof_from_to="3,5")

    with tf.Graph().as_default():
      hooks = observers.get_metric_hooks(config, _metrics(), "")
      more = observers.get_metric_hooks(
        CpuTrainingConfig(), _metrics(enable_throughput_hook=True), ""
      )

    self.assertEqual([type(hook) for hook in hooks], [metric_hook.NVProfilerHook])
    self.assertEqual([type(hook) for hook in more], [metric_hook.ThroughputMetricHook])


if __name__ == "__main__":
  tf.test.main()
