"""Training on tables is the same as training on `tf.Variable` embeddings."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  entry,
  feature,
  graph_estimator,
  native_task,
  utils,
)

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_NUM_STEPS = 30
_BATCH_SIZE = 16
_VOCAB_SIZE = 20
_DIM = 4
# A lookup of an id without a row gives zeros and makes no row, so rows must begin with zeros.
_INITIAL = 0.0
_LEARNING_RATE = 0.1


def _create_batches():
  """Returns batches whose ids repeat within and between examples."""
  rng = np.random.default_rng(0)
  batches = []
  for _ in range(_NUM_STEPS):
    lengths = rng.integers(0, 4, size=_BATCH_SIZE)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    ids = [rng.integers(_VOCAB_SIZE, size=splits[-1]) for _ in range(2)]
    labels = rng.integers(2, size=_BATCH_SIZE).astype(np.float32)
    batches.append((ids[0], ids[1], splits, labels))
  return batches


def _logits(left, right, kernel):
  return tf.reduce_sum(left * right, axis=1) + tf.squeeze(
    tf.matmul(tf.concat([left, right], axis=1), kernel), axis=1
  )


def _kernel():
  initial = np.linspace(-0.5, 0.5, 2 * _DIM, dtype=np.float32).reshape([-1, 1])
  return tf.compat.v1.Variable(initial, name="kernel")


def _loss(labels, logits):
  return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))


class _LossHook(tf.compat.v1.train.SessionRunHook):
  losses: list[float] = []

  def __init__(self, loss):
    self._loss = loss

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._loss)

  def after_run(self, run_context, run_values):
    self.losses.append(float(run_values.results))


class _Task(native_task.NativeTask):
  optimizer: entry.Optimizer

  def create_input_fn(self, mode):
    def generate():
      yield from _create_batches()

    def parse(left, right, splits, labels):
      return {
        "left": tf.RaggedTensor.from_row_splits(left, splits, validate=False),
        # Slots of equal configuration may share a table, so their ids must differ.
        "right": tf.RaggedTensor.from_row_splits(right + _VOCAB_SIZE, splits, validate=False),
        "label": labels,
      }

    def input_fn():
      dataset = tf.data.Dataset.from_generator(
        generate,
        output_signature=(
          tf.TensorSpec([None], tf.int64),
          tf.TensorSpec([None], tf.int64),
          tf.TensorSpec([_BATCH_SIZE + 1], tf.int64),
          tf.TensorSpec([_BATCH_SIZE], tf.float32),
        ),
      )
      return dataset.map(parse)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, vectors = [], []
      for name in ("left", "right"):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=name,
            default_vec_initializer=entry.ConstantsInitializer(_INITIAL),
            default_vec_optimizer=self.optimizer,
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        columns.append(feature.FeatureColumn(slot, name))
        vectors.append(columns[-1].embedding_lookup(slot.add_feature_slice(_DIM)))
      kernel = _kernel()
      loss = _loss(features["label"], _logits(*vectors, kernel))
      embeddings = [column.get_all_embeddings_concat() for column in columns]
      gradients = tf.gradients(loss, [*embeddings, kernel])
      apply_embeddings = self.ctx.apply_embedding_gradients(zip(gradients[:-1], embeddings))
      apply_dense = tf.compat.v1.train.GradientDescentOptimizer(0.01).apply_gradients(
        [(gradients[-1], kernel)], global_step=tf.compat.v1.train.get_or_create_global_step()
      )
      return graph_estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=tf.group(apply_embeddings, apply_dense),
        training_hooks=[_LossHook(loss)],
      )

    return model_fn


def _train_variables(create_optimizer):
  """Trains the same model in plain TensorFlow; returns the losses."""
  with tf.Graph().as_default():
    tables = [
      tf.compat.v1.get_variable(
        name, initializer=np.full([_VOCAB_SIZE, _DIM], _INITIAL, np.float32)
      )
      for name in ("left", "right")
    ]
    ids = [tf.compat.v1.placeholder(tf.int64, [None]) for _ in tables]
    splits = tf.compat.v1.placeholder(tf.int64, [None])
    labels = tf.compat.v1.placeholder(tf.float32, [_BATCH_SIZE])
    rows = tf.RaggedTensor.from_row_splits(ids[0], splits).value_rowids()
    vectors = [
      tf.math.unsorted_segment_sum(tf.gather(table, i), rows, _BATCH_SIZE)
      for table, i in zip(tables, ids)
    ]
    kernel = _kernel()
    loss = _loss(labels, _logits(*vectors, kernel))
    gradients = tf.gradients(loss, [*tables, kernel])
    with tf.control_dependencies([loss]):
      train_op = tf.group(
        create_optimizer().apply_gradients(zip(gradients[:-1], tables)),
        tf.compat.v1.train.GradientDescentOptimizer(0.01).apply_gradients(
          [(gradients[-1], kernel)]
        ),
      )
    losses = []
    with tf.compat.v1.Session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      for left, right, row_splits, label in _create_batches():
        feed = {ids[0]: left, ids[1]: right, splits: row_splits, labels: label}
        losses.append(sess.run([loss, train_op], feed)[0])
    return losses


class TrainingEqualityTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    (f"{name}_{num_ps}_ps_{'native' if native else 'merged'}", name, num_ps, native)
    for name in ("sgd", "adagrad")
    for num_ps, native in ((0, True), (0, False), (1, True), (3, True))
  )
  def test_losses(self, name, num_ps, native):
    optimizers = {
      "sgd": (
        entry.SgdOptimizer(learning_rate=_LEARNING_RATE),
        lambda: tf.compat.v1.train.GradientDescentOptimizer(_LEARNING_RATE),
      ),
      "adagrad": (
        entry.AdagradOptimizer(learning_rate=_LEARNING_RATE, initial_accumulator_value=0.1),
        lambda: tf.compat.v1.train.AdagradOptimizer(_LEARNING_RATE, initial_accumulator_value=0.1),
      ),
    }
    table_optimizer, create_optimizer = optimizers[name]
    _Task.optimizer = table_optimizer
    _LossHook.losses = []
    params = _Task.params()
    params.name = name
    conf = cpu_training.CpuTrainingConfig(num_ps=num_ps, use_native_multi_hash_table=native)

    cpu_training.local_train_internal(
      params, conf, os.path.join(utils.get_test_tmp_dir(), self.id()), steps=None
    )

    expected = _train_variables(create_optimizer)
    self.assertLen(_LossHook.losses, _NUM_STEPS)
    self.assertAllClose(_LossHook.losses, expected, rtol=1e-5, atol=1e-5)
    self.assertGreater(np.ptp(expected), 0.1)


if __name__ == "__main__":
  tf.test.main()
