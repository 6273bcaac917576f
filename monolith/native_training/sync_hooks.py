"""Lets workers wait for the chief's restore, and the chief for the end of the workers.

State is one boolean variable on the chief: element 0 says that the restore is done, element i that
worker i is alive.
"""

import time
from typing import Optional

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training.hooks import interrupt

_CHIEF_TIMEOUT_SECONDS = 1800
_POLL_SECONDS = 1
_LOG_SECONDS = 60
_ALIVE_SECONDS = 10
_RESTORE_INDEX = 0


class SyncHelper:
  """Reads and writes the state shared by chief and workers.

  All ops are made by the constructor: the methods take any session of the graph, from any thread,
  also when the graph is finalized.
  """

  def __init__(
    self, num_workers: int, is_chief: bool, var_device: Optional[str] = "/job:chief/task:0"
  ):
    """Args:
    num_workers: number of workers, the chief included.
    is_chief: whether this process initialises the variable, as a local one; for the others it is
      a global variable that has to become initialised.
    var_device: where the variable lives, `None` for wherever the session puts it.
    """
    self._num_workers = num_workers
    keys = tf.compat.v1.GraphKeys
    with (
      tf.device(var_device),
      tf.compat.v1.variable_scope("monolith_sync_helper", reuse=tf.compat.v1.AUTO_REUSE),
    ):
      self._control_var = tf.compat.v1.get_variable(
        "control_var",
        shape=[num_workers],
        dtype=tf.bool,
        initializer=tf.compat.v1.zeros_initializer(),
        trainable=False,
        collections=[keys.LOCAL_VARIABLES if is_chief else keys.GLOBAL_VARIABLES],
        use_resource=True,
      )
      self._idx_ph = tf.compat.v1.placeholder(tf.int32, shape=[], name="idx_ph")
      self._value_ph = tf.compat.v1.placeholder(tf.bool, shape=[], name="value_ph")
      self._read = self._control_var.read_value()
      self._update = tf.group(
        tf.compat.v1.scatter_update(self._control_var, self._idx_ph, self._value_ph)
      )

  @property
  def num_workers(self) -> int:
    return self._num_workers

  def mark_restore_done(self, sess: tf.compat.v1.Session) -> None:
    self._set(sess, _RESTORE_INDEX, True)

  def get_restore_status(self, sess: tf.compat.v1.Session) -> bool:
    return bool(sess.run(self._read)[_RESTORE_INDEX])

  def start_worker(self, sess: tf.compat.v1.Session, idx: int) -> None:
    """Marks worker `idx`, which is not the chief, as alive."""
    self._check_worker(idx)
    self._set(sess, idx, True)

  def finish_worker(self, sess: tf.compat.v1.Session, idx: int) -> None:
    """Marks worker `idx`, which is not the chief, as finished."""
    self._check_worker(idx)
    self._set(sess, idx, False)

  def get_alive_workers(self, sess: tf.compat.v1.Session) -> np.ndarray:
    """Returns the indices, from 1 on, of the workers that are alive."""
    return np.flatnonzero(sess.run(self._read)[_RESTORE_INDEX + 1 :]) + 1

  def get_num_alive_workers(self, sess: tf.compat.v1.Session) -> int:
    return len(self.get_alive_workers(sess))

  def _check_worker(self, idx: int) -> None:
    assert 0 < idx < self._num_workers, f"Index {idx} is out range "

  def _set(self, sess: tf.compat.v1.Session, idx: int, value: bool) -> None:
    sess.run(self._update, feed_dict={self._idx_ph: idx, self._value_ph: value})


