"""Brings what model functions return into one form, and makes metrics and texts of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training.metric import streaming
from monolith.native_training.models.spec import EstimatorSpec


class ModelOutputs(NamedTuple):
  """Holds the result of a model function, one entry per head.

  Attributes:
    is_single: whether it returned one prediction, not several.
    is_dict: whether it returned predictions by name.
  """

  heads: list[str]
  labels: list[tf.Tensor | None]
  preds: list[tf.Tensor]
  classification: list[bool]
  loss: tf.Tensor | None
  optimizer: tf.compat.v1.train.Optimizer | None
  is_single: bool
  is_dict: bool

  @property
  def predictions(self) -> Any:
    return self.preds[0] if self.is_single else dict(zip(self.heads, self.preds))


def normalise(result: Any, target: str | None, default_optimizer: Any) -> ModelOutputs:
  """Brings what a model function may return into one form.

  Args:
    result: an `EstimatorSpec`, or label, loss and prediction.
    target: heads, separated by commas, where `result` has none.
    default_optimizer: taken where `result` has no place for one.

  Raises:
    AssertionError: heads, labels and predictions do not fit.
    Exception: `result` is something else.
  """
  if isinstance(result, EstimatorSpec):
    label, pred, head_name, loss, optimizer, classification = result
    if head_name is None and target is not None:
      head_name = target.split(",")
  elif isinstance(result, (tuple, list)) and len(result) == 3:
    (label, loss, pred), head_name = result, target
    optimizer, classification = default_optimizer, True
  else:
    raise Exception(
      f"EstimatorSpec Error! model_fn returned {result!r}, want "
      "EstimatorSpec(label, pred, head_name, loss, optimizer), or the tuple (label, loss, pred)"
    )

  is_dict = isinstance(pred, Mapping)
  if is_dict:
    assert label is None or isinstance(
      label, Mapping
    ), f"pred is a dict and label a {type(label).__name__}, want a dict or None"
    heads, preds = list(pred), list(pred.values())
    labels = [None] * len(heads) if label is None else [label[head] for head in heads]
  elif isinstance(pred, (tuple, list)):
    assert isinstance(head_name, (tuple, list)), f"head_name is {head_name!r}, want a list"
    heads, preds = list(head_name), list(pred)
    labels = [None] * len(preds) if label is None else list(label)
  else:
    if isinstance(head_name, (tuple, list)) and len(head_name) == 1:
      head_name = head_name[0]
    assert isinstance(head_name, str), f"head_name is {head_name!r}, want a string"
    heads, preds, labels = [head_name], [pred], [label]
  assert (
    len(heads) == len(labels) == len(preds)
  ), f"there are {len(heads)} heads, {len(labels)} labels, {len(preds)} predictions"

  if isinstance(classification, Mapping):
    classification = [classification[head] for head in heads]
  elif not isinstance(classification, (tuple, list)):
    classification = [bool(classification)] * len(heads)
  assert len(classification) == len(
    heads
  ), f"classification has {len(classification)} entries, want {len(heads)}"
  labels = [
    None if label is None else tf.identity(label, name=f"label_{label.op.name}") for label in labels
  ]
  is_single = not isinstance(pred, (Mapping, tuple, list))
  return ModelOutputs(
    heads, labels, preds, list(classification), loss, optimizer, is_single, is_dict
  )


def eval_metrics(outputs: ModelOutputs) -> dict[str, streaming.Metric]:
  """Returns the metrics of the heads that have labels, by name.

  A model with one head has `auc`, with several each is called `<head>_auc`.
  """
  result = {}
  for head, label, pred, classification in zip(
    outputs.heads, outputs.labels, outputs.preds, outputs.classification
  ):
    if label is None:
      continue
    measure = streaming.classification_metrics if classification else streaming.regression_metrics
    for name, metric in measure(label, pred).items():
      result[name if len(outputs.heads) == 1 else f"{head}_{name}"] = metric
  return result


def native_metric_ops(
  head: str, label: tf.Tensor, pred: tf.Tensor, classification: bool
) -> list[Any]:
  """Returns ops that measure one head since the start, print that and summarise it."""
  label, pred = tf.reshape(label, [-1]), tf.reshape(pred, [-1])
  if classification:
    name = f"{head}_auc"
    value, update = tf.compat.v1.metrics.auc(tf.cast(label, tf.bool), pred)
  else:
    name = f"{head}_mse"
    value, update = tf.compat.v1.metrics.mean_squared_error(tf.cast(label, pred.dtype), pred)
  tf.compat.v1.summary.scalar(name, value)
  return [update, tf.print(name, update, output_stream=sys.stderr)]


def flat_floats(tensor: tf.Tensor | None, like: tf.Tensor) -> tf.Tensor:
  if tensor is None:
    return tf.zeros_like(tf.reshape(like, [-1]), tf.float32)
  return tf.cast(tf.reshape(tensor, [-1]), tf.float32)


def as_text(tensor: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
  """Returns a string per example, several values separated by commas."""
  is_ragged = isinstance(tensor, tf.RaggedTensor)
  values = tensor.values if is_ragged else tensor
  if values.dtype != tf.string:
    values = tf.strings.as_string(values)
  if is_ragged:
    return tf.strings.unsorted_segment_join(
      values, tensor.value_rowids(), tensor.nrows(), separator=","
    )
  if values.shape.rank == 1:
    return values
  rows = tf.reshape(values, [tf.shape(values)[0], -1])
  return tf.strings.reduce_join(rows, axis=1, separator=",")
