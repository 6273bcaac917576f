"""Prints the stack of the main thread on SIGUSR1.

Importing this module installs the handler, once per process: `kill -USR1 <pid>` then shows where a
hanging process is. A handler that was installed before is called first.
"""

import os
import signal
import threading
import traceback
from types import FrameType
from typing import Optional

from absl import logging

# Marks our own handlers, so that importing the module again installs no second one.
_HANDLER_MARK = "_monolith_stack_trace_handler"


def print_stack_trace(sig: int, frame: Optional[FrameType]) -> None:
  """Prints the stack of `frame`, one entry per line group.

  Args:
    sig: number of the signal, unused.
    frame: the frame that the signal interrupted.
  """
  del sig
  lines = [line.strip() for line in traceback.format_stack(frame)]
  try:
    for line in lines:
      print(line)
  except RuntimeError:
    # The signal interrupted another write to stdout, and buffered files refuse to be re-entered.
    os.write(2, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def add_siguser1_handler() -> None:
  """Installs a SIGUSR1 handler that calls the present one, if any, and then prints the stack.

  Only the main thread may install handlers; called from another one, this logs a line and does
  nothing.
  """
  if threading.current_thread() is not threading.main_thread():
    logging.warning("Not in the main thread: the SIGUSR1 handler is not installed.")
    return
  previous = signal.getsignal(signal.SIGUSR1)

  def handle(sig: int, frame: Optional[FrameType]) -> None:
    # SIG_DFL and SIG_IGN are enum members, None is a handler that was not installed from Python.
    if callable(previous):
      previous(sig, frame)
    print_stack_trace(sig, frame)

  setattr(handle, _HANDLER_MARK, True)
  signal.signal(signal.SIGUSR1, handle)


if not hasattr(signal.getsignal(signal.SIGUSR1), _HANDLER_MARK):
  add_siguser1_handler()
