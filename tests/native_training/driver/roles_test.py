"""Tests that options without effect are named, and options that cannot be met refused."""

import ast
import dataclasses
import pathlib
import unittest
from unittest import mock

import tensorflow as tf

from monolith.native_training import native_task, runner_utils
from monolith.native_training.driver import roles as training_roles
from monolith.native_training.settings.training_config import CpuTrainingConfig

tf.compat.v1.disable_eager_execution()


# Objects that are, or hold, a RunnerConfig or the part of it that the driver sees.
_CONFIGS = {"config", "_config", "conf", "_conf", "runner_config", "_runner_conf"}
_FLAG_READERS = {"get_flag", "read_flag"}
# Fields that a loop over their names reads.
_READ_BY_NAME = {
  "native_training/driver/tables.py": (
    "enable_async_optimize",
    "enable_pipelined_bwda2a",
    "enable_pipelined_fwda2a",
  ),
  "native_training/estimator.py": ("deep_insight_sample_ratio", "deep_insight_target"),
}


def _strings(tree):
  return {
    node.value
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  }


def _name_of(node):
  return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)


def _names_read(tree):
  """Returns the attributes of configurations and the flags that a module reads."""
  own = {
    node
    for declared in ast.walk(tree)
    if isinstance(declared, ast.ClassDef)
    and declared.name in ("RunnerConfig", "CpuTrainingConfig", "DistributedCpuTrainingConfig")
    for node in ast.walk(declared)
  }
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      holder = _name_of(node.value)
      if holder in _CONFIGS or holder == "FLAGS" or (holder == "self" and node in own):
        names.add(node.attr)
    elif isinstance(node, ast.Call) and node.args:
      reads = _name_of(node.func) in _FLAG_READERS
      if _name_of(node.func) == "getattr" and _name_of(node.args[0]) == "FLAGS":
        reads, node = True, ast.Call(node.func, node.args[1:], [])
      if reads and isinstance(node.args[0], ast.Constant):
        names.add(node.args[0].value)
  return names


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

  def test_exactly_the_fields_that_nothing_reads_are_listed(self):
    package = pathlib.Path(native_task.__file__).parents[1]
    read = set()
    for path in package.rglob("*.py"):
      read |= _names_read(ast.parse(path.read_text("utf-8")))
    for file, names in _READ_BY_NAME.items():
      strings = _strings(ast.parse((package / file).read_text("utf-8")))
      self.assertEqual(sorted(set(names) - strings), [], file)
      read |= set(names)
    fields = {field.name for field in dataclasses.fields(runner_utils.RunnerConfig)}

    self.assertEqual(sorted(fields - read), sorted(training_roles._UNUSED_FIELDS))

  def test_names_read_are_those_of_configurations_and_flags(self):
    source = """
config.a + self._config.b + get_flag("c", 0) + FLAGS.d + getattr(FLAGS, "e", 0)
other.f; config.g = 1; "h"
class RunnerConfig:
  def __post_init__(self): self.i
class Other:
  def __post_init__(self): self.j
"""
    self.assertEqual(_names_read(ast.parse(source)), set("abcdei"))

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

  def test_options_that_make_no_sense_are_named(self):
    for fields, text in (
      ({"realtime_kafka_servers": "a:9092"}, "without enable_realtime_training"),
      (
        {"realtime_kafka_servers": "a:9092,b", "enable_realtime_training": True},
        "'b' is none",
      ),
      ({"sync_interval_secs": 0}, "sync_interval_secs is 0"),
      ({"dense_sync_secs": float("nan")}, "dense_sync_secs is nan"),
      ({"realtime_digest_secs": -1}, "realtime_digest_secs is -1"),
      ({"steps_in_flight": 0}, "steps_in_flight is 0, want at least 1"),
      ({"steps_in_flight": 2, "enable_sync_training": True}, "one step at a time"),
      ({"steps_in_flight": 2, "enable_partial_sync_training": True}, "one step at a time"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        training_roles.check_options(CpuTrainingConfig(**fields))


if __name__ == "__main__":
  unittest.main()
