"""Reports by which signal a process ended.

Handlers that were there before are called first.

Differences from ByteDance's Monolith: importing the module changes nothing, the driver of a cluster
calls `install`.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from types import FrameType
from typing import Any

from absl import logging

from monolith.native_training import native_task_context, utils
from monolith.native_training.metric import cli

_ENDS_PROCESS = "_monolith_ends_process"
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

_installed = False
_seen_signal: int | None = None


def install() -> None:
  """Installs the handlers, once; only the main thread of a process can."""
  global _installed
  if _installed:
    return
  if threading.current_thread() is not threading.main_thread():
    logging.info("Not in the main thread: signals will not be reported.")
    return
  _installed = True
  for signo in _SIGNALS:
    signal.signal(signo, _create_handler(signal.getsignal(signo)))
  atexit.register(_report)


def _create_handler(previous: Any) -> Any:
  def handle(signo: int, frame: FrameType | None) -> None:
    global _seen_signal
    _seen_signal = signo
    if previous is signal.SIG_IGN:
      return
    # A handler that is not Python's own: the program wants to end in its own way.
    if callable(previous) and previous is not signal.default_int_handler:
      previous(signo, frame)
      return
    sys.exit(signo)

  if not callable(previous) or previous is signal.default_int_handler:
    setattr(handle, _ENDS_PROCESS, previous is not signal.SIG_IGN)
  return handle


def ends_process(handler: Any) -> bool:
  """Tells whether a handler of a signal is one of `install` that ends the process by itself.

  One that asks a handler of the program does not.
  """
  return bool(getattr(handler, _ENDS_PROCESS, False))


def _report() -> None:
  if _seen_signal is None:
    return
  ctx = native_task_context.get()
  index = ctx.ps_index if ctx.server_type == "ps" else ctx.worker_index
  client = cli.get_cli(utils.get_metric_prefix())
  client.emit_counter(
    "exit_hook",
    1,
    {
      "server_type": ctx.server_type,
      "index": str(index),
      "sig": signal.Signals(_seen_signal).name,
    },
  )
  client.flush()
