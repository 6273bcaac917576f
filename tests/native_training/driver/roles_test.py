"""Tests that options without effect are named, and options that cannot be met refused."""

import dataclasses
import pathlib
import re
import unittest
from unittest import mock

import tensorflow as tf

from monolith.native_training import native_task, runner_utils
from monolith.native_training.driver import roles as training_roles
from monolith.native_training.settings.training_config import CpuTrainingConfig

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

  def test_every_field_is_read_or_named(self):
    package = pathlib.Path(native_task.__file__).parents[1]
    read = set()
    for path in package.rglob("*.py"):
      # The list itself, and the declarations.
      if path.name not in ("roles.py", "runner_utils.py"):
        # As an attribute, or by the name of its flag.
        read |= set(re.findall(r"[.\"'](\w+)\b", path.read_text("utf-8")))
    read |= set(re.findall(r"[.](\w+)\b", pathlib.Path(runner_utils.__file__).read_text("utf-8")))
    fields = {field.name for field in dataclasses.fields(runner_utils.RunnerConfig)}
    unread = fields - read

    self.assertEqual(sorted(unread.difference(training_roles._UNUSED_FIELDS)), [])
    self.assertGreater(len(unread), 5)

  def test_kind_of_training_counts(self):
    config = CpuTrainingConfig(
      only_feature_engineering=True, enable_variable_prefetch=True, enable_async_optimize=True
    )
    params = native_task.NativeTask.params()
    for changes, want in (
      ({}, "enable_async_optimize = True"),
      (
        {"enable_partial_sync_training": True},
        "enable_async_optimize = True, enable_variable_prefetch = True",
      ),
      (
        {"enable_sync_training": True},
        "only_feature_engineering = True, enable_variable_prefetch = True",
      ),
    ):
      with self.assertLogs("absl", "WARNING") as logs:
        training_roles.report_unused_options(dataclasses.replace(config, **changes), params)

      self.assertEqual(logs.output[0].rpartition("effect: ")[2], want)

  def test_defaults_are_not_named(self):
    with mock.patch.object(training_roles.logging, "warning") as warning:
      training_roles.report_unused_options(
        runner_utils.RunnerConfig(), native_task.NativeTask.params()
      )

    warning.assert_not_called()


class CheckOptionsTest(unittest.TestCase):
  def test_row_log_of_a_realtime_run_is_accepted(self):
    training_roles.check_options(
      CpuTrainingConfig(enable_realtime_training=True, realtime_kafka_servers="a:9092, b:9093")
    )

  def test_options_of_the_row_log_that_make_no_sense_are_named(self):
    for fields, text in (
      ({"realtime_kafka_servers": "a:9092"}, "without enable_realtime_training"),
      (
        {"realtime_kafka_servers": "a:9092,b", "enable_realtime_training": True},
        "'b' is none",
      ),
      ({"sync_interval_secs": 0}, "sync_interval_secs is 0"),
      ({"dense_sync_secs": float("nan")}, "dense_sync_secs is nan"),
      ({"realtime_digest_secs": -1}, "realtime_digest_secs is -1"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        training_roles.check_options(CpuTrainingConfig(**fields))


if __name__ == "__main__":
  unittest.main()
