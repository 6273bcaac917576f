"""Training is the same where rows are pooled ahead of the step, whatever a model does with them."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
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
from monolith.native_training.driver import pooled_steps
from monolith.native_training.tables import local

tf.compat.v1.disable_eager_execution()

_BATCH = 8
_STEPS = 16
# Batches of which lookups and updates may overlap have no id in common.
_PERIOD = 4
_VOCABULARY = 6
_NAMES = ("a", "b", "c")


def _create_batches(one_each):
  rng = np.random.default_rng(0)
  for i in range(_STEPS):
    first = 1000 * (i % _PERIOD)
    batch = []
    for _ in _NAMES:
      lengths = np.ones(_BATCH, int) if one_each else rng.integers(0, 4, size=_BATCH)
      splits = np.concatenate([[0], np.cumsum(lengths)])
      batch += [first + rng.integers(_VOCABULARY, size=splits[-1]), splits]
    yield (*batch, rng.normal(size=[_BATCH, 2]).astype(np.float32))


class _Inputs:
  """Tensors that a model of a test computes with.

  Attributes:
    columns: feature name -> column.
    slices: feature name -> its slices.
    dense: `[batch, 2]`.
  """

  def __init__(self, columns, slices, dense):
    self.columns = columns
    self.slices = slices
    self.dense = dense

  def vector(self, name, place=0):
    return self.columns[name].embedding_lookup(self.slices[name][place])


def _concat(inputs):
  return tf.concat([inputs.vector(name) for name in _NAMES], axis=1)


def _concat_of_slices(inputs):
  return tf.concat([inputs.vector(name, place) for place in (1, 0) for name in "ba"], axis=-1)


def _twice(inputs):
  vectors = [inputs.vector(name) for name in "ca"]
  return tf.concat([tf.concat(vectors, axis=1), tf.square(inputs.vector("b")), *vectors], axis=1)


def _two_concats(inputs):
  left = tf.concat([inputs.vector(name) for name in "abc"], axis=1)
  return left * tf.concat([inputs.vector(name) for name in "cab"], axis=1)


def _stack(inputs):
  stacked = tf.stack([inputs.vector(name) for name in _NAMES], axis=1)
  return tf.reduce_sum(stacked, axis=1) ** 2 - tf.reduce_sum(stacked**2, axis=1)


def _with_dense(inputs):
  return tf.concat([*(inputs.vector(name) for name in _NAMES), inputs.dense], axis=1)


def _no_concat(inputs):
  return inputs.vector("a") * inputs.vector("b") + inputs.vector("c", 1)


def _rows(inputs):
  rows = inputs.columns["a"].get_all_embeddings_concat()
  return _concat(inputs) + tf.reduce_mean(rows**2)


def _one_slice(inputs):
  return tf.concat([inputs.vector("a", 1), inputs.vector("b", 1)], axis=1)


def _concat_of_examples(inputs):
  return tf.concat([inputs.vector("a"), inputs.vector("b")], axis=0)


class _Task(native_task.NativeTask):
  build = staticmethod(_concat)
  combiner = staticmethod(feature.FeatureColumn.reduce_sum)
  one_each = True
  static_batch = True
  change = staticmethod(lambda gradient: gradient)
  losses: list[float] = []

  def create_input_fn(self, mode):
    size = _BATCH if self.static_batch else None

    def parse(*batch):
      features = {
        name: tf.RaggedTensor.from_row_splits(batch[2 * i], batch[2 * i + 1], validate=False)
        for i, name in enumerate(_NAMES)
      }
      return {**features, "dense": batch[-1]}

    def input_fn():
      splits = tf.TensorSpec([None if size is None else size + 1], tf.int64)
      signature = [tf.TensorSpec([None], tf.int64), splits] * len(_NAMES)
      return tf.data.Dataset.from_generator(
        lambda: _create_batches(self.one_each),
        output_signature=(*signature, tf.TensorSpec([size, 2], tf.float32)),
      ).map(parse)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, slices = {}, {}
      for name in _NAMES:
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=name,
            default_vec_initializer=entry.ConstantsInitializer(0.5),
            default_vec_optimizer=entry.AdagradOptimizer(0.5, 0.1),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        slices[name] = [slot.add_feature_slice(4), slot.add_feature_slice(4)]
        columns[name] = feature.FeatureColumn(slot, name, self.combiner())
      units = self.build(_Inputs(columns, slices, features["dense"]))
      width = units.shape[-1]
      kernel = tf.compat.v1.get_variable(
        "kernel", initializer=np.linspace(-0.3, 0.4, width, dtype=np.float32)
      )
      logits = tf.reduce_sum(units * kernel, axis=-1) + 0.3 * tf.reduce_sum(features["dense"])
      loss = tf.reduce_mean(tf.square(logits - 1.0))
      embeddings = [columns[name].get_all_embeddings_concat() for name in _NAMES]
      gradients = tf.gradients(loss, [*embeddings, kernel])
      changed = [None if g is None else self.change(g) for g in gradients[:-1]]
      train_op = tf.group(
        self.ctx.apply_embedding_gradients(zip(changed, embeddings)),
        tf.compat.v1.train.GradientDescentOptimizer(0.01).apply_gradients(
          [(gradients[-1], kernel)], tf.compat.v1.train.get_or_create_global_step()
        ),
      )
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[_LossHook(loss)]
      )

    return model_fn


class _LossHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self, loss):
    self._loss = loss

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._loss)

  def after_run(self, run_context, run_values):
    _Task.losses.append(float(run_values.results))


class PooledStepsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    for name in ("build", "combiner", "one_each", "static_batch", "change"):
      self.addCleanup(setattr, _Task, name, _Task.__dict__[name])

  def _train(self, folder, postpush=True):
    _Task.losses = []
    params = _Task.params()
    params.name = "task"
    conf = cpu_training.CpuTrainingConfig(
      embedding_prefetch_capacity=1, enable_embedding_postpush=postpush
    )
    cpu_training.local_train_internal(
      params, conf, os.path.join(utils.get_test_tmp_dir(), folder), steps=None
    )
    return _Task.losses

  def _check(self, **kwargs):
    """Compares with a step that pools by itself; returns the widths that were looked up."""
    widths, sources = [], []
    look_up = local.LocalMultiHashTable.lookup_pooled
    apply = local.LocalMultiHashTable.apply_pooled_gradients

    def lookup_pooled(table, ids, of_these, parts):
      widths.extend(of_these)
      return look_up(table, ids, of_these, parts)

    def apply_pooled_gradients(table, ids, gradients, *args, **kwargs):
      sources.extend(gradients)
      return apply(table, ids, gradients, *args, **kwargs)

    with (
      mock.patch.object(local.LocalMultiHashTable, "lookup_pooled", lookup_pooled),
      mock.patch.object(
        local.LocalMultiHashTable, "apply_pooled_gradients", apply_pooled_gradients
      ),
    ):
      losses = self._train("pooled", **kwargs)
    with mock.patch.object(pooled_steps, "can_pool", return_value=False):
      expected = self._train("plain", **kwargs)
    self.assertLen(losses, _STEPS)
    self.assertGreater(np.ptp(expected), 0.1)
    self.assertAllClose(losses, expected, rtol=1e-5, atol=1e-6)
    return widths, [gradient.shape[1] for gradient in sources]

  @parameterized.named_parameters(
    ("concat", _concat, [12], [12]),
    ("slices", _concat_of_slices, [16], [16]),
    ("stack", _stack, [12], [12]),
    ("two_concats", _two_concats, None, None),
    ("twice", _twice, None, None),
    ("with_dense", _with_dense, [4, 4, 4], [14]),
    ("no_concat", _no_concat, [4, 4, 4], [4, 4, 4]),
    ("rows", _rows, None, None),
    ("one_slice", _one_slice, [8], [8]),
    ("examples", _concat_of_examples, [4, 4], None),
  )
  def test_models(self, build, widths, sources):
    _Task.build = staticmethod(build)
    for _Task.one_each, _Task.static_batch in ((True, True), (False, False)):
      with self.subTest(one_each=_Task.one_each):
        of_lookup, of_update = self._check()
        if widths is not None:
          self.assertCountEqual(of_lookup, widths)
        if sources is not None:
          self.assertCountEqual(of_update, sources)

  @parameterized.named_parameters(
    ("mean", feature.FeatureColumn.reduce_mean),
    ("first_n", lambda: feature.FeatureColumn.first_n(2)),
  )
  def test_other_combiners_are_pooled_in_the_step(self, combiner):
    _Task.combiner = staticmethod(combiner)
    _Task.one_each = False

    self.assertEqual(self._check(), ([], []))

  def test_gradients_that_were_changed(self):
    _Task.change = staticmethod(lambda gradient: tf.clip_by_value(gradient, -0.01, 0.01))

    # Zeros for the slices that the model leaves alone take their shape from these.
    widths, sources = self._check()
    self.assertCountEqual(widths, [12, 4, 4, 4])
    self.assertEmpty(sources)

  def test_updates_within_the_step(self):
    self.assertEqual(self._check(postpush=False), ([12], [12]))


if __name__ == "__main__":
  tf.test.main()
