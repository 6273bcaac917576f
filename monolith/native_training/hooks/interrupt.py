"""Ends a training run on Ctrl-C as its end of data would: with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from monolith.native_training.hooks import idle


class StopOnInterruptHook(tf.compat.v1.train.SessionRunHook):
  """Ends the training run after the step in which `request` was called; other hooks then save."""

  def __init__(self) -> None:
    self._is_requested = threading.Event()

  @property
  def is_requested(self) -> bool:
    return self._is_requested.is_set()

  def request(self) -> None:
    self._is_requested.set()

  def begin(self) -> None:
    idle.register(lambda session: self.is_requested)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if self.is_requested:
      run_context.request_stop()


@contextlib.contextmanager
def save_on_interrupt(model_dir: str) -> Iterator[StopOnInterruptHook]:
  """Lets the first Ctrl-C end the training run inside in an orderly way, and the second at once.

  A program that handles SIGINT itself keeps its handler, and threads other than the main one,
  which may not set handlers, change nothing.

  Args:
    model_dir: where the run saves, to tell the user.

  Yields:
    The hook that the training session needs.

  Raises:
    KeyboardInterrupt: when the run has been ended by Ctrl-C, so that the program ends as well.
  """
  hook = StopOnInterruptHook()
  is_ours = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
  )
  if not is_ours:
    yield hook
    return

  def handle(signo: int, frame: Any) -> None:
    if hook.is_requested:
      raise KeyboardInterrupt
    hook.request()
    _say("Stopping after this step to write a checkpoint. Ctrl-C again stops at once, without it.")

  signal.signal(signal.SIGINT, handle)
  try:
    yield hook
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if hook.is_requested:
    checkpoint = tf.train.latest_checkpoint(model_dir)
    _say(f"The newest checkpoint is {checkpoint}: train with model_dir={model_dir!r} to go on.")
    raise KeyboardInterrupt


def _say(text: str) -> None:
  print(f"\n{text}", file=sys.stderr, flush=True)
