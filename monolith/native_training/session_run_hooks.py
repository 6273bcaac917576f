"""Session hooks that look at the clock: when a worker may start, and when it has to stop.

A *tide* is the part of the day in which machines may be used for training, a window `[start, end)`
in UTC that may run over midnight.
"""

import datetime
import random
import time
from typing import Optional

import tensorflow as tf
from absl import logging
from tensorflow.python.training import training_util

_POLL_SECONDS = 0.5
_LOG_SECONDS = 60
_MAX_RANDOM_WAIT_SECONDS = 600


def before(hour1: int, minute1: int, hour2: int, minute2: int) -> bool:
  """Tells whether the first time of day is earlier than the second."""
  return (hour1, minute1) < (hour2, minute2)


def tide_available_now(
  tide_start_hour: int, tide_start_minute: int, tide_end_hour: int, tide_end_minute: int
) -> bool:
  """Tells whether the present UTC time is in `[start, end)`.

  A window whose end is before its start runs over midnight; one whose ends are equal is always
  open.
  """
  now = datetime.datetime.utcnow()
  started = not before(now.hour, now.minute, tide_start_hour, tide_start_minute)
  not_ended = before(now.hour, now.minute, tide_end_hour, tide_end_minute)
  if before(tide_start_hour, tide_start_minute, tide_end_hour, tide_end_minute):
    return started and not_ended
  # Over midnight. With equal ends one of the two is always true.
  return started or not_ended


class _TideWindow:
  """The tide of a hook, unlimited unless both hours are given."""

  def __init__(
    self,
    start_hour: Optional[int],
    start_minute: Optional[int],
    end_hour: Optional[int],
    end_minute: Optional[int],
  ):
    self._limited = start_hour is not None and end_hour is not None
    self._window = (start_hour, start_minute or 0, end_hour, end_minute or 0)

  def stop_if_over(self, run_context: tf.compat.v1.train.SessionRunContext) -> bool:
    """Requests the end of the session outside of the tide, and tells whether it did."""
    if not self._limited or tide_available_now(*self._window):
      return False
    now = datetime.datetime.utcnow()
    logging.info("Current UTC time: %d : %d", now.hour, now.minute)
    logging.info("Last hour in tide queue. Saving ckpt...")
    run_context.request_stop()
    return True


class CustomGlobalStepWaiterHook(tf.compat.v1.train.SessionRunHook):
  """Delays the first run of a worker until the global step is large enough.

  A worker that has seen training go on (a step above 1) starts after a limited time anyway.
  """

  def __init__(
    self,
    wait_until_step: int,
    tide_start_hour: Optional[int] = None,
    tide_start_minute: Optional[int] = None,
    tide_end_hour: Optional[int] = None,
    tide_end_minute: Optional[int] = None,
    max_non_tide_wait_minute: int = 10,
  ):
    """Args:
    wait_until_step: the step to wait for; 0 or less does not wait.
    tide_start_hour: start of the tide, with `tide_end_hour`; outside of it the session is
      stopped.
    tide_start_minute: 0 by default.
    tide_end_hour: end of the tide.
    tide_end_minute: 0 by default.
    max_non_tide_wait_minute: minutes after which to start anyway; up to ten more are added at
      random, so that workers do not start all at once.
    """
    self._wait_until_step = wait_until_step
    self._tide = _TideWindow(tide_start_hour, tide_start_minute, tide_end_hour, tide_end_minute)
    self._non_tide_wait_second = max_non_tide_wait_minute * 60 + random.randint(
      0, _MAX_RANDOM_WAIT_SECONDS
    )
    self._hook_start_time = None
    self._worker_is_started = False
    self._global_step_tensor = None

  def begin(self) -> None:
    self._global_step_tensor = training_util._get_or_create_global_step_read()
    if self._global_step_tensor is None:
      raise RuntimeError("Global step should be created to use _GlobalStepWaiterHook.")

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    if self._worker_is_started:
      return
    if self._wait_until_step <= 0:
      self._worker_is_started = True
      return
    logging.info("Waiting for global step %d before starting training.", self._wait_until_step)
    last_logged = time.time()
    while not self._tide.stop_if_over(run_context):
      step = run_context.session.run(self._global_step_tensor)
      if self._hook_start_time is None and step > 1:
        self._hook_start_time = time.time()
      if step >= self._wait_until_step or self._has_waited_long_enough():
        self._worker_is_started = True
        return
      if time.time() - last_logged > _LOG_SECONDS:
        logging.info(
          "Waiting for global step %d before starting training. Current step is %d.",
          self._wait_until_step,
          step,
        )
        last_logged = time.time()
      time.sleep(_POLL_SECONDS)

  def _has_waited_long_enough(self) -> bool:
    return (
      self._hook_start_time is not None
      and time.time() - self._hook_start_time > self._non_tide_wait_second
    )


class TideStoppingHook(tf.compat.v1.train.SessionRunHook):
  """Stops the session outside of the tide."""

  def __init__(
    self,
    tide_start_hour: Optional[int] = None,
    tide_start_minute: Optional[int] = None,
    tide_end_hour: Optional[int] = None,
    tide_end_minute: Optional[int] = None,
  ):
    """Does nothing without both hours."""
    self._tide = _TideWindow(tide_start_hour, tide_start_minute, tide_end_hour, tide_end_minute)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    self._tide.stop_if_over(run_context)
