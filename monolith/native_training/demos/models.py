"""The models of the demo: the FFM model on data with a planted structure, and a ranking model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.core import hyperparams
from monolith.native_training import (
  device_utils,
  entry,
  feature,
  graph_estimator,
  model,
  native_task,
  native_task_context,
)
from monolith.native_training.demos import data as demo_data
from monolith.native_training.demos import hooks as demo_hooks
from monolith.native_training.input import slot_to_key

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT
# Where the dense part goes if the process may use a GPU, else to the CPU.
_GPU = "/device:GPU:0"
# Below the slot bits of an id.
_SLOT_SHIFT = 48


class RankingTask(native_task.NativeTask):
  """Will a user like a movie? A factorization machine beside a small tower.

  Every feature has a bias and a vector. The score is the sum of the biases, of the products of all
  pairs of vectors, and of what the tower makes of the vectors.
  """

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("data_dir", "", "Folder of a dataset, which demos.data makes.")
    p.define("epochs", 1, "How often the training set is read.")
    p.define("dim", 8, "Length of a vector.")
    p.define("show_progress", True, "Whether the chief prints how it goes.")
    p.define("num_ranks", 1, "How many train together, synchronously.")
    p.train.per_replica_batch_size = 1024
    p.metrics.enable_tf2_profiler_hook = False
    return p

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    info = demo_data.load(self.p.data_dir)

    def input_fn() -> tf.data.Dataset:
      file = info.train_file if mode == _TRAIN else info.eval_file
      dataset = tf.data.FixedLengthRecordDataset(file, demo_data.RECORD_BYTES)
      if mode == _TRAIN:
        ctx = native_task_context.get()
        dataset = dataset.shard(ctx.num_workers, ctx.worker_index).repeat(self.p.epochs)
      dataset = dataset.batch(self.p.train.per_replica_batch_size)
      return dataset.map(_parse_ratings, num_parallel_calls=1).prefetch(4)

    return input_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    def model_fn(
      features: dict[str, tf.Tensor], mode: str, config: Any
    ) -> graph_estimator.EstimatorSpec:
      columns, biases, vectors = [], [], []
      for slot_id, name in enumerate(("user", "movie", "occupation", "genre"), 1):
        slot = self.ctx.create_feature_slot(self._slot_config(slot_id, name))
        column = feature.FeatureColumn(slot, name)
        columns.append(column)
        biases.append(column.get_bias())
        vectors.append(column.embedding_lookup(slot.add_feature_slice(self.p.dim)))
      with device_utils.maybe_device_if_allowed(_GPU):
        logits = tf.reduce_sum(tf.concat(biases, axis=1), axis=1)
        for left, right in itertools.combinations(vectors, 2):
          logits += tf.reduce_sum(left * right, axis=1)
        logits += self._tower(tf.concat(vectors, axis=1))
        predictions = tf.sigmoid(logits)
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=predictions)
      return self._train(features["label"], logits, predictions, columns, mode)

    return model_fn

  def _slot_config(self, slot_id: int, name: str) -> feature.FeatureSlotConfig:
    # A user or a movie has few ratings: its vector must move with care.
    learning_rate = 0.005 if name in ("user", "movie") else 0.1
    return feature.FeatureSlotConfig(
      name=name,
      slot_id=slot_id,
      has_bias=True,
      bias_optimizer=entry.AdagradOptimizer(learning_rate=0.1, initial_accumulator_value=1.0),
      default_vec_initializer=entry.RandomUniformInitializer(-0.05, 0.05),
      default_vec_optimizer=entry.AdagradOptimizer(
        learning_rate=learning_rate, initial_accumulator_value=1.0
      ),
      default_vec_compressor=entry.Fp32Compressor(),
    )

  def _tower(self, inputs: tf.Tensor) -> tf.Tensor:
    """Two dense layers; returns `[batch]`."""
    units = inputs
    for i, size in enumerate((16, 1)):
      kernel = tf.compat.v1.get_variable(f"tower/kernel_{i}", [units.shape[1], size])
      bias = tf.compat.v1.get_variable(
        f"tower/bias_{i}", [size], initializer=tf.zeros_initializer()
      )
      units = tf.matmul(units, kernel) + bias
      if size > 1:
        units = tf.nn.relu(units)
    return tf.squeeze(units, axis=1)

  def _reduce(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Lets workers that train the same dense weights together agree on their gradients."""
    return gradients

  def _train(
    self,
    labels: tf.Tensor,
    logits: tf.Tensor,
    predictions: tf.Tensor,
    columns: list[feature.FeatureColumn],
    mode: str,
  ) -> graph_estimator.EstimatorSpec:
    embeddings = [column.get_all_embeddings_concat() for column in columns]
    global_step = tf.compat.v1.train.get_or_create_global_step()
    with device_utils.maybe_device_if_allowed(_GPU):
      losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
      loss = tf.reduce_mean(losses)
      # Summed, so that a row's step does not depend on the size of the batch.
      embedding_gradients = tf.gradients(tf.reduce_sum(losses), embeddings)
      optimizer = tf.compat.v1.train.AdagradOptimizer(0.02)
      gradients, weights = zip(*optimizer.compute_gradients(loss))
      apply_dense = optimizer.apply_gradients(
        zip(self._reduce(list(gradients)), weights), global_step=global_step
      )
    apply_embeddings = self.ctx.apply_embedding_gradients(zip(embedding_gradients, embeddings))
    hooks = []
    if self.p.show_progress and not hasattr(tf.compat.v1.get_default_graph(), "dry_run"):
      hooks.append(demo_hooks.ProgressHook(loss, labels, predictions, num_ranks=self.p.num_ranks))
    return graph_estimator.EstimatorSpec(
      mode,
      loss=loss,
      train_op=tf.group(apply_embeddings, apply_dense),
      training_hooks=[self._stop_hook()],
      training_chief_hooks=hooks,
    )

  def _stop_hook(self) -> tf.compat.v1.train.SessionRunHook:
    """Ends training when the user asks for it."""
    return demo_hooks.StopOnSignalHook()


