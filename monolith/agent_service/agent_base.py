"""Holds the parts that agents of both versions share: children, their end, and shutting down."""

from __future__ import annotations

import abc
import threading

from absl import logging

from monolith.agent_service import ports
from monolith.agent_service.agent_service import LOOPBACK
from monolith.agent_service.tfs_wrapper import TFSWrapper, get_server_command
from monolith.agent_service.utils import AgentConfig

# A server that ended is missed: what starts agents again shall not wait for this one's end.
_CHECK_SECS = 0.1


class AgentBase(abc.ABC):
  """Starts servers, and ends everything when one of them ends.

  Args:
    config: the agent's settings.
    tfs_log: file for the output of the servers; this process's output by default.
    host: the address under which others reach the servers, and on which they listen; this host's
      by default.
    agent_host: where `AgentService` listens.
    command: the server's program with its first flags; `get_server_command` by default.
  """

  def __init__(
    self,
    config: AgentConfig,
    tfs_log: str | None = None,
    host: str | None = None,
    agent_host: str = LOOPBACK,
    command: str | None = None,
  ):
    self._config = config
    self._tfs_log = tfs_log
    self._host = host or ports.get_local_ip()
    self._agent_host = agent_host
    self._command = command or get_server_command(self._host)
    self._servers: list[TFSWrapper] = []
    self._ended = threading.Event()
    self._error: Exception | None = None
    self._stop_lock = threading.Lock()
    self._stopped = False

  @abc.abstractmethod
  def start(self) -> None:
    """Connects, registers and starts; returns before the servers have loaded anything."""

  @abc.abstractmethod
  def _stop_parts(self) -> None:
    """Ends what a subclass has started, in the opposite order."""

  def wait_for_termination(self) -> None:
    """Returns after `stop`.

    Raises:
      RuntimeError: a server ended, or could not be started; everything else is ended then.
    """
    while not self._ended.wait(_CHECK_SECS):
      for server in list(self._servers):
        status = server.poll()
        if status is not None and not self._stopped:
          self._fail(RuntimeError(f"server {server.server_type} ended with status {status}"))
    self.stop()
    if self._error is not None:
      raise self._error

  def stop(self) -> None:
    """Deregisters, ends the servers and everything else."""
    with self._stop_lock:
      if self._stopped:
        return
      self._stopped = True
    try:
      self._stop_parts()
    finally:
      for server in reversed(self._servers):
        server.stop()
      self._ended.set()

  def request_stop(self) -> None:
    """Lets `wait_for_termination` end everything; a signal handler may call it."""
    self._ended.set()

  def _fail(self, error: Exception) -> None:
    """Remembers why everything ends, and lets `wait_for_termination` end it."""
    logging.error("The agent ends: %s", error)
    self._error = self._error or error
    self._ended.set()

  def _start_server(self, server_type: str | None = None, config_path: str | None = None) -> None:
    server = TFSWrapper(self._config, server_type, self._command, config_path, self._tfs_log)
    server.start()
    self._servers.append(server)
