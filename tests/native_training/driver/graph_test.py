"""Tests what a task becomes for Estimator; tests/native_training/cpu_training_test.py trains.

Covers `dense_variables`.
"""

from __future__ import annotations

import os
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import (
  cpu_training,
  device_utils,
  entry,
  feature,
  graph_estimator,
  native_task,
)
from monolith.native_training.data import parsers
from monolith.native_training.driver import dense_variables, graph
from monolith.native_training.graph import export_context
from monolith.native_training.ranks import agreement
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_EVAL = graph_estimator.ModeKeys.EVAL


def _ragged(rows):
  return tf.ragged.constant(rows, dtype=tf.int64, row_splits_dtype=tf.int64)


class _Task(native_task.NativeTask):
  """Two features on one slot each, a dense weight, and a count of how often it was built."""

  num_builds = 0

  def create_input_fn(self, mode):
    features = {"a": _ragged([[1, 2], [3]]), "b": _ragged([[4], [4]]), "dense": tf.zeros([2])}
    return lambda: tf.data.Dataset.from_tensors(features)

  def create_model_fn(self):
    def model_fn(features, mode, config):
      type(self).num_builds += 1
      self.seen = features
      for name in ("a", "b"):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(name=name, default_vec_initializer=entry.ZerosInitializer())
        )
        column = feature.FeatureColumn(slot, name)
        column.embedding_lookup(slot.add_feature_slice(2))
      self.weight = tf.compat.v1.get_variable("weight", [64, 1024])
      return graph_estimator.EstimatorSpec(
        mode, loss=tf.reduce_sum(self.weight), train_op=tf.no_op()
      )

    return model_fn


class CpuTrainingTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    _Task.num_builds = 0
    context = tf.Graph().as_default()
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)

  def _training(self, collected=None, **config):
    self._task = _Task.params().instantiate()
    return graph.CpuTraining(
      cpu_training.CpuTrainingConfig(**config), self._task, collected=collected
    )

  def _build(self, training, features=None, mode=_TRAIN, model_dir=None):
    config = graph_estimator.RunConfig(
      model_dir=model_dir or os.path.join(os.environ["TEST_TMPDIR"], "model")
    )
    if features is None:
      dataset = training.create_input_fn(mode)()
      features = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    tf.compat.v1.train.get_or_create_global_step()
    return training.create_model_fn()(features=features, mode=mode, config=config)

  def test_dry_run_is_done_once_per_job(self):
    first = self._training()
    self.assertEqual(_Task.num_builds, 1)

    second = self._training(collected=first.collected)

    self.assertEqual(_Task.num_builds, 1)
    self.assertIs(second.collected, first.collected)
    self.assertCountEqual(second.feature_configs.configs, ["a", "b"])

  def test_tables_of_serving_keep_nothing_of_training(self):
    training = self._training()
    serving = pb.EntryConfig.EntryType.SERVING

    def entry_type():
      return training.feature_configs.configs["a"].table_config.entry_config.entry_type

    self.assertNotEqual(entry_type(), serving)
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      self.assertEqual(entry_type(), serving)
      self.assertEqual(training.config.embedding_prefetch_capacity, 0)

  def test_task_sees_dense_features_and_looked_up_embeddings(self):
    training = self._training()

    self._build(training)

    self.assertCountEqual(self._task.seen, ["a", "b", "dense"])
    self.assertEqual(self._task.seen["a"].shape.as_list(), [None, 2])
    names = {t.feature_name for t in tf.compat.v1.get_collection("dequeued_sparse_features")}
    self.assertEqual(names, {"a", "b"})

  def test_features_without_names_are_refused(self):
    training = self._training()

    with self.assertRaisesRegex(TypeError, "want a dict: the model looks up features by name"):
      self._build(training, features=tf.constant([1]))

  def test_mark_of_the_last_element_goes_around_the_model(self):
    training = self._training()
    mark = tf.constant(True)
    features = {
      "a": _ragged([[1]]),
      "b": _ragged([[2]]),
      agreement.EOF_KEY: mark,
    }

    self._build(training, features)

    self.assertNotIn(agreement.EOF_KEY, self._task.seen)
    self.assertLen(tf.compat.v1.get_collection(agreement.EOF_KEY), 1)
    self.assertIn(agreement.EOF_KEY, features)

  def test_hooks_of_training_restore_and_save_and_those_of_evaluation_only_restore(self):
    spec = self._build(self._training())
    kinds = [type(hook).__name__ for hook in spec.training_chief_hooks]
    self.assertLess(
      kinds.index("CheckpointRestorerHook"), kinds.index("NoFirstSaveCheckpointSaverHook")
    )

    with tf.Graph().as_default():
      spec = self._build(self._training(), mode=_EVAL)
    kinds = [type(hook).__name__ for hook in spec.evaluation_hooks]
    self.assertIn("CheckpointRestorerHook", kinds)
    self.assertNotIn("NoFirstSaveCheckpointSaverHook", kinds)
    self.assertEqual(spec.training_chief_hooks, ())

  def test_variables_are_partitioned_over_several_servers_only(self):
    for num_ps, is_partitioned in ((0, False), (1, False), (2, True)):
      with self.subTest(num_ps), tf.Graph().as_default():
        training = self._training(num_ps=num_ps)
        with dense_variables.variable_scopes(training.config):
          weight = tf.compat.v1.get_variable("weight", [64, 1024])

        self.assertEqual(hasattr(weight, "_variable_list"), is_partitioned)

  def test_export_switches_parser_and_placement_and_back(self):
    training = self._training()
    (export_ctx,) = training._export_context_list
    device_utils.enable_gpu_training()
    self.addCleanup(device_utils.disable_gpu_training)
    training._params.train.use_gpu_emb_table = True

    with export_ctx():
      self.assertFalse(device_utils.is_gpu_training())
      self.assertFalse(training._params.train.use_gpu_emb_table)
      self.assertFalse(parsers.get_default_parser_ctx().enable_fused_layout)

    self.assertTrue(device_utils.is_gpu_training())
    self.assertTrue(training._params.train.use_gpu_emb_table)

  def test_chief_of_training_reshards_and_a_reader_does_not(self):
    training = self._training(num_ps=0)
    with mock.patch.object(graph.training_topology, "reshard_if_needed") as reshard:
      training._prepare_checkpoint(_TRAIN, "/nowhere")
      reshard.assert_called_once_with("/nowhere", 0)

      training._prepare_checkpoint(_EVAL, "/nowhere")
      reshard.assert_called_once()

  def test_own_variables_are_initialised_by_the_worker_that_has_them(self):
    variable = tf.compat.v1.get_variable("v", [], initializer=tf.compat.v1.ones_initializer())
    scaffold = dense_variables.create_own_variables_scaffold()
    scaffold.finalize()

    with tf.compat.v1.Session() as session:
      session.run(scaffold.local_init_op)

      self.assertEqual(session.run(variable), 1.0)


if __name__ == "__main__":
  absltest.main()
