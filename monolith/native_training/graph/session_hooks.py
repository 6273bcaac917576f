"""The session that runs now, for code that is called without one."""

from __future__ import annotations

import tensorflow as tf

_current_session: tf.compat.v1.Session | None = None


def get_current_session() -> tf.compat.v1.Session | None:
  """Returns the session of a `SetCurrentSessionHook`, else TensorFlow's default session."""
  if _current_session is not None:
    return _current_session
  return tf.compat.v1.get_default_session()


class SetCurrentSessionHook(tf.compat.v1.train.SessionRunHook):
  """Announces the raw session to `get_current_session` while it lives."""

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    global _current_session
    _current_session = session

  def end(self, session: tf.compat.v1.Session) -> None:
    global _current_session
    _current_session = None
