"""A barrier between the chief and its workers, made of variables that live on a parameter server.

The chief places the barrier, workers see it after their step, announce that they wait, and go on
when it is removed. In between the chief can save a consistent state.

    barrier_var   [ placed | worker 1 waits | worker 2 waits | ... ]

Differences from ByteDance's Monolith: neither variable is trainable, the action variable is
initialised by the chief alone, so that a restarted worker does not wipe it, and the first polls
come early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training.graph import idle

# Called with the action of the barrier and a session.
BarrierCallback = Callable[[str, tf.compat.v1.Session], None]

_LOG_INTERVAL_SECONDS = 60
# Polling starts this much faster than every `wait_seconds` and then slows down to that.
_FIRST_POLL_FRACTION = 1 / 16


class BarrierAlreadyPlacedError(Exception):
  """The barrier cannot be placed: it is there already."""


class BarrierOp:
  """Places, removes and waits for the barrier. Methods are thread-safe.

  The whole graph is built by the constructor, so that methods work on finalized graphs. The
  variables are shared by name: one `BarrierOp` per graph.
  """

  def __init__(
    self,
    capacity: int,
    is_chief: bool = True,
    wait_seconds: float = 1,
    name_prefix: str = "default",
    barrier_callbacks: Sequence[BarrierCallback] | None = None,
  ):
    """Builds the variables and ops.

    Args:
      capacity: 1 + the number of workers that wait.
      is_chief: the chief initialises the variables (they are local there), others wait for it.
      wait_seconds: how often a waiting worker looks whether the barrier is gone.
      name_prefix: prefix of the ops' names, not of the variables'.
      barrier_callbacks: called with (action, session) where the barrier is placed and by every
        worker that starts to wait.
    """
    self._capacity = capacity
    self._wait_seconds = wait_seconds
    self._callbacks = list(barrier_callbacks or [])
    self._lock = threading.Lock()
    collection = (
      tf.compat.v1.GraphKeys.LOCAL_VARIABLES
      if is_chief
      else tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
    )
    with tf.compat.v1.name_scope(f"{name_prefix}_barrier_op"):
      self._barrier_var = tf.compat.v1.get_variable(
        name="barrier_var",
        initializer=np.zeros([capacity], dtype=bool),
        trainable=False,
        collections=[collection],
      )
      self._action_var = tf.compat.v1.get_variable(
        name="barrier_op_action",
        initializer="",
        dtype=tf.string,
        trainable=False,
        collections=[collection],
      )
      self._barrier = self._barrier_var.read_value()
      self._action = self._action_var.read_value()
      self._placed = self._barrier[0]

      self._action_placeholder = tf.compat.v1.placeholder(tf.string, [], name="action")
      self._index_placeholder = tf.compat.v1.placeholder(tf.int32, [], name="index")
      self._value_placeholder = tf.compat.v1.placeholder(tf.bool, [], name="value")
      # A worker that sees the barrier must see its action.
      with tf.control_dependencies([self._action_var.assign(self._action_placeholder)]):
        self._place_op = self._set(0, True)
      self._remove_op = self._set(0, False)
      self._set_op = self._set(self._index_placeholder, self._value_placeholder)

  def _set(self, index: int | tf.Tensor, value: bool | tf.Tensor) -> tf.Operation:
    return tf.group(tf.compat.v1.scatter_update(self._barrier_var, [index], [value]))

  @property
  def capacity(self) -> int:
    """1 + the number of workers that wait."""
    return self._capacity

  @property
  def barrier_placed_tensor(self) -> tf.Tensor:
    """bool scalar: the barrier is placed."""
    return self._placed

  def place_barrier(self, session: tf.compat.v1.Session, action: str = "") -> None:
    """Places the barrier, then runs the callbacks in the calling thread.

    Args:
      session: where to run.
      action: what the barrier is for; the callbacks of chief and workers get it.

    Raises:
      BarrierAlreadyPlacedError: the barrier is placed.
    """
    with self._lock:
      if self.is_barrier_placed(session):
        raise BarrierAlreadyPlacedError("The barrier is placed already.")
      session.run(self._place_op, {self._action_placeholder: action})
    self._run_callbacks(action, session)

  def remove_barrier(self, session: tf.compat.v1.Session) -> None:
    """Removes the barrier, whether it is placed or not."""
    with self._lock:
      session.run(self._remove_op)

  def is_barrier_placed(self, session: tf.compat.v1.Session) -> bool:
    return bool(session.run(self._placed))

  def is_barrier_removed(self, session: tf.compat.v1.Session) -> bool:
    return not self.is_barrier_placed(session)

  def wait_until_barrier_removed(self, session: tf.compat.v1.Session, index: int) -> None:
    """Announces that a worker waits, runs the callbacks, and returns when the barrier is gone.

    Args:
      session: where to run.
      index: the worker, 1 to capacity - 1.

    Raises:
      ValueError: `index` is out of range.
    """
    if index <= 0 or index >= self._capacity:
      raise ValueError(
        f"Index [{index}] must be non-negative and less than capacity [{self._capacity}]. "
      )
    with self._lock:
      self._set_blocked(session, index, True)
      action = tf.compat.as_str(session.run(self._action))
    self._run_callbacks(action, session)
    self._poll_until_removed(session, index)
    self._set_blocked(session, index, False)

  def _poll_until_removed(self, session: tf.compat.v1.Session, index: int) -> None:
    wait_seconds = self._wait_seconds * _FIRST_POLL_FRACTION
    last_log = None
    while self.is_barrier_placed(session):
      now = time.monotonic()
      if last_log is None or now - last_log >= _LOG_INTERVAL_SECONDS:
        logging.info("Worker %d waits for the barrier to be removed.", index)
        last_log = now
      time.sleep(wait_seconds)
      wait_seconds = min(2 * wait_seconds, self._wait_seconds)

  def is_all_blocked(self, session: tf.compat.v1.Session) -> bool:
    """Tells whether the barrier is placed and all workers wait."""
    return bool(np.all(session.run(self._barrier)))

  def is_none_blocked(self, session: tf.compat.v1.Session) -> bool:
    """Tells whether the barrier is not placed and no worker waits."""
    return not np.any(session.run(self._barrier))

  def get_blocked_indices(self, session: tf.compat.v1.Session) -> list[int]:
    """Workers that wait, and 0 if the barrier is placed."""
    return np.flatnonzero(session.run(self._barrier)).tolist()

  def get_unblocked_indices(self, session: tf.compat.v1.Session) -> list[int]:
    """Workers that do not wait, and 0 if the barrier is not placed."""
    return np.flatnonzero(~session.run(self._barrier)).tolist()

  def _set_blocked(self, session: tf.compat.v1.Session, index: int, blocked: bool) -> None:
    session.run(self._set_op, {self._index_placeholder: index, self._value_placeholder: blocked})

  def _run_callbacks(self, action: str, session: tf.compat.v1.Session) -> None:
    # Outside the lock: a callback may use the barrier.
    for callback in self._callbacks:
      callback(action, session)


class BarrierHook(tf.compat.v1.train.SessionRunHook):
  """Lets a worker wait after a step during which the barrier was placed."""

  def __init__(self, index: int, barrier_op: BarrierOp):
    """Makes the hook.

    Args:
      index: the worker; 0, the chief, never waits.
      barrier_op: the barrier.
    """
    self._index = index
    self._barrier_op = barrier_op

  def begin(self) -> None:
    idle.register(self._wait_if_placed)

  def _wait_if_placed(self, session: tf.compat.v1.Session) -> bool:
    if self._index > 0 and self._barrier_op.is_barrier_placed(session):
      self._barrier_op.wait_until_barrier_removed(session, self._index)
    return False

  def before_run(
    self, run_context: tf.compat.v1.train.SessionRunContext
  ) -> tf.compat.v1.train.SessionRunArgs | None:
    del run_context
    if self._index == 0:
      return None  # A server would send the answer.
    return tf.compat.v1.train.SessionRunArgs(self._barrier_op.barrier_placed_tensor)

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    if run_values.results:
      self._barrier_op.wait_until_barrier_removed(run_context.session, self._index)
