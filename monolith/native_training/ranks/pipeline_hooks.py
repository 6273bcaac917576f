"""Hooks that run the stages of a pipelined synchronous step in threads, in step with each other.

A stage that talks to other ranks must run equally often on all of them: one run more on one rank
waits forever, or meets a run of something else. A thread that fills a queue as fast as it can does
not keep that promise, because it is anywhere when training stops. So these threads do nothing on
their own: each training step asks for one run of each stage, and the end of training waits until
all that was asked for is done.

                 before step 1   step 1   step 2        end
    step asks    capacity runs   1 run    1 run         waits for all of them
    ahead of it  capacity        capacity capacity
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import prefetch_queue


class _StageThread:
  """Runs a stage as often as it is asked to, in a daemon thread.

  Args:
    coord: told of an error, so that training stops with it.
    run: runs the stage once; returns whether there is more to come.
    cancel: called after an error, to wake up what waits for the stage.
  """

  def __init__(
    self, coord: tf.train.Coordinator, run: Callable[[], bool], cancel: Callable[[], None]
  ):
    self._coord = coord
    self._run = run
    self._cancel = cancel
    self._changed = threading.Condition()
    self._asked_for = 0
    self._done = 0
    self._is_finished = False
    threading.Thread(target=self._loop, daemon=True).start()

  @property
  def is_finished(self) -> bool:
    """Whether nothing more will be done."""
    return self._is_finished

  def ask_for(self, runs: int) -> None:
    with self._changed:
      self._asked_for += runs
      self._changed.notify_all()

  def wait(self) -> None:
    """Waits until everything asked for is done, or nothing more will be."""
    with self._changed:
      self._changed.wait_for(self._is_idle)

  def stop(self) -> None:
    """Lets the thread end after the run in progress."""
    with self._changed:
      self._is_finished = True
      self._changed.notify_all()

  def _is_idle(self) -> bool:
    return self._is_finished or self._done == self._asked_for

  def _loop(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._is_finished or self._done < self._asked_for)
        if self._is_finished:
          return
      goes_on = self._run_once()
      with self._changed:
        self._done += 1
        self._is_finished = self._is_finished or not goes_on
        self._changed.notify_all()

  def _run_once(self) -> bool:
    try:
      return self._run()
    except Exception as error:
      # Threads that are woken up below look for the cause here.
      if not self._coord.should_stop():
        self._coord.request_stop(error)
      try:
        self._cancel()
      except Exception as cancel_error:
        logging.info("cannot close a queue after an error: %s", cancel_error)
      return False


class LockstepEnqueueHook(prefetch_queue.EnqueueHook):
  """Fills a queue ahead of the steps that use it, always by the same number of elements.

  Args:
    queue: to fill.
    ahead: how many elements are made ahead of a step: the queue's capacity, and those of the queues
      that are filled from this one.
    consumer: the op of a step that takes an element, from this queue or from the last one that is
      filled from it.
    is_last: scalar; when it is not 0 the queue is closed after the element it came with.
  """

  def __init__(
    self,
    queue: Any,
    ahead: int,
    consumer: tf.Operation,
    is_last: tf.Tensor | None = None,
  ):
    super().__init__(queue)
    self._ahead = ahead
    self._consumes = prefetch_queue.RunNeedsOp(consumer)
    fetches = {"enqueue": queue.enqueue_op}
    if is_last is not None:
      fetches["is_last"] = is_last
    self._fetches = fetches
    self._thread: _StageThread | None = None

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    # The thread starts with the first step: by then tables and variables are restored.
    if self._thread is not None:
      self._thread.stop()
    self._thread = None
    self._session, self._coord = session, coord

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    if not self._consumes(run_context):
      return
    if self._thread is None:
      self._thread = _StageThread(
        self._coord, self._enqueue, lambda: self._session.run(self._q_runner.cancel_op)
      )
      self._thread.ask_for(self._ahead)
    self._thread.ask_for(1)

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._thread is not None:
      self._thread.wait()
      self._thread.stop()

  def _enqueue(self) -> bool:
    try:
      goes_on = not self._session.run(self._fetches).get("is_last", 0)
    except tf.errors.OutOfRangeError:
      goes_on = False
    if not goes_on:
      self._session.run(self._q_runner.close_op)
    return goes_on


class LockstepPushHook(prefetch_queue.AsyncPushHook):
  """Runs ops, during the next step, on what a step left in a queue; each element exactly once.

  The ops are a run of their own: if the step meets the end of the data they still do their work.

  Args:
    queue: filled by the step, or by the ops of another hook.
    ops: what `session.run` accepts; takes one element from the queue.
    filler: the op of a step that starts it all: the enqueue op of the first queue.
    next_hook: takes elements from the queue that `ops` fill, if they do.
  """

  def __init__(
    self,
    queue: Any,
    ops: Any,
    filler: tf.Operation,
    next_hook: LockstepPushHook | None = None,
  ):
    super().__init__(queue, ops)
    self._is_first = filler is queue.enqueue_op
    self._is_step = prefetch_queue.RunNeedsOp(filler)
    self._next_hook = next_hook
    self._cancel_op = tf.group(*[q.close(cancel_pending_enqueues=True) for q in queue.queues])
    self._num_ready = 0
    self._is_running = False
    self._thread: _StageThread | None = None

  def begin(self) -> None:
    """Creates nothing: elements are counted here."""

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    if self._thread is not None:
      self._thread.stop()
    self._num_ready = 0
    self._is_running = False
    self._thread = _StageThread(
      coord, lambda: self._push(session), lambda: session.run(self._cancel_op)
    )

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    if self._num_ready and self._is_step(run_context):
      self._start()

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    self._wait()
    if self._is_first and self._is_step(run_context):
      self.add_ready()

  def end(self, session: tf.compat.v1.Session) -> None:
    self._wait()
    while self._num_ready and not self._thread.is_finished:
      if self._next_hook is not None:
        self._next_hook.end(session)  # Makes room.
      self._start()
      self._wait()

  def add_ready(self) -> None:
    """Takes note of another element in this hook's queue."""
    self._num_ready += 1

  def _start(self) -> None:
    self._num_ready -= 1
    self._is_running = True
    self._thread.ask_for(1)

  def _wait(self) -> None:
    self._thread.wait()
    if self._is_running:
      self._is_running = False
      if self._next_hook is not None:
        self._next_hook.add_ready()

  def _push(self, session: tf.compat.v1.Session) -> bool:
    session.run(self._run_ops)
    return True