class ChiefSyncHook(tf.compat.v1.train.SessionRunHook):
  """The chief's part: announces the restore, and at the end waits for the workers.

  A chief that a signal has told to end does not wait: it saves, and the workers lose their servers.
  """

  def __init__(self, sync_helper: SyncHelper, timeout_seconds: float = _CHIEF_TIMEOUT_SECONDS):
    """Args:
    sync_helper: the shared state.
    timeout_seconds: how long to wait for workers at the end.
    """
    self._sync_helper = sync_helper
    self._timeout_seconds = timeout_seconds

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: Optional[tf.train.Coordinator]
  ) -> None:
    self._sync_helper.mark_restore_done(session)

  def end(self, session: tf.compat.v1.Session) -> None:
    started = last_logged = time.monotonic()
    while True:
      alive = self._sync_helper.get_alive_workers(session)
      if not alive.size:
        logging.info("All other workers had been finished.")
        return
      if interrupt.is_requested():
        logging.warning("This run was told to end: workers %s are not waited for.", alive.tolist())
        return
      now = time.monotonic()
      if now - started >= self._timeout_seconds:
        logging.warning("Reach timeout seconds! Remaining worker count: %d.", alive.size)
        return
      if now - last_logged >= _LOG_SECONDS:
        logging.info("Waiting for the end of workers %s.", alive.tolist())
        last_logged = now
      time.sleep(_POLL_SECONDS)


class WorkerSyncHook(tf.compat.v1.train.SessionRunHook):
  """A worker's part: waits for the chief's restore, and at the end tells that it is finished.

  A chief that recovers from a lost server forgets who is alive, so a worker that trains says it
  again from time to time. Worker 0 is the chief and does nothing.
  """

  def __init__(self, worker_index: int, sync_helper: SyncHelper):
    self._worker_index = worker_index
    self._sync_helper = sync_helper
    self._last_said = 0.0

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: Optional[tf.train.Coordinator]
  ) -> None:
    if self._worker_index == 0:
      return
    self._say_alive(session)
    last_logged = None
    while not self._sync_helper.get_restore_status(session):
      if coord is not None and coord.should_stop():
        return
      if last_logged is None or time.monotonic() - last_logged >= _LOG_SECONDS:
        logging.info("The worker %d waits for start signal of chief.", self._worker_index)
        last_logged = time.monotonic()
      time.sleep(_POLL_SECONDS)

  def _say_alive(self, session: tf.compat.v1.Session) -> None:
    self._sync_helper.start_worker(session, self._worker_index)
    self._last_said = time.monotonic()

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    if self._worker_index != 0 and time.monotonic() - self._last_said >= _ALIVE_SECONDS:
      self._say_alive(run_context.session)

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._worker_index != 0:
      self._sync_helper.finish_worker(session, self._worker_index)


class TrainingHooksHelper:
  """The hooks of one process, none when synchronisation is off."""

  def __init__(
    self,
    enable_sync: bool,
    num_workers: int,
    worker_idx: int,
    chief_timeout_seconds: float = _CHIEF_TIMEOUT_SECONDS,
  ):
    """Args:
    enable_sync: whether to synchronise at all.
    num_workers: number of workers, the chief included.
    worker_idx: this process's index; 0 is the chief.
    chief_timeout_seconds: how long the chief waits for workers at the end.
    """
    self._training_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...] = ()
    self._training_chief_hooks: tuple[tf.compat.v1.train.SessionRunHook, ...] = ()
    self._helper: Optional[SyncHelper] = None
    if enable_sync:
      helper = self._helper = SyncHelper(num_workers, is_chief=worker_idx == 0)
      self._training_hooks = (WorkerSyncHook(worker_idx, helper),)
      self._training_chief_hooks = (ChiefSyncHook(helper, chief_timeout_seconds),)

  def get_alive_workers(self, sess: tf.compat.v1.Session) -> list[int]:
    """Returns the workers, from 1 on, that train now; none when synchronisation is off."""
    return [] if self._helper is None else self._helper.get_alive_workers(sess).tolist()

  @property
  def training_hooks(self) -> tuple[tf.compat.v1.train.SessionRunHook, ...]:
    return self._training_hooks

  @property
  def training_chief_hooks(self) -> tuple[tf.compat.v1.train.SessionRunHook, ...]:
    return self._training_chief_hooks
