"""A small task with embeddings for the TPU runner: copy it to start one's own.

    python -m monolith.tasks.parity_data --output_dir=parity_data
    PARITY_DATA=parity_data python -m monolith.tpu_runner --cpu_test \\
        --task=monolith.tasks.parity_example.ParityExample --model_dir=model \\
        --save_checkpoints_steps=25

The model is a logistic regression on the biases of two slots plus a dense layer on their vectors.
The data is in the folder that the environment variable `PARITY_DATA` names, by default
`parity_data`.
"""

import os
from typing import Any, Callable, Optional

import tensorflow as tf

from monolith import _tensorflow
from monolith.core import (
  base_embedding_host_call,
  base_embedding_task,
  base_model_params,
  dense,
  feature,
  hyperparams,
  model_registry,
)
from monolith.native_training import graph_estimator
from monolith.tasks import parity_data

_DIM = 4


class ParityTask(base_embedding_task.BaseEmbeddingTask):
  """Predicts the parity of the id of slot 2."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("learning_rate", 0.5, "Learning rate of the dense layer and, on CPU, of the tables.")
    p.define("eval_file_pattern", None, "Evaluation files.")
    return p

  def create_input_fn(self, mode: str = graph_estimator.ModeKeys.TRAIN) -> Callable[..., Any]:
    if mode == graph_estimator.ModeKeys.TRAIN:
      return super().create_input_fn(mode)

    def input_fn(params: dict[str, Any]) -> tf.data.Dataset:
      files = base_embedding_task.list_files(self.p.eval_file_pattern)
      return self.create_dataset(tf.data.Dataset.from_tensor_slices(files), params)

    return input_fn

  def _get_feature_map(self) -> dict[str, Any]:
    return {
      "slot_1_0": tf.io.VarLenFeature(tf.int64),
      "slot_2_0": tf.io.VarLenFeature(tf.int64),
      "uid": tf.io.FixedLenFeature([], tf.int64),
      self.p.train.label_key: tf.io.FixedLenFeature([], tf.float32),
    }

  def logits_fn(self) -> tf.Tensor:
    biases, vectors = [], []
    for slot_id in (1, 2):
      slot = feature.FeatureSlot(self._env, slot_id, has_bias=True)
      vector = slot.add_feature_slice(dim=_DIM)
      column = feature.FeatureColumnV1(slot, f"slot_{slot_id}")
      biases.append(column.get_bias())
      vectors.append(column.embedding_lookup(vector))
    tower = dense.Dense.params().set(name="tower", units=1).instantiate()
    return tf.reshape(tf.add_n(biases) + tower(tf.concat(vectors, axis=1)), [-1])

  def create_model_fn(self) -> Callable[..., Any]:
    def model_fn(features: dict[str, Any], mode: str, params: dict[str, Any]) -> Any:
      self._env.set_tpu_features(features)
      logits = self.logits_fn()
      labels = features[self.p.train.label_key]
      predictions = tf.sigmoid(logits)
      loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
      spec = _tensorflow.import_tpu_estimator().TPUEstimatorSpec
      if mode == graph_estimator.ModeKeys.EVAL:
        return spec(mode=mode, loss=loss, eval_metrics=(_metric_fn, [labels, predictions]))
      optimizer = self.cross_shard_optimizer(
        tf.compat.v1.train.AdagradOptimizer(self.p.learning_rate), params
      )
      train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
      host_call = self._create_host_call(params)
      if host_call is None:
        return spec(mode=mode, loss=loss, train_op=train_op)
      host_call.record_summary_tensor("loss_avg", loss)
      host_call.record_summary_tensor("labels_for_auc_calculation", labels)
      host_call.record_summary_tensor("y_pred_for_auc_calculation", predictions)
      host_call.record_summary_tensor("uid_bucket", features["uid_bucket"])
      return spec(
        mode=mode,
        loss=loss,
        train_op=train_op,
        host_call=host_call.generate_host_call_hook(),
        training_hooks=host_call.tpu_var_restore_hooks,
      )

    return model_fn

  def _create_host_call(
    self, params: dict[str, Any]
  ) -> Optional[base_embedding_host_call.BaseEmbeddingHostCall]:
    if not (params["enable_host_call"] and params["model_dir"]):
      return None
    return base_embedding_host_call.BaseEmbeddingHostCall(
      output_dir=params["model_dir"],
      enable_host_call=True,
      enable_deepinsight=self.p.enable_deepinsight,
      enable_host_call_scalar_metrics=self.p.enable_host_call_scalar_metrics,
      enable_caching_with_tpu_var_mode=self.p.enable_caching_with_tpu_var_mode,
      top_k_sampling_num_per_core=self.p.top_k_sampling_num_per_core,
      params=params,
    )


def _metric_fn(labels: tf.Tensor, predictions: tf.Tensor) -> dict[str, Any]:
  return {"auc": tf.compat.v1.metrics.auc(labels, predictions)}


@model_registry.RegisterSingleTaskModel
class ParityExample(base_model_params.SingleTaskModelParams):
  """100 steps on the data of `parity_data`."""

  def task(self) -> hyperparams.InstantiableParams:
    folder = os.environ.get("PARITY_DATA", "parity_data")
    p = ParityTask.params()
    p.vocab_file_path = os.path.join(folder, parity_data.VOCAB_FILE)
    p.enable_host_call_scalar_metrics = True
    p.input.eval_examples = parity_data.NUM_EVAL_EXAMPLES
    p.eval.per_replica_batch_size = 16
    p.eval_file_pattern = os.path.join(folder, parity_data.EVAL_FILE)
    p.train.file_pattern = os.path.join(folder, parity_data.TRAIN_FILE)
    p.train.per_replica_batch_size = 16
    p.train.max_steps = 100
    p.train.repeat = True
    return p
