"""Coordinates the ranks of synchronous training between steps.

Hooks here that talk to other ranks do so at the same step on all of them: they count the runs of
the session, which all ranks do together, and no call has a timeout: a rank that gave up would be
one call behind the others forever.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import (
  distributed_serving_ops,
  graph_estimator,
  hash_table_ops,
  hvd_lib,
  multi_hash_table_ops,
)
from monolith.native_training.data import datasets
from monolith.native_training.graph import export_context
from monolith.native_training.ranks import agreement as sync_agreement

INPUT_FN_WRAPPER_KEY = "wrapped"

# Key of an element that is not a dict itself, beside `EofAwareTask.EOF_KEY`.
_ELEMENT_KEY = "__EofAwareTask_element"
_ONLINE_FILE = "ONLINE"
_LIMIT_REQ_TIME_FILE = "limit_req_time"
_REQ_TIME_COLLECTION = "req_time"
# UTC hours, both included, in which `SyncTrainingForceDumpHook` lets the timer run.
_DUMP_HOURS = (18, 20)
_INFO_INTERVAL_SECS = 600

Session = tf.compat.v1.Session
RunContext = tf.compat.v1.train.SessionRunContext


class SyncTrainingBarrierSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Lets no rank go on after a save before rank 0 has saved too."""

  def __init__(self):
    super().__init__()
    self._broadcast: sync_agreement.Broadcast | None = None

  def begin(self) -> None:
    self._broadcast = sync_agreement.Broadcast("hvd_export_barrier_ph", [], tf.int64)

  def after_save(self, session: Session, global_step_value: int) -> None:
    """Waits for the other ranks.

    Raises:
      RuntimeError: rank 0 has saved another step.
    """
    step = int(self._broadcast.run(session, global_step_value))
    if step != global_step_value:
      raise RuntimeError(f"rank 0 has saved step {step}, this rank step {global_step_value}")


_BACKEND_RETRY_SECS = 10
_BACKEND_LOG_SECS = 60


class ParameterSyncHook(tf.compat.v1.train.SessionRunHook):
  """Pushes touched rows to the serving replicas in every run.

  A backend that fails ends no training: rows go to the replicas that it named last.

  Args:
    sync_backend: knows the replicas.
    ps_index: index of this rank's share of the tables.
    refresh_interval: seconds after which the backend is asked again.
  """

  def __init__(self, sync_backend: Any, ps_index: int, refresh_interval: float = 100):
    self._sync_backend = sync_backend
    self._ps_index = ps_index
    self._refresh_interval = refresh_interval
    self._config = b""
    self._next_refresh = -math.inf

  def begin(self) -> None:
    self._placeholder = tf.compat.v1.placeholder(tf.string, [], name="sync_config_str")
    client = distributed_serving_ops.ParameterSyncClient(
      distributed_serving_ops.parameter_sync_client_from_config(name_suffix=str(self._ps_index))
    )
    self._sync_op = client.create_sync_op(self._placeholder)

  def before_run(self, run_context: RunContext) -> tf.compat.v1.train.SessionRunArgs:
    now = time.monotonic()
    if now >= self._next_refresh:
      self._next_refresh = now + self._refresh_interval
      try:
        self._config = distributed_serving_ops.refresh_sync_config(
          self._sync_backend, self._ps_index
        )
      except Exception as error:  # Whatever a backend raises: training does not depend on it.
        # Soon, but not in every step: the backend may have waited before it failed.
        self._next_refresh = time.monotonic() + min(self._refresh_interval, _BACKEND_RETRY_SECS)
        logging.log_every_n_seconds(
          logging.ERROR,
          "Rows go to the replicas known before: the backend of parameter sync failed with %r",
          _BACKEND_LOG_SECS,
          error,
        )
    return tf.compat.v1.train.SessionRunArgs(self._sync_op, {self._placeholder: self._config})


class EveryNRunsHook(tf.compat.v1.train.SessionRunHook):
  """Calls `check` once in `step_interval` runs, at the same one on all ranks.

  The step that a run fetches may be the one before or after it, differently on each rank; the
  number of runs is not.
  """

  def __init__(self, step_interval: int):
    if step_interval < 1:
      raise ValueError(f"step_interval is {step_interval}, want at least 1")
    self._step_interval = step_interval
    self._num_runs = 0

  def begin(self) -> None:
    self._num_runs = 0
    self._global_step = tf.compat.v1.train.get_or_create_global_step()

  def after_run(self, run_context: RunContext, run_values: Any) -> None:
    self._num_runs += 1
    if self._num_runs % self._step_interval == 0:
      self.check(run_context, int(run_context.session.run(self._global_step)))

  def check(self, run_context: RunContext, step: int) -> None:
    raise NotImplementedError


def _save_now(target_timer: Any) -> None:
  target_timer.enable()
  target_timer.reset()


