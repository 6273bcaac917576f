"""The process of a server."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from absl import logging

from monolith.agent_service import ports
from monolith.agent_service.utils import AgentConfig, DeployType

_STOP_SECS = 30
# Lets the kernel end the server when the agent is killed: a server without an agent is not
# registered, and keeps its ports from the next one.
_LAUNCHER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
  libc.prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
  sys.exit("the agent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def get_server_command(host: str) -> str:
  """Returns the command line of the server program, without flags of a configuration.

  Args:
    host: the address on which it shall listen.

  `MONOLITH_SERVING_COMMAND` replaces it, for another server such as TensorFlow Serving.
  """
  command = os.environ.get("MONOLITH_SERVING_COMMAND")
  if command:
    return command
  return shlex.join(
    [sys.executable, "-m", "monolith.serving.model_server", f"--bind_address={host}"]
  )


class TFSWrapper:
  """Starts a server, tells whether it lives and ends it.

  Args:
    config: the agent's settings, which say ports and flags.
    server_type: the role; needed only in a mixed process.
    command: the server's program with its first flags; `get_server_command` by default.
    config_path: where to write the configuration of models; a temporary file by default.
    log_path: where its output goes; this process's by default.
    environment: variables besides those of this process.
  """

  def __init__(
    self,
    config: AgentConfig,
    server_type: str | None = None,
    command: str | None = None,
    config_path: str | None = None,
    log_path: str | None = None,
    environment: Mapping[str, str] | None = None,
  ):
    self.server_type = DeployType(config.deploy_type).compat_server_type(server_type)
    self._config = config
    self._command = command or get_server_command("127.0.0.1")
    self._config_path = config_path
    self._is_config_own = config_path is None
    self._log_path = log_path
    self._environment = dict(environment or {})
    self._process: subprocess.Popen | None = None

  @property
  def pid(self) -> int | None:
    return None if self._process is None else self._process.pid

  @property
  def model_config_file(self) -> str | None:
    """The file that says which models the server has; `None` before the start."""
    return self._config_path

  def start(self) -> None:
    """Starts the process.

    Raises:
      OSError: the program cannot be started.
      ValueError: a setting that the server needs is missing.
    """
    words = shlex.split(self._config.get_cmd(self._command, self.server_type, self._config_path))
    if self._config_path is None:
      prefix = "--model_config_file="
      self._config_path = next(w[len(prefix) :] for w in words if w.startswith(prefix))
    environment = {
      **os.environ,
      # The server asks the agent at this port who serves the other parts of a model.
      "PORT2": str(self._config.agent_port),
      **self._environment,
    }
    if self._config.preload_jemalloc:
      _preload_jemalloc(environment)
    # The kernel takes the thread that starts a process for its parent, so that thread must live as
    # long as the process does.
    started: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(
      target=self._run, args=(words, environment, started), name="server-process", daemon=True
    ).start()
    result = started.get()
    if isinstance(result, Exception):
      raise result
    self._process = result
    logging.info("Server %s has process id %d: %s", self.server_type, self._process.pid, words)

  def _run(self, words: list[str], environment: dict[str, str], started: queue.SimpleQueue) -> None:
    try:
      if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"the server's program {words[0]!r} is not found")
      with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(self._log_path, "ab")) if self._log_path else None
        process = subprocess.Popen(
          [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *words],
          env=environment,
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT if log else None,
        )
    except Exception as error:
      started.put(error)
      return
    started.put(process)
    process.wait()

  def poll(self) -> int | None:
    """Returns the exit status of a process that ended, `None` while it lives."""
    return None if self._process is None else self._process.poll()

  def is_listening(self) -> bool:
    """Tells whether the server's gRPC port is open."""
    return ports.check_port_open(self._config.get_server_port(self.server_type))

  def stop(self) -> None:
    """Asks the process to end, and kills it if it does not."""
    self._end_process()
    if self._is_config_own and self._config_path is not None:
      os.remove(self._config_path)
      self._config_path = None

  def _end_process(self) -> None:
    if self._process is None or self._process.poll() is not None:
      return
    self._process.send_signal(signal.SIGTERM)
    try:
      self._process.wait(_STOP_SECS)
    except subprocess.TimeoutExpired:
      logging.warning("Server %s does not end, killing it", self.server_type)
      self._process.kill()
      self._process.wait()


def _preload_jemalloc(environment: dict[str, str]) -> None:
  library = ctypes.util.find_library("jemalloc")
  if library is None:
    logging.info("jemalloc is not installed; the server uses the allocator it was built with")
    return
  preloaded = environment.get("LD_PRELOAD")
  environment["LD_PRELOAD"] = f"{library}:{preloaded}" if preloaded else library
