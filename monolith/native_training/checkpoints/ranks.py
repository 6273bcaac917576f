"""Checkpoints of synchronous training, which all ranks write together.

Each rank writes its rows, as a parameter server of the same index would: `<table>_<rank>` or
`MonolithMultiHashTable_<rank>`. Rank 0 writes the variables and, when all ranks are done, the state
file. So a checkpoint of `n` ranks is one of `n` parameter servers: it is exported and served like
one, and `prepare` reshards it before another number of ranks restores it.

With `merge_sync_training_ckpt=False` each rank has a folder of its own, with its rows and all
variables; `merge_rank_checkpoints` makes one checkpoint of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.checkpoint import checkpoint_management

from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.checkpoints import saver_hook as checkpoint_saver_hook
from monolith.native_training.checkpoints import state as checkpoint_state
from monolith.native_training.checkpoints import topology as training_topology
from monolith.native_training.ranks import agreement as sync_agreement

_BASENAME = "model.ckpt"
_RANK_FOLDER = re.compile(r"^index-\d{4}$")
_NO_CHECKPOINT = -1
_FAILED = -2
# The outcome of a phase of a save on a rank.
_OK, _RETRY, _GIVE_UP = range(3)


def prepare(
  model_dir: str,
  num_ranks: int,
  rank: int,
  is_merged: bool = True,
  check: Callable[[str], None] = lambda model_dir: None,
) -> None:
  """Prepares the newest checkpoint for a restore by these ranks, all of which call it.

  Args:
    model_dir: folder of the checkpoints.
    num_ranks: the present number of ranks.
    rank: this process's rank.
    is_merged: whether the folder is shared by all ranks.
    check: called with `model_dir` before anything is written; may raise the errors below.

  Raises:
    ValueError: the ranks do not see the same checkpoint, or those of other ranks have to be merged
      first.
    tf.errors.OpError: a file cannot be read.
  """
  error: Exception | None = None
  step = _NO_CHECKPOINT
  try:
    check(model_dir)
    if not is_merged:
      _check_rank_folders(model_dir, num_ranks)
    elif rank == 0:
      training_topology.reshard_if_needed(model_dir, num_ranks)
  except (tf.errors.OpError, OSError, ValueError) as e:
    error = e
    step = _FAILED
  if num_ranks > 1:
    failed = sync_agreement.gather("monolith_checkpoint_ready", step) == _FAILED
    if failed.any() and error is None:
      error = ValueError(f"rank {failed.argmax()} cannot prepare the checkpoint in {model_dir}")
  if error is not None:
    raise error
  if num_ranks > 1:
    _check_same_step(model_dir, rank)


def _check_same_step(model_dir: str, rank: int) -> None:
  latest = tf.train.latest_checkpoint(model_dir)
  step = _NO_CHECKPOINT
  if latest is not None:
    step = checkpoint_state.SaveHelper.get_global_step_value(latest)
  steps = sync_agreement.gather("monolith_checkpoint_step", step)
  if (steps != step).any():
    raise ValueError(
      f"rank {rank} finds {latest or 'no checkpoint'} in {model_dir}, but the steps that the ranks "
      f"find are {steps.tolist()} ({_NO_CHECKPOINT} for none): is the folder the same on all "
      "machines?"
    )


def _check_rank_folders(model_dir: str, num_ranks: int) -> None:
  """Checks that the number of ranks that saved into folders of their own is that of now."""
  parent, name = os.path.split(os.path.normpath(model_dir))
  if not _RANK_FOLDER.match(name):
    return
  saved = [
    folder
    for folder in checkpoint_files.list_dir(parent)
    if _RANK_FOLDER.match(folder) and tf.train.latest_checkpoint(os.path.join(parent, folder))
  ]
  if saved and len(saved) != num_ranks:
    raise ValueError(
      f"{len(saved)} ranks have saved their checkpoints in {parent}, now there are {num_ranks}: "
      "merge them with checkpoints.ranks.merge_rank_checkpoints and train in the merged folder"
    )


def merge_rank_checkpoints(folders: Sequence[str], target: str) -> str:
  """Merges the checkpoints that ranks have written into folders of their own.

  Files are linked where the file system has links.

  Args:
    folders: the ranks' folders, in the order of ranks.
    target: folder of the new checkpoint, created if it is missing.

  Returns:
    The prefix of the new checkpoint, which is of the newest step that all ranks have saved.

  Raises:
    ValueError: there is no such step, or a rank's rows are missing.
    tf.errors.DataLossError: a checkpoint is damaged.
  """
  steps = set.intersection(*(_recorded_steps(folder) for folder in folders)) if folders else set()
  if not steps:
    raise ValueError(f"there is no step that all of {list(folders)} have a checkpoint of")
  sources = [os.path.join(folder, f"{_BASENAME}-{max(steps)}") for folder in folders]
  for source in sources:
    damage = checkpoint_files.find_missing_file(source) or checkpoint_files.find_wrong_size(source)
    if damage is not None:
      raise tf.errors.DataLossError(None, None, f"Cannot merge {source}: {damage}")
  tf.io.gfile.makedirs(target)
  prefix = os.path.join(target, os.path.basename(sources[0]))
  checkpoint_files.delete_checkpoint(prefix)
  checkpoint_files.mark_unfinished(prefix)
  for source in sources:
    checkpoint_files.link_assets(source, prefix)
  if checkpoint_reshard.count_servers(prefix) != len(folders):
    raise ValueError(f"the rows in {list(folders)} are not those of {len(folders)} ranks")
  checkpoint_files.write_manifest(prefix)
  checkpoint_files.link_variables(sources[0], prefix)
  checkpoint_management.update_checkpoint_state_internal(
    save_dir=target, model_checkpoint_path=prefix, all_model_checkpoint_paths=[prefix]
  )
  checkpoint_files.mark_finished(prefix)
  state_file = checkpoint_state.MONOLITH_CKPT_STATE_FILE_NAME
  if tf.io.gfile.exists(os.path.join(folders[0], state_file)):
    tf.io.gfile.copy(
      os.path.join(folders[0], state_file), os.path.join(target, state_file), overwrite=True
    )
  return prefix


def _recorded_steps(folder: str) -> set[int]:
  return checkpoint_state.SaveHelper(
    os.path.join(folder, _BASENAME)
  ).get_existing_checkpoint_steps()


class SyncCheckpointSaverHook(checkpoint_saver_hook.NoFirstSaveCheckpointSaverHook):
  """Saves on all ranks at the same step, or on none.

  Rank 0 decides by its clock when to save. A save has three phases, and no rank enters a phase
  before all have finished the previous one: prepare the folder; write the rows; write the variables
  and the state file (rank 0). A failure on one rank counts as a failure on all of them.

  Args:
    is_root: whether this is rank 0.
    **kwargs: the base class's arguments.
  """

  # Made by `begin`.
  _votes: sync_agreement.Votes

  def __init__(self, *args: Any, is_root: bool, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._is_root = is_root
    self._decision: sync_agreement.Broadcast | None = None
    self._last_step = 0

  def begin(self) -> None:
    super().begin()
    self._votes = sync_agreement.Votes("monolith_save_votes")
    if self._timer.depends_on_clock:
      self._decision = sync_agreement.Broadcast("monolith_save_decision", [], tf.int32)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    if self._decision is None:
      return super().before_run(run_context)
    is_due = self._is_root and self._timer.should_trigger_for_step(self._last_step + 1)
    return tf.compat.v1.train.SessionRunArgs(
      {"step": self._global_step_tensor, "save": self._decision.result},
      {self._decision.placeholder: int(is_due)},
    )

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if self._decision is None:
      super().after_run(run_context, run_values)
      return
    self._last_step = int(run_values.results["step"])
    if not run_values.results["save"]:
      return
    with self._lock:
      step = run_context.session.run(self._global_step_tensor)
      # The run itself may have read the step before: the next one would not count as a new step.
      self._last_step = int(step)
      self._timer.update_last_triggered_step(step)
      if self._save(run_context.session, step):
        run_context.request_stop()

  def trigger_save(self, session: tf.compat.v1.Session, ignore_save_errors: bool = False) -> None:
    raise NotImplementedError("One rank alone cannot save: use SyncTrainingForceDumpHook.")

  def _save_with_retries(self, session: tf.compat.v1.Session, step: int) -> bool:
    phases = (
      lambda: self._begin_save(step),
      lambda: self._write_rows(session, step),
      lambda: self._write_variables(session, step),
    )
    error: Exception | None = None
    for _ in range(checkpoint_saver_hook.SAVE_ATTEMPTS):
      outcome = _OK
      for phase in phases:
        outcome, error = self._run_phase(session, step, phase)
        if error is not None:
          break
      if error is None:
        self._metrics.emit_counter("save_checkpoint", 1, self._metric_tags)
        return self._call_after_save(session, step)
      self._metrics.emit_counter("save_checkpoint_failed", 1, self._metric_tags)
      if self._save_graph_def:
        self._report_failed_save(step, error)
      if outcome == _GIVE_UP:
        break
    if error is not None and not self._ignore_save_errors:
      raise error
    logging.error("Step %d is not saved, ignored: %s", step, error)
    return False

  def _run_phase(
    self, session: tf.compat.v1.Session, step: int, phase: Callable[[], None]
  ) -> tuple[int, Exception | None]:
    """Returns the worst outcome of all ranks, and an error unless all succeeded."""
    error: Exception | None = None
    outcome = _OK
    try:
      phase()
    except (tf.errors.OpError, OSError, ValueError) as e:
      logging.error("Cannot save step %d: %s", step, e)
      error = e
      outcome = _RETRY if isinstance(e, tf.errors.OpError) else _GIVE_UP
    outcomes = self._votes.run(session, outcome)
    if outcomes.any() and error is None:
      failed = [rank for rank, vote in enumerate(outcomes) if vote]
      error = tf.errors.InternalError(
        None, None, f"step {step} could not be saved on ranks {failed}: see their logs"
      )
    return int(outcomes.max()), error

  def _write_rows(self, session: tf.compat.v1.Session, step: int) -> None:
    for listener in self._listeners:
      listener.before_save(session, step)

  def _write_variables(self, session: tf.compat.v1.Session, step: int) -> None:
    self._get_saver().save(
      session, self._save_path, global_step=step, write_meta_graph=self._save_graph_def
    )
    self._summary_writer.add_session_log(
      tf.compat.v1.SessionLog(
        status=tf.compat.v1.SessionLog.CHECKPOINT, checkpoint_path=self._save_path
      ),
      step,
    )
    self._on_saved(step)

  def _call_after_save(self, session: tf.compat.v1.Session, step: int) -> bool:
    should_stop = False
    try:
      for listener in self._listeners:
        should_stop |= bool(listener.after_save(session, step))
    except (tf.errors.OpError, OSError, ValueError):
      if not self._ignore_save_errors:
        raise
      logging.exception("Error after saving step %d, ignored.", step)
    return should_stop
