"""Runs a ZooKeeper on loopback, from the classes that come with Kafka."""

from __future__ import annotations

import os
import pathlib
import socket

from monolith.agent_service.ports import find_free_port

from examples.realtime.java_server import JavaServer

_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class LocalZooKeeper:
  """A ZooKeeper of one server.

  Args:
    folder: data, settings and log; one that is started again on it has its nodes.
    home: the folder of an unpacked Kafka that has ZooKeeper in its `libs`.

  Attributes:
    address: `host:port`.
  """

  def __init__(self, folder: str | os.PathLike[str], home: str | os.PathLike[str]):
    self._folder = pathlib.Path(folder).absolute()
    self._port = find_free_port()
    self.address = f"127.0.0.1:{self._port}"
    self._server = JavaServer("zookeeper", self._folder, home)

  @property
  def pid(self) -> int | None:
    """The process id while it lives."""
    return self._server.pid

  def start(self) -> None:
    """Starts it unless it runs, and waits until it serves.

    Raises:
      examples.realtime.java_server.BrokerError: it does not start.
    """
    if self.pid is not None:
      return
    config = self._server.write(
      "zookeeper.properties",
      f"dataDir={self._folder / 'zookeeper'}\nclientPort={self._port}\n"
      "clientPortAddress=127.0.0.1\ntickTime=1000\nmaxClientCnxns=0\n",
    )
    self._server.run_class(_MAIN, config)
    self._server.wait(self._serves)

  def kill(self) -> None:
    """Kills it with SIGKILL."""
    self._server.kill()

  def _serves(self) -> bool:
    try:
      with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connection:
        connection.sendall(b"srvr")
        return b"Mode: standalone" in connection.recv(4096)
    except OSError:
      return False
