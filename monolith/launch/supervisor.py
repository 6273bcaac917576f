"""Starts the processes of a job, watches and restarts them, and ends with the job's status.

A process that dies is restarted, as a training run expects: workers join, a chief restores the
newest checkpoint, and a server gets its rows from there. A process that dies too often ends the
job.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from monolith.launch import placement

_POLL_SECONDS = 0.1
_RESTARTS_WITHIN_SECONDS = 3600
_LONGEST_DELAY_SECONDS = 30
_END_SECONDS = 10  # from SIGTERM to SIGKILL
_REPORT_SECONDS = 60  # between lines of progress where there is no terminal
_SHOWN_LINES = 20  # of the log of a process that failed
_SHOWN_BYTES = 1 << 16  # in which these are looked for
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20  # of a log, at once
# Without these limits ssh waits forever for a host that is gone. It tries to reach a host for ten
# seconds, and ends a connection after fifty seconds of silence.
SSH = (
  *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
  *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=4"),
)
_SSH_FAILED = 255  # what ssh ends with where it has no connection, and what a program may end with
# Variables of this environment that a process on another host needs, too.
_FORWARDED = ("MONOLITH_", "TF_", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")

# Runs a program on another host. Signals arrive through standard input, as ssh has no other way.
# Its end, when the connection or this launcher is gone, means SIGTERM.
_REMOTE = """exec 3<&0
{command} </dev/null 3<&- & child=$!
{{
  while read -r name <&3; do kill -s "$name" "$child"; done
  kill -s TERM "$child"
  sleep {grace}
  kill -s KILL "$child"
}} >/dev/null 2>&1 & reader=$!
wait "$child"; status=$?
kill "$reader" 2>/dev/null
exit "$status"
"""


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of a job.

  Attributes:
    program: the command line of each process, from `python` on; `{server_type}`, `{index}`,
      `{num_ps}`, `{num_workers}` and `{tf_config}` are replaced by the values of the process.
    log_dir: the folder of the processes' logs.
    ssh: the command that runs a command on another host.
    max_restarts: the most restarts of a process within an hour.
    grace_seconds: the time for the others to end after the chief, and for the chief after a signal.
    follow: show every line of every process instead of one line of progress.
  """

  program: tuple[str, ...]
  log_dir: pathlib.Path
  ssh: tuple[str, ...] = SSH
  max_restarts: int = 3
  grace_seconds: float = 60
  follow: bool = False


class _Process:
  """A task, the process that runs it now, and its log."""

  def __init__(self, task: placement.Task, log_dir: pathlib.Path) -> None:
    self.task = task
    self.running: subprocess.Popen | None = None
    self.status: int | None = None  # of the last one that ended
    self.num_starts = 0
    self.failures: collections.deque[float] = collections.deque()  # when, in the last hour
    self.start_at: float | None = 0.0  # None: not to be started again
    self.last_line = ""
    self.log = log_dir / f"{task.name}.log"
    self._log_position = self.log.stat().st_size if self.log.exists() else 0

  def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
    self.num_starts += 1
    self.start_at = None
    # The folder may have been deleted: some jobs outlive temporary folders.
    self.log.parent.mkdir(parents=True, exist_ok=True)
    with self.log.open("ab") as log:
      self.running = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE if self.task.host else subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal goes to the launcher alone, which ends the job in order.
        start_new_session=True,
        preexec_fn=_die_with_parent,
      )

  def send(self, number: int) -> None:
    """Sends a signal, through ssh if necessary."""
    if self.running is None or self.running.poll() is not None:
      return
    if not self.task.host:
      self.running.send_signal(number)
      return
    try:
      assert self.running.stdin is not None
      self.running.stdin.write(f"{signal.Signals(number).name[3:]}\n".encode())
      self.running.stdin.flush()
    except OSError:  # the connection is gone, and with it the process
      pass

  def has_ended(self) -> bool:
    """Returns whether the process has ended; true once for each, whose status is then known."""
    if self.running is None or self.running.poll() is None:
      return False
    code = self.running.returncode
    self.status = 128 - code if code < 0 else code
    if self.running.stdin:
      # Closing writes once more to a broken connection.
      with contextlib.suppress(OSError):
        self.running.stdin.close()
    self.running = None
    return True

  def close(self) -> None:
    """Waits for a killed process; cuts a connection that does not end."""
    if self.running is None:
      return
    try:
      self.running.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
      self.running.kill()
    self.has_ended()

  def new_lines(self) -> list[str]:
    """Returns the complete lines added to its log since the last call."""
    try:
      with self.log.open("rb") as log:
        if log.seek(0, os.SEEK_END) < self._log_position:  # it was emptied, or begun anew
          self._log_position = 0
        log.seek(self._log_position)
        text = log.read(_READ_BYTES)
    except FileNotFoundError:
      return []
    whole = text[: text.rfind(b"\n") + 1]
    if not whole and len(text) == _READ_BYTES:
      whole = text  # the part of a line that has no end
    self._log_position += len(whole)
    lines = [line for line in whole.decode("utf-8", "replace").splitlines() if line.strip()]
    if lines:
      self.last_line = lines[-1]
    return lines

  def last_lines(self) -> list[str]:
    """Returns the end of its log, which may have gigabytes; nothing if the log is gone."""
    try:
      with self.log.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return log.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
    except FileNotFoundError:
      return []


