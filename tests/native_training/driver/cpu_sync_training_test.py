"""Synchronous training in one process: what a task sees and what its tables learn.

Works with Horovod and, as a backend of one rank, without it.
"""

from __future__ import annotations

import os
import types

import pytest

os.environ["MONOLITH_WITH_HOROVOD"] = "True"

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  device_utils,
  distribution_utils,
  embedding_combiners,
  entry,
  feature,
  graph_estimator,
  hvd_lib,
  native_task,
  sync_training_hooks,
)
from monolith.native_training.data.training_instance.python.parser_utils import advanced_parse
from monolith.native_training.driver import local as local_training

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT


def setUpModule():  # noqa: N802
  hvd_lib.init()


def _ragged(rows):
  return tf.ragged.constant(rows, dtype=tf.int64, row_splits_dtype=tf.int64)


class FeatureTask(native_task.NativeTask):
  """One feature of five columns, five batches, no global step."""

  def _features(self):
    return {"feature": _ragged([[1, 2, 3, 4]])}

  def create_input_fn(self, mode):
    def input_fn():
      return tf.data.Dataset.from_tensors(self._features()).repeat(5).map(advanced_parse)

    return input_fn

  def _look_up(self, combiner=None):
    slot = self.ctx.create_feature_slot(
      feature.FeatureSlotConfig(default_vec_initializer=entry.ZerosInitializer())
    )
    column = feature.FeatureColumn(slot, "feature", combiner=combiner)
    return column, column.embedding_lookup(slot.add_feature_slice(5))

  def _train(self, mode, column, embedding):
    loss = tf.reduce_sum(embedding)
    embeddings = column.get_all_embeddings_concat()
    gradients = tf.gradients(loss, embeddings)
    train_op = self.ctx.apply_embedding_gradients(zip(gradients, [embeddings]))
    return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

  def create_model_fn(self):
    def model_fn(features, mode, **kwargs):
      column, embedding = self._look_up()
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=tf.constant(0))
      return self._train(mode, column, embedding)

    return model_fn


class FloatFeatureTask(FeatureTask):
  """Has a dense feature, which is only predicted with."""

  def _features(self):
    return {"feature": _ragged([[1, 2, 3, 4]]), "float_feature": tf.constant([[1.0, 2.0]])}

  def create_model_fn(self):
    def model_fn(features, mode, **kwargs):
      column, embedding = self._look_up()
      predictions = tf.reduce_sum(features["float_feature"])
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=predictions)
      return self._train(mode, column, embedding)

    return model_fn


class SequenceFeatureTask(FeatureTask):
  """Keeps the first two ids of every example; one batch."""

  def create_input_fn(self, mode):
    def input_fn():
      features = {"feature": _ragged([[1, 2], [], [3, 4, 5]])}
      return tf.data.Dataset.from_tensors(features).map(advanced_parse)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, **kwargs):
      column, embedding = self._look_up(embedding_combiners.FirstN(2))
      predictions = tf.reduce_sum(embedding, axis=1)
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=predictions)
      return self._train(mode, column, embedding)

    return model_fn


class SteppingTask(SequenceFeatureTask):
  """Counts steps, so that a checkpoint is written."""

  def _train(self, mode, column, embedding):
    spec = super()._train(mode, column, embedding)
    global_step = tf.compat.v1.train.get_or_create_global_step()
    with tf.control_dependencies([spec.train_op]):
      return spec._replace(train_op=tf.compat.v1.assign_add(global_step, 1).op)


class NonFeatureTask(native_task.NativeTask):
  """Has no embedding, and elements that are no dict."""

  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors([1])

  def create_model_fn(self):
    def model_fn(features, mode, **kwargs):
      return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=tf.group(features))

    return model_fn


class EmbeddingUpdateTask(native_task.NativeTask):
  """Compares every step with TensorFlow's own embeddings and Adagrad, for equality."""

  seen: list = []

  def create_input_fn(self, mode):
    def input_fn():
      return tf.data.Dataset.from_tensors({"feature": _ragged([[1, 2, 3, 4]])}).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, **kwargs):
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          default_vec_initializer=entry.ConstantsInitializer(0),
          default_vec_optimizer=entry.AdagradOptimizer(0.1, initial_accumulator_value=1),
          default_vec_compressor=entry.Fp32Compressor(),
        )
      )
      column = feature.FeatureColumn(slot, "feature")
      embedding = column.embedding_lookup(slot.add_feature_slice(5))
      weights = tf.compat.v1.get_variable(
        "tf_embedding", [5, 5], initializer=tf.zeros_initializer()
      )
      tf_embedding = tf.reduce_sum(tf.nn.embedding_lookup(weights, [1, 2, 3, 4]), 0, keepdims=True)
      loss = tf.reduce_sum(embedding)
      tf_loss = tf.reduce_sum(tf_embedding)
      check = tf.debugging.assert_equal(embedding, tf_embedding)
      pushed = column.get_all_embeddings_concat()
      gradients = tf.gradients(loss, pushed)
      tf_optimizer = tf.compat.v1.train.AdagradOptimizer(0.1, initial_accumulator_value=1)
      global_step = tf.compat.v1.train.get_or_create_global_step()
      with tf.control_dependencies([check]):
        train_op = tf.group(
          self.ctx.apply_embedding_gradients(zip(gradients, [pushed])),
          tf_optimizer.minimize(tf_loss, global_step=global_step),
        )
      hook = _CollectHook(embedding)
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[hook]
      )

    return model_fn


