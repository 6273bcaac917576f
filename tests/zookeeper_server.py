"""Starts a real ZooKeeper for tests, on a free port and in a temporary folder."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence

import pytest

from tests.free_ports import get_free_port

_JARS = "/usr/share/java"
# Debian puts all ways of logging there, two of which do not start together; the first one is taken.
_CLASS_PATH = f"{_JARS}/slf4j-simple.jar:{_JARS}/*"
_START_TIMEOUT_SECS = 60


def require_zookeeper() -> None:
  """Skips the test where Java or ZooKeeper is missing; on CI that is a failure."""
  if shutil.which("java") and glob.glob(f"{_JARS}/zookeeper*.jar"):
    return
  message = "needs ZooKeeper: apt-get install zookeeper default-jre-headless"
  if os.environ.get("CI") == "true":
    pytest.fail(message)
  pytest.skip(message)


class ZooKeeperServer:
  """A stand-alone server that can be stopped and started again with its data.

  Args:
    tick_time_ms: its unit of time.
    address: where it listens.
    prefix: what starts it, `ip netns exec ...` for another network.
  """

  def __init__(
    self, tick_time_ms: int = 500, address: str = "127.0.0.1", prefix: Sequence[str] = ()
  ):
    self._prefix = list(prefix)
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix="zookeeper"))
    self.port = get_free_port()
    self.hosts = f"{address}:{self.port}"
    self._config = self._folder / "zoo.cfg"
    self._config.write_text(
      f"dataDir={self._folder / 'data'}\n"
      f"clientPort={self.port}\n"
      f"clientPortAddress={address}\n"
      # Sessions live between 2 and 20 ticks: short, so that a killed client is noticed soon, and
      # long enough for a client that a busy machine lets wait.
      f"tickTime={tick_time_ms}\n"
      "maxClientCnxns=0\n"
      "admin.enableServer=false\n"
    )
    self._process = None

  def start(self) -> None:
    """Starts the server and waits until it serves."""
    with open(self._folder / "log", "ab") as log:
      self._process = subprocess.Popen(
        # Written data survives the end of the process, if not that of the machine: without
        # waiting for a busy disk after every write.
        [*self._prefix, "java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no",
         "-cp", _CLASS_PATH,
         "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self._config)],
        stdout=log, stderr=log, stdin=subprocess.DEVNULL,
      )  # fmt: skip
    deadline = time.monotonic() + _START_TIMEOUT_SECS
    while not self._is_serving():
      if self._process.poll() is not None or time.monotonic() > deadline:
        log_text = (self._folder / "log").read_text(errors="replace")[-4000:]
        self.stop()
        raise RuntimeError(f"ZooKeeper did not start:\n{log_text}")
      time.sleep(0.1)

  def stop(self) -> None:
    """Kills the server, as a crash would; what it acknowledged stays on disk."""
    if self._process is not None:
      self._process.send_signal(signal.SIGKILL)
      self._process.wait()
      self._process = None

  def forget(self) -> None:
    """Deletes the data of a stopped server: the next start knows no node and no session."""
    shutil.rmtree(self._folder / "data", ignore_errors=True)

  def close(self) -> None:
    self.stop()
    shutil.rmtree(self._folder, ignore_errors=True)

  def __enter__(self) -> ZooKeeperServer:
    try:
      self.start()
    except BaseException:
      self.close()
      raise
    return self

  def __exit__(self, *unused_args) -> None:
    self.close()

  def _is_serving(self) -> bool:
    """Asks with `srvr`, which every server answers; a starting one says it is not serving."""
    if self._prefix:
      return "binding to port" in (self._folder / "log").read_text(errors="replace")
    try:
      with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
        s.sendall(b"srvr")
        return b"Mode: standalone" in s.recv(4096)
    except OSError:
      return False
