"""Ports and addresses of this host."""

from __future__ import annotations

import collections
import os
import socket
import threading

from monolith.native_training import net_utils

# The kernel may name a port twice while nobody listens there: of the five that an agent needs, two
# would be the same in one of a thousand starts or so.
_recent: collections.deque[int] = collections.deque(maxlen=100)
_lock = threading.Lock()
_MAX_TRIES = 1000  # a host may allow fewer ports than are remembered


def find_free_port() -> int:
  """Returns a free port, different from those of the last hundred calls.

  Raises:
    OSError: no port is free.
  """
  with _lock:
    for _ in range(_MAX_TRIES):
      with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
      if port not in _recent:
        break
    _recent.append(port)
    return port


def check_port_open(port: int, host: str = "127.0.0.1", timeout_secs: float = 1) -> bool:
  """Tells whether a process listens on a port.

  Args:
    port: the port.
    host: the host.
    timeout_secs: how long to wait for an answer.
  """
  try:
    with socket.create_connection((host, port), timeout=timeout_secs):
      return True
  except OSError:
    return False


def get_local_ip() -> str:
  """Returns the address of this host: `MY_HOST_IP` or `MY_POD_IP` where set, else by its name."""
  return os.environ.get("MY_HOST_IP") or os.environ.get("MY_POD_IP") or net_utils.get_local_ip()