def _die_with_parent() -> None:
  # A launcher that is killed leaves nothing behind.
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _describe_end(process: _Process) -> str:
  text = f"{process.task.title} ended with status {process.status}"
  if process.task.host and process.status == _SSH_FAILED:
    text += ", as ssh does where it cannot reach the host or has lost it"
  return f"{text}; {process.log}"


def _discard(screen: TextIO) -> None:
  """Redirects a stream whose reader is gone to nowhere.

  Otherwise flushing its buffer would fail again when Python ends, and become the exit status.
  """
  with contextlib.suppress(OSError, ValueError):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, screen.fileno())
    os.close(nowhere)


class Supervisor:
  """Runs those processes of a job that this launcher starts.

  Args:
    job: all processes.
    own: the processes to start here: all of them, or one if Slurm or Kubernetes starts the others.
    options: the options of the job.
    screen: the stream for progress.
  """

  def __init__(
    self,
    job: placement.Job,
    own: Sequence[placement.Task],
    options: Options,
    screen: TextIO = sys.stderr,
  ) -> None:
    options.log_dir.mkdir(parents=True, exist_ok=True)
    self._job = job
    self._options = options
    self._screen = screen
    self._processes = [_Process(task, options.log_dir) for task in own]
    self._chief = next((p for p in self._processes if p.task.role == placement.CHIEF), None)
    self._signals: list[int] = []
    self._failed: int | None = None
    self._shown = ""
    self._shown_at = 0.0
    self._began = time.monotonic()

  def run(self) -> int:
    """Runs the job to its end.

    Returns:
      The chief's exit status, which after a signal is the signal's number; or the status of the
      process that failed too often.
    """
    old = {
      number: signal.signal(number, lambda n, _: self._signals.append(n))
      for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
      while not self._is_over():
        self._start_those_due()
        self._look_at_those_that_ended()
        self._show()
        time.sleep(_POLL_SECONDS)
      return self._end()
    finally:
      for process in self._processes:
        process.send(signal.SIGKILL)
      for process in self._processes:
        process.close()
      for number, handler in old.items():
        signal.signal(number, handler)

  def _is_over(self) -> bool:
    if self._signals or self._failed is not None:
      return True
    if self._chief is not None:
      return self._is_finished(self._chief)
    return all(self._is_finished(process) for process in self._processes)

  def _is_finished(self, process: _Process) -> bool:
    return process.running is None and process.start_at is None and process.status == 0

  def _start_those_due(self) -> None:
    now = time.monotonic()
    for process in self._processes:
      if process.running is None and process.start_at is not None and now >= process.start_at:
        command, environment = self._command(process.task)
        process.start(command, environment)

  def _command(self, task: placement.Task) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a task, and its environment."""
    own = {"TF_CONFIG": self._job.tf_config(task), "PYTHONUNBUFFERED": "1"}
    values = {
      "server_type": task.server_type,
      "index": str(task.worker_index),
      "num_ps": str(self._job.count(placement.SERVER)),
      "num_workers": str(self._job.count(placement.CHIEF, placement.WORKER)),
      "tf_config": own["TF_CONFIG"],
    }
    program = []
    for word in self._options.program:
      for name, value in values.items():
        word = word.replace("{" + name + "}", value)
      program.append(word)
    if not task.host:
      return program, {**os.environ, **own}
    forwarded = {k: v for k, v in os.environ.items() if k.startswith(_FORWARDED)}
    settings = [f"{name}={value}" for name, value in {**forwarded, **own}.items()]
    command = f"cd {shlex.quote(os.getcwd())} || exit 1\n" + _REMOTE.format(
      command=shlex.join(["env", *settings, *program]), grace=self._options.grace_seconds
    )
    return [*self._options.ssh, task.host, command], dict(os.environ)

  def _look_at_those_that_ended(self) -> None:
    for process in self._processes:
      if not process.has_ended() or process.status == 0:
        continue
      now = time.monotonic()
      process.failures.append(now)
      while now - process.failures[0] > _RESTARTS_WITHIN_SECONDS:
        process.failures.popleft()
      restarts = len(process.failures)
      again = restarts <= self._options.max_restarts
      self._say(_describe_end(process))
      if again:
        delay = min(2 ** (restarts - 1), _LONGEST_DELAY_SECONDS)
        process.start_at = now + delay
        self._say(
          f"{process.task.title} starts again in {delay} s ({restarts} of "
          f"{self._options.max_restarts} within an hour)"
        )
        continue
      for line in process.last_lines():
        self._print(f"  {line}")
      self._failed = process.status
      return

  def _end(self) -> int:
    """Ends the remaining processes, the chief first; returns the job's status."""
    if self._signals or self._failed is not None:
      number = self._signals[0] if self._signals else signal.SIGTERM
      first = [self._chief] if self._chief else self._processes
      if any(process.running for process in first):
        self._say(
          f"{signal.Signals(number).name} to {first[0].task.title}, which saves, then to all"
        )
      for process in first:
        process.send(number)
      self._wait(first, self._options.grace_seconds)
      status = self._failed
      if status is None:
        status = self._status_of(first[0], 128 + number)
    else:
      status = 0
      # Servers and workers end by themselves when the chief tells them.
      self._wait(self._processes, self._options.grace_seconds)
      left = [process.task.title for process in self._processes if process.running]
      if left:
        seconds = self._options.grace_seconds
        self._say(f"still there {seconds:g} s after the chief has ended: {', '.join(left)}")
    for process in self._processes:
      process.send(signal.SIGTERM)
    self._wait(self._processes, _END_SECONDS)
    self._show(last=True)
    self._say(f"the job ended with status {status}; logs are in {self._options.log_dir}")
    return status

  def _status_of(self, process: _Process, default: int) -> int:
    return default if process.running or process.status is None else process.status

  def _wait(self, processes: Sequence[_Process], seconds: float) -> None:
    """Waits until processes have ended, up to a time limit or another signal."""
    deadline = time.monotonic() + seconds
    signals = len(self._signals)
    while time.monotonic() < deadline and len(self._signals) == signals:
      for process in self._processes:
        if process.has_ended() and process.status:
          self._say(_describe_end(process))
      if not any(process.running for process in processes):
        return
      self._show()
      time.sleep(_POLL_SECONDS)
    if len(self._signals) > signals:
      for process in self._processes:
        process.send(signal.SIGKILL)

  def _say(self, text: str) -> None:
    self._clear()
    self._print(f"[launch] {text}")

  def _print(self, text: str, end: str = "\n") -> None:
    """Prints to the screen, if it still exists.

    Ctrl-C also ends a program that the output is piped to, and the chief must save nevertheless.
    """
    try:
      print(text, end=end, file=self._screen, flush=True)
    except OSError:
      _discard(self._screen)

  def _clear(self) -> None:
    if self._shown and self._screen.isatty():
      self._print("\r\x1b[K", end="")
      self._shown = ""

  def _show(self, last: bool = False) -> None:
    """Shows the line of progress, or the output of processes."""
    for process in self._processes:
      while lines := process.new_lines():
        for line in lines if self._options.follow else ():
          self._print(f"[{process.task.name}] {line}")
        if not last:
          break  # more comes soon
    if self._options.follow:
      return
    counts = []
    for word, roles in (
      ("servers", (placement.SERVER,)),
      ("workers", (placement.CHIEF, placement.WORKER)),
    ):
      own = [process for process in self._processes if process.task.role in roles]
      if own:
        counts.append(f"{word} {sum(process.running is not None for process in own)}/{len(own)}")
    restarts = sum(max(0, process.num_starts - 1) for process in self._processes)
    if restarts:
      counts.append(f"started again {restarts}")
    told = self._chief or self._processes[0]
    text = f"{', '.join(counts)} | {told.task.name}: {told.last_line.strip()}"
    now = time.monotonic()
    if self._screen.isatty():
      clock = time.strftime("%H:%M:%S", time.gmtime(now - self._began))
      line = f"{clock} {text}"[: shutil.get_terminal_size().columns - 1]
      # A program's output must not move the cursor.
      line = "".join(c if c.isprintable() else " " for c in line)
      if line != self._shown:
        self._clear()
        self._print(f"\r{line}", end="")
        self._shown = line
    elif (last or now - self._shown_at > _REPORT_SECONDS) and text != self._shown:
      self._print(f"[launch] {text}")
      self._shown, self._shown_at = text, now
