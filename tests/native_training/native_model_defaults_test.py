"""A `MonolithModel` whose lookups name no optimizer learns as the same model of Keras does.

Three small problems with losses that are means, Adam for the dense part of both.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training import entry, estimator, graph_estimator, native_model, utils
from monolith.native_training.estimator import EstimatorSpec
from monolith.native_training.native_model import MonolithModel
from monolith.native_training.runner_utils import RunnerConfig

pytestmark = pytest.mark.thorough

_BATCH = 64
_DIM = 8
_RNG = np.random.default_rng(5)
_HIDDEN = _RNG.normal(size=5000).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _Problem:
  """Two columns of ids, what is to be learnt, and how.

  Attributes:
    units: of the hidden layers; none where a dot product is the answer.
    epochs: as many as Keras needs.
  """

  ids: np.ndarray
  target: np.ndarray
  units: tuple[int, ...] | None
  epochs: int

  @property
  def is_binary(self) -> bool:
    return self.units is not None


def _make_problems() -> dict[str, _Problem]:
  clicks, ratings = _RNG.integers(0, 32, [2, 6400]), _RNG.integers(0, 100, [2, 6400])
  seldom = np.stack([_RNG.integers(0, 3000, 12_800)] * 2)
  return {
    "clicks": _Problem(clicks, np.float32(clicks.sum(0) % 4 == 0), (64, 32), 12),
    "ratings": _Problem(ratings, _HIDDEN[ratings[0]] * _HIDDEN[1000 + ratings[1]], None, 12),
    "seldom ids": _Problem(seldom, np.float32(_HIDDEN[seldom[0]] > 0), (), 6),
  }


def _train_keras(problem: _Problem) -> np.ndarray:
  """Returns a Keras model's predictions, of logits where there are classes."""
  tf.keras.utils.set_random_seed(3)
  inputs = [tf.keras.Input([], dtype=tf.int64) for _ in problem.ids]
  vectors = [tf.keras.layers.Embedding(5000, _DIM)(one) for one in inputs]
  if problem.units is None:
    output = tf.keras.layers.Dot(axes=1)(vectors)
  else:
    output = tf.keras.layers.Concatenate()(vectors)
    for units in problem.units:
      output = tf.keras.layers.Dense(units, "relu")(output)
    output = tf.keras.layers.Dense(1)(output)
  model = tf.keras.Model(inputs, output)
  loss = tf.keras.losses.BinaryCrossentropy(from_logits=True) if problem.is_binary else "mse"
  model.compile("adam", loss)
  ids = list(problem.ids)
  model.fit(ids, problem.target, epochs=problem.epochs, batch_size=_BATCH, verbose=0)
  return model.predict(ids, batch_size=2000, verbose=0)[:, 0]


class _Model(MonolithModel):
  def __init__(self, problem: _Problem):
    super().__init__()
    self._problem = problem
    self.batch_size = _BATCH

  def input_fn(self, mode):
    first, second = self._problem.ids
    columns = {"first": first, "second": second, "label": self._problem.target}
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    if mode == graph_estimator.ModeKeys.TRAIN:
      dataset = dataset.shuffle(len(first), seed=1).repeat()
    return dataset.batch(_BATCH, drop_remainder=True).map(self._to_ragged)

  @staticmethod
  def _to_ragged(row):
    ragged = {k: tf.RaggedTensor.from_tensor(row[k][:, tf.newaxis]) for k in ("first", "second")}
    return {**ragged, "label": row["label"]}

  def model_fn(self, features, mode):
    for name in ("first", "second"):
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(["first", "second"], "vec", _DIM)
    if self._problem.units is None:
      output = tf.reduce_sum(vectors[0] * vectors[1], axis=1)
      # Something to train beside the rows.
      output += 0.0 * tf.compat.v1.get_variable("unused", initializer=0.0)
    else:
      output = tf.ensure_shape(tf.concat(vectors, 1), [None, 2 * _DIM])
      for i, units in enumerate((*self._problem.units, 1)):
        name = f"dense_{i}"
        kernel = tf.compat.v1.get_variable(
          f"{name}_kernel",
          [output.shape[1], units],
          initializer=tf.compat.v1.glorot_uniform_initializer(seed=3),
        )
        output = output @ kernel + tf.compat.v1.get_variable(
          f"{name}_bias", [units], initializer=tf.compat.v1.zeros_initializer()
        )
        output = output if i == len(self._problem.units) else tf.nn.relu(output)
      output = output[:, 0]
    if mode == graph_estimator.ModeKeys.PREDICT:
      return EstimatorSpec(label=None, pred=output, head_name="rank", classification=False)
    label = features["label"]
    if self._problem.is_binary:
      losses = tf.nn.sigmoid_cross_entropy_with_logits(logits=output, labels=label)
    else:
      losses = (output - label) ** 2
    optimizer = tf.compat.v1.train.AdamOptimizer(0.001)
    loss = tf.reduce_mean(losses)
    return EstimatorSpec(label, output, "rank", loss, optimizer, classification=False)

  def serving_input_receiver_fn(self):
    raise NotImplementedError


def _train_ours(problem: _Problem, folder: str) -> np.ndarray:
  conf = RunnerConfig(is_local=True, model_dir=folder)
  n = len(problem.target)
  with tf.Graph().as_default():  # Keras is trained eagerly in this process.
    est = estimator.Estimator(_Model(problem), conf)
    est.train(steps=problem.epochs * n // _BATCH)
    return np.array([float(one) for one in itertools.islice(est.predict(), n)])


def _loss(problem: _Problem, predicted: np.ndarray) -> float:
  target = problem.target
  if problem.is_binary:
    return float(np.mean(np.logaddexp(0, predicted) - target * predicted))
  return float(np.mean((predicted - target) ** 2))


class NativeModelDefaultsTest(tf.test.TestCase):
  def test_three_problems_end_at_least_as_good_as_with_keras(self):
    for name, problem in _make_problems().items():
      folder = f"{utils.get_test_tmp_dir()}/{name.replace(' ', '_')}"
      with self.subTest(name):
        theirs = _loss(problem, _train_keras(problem))
        ours = _loss(problem, _train_ours(problem, folder))
        print(f"{name}: {ours:.4f} with ours, {theirs:.4f} with Keras's")
        self.assertLess(ours, 1.1 * theirs + 0.02)

  def test_slots_that_are_made_by_hand_keep_their_own_default(self):
    slot = native_model.FeatureSlotConfig(name="user")
    wanted = entry.AdagradOptimizer(initial_accumulator_value=1.0)
    self.assertEqual(slot.default_vec_optimizer.as_proto(), wanted.as_proto())


if __name__ == "__main__":
  tf.test.main()
