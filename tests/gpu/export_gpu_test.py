"""Exports for GPU serving: where the exported ops are to run, and that they do run there."""

from __future__ import annotations

import glob
import os

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from tensorflow.core.protobuf import saved_model_pb2

from monolith.native_training import cpu_training, device_utils
from monolith.native_training.demos import models
from monolith.native_training.graph import export_context
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_BATCH = 5


class GpuExportTest(absltest.TestCase):
  def _export(self, **serving):
    """Trains two steps; returns the folder of each exported model."""
    params = models.FFMTask.params()
    params.name = "ffm"
    params.num_examples = 200
    params.show_progress = False
    params.serving.export_when_saving = True
    params.serving.export_mode = export_context.ExportMode.DISTRIBUTED
    params.serving.set(**serving)
    model_dir = os.path.join(self.create_tempdir().full_path, "model")
    cpu_training.local_train(
      params, num_ps=1, model_dir=model_dir, steps=2, save_checkpoints_steps=2
    )
    self.assertFalse(device_utils.is_gpu_training())
    files = glob.glob(os.path.join(model_dir, "exported_models", "*", "*", "saved_model.pb"))
    return {file.split(os.sep)[-3]: os.path.dirname(file) for file in files}

  def _devices(self, folder):
    """Returns the devices that the ops of an exported model name, by their type."""
    model = saved_model_pb2.SavedModel()
    with open(os.path.join(folder, "saved_model.pb"), "rb") as file:
      model.ParseFromString(file.read())
    devices = {}
    for node in model.meta_graphs[0].graph_def.node:
      devices.setdefault(node.op, set()).add(node.device)
    return devices

  def test_dense_part_for_a_remote_gpu(self):
    folders = self._export(with_remote_gpu=True)

    self.assertEqual(set(folders), {"entry", "ps_0", "dense_0"})
    self.assertEqual(self._devices(folders["dense_0"])["Sigmoid"], {"/device:GPU:0"})
    for name in ("entry", "ps_0"):
      named = set().union(*self._devices(folders[name]).values())
      self.assertFalse([device for device in named if "GPU" in device], name)
    self._run_dense(folders["dense_0"])

  def _run_dense(self, folder):
    with (
      tf.Graph().as_default(),
      tf.compat.v1.Session(config=gpu_placement.SOFT_PLACEMENT) as session,
    ):
      graph = tf.compat.v1.saved_model.load(session, ["serve"], folder)
      signature = graph.signature_def["gpu_remote_call"]
      random = np.random.default_rng(1)
      feed = {
        tensor.name: random.normal(
          0, 0.1, [_BATCH, *(dim.size for dim in tensor.tensor_shape.dim[1:])]
        )
        for tensor in signature.inputs.values()
      }
      output = next(iter(signature.outputs.values())).name
      metadata = tf.compat.v1.RunMetadata()
      options = tf.compat.v1.RunOptions(output_partition_graphs=True)
      values = session.run(output, feed, options=options, run_metadata=metadata)
    self.assertEqual(values.shape, (_BATCH,))
    self.assertTrue(np.all((values > 0) & (values < 1) & (values != 0.5)), values)
    ran = {node.op: node.device for part in metadata.partition_graphs for node in part.node}
    where = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    self.assertIn(where, ran["Sigmoid"])

  def test_gpu_in_the_entry_graph(self):
    folders = self._export(export_with_gpu_allowed=True)

    self.assertEqual(set(folders), {"entry", "ps_0"})
    devices = self._devices(folders["entry"])
    self.assertEqual(devices["Sigmoid"], {"/device:GPU:0"})


if __name__ == "__main__":
  absltest.main()