class _CollectHook(tf.compat.v1.train.SessionRunHook):
  """Remembers the first value of what every step looked up."""

  def __init__(self, embedding):
    self._embedding = embedding[0, 0]

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._embedding)

  def after_run(self, run_context, run_values):
    EmbeddingUpdateTask.seen.append(float(run_values.results))


def _config(**kwargs):
  values = {"enable_sync_training": True, "reorder_fids_in_data_pipeline": True, **kwargs}
  return cpu_training.CpuTrainingConfig(**values)


class _CountHook(tf.compat.v1.train.SessionRunHook):
  """Counts steps: some tasks do not."""

  def __init__(self):
    self.num_runs = 0

  def after_run(self, run_context, run_values):
    self.num_runs += 1


class CpuSyncTrainTest(parameterized.TestCase, tf.test.TestCase):
  def _train(self, task_class, steps=None, **kwargs):
    training = cpu_training.CpuTraining(_config(**kwargs), task_class.params().instantiate())
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(
        model_dir=os.environ["TEST_TMPDIR"], device_fn=device_utils.default_device_fn
      ),
    )
    counter = _CountHook()
    estimator.train(training.create_input_fn(_TRAIN), hooks=[counter], steps=steps)
    return training, estimator, counter.num_runs

  def test_cpu_training_feature(self):
    _, _, num_runs = self._train(FeatureTask)

    self.assertEqual(num_runs, 5)

  def test_cpu_training_float_feature(self):
    _, _, num_runs = self._train(FloatFeatureTask)

    self.assertEqual(num_runs, 5)

  def test_cpu_training_sequence_feature(self):
    _, _, num_runs = self._train(SequenceFeatureTask)

    self.assertEqual(num_runs, 1)

  def test_cpu_training_non_feature(self):
    _, _, num_runs = self._train(NonFeatureTask)

    self.assertEqual(num_runs, 1)

  @parameterized.parameters(True, False)
  def test_embedding_update(self, use_native_multi_hash_table):
    EmbeddingUpdateTask.seen = []

    self._train(
      EmbeddingUpdateTask, steps=10, use_native_multi_hash_table=use_native_multi_hash_table
    )

    steps = -np.cumsum(0.1 / np.sqrt(1 + np.arange(1, 10)))
    self.assertAllClose(EmbeddingUpdateTask.seen, [0, *(4 * steps)], rtol=1e-6)
    self.assertNear(EmbeddingUpdateTask.seen[1], -0.2828427, 1e-7)

  @parameterized.parameters(True, False)
  def test_predicts_what_was_trained(self, use_native_multi_hash_table):
    training, estimator, _ = self._train(
      SteppingTask, use_native_multi_hash_table=use_native_multi_hash_table
    )

    predictions = list(estimator.predict(training.create_input_fn(_PREDICT)))

    # Rows [1, 2], [] and [3, 4], all of them trained once but the padding.
    self.assertLen(predictions, 3)
    self.assertAllEqual(predictions[1], np.zeros(5))
    self.assertAllLess(predictions[0], 0)

  def test_ids_need_not_be_reordered_in_the_pipeline(self):
    _, _, num_runs = self._train(FeatureTask, reorder_fids_in_data_pipeline=False)

    self.assertEqual(num_runs, 5)

  def test_serving_copy(self):
    training = cpu_training.CpuTraining(
      _config(num_workers=3, embedding_prefetch_capacity=1), FeatureTask.params().instantiate()
    )

    serving = training._serving_config

    self.assertFalse(serving.enable_sync_training)
    self.assertFalse(serving.reorder_fids_in_data_pipeline)
    self.assertEqual(serving.num_ps, 3)
    self.assertEqual(serving.embedding_prefetch_capacity, 0)


