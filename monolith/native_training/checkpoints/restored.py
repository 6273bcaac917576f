"""Remembers the checkpoint a session starts from, so that all of its parts come from that one.

A restore has several parts: the saver reads the variables, listeners read tables and filters. If
each part looked for the newest checkpoint itself, a process that saves meanwhile would mix two of
them. So the choice is made once per session: the code that makes the session
gives the saver a checkpoint, and listeners ask this module which one it was.

A checkpoint may also be deleted or written again while it is read. `check` finds that out from its
index, and from the mark that `files` puts beside a checkpoint before either happens.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging
from tensorflow.python.checkpoint import checkpoint_management

from monolith.native_training.checkpoints import files as checkpoint_files

Result = TypeVar("Result")

# The attempts of a reader that may take any checkpoint.
_ATTEMPTS = 10


class CheckpointChangedError(tf.errors.DataLossError):
  """A checkpoint was deleted, or written again, while it was restored."""


@dataclasses.dataclass
class _Start:
  """The start of a session.

  Attributes:
    prefix: the checkpoint of its variables; `None` if they are initialized, or not known.
    is_known: whether `prefix` is known.
    stamp: distinguishes the checkpoint from a later one of the same name.
    tables: folder of the model -> the checkpoint of its tables.
  """

  prefix: str | None
  is_known: bool
  stamp: tuple[int, ...] | None = None
  tables: dict[str, str | None] = dataclasses.field(default_factory=dict)


_starts: weakref.WeakKeyDictionary[Any, _Start] = weakref.WeakKeyDictionary()


def begin(session: Any, prefix: str) -> None:
  """Remembers that the variables of a session are about to be restored from `prefix`."""
  _starts[session] = _Start(prefix, True, _stamp(prefix))


def settle(session: Any, is_known: bool) -> None:
  """Makes all listeners of a session that no saver restored find the same checkpoint.

  Args:
    session: the session.
    is_known: whether the saver is one that calls `begin`, so that there was no checkpoint. Another
      saver may have restored the newest one.
  """
  if session not in _starts:
    _starts[session] = _Start(None, is_known)


def find(session: Any, folder: str) -> str | None:
  """Returns the checkpoint whose tables belong to the variables of a session; `None` if none does.

  Args:
    session: the session.
    folder: the folder of the newest one, for a session that does not start now.
  """
  start = _starts.get(session)
  if start is None:
    return tf.train.latest_checkpoint(folder)
  if folder not in start.tables:
    start.tables[folder] = start.prefix if start.is_known else tf.train.latest_checkpoint(folder)
  return start.tables[folder]


def redirect(session: Any, folder: str, prefix: str) -> None:
  """Makes `find` return a copy of the checkpoint."""
  _starts.setdefault(session, _Start(None, False)).tables[folder] = prefix


def check(session: Any, cause: Exception | None = None) -> None:
  """Checks that the checkpoint a session starts from has not changed.

  Args:
    session: the session.
    cause: the error of the restore, if it failed.

  Raises:
    CheckpointChangedError: it was deleted or written again, or a saver that does not call `begin`
      has not restored the newest one.
  """
  start = _starts.get(session)
  if start is not None and not start.is_known:
    _check_step(session, start.tables.values())
  if start is None or start.prefix is None or start.stamp is None:
    return
  if _stamp(start.prefix) == start.stamp and not is_withdrawn(start.prefix):
    return
  newest = tf.train.latest_checkpoint(os.path.dirname(start.prefix))
  raise CheckpointChangedError(
    None,
    None,
    f"Another process deleted {start.prefix}, or wrote it again, while it was restored; the "
    f"newest checkpoint there is {newest}. Start again to restore that one."
    + (f" ({cause})" if cause is not None else ""),
  ) from cause


def _check_step(session: Any, prefixes: Iterable[str | None]) -> None:
  """Checks that the variables of a session are from the step of the checkpoints of its tables.

  Variables of step 0 are initialized ones, which may go with any rows.
  """
  global_step = tf.compat.v1.train.get_global_step(session.graph)
  if global_step is None:
    return
  for prefix in filter(None, prefixes):
    reader = tf.train.load_checkpoint(prefix)
    if not reader.has_tensor(global_step.op.name):
      continue
    saved, step = int(reader.get_tensor(global_step.op.name)), int(session.run(global_step))
    if step not in (0, saved):
      raise CheckpointChangedError(
        None,
        None,
        f"The variables of the session are from step {step}, but its tables from {prefix}, of "
        f"step {saved}: another process saved while a `tf.train.Saver` restored. Start again, or "
        "use a `PartialRecoverySaver` (monolith.native_training.save_utils), which takes one "
        "checkpoint for both.",
      )


def is_withdrawn(prefix: str) -> bool:
  """Tells whether a checkpoint is gone, or is being deleted or written again."""
  if not checkpoint_management.checkpoint_exists_internal(prefix):
    return True
  if not checkpoint_files.is_marked_unfinished(prefix):
    return False
  state = tf.train.get_checkpoint_state(os.path.dirname(prefix))
  recorded = [state.model_checkpoint_path, *state.all_model_checkpoint_paths] if state else []
  return os.path.basename(prefix) not in map(os.path.basename, recorded)


def with_newest(model_dir: str, read: Callable[[str], Result]) -> Result:
  """Returns what `read` returns for the newest checkpoint of a folder.

  If that one is deleted meanwhile, `read` is called again with the one that is the newest then.

  Args:
    model_dir: folder of the checkpoints, in which another process may save.
    read: called with a prefix.

  Raises:
    ValueError: the folder has no checkpoint.
    CheckpointChangedError: one checkpoint after another was deleted while it was read.
  """
  for attempt in range(_ATTEMPTS):
    prefix = checkpoint_files.require_newest(model_dir)
    try:
      return read(prefix)
    except CheckpointChangedError:
      if attempt + 1 == _ATTEMPTS:
        raise
    except (tf.errors.OpError, ValueError):
      if attempt + 1 == _ATTEMPTS or not is_withdrawn(prefix):
        raise
    logging.warning("%s was deleted while it was read: reading the newest one.", prefix)
  raise AssertionError("unreachable")


def _stamp(prefix: str) -> tuple[int, ...] | None:
  """Returns a value that changes when a checkpoint is rewritten; `None` if it does not exist."""
  path = prefix + ".index"
  try:
    # TensorFlow reports whole seconds, in which a small model may be saved many times.
    local = os.stat(path)
    return local.st_size, local.st_mtime_ns, local.st_ino
  except OSError:
    pass
  try:
    stat = tf.io.gfile.stat(path)
  except tf.errors.NotFoundError:
    return None
  return stat.length, stat.mtime_nsec
