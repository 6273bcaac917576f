"""The metrics of an evaluation: their ops, when it ends, and the events that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training.graph_estimator import spec as specs

_LOSS = "loss"
_STEP = tf.compat.v1.GraphKeys.GLOBAL_STEP
_CHECKPOINT_PATH = "checkpoint_path"


class StopAfterRunsHook(tf.compat.v1.train.SessionRunHook):
  """Stops a session after this many runs.

  Args:
    num_runs: how many.
  """

  def __init__(self, num_runs: int):
    self._num_runs = num_runs
    self._num_done = 0

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    del session, coord
    self._num_done = 0

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    self._num_done += 1
    if self._num_done >= self._num_runs:
      run_context.request_stop()


def create_metrics(spec: Any) -> tuple[tf.Operation, dict[str, Any]]:
  """Adds the mean loss and the step to the metrics of a model, in the default graph.

  Returns:
    What to run for each batch, and name -> value at the end.

  Raises:
    ValueError: a metric of the model has the name `loss` or `global_step`.
  """
  for name in (_LOSS, _STEP):
    if name in spec.eval_metric_ops:
      raise ValueError(f'Metric with name "{name}" is not allowed: every evaluation has one.')
  updates: list[Any] = []
  values: dict[str, Any] = {}
  metrics = {**spec.eval_metric_ops, _LOSS: tf.compat.v1.metrics.mean(spec.loss)}
  for name, metric in sorted(metrics.items()):
    if specs.is_keras_metric(metric):
      updates += metric.updates
      values[name] = metric.result()
    else:
      values[name], update = metric
      updates.append(update)
  values[_STEP] = tf.compat.v1.train.get_global_step()
  return tf.group(*updates), values


def write(folder: str, metrics: Mapping[str, Any], checkpoint_path: str | None) -> None:
  """Writes metrics as events of their step.

  Args:
    folder: where events go.
    metrics: name -> value, `global_step` among them. Numbers become curves, arrays tensors, and the
      bytes of a summary are written as they are.
    checkpoint_path: what was evaluated, if it was a checkpoint.
  """
  step = int(metrics[_STEP])
  logging.info("Metrics of step %d: %s", step, dict(metrics))
  summary = tf.compat.v1.Summary()
  for name, value in sorted(metrics.items()):
    if name != _STEP:
      _add_value(summary, name, value)
  writer = tf.compat.v1.summary.FileWriterCache.get(folder)
  writer.add_summary(summary, step)
  if checkpoint_path:
    path = tf.compat.v1.Summary()
    path.value.add(tag=_CHECKPOINT_PATH, tensor=tf.make_tensor_proto(checkpoint_path))
    writer.add_summary(path, step)
  writer.flush()


def _add_value(summary: tf.compat.v1.Summary, name: str, value: Any) -> None:
  if isinstance(value, bytes):
    added = tf.compat.v1.Summary.FromString(value)
    for i, item in enumerate(added.value):
      item.tag = f"{name}/{i}"
    summary.value.extend(added.value)
  elif np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
    summary.value.add(tag=name, simple_value=float(value))
  elif isinstance(value, np.ndarray):
    summary.value.add(tag=name, tensor=tf.make_tensor_proto(value))
  else:
    logging.warning("The metric %s is a %s, which is no event", name, type(value).__name__)
