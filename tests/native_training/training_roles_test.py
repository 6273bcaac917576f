"""Options that are set and have no effect are named, those that cannot be met are refused."""

import unittest
from unittest import mock

import tensorflow as tf

from monolith.native_training import native_task, runner_utils, training_roles
from monolith.native_training.training_config import CpuTrainingConfig

tf.compat.v1.disable_eager_execution()


class ReportUnusedOptionsTest(unittest.TestCase):
  def test_all_in_one_line(self):
    params = native_task.NativeTask.params()
    params.train.use_fountain = True
    params.metrics.use_data_service = True
    config = runner_utils.RunnerConfig(
      processes_per_gpu=2,
      tensorboard_log_path="/logs",
      fountain_zk_host="zk",
      enable_fid_dedup=True,
      ps_replica_num=3,
      use_estimator=True,
    )

    with self.assertLogs("absl", "WARNING") as logs:
      training_roles.report_unused_options(config, params)

    self.assertEqual(
      logs.output,
      [
        "WARNING:absl:Options that are set and have no effect: processes_per_gpu = 2, "
        "tensorboard_log_path = '/logs', fountain_zk_host = 'zk', enable_fid_dedup = True, "
        "ps_replica_num = 3, use_estimator = True, metrics.use_data_service = True, "
        "train.use_fountain = True"
      ],
    )

  def test_features_are_not_written_by_ranks(self):
    config = CpuTrainingConfig(only_feature_engineering=True)
    params = native_task.NativeTask.params()

    with mock.patch.object(training_roles.logging, "warning") as warning:
      training_roles.report_unused_options(config, params)
    warning.assert_not_called()
    config.enable_sync_training = True
    with self.assertLogs("absl", "WARNING") as logs:
      training_roles.report_unused_options(config, params)

    self.assertIn("only_feature_engineering = True", logs.output[0])

  def test_defaults_are_not_named(self):
    with mock.patch.object(training_roles.logging, "warning") as warning:
      training_roles.report_unused_options(
        runner_utils.RunnerConfig(), native_task.NativeTask.params()
      )

    warning.assert_not_called()


if __name__ == "__main__":
  unittest.main()
