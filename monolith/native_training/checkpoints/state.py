"""Names of checkpoints, and the two files that list them.

`checkpoint` is TensorFlow's. `monolith_checkpoint` (text `MonolithCheckpointState`) is ours: it has
the checkpoints that are never deleted, the time of the last save, and the kind of tables.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from absl import logging
from google.protobuf import text_format
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState

MONOLITH_CKPT_STATE_FILE_NAME = "monolith_checkpoint"

# Folder -> (checkpoint state, global step at which it was read).
_ckpt_state_cache_map: dict[str, tuple[CheckpointState | None, int]] = {}


def get_latest_checkpoint_state(
  checkpoint_dir: str, global_step_value: int
) -> CheckpointState | None:
  """Returns the checkpoint state of a folder, read again only when the global step has grown.

  Args:
    checkpoint_dir: the folder of the checkpoints.
    global_step_value: the present global step.

  Returns:
    The state, or None if there is none yet.
  """
  state, step = _ckpt_state_cache_map.get(checkpoint_dir, (None, -1))
  if state is None or global_step_value > step:
    state = tf.train.get_checkpoint_state(checkpoint_dir)
    _ckpt_state_cache_map[checkpoint_dir] = (state, global_step_value)
  return state


def get_monolith_checkpoint_state(
  checkpoint_dir: str, filename: str | None = None, remove_invalid_path: bool = False
) -> MonolithCheckpointState | None:
  """Reads the `monolith_checkpoint` file of a folder.

  Args:
    checkpoint_dir: the folder of the checkpoints.
    filename: name of the file, `monolith_checkpoint` by default.
    remove_invalid_path: make the paths in it absolute, and leave out those without a checkpoint.

  Returns:
    Its content, or None if it does not exist or, with a warning, cannot be read.
  """
  path = os.path.join(checkpoint_dir, filename or MONOLITH_CKPT_STATE_FILE_NAME)
  try:
    if not tf.io.gfile.exists(path):
      return None
    state = read_text_proto(path, MonolithCheckpointState())
  except (tf.errors.OpError, text_format.ParseError, UnicodeDecodeError) as e:
    logging.warning("%s: %s", type(e).__name__, e)
    logging.warning("%s: Checkpoint ignored", path)
    return None
  if remove_invalid_path:
    paths = [
      p if is_absolute(p) else os.path.join(checkpoint_dir, p)
      for p in state.exempt_model_checkpoint_paths
    ]
    del state.exempt_model_checkpoint_paths[:]
    state.exempt_model_checkpoint_paths.extend(
      p for p in paths if checkpoint_management.checkpoint_exists_internal(p)
    )
  return state


def is_absolute(path: str) -> bool:
  """Returns whether a path is absolute, on any file system.

  `hdfs:/folder` is the short form of `hdfs:///folder`.
  """
  return os.path.isabs(path) or path.startswith("hdfs:/") or "://" in path


def get_exempt_checkpoint_paths(model_dir: str) -> list[str]:
  """Returns the base names of the checkpoints that must never be deleted.

  Raises:
    AssertionError: TensorFlow's `checkpoint` file does not list one of them.
  """
  state = get_monolith_checkpoint_state(model_dir, remove_invalid_path=True)
  if state is None:
    return []
  exempt = [os.path.basename(path) for path in state.exempt_model_checkpoint_paths]
  if exempt:
    listed = tf.train.get_checkpoint_state(model_dir)
    known = {
      os.path.basename(path) for path in (listed.all_model_checkpoint_paths if listed else [])
    }
    for path in exempt:
      assert path in known, f"exempt checkpoint {path} is not listed in {model_dir}/checkpoint"
  return exempt


def read_text_proto(path: str, message: Any) -> Any:
  """Merges a file in protobuf's text format into a message, and returns the message."""
  with tf.io.gfile.GFile(path) as f:
    return text_format.Merge(f.read(), message)


class SaveHelper:
  """Knows the names of checkpoints.

  Args:
    basename: the path of checkpoints without step, as in `<model_dir>/model.ckpt`.
  """

  def __init__(self, basename: str):
    self._basename = basename

  def get_ckpt_prefix(self, step: int) -> str:
    """Returns `<basename>-<step>`."""
    return f"{self._basename}-{step}"

  @classmethod
  def get_ckpt_asset_dir(cls, ckpt_prefix: str) -> str:
    """Returns `<ckpt_prefix>.assets/`."""
    return f"{ckpt_prefix}.assets/"

  @classmethod
  def get_global_step_value(cls, ckpt_prefix: str) -> int:
    """Returns the number after the last `-`, 0 without a `-`."""
    _, dash, step = ckpt_prefix.rpartition("-")
    return int(step) if dash else 0

  def get_existing_checkpoint_steps(self) -> set[int]:
    """Returns the steps of all checkpoints that the `checkpoint` file names."""
    state = tf.train.get_checkpoint_state(os.path.dirname(self._basename))
    if state is None:
      return set()
    return {self.get_global_step_value(path) for path in state.all_model_checkpoint_paths}
