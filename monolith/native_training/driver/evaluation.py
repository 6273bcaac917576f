"""Evaluates a model in this process, from its checkpoints, alone or while it trains.

An evaluation reads the data of its own mode and writes curves to `<model_dir>/eval`, where
TensorBoard shows them beside those of the training run. Tables are read into a session of their
own, so the result belongs to a checkpoint and not to a model that is changing.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import graph_estimator, save_utils
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import restored
from monolith.native_training.driver import dry_run
from monolith.native_training.driver.graph import CpuTraining
from monolith.native_training.settings.training_config import CpuTrainingConfig

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]
Metrics = dict[str, float]

BEST_DIR = "best"

_EVAL = graph_estimator.ModeKeys.EVAL
_TF_CONFIG = "TF_CONFIG"
# Suffixes of metrics that are lower for a better model; all others are higher.
_SMALLER_IS_BETTER = ("loss", "mse", "mae", "error")


class Evaluator:
  """Evaluates the checkpoints of one folder.

  Args:
    model: an object with an `instantiate` method, whose params are in evaluation mode.
    conf: the configuration of training. Servers are not needed: tables are read from files.
    model_dir: the folder.
    collected: remembers the dry run for the next run of the same task.
  """

  def __init__(
    self,
    model: Any,
    conf: CpuTrainingConfig,
    model_dir: str,
    collected: dict[str, dry_run.CollectedFeatures] | None = None,
  ):
    self._model_dir = model_dir
    conf = copy.copy(conf)
    conf.mode = _EVAL
    conf.server_type = "worker"
    conf.num_ps = 0
    collected = {} if collected is None else collected
    self._training = CpuTraining(conf, model.instantiate(), collected=collected.get("features"))
    collected["features"] = self._training.collected
    session_config = tf.compat.v1.ConfigProto()
    # Grappler breaks on ragged inputs.
    session_config.graph_options.rewrite_options.disable_meta_optimizer = True
    with without_tf_config():
      self._estimator = graph_estimator.Estimator(
        self._training.create_model_fn(),
        config=graph_estimator.RunConfig(model_dir=model_dir, session_config=session_config),
      )

  def evaluate(self, steps: int | None = None, hooks: Hooks | None = None) -> Metrics:
    """Returns name -> value for the loss (the mean per example), each metric and `global_step`.

    Evaluates the newest checkpoint; if that one is deleted meanwhile, the one after it.

    Args:
      steps: the number of batches, at most; all of the data by default.
      hooks: hooks of the session.

    Raises:
      ValueError: there is no checkpoint.
    """

    def evaluate(prefix: str) -> Metrics:
      with without_tf_config():
        return self._estimator.evaluate(
          self._training.create_input_fn(_EVAL),
          steps=steps,
          hooks=list(hooks or []),
          checkpoint_path=prefix,
        )

    result = restored.with_newest(self._model_dir, evaluate)
    return {
      name: int(value) if name == "global_step" else float(value) for name, value in result.items()
    }


class EvaluationListener(tf.compat.v1.train.CheckpointSaverListener):
  """Evaluates checkpoints as they are saved.

  Args:
    evaluate: returns the metrics of the newest checkpoint.
    model_dir: the folder of the checkpoints.
    every: evaluate whenever the step has passed another multiple of it.
    patience: stop the training after this many evaluations without a better one; `None` for never.
    keep_best: keep the best checkpoint in `<model_dir>/best`.
    metric: the metric to compare by; by default `auc`, else `loss`.
    report: called with each evaluation's metrics.

  Attributes:
    every: the number of steps between two evaluations.
    best: the metrics of the best evaluation, `None` before the first.
    last: the metrics of the last evaluation.
  """

  def __init__(
    self,
    evaluate: Callable[[], Metrics],
    model_dir: str,
    every: int,
    patience: int | None,
    keep_best: bool,
    metric: str | None,
    report: Callable[[Metrics], None] | None = None,
  ):
    if every <= 0:
      raise ValueError(f"eval_every is {every}, want a number of steps, 1 at least")
    if patience is not None and patience <= 0:
      raise ValueError(f"early_stopping is {patience}, want a number of evaluations, 1 at least")
    self._evaluate = evaluate
    self._model_dir = model_dir
    self.every = every
    self._patience = patience
    self._keep_best = keep_best
    self._metric = metric
    self._report = report
    self._last_step: int | None = None
    self._num_worse = 0
    self.best: Metrics | None = None
    self.last: Metrics | None = None

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> bool:
    """Evaluates if it is time; returns whether training is to stop."""
    step = int(global_step_value)
    if step // self.every == (self._last_step or 0) // self.every:
      return False
    return self._run(step)

  def end(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    """Evaluates the last checkpoint, unless that has been done."""
    if self._last_step != int(global_step_value):
      self._run(int(global_step_value))

  def _run(self, step: int) -> bool:
    self._last_step = step
    self.last = self._evaluate()
    if self._report is not None:
      self._report(self.last)
    metric, value = self._get_value(self.last)
    sign = -1 if metric.endswith(_SMALLER_IS_BETTER) else 1
    if self.best is None or sign * value > sign * self._get_value(self.best)[1]:
      self.best = self.last
      self._num_worse = 0
      if self._keep_best:
        _copy_checkpoint(self._model_dir, os.path.join(self._model_dir, BEST_DIR))
      return False
    self._num_worse += 1
    if self._patience is None or self._num_worse < self._patience:
      return False
    logging.warning(
      "Training stops at step %d: %s was %.6g at step %d and has not improved in %d evaluations.",
      step, metric, self.best[metric], self.best["global_step"], self._num_worse,
    )  # fmt: skip
    return True

  def _get_value(self, metrics: Metrics) -> tuple[str, float]:
    name = self._metric or ("auc" if "auc" in metrics else "loss")
    if name not in metrics:
      raise ValueError(f"metric is {name!r}, but the evaluation has {sorted(metrics)}")
    value = metrics[name]
    if math.isnan(value):
      # NaN compares as neither better nor worse, and must not count as the best.
      value = math.inf if name.endswith(_SMALLER_IS_BETTER) else -math.inf
    return name, value


def print_metrics(metrics: Metrics, stream: Any = None) -> None:
  """Prints metrics, which have a `global_step`, as one line to standard error or `stream`."""
  stream = stream or sys.stderr
  values = [
    f"{name} {value:.4f}" for name, value in sorted(metrics.items()) if name != "global_step"
  ]
  # On a terminal the cursor is behind the line of progress, which does not end with a newline.
  start = "\n" if getattr(stream, "isatty", lambda: False)() else ""
  line = "   ".join([f"evaluation at step {metrics['global_step']:,}", *values])
  # A run goes on when its output is closed.
  with contextlib.suppress(OSError):
    stream.write(f"{start}{line}\n")
    stream.flush()


def write_curves(model_dir: str, metrics: Metrics) -> None:
  """Writes metrics, which have a `global_step`, to `<model_dir>/eval` for TensorBoard."""
  values = [
    tf.compat.v1.Summary.Value(tag=name, simple_value=value)
    for name, value in metrics.items()
    if name != "global_step"
  ]
  with tf.Graph().as_default():
    writer = tf.compat.v1.summary.FileWriter(os.path.join(model_dir, "eval"))
    writer.add_summary(tf.compat.v1.Summary(value=values), int(metrics["global_step"]))
    writer.close()


def _copy_checkpoint(model_dir: str, target_dir: str) -> None:
  """Copies the newest checkpoint of a folder into another one, which then has no other.

  The previous content is replaced at the end, by one rename.
  """
  prefix = tf.train.latest_checkpoint(model_dir)
  if prefix is None:
    raise ValueError(f"{model_dir} has no checkpoint to keep")
  new_dir = f"{target_dir}.new"
  if tf.io.gfile.exists(new_dir):
    tf.io.gfile.rmtree(new_dir)
  tf.io.gfile.makedirs(new_dir)
  checkpoint_files.copy_checkpoint(prefix, new_dir)
  state_file = os.path.join(model_dir, save_utils.MONOLITH_CKPT_STATE_FILE_NAME)
  if tf.io.gfile.exists(state_file):
    tf.io.gfile.copy(state_file, os.path.join(new_dir, os.path.basename(state_file)))
  name = os.path.basename(prefix)
  tf.compat.v1.train.update_checkpoint_state(new_dir, name, [name])
  if tf.io.gfile.exists(target_dir):
    tf.io.gfile.rmtree(target_dir)
  tf.io.gfile.rename(new_dir, target_dir)


@contextlib.contextmanager
def without_tf_config() -> Iterator[None]:
  """Hides `TF_CONFIG` from the estimator, which would take part in that cluster."""
  tf_config = os.environ.pop(_TF_CONFIG, None)
  try:
    yield
  finally:
    if tf_config is not None:
      os.environ[_TF_CONFIG] = tf_config
