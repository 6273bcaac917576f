"""`train_and_evaluate`: each process plays its role in the cluster of `TF_CONFIG`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training.graph_estimator import run_config
from monolith.native_training.graph_estimator.estimator import Estimator

InputFn = Callable[..., Any]
Hooks = Sequence[tf.compat.v1.train.SessionRunHook]
# The metrics, if anything was evaluated, and the result of each exporter.
Result = tuple["dict[str, Any] | None", list[Any]]

# How long the files of one checkpoint take to be deleted.
_DELETE_SECS = 1


@dataclasses.dataclass(frozen=True)
class TrainSpec:
  """Settings of training in `train_and_evaluate`; the fields are arguments of `Estimator.train`.

  Raises:
    ValueError: `max_steps` is not positive.
  """

  input_fn: InputFn
  max_steps: int | None = None
  hooks: Hooks = ()
  saving_listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] = ()

  def __post_init__(self) -> None:
    if self.max_steps is not None and self.max_steps <= 0:
      raise ValueError(f"max_steps is {self.max_steps}, want more than 0")


@dataclasses.dataclass(frozen=True)
class EvalSpec:
  """Settings of evaluation in `train_and_evaluate`.

  Attributes:
    input_fn: as for `Estimator.evaluate`, and so are `steps`, `name` and `hooks`.
    steps: the number of batches, at most; `None` for all of the data.
    name: a part of the name of the output folder.
    hooks: hooks of each session.
    exporters: objects with a `name` and a method `export(estimator, export_path, checkpoint_path,
      eval_result, is_the_final_export)`, those of `tf.estimator` among them; one, or several.
    start_delay_secs: how long an evaluator waits before it looks for the first checkpoint.
    throttle_secs: the least time between the starts of two evaluations.

  Raises:
    ValueError: a number is too small.
  """

  input_fn: InputFn
  steps: int | None = 100
  name: str | None = None
  hooks: Hooks = ()
  exporters: Any = ()
  start_delay_secs: float = 120
  throttle_secs: float = 600

  def __post_init__(self) -> None:
    if self.steps is not None and self.steps <= 0:
      raise ValueError(f"steps is {self.steps}, want more than 0")
    for name in ("start_delay_secs", "throttle_secs"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} is {getattr(self, name)}, want 0 or more")


def train_and_evaluate(estimator: Estimator, train_spec: Any, eval_spec: Any) -> Result:
  """Trains and evaluates in this process, or does its part in the cluster of `TF_CONFIG`.

  | role | part |
  |---|---|
  | none, or `master` | trains, evaluates checkpoints as they are written, and the last one |
  | `chief`, `worker` | trains, as a server of the cluster |
  | `ps` | serves variables, and does not return |
  | `evaluator` | evaluates new checkpoints until one has reached `max_steps`; one that is deleted \
meanwhile is passed over |

  Args:
    estimator: the estimator to train; its configuration has the role.
    train_spec: a `TrainSpec`, ours or that of `tf.estimator`.
    eval_spec: an `EvalSpec`, ours or that of `tf.estimator`.

  Returns:
    The metrics of the last evaluation and the results of the exporters; `None` and an empty list if
    this process has not evaluated.
  """
  config = estimator.config
  evaluations = _Evaluations(estimator, eval_spec, train_spec.max_steps)
  if config.task_type == run_config.EVALUATOR:
    _evaluate_new_checkpoints(evaluations, eval_spec)
    return evaluations.result
  server = _start_server(config)
  if config.task_type == run_config.PS and server is not None:
    logging.info("Serving variables at %s", config.master)
    server.join()
  listeners = list(train_spec.saving_listeners or ())
  if not config.cluster_spec.jobs or config.task_type == run_config.MASTER:
    listeners.append(_EvaluateSaved(evaluations, eval_spec.throttle_secs))
  estimator.train(
    train_spec.input_fn,
    hooks=train_spec.hooks,
    max_steps=train_spec.max_steps,
    saving_listeners=listeners,
  )
  return evaluations.result


def _start_server(config: Any) -> tf.distribute.Server | None:
  """Starts the server of this process, unless it is alone."""
  if not config.cluster_spec.jobs or not config.master:
    return None
  own = config.session_config
  session_config = tf.compat.v1.ConfigProto(gpu_options=own.gpu_options if own else None)
  return tf.distribute.Server(
    config.cluster_spec,
    job_name=config.task_type,
    task_index=config.task_id,
    config=session_config,
    protocol=config.protocol,
  )


class _Evaluations:
  """Evaluates checkpoints and calls the exporters.

  Attributes:
    result: the result of the last evaluation.
    has_reached_end: whether its checkpoint is the last one.
  """

  def __init__(self, estimator: Estimator, spec: Any, max_steps: int | None) -> None:
    self._estimator = estimator
    self._spec = spec
    self._max_steps = max_steps
    exporters = spec.exporters or ()
    self._exporters = list(exporters) if isinstance(exporters, Iterable) else [exporters]
    self.result: Result = (None, [])
    self.has_reached_end = False

  @property
  def model_dir(self) -> str:
    return self._estimator.model_dir

  def evaluate(self, checkpoint_path: str | None) -> None:
    metrics = self._estimator.evaluate(
      self._spec.input_fn,
      steps=self._spec.steps,
      hooks=self._spec.hooks,
      checkpoint_path=checkpoint_path,
      name=self._spec.name,
    )
    step = metrics[tf.compat.v1.GraphKeys.GLOBAL_STEP]
    self.has_reached_end = self._max_steps is not None and step >= self._max_steps
    exports = [
      exporter.export(
        estimator=self._estimator,
        export_path=os.path.join(self.model_dir, "export", exporter.name),
        checkpoint_path=checkpoint_path,
        eval_result=metrics,
        is_the_final_export=self.has_reached_end,
      )
      for exporter in self._exporters
    ]
    self.result = (metrics, exports)


class _EvaluateSaved(tf.compat.v1.train.CheckpointSaverListener):
  """Evaluates checkpoints that this process writes."""

  def __init__(self, evaluations: _Evaluations, throttle_secs: float) -> None:
    self._evaluations = evaluations
    self._throttle_secs = throttle_secs
    self._last_start: float | None = None
    self._last_step: int | None = None

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._last_start is None:  # The first checkpoint has not been trained yet.
      self._last_start = time.monotonic()
    elif time.monotonic() - self._last_start >= self._throttle_secs:
      self._evaluate(global_step_value)

  def end(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._last_step != global_step_value:
      self._evaluate(global_step_value)

  def _evaluate(self, step: int) -> None:
    self._last_start, self._last_step = time.monotonic(), step
    self._evaluations.evaluate(tf.train.latest_checkpoint(self._evaluations.model_dir))


def _evaluate_new_checkpoints(evaluations: _Evaluations, spec: Any) -> None:
  time.sleep(spec.start_delay_secs)
  paths = tf.train.checkpoints_iterator(evaluations.model_dir, min_interval_secs=spec.throttle_secs)
  for path in paths:
    try:
      evaluations.evaluate(path)
    except (tf.errors.OpError, ValueError) as error:
      time.sleep(_DELETE_SECS)
      if _is_there(path):
        raise
      logging.warning("%s was deleted while it was evaluated, and passed over: %s", path, error)
      continue
    if evaluations.has_reached_end:
      return


def _is_there(path: str) -> bool:
  """Returns whether a checkpoint still exists: training keeps only the newest ones."""
  folder, base = os.path.split(path)
  names = tf.io.gfile.listdir(folder)
  return f"{base}.index" in names and any(name.startswith(f"{base}.data-") for name in names)
