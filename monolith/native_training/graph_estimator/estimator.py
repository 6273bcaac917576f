"""`Estimator`: trains, evaluates, predicts with and exports what a model function builds."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.training import training_util

from monolith.native_training.graph import remembered_fetches
from monolith.native_training.graph_estimator import (
  evaluating,
  inputs,
  run_config,
  saved_model,
  spec,
  warm_start,
)

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]
Listeners = Sequence[tf.compat.v1.train.CheckpointSaverListener]
InputFn = Callable[..., Any]

_EVAL_DIR = "eval"


class Estimator:
  """Builds a graph with a model function and runs it, in this process.

  A model function is called as `model_fn(features, labels, mode, params, config)`, with those of
  the arguments that it takes, and returns an `EstimatorSpec`. Each call of a method below builds a
  graph of its own, and starts from the newest checkpoint in the folder.

  Args:
    model_fn: builds a model in the default graph.
    model_dir: where checkpoints and events go; by default that of the configuration, else a new
      temporary folder.
    config: how to run, ours or a `tf.estimator.RunConfig`.
    params: what the model function gets as `params`.
    warm_start_from: where variables start that no checkpoint in the folder has: `WarmStartSettings`
      or a path.

  Raises:
    ValueError: an argument does not fit.
  """

  def __init__(
    self,
    model_fn: Callable[..., Any],
    model_dir: str | None = None,
    config: Any = None,
    params: Any = None,
    warm_start_from: Any = None,
  ):
    inputs.check_model_fn(model_fn, params is not None)
    config = run_config.check(run_config.RunConfig() if config is None else config)
    self._config = _with_model_dir(config, model_dir)
    self._model_fn = model_fn
    self._params = copy.deepcopy({} if params is None else params)
    self._warm_start = warm_start.settings_of(warm_start_from)
    self._session_config = run_config.get_session_config(self._config)
    # For training alone: evaluation and prediction restore a checkpoint beside what servers hold.
    self._device_fn = run_config.get_device_fn(self._config)

  @property
  def model_dir(self) -> str:
    return self._config.model_dir

  @property
  def config(self) -> Any:
    return self._config

  @property
  def params(self) -> Any:
    return copy.deepcopy(self._params)

  @property
  def model_fn(self) -> Callable[..., Any]:
    """The model function with this Estimator's parameters; takes features, labels, mode, config."""

    def model_fn(features: Any, labels: Any, mode: str, config: Any) -> Any:
      return self._call_model_fn(features, labels, mode, config)

    return model_fn

  def eval_dir(self, name: str | None = None) -> str:
    """Returns where evaluations of that name write events."""
    return os.path.join(self.model_dir, f"{_EVAL_DIR}_{name}" if name else _EVAL_DIR)

  def latest_checkpoint(self) -> str | None:
    """Returns the prefix of the newest checkpoint; `None` if there is none."""
    return tf.train.latest_checkpoint(self.model_dir)

  def get_variable_names(self) -> list[str]:
    """Returns the names in the newest checkpoint.

    Raises:
      ValueError: there is none.
    """
    return [name for name, _ in tf.train.list_variables(self._require_checkpoint())]

  def get_variable_value(self, name: str) -> np.ndarray:
    """Returns a value of the newest checkpoint.

    Raises:
      ValueError: there is none.
    """
    return tf.train.load_variable(self._require_checkpoint(), name)

  def train(
    self,
    input_fn: InputFn,
    hooks: Hooks | None = None,
    steps: int | None = None,
    max_steps: int | None = None,
    saving_listeners: Listeners | None = None,
  ) -> Estimator:
    """Trains until a limit, or the end of the data.

    Args:
      input_fn: returns a dataset, or tensors: features, or (features, labels). It is given those of
        `mode`, `params` and `config` that it takes.
      hooks: for the session.
      steps: how many steps.
      max_steps: the global step to stop at. Nothing is done if the checkpoint is there already.
      saving_listeners: called around every checkpoint.

    Returns:
      This Estimator.

    Raises:
      ValueError: both limits are given or one is not positive, there are listeners and nothing
        that saves, or the process is a `ps` or an `evaluator`.
      TypeError: a hook or a listener has another type.
    """
    if steps is not None and max_steps is not None:
      raise ValueError("Can not provide both steps and max_steps.")
    run_config.check_trains(self._config)
    _check_positive("steps", steps)
    _check_positive("max_steps", max_steps)
    if max_steps is not None and self._get_saved_step() >= max_steps:
      logging.info("No step is trained: the checkpoint has reached step %d", max_steps)
      return self
    session_hooks = _check_hooks(hooks)
    if steps is not None or max_steps is not None:
      session_hooks.append(tf.compat.v1.train.StopAtStepHook(steps, max_steps))
    with tf.Graph().as_default() as graph, graph.device(self._device_fn):
      built, input_hooks = self._build(input_fn, spec.ModeKeys.TRAIN)
      if self._warm_start is not None:
        warm_start.apply(self._warm_start)
      self._run_training(built, [*input_hooks, *session_hooks], _check_listeners(saving_listeners))
    return self

  def _run_training(self, built: Any, session_hooks: list[Any], listeners: Sequence[Any]) -> None:
    config = self._config
    _add_loss_summary(built.loss)
    # Reads the step before it is raised, for hooks that begin when the model is complete.
    step = training_util._get_or_create_global_step_read()
    # Hooks of users find the loss where Estimator has always put it.
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.LOSSES, built.loss)
    session_hooks.append(tf.compat.v1.train.NanTensorHook(built.loss))
    if config.log_step_count_steps:
      session_hooks.append(
        tf.compat.v1.train.LoggingTensorHook(
          {"loss": built.loss, "step": step}, every_n_iter=config.log_step_count_steps
        )
      )
    session_hooks += [remembered_fetches.RememberFetchesHook(), *built.training_hooks]
    _add_default_saver(built.scaffold, config)
    chief_hooks = list(built.training_chief_hooks)
    savers = [
      hook
      for hook in [*session_hooks, *chief_hooks]
      if isinstance(hook, tf.compat.v1.train.CheckpointSaverHook)
    ]
    if not savers and (config.save_checkpoints_secs or config.save_checkpoints_steps):
      savers = [
        tf.compat.v1.train.CheckpointSaverHook(
          self.model_dir,
          save_secs=config.save_checkpoints_secs,
          save_steps=config.save_checkpoints_steps,
          scaffold=built.scaffold,
          save_graph_def=config.checkpoint_save_graph_def,
        )
      ]
      chief_hooks = [*savers, *chief_hooks]
    if listeners:
      if not savers:
        raise ValueError(
          "There should be a CheckpointSaverHook to use saving_listeners: say with "
          "save_checkpoints_steps or save_checkpoints_secs when to save"
        )
      # TensorFlow has no other way to add one to a hook that a model brings.
      savers[0]._listeners.extend(listeners)
    session = tf.compat.v1.train.MonitoredTrainingSession(
      master=config.master,
      is_chief=config.is_chief,
      checkpoint_dir=self.model_dir,
      scaffold=built.scaffold,
      hooks=session_hooks,
      chief_only_hooks=chief_hooks,
      save_checkpoint_secs=0,  # A hook saves.
      save_summaries_steps=config.save_summary_steps,
      config=self._session_config,
      max_wait_secs=config.session_creation_timeout_secs,
      stop_grace_period_secs=getattr(config, "stop_grace_period_secs", 120),
      log_step_count_steps=config.log_step_count_steps,
      save_graph_def=config.checkpoint_save_graph_def,
    )
    _run_until_end(session, [built.train_op, built.loss])

  def evaluate(
    self,
    input_fn: InputFn,
    steps: int | None = None,
    hooks: Hooks | None = None,
    checkpoint_path: str | None = None,
    name: str | None = None,
  ) -> dict[str, Any]:
    """Evaluates a checkpoint, and writes the metrics to the folder of evaluations.

    Args:
      input_fn: as for `train`.
      steps: how many batches, at most; all of the data by default.
      hooks: for the session.
      checkpoint_path: the newest one by default; without one, the initial values are evaluated.
      name: part of the folder's name, for an evaluation beside another.

    Returns:
      Name -> value of each metric, `loss` (the mean over batches) and `global_step`.

    Raises:
      ValueError: `steps` is not positive, or a metric has one of those two names.
    """
    _check_positive("steps", steps)
    session_hooks = _check_hooks(hooks)
    if steps is not None:
      session_hooks.append(evaluating.StopAfterRunsHook(steps))
    checkpoint_path = checkpoint_path or self.latest_checkpoint()
    if checkpoint_path is None:
      logging.info("No trained model in %s: initial values are evaluated", self.model_dir)
    with tf.Graph().as_default() as graph, graph.device(self._config.device_fn):
      built, input_hooks = self._build(input_fn, spec.ModeKeys.EVAL)
      if checkpoint_path is None and self._warm_start is not None:
        warm_start.apply(self._warm_start)
      update_op, values = evaluating.create_metrics(built)
      results = tf.compat.v1.train.FinalOpsHook(values)
      session = tf.compat.v1.train.MonitoredSession(
        tf.compat.v1.train.ChiefSessionCreator(
          scaffold=built.scaffold,
          master=self._config.evaluation_master,
          config=self._session_config,
          checkpoint_filename_with_path=checkpoint_path,
        ),
        hooks=[
          remembered_fetches.RememberFetchesHook(),
          *input_hooks,
          *session_hooks,
          *built.evaluation_hooks,
          results,
        ],
      )
      num_batches = 0
      with session:
        while not session.should_stop():
          session.run(update_op)
          num_batches += 1
      if not num_batches:
        logging.warning("No batch was evaluated, so the metrics say nothing: is the input empty?")
      metrics = dict(results.final_ops_values)
      evaluating.write(self.eval_dir(name), metrics, checkpoint_path)
    return metrics

  def predict(
    self,
    input_fn: InputFn,
    predict_keys: Any = None,
    hooks: Hooks | None = None,
    checkpoint_path: str | None = None,
    yield_single_examples: bool = True,
  ) -> Iterator[Any]:
    """Yields the predictions for the data, computed as they are asked for.

    Args:
      input_fn: as for `train`; labels have no effect.
      predict_keys: the names of the predictions that are wanted, a text or several; all by default.
      hooks: for the session.
      checkpoint_path: the newest one by default; without one, the model has its initial values.
      yield_single_examples: whether batches are taken apart.

    Yields:
      The predictions of an example, or of a batch: arrays by name if the model's have names.

    Raises:
      ValueError: the model has no predictions of those names, or those of a batch differ in length.
    """
    session_hooks = _check_hooks(hooks)
    checkpoint_path = checkpoint_path or self.latest_checkpoint()
    if checkpoint_path is None:
      logging.info("No trained model in %s: initial values predict", self.model_dir)
    device = self._config.device_fn or run_config.get_own_device(self._config)
    with tf.Graph().as_default() as graph, graph.device(device):
      built, input_hooks = self._build(input_fn, spec.ModeKeys.PREDICT)
      if checkpoint_path is None and self._warm_start is not None:
        warm_start.apply(self._warm_start)
      predictions = _select(built.predictions, predict_keys)
      session = tf.compat.v1.train.MonitoredSession(
        tf.compat.v1.train.ChiefSessionCreator(
          scaffold=built.scaffold,
          master=self._config.master,
          config=self._session_config,
          checkpoint_filename_with_path=checkpoint_path,
        ),
        hooks=[*input_hooks, *session_hooks, *built.prediction_hooks],
      )
    # The caller goes on between two batches: its default graph is its own then.
    with _InGraph(graph, session) as running:
      while not running.should_stop():
        batch = running.run(predictions)
        if yield_single_examples:
          yield from _split(batch)
        else:
          yield batch

  def export_saved_model(
    self,
    export_dir_base: str,
    serving_input_receiver_fn: Callable[[], Any],
    assets_extra: Mapping[str, str] | None = None,
    as_text: bool = False,
    checkpoint_path: str | None = None,
  ) -> bytes:
    """Exports a checkpoint as a SavedModel, without the rows of hash tables.

    Models with tables are exported by `monolith.native_training.model_export`.

    Args:
      export_dir_base: the model goes into a folder below it, named after the time.
      serving_input_receiver_fn: makes what the model is fed.
      assets_extra: path below `assets.extra` -> a file to copy there.
      as_text: whether the file of the graph can be read by people.
      checkpoint_path: the newest one by default.

    Returns:
      The folder.

    Raises:
      ValueError: there is no checkpoint, or the model exports nothing.
    """
    checkpoint_path = checkpoint_path or self._require_checkpoint()
    with tf.Graph().as_default():
      self._start_graph()
      receiver = serving_input_receiver_fn()
      built = self._call_model_fn(receiver.features, None, spec.ModeKeys.PREDICT, self._config)
      return saved_model.export(
        built,
        receiver,
        checkpoint_path,
        export_dir_base,
        self._session_config,
        assets_extra or {},
        as_text,
      )

  export_savedmodel = export_saved_model

  def _start_graph(self) -> None:
    tf.compat.v1.set_random_seed(self._config.tf_random_seed)
    step = tf.compat.v1.train.create_global_step()
    if tf.DeviceSpec.from_string(step.device).job == "ps":
      # The tensor that a session returns for the variable. TensorFlow's own read asks the server
      # first whether the variable has begun: six messages in every step, and with hooks it has.
      read = tf.identity(step._as_graph_element(), "global_step_read")
      tf.compat.v1.add_to_collection(training_util.GLOBAL_STEP_READ_KEY, read)
    training_util._get_or_create_global_step_read()

  def _build(self, input_fn: InputFn, mode: str) -> tuple[Any, inputs.Hooks]:
    """Builds data and model in the default graph."""
    self._start_graph()
    features, labels, hooks = inputs.call_input_fn(input_fn, mode, self.params, self._config)
    if mode == spec.ModeKeys.PREDICT:
      labels = None
      if not hooks and not tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS):
        logging.warning(
          "The input is no dataset and has no queue runner: predictions never end, unless a hook "
          "stops them"
        )
    return self._call_model_fn(features, labels, mode, self._config), hooks

  def _call_model_fn(self, features: Any, labels: Any, mode: str, config: Any) -> Any:
    return spec.check(
      inputs.call_model_fn(self._model_fn, features, labels, mode, self.params, config)
    )

  def _get_saved_step(self) -> int:
    path = self.latest_checkpoint()
    if path is None:
      return 0
    try:
      return int(tf.train.load_variable(path, tf.compat.v1.GraphKeys.GLOBAL_STEP))
    except (tf.errors.NotFoundError, ValueError):  # It was saved without a step.
      return 0

  def _require_checkpoint(self) -> str:
    path = self.latest_checkpoint()
    if path is None:
      raise ValueError(f"Couldn't find trained model at {self.model_dir}.")
    return path


