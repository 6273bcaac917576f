"""Ranks of synchronous training as processes of this machine, for tests."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence

import pytest

from monolith.native_training.ranks import local as local_ranks
from monolith.native_training.settings import rank_environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENGINES = (rank_environment.HOROVOD, rank_environment.TENSORFLOW)


def require_engine(engine: str) -> None:
  """Skips the test where the engine is missing; on CI that is a failure."""
  if engine != rank_environment.HOROVOD or importlib.util.find_spec("horovod") is not None:
    return
  message = "needs Horovod: make horovod"
  if os.environ.get("CI") == "true":
    pytest.fail(message)
  pytest.skip(message)


class RankProcesses(local_ranks.LocalRanks):
  """Ranks whose output is kept.

  Args:
    count: how many.
    command: arguments of the Python interpreter.
    engine: what carries out their exchanges; by default Horovod where it is installed.
  """

  def __init__(self, count: int, command: Sequence[str], engine: str | None = None):
    self._logs = [tempfile.TemporaryFile() for _ in range(count)]
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    super().__init__(count, command, env, self._logs, engine)

  def output(self, rank: int) -> str:
    """Returns what a rank has printed so far."""
    self._logs[rank].seek(0)
    return self._logs[rank].read().decode(errors="replace")

  def wait(self, timeout: float) -> list[int]:
    """Returns the exit statuses.

    Raises:
      TimeoutError: a rank still runs; the message shows what the ranks printed.
    """
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in self.processes):
      if time.monotonic() > deadline:
        raise TimeoutError(f"ranks still run after {timeout} s:\n{self.report()}")
      time.sleep(0.1)
    return [process.returncode for process in self.processes]

  def report(self) -> str:
    """Returns the ends of all outputs."""
    return "\n".join(
      f"--- rank {rank}, status {process.poll()}:\n{self.output(rank)[-6000:]}"
      for rank, process in enumerate(self.processes)
    )

  def close(self) -> None:
    super().close()
    for log in self._logs:
      log.close()
