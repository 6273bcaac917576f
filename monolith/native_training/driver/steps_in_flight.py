"""Several steps at the same time, for machines with more cores than one step keeps busy.

A step is a chain of ops, of which many are too small for sixteen cores. With `steps_in_flight = n`
every run of the session that trains takes n - 1 further runs of the train op along, each with a
batch of its own, and waits for all of them:

  hooks | run, batch 1 | hooks | run, batch 4 | hooks
        | run, batch 2 |       | run, batch 5 |
        | run, batch 3 |       | run, batch 6 |

They read the variables and rows as they find them, so a step may miss the updates of up to n - 1
others, besides those that queues hold back, and results are not the same from run to run. Steps of
one wave also update the dense variables at the same time: with an optimizer that does not lock
(`use_locking=False`, TensorFlow's default) one may write over what another has just written, and a
gradient counts for some elements of a variable only. Rows are locked, and lose nothing. Hooks see
one step of n; no step is under way while they work, so checkpoints are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.native_training import prefetch_queue

# Key under which `MonitoredSession` keeps the fetches of its caller.
_CALLER = "caller"


class StepsInFlightHook(tf.compat.v1.train.SessionRunHook):
  """Takes further steps along with every step. Other hooks of the session may come in any order.

  Args:
    num_steps: how many run at the same time, 2 or more.
    train_op: what makes a step.
    loss: of a step; if it is NaN in any of them, training stops.
    async_hooks: those of functions that each step runs for the one before it; others are ignored.
    num_left: how many steps the run has from its start; `None` if there is no limit.
    last_step: the global step at which it ends; `None` if there is no limit.
  """

  def __init__(
    self,
    num_steps: int,
    train_op: tf.Operation | tf.Tensor,
    loss: tf.Tensor | None,
    async_hooks: Sequence[tf.compat.v1.train.SessionRunHook],
    num_left: int | None = None,
    last_step: int | None = None,
  ):
    self._num_others = num_steps - 1
    self._train_op = train_op
    self._fetches = [train_op] if loss is None else [train_op, loss]
    self._push_hooks = [h for h in async_hooks if isinstance(h, prefetch_queue.AsyncPushHook)]
    self._num_left = num_left
    self._last_step = last_step
    self._is_new = True  # no session has begun
    self._pool: futures.ThreadPoolExecutor | None = None
    self._global_step: tf.Tensor | None = None

  def begin(self) -> None:
    self._global_step = tf.compat.v1.train.get_global_step()

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    step = int(session.run(self._global_step))
    if self._is_new and self._num_left is not None:
      end = step + self._num_left
      self._last_step = end if self._last_step is None else min(end, self._last_step)
    self._is_new = False
    if self._last_step is not None:
      self._num_left = self._last_step - step
    self._stop()  # those of a session that was lost
    self._pool = futures.ThreadPoolExecutor(self._num_others, "step_in_flight")
    # Around the run itself: hooks that come before and after it, whatever their order, see no step
    # under way.
    session.run = self._make_run(session.run)

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    # TensorFlow's own hook looks at the step that one of a wave saw, which others have passed.
    if self._last_step is None or self._num_left is None or self._num_left > 0:
      return
    if run_context.session.run(self._global_step) >= self._last_step:
      run_context.request_stop()

  def end(self, session: tf.compat.v1.Session) -> None:
    self._stop()

  def _stop(self) -> None:
    if self._pool is not None:
      self._pool.shutdown(wait=False)
      self._pool = None

  def _make_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
    def run_with_others(
      fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
      if not self._is_step(fetches):
        # A save, say: training goes on if it fails and its hook does not mind.
        return run(fetches, feed_dict, options, run_metadata)
      others = self._start_others(run)
      try:
        result = run(fetches, feed_dict, options, run_metadata)
        self._finish(others)
        return result
      except tf.errors.OutOfRangeError:
        # The others find the end, too, or complete their steps. Hooks that save come next, unless
        # one of these has failed.
        self._finish(others)
        raise
      except BaseException:
        self._stop()  # The session is going to be closed, which ends the others.
        raise

    return run_with_others

  def _is_step(self, fetches: Any) -> bool:
    """Tells whether a monitored session was asked for a step."""
    if not isinstance(fetches, dict) or _CALLER not in fetches:
      return False
    return any(
      fetch is self._train_op
      for fetch in tf.nest.flatten(fetches[_CALLER], expand_composites=False)
    )

  def _start_others(self, run: Callable[..., Any]) -> list[futures.Future[Any]]:
    num_others = self._num_others
    if self._num_left is not None:
      num_others = min(num_others, self._num_left - 1)
      self._num_left -= 1
    # Asynchronous functions work on values that the first step leaves.
    if num_others <= 0 or not all(hook.is_running for hook in self._push_hooks):
      return []
    if self._num_left is not None:
      self._num_left -= num_others
    pushes = [hook.run_ops for hook in self._push_hooks]
    assert self._pool is not None
    return [self._pool.submit(run, [self._fetches, pushes]) for _ in range(num_others)]

  def _finish(self, others: Sequence[futures.Future[Any]]) -> None:
    """Waits for steps; raises what one of them has raised."""
    futures.wait(others)
    for other in others:
      try:
        [[_, *losses], _] = other.result()
      except tf.errors.OutOfRangeError:
        continue  # the next run finds the end of the data, too
      if losses and np.any(np.isnan(losses[0])):
        logging.error("Model diverged with loss = NaN.")
        raise tf.compat.v1.train.NanLossDuringTrainingError()
