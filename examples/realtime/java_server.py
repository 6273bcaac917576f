"""A server in Java that can be killed, made to stand still, and started again on its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os
import pathlib
import shutil
import signal
import subprocess
import time

_START_SECS = 90
_POLL_SECS = 0.1
_JAVA_FLAGS = ("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class BrokerError(RuntimeError):
  """A server cannot be started; the message says why and what to do."""


def find_java() -> str:
  """Returns the program.

  Raises:
    BrokerError: there is none.
  """
  java = shutil.which("java")
  if java is None:
    raise BrokerError(
      "a Kafka broker needs Java: apt-get install default-jre-headless, or set MONOLITH_KAFKA to "
      "host:port of a broker that runs elsewhere"
    )
  return java


class JavaServer:
  """One process, and what it wrote.

  Args:
    name: what it is called in messages and in its log's name.
    folder: its settings and its log.
    home: the folder whose `libs` hold its classes.
  """

  def __init__(
    self, name: str, folder: str | os.PathLike[str], home: str | os.PathLike[str]
  ) -> None:
    self.name = name
    self._folder = pathlib.Path(folder).absolute()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._home = pathlib.Path(home)
    self._process: subprocess.Popen[bytes] | None = None

  @property
  def pid(self) -> int | None:
    """The process id while it lives."""
    process = self._process
    return process.pid if process is not None and process.poll() is None else None

  def write(self, name: str, text: str) -> pathlib.Path:
    """Writes a file of settings, and returns where it is."""
    path = self._folder / name
    path.write_text(text)
    return path

  def run_class(self, main: str, config: pathlib.Path) -> None:
    """Starts a class of `home` on a file of settings."""
    log4j = self.write(
      "log4j.properties",
      "log4j.rootLogger=WARN, stdout\nlog4j.appender.stdout=org.apache.log4j.ConsoleAppender\n"
      "log4j.appender.stdout.layout=org.apache.log4j.PatternLayout\n"
      "log4j.appender.stdout.layout.ConversionPattern=[%d] %p %m (%c)%n\n",
    )
    self.run(
      [find_java(), *_JAVA_FLAGS, f"-Dlog4j.configuration=file:{log4j}",
       "-Dzookeeper.forceSync=no", "-cp", f"{self._home}/libs/*", main, str(config)],
    )  # fmt: skip

  def run(self, command: Sequence[str]) -> None:
    """Starts a command."""
    with open(self._folder / f"{self.name}.log", "ab") as log:
      self._process = subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder
      )

  def wait(self, serves: Callable[[], bool]) -> None:
    """Returns when it serves.

    Raises:
      BrokerError: it ended, or does not serve in time; the message has the end of its log.
    """
    deadline = time.monotonic() + _START_SECS
    while not serves():
      if self.pid is None or time.monotonic() > deadline:
        text = (self._folder / f"{self.name}.log").read_text(errors="replace")[-3000:]
        self.kill()
        raise BrokerError(f"{self.name} of {self._home} did not start:\n{text}")
      time.sleep(_POLL_SECS)

  def kill(self) -> None:
    """Ends it with SIGKILL; what it has acknowledged is on disk."""
    process, self._process = self._process, None
    if process is not None:
      process.send_signal(signal.SIGKILL)
      process.wait()