def _parse_ratings(records: tf.Tensor) -> dict[str, Any]:
  """Turns records `[batch]` into ragged ids with slot bits and labels `[batch]`."""
  fields = tf.io.decode_raw(records, tf.int64)
  features: dict[str, Any] = {"label": tf.cast(fields[:, -1], tf.float32)}
  columns = {"user": fields[:, :1], "movie": fields[:, 1:2], "occupation": fields[:, 2:3]}
  columns["genre"] = fields[:, 3 : 3 + demo_data.NUM_GENRES_PER_MOVIE]
  for slot_id, (name, ids) in enumerate(columns.items(), 1):
    ragged = tf.ragged.boolean_mask(ids, ids >= 0)
    features[name] = ragged.with_values(ragged.values + (slot_id << _SLOT_SHIFT))
  return features


class FFMTask(model.TestFFMModel):
  """The FFM model, on examples whose labels follow a planted FFM of the same shape."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("num_examples", 50000, "Size of the training set.")
    p.define("num_eval_examples", 10000, "Size of the evaluation set.")
    p.define("show_progress", True, "Whether to print how it goes.")
    p.train.per_replica_batch_size = 64
    p.metrics.enable_tf2_profiler_hook = False
    return p

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    def input_fn() -> tf.data.Dataset:
      ids, labels, _ = self.generate(mode)
      dataset = tf.data.Dataset.from_tensor_slices((ids.astype(np.int8), labels))
      if mode == _TRAIN:
        ctx = native_task_context.get()
        dataset = dataset.shard(ctx.num_workers, ctx.worker_index).repeat()
      return dataset.batch(self.p.train.per_replica_batch_size).map(_parse_ffm).prefetch(4)

    return input_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    ffm_model_fn = super().create_model_fn()

    def model_fn(
      features: dict[str, tf.Tensor], mode: str, config: Any
    ) -> graph_estimator.EstimatorSpec:
      with device_utils.maybe_device_if_allowed(_GPU):
        spec = ffm_model_fn(features=features, mode=mode, config=config)
      if mode != _TRAIN or hasattr(tf.compat.v1.get_default_graph(), "dry_run"):
        return spec
      hooks = []
      if self.p.show_progress:
        hooks.append(demo_hooks.ProgressHook(spec.loss, features["label"], spec.predictions))
      return spec._replace(
        training_hooks=(demo_hooks.StopOnSignalHook(),), training_chief_hooks=tuple(hooks)
      )

    return model_fn

  def generate(self, mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids `[examples, slots]`, labels and the probabilities they were drawn with."""
    rng = np.random.default_rng(3)
    num_slots, vocab_size = model._NUM_SLOTS, model._VOCAB_SIZES[0]
    biases = rng.normal(0, 0.5, (num_slots, vocab_size))
    biases[model._LAST_BIAS_SLOT + 1 :] = 0
    pairs = [rng.normal(0, 1.0, (2, vocab_size, 2)) for _ in model._FFM_SLOT]
    is_train = mode == _TRAIN
    rng = np.random.default_rng(5 if is_train else 7)
    count = self.p.num_examples if is_train else self.p.num_eval_examples
    ids = rng.integers(vocab_size, size=(count, num_slots))
    logits = biases[np.arange(num_slots), ids].sum(axis=1)
    for (left, right, _), vectors in zip(model._FFM_SLOT, pairs):
      logits += (vectors[0][ids[:, left]] * vectors[1][ids[:, right]]).sum(axis=1)
    probabilities = 1.0 / (1.0 + np.exp(-logits))
    labels = (rng.random(count) < probabilities).astype(np.float32)
    return ids, labels, probabilities


def _parse_ffm(ids: tf.Tensor, labels: tf.Tensor) -> dict[str, Any]:
  features: dict[str, Any] = {"label": labels}
  largest = max(model._VOCAB_SIZES)
  for slot in range(model._NUM_SLOTS):
    column = tf.cast(ids[:, slot : slot + 1], tf.int64) + largest * slot
    features[slot_to_key(slot)] = tf.RaggedTensor.from_tensor(column, row_splits_dtype=tf.int64)
  return features
