"""Time slices of threads, by which the kernel decides who runs first.

A thread that mostly sleeps and works for microseconds when it wakes, beside threads that compute
all the time, waits for the end of their slice, 3 ms on Linux, each time it wakes. With a short
slice of its own it runs at once (Linux 6.12 and later; earlier kernels take the wish and ignore
it). No privilege is needed: a short slice gives no more time in all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator

from absl import logging

_SLICE_NANOSECS = 100_000  # the least that the kernel takes
# sched_setattr and sched_getattr, for which there is no function in the C library.
_SYSCALLS = {"aarch64": (274, 275), "x86_64": (314, 315)}
# struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period.
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")


@contextlib.contextmanager
def prompt_threads() -> Iterator[None]:
  """Gives a short slice to all threads that this process starts inside the block."""
  before = _get_thread_ids()
  yield
  for thread_id in _get_thread_ids() - before:
    _shorten(thread_id)


def get_slice_nanosecs(thread_id: int) -> int:
  """Returns the slice of a thread of this process; 0 where the kernel does not tell."""
  syscalls = _SYSCALLS.get(platform.machine())
  buffer = ctypes.create_string_buffer(_SCHED_ATTR.size)
  if syscalls is None or _call(syscalls[1], thread_id, buffer, _SCHED_ATTR.size, 0) != 0:
    return 0
  return _SCHED_ATTR.unpack(buffer.raw)[5]


def _get_thread_ids() -> set[int]:
  try:
    return {int(name) for name in os.listdir("/proc/self/task")}
  except OSError:
    return set()


def _shorten(thread_id: int) -> None:
  syscalls = _SYSCALLS.get(platform.machine())
  try:
    if syscalls is None or os.sched_getscheduler(thread_id) != os.SCHED_OTHER:
      return
    nice = os.getpriority(os.PRIO_PROCESS, thread_id)
  except OSError:
    return  # it has ended
  attr = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NANOSECS, 0, 0)
  if _call(syscalls[0], thread_id, attr, 0) != 0:
    # A sandbox may forbid it; then everything works, only slower.
    reason = os.strerror(ctypes.get_errno())
    logging.info("no short time slice for thread %d: %s", thread_id, reason)


def _call(number: int, *args: object) -> int:
  return ctypes.CDLL(None, use_errno=True).syscall(number, *args)
