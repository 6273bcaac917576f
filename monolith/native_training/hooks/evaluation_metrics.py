"""Measures a model that is evaluated by the workers of a cluster.

Each worker measures the examples that it has read, in its own memory: variables of a graph would be
on a server, where all workers would add to the same ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from monolith.native_training.metric import streaming
from monolith.native_training.metric.heads import EVALUATION_COLLECTION

if ops.get_to_proto_function(EVALUATION_COLLECTION) is None:
  # It has no place in a meta graph.
  ops.register_proto_function(EVALUATION_COLLECTION, to_proto=lambda value, export_scope=None: None)


class EvaluationMetricsHook(tf.estimator.SessionRunHook):
  """Measures loss and heads of the model that the graph holds, batch by batch."""

  def __init__(self) -> None:
    self._heads: dict[str, _Classification | _Regression] = {}
    self._fetches: dict[str, Any] = {}
    self._loss_sum = 0.0
    self._num_examples = 0
    self._global_step = 0

  def begin(self) -> None:
    # A worker that lost a server begins again.
    self._loss_sum, self._num_examples, self._fetches = 0.0, 0, {}
    evaluations = tf.compat.v1.get_collection(EVALUATION_COLLECTION)
    if not evaluations:
      return  # A task of its own kind, or a server.
    evaluation = evaluations[-1]
    self._heads = {
      head.name: _Classification() if head.is_classification else _Regression()
      for head in evaluation.heads
    }
    self._fetches = {
      "loss": evaluation.loss,
      "batch_size": evaluation.batch_size,
      "step": tf.compat.v1.train.get_or_create_global_step(),
      "heads": {head.name: (head.label, head.prediction) for head in evaluation.heads},
    }

  def before_run(self, run_context: tf.estimator.SessionRunContext) -> Any:
    return tf.estimator.SessionRunArgs(self._fetches) if self._fetches else None

  def after_run(self, run_context: tf.estimator.SessionRunContext, run_values: Any) -> None:
    result = run_values.results
    if not result:
      return
    size = int(result["batch_size"])
    self._loss_sum += float(result["loss"]) * size
    self._num_examples += size
    self._global_step = int(result["step"])
    for name, (label, prediction) in result["heads"].items():
      self._heads[name].add(np.ravel(label), np.ravel(prediction))

  def get_metrics(self) -> dict[str, float] | None:
    """Returns name -> value, as an evaluation in one process does; `None` if nothing was read."""
    if not self._num_examples:
      return None
    metrics = {"loss": self._loss_sum / self._num_examples}
    for name, head in self._heads.items():
      for metric, value in head.get().items():
        metrics[metric if len(self._heads) == 1 else f"{name}_{metric}"] = value
    return {**metrics, "global_step": self._global_step}


class _Classification:
  """Measures a binary target, with the buckets of `streaming.auc`."""

  def __init__(self) -> None:
    self._histograms = np.zeros([2, streaming.NUM_BUCKETS])
    self._log_loss = self._predictions = 0.0

  def add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
    p = predictions.astype(np.float64)
    is_positive = labels > 0.5
    logit = np.clip(p, 1e-12, 1 - 1e-12)
    logit = np.clip(np.log(logit) - np.log1p(-logit), -streaming.MAX_LOGIT, streaming.MAX_LOGIT)
    scale = (streaming.NUM_BUCKETS - 1) / (2 * streaming.MAX_LOGIT)
    bucket = ((logit + streaming.MAX_LOGIT) * scale).astype(np.int64)
    np.add.at(self._histograms, (is_positive.astype(np.int64), bucket), 1)
    clipped = np.clip(p, streaming.EPSILON, 1 - streaming.EPSILON)
    self._log_loss -= float(np.sum(np.log(np.where(is_positive, clipped, 1 - clipped))))
    self._predictions += float(np.sum(p))

  def get(self) -> dict[str, float]:
    negatives, positives = self._histograms
    num_negative, num_positive = float(negatives.sum()), float(positives.sum())
    below = np.cumsum(negatives) - negatives / 2
    pairs = num_negative * num_positive
    return {
      "auc": float(np.sum(positives * below)) / pairs if pairs else 0.0,
      "log_loss": self._log_loss / max(1.0, num_negative + num_positive),
      "calibration": self._predictions / num_positive if num_positive else 0.0,
    }


class _Regression:
  """Measures a target that is a number."""

  def __init__(self) -> None:
    self._squares = self._absolutes = 0.0
    self._count = 0

  def add(self, labels: np.ndarray, predictions: np.ndarray) -> None:
    error = predictions.astype(np.float64) - labels
    self._squares += float(np.sum(np.square(error)))
    self._absolutes += float(np.sum(np.abs(error)))
    self._count += len(error)

  def get(self) -> dict[str, float]:
    count = max(1, self._count)
    return {"mse": self._squares / count, "mae": self._absolutes / count}