class DistributedSyncTrainTest(parameterized.TestCase, tf.test.TestCase):
  def _train(self, task_class=FeatureTask, user_hooks=None, max_steps=None, **kwargs):
    config = cpu_training.DistributedCpuTrainingConfig(
      model_dir=os.environ["TEST_TMPDIR"],
      num_ps=0,
      num_workers=1,
      index=0,
      enable_sync_training=True,
      reorder_fids_in_data_pipeline=True,
      **kwargs,
    )
    params = task_class.params()
    params.train.max_steps = max_steps
    return cpu_training.distributed_sync_train(config, params, user_hooks=user_hooks)

  def test_basic(self):
    counter = _CountHook()

    self._train(user_hooks=[counter])

    self.assertEqual(counter.num_runs, 5)

  @parameterized.parameters(
    {"enable_pipelined_fwda2a": True},
    {"enable_pipelined_bwda2a": True},
    {"enable_async_optimize": True},
    {"embedding_prefetch_capacity": 2},
    {
      "enable_pipelined_fwda2a": True,
      "enable_pipelined_bwda2a": True,
      "enable_embedding_postpush": True,
    },
    {
      "enable_pipelined_fwda2a": True,
      "enable_pipelined_bwda2a": True,
      "enable_async_optimize": True,
      "embedding_prefetch_capacity": 1,
      "use_native_multi_hash_table": False,
    },
  )
  def test_sparse_pipelining(self, **kwargs):
    counter = _CountHook()

    self._train(user_hooks=[counter], **kwargs)

    self.assertEqual(counter.num_runs, 5)

  def test_the_end_of_data_is_seen_through_queues(self):
    with _environment("MONOLITH_SYNC_EOF", "1"):
      counter = _CountHook()
      self._train(user_hooks=[counter], embedding_prefetch_capacity=2, enable_async_optimize=True)

    self.assertEqual(counter.num_runs, 5)

  def test_eof_of_elements_that_are_no_dict(self):
    with _environment("MONOLITH_SYNC_EOF", "1"):
      counter = _CountHook()
      self._train(NonFeatureTask, user_hooks=[counter])

    self.assertEqual(counter.num_runs, 1)

  def test_goes_on_from_its_checkpoint(self):
    self._train(EmbeddingUpdateTask, max_steps=3)
    EmbeddingUpdateTask.seen = []

    self._train(EmbeddingUpdateTask, max_steps=5)

    self.assertLen(EmbeddingUpdateTask.seen, 2)
    self.assertNear(EmbeddingUpdateTask.seen[0], -4 * 0.1 * np.sum(1 / np.sqrt([2, 3, 4])), 1e-6)

  def test_goes_on_from_a_checkpoint_without_ranks(self):
    params = EmbeddingUpdateTask.params()
    local_training.local_train_internal(
      params, cpu_training.CpuTrainingConfig(), os.environ["TEST_TMPDIR"], steps=3
    )
    EmbeddingUpdateTask.seen = []

    self._train(EmbeddingUpdateTask, max_steps=4)

    self.assertNear(EmbeddingUpdateTask.seen[0], -4 * 0.1 * np.sum(1 / np.sqrt([2, 3, 4])), 1e-6)

  def test_index_must_be_the_rank(self):
    config = cpu_training.DistributedCpuTrainingConfig(index=1, enable_sync_training=True)

    with self.assertRaisesRegex(
      AssertionError, "Given RunConfig.index should be consistent with hvd.rank"
    ):
      cpu_training.distributed_sync_train(config, FeatureTask.params())

  def test_number_of_workers_must_be_the_number_of_ranks(self):
    config = cpu_training.DistributedCpuTrainingConfig(num_workers=2, enable_sync_training=True)

    with self.assertRaisesRegex(AssertionError, "num_workers is 2, but there are 1 ranks"):
      cpu_training.distributed_sync_train(config, FeatureTask.params())

  def test_only_native_tasks(self):
    config = cpu_training.DistributedCpuTrainingConfig(enable_sync_training=True)
    params = types.SimpleNamespace(mode=_TRAIN, instantiate=lambda: "no task")

    with self.assertRaisesRegex(ValueError, "distributed train only support NativeTask. Got no"):
      cpu_training.distributed_sync_train(config, params)

  def test_only_rank_zero_is_chief(self):
    config = _config()

    self.assertEqual(distribution_utils.get_mpi_rank(), 0)
    self.assertTrue(cpu_training.is_chief(config))
    config.index = 1  # The rank counts, not the index.
    self.assertTrue(cpu_training.is_chief(config))

  def test_unknown_attributes_are_the_task_s(self):
    task = FeatureTask.params().instantiate()

    wrapped = sync_training_hooks.EofAwareTask(task)

    self.assertIs(wrapped.p, task.p)
    self.assertNotIsInstance(wrapped, native_task.NativeTask)
    with self.assertRaises(AttributeError):
      wrapped.no_such_attribute  # noqa: B018


class _environment:  # noqa: N801, a context manager like a function
  """Sets an environment variable meanwhile."""

  def __init__(self, name, value):
    self._name, self._value = name, value

  def __enter__(self):
    self._old = os.environ.get(self._name)
    os.environ[self._name] = self._value

  def __exit__(self, *unused):
    if self._old is None:
      del os.environ[self._name]
    else:
      os.environ[self._name] = self._old


if __name__ == "__main__":
  tf.test.main()
