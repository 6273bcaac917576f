"""Processes that train in rounds, and the data that they train on."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

import numpy as np
import step_parts
import train_process

FOLDER = pathlib.Path(__file__).resolve().parent
NUM_IDS = 10_000_000
# All are seen once before the first round, so that rows are updated and few are created, as in a
# training run that has gone on for a while.
NUM_BATCHES = 48


@dataclasses.dataclass(frozen=True)
class Usage:
  """CPU seconds of a process, how many of them in the kernel, and its page faults."""

  cpu: float = 0.0
  kernel: float = 0.0
  faults: int = 0

  def __add__(self, other: Usage) -> Usage:
    return Usage(self.cpu + other.cpu, self.kernel + other.kernel, self.faults + other.faults)

  def __sub__(self, other: Usage) -> Usage:
    return Usage(self.cpu - other.cpu, self.kernel - other.kernel, self.faults - other.faults)


class Process:
  """A child that trains in rounds."""

  def __init__(
    self,
    role: str,
    data: train_process.Data,
    steps: int,
    cores: str | None = None,
    job: str = "job",
    in_flight: int = 1,
    options: Sequence[str] = (),
  ):
    """Args:
    role: what it does, of `train_process.ROLES`.
    data: what it trains on.
    steps: of a round.
    cores: those it may use, as `0-3`; by default all.
    job: servers and workers of one name belong together.
    in_flight: how many steps local training makes at the same time.
    options: more of them.
    """
    self.role = role if in_flight == 1 else f"{role}, {in_flight} steps"
    self._folder = tempfile.mkdtemp(prefix=f"{role}_", dir=data.folder)
    self._log = open(os.path.join(self._folder, "log"), "w+")
    self._process = subprocess.Popen(
      ([] if cores is None else ["taskset", "-c", cores])
      + [sys.executable, FOLDER / "train_process.py", role, data.folder]
      + [f"--features={data.features}", f"--batch={data.batch}"]
      + [f"--warm_up={NUM_BATCHES}", f"--steps={steps}", f"--job={job}"]
      + [f"--in_flight={in_flight}", *options],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      env={**os.environ, "CLOUDNATIVE_INET_ADDR": "127.0.0.1"},
    )
    self.seconds: list[float] = []
    self.usages: list[Usage] = []

  def usage(self) -> Usage:
    """Returns what all threads have used so far."""
    fields = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    program, kernel = int(fields[11]) / ticks, int(fields[12]) / ticks
    return Usage(program + kernel, kernel, int(fields[7]))

  def answer(self) -> str:
    line = self._process.stdout.readline()
    if not line:
      raise self._failure()
    return line.strip()

  def _failure(self) -> RuntimeError:
    self._log.seek(0)
    return RuntimeError(f"{self.role} ended:\n{self._log.read()[-5000:]}")

  def run_round(self, helpers: Sequence[Process] = ()) -> None:
    """Trains one round; its usage is that of this process and of `helpers`."""
    everyone = (self, *helpers)
    before = [process.usage() for process in everyone]
    self.begin_round()
    self.seconds.append(float(self.answer()))
    used = Usage()
    for process, start in zip(everyone, before):
      used += process.usage() - start
    self.usages.append(used)

  def begin_round(self) -> None:
    """Lets the process train a round; it will answer with the seconds."""
    print("", file=self._process.stdin, flush=True)

  def run_traced(self, steps: int, num_cores: int) -> step_parts.Parts:
    """Trains one round under the profiler, watches the threads, and tells where the time went."""
    folder = os.path.join(self._folder, "trace")
    states = step_parts.ThreadStates(self._process.pid)
    answers: list[str] = []
    print(folder, file=self._process.stdin, flush=True)
    waiter = threading.Thread(target=lambda: answers.append(self._process.stdout.readline()))
    waiter.start()
    states.watch(lambda: not waiter.is_alive())
    if not answers[0]:
      raise self._failure()
    _, begin, end = answers[0].split()
    ops = step_parts.read_trace(folder, int(begin))
    return step_parts.Parts(ops, states.samples, int(begin), int(end), steps, num_cores)

  def stop(self) -> None:
    self._process.stdin.close()
    self._process.kill()
    self._process.wait()


def write_data(data: train_process.Data) -> None:
  """Writes batches of ids, whose popular ones are spread over all int63, and random labels."""
  rng = np.random.default_rng(1)
  exponent = 1.05 - 1
  top = 1 - float(NUM_IDS + 1) ** -exponent
  with (
    open(os.path.join(data.folder, train_process.IDS_FILE), "wb") as ids_file,
    open(os.path.join(data.folder, train_process.LABELS_FILE), "wb") as labels_file,
  ):
    for _ in range(NUM_BATCHES):
      # As in embedding_table.py: the continuous law, inverted.
      uniform = rng.random([data.features, data.batch])
      ranks = ((1 - uniform * top) ** (-1 / exponent)).astype(np.uint64)
      ids = (ranks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(1)
      ids_file.write(ids.astype(np.int64).tobytes())
      labels = rng.integers(0, 2, data.batch)
      labels_file.write(labels.astype(np.float32).tobytes())
