"""Restores a model on another number of parameter servers than it was saved on.

Training rewrites the newest checkpoint in its folder. Readers get a private copy, because another
process may be training in that folder.
"""

from __future__ import annotations

import tempfile

import tensorflow as tf
from absl import logging

from monolith.native_training import basic_restore_hook
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.checkpoints import restored
from monolith.native_training.checkpoints import state as checkpoint_state


def reshard_if_needed(model_dir: str, num_ps: int) -> None:
  """Rewrites the newest checkpoint if it was saved on another number of servers.

  Only the process that restores may call this, before the restore.

  Args:
    model_dir: folder of the checkpoints.
    num_ps: servers to restore on, 0 for none.

  Raises:
    ValueError: the files do not say how many servers they were saved on.
    tf.errors.DataLossError: one of the checkpoint's files is damaged.
  """
  found = _find_misfit(tf.train.latest_checkpoint(model_dir), num_ps)
  if found is not None:
    newest, saved_on = found
    logging.info("%s was saved on %d servers: writing it for %d", newest, saved_on, num_ps)
    # The state file may name a checkpoint of another job, whose folder we must not change.
    checkpoint_reshard.reshard_checkpoint(newest, saved_on, num_ps, directory=model_dir)


def copy_checkpoint_if_needed(
  prefix: str | None, num_ps: int
) -> tempfile.TemporaryDirectory | None:
  """Returns a folder with a rewritten copy of a checkpoint of another number of servers.

  The folder is on this machine, so it is of use without servers only.

  Args:
    prefix: the checkpoint; `None` for none.
    num_ps: servers to restore on, 0 for none.

  Raises:
    ValueError: there are servers, but not as many as the checkpoint was saved on; or its files do
      not say how many that was.
    tf.errors.DataLossError: one of the checkpoint's files is damaged.
  """
  found = _find_misfit(prefix, num_ps)
  if found is None:
    return None
  newest, saved_on = found
  if num_ps:
    usable = " or ".join(map(str, sorted({0, saved_on})))
    raise ValueError(
      f"{newest} was saved on {saved_on} servers, and num_ps is {num_ps}: use {usable}, or write "
      "it again with checkpoints.reshard.reshard_checkpoint"
    )
  copy = tempfile.TemporaryDirectory(prefix="resharded_checkpoint_")
  logging.info("%s was saved on %d servers: writing it for none to %s", newest, saved_on, copy.name)
  checkpoint_reshard.reshard_checkpoint(newest, saved_on, num_ps, directory=copy.name)
  return copy


def _find_misfit(prefix: str | None, num_ps: int) -> tuple[str, int] | None:
  """Returns the checkpoint and the number of servers it was saved on, unless that is `num_ps`."""
  if prefix is None:
    return None
  assets = checkpoint_state.SaveHelper.get_ckpt_asset_dir(prefix)
  if not checkpoint_files.list_dir(assets) or checkpoint_reshard.fits(prefix, num_ps):
    return None
  return prefix, checkpoint_reshard.count_servers(prefix)


class CopyListener(basic_restore_hook.CheckpointRestorerListener):
  """Makes the listeners after it restore from a private copy, if the checkpoint must be rewritten.

  Args:
    model_dir: folder of the checkpoints.
    num_ps: servers to restore on, 0 for none.
  """

  def __init__(self, model_dir: str, num_ps: int):
    self._model_dir = model_dir
    self._num_ps = num_ps
    self._copy: tempfile.TemporaryDirectory | None = None
    self._prefix = ""

  def before_restore(self, session: tf.compat.v1.Session) -> None:
    """Rewrites a copy of the checkpoint that the session starts from, if needed."""
    prefix = restored.find(session, self._model_dir)
    self._copy = copy_checkpoint_if_needed(prefix, self._num_ps)
    if prefix is not None and self._copy is not None:
      self._prefix = prefix
      copied = checkpoint_files.require_newest(self._copy.name)
      restored.redirect(session, self._model_dir, copied)

  def after_restore(self, session: tf.compat.v1.Session) -> None:
    """Deletes the copy: everything is restored from it."""
    if self._copy is not None:
      restored.redirect(session, self._model_dir, self._prefix)
      self._copy.cleanup()
      self._copy = None
