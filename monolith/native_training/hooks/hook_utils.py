"""Saver listeners made of one half of another one."""

from __future__ import annotations

import tensorflow as tf


class BeforeSaveListener(tf.compat.v1.train.CheckpointSaverListener):
  """Forwards only `before_save`."""

  def __init__(self, listener: tf.compat.v1.train.CheckpointSaverListener):
    self._listener = listener

  def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    self._listener.before_save(session, global_step_value)

  def __repr__(self) -> str:
    return f"{super().__repr__()}({self._listener!r})"


class AfterSaveListener(tf.compat.v1.train.CheckpointSaverListener):
  """Forwards only `after_save`, and its request to stop training."""

  def __init__(self, listener: tf.compat.v1.train.CheckpointSaverListener):
    self._listener = listener

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> bool | None:
    return self._listener.after_save(session, global_step_value)

  def __repr__(self) -> str:
    return f"{super().__repr__()}({self._listener!r})"
