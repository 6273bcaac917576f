"""A task's serving params choose the exporter."""

from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import cpu_training, graph_estimator, native_task
from monolith.native_training.driver import export
from monolith.native_training.graph.export_context import ExportMode
from monolith.native_training.model_export import saved_model_exporters

tf.compat.v1.disable_eager_execution()


class _Task(native_task.NativeTask):
  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors({"x": tf.zeros([1])})

  def create_model_fn(self):
    return lambda features, mode, config: graph_estimator.EstimatorSpec(
      mode, loss=tf.constant(0.0), train_op=tf.no_op()
    )


class CreateExporterTest(absltest.TestCase):
  def _create(self, mode, dense_only=False, serving=None, contexts=None, **config):
    params = _Task.params()
    params.serving.export_mode = mode
    params.serving.set(**(serving or {}))
    self._training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(**config), params.instantiate()
    )
    with mock.patch.object(saved_model_exporters, "StandaloneExporter") as standalone, \
        mock.patch.object(saved_model_exporters, "DistributedExporter") as distributed:  # fmt: skip
      self._exporter = export.create_exporter(
        self._training, "/model", "/warmup", "/exported", dense_only, ["entry"], contexts
      )
    (call,) = standalone.call_args_list + distributed.call_args_list
    self._kind = "standalone" if standalone.called else "distributed"
    return call

  def test_standalone(self):
    args, kwargs = self._create(ExportMode.STANDALONE, num_ps=2)

    self.assertEqual(self._kind, "standalone")
    self.assertEqual(args[1:], ("/model", "/exported"))
    self.assertEqual((kwargs["warmup_file"], kwargs["num_ps"]), ("/warmup", 2))
    self.assertEqual(kwargs["export_context_list"], self._training._export_context_list)
    self.assertNotIn("dense_only", kwargs)

  def test_distributed(self):
    _, kwargs = self._create(
      ExportMode.DISTRIBUTED,
      dense_only=True,
      serving={"with_remote_gpu": True, "export_with_cleared_entry_devices": True},
      contexts=["mine"],
    )

    self.assertEqual(self._kind, "distributed")
    self.assertTrue(kwargs["dense_only"])
    self.assertTrue(kwargs["with_remote_gpu"])
    self.assertTrue(kwargs["clear_entry_devices"])
    self.assertEqual(kwargs["include_graphs"], ["entry"])
    self.assertEqual(kwargs["export_context_list"], ["mine"])
    self.assertFalse(kwargs["global_step_as_timestamp"])

  def test_ranks_are_servers_unless_each_has_a_folder(self):
    sync = {"num_workers": 3, "enable_sync_training": True}

    _, kwargs = self._create(ExportMode.DISTRIBUTED, **sync)
    self.assertEqual(kwargs["num_ps"], 3)
    self.assertTrue(kwargs["global_step_as_timestamp"])

    _, kwargs = self._create(ExportMode.DISTRIBUTED, merge_sync_training_ckpt=False, **sync)
    self.assertIsNone(kwargs["num_ps"])

  def test_unknown_mode(self):
    with self.assertRaisesRegex(ValueError, "Invalid export_mode: sideways"):
      self._create("sideways")


if __name__ == "__main__":
  absltest.main()