class SyncTrainingForceDumpHook(EveryNRunsHook):
  """Saves and stops on request, and lets a saver's timer run in some hours only.

  Rank 0 looks for files `dump_<step>` and `stop_<step>` in the model folder. A file counts when its
  step is reached: at the first check at or after it. From 18 to 20 o'clock UTC the timer is
  enabled, otherwise disabled. All ranks do what rank 0 found.

  Args:
    model_dir: where the files are.
    target_timer: the timer of this rank's saver hook.
    step_interval: steps between checks.
  """

  def __init__(self, model_dir: str, target_timer: Any, step_interval: int = 100):
    super().__init__(step_interval)
    self._model_dir = model_dir
    self._target_timer = target_timer
    self._last_step = -1

  def begin(self) -> None:
    super().begin()
    self._broadcast = sync_agreement.Broadcast("hvd_dump_ctrl", [3], tf.int16)

  def after_create_session(self, session: Session, coord: tf.train.Coordinator) -> None:
    # Requests of steps that an earlier run has passed are done with.
    self._last_step = int(session.run(self._global_step))

  def check(self, run_context: RunContext, step: int) -> None:
    found = [0, 0, 0]
    if hvd_lib.rank() == 0:
      hour = datetime.datetime.now(datetime.timezone.utc).hour
      found = [
        int(self._is_requested("stop", step)),
        int(self._is_requested("dump", step)),
        int(_DUMP_HOURS[0] <= hour <= _DUMP_HOURS[1]),
      ]
    self._last_step = step
    should_stop, should_dump, timer_enabled = self._broadcast.run(run_context.session, found)
    if should_stop or should_dump:
      logging.info("Saving step %d, as a file in %s asks for", step, self._model_dir)
      _save_now(self._target_timer)
    elif timer_enabled:
      self._target_timer.enable()
    else:
      self._target_timer.disable()
    if should_stop:
      run_context.request_stop()

  def _is_requested(self, what: str, step: int) -> bool:
    pattern = re.compile(rf"{what}_(\d+)$")
    try:
      names = tf.io.gfile.listdir(self._model_dir)
    except tf.errors.OpError as e:
      logging.warning("Cannot look for %s_<step> files: %s", what, e.message)
      return False
    steps = [int(match.group(1)) for match in map(pattern.match, names) if match]
    return any(self._last_step < requested <= step for requested in steps)


class SyncTrainingSaverControlHook(EveryNRunsHook):
  """Lets a saver's timer run only while a file `ONLINE` is in the model folder.

  It talks to no other rank: the saver that it controls, of dense variables, is on one rank only.

  Args:
    model_dir: where the file is.
    target_timer: the saver hook's timer.
    step_interval: steps between checks.
  """

  def __init__(self, model_dir: str, target_timer: Any, step_interval: int = 100):
    super().__init__(step_interval)
    self._file = os.path.join(model_dir, _ONLINE_FILE)
    self._target_timer = target_timer

  def check(self, run_context: RunContext, step: int) -> None:
    del run_context, step
    if tf.io.gfile.exists(self._file):
      self._target_timer.enable()
    else:
      self._target_timer.disable()


class SyncTrainingInfoHook(tf.compat.v1.train.SessionRunHook):
  """Logs how many rows the tables of this rank have, every ten minutes at most."""

  def __init__(self):
    self._sizes: dict[str, tf.Tensor] = {}
    self._last_time: float | None = None

  def begin(self) -> None:
    self._sizes = {
      hash_table_ops._table_tensor_prefix(table): table.size()
      for table in tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY)
    }
    for group in tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
      self._sizes[group.shared_name] = group.sizes()

  def after_run(self, run_context: RunContext, run_values: Any) -> None:
    now = time.monotonic()
    if self._last_time is not None and now - self._last_time < _INFO_INTERVAL_SECS:
      return
    self._last_time = now
    for name, size in run_context.session.run(self._sizes).items():
      logging.info("Rows in %s: %s", name, size)


class ReqTimeControlDumpHook(EveryNRunsHook):
  """Saves and stops when the requests that are trained on reach a time.

  Rank 0 reads the time from the file `limit_req_time` in the model folder, and compares it with the
  newest request it has seen; the graph must have exactly one tensor of request times in the
  collection `req_time`. All ranks do what rank 0 found.

  Args:
    model_dir: where the file is.
    target_timer: the timer of this rank's saver hook.
    step_interval: steps between checks.
  """

  def __init__(self, model_dir: str, target_timer: Any, step_interval: int = 1000):
    super().__init__(step_interval)
    self._file = os.path.join(model_dir, _LIMIT_REQ_TIME_FILE)
    self._target_timer = target_timer
    self._req_time_tensor: tf.Tensor | None = None
    self._req_time = 0

  def begin(self) -> None:
    super().begin()
    self._broadcast = sync_agreement.Broadcast("hvd_req_time", [2], tf.int64)
    if hvd_lib.rank() == 0:
      tensors = tf.compat.v1.get_collection(_REQ_TIME_COLLECTION)
      assert (
        len(tensors) == 1
      ), f"the collection {_REQ_TIME_COLLECTION!r} has {len(tensors)} tensors, want one: {tensors}"
      self._req_time_tensor = tf.reduce_max(tf.cast(tensors[0], tf.int64))

  def before_run(self, run_context: RunContext) -> tf.compat.v1.train.SessionRunArgs | None:
    if self._req_time_tensor is None:
      return None
    return tf.compat.v1.train.SessionRunArgs(self._req_time_tensor)

  def after_run(self, run_context: RunContext, run_values: Any) -> None:
    if self._req_time_tensor is not None:
      self._req_time = max(self._req_time, int(run_values.results))
    super().after_run(run_context, run_values)

  def check(self, run_context: RunContext, step: int) -> None:
    limit = self._read_limit() if hvd_lib.rank() == 0 else 0
    req_time, limit = self._broadcast.run(run_context.session, [self._req_time, limit])
    if req_time >= limit > 0:
      logging.info("Stopping at step %d: request time %d has reached %d", step, req_time, limit)
      _save_now(self._target_timer)
      run_context.request_stop()

  def _read_limit(self) -> int:
    try:
      with tf.io.gfile.GFile(self._file) as f:
        text = f.read()
    except tf.errors.NotFoundError:
      return 0
    try:
      return int(text)
    except ValueError:
      logging.error("%s holds %r, want a time in seconds: ignored", self._file, text)
      return 0


