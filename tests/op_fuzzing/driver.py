"""Starts workers, hands them calls, and reports the calls that ended or stopped one."""

from __future__ import annotations

import dataclasses
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

# A call takes milliseconds; this is for machines that are busy with something else.
_CASE_SECONDS = 30.0
_START_SECONDS = 300.0
_END_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Failure:
  """A call that did what no call may do."""

  op: str
  seed: int
  what: str

  def __str__(self) -> str:
    return f"{self.op} seed {self.seed}: {self.what}"


def run(
  calls: Iterable[tuple[str, int]], processes: int, case_seconds: float = _CASE_SECONDS
) -> list[Failure]:
  """Makes the calls (op, seed) in that many processes; returns those that failed, sorted.

  Args:
    calls: what to call.
    processes: how many at a time.
    case_seconds: after which a call counts as one that hangs.
  """
  waiting: queue.Queue = queue.Queue()
  for call in calls:
    waiting.put(call)
  failures: list[Failure] = []
  threads = [
    threading.Thread(target=_serve, args=(waiting, failures, case_seconds), daemon=True)
    for _ in range(max(1, processes))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return sorted(failures, key=lambda f: (f.op, f.seed))


def describe(failure: Failure) -> str:
  """Makes the call of a failure in a process of its own; returns it and what was printed."""
  command = _command() + [failure.op, str(failure.seed)]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, errors="replace", timeout=_START_SECONDS
    )
    ended = f"exit status {done.returncode}"
    output = done.stdout + done.stderr[-3000:]
  except subprocess.TimeoutExpired as error:
    ended = f"stopped after {_START_SECONDS} s"
    output = (error.stdout or b"").decode(errors="replace")
  return f"{failure}\n{output}\nalone: {ended}; again with: {' '.join(command)}"


def _serve(waiting: queue.Queue, failures: list[Failure], case_seconds: float) -> None:
  worker = None
  while True:
    try:
      op, seed = waiting.get_nowait()
    except queue.Empty:
      break
    if worker is None:
      worker = _Worker(case_seconds)
    what = worker.call(op, seed)
    if what:
      failures.append(Failure(op, seed, what))
      print(failures[-1], file=sys.stderr, flush=True)
      worker.stop()
      worker = None
  if worker is not None:
    worker.stop()


class _Worker:
  def __init__(self, case_seconds: float):
    self._case_seconds = case_seconds
    # A process group of its own: whatever the call started ends with it.
    self._process = subprocess.Popen(
      _command(),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    self._fresh = True

  def call(self, op: str, seed: int) -> str:
    """Returns what went wrong, or nothing."""
    if self._fresh and not self._read_line(_START_SECONDS):
      return f"the worker did not start: {self._ended()}"
    self._fresh = False
    try:
      self._process.stdin.write(f"{op} {seed}\n".encode())
      self._process.stdin.flush()
    except BrokenPipeError:
      return self._ended()
    answer = self._read_line(self._case_seconds)
    if answer is None:
      return f"no answer within {self._case_seconds} s"
    if not answer:
      return self._ended()
    return "" if answer == "ok" else answer

  def _read_line(self, seconds: float) -> str | None:
    """Returns None when nothing comes in time, an empty text at the end of the output."""
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
      left = max(0.0, deadline - time.monotonic())
      if not select.select([self._process.stdout], [], [], left)[0]:
        return None
      piece = os.read(self._process.stdout.fileno(), 1000)
      if not piece:
        return ""
      line += piece
    return line.decode().strip()

  def stop(self) -> None:
    try:
      os.killpg(self._process.pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
    self._process.wait()
    self._process.stdin.close()
    self._process.stdout.close()

  def _ended(self) -> str:
    try:
      return f"the process ended with status {self._process.wait(timeout=_END_SECONDS)}"
    except subprocess.TimeoutExpired:
      return "the process is alive, but does not answer"


def _command() -> list[str]:
  return [sys.executable, "-m", "tests.op_fuzzing.worker"]
