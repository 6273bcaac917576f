"""Starts a step only when its batch is there, so that a silent stream blocks no hook.

The batch of a stream passes a queue, into which empty batches are not put. A step that found the
queue empty would wait inside TensorFlow, where hooks cannot save, print or stop. So the wait is
here, before the step, and calls the functions registered with `idle` every second.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import tensorflow as tf

from monolith.native_training import prefetch_queue
from monolith.native_training.graph import idle

_IDLE_SECS = 1.0


class _CountingSession:
  """A session for a queue runner that reports how each run of the enqueue op ended."""

  def __init__(
    self,
    session: tf.compat.v1.Session,
    was_enqueued: tf.Tensor,
    on_enqueued: Callable[[], None],
  ):
    self._session = session
    self._was_enqueued = was_enqueued
    self._on_enqueued = on_enqueued

  def make_callable(self, enqueue_op: tf.Operation) -> Callable[[], None]:
    run = self._session.make_callable([enqueue_op, self._was_enqueued])

    def run_and_count() -> None:
      if run()[1]:
        self._on_enqueued()

    return run_and_count

  def run(self, *args: Any, **kwargs: Any) -> Any:
    return self._session.run(*args, **kwargs)

  # A queue runner keeps books by session.
  def __hash__(self) -> int:
    return hash(self._session)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _CountingSession) and other._session is self._session


class StreamHook(tf.compat.v1.train.SessionRunHook):
  """Fills a queue with batches that have samples, and waits for one before each step.

  Args:
    queue: the queue of batches for steps; its enqueue op drops batches without samples.
    has_samples: bool scalar, whether the batch that is being put into the queue has samples.
    batch: a tensor taken from the queue; a session run that needs it is a step.
  """

  def __init__(self, queue: Any, has_samples: tf.Tensor, batch: tf.Tensor):
    self._runner = prefetch_queue.MultiQueueRunner(queue.queues, [queue.enqueue_op])
    self._has_samples = has_samples
    self._takes_batch = prefetch_queue.RunNeedsOp(batch.op)
    self._condition = threading.Condition()
    self._num_waiting = 0
    self._threads: list[threading.Thread] = []

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._num_waiting = 0
    self._threads = self._runner.create_threads(
      _CountingSession(session, self._has_samples, self._count), coord=coord
    )
    for thread in self._threads:
      thread.daemon = True
      thread.start()

  def _count(self) -> None:
    with self._condition:
      self._num_waiting += 1
      self._condition.notify_all()

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    if not self._takes_batch(run_context):
      return
    while not self._take(_IDLE_SECS):
      if idle.run(run_context.session) or run_context.stop_requested:
        # Ends the run like the end of the data does, so that hooks save.
        raise tf.errors.OutOfRangeError(None, None, "training was stopped while no data came")

  def _take(self, timeout_secs: float) -> bool:
    """Returns whether the step may begin: a batch is there, or no more will come."""
    with self._condition:
      if not self._num_waiting:
        self._condition.wait(timeout_secs)
      if self._num_waiting:
        self._num_waiting -= 1
        return True
    # The step finds the queue closed, or hooks find the error that stopped the thread.
    return not self._threads[0].is_alive()
