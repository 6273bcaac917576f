"""Lets a model go on with another number of parameter servers than it was saved on.

Training writes the newest checkpoint again, in its folder; readers get a private copy, because
another process may be training in that folder.
"""

from __future__ import annotations

import tempfile

import tensorflow as tf
from absl import logging

from monolith.native_training import basic_restore_hook
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.checkpoints import state as checkpoint_state


def reshard_if_needed(model_dir: str, num_ps: int) -> None:
  """Writes the newest checkpoint again if its rows lie on another number of servers.

  Only the process that restores may call it, before it does.

  Args:
    model_dir: folder of the checkpoints.
    num_ps: servers to restore on, 0 for none.

  Raises:
    ValueError: the files do not tell on how many servers they were saved.
    tf.errors.DataLossError: one of the checkpoint's files is damaged.
  """
  found = _find_misfit(model_dir, num_ps)
  if found is not None:
    newest, saved_on = found
    logging.info("%s was saved on %d servers: writing it for %d", newest, saved_on, num_ps)
    # The state file may name a checkpoint of another job, whose folder is not ours to write to.
    checkpoint_reshard.reshard_checkpoint(newest, saved_on, num_ps, directory=model_dir)


def copy_if_needed(model_dir: str, num_ps: int) -> tempfile.TemporaryDirectory | None:
  """Returns a folder with the newest checkpoint if its rows lie on another number of servers.

  The folder is on this machine, so it is of use only without servers.

  Args:
    model_dir: folder of the checkpoints.
    num_ps: servers to restore on, 0 for none.

  Raises:
    ValueError: there are servers, not as many as the checkpoint was saved on; or its files do not
      tell on how many that was.
    tf.errors.DataLossError: one of the checkpoint's files is damaged.
  """
  found = _find_misfit(model_dir, num_ps)
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


def _find_misfit(model_dir: str, num_ps: int) -> tuple[str, int] | None:
  """Returns the newest checkpoint, and on how many servers it was saved, unless it fits."""
  newest = tf.train.latest_checkpoint(model_dir)
  if newest is None:
    return None
  assets = checkpoint_state.SaveHelper.get_ckpt_asset_dir(newest)
  if not checkpoint_files.list_dir(assets) or checkpoint_reshard.fits(newest, num_ps):
    return None
  return newest, checkpoint_reshard.count_servers(newest)


class DeleteCopyListener(basic_restore_hook.CheckpointRestorerListener):
  """Deletes a copy once everything is restored from it."""

  def __init__(self, copy: tempfile.TemporaryDirectory):
    self._copy = copy

  def after_restore(self, session: tf.compat.v1.Session) -> None:
    self._copy.cleanup()
