"""The driver with a fused layout: serialized examples in, layouts out, rows that learn."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from idl.matrix.proto import example_pb2
from monolith.native_training import (
  cpu_training,
  entry,
  feature,
  multi_hash_table_ops,
  native_task,
  utils,
)
from monolith.native_training.data import parsers

tf.compat.v1.disable_eager_execution()

_TRAIN = tf.estimator.ModeKeys.TRAIN
_PREDICT = tf.estimator.ModeKeys.PREDICT

# Ids of two examples.
_ROWS = {"user": [[1], [2]], "item": [[7, 8], [8]]}
_DIMS = (1, 4)


def _serialized(feature_rows):
  examples = []
  for i in range(2):
    example = example_pb2.Example()
    for name, rows in feature_rows.items():
      example.named_feature.add(name=name).feature.fid_v2_list.value.extend(rows[i])
    label = example.named_feature.add(name="label").feature.float_list
    label.value.append(float(i))
    examples.append(example.SerializeToString())
  return examples


class LayoutTask(native_task.NativeTask):
  """A bias and a vector per feature; a row's columns fall by the learning rate times its uses."""

  weight = 2.0
  rows = _ROWS
  # The features of each slot.
  slots = {name: [name] for name in _ROWS}

  def __init__(self, params):
    super().__init__(params)
    self.layout_dict = {}
    for name in ("bias", "vec"):
      config = example_pb2.OutConfig(out_type=example_pb2.OutType.CONCAT)
      width = 0
      for slot, feature_names in self.slots.items():
        bias, vec = self.dims(slot)
        start, end = (0, bias) if name == "bias" else (bias, bias + vec)
        for feature_name in feature_names:
          config.slice_configs.add(feature_name=feature_name, start=start, end=end)
          width += end - start
      config.shape.add(dims=[-1, width])
      self.layout_dict[name] = config

  def dims(self, slot):
    return _DIMS

  def create_input_fn(self, mode):
    def input_fn():
      def parse(examples):
        return parsers.parse_examples(
          examples,
          sparse_features=list(self.rows),
          dense_features=["label"],
          dense_feature_shapes=[1],
          dense_feature_types=[tf.float32],
        )

      dataset = tf.data.Dataset.from_tensors(_serialized(self.rows)).map(parse)
      return dataset.repeat() if mode == _TRAIN else dataset

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      parts = {"bias": [], "vec": []}
      for name, feature_names in self.slots.items():
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=name,
            default_vec_initializer=entry.ZerosInitializer(),
            default_vec_optimizer=entry.SgdOptimizer(learning_rate=0.5),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        slices = [slot.add_feature_slice(dim) for dim in self.dims(name)]
        for feature_name in feature_names:
          column = feature.FeatureColumn(slot, feature_name)
          for part, feature_slice in zip(parts.values(), slices):
            part.append(column.embedding_lookup(feature_slice))
      factory = self.ctx.layout_factory
      if factory is None:  # the dry run
        layouts = {name: tf.concat(part, axis=1) for name, part in parts.items()}
        variables = list(layouts.values())
      else:
        layouts = {name: factory.get_layout(name) for name in parts}
        variables = factory.flattened_layout()
      if mode == _PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=layouts)
      loss = tf.reduce_sum(layouts["bias"]) + self.weight * tf.reduce_sum(layouts["vec"])
      loss += 0 * tf.reduce_sum(features["label"])
      apply_op = self.ctx.apply_embedding_gradients(zip(tf.gradients(loss, variables), variables))
      with tf.control_dependencies([apply_op]):
        step_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
      # Not the loss itself, which would stop training when it is NaN.
      return tf.estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=step_op)

    return model_fn


class SharedSlotTask(LayoutTask):
  """Columns `a` and `z` share a slot; that of `m` is narrower, and lies between them by name."""

  rows = {"a": [[1], [2]], "m": [[7], [8]], "z": [[1, 7], [1]]}
  slots = {"shared": ["a", "z"], "own": ["m"]}

  def dims(self, slot):
    return _DIMS if slot == "shared" else (1, 2)


class NanTask(LayoutTask):
  weight = float("nan")


class FusedLayoutTrainingTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(setattr, parsers.get_default_parser_ctx(), "enable_fused_layout", False)

  @parameterized.product(
    num_ps=(0, 2), use_native_multi_hash_table=(True, False), is_async=(False, True)
  )
  def test_trains_and_restores(self, num_ps, use_native_multi_hash_table, is_async):
    got = self._train_and_predict(LayoutTask, num_ps, use_native_multi_hash_table, is_async)
    # Item 8 is in both examples.
    falls = 6 * 0.5 * np.array([[1, 1 + 2], [1, 2]])
    self.assertAllClose(got["bias"], -falls)
    self.assertAllClose(got["vec"], -2 * np.repeat(falls, 4, axis=1))

  @parameterized.product(
    num_ps=(0, 2), use_native_multi_hash_table=(True, False), is_async=(False, True)
  )
  def test_columns_of_a_slot_share_rows(self, num_ps, use_native_multi_hash_table, is_async):
    got = self._train_and_predict(SharedSlotTask, num_ps, use_native_multi_hash_table, is_async)
    # Id 1 of the shared slot is used by `a` once and by `z` twice; id 7 is another one in `own`.
    falls = 6 * 0.5 * np.array([[3, 3 + 1, 1], [1, 3, 1]])
    self.assertAllClose(got["bias"], -falls)
    self.assertAllClose(got["vec"], -2 * np.repeat(falls, [4, 4, 2], axis=1))

  def test_tables_are_named_as_without_fused_layout(self):
    params = SharedSlotTask.params()
    params.metrics.enable_tf2_profiler_hook = False
    params.train.per_replica_batch_size = 2
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    conf = cpu_training.CpuTrainingConfig(enable_fused_layout=True)
    cpu_training.local_train_internal(params, conf, folder, steps=1)

    with tf.compat.v1.Session(graph=tf.Graph()) as sess:
      names, counts = multi_hash_table_ops.hash_table_ops.monolith_multi_hash_table_feature_stat(
        os.path.join(folder, "model.ckpt-1.assets", "MonolithMultiHashTable_0")
      )
      names, counts = sess.run([names, counts])
    self.assertEqual(dict(zip(names, counts)), {b"shared": 3, b"m": 2})

  def _train_with_nan(self, policy):
    os.environ["MONOLITH_BAD_GRADIENTS"] = policy
    self.addCleanup(os.environ.pop, "MONOLITH_BAD_GRADIENTS", None)
    params = NanTask.params()
    params.metrics.enable_tf2_profiler_hook = False
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    conf = cpu_training.CpuTrainingConfig(enable_fused_layout=True)
    cpu_training.local_train_internal(params, conf, folder, steps=1)
    return self._predict(params, conf, folder)

  def test_nan_names_the_layout(self):
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "The gradient of layout vec is not finite"
    ):
      self._train_with_nan("stop")

  def test_nan_is_skipped(self):
    got = self._train_with_nan("skip")

    self.assertAllClose(got["bias"], -0.5 * np.array([[1, 1 + 2], [1, 2]]))
    self.assertAllEqual(got["vec"], np.zeros([2, 8]))

  def _train_and_predict(self, task, num_ps, use_native_multi_hash_table, is_async):
    """Returns the layouts after three steps, a restart and three more."""
    config = {
      "num_ps": num_ps,
      "use_native_multi_hash_table": use_native_multi_hash_table,
      "enable_fused_layout": True,
    }
    if is_async:
      config.update(embedding_prefetch_capacity=1, enable_embedding_postpush=True)
    params = task.params()
    params.metrics.enable_tf2_profiler_hook = False
    params.train.per_replica_batch_size = 2
    folder = os.path.join(utils.get_test_tmp_dir(), "model")

    for _ in range(2):
      conf = cpu_training.CpuTrainingConfig(**config)
      cpu_training.local_train_internal(params, conf, folder, steps=3)

    return self._predict(params, cpu_training.CpuTrainingConfig(**config), folder)

  def _predict(self, params, conf, folder):
    with cpu_training._local_cluster(conf.num_ps) as (session_config, _):
      training = cpu_training.CpuTraining(conf, params.instantiate())
      estimator = tf.estimator.Estimator(
        training.create_model_fn(),
        config=tf.estimator.RunConfig(model_dir=folder, session_config=session_config),
      )
      return next(
        estimator.predict(training.create_input_fn(_PREDICT), yield_single_examples=False)
      )


if __name__ == "__main__":
  tf.test.main()
