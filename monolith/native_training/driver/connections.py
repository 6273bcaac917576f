"""Ends TCP connections to a host that is gone, and keeps those to a host that returns soon.

TensorFlow's servers consider a connection dead when their data was not acknowledged for twenty
seconds. Its clients send a request and then only wait: if the answer was lost during a network
outage, they wait forever. So every connection of this process gets the same limit on both sides,
and is probed while it is idle. A lost connection becomes an `UnavailableError`, after which workers
try again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator

# How long a host may be away.
LIMIT_SECS = 60
_IDLE_SECS = 15
_INTERVAL_SECS = 10
_LOOK_SECS = 2
_FOLDER = "/proc/self/fd"
_TCP_USER_TIMEOUT = 18  # of <netinet/tcp.h>; `socket` has it on Linux only
# The first one fails on anything that is not a TCP connection.
_OPTIONS = (
  (socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, 1000 * LIMIT_SECS),
  (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 4), _IDLE_SECS),
  (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", 5), _INTERVAL_SECS),
  (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)


@contextlib.contextmanager
def watched() -> Iterator[None]:
  """Context in which a thread sets the limits of all connections of this process, also new ones.

  Does nothing on systems other than Linux.
  """
  if not os.path.isdir(_FOLDER):
    yield
    return
  stopped = threading.Event()

  def watch() -> None:
    known: set[str] = set()
    while True:
      # The folder cannot be read while this process may open no more files.
      with contextlib.suppress(OSError):
        known = limit_connections(known)
      if stopped.wait(_LOOK_SECS):
        return

  thread = threading.Thread(target=watch, name="connections", daemon=True)
  thread.start()
  try:
    yield
  finally:
    stopped.set()
    thread.join()


def limit_connections(known: set[str]) -> set[str]:
  """Sets the limits of connections of this process that have none yet.

  Calls the C library directly: a socket object of Python may change whether the socket blocks.

  Args:
    known: sockets whose limits are set.

  Returns:
    All sockets of this process.
  """
  set_option = ctypes.CDLL(None).setsockopt
  found = set()
  for number in os.listdir(_FOLDER):
    try:
      name = os.readlink(f"{_FOLDER}/{number}")
    except OSError:
      continue  # closed meanwhile
    if not name.startswith("socket:"):
      continue
    found.add(name)
    if name in known:
      continue
    if _is_tested(int(number)):
      continue  # somebody has chosen limits
    for level, option, value in _OPTIONS:
      packed = struct.pack("i", value)
      if set_option(int(number), level, option, packed, len(packed)):
        break
  return found


def _is_tested(number: int) -> bool:
  value, size = ctypes.c_int(0), ctypes.c_uint32(4)
  get_option = ctypes.CDLL(None).getsockopt
  get_option(
    number, socket.SOL_SOCKET, socket.SO_KEEPALIVE, ctypes.byref(value), ctypes.byref(size)
  )
  return bool(value.value)