class _InGraph:
  """A session whose graph is the default one while it works, and no longer.

  Args:
    graph: the session's graph.
    session: runs in it.
  """

  def __init__(self, graph: tf.Graph, session: tf.compat.v1.train.MonitoredSession):
    self._graph = graph
    self._session = session

  def __enter__(self) -> _InGraph:
    return self

  def should_stop(self) -> bool:
    return self._session.should_stop()

  def run(self, fetches: Any) -> Any:
    with self._graph.as_default():
      return self._session.run(fetches)

  def __exit__(self, error_type: Any, error: Any, traceback: Any) -> bool:
    """Closes the session; the end of the data is no error."""
    with self._graph.as_default():
      return self._session.__exit__(error_type, error, traceback)


def _run_until_end(session: tf.compat.v1.train.MonitoredSession, fetches: list[Any]) -> None:
  num_steps = 0
  with session:
    while not session.should_stop():
      # Marks the step in profiles.
      with tf.profiler.experimental.Trace("train", step_num=num_steps + 1, _r=1):
        session.run(fetches)
      num_steps += 1
  if not num_steps:
    logging.warning("No step was trained: the input may be empty.")


def _with_model_dir(config: Any, model_dir: str | None) -> Any:
  if model_dir is not None:
    model_dir = os.fspath(model_dir)
    if config.model_dir is not None and config.model_dir != model_dir:
      raise ValueError(
        f"model_dir is {model_dir!r}, but that of the configuration is {config.model_dir!r}"
      )
  elif config.model_dir is None:
    model_dir = tempfile.mkdtemp()
    logging.warning("The model goes to a temporary folder, %s: give a model_dir", model_dir)
  if config.model_dir is not None:
    return config
  return config.replace(model_dir=model_dir)


