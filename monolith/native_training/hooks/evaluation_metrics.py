"""Measures a model that is evaluated by the workers of a cluster, or by ranks.

Each process measures the examples that it has read, in its own memory: variables of a graph would
be on a server, where a worker that begins again would count twice. What it has counted goes into
a file `<model_dir>/eval/parts/<index>.npz`, and the first process makes one result of all of them.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.framework import ops

from monolith.native_training.metric import streaming
from monolith.native_training.metric.heads import EVALUATION_COLLECTION

if ops.get_to_proto_function(EVALUATION_COLLECTION) is None:
  # It has no place in a meta graph.
  ops.register_proto_function(EVALUATION_COLLECTION, to_proto=lambda value, export_scope=None: None)

_POLL_SECS = 0.2


class Place(NamedTuple):
  """Says which one of several processes this is.

  Attributes:
    model_dir: a folder that all of them see.
    index: its number; the first one, 0, makes the result.
    count: how many there are.
  """

  model_dir: str
  index: int
  count: int


class EvaluationMetricsHook(tf.compat.v1.train.SessionRunHook):
  """Measures loss and heads of the model that the graph holds, batch by batch.

  Args:
    get_place: returns which process this is; called when the run begins, which may be when that
      is known first. By default it is the only one.
    timeout_secs: how long the first process waits for the counts of another.
  """

  def __init__(self, get_place: Callable[[], Place] | None = None, timeout_secs: float = 60.0):
    self._get_place = get_place
    self._timeout_secs = timeout_secs
    self._heads: dict[str, _Classification | _Regression] = {}
    self._fetches: dict[str, Any] = {}
    self._loss_sum = 0.0
    self._num_examples = 0
    self._global_step = 0

  def begin(self) -> None:
    # A worker that lost a server begins again.
    self._loss_sum, self._num_examples, self._fetches = 0.0, 0, {}
    self._forget_parts()
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

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._fetches) if self._fetches else None

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    result = run_values.results
    if not result:
      return
    size = int(result["batch_size"])
    self._loss_sum += float(result["loss"]) * size
    self._num_examples += size
    self._global_step = int(result["step"])
    for name, (label, prediction) in result["heads"].items():
      self._heads[name].add(np.ravel(label), np.ravel(prediction))

  def end(self, session: tf.compat.v1.Session) -> None:
    place = self._place()
    if place.index and self._fetches:
      _write_part(_part_path(place.model_dir, place.index), self._counts())

  def get_metrics(self) -> dict[str, float] | None:
    """Returns name -> value over the examples of all processes, as an evaluation in one does.

    The first process waits for the others. The others return `None`, and so does the first if
    nobody has read anything.
    """
    place = self._place()
    if place.index or not self._fetches:
      return None
    for index in range(1, place.count):
      part = _wait_for_part(_part_path(place.model_dir, index), self._timeout_secs)
      if part is None:
        logging.warning(
          "Worker %d of %d has not said what it has evaluated: its examples are left out.",
          index, place.count,
        )  # fmt: skip
      else:
        self._add(part)
    if not self._num_examples:
      return None
    metrics = {"loss": self._loss_sum / self._num_examples}
    for name, head in self._heads.items():
      for metric, value in head.get().items():
        metrics[metric if len(self._heads) == 1 else f"{name}_{metric}"] = value
    return {**metrics, "global_step": self._global_step}

  def _place(self) -> Place:
    return Place("", 0, 1) if self._get_place is None else self._get_place()

  def _forget_parts(self) -> None:
    """Deletes what an earlier evaluation has left.

    Nobody has written anything for this one yet: the others begin after the first process has, and
    write at their end.
    """
    place = self._place()
    if place.count > 1 and place.index == 0:
      for index in range(1, place.count):
        path = _part_path(place.model_dir, index)
        if tf.io.gfile.exists(path):
          tf.io.gfile.remove(path)

  def _counts(self) -> dict[str, Any]:
    counts: dict[str, Any] = {"loss_sum": self._loss_sum, "num_examples": self._num_examples}
    for name, head in self._heads.items():
      counts.update({f"{name}/{key}": value for key, value in vars(head).items()})
    return counts

  def _add(self, counts: Mapping[str, np.ndarray]) -> None:
    self._loss_sum += float(counts["loss_sum"])
    self._num_examples += int(counts["num_examples"])
    for name, head in self._heads.items():
      for key, value in vars(head).items():
        setattr(head, key, value + counts[f"{name}/{key}"])


def _part_path(model_dir: str, index: int) -> str:
  return os.path.join(model_dir, "eval", "parts", f"{index}.npz")


def _write_part(path: str, counts: Mapping[str, Any]) -> None:
  tf.io.gfile.makedirs(os.path.dirname(path))
  content = io.BytesIO()
  np.savez_compressed(content, **counts)
  with tf.io.gfile.GFile(f"{path}.new", "wb") as f:
    f.write(content.getvalue())
  tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


def _wait_for_part(path: str, timeout_secs: float) -> dict[str, np.ndarray] | None:
  deadline = time.monotonic() + timeout_secs
  while not tf.io.gfile.exists(path):
    if time.monotonic() > deadline:
      return None
    time.sleep(_POLL_SECS)
  with tf.io.gfile.GFile(path, "rb") as f:
    content = f.read()
  with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
    return dict(arrays)


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
