"""A small field-aware factorization machine: the smallest complete task, used by demo and tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from monolith import _tensorflow
from monolith.core import base_model_params, hyperparams, model_registry
from monolith.native_training import entry, feature, graph_estimator, native_task
from monolith.native_training.input import generate_ffm_example, slot_to_key
from monolith.native_training.metric import deep_insight_ops

keras = _tensorflow.import_keras()

_NUM_SLOTS = 6
# (left slot, right slot, dimension) of each dot product.
_FFM_SLOT = ((0, 3, 16), (0, 4, 16), (1, 5, 16), (2, 3, 16), (2, 5, 16))
_VOCAB_SIZES = [5, 5, 5, 5, 5, 5]
_NUM_EXAMPLES = 64
# Slots 0 to this one have a bias.
_LAST_BIAS_SLOT = 3


def _parse_example(example: tf.Tensor) -> dict[str, tf.Tensor]:
  """Parses serialized examples `[batch]` into a label `[batch]` and ragged ids per slot."""
  feature_map: dict[str, Any] = {"label": tf.io.FixedLenFeature([], tf.float32)}
  for slot in range(_NUM_SLOTS):
    feature_map[slot_to_key(slot)] = tf.io.VarLenFeature(tf.int64)
  features = tf.io.parse_example(example, feature_map)
  return {
    key: tf.RaggedTensor.from_sparse(value) if isinstance(value, tf.SparseTensor) else value
    for key, value in features.items()
  }


class TestFFMModel(native_task.NativeTask):
  """Predicts the label from dot products of slots' vectors and the slots' biases."""

  # Keeps pytest from collecting it where it is imported.
  __test__ = False

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    def input_fn() -> tf.data.Dataset:
      np.random.seed(0)
      examples = [generate_ffm_example(_VOCAB_SIZES) for _ in range(_NUM_EXAMPLES)]
      dataset = tf.data.Dataset.from_tensor_slices(examples)
      dataset = dataset.batch(self.p.train.per_replica_batch_size, drop_remainder=True)
      return dataset.map(_parse_example).cache().repeat().prefetch(tf.data.AUTOTUNE)

    return input_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    def model_fn(
      features: dict[str, tf.Tensor], mode: str, config: Any = None
    ) -> graph_estimator.EstimatorSpec:
      columns = [self._create_column(slot) for slot in range(_NUM_SLOTS)]
      biases = [column.get_bias() for column in columns[: _LAST_BIAS_SLOT + 1]]
      products = []
      for left, right, dim in _FFM_SLOT:
        pair = [
          columns[slot].embedding_lookup(columns[slot].feature_slot.add_feature_slice(dim))
          for slot in (left, right)
        ]
        products.append(tf.reduce_sum(pair[0] * pair[1], axis=1))
      ffm_out = tf.add_n(products) + tf.reduce_sum(tf.concat(biases, axis=1), axis=1)
      pred = tf.sigmoid(ffm_out)
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=pred)

      label = features["label"]
      loss = tf.reduce_sum(keras.losses.binary_crossentropy(label, pred))
      global_step = tf.compat.v1.train.get_or_create_global_step()
      deep_insight_op = self._write_deep_insight(label, pred)
      embeddings = [column.get_all_embeddings_concat() for column in columns]
      gradients = tf.gradients(loss, embeddings)
      with tf.control_dependencies([tf.compat.v1.assign_add(global_step, 1)]):
        apply_grads = self.ctx.apply_embedding_gradients(zip(gradients, embeddings))
      return graph_estimator.EstimatorSpec(
        mode, predictions=pred, loss=loss, train_op=tf.group(apply_grads, deep_insight_op)
      )

    return model_fn

  def create_serving_input_receiver_fn(self) -> Callable[[], Any]:
    def serving_input_receiver_fn() -> graph_estimator.ServingInputReceiver:
      instances = tf.compat.v1.placeholder(tf.string, shape=[None], name="instances")
      return graph_estimator.ServingInputReceiver(
        _parse_example(instances), {"instances": instances}
      )

    return serving_input_receiver_fn

  def _create_column(self, slot: int) -> feature.FeatureColumn:
    config = feature.FeatureSlotConfig(
      name=str(slot),
      has_bias=slot <= _LAST_BIAS_SLOT,
      bias_optimizer=entry.FtrlOptimizer(
        learning_rate=0.1, initial_accumulator_value=1e-6, beta=1.0
      ),
      default_vec_optimizer=entry.SgdOptimizer(learning_rate=0.1),
    )
    return feature.FeatureColumn(self.ctx.create_feature_slot(config), slot_to_key(slot))

  def _write_deep_insight(self, label: tf.Tensor, pred: tf.Tensor) -> tf.Operation | tf.Tensor:
    metrics = self.p.metrics
    if not metrics.enable_deep_insight or metrics.deep_insight_sample_ratio <= 0:
      return tf.no_op()
    uids = tf.zeros_like(label, dtype=tf.int64)
    logging.info(
      "Writing deep insight of model %s, target %s", metrics.deep_insight_name, "ctr_head"
    )
    return deep_insight_ops.write_deep_insight(
      deep_insight_client_tensor=deep_insight_ops.deep_insight_client(),
      uids=uids,
      req_times=uids + int(time.time()),
      labels=label,
      preds=pred,
      sample_rates=tf.ones_like(label) * 0.1,
      model_name=metrics.deep_insight_name or "",
      target="ctr_head",
      sample_ratio=0.01,
    )


@model_registry.RegisterSingleTaskModel
class FFMParams(base_model_params.SingleTaskModelParams):
  """The FFM model with a batch of 64."""

  def task(self) -> hyperparams.InstantiableParams:
    params = TestFFMModel.params()
    params.train.per_replica_batch_size = 64
    return params
