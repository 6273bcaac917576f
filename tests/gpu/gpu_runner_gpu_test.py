"""`monolith.gpu_runner` trains a task on the GPU where there is one."""

from __future__ import annotations

import os
import tempfile
import unittest
from unittest import mock

import tensorflow as tf
from absl.testing import flagsaver

from monolith import gpu_runner
from monolith.core import model_registry
from tests.gpu_runner_testing import LEARNING_RATE, LINEAR, LinearTask

tf.compat.v1.disable_v2_behavior()

_STEPS = 6


class _WhereOpsRun(tf.compat.v1.train.SessionRunHook):
  """Notes the device of the ops that steps run."""

  def __init__(self):
    self.devices = {}

  def before_run(self, run_context):
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    return tf.compat.v1.train.SessionRunArgs([], options=options)

  def after_run(self, run_context, run_values):
    for graph in run_values.run_metadata.partition_graphs:
      self.devices.update({node.op: node.device for node in graph.node})


class GpuRunnerTest(unittest.TestCase):
  def test_trains_on_the_gpu(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    model_dir = os.path.join(folder.name, "model")
    hook, create_model_fn = _WhereOpsRun(), LinearTask.create_model_fn

    def create_watched(task):
      model_fn = create_model_fn(task)

      def watched(features, labels, mode, params):
        return model_fn(features, labels, mode, params)._replace(training_hooks=(hook,))

      return watched

    with flagsaver.flagsaver(mode="train", model_dir=model_dir, save_checkpoints_steps=3):
      runner = gpu_runner.GPURunner(model_registry.GetParams(LINEAR))
    with mock.patch.object(LinearTask, "create_model_fn", create_watched):
      runner.run()

    self.assertEqual(tf.train.load_variable(model_dir, "weight"), 1 - _STEPS * LEARNING_RATE)
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    self.assertIn("GPU:0" if has_gpu else "CPU:0", hook.devices["ApplyGradientDescent"])


if __name__ == "__main__":
  unittest.main()
