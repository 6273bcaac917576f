"""Lets a training go on with another number of parameter servers than it was saved on."""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from monolith.native_training import checkpoint_files, checkpoint_reshard, checkpoint_state


def reshard_if_needed(model_dir: str, num_ps: int) -> None:
  """Writes the newest checkpoint again if its rows lie on another number of servers.

  Only the process that restores may call it, before it does.

  Args:
    model_dir: folder of the checkpoints.
    num_ps: servers to restore on, 0 for none.

  Raises:
    ValueError: the files do not tell on how many servers they were saved.
    tf.errors.DataLossError: a file of the checkpoint is damaged.
  """
  newest = tf.train.latest_checkpoint(model_dir)
  if newest is None:
    return
  assets = checkpoint_state.SaveHelper.get_ckpt_asset_dir(newest)
  if not checkpoint_files.list_dir(assets):
    return
  saved_on = checkpoint_reshard.count_servers(newest)
  if saved_on == num_ps:
    return
  logging.info("%s was saved on %d servers: writing it for %d", newest, saved_on, num_ps)
  # The state file may name a checkpoint of another job, whose folder is not ours to write to.
  checkpoint_reshard.reshard_checkpoint(newest, saved_on, num_ps, directory=model_dir)