def _check_positive(name: str, value: int | None) -> None:
  if value is not None and value <= 0:
    raise ValueError(f"Must specify {name} > 0, given: {value}")


def _check_hooks(hooks: Iterable[Any] | None) -> list[Any]:
  hooks = list(hooks or [])
  for hook in hooks:
    if not isinstance(hook, tf.compat.v1.train.SessionRunHook):
      raise TypeError(f"Hooks must be a SessionRunHook, given: {hook!r}")
  return hooks


def _check_listeners(listeners: Iterable[Any] | None) -> list[Any]:
  listeners = list(listeners or [])
  for listener in listeners:
    if not isinstance(listener, tf.compat.v1.train.CheckpointSaverListener):
      raise TypeError(f"saving_listeners must be CheckpointSaverListeners, given: {listener!r}")
  return listeners


def _add_loss_summary(loss: tf.Tensor) -> None:
  summaries = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
  if not any(summary.op.name == "loss" for summary in summaries):
    tf.compat.v1.summary.scalar("loss", loss)


def _add_default_saver(scaffold: tf.compat.v1.train.Scaffold, config: Any) -> None:
  """Lets the scaffold find a saver that keeps as many checkpoints as are to be kept."""
  savers = tf.compat.v1.GraphKeys.SAVERS
  if scaffold.saver is None and not tf.compat.v1.get_collection(savers):
    tf.compat.v1.add_to_collection(
      savers,
      tf.compat.v1.train.Saver(
        sharded=True,
        max_to_keep=config.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        defer_build=True,
        save_relative_paths=True,
      ),
    )


def _select(predictions: Any, keys: Any) -> Any:
  """Returns the predictions of the given names.

  Raises:
    ValueError: there is none of them, or the predictions have no names.
  """
  if not keys:
    return predictions
  if not isinstance(predictions, Mapping):
    raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
  keys = [keys] if isinstance(keys, str) else list(keys)
  selected = {name: value for name, value in predictions.items() if name in keys}
  if not selected:
    raise ValueError(f"Expected to run at least one output of {list(predictions)}, given {keys}.")
  return selected


def _split(batch: Any) -> Iterator[Any]:
  """Yields the examples of a batch of predictions.

  Raises:
    ValueError: predictions differ in length.
  """
  if not isinstance(batch, Mapping):
    yield from batch
    return
  lengths = {name: value.shape[0] for name, value in batch.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"Batch length of predictions should be same, but is {lengths}")
  for i in range(next(iter(lengths.values()), 0)):
    yield {name: value[i] for name, value in batch.items()}