class EofAwareTask:
  """Lets all ranks stop at the same step when the data of one of them ends.

  Without `use_dataservice` and `agree_on_eof` it is the task and nothing else. Otherwise elements
  carry whether they are the last ones, and the step in which any rank uses its last one is the last
  step of all.

  Args:
    task: what to wrap: a `CpuTraining` or a task. Other attributes are the task's.
    use_dataservice: whether elements come from the tf.data service.
    agree_on_eof: agree without it too.
  """

  EOF_KEY = sync_agreement.EOF_KEY

  class EofHook(tf.compat.v1.train.SessionRunHook):
    """Stops after the step in which the data of any rank ended.

    Args:
      eof_tensor: scalar of this rank's element, non-zero for the last one.
    """

    def __init__(self, eof_tensor: tf.Tensor):
      eof = tf.reshape(tf.cast(eof_tensor, tf.int32), [1])
      self._num_eof = tf.reduce_sum(hvd_lib.allgather(eof, name="monolith_eof"))
      self._has_run = False

    def before_run(self, run_context: RunContext) -> tf.compat.v1.train.SessionRunArgs:
      return tf.compat.v1.train.SessionRunArgs(self._num_eof)

    def after_run(self, run_context: RunContext, run_values: Any) -> None:
      self._has_run = True
      if run_values.results:
        run_context.request_stop()

    def end(self, session: Session) -> None:
      """Checks that there was data.

      Raises:
        ValueError: there was no data, so that no element could say to be the last one.
      """
      if not self._has_run and hvd_lib.size() > 1:
        raise ValueError(
          f"rank {hvd_lib.rank()} of {hvd_lib.size()} has no data at all, and the others wait for "
          "it: give every rank at least one element"
        )

  def __init__(self, task: Any, use_dataservice: bool = False, agree_on_eof: bool = False):
    self._task = task
    self._agree = bool(use_dataservice or agree_on_eof)

  def __getattr__(self, name: str) -> Any:
    if name == "_task":
      raise AttributeError(name)
    return getattr(self._task, name)

  def create_input_fn(self, mode: str) -> Callable[[], Any]:
    """Returns the task's function; its datasets may say which element is the last."""
    input_fn = self._task.create_input_fn(mode)
    if not self._agree or getattr(input_fn, INPUT_FN_WRAPPER_KEY, False):
      return input_fn

    def wrapped_input_fn() -> Any:
      dataset = input_fn()
      if export_context.is_dry_run_or_exporting() or not isinstance(dataset, tf.data.Dataset):
        return dataset
      return datasets.CacheOneDataset(dataset).map(self._add_eof)

    setattr(wrapped_input_fn, INPUT_FN_WRAPPER_KEY, True)
    return wrapped_input_fn

  def _add_eof(self, element: Any, is_last: tf.Tensor) -> dict[str, Any]:
    if isinstance(element, dict):
      return {**element, self.EOF_KEY: is_last}
    # Estimator would take a tuple for features and labels.
    return {_ELEMENT_KEY: element, self.EOF_KEY: is_last}

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    """Returns the task's function, with a hook that stops it."""
    model_fn = self._task.create_model_fn()
    if not self._agree:
      return model_fn

    def wrapped_model_fn(features: Any, mode: str, config: Any) -> graph_estimator.EstimatorSpec:
      if not isinstance(features, dict) or self.EOF_KEY not in features:
        return model_fn(features=features, mode=mode, config=config)
      eof = features[self.EOF_KEY]
      if _ELEMENT_KEY in features:
        features = features[_ELEMENT_KEY]
      spec = model_fn(features=features, mode=mode, config=config)
      if mode != graph_estimator.ModeKeys.TRAIN:
        return spec
      # The flag may have travelled through queues, with its element.
      flags = tf.compat.v1.get_collection(self.EOF_KEY) or [eof]
      return spec._replace(training_hooks=(self.EofHook(flags[-1]), *spec.training_hooks))

    return wrapped_model_fn
