"""The driver with a fused layout: serialized examples in, layouts out, rows that learn."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import cpu_training, graph_estimator, multi_hash_table_ops, utils
from monolith.native_training.data import parsers
from tests.layout_task import DIMS, LayoutTask

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()


class SharedSlotTask(LayoutTask):
  """Columns `a` and `z` share a slot; that of `m` is narrower, and lies between them by name."""

  rows = {"a": [[1], [2]], "m": [[7], [8]], "z": [[1, 7], [1]]}
  slots = {"shared": ["a", "z"], "own": ["m"]}

  def dims(self, slot):
    return DIMS if slot == "shared" else (1, 2)


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
      estimator = graph_estimator.Estimator(
        training.create_model_fn(),
        config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
      )
      return next(
        estimator.predict(
          training.create_input_fn(graph_estimator.ModeKeys.PREDICT), yield_single_examples=False
        )
      )


if __name__ == "__main__":
  tf.test.main()
