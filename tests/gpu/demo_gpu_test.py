"""The demo's models with their dense parts on a GPU: where ops go, and what comes out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest

import tensorflow as tf
from absl.testing import absltest, parameterized

from monolith.native_training import cpu_training, device_utils
from monolith.native_training.demos import data, models
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_SMALL = (
  "--num_ratings=300000",
  "--num_users=200",
  "--num_movies=100",
  "--batch_size=512",
  "--epochs=3",
)
_TOLERANCE = 0.005
_TIMEOUT_SECS = 400


class _LookAtGraph(tf.compat.v1.train.SessionRunHook):
  """Notes on which kind of device ops of some types are to run."""

  def __init__(self):
    self.devices = {}

  def begin(self):
    for op_type in ("MatMul", "Mul", "ApplyAdagrad", "ResourceApplyAdagrad"):
      self.devices[op_type] = gpu_placement.devices_of(op_type)
    operations = tf.compat.v1.get_default_graph().get_operations()
    self.tables = {op.device for op in operations if "HashTable" in op.type}


class DemoGraphTest(parameterized.TestCase):
  """Needs no GPU: soft placement runs the graph without one."""

  def _train(self, params, **settings):
    folder = os.path.join(self.create_tempdir().full_path, "model")
    config = cpu_training.CpuTrainingConfig(model_name=params.name, **settings)
    look = _LookAtGraph()
    cpu_training.local_train_internal(params, config, folder, steps=2, user_hooks=[look])
    self.assertEqual(int(tf.train.load_variable(folder, "global_step")), 2)
    return look

  def _ranking(self):
    folder = self.create_tempdir().full_path
    params = models.RankingTask.params()
    params.name = "ranking"
    params.data_dir = data.generate(folder, 200, 10, 10).folder
    params.train.per_replica_batch_size = 16
    return params

  @parameterized.parameters(True, False)
  def test_ranking(self, gpu):
    look = self._train(self._ranking(), enable_gpu_training=gpu, embedding_prefetch_capacity=1)

    where = {"GPU"} if gpu else {"CPU"}
    self.assertEqual(look.devices["MatMul"], where)
    self.assertEqual(look.devices["ApplyAdagrad"] | look.devices["ResourceApplyAdagrad"], where)
    self.assertNotEmpty(look.tables)
    self.assertFalse([device for device in look.tables if "GPU" in device])
    self.assertFalse(device_utils.is_gpu_training())

  def test_ffm(self):
    params = models.FFMTask.params()
    params.name = "ffm"
    params.num_examples = 200

    look = self._train(params, enable_gpu_training=True, embedding_prefetch_capacity=1)

    self.assertEqual(look.devices["Mul"], {"GPU"})
    self.assertFalse(device_utils.is_gpu_training())


@unittest.skipUnless(tf.config.list_physical_devices("GPU"), "no GPU")
class DemoOnGpuTest(absltest.TestCase):
  def test_same_auc_as_on_the_cpu(self):
    outputs = {}
    processes = {name: self._start(name) for name in ("cpu", "gpu")}
    for name, process in processes.items():
      outputs[name], _ = process.communicate(timeout=_TIMEOUT_SECS)
      self.assertEqual(process.returncode, 0, outputs[name])

    for model in ("FFM", "Ranking"):
      aucs = [
        float(re.search(rf"{model}: evaluation AUC ([\d.]+)", output).group(1))
        for output in outputs.values()
      ]
      self.assertGreater(min(aucs), 0.7)
      self.assertAlmostEqual(*aucs, delta=_TOLERANCE)

  def _start(self, name):
    # Without --gpu the CPU is asked for; that no GPU is visible makes sure of it.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
    return subprocess.Popen(
      [
        *(
          sys.executable,
          "-m",
          "monolith.native_training.demo",
          f"--model_dir={self.create_tempdir().full_path}",
        ),
        *_SMALL,
        f"--gpu={name == 'gpu'}",
      ],
      cwd=_ROOT,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **hidden},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )


if __name__ == "__main__":
  absltest.main()
