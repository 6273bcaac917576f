"""Ports and addresses of this host."""

from __future__ import annotations

import os
import socket

from monolith.native_training import net_utils


def find_free_port() -> int:
  """Returns a port on which nobody listens now."""
  with socket.socket() as s:
    s.bind(("", 0))
    return s.getsockname()[1]


def check_port_open(port: int, host: str = "127.0.0.1", timeout_secs: float = 1) -> bool:
  """Tells whether somebody listens on a port.

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
