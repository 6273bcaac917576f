"""The hook that decides when a checkpoint is saved, and keeps the folder in order.

`save_utils` publishes its names.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from google.protobuf import text_format
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.lib.io import file_io
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from monolith.native_training import utils
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import graph_files
from monolith.native_training.checkpoints import state as checkpoint_state
from monolith.native_training.checkpoints.saver import PartialRecoverySaver
from monolith.native_training.graph import idle
from monolith.native_training.metric import cli
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from monolith.native_training.session_run_hooks import tide_available_now

_META_GRAPH_FILE_NAME = "meta_graph_for_debugging.pb"
SAVE_ATTEMPTS = 2


class SecondOrStepTimerWithTideSetting(tf.compat.v1.train.SecondOrStepTimer):
  """A timer with another period outside of the tide, the hours in which machines are available."""

  def __init__(
    self,
    every_secs: float | None = None,
    every_steps: int | None = None,
    tide_start_hour: int | None = None,
    tide_start_minute: int | None = None,
    tide_end_hour: int | None = None,
    tide_end_minute: int | None = None,
    tide_every_secs: float | None = None,
    save_helper: checkpoint_state.SaveHelper | None = None,
  ):
    """Makes an enabled timer from exactly one of `every_secs` and `every_steps`.

    Args:
      every_secs: seconds between triggers.
      every_steps: steps between triggers.
      tide_start_hour: start of the tide, UTC.
      tide_start_minute: 0 by default.
      tide_end_hour: end of the tide.
      tide_end_minute: 0 by default.
      tide_every_secs: seconds between triggers outside of the tide. Without both hours and this
        there is no tide.
      save_helper: names the checkpoints that are saved; unused here.
    """
    super().__init__(every_secs=every_secs, every_steps=every_steps)
    self._tide: tuple[int, int, int, int] | None = None
    self._tide_every_secs = 0.0
    if tide_start_hour is not None and tide_end_hour is not None and tide_every_secs is not None:
      self._tide = (tide_start_hour, tide_start_minute or 0, tide_end_hour, tide_end_minute or 0)
      self._tide_every_secs = tide_every_secs
    self._save_helper = save_helper
    self._enabled = True

  @property
  def depends_on_clock(self) -> bool:
    """Whether two timers may disagree about the same steps."""
    return self._tide is not None or self._every_secs is not None

  def enable(self) -> None:
    self._enabled = True

  def disable(self) -> None:
    """Makes the timer never trigger."""
    self._enabled = False

  def should_trigger_for_step(self, step: int) -> bool:
    """Returns whether to trigger at a step, which a new timer always does."""
    if not self._enabled:
      return False
    if self._last_triggered_step is None:
      return True
    if self._last_triggered_step == step:
      return False
    if self._tide is not None and not tide_available_now(*self._tide):
      return time.time() >= self._last_triggered_time + self._tide_every_secs
    if self._every_secs is not None:
      return time.time() >= self._last_triggered_time + self._every_secs
    return step >= self._last_triggered_step + self._every_steps


class _SavedMark(tf.compat.v1.train.CheckpointSaverListener):
  """Records that the checkpoint itself is written, while other listeners may still fail."""

  def __init__(self, on_saved: Callable[[], None]):
    self.saved = False
    self._on_saved = on_saved

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    self.saved = True
    self._on_saved()


class NoFirstSaveCheckpointSaverHook(tf.compat.v1.train.CheckpointSaverHook):
  """Saves checkpoints, on a schedule and on demand, but not when the session is created.

  Saves are serialised by a lock, so that `trigger_save` may be called from any thread.
  """

  # Set if a dense-only hook exists, or the model is dumped: `end` then saves in any case.
  _has_dense_only = False
  _in_model_dump_mode = False
  _last_triggered_step = 0
  # Made by the base class.
  _listeners: list[tf.compat.v1.train.CheckpointSaverListener]

  # A method of the base class.
  _save_graph_def: bool

  def __init__(
    self,
    checkpoint_dir: str,
    save_secs: float | None = None,
    save_steps: int | None = None,
    saver: tf.compat.v1.train.Saver | None = None,
    checkpoint_basename: str = "model.ckpt",
    scaffold: tf.compat.v1.train.Scaffold | None = None,
    listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None = None,
    save_graph_def: bool = True,
    tide_start_hour: int | None = None,
    tide_start_minute: int | None = None,
    tide_end_hour: int | None = None,
    tide_end_minute: int | None = None,
    tide_save_secs: float | None = None,
    ignore_save_errors: bool = False,
    is_dense_only: bool = False,
    use_native_multi_hash_table: bool = False,
    no_first_save: bool = True,
    guard_saver_listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None = None,
  ):
    """Makes the hook. Other arguments are those of `tf.compat.v1.train.CheckpointSaverHook`.

    Args:
      save_graph_def: whether this process owns the folder, too: only then does it write
        `monolith_checkpoint` and delete the leftovers of killed processes.
      tide_start_hour: start of the tide, UTC.
      tide_start_minute: 0 by default.
      tide_end_hour: end of the tide.
      tide_end_minute: 0 by default.
      tide_save_secs: seconds between saves outside of the tide.
      ignore_save_errors: log the errors of a save and go on.
      is_dense_only: only variables are saved here; no save at the end.
      use_native_multi_hash_table: the kind of tables to record in `monolith_checkpoint`.
      no_first_save: skip the save when a session is created.
      guard_saver_listeners: called around each save whether it succeeds or not; their errors are
        logged.
    """
    super().__init__(
      checkpoint_dir,
      save_secs=save_secs,
      save_steps=save_steps,
      saver=saver,
      checkpoint_basename=checkpoint_basename,
      scaffold=scaffold,
      listeners=list(listeners or []),
      save_graph_def=save_graph_def,
    )
    self._timer = SecondOrStepTimerWithTideSetting(
      every_secs=save_secs,
      every_steps=save_steps,
      tide_start_hour=tide_start_hour,
      tide_start_minute=tide_start_minute,
      tide_end_hour=tide_end_hour,
      tide_end_minute=tide_end_minute,
      tide_every_secs=tide_save_secs,
      save_helper=checkpoint_state.SaveHelper(self._save_path),
    )
    self._basename = checkpoint_basename
    self._ignore_save_errors = ignore_save_errors
    self._is_dense_only = is_dense_only
    self._use_native_multi_hash_table = use_native_multi_hash_table
    self._no_first_save = no_first_save
    self._guard_saver_listeners = list(guard_saver_listeners or [])
    self._is_first_save = True
    self._last_saved_step: int | None = None
    self._full_saver_hook: NoFirstSaveCheckpointSaverHook | None = None
    self._stop_requested = False
    # Reentrant: a listener may trigger a save in the thread of a save; other threads wait.
    self._lock = threading.RLock()
    self._metrics = cli.get_cli(utils.get_metric_prefix())
    self._metric_tags = {"mode": "dense_only" if is_dense_only else "full"}

  @property
  def timer(self) -> SecondOrStepTimerWithTideSetting:
    return self._timer

  @property
  def last_saved_step(self) -> int | None:
    """The step of the last save of this hook that succeeded."""
    return self._last_saved_step

  def skip_steps_saved_by(self, full_saver_hook: NoFirstSaveCheckpointSaverHook) -> None:
    """Makes this dense-only hook skip steps at which the other hook has saved everything."""
    self._full_saver_hook = full_saver_hook

  def always_save_at_end(self) -> None:
    """Makes `end` save whatever the timer says, as it must beside a dense-only hook.

    Affects this hook alone: set on the class, it would leak into the next job of the process.
    """
    self._has_dense_only = True

  def begin(self) -> None:
    """Checks and cleans the folder, then calls the base class.

    Raises:
      tf.errors.DataLossError: the state file cannot be read, or is missing beside complete
        checkpoints, which a new start would forget.
    """
    state = CheckpointState()
    self._check_state_file("checkpoint", state)
    self._check_newest_exists(state)
    self._check_state_file(
      checkpoint_state.MONOLITH_CKPT_STATE_FILE_NAME, MonolithCheckpointState()
    )
    if self._save_graph_def:
      self._sweep()
    super().begin()
    idle.register(self._save_if_due)

  def _check_state_file(self, name: str, message: Any) -> None:
    path = os.path.join(self._checkpoint_dir, name)
    if not tf.io.gfile.exists(path):
      return
    try:
      checkpoint_state.read_text_proto(path, message)
    except (text_format.ParseError, UnicodeDecodeError) as e:
      raise self._damaged(path, str(e)) from e

  def _check_newest_exists(self, state: CheckpointState) -> None:
    path = os.path.join(self._checkpoint_dir, "checkpoint")
    if not tf.io.gfile.exists(path):
      lost = checkpoint_files.unrecorded_checkpoints(self._checkpoint_dir)
      if lost:
        remedy = checkpoint_files.how_to_record(self._checkpoint_dir, lost)
        raise tf.errors.DataLossError(None, None, f"{path} is missing. {remedy}")
      return
    if not state.model_checkpoint_path:
      raise self._damaged(path, "it names no checkpoint")
    # The path may be relative to the folder, or absolute in a way that only a file system knows.
    prefix = os.path.join(self._checkpoint_dir, state.model_checkpoint_path)
    candidates = {prefix, state.model_checkpoint_path}
    if not any(map(checkpoint_management.checkpoint_exists_internal, candidates)):
      raise self._damaged(path, f"it names {prefix}, which does not exist")

  def _damaged(self, path: str, cause: str) -> tf.errors.DataLossError:
    prefixes = checkpoint_files.complete_checkpoints(self._checkpoint_dir, self._basename)
    intact = checkpoint_files.newest_intact(prefixes)
    known = f"; the newest intact checkpoint beside it is {intact}" if intact else ""
    return tf.errors.DataLossError(
      None, None, f"{path} is damaged: {cause}. Mend it or delete it{known}."
    )

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    with self._lock:
      self._is_first_save = True
      save_graph_def = self._save_graph_def
      self._save_graph_def = False  # The graph is written below.
      try:
        super().after_create_session(session, coord)
      finally:
        self._save_graph_def = save_graph_def
      if save_graph_def:
        graph_files.write_graph(session.graph, self._checkpoint_dir)
        self._export_meta_graph(session)
      saver = self._get_saver()
      if isinstance(saver, PartialRecoverySaver):
        saver.setup_ps_initialized_state(session)
      self._create_or_update_monolith_ckpt_state(do_update=False)

  def _sweep(self) -> None:
    """Deletes the leftovers of killed processes, before anything is restored from the folder."""
    state = tf.train.get_checkpoint_state(self._checkpoint_dir)
    recorded = [state.model_checkpoint_path, *state.all_model_checkpoint_paths] if state else []
    try:
      checkpoint_files.remove_leftovers(self._checkpoint_dir, self._basename, recorded)
    except tf.errors.OpError as e:
      logging.warning("Cannot clean %s: %s", self._checkpoint_dir, e.message)

  def _get_exempt(self) -> set[str]:
    saver = self._get_saver()
    return saver.exempt_checkpoint_paths if isinstance(saver, PartialRecoverySaver) else set()

  def _export_meta_graph(self, session: tf.compat.v1.Session) -> None:
    saver = self._get_saver()
    with session.graph.as_default():
      tf.compat.v1.train.export_meta_graph(
        filename=os.path.join(self._checkpoint_dir, _META_GRAPH_FILE_NAME),
        saver_def=saver.saver_def if saver else None,
      )

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    with self._lock:
      super().after_run(run_context, run_values)
      if self._stop_requested:
        self._stop_requested = False
        run_context.request_stop()

  def _save_if_due(self, session: tf.compat.v1.Session) -> bool:
    """Does the work of `after_run` between two steps, which may be far apart."""
    with self._lock:
      step = session.run(self._global_step_tensor)
      if not self._timer.should_trigger_for_step(step):
        return False
      self._timer.update_last_triggered_step(step)
      return bool(self._save(session, step))

  def trigger_save(self, session: tf.compat.v1.Session, ignore_save_errors: bool = False) -> None:
    """Saves now, in the calling thread, also while the timer is disabled.

    A listener's request to stop training is honoured after the next step.

    Args:
      session: a raw session, or a monitored one.
      ignore_save_errors: log the errors of this save. The constructor's argument only applies to
        saves that no caller waits for.

    Raises:
      tf.errors.OpError, OSError, ValueError: the checkpoint could not be saved.
    """
    if hasattr(session, "raw_session"):
      session = session.raw_session()
    with self._lock, session.graph.as_default():
      configured, self._ignore_save_errors = self._ignore_save_errors, ignore_save_errors
      try:
        step = session.run(self._global_step_tensor)
        self._stop_requested |= bool(self._save(session, step))
        if self._last_saved_step == step:
          # After a failure, the schedule and the save at the end remain as planned.
          self._timer.update_last_triggered_step(step)
      finally:
        self._ignore_save_errors = configured

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._is_dense_only:
      return
    with self._lock:
      if not (self._has_dense_only or self._in_model_dump_mode):
        super().end(session)
        return
      last_step = session.run(self._global_step_tensor)
      self._save(session, last_step)
      for listener in self._listeners:
        listener.end(session, last_step)

  def _save(self, session: tf.compat.v1.Session, step: int) -> bool:
    """Saves, and returns whether a listener wants training to stop."""
    if self._is_first_save and self._no_first_save:
      self._is_first_save = False
      return False
    self._is_first_save = False
    if self._is_dense_only and self._is_saved_already(step):
      logging.info("Step %d is saved already, no dense-only save.", step)
      return False

    start = time.time()
    for listener in self._guard_saver_listeners:
      _log_errors(listener.before_save, session, step)
    try:
      should_stop = self._save_with_retries(session, step)
    finally:
      for listener in reversed(self._guard_saver_listeners):
        _log_errors(listener.after_save, session, step)
    self._metrics.emit_timer("save_checkpoint_time", time.time() - start, self._metric_tags)
    return should_stop

  def _is_saved_already(self, step: int) -> bool:
    other = self._full_saver_hook
    return step == self._last_saved_step or (other is not None and step == other.last_saved_step)

  def _save_with_retries(self, session: tf.compat.v1.Session, step: int) -> bool:
    listeners = self._listeners
    for attempt in range(1, SAVE_ATTEMPTS + 1):
      mark = _SavedMark(on_saved=lambda: self._on_saved(step))
      # The mark is removed first: the work of other listeners after the save must not be repeated.
      self._listeners = [mark, *listeners]
      try:
        self._begin_save(step)
        should_stop = super()._save(session, step)
        self._metrics.emit_counter("save_checkpoint", 1, self._metric_tags)
        return should_stop
      except (tf.errors.OpError, OSError, ValueError) as e:
        self._metrics.emit_counter("save_checkpoint_failed", 1, self._metric_tags)
        if not mark.saved:
          self._report_failed_save(step, e)
        retry = isinstance(e, tf.errors.OpError) and not mark.saved and attempt < SAVE_ATTEMPTS
        if retry:
          continue
        if not self._ignore_save_errors:
          raise
        logging.exception("Error when saving step %d, ignored.", step)
        return False
      finally:
        self._listeners = listeners
    raise AssertionError("unreachable")

  def _begin_save(self, step: int) -> None:
    """Prepares the folder for a save that may be killed, or that repeats the newest step.

    The saver sets a checkpoint aside too, but only after listeners have written into it.
    """
    if not tf.io.gfile.isdir(self._checkpoint_dir):
      raise ValueError(f"Parent directory of {self._save_path} doesn't exist, can't save.")
    prefix = checkpoint_state.SaveHelper(self._save_path).get_ckpt_prefix(step)
    if self._save_graph_def:
      checkpoint_files.mark_unfinished(prefix)
    saver = self._get_saver()
    if isinstance(saver, PartialRecoverySaver) and not saver.skip_save:
      saver.set_aside_if_recorded(prefix)

  def _on_saved(self, step: int) -> None:
    self._last_saved_step = step
    self._last_triggered_step = step
    if self._save_graph_def:
      prefix = checkpoint_state.SaveHelper(self._save_path).get_ckpt_prefix(step)
      checkpoint_files.mark_finished(prefix)
    try:
      self._create_or_update_monolith_ckpt_state(do_update=True)
    except tf.errors.OpError as e:
      # The checkpoint exists; only the time in this file is old.
      logging.warning("Cannot update monolith_checkpoint: %s", e.message)

  def _report_failed_save(self, step: int, error: Exception) -> None:
    prefix = checkpoint_state.SaveHelper(self._save_path).get_ckpt_prefix(step)
    previous = tf.train.latest_checkpoint(self._checkpoint_dir)
    logging.error(
      "Cannot save the checkpoint %s: %s; the newest checkpoint is %s.",
      prefix,
      getattr(error, "message", None) or error,
      previous,
    )
    if os.path.basename(prefix) not in [os.path.basename(previous or ""), *self._get_exempt()]:
      checkpoint_files.discard_unfinished(prefix)

  def _create_or_update_monolith_ckpt_state(self, do_update: bool) -> None:
    """Writes `monolith_checkpoint`, if this process owns the folder.

    Args:
      do_update: whether to write the time into an existing file, too.
    """
    if not self._save_graph_def:
      return
    state = checkpoint_state.get_monolith_checkpoint_state(self._checkpoint_dir)
    if state is not None and not do_update:
      return
    if state is None:
      state = MonolithCheckpointState()
      state.builtin_hash_table_type = (
        MonolithCheckpointState.MULTI_CUCKOO_HASH_MAP
        if self._use_native_multi_hash_table
        else MonolithCheckpointState.CUCKOO_HASH_MAP
      )
    state.last_checkpoint_save_timestamp = int(time.time())
    tf.io.gfile.makedirs(self._checkpoint_dir)
    file_io.atomic_write_string_to_file(
      os.path.join(self._checkpoint_dir, checkpoint_state.MONOLITH_CKPT_STATE_FILE_NAME),
      text_format.MessageToString(state),
    )


def _log_errors(function: Callable[..., Any], *args: Any) -> None:
  try:
    function(*args)
  except Exception:  # A guard must not prevent a save, nor the release of the other guards.
    logging.exception("A guard of a checkpoint failed.")
