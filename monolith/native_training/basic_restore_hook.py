"""A session hook that lets listeners restore what TensorFlow's own saver does not know."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import restored


class CheckpointRestorerListener:
  """Is called around the restoring of a checkpoint; does nothing itself."""

  def begin(self) -> None:
    """Is called before the graph is finalized."""

  def before_restore(self, session: tf.compat.v1.Session) -> None:
    """Restores what the listener is for: the variables of a new session are there."""

  def after_restore(self, session: tf.compat.v1.Session) -> None:
    """Is called when `before_restore` of all listeners has returned."""

  def end(self, session: tf.compat.v1.Session) -> None:
    """Does nothing; `CheckpointRestorerHook` never calls it, other callers may."""


class CheckpointRestorerHook(tf.compat.v1.train.SessionRunHook):
  """Calls listeners when a session is created. It restores nothing itself.

  All listeners find the checkpoint from which the session's variables come (`restored.find`); if it
  is deleted or written again meanwhile, that is an error. A damaged file that a listener reports
  gets a sentence about a checkpoint that is intact.
  """

  def __init__(self, listeners: Sequence[CheckpointRestorerListener] | None = None):
    """Args:
    listeners: called in this order.
    """
    self._listeners = list(listeners or [])

  def begin(self) -> None:
    for listener in self._listeners:
      listener.begin()

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    savers = session.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS)
    restored.settle(session, any(getattr(saver, "remembers_restores", False) for saver in savers))
    try:
      for listener in self._listeners:
        listener.before_restore(session)
      restored.check(session)
      for listener in self._listeners:
        listener.after_restore(session)
    except restored.CheckpointChangedError:
      raise
    except (tf.errors.OpError, ValueError) as e:
      restored.check(session, e)
      if isinstance(e, (tf.errors.DataLossError, tf.errors.FailedPreconditionError)):
        _raise_with_remedy(e)
      raise


def _raise_with_remedy(error: tf.errors.OpError) -> None:
  """Raises the error again; if it names a table file, with what else could be restored."""
  path = re.search(r"(/\S*?)\.assets/", error.message)
  if path is None:
    raise error
  message = f"{error.message} {checkpoint_files.remedy(path.group(1))}"
  raise type(error)(error.node_def, error.op, message) from error
