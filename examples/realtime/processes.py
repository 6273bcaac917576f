"""Starts, kills and restarts the processes of the demo, and knows how each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import threading
import time

RUNNING, DEAD, STOPPED = "running", "dead", "stopped"
_POLL_SECS = 0.2
_STOP_SECS = 10


@dataclasses.dataclass(frozen=True)
class Command:
  """Describes the command of one process.

  Attributes:
    name: what it is called in messages and in its log's name.
    arguments: program and arguments.
    environment: variables beyond those of this process.
    unset: variables of this process that it must not have.
    niceness: how far it stands back where processes want the same core, 0 to 19.
  """

  name: str
  arguments: Sequence[str]
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unset: Sequence[str] = ()
  niceness: int = 0


def child_pids(pid: int) -> list[int]:
  """Returns the processes that a process has started and that live."""
  found = []
  try:
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
      found += [int(child) for child in (task / "children").read_text().split()]
  except OSError:
    pass  # it is ending
  return [child for child in found if not _is_zombie(child)]


def _is_zombie(pid: int) -> bool:
  try:
    return "State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return True


class Process:
  """One process that can be started again.

  Args:
    command: what it runs.
    folder: where its output goes, to `<name>.log`.

  Attributes:
    starts: how often it was started.
  """

  def __init__(self, command: Command, folder: str | os.PathLike[str]):
    self.name = command.name
    self.log = pathlib.Path(folder, f"{command.name}.log")
    self.starts = 0
    self._command = command
    self._process: subprocess.Popen[bytes] | None = None
    self._is_wanted = False

  @property
  def state(self) -> str:
    """`running`, `stopped` (by us) or `dead`."""
    if self.pid is not None:
      return RUNNING
    return DEAD if self._is_wanted else STOPPED

  @property
  def pid(self) -> int | None:
    """The process id while it lives."""
    process = self._process
    return process.pid if process is not None and process.poll() is None else None

  def start(self) -> None:
    """Starts it unless it runs."""
    self._is_wanted = True
    if self.pid is not None:
      return
    inherited = {k: v for k, v in os.environ.items() if k not in self._command.unset}
    with open(self.log, "ab") as log:
      self._process = subprocess.Popen(
        list(self._command.arguments),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**inherited, **self._command.environment},
        # A Ctrl-C is for the demo, which ends its processes in order.
        start_new_session=True,
      )
    if self._command.niceness:
      # Its threads come later, and inherit it. Nobody may stand less far back than this process.
      niceness = max(self._command.niceness, os.getpriority(os.PRIO_PROCESS, 0))
      with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
      # Where Linux shares cores among sessions first, that counts within this one's only.
      with contextlib.suppress(OSError):
        pathlib.Path(f"/proc/{self._process.pid}/autogroup").write_text(str(niceness))
    self.starts += 1

  def kill(self) -> None:
    """Ends it with SIGKILL, as a crash would; it counts as dead until it is started again."""
    if self._process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()

  def terminate(self) -> None:
    """Asks it with SIGTERM to end, and does not wait for that."""
    # Once: a second signal tells some not to finish what they do.
    if self._is_wanted and self._process is not None and self._process.poll() is None:
      self._process.terminate()
    self._is_wanted = False

  def stop(self) -> None:
    """Ends it with SIGTERM, and with SIGKILL where that does not help."""
    self.terminate()
    process = self._process
    if process is None or process.poll() is not None:
      return
    try:
      process.wait(_STOP_SECS)
    except subprocess.TimeoutExpired:
      self.kill()

  def log_tail(self, num_bytes: int = 2000) -> str:
    """Returns the end of its output."""
    try:
      with open(self.log, "rb") as file:
        file.seek(max(0, self.log.stat().st_size - num_bytes))
        return file.read().decode(errors="replace")
    except OSError:
      return ""


class Supervisor:
  """Keeps processes alive: one that died is started again after a while.

  Args:
    folder: where their output goes.
    restart_secs: how long a process stays dead.
  """

  def __init__(self, folder: str | os.PathLike[str], restart_secs: float = 1.0):
    self._folder = pathlib.Path(folder)
    self._folder.mkdir(parents=True, exist_ok=True)
    self._restart_secs = restart_secs
    self._processes: dict[str, Process] = {}
    self._died: dict[str, float] = {}
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

  def add(self, command: Command) -> Process:
    """Starts a process, from now on kept alive."""
    process = self._processes[command.name] = Process(command, self._folder)
    process.start()
    if not self._thread.is_alive():
      self._thread.start()
    return process

  def __getitem__(self, name: str) -> Process:
    return self._processes[name]

  def names(self) -> list[str]:
    """Returns the names of all processes."""
    return list(self._processes)

  def states(self) -> dict[str, dict[str, object]]:
    """Returns state, process id and number of starts by name."""
    return {
      name: {"state": p.state, "pid": p.pid, "starts": p.starts}
      for name, p in list(self._processes.items())
    }

  def kill(self, name: str, away_secs: float | None = None) -> None:
    """Kills a process; it is started again after `away_secs`, by default the supervisor's."""
    self._processes[name].kill()
    if away_secs is not None:
      self._died[name] = time.monotonic() + away_secs - self._restart_secs

  def stop(self) -> None:
    """Ends all processes, all at the same time."""
    self._stopping.set()
    if self._thread.is_alive():
      self._thread.join()
    for process in self._processes.values():
      process.terminate()
    for process in self._processes.values():
      process.stop()

  def wait_for(
    self, what: str, is_true: Callable[[], object], timeout_secs: float, *names: str
  ) -> None:
    """Returns when something is true.

    Args:
      what: what is waited for, for the message.
      is_true: asked again and again.
      timeout_secs: how long.
      *names: the processes whose output explains it if it does not come true.

    Raises:
      TimeoutError: it is not true in time.
    """
    deadline = time.monotonic() + timeout_secs
    while not is_true():
      if time.monotonic() > deadline:
        logs = "\n".join(f"--- {n}\n{self._processes[n].log_tail()}" for n in names)
        raise TimeoutError(f"{what} took more than {timeout_secs:.0f} s\n{logs}")
      time.sleep(_POLL_SECS)

  def _watch(self) -> None:
    while not self._stopping.wait(_POLL_SECS):
      now = time.monotonic()
      for name, process in list(self._processes.items()):
        if process.state != DEAD:
          self._died.pop(name, None)
        elif now - self._died.setdefault(name, now) >= self._restart_secs:
          process.start()
