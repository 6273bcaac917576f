"""Gives the examples data with a planted structure, and a way to train and to score.

Labels are drawn with a probability that a formula of the features gives, so the best AUC that any
model can reach is known: that of the formula itself.
"""

from __future__ import annotations

import tempfile

from absl import app
from monolith.estimator import Estimator, RunConfig
import numpy as np
import tensorflow as tf

tf.compat.v1.disable_eager_execution()  # a model is trained in graphs
tf.get_logger().setLevel("ERROR")

BATCH_SIZE = 512
NO_ID = -1  # fills rows of ids that are shorter than others


def draw_labels(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
  """Returns labels, each 1 with the probability of its logit."""
  return (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def to_dataset(columns: dict[str, np.ndarray]) -> tf.data.Dataset:
  """Returns batches of features; integers become ragged ids, as tables want them."""

  def to_features(columns):
    features = dict(columns)
    for name, values in columns.items():
      if values.dtype == tf.int64:
        matrix = values if values.shape.rank == 2 else values[:, None]
        features[name] = tf.RaggedTensor.from_tensor(matrix, padding=NO_ID)
    return features

  return tf.data.Dataset.from_tensor_slices(columns).batch(BATCH_SIZE).map(to_features)


def train_and_predict(model, steps: int) -> list:
  """Trains a model in a folder that is removed; returns its predictions for unseen examples."""
  with tempfile.TemporaryDirectory() as folder:
    estimator = Estimator(model, RunConfig(is_local=True, model_dir=folder))
    estimator.train(steps=steps)
    return list(estimator.predict())


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
  """Returns how often a positive example has a higher score than a negative one."""
  ranks = np.empty(len(scores))
  ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
  positives = labels.sum()
  return (ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (
    positives * (len(labels) - positives)
  )


def show(run) -> None:
  """Runs an example as a program: `run` returns name -> (what was reached, what is possible)."""

  def main(_):
    for name, (reached, possible) in run().items():
      print(f"{name} {reached:.3f}, the planted structure allows {possible:.3f}")

  app.run(main)
