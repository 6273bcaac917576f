"""Ends a training run on Ctrl-C, or SIGTERM, as its end of data would: with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training.graph import idle
from monolith.native_training.metric import exit_hook

# Results of `signal.getsignal` for a signal that would end the process in the usual way.
_Handler = Callable[[int, Any], Any]


class StoppedBySignal(SystemExit):
  """The run was ended in an orderly way because of a signal; the exit status is its number."""

  def __init__(self, signo: int, message: str):
    super().__init__(signo)
    self._message = message

  def __str__(self) -> str:
    return self._message


class StopOnInterruptHook(tf.compat.v1.train.SessionRunHook):
  """Ends the training run after the step in which `request` was called; other hooks then save."""

  def __init__(self) -> None:
    self._is_requested = threading.Event()
    self._has_steps = False

  @property
  def is_requested(self) -> bool:
    return self._is_requested.is_set()

  @property
  def has_steps(self) -> bool:
    """Whether the present session has run a step, or is in its first one: it can end."""
    return self._has_steps

  def request(self) -> None:
    self._is_requested.set()

  def begin(self) -> None:
    idle.register(lambda session: self.is_requested)

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._has_steps = False

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    self._has_steps = True

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if self.is_requested:
      run_context.request_stop()


# The one of the training run in this process, which installed the handlers.
_active: StopOnInterruptHook | None = None


def is_requested() -> bool:
  """Tells whether the training run of this process is to end now, not when it is through."""
  return _active is not None and _active.is_requested


@contextlib.contextmanager
def save_on_interrupt(
  model_dir: str, signals: Sequence[int] = (signal.SIGINT,), saves: bool = True
) -> Iterator[StopOnInterruptHook]:
  """Lets the first signal end the training run inside in an orderly way, and the second at once.

  A program that handles a signal itself keeps its handler, and threads other than the main one,
  which may not set handlers, change nothing. A signal that comes before the first step of a session
  ends the program at once: there is nothing to save, and nobody knows how long it would take.

  Args:
    model_dir: where the run saves, to tell the user.
    signals: which ones.
    saves: whether this process is the one that saves.

  Yields:
    The hook that the training session needs.

  Raises:
    KeyboardInterrupt: when the run has been ended by Ctrl-C, so that the program ends as well.
    StoppedBySignal: when it has been ended by a signal whose handler was that of `exit_hook`.
  """
  global _active
  hook = StopOnInterruptHook()
  seen: list[int] = []
  previous = _find_handlers(signals)

  def handle(signo: int, frame: Any) -> None:
    if hook.is_requested or not hook.has_steps:
      previous[signo](signo, frame)
      return
    seen.append(signo)
    hook.request()
    purpose = "to write a checkpoint" if saves else "to tell the others"
    how = "Ctrl-C" if signo == signal.SIGINT else "The signal"
    _say(f"Stopping after this step {purpose}. {how} again stops at once, without it.")

  for signo in previous:
    signal.signal(signo, handle)
  _active = hook
  try:
    yield hook
  except Exception:
    if not seen:
      raise
    # Nobody is there to try again for.
    logging.exception("The run could not be ended in an orderly way.")
  finally:
    _active = None
    for signo, handler in previous.items():
      signal.signal(signo, handler)
  if seen:
    _end(seen[0], previous[seen[0]], model_dir)


def _find_handlers(signals: Sequence[int]) -> dict[int, _Handler]:
  """Returns the handlers that may be replaced."""
  if threading.current_thread() is not threading.main_thread():
    return {}
  handlers = {signo: signal.getsignal(signo) for signo in signals}
  return {
    signo: handler
    for signo, handler in handlers.items()
    if callable(handler)
    and (handler is signal.default_int_handler or exit_hook.ends_process(handler))
  }


def _end(signo: int, handler: _Handler, model_dir: str) -> None:
  checkpoint = tf.train.latest_checkpoint(model_dir)
  newest = f"The newest checkpoint is {checkpoint}"
  _say(f"{newest}: train with model_dir={model_dir!r} to go on.")
  try:
    handler(signo, None)
  except SystemExit:
    name = signal.Signals(signo).name
    raise StoppedBySignal(signo, f"{name} ended it. {newest}") from None


def _say(text: str) -> None:
  # Ctrl-C also ends what the output is piped to, and the run is to save all the same. A signal that
  # comes while something else is printed finds the stream in use, which is a RuntimeError.
  with contextlib.suppress(OSError, RuntimeError):
    print(f"\n{text}", file=sys.stderr, flush=True)
