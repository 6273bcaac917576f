"""Ports for servers that a test starts later, or never."""

from __future__ import annotations

import fcntl
import os
import pathlib
import random
import socket
import tempfile

_FIRST_PORT = 10240
_DEFAULT_LAST_PORT = 32767
# The files whose locks say which ports processes of this user have.
_FOLDER = pathlib.Path(tempfile.gettempdir(), f"monolith_test_ports_{os.getuid()}")

_locks: list[int] = []


def get_free_port(num_successors: int = 0) -> int:
  """Returns an unused port of loopback that no other test gets while this one runs.

  The port is below those that the kernel gives to sockets that do not ask for one: a connection or
  a server of another process cannot take it by chance before it is used, and a connection made
  while nothing listens is refused, and never connected to itself.

  Args:
    num_successors: as many ports after it are free and ours, too.

  Raises:
    RuntimeError: there is none.
  """
  _FOLDER.mkdir(exist_ok=True)
  ports = list(range(_FIRST_PORT, _get_last_port() + 1))
  random.SystemRandom().shuffle(ports)
  for port in ports:
    if all(_lock(p) and _is_free(p) for p in range(port, port + num_successors + 1)):
      return port
  raise RuntimeError(f"no port from {_FIRST_PORT} to {_get_last_port()} is free")


def _get_last_port() -> int:
  try:
    text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
  except OSError:
    return _DEFAULT_LAST_PORT
  first_of_kernel = int(text.split()[0])
  # Where the kernel gives all ports away, there is no better choice.
  return first_of_kernel - 1 if first_of_kernel > _FIRST_PORT + 1000 else _DEFAULT_LAST_PORT


def _lock(port: int) -> bool:
  """Takes a port until the end of this process, unless it is taken."""
  descriptor = os.open(_FOLDER / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    return False
  _locks.append(descriptor)
  return True


def _is_free(port: int) -> bool:
  for host in ("127.0.0.1", ""):
    with socket.socket() as s:
      try:
        s.bind((host, port))
      except OSError:
        return False
  return True
