"""How many servers a job needs, and what 64 of them would do, reckoned from measured parts.

  python benchmarks/cluster_size.py --rows 10e9 [--dim 16] [--servers 64] [--workers 32] ...

Nothing is measured here. What a row and an id cost comes from `scale.py`, run on 16 cores, and is a
default that other figures replace. The simulation lets every worker look up, compute and push as a
driver does, with lookups ahead of the step and pushes behind it, and lets messages wait for each
other at servers and on links. docs/scale.md explains the formulas.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import math

import numpy as np

_GB = 1e9
_ID_BYTES = 8
# The share of a machine's memory: the rest is for messages, TensorFlow, the system, and growth.
_USED_MEMORY = 0.8
_HOURS_OF_MONTH = 730


@dataclasses.dataclass(frozen=True)
class Job:
  """Says what is to be trained, on what.

  Attributes:
    rows: of all tables.
    dim: floats of a row's vector.
    state: floats of optimizer state for each of them: 1 for Adagrad, 2 for Adam.
    features: ids of an example.
    batch: examples of a step.
    distinct: the share of a batch's ids that are left when each counts once.
    workers: how many.
    examples: that a worker trains in a second where it waits for no server.
    servers: how many.
    memory: bytes of a server.
    cores: of a server.
    link: bytes per second to and from a server, and a worker.
    delay: seconds that a message is under way.
    message: seconds of a server's core for a message, besides what ids cost. An assumption.
    lookup: ids per second of a core.
    update: the same.
    overhead: bytes of a row besides its floats, index included.
    saved: bytes of a row in a checkpoint besides its floats.
    disk: bytes per second of a save of one server.
    read: of a restore.
    price: of a machine-hour, in any currency. An example.
  """

  rows: float = 1e9
  dim: int = 16
  state: int = 1
  features: int = 26
  batch: int = 4096
  distinct: float = 0.55
  workers: int = 32
  examples: float = 500e3
  servers: int = 64
  memory: float = 64 * _GB
  cores: int = 16
  link: float = 25e9 / 8
  delay: float = 50e-6
  message: float = 100e-6
  lookup: float = 14e6
  update: float = 4.5e6
  overhead: float = 24.3
  saved: float = 69
  disk: float = 1.3e9
  read: float = 2.1e9
  price: float = 1.0

  @property
  def row_bytes(self) -> float:
    """Bytes of a row in memory."""
    return 4 * self.dim * (1 + self.state) + self.overhead

  @property
  def saved_bytes(self) -> float:
    """Bytes of a row in a checkpoint."""
    return 4 * self.dim * (1 + self.state) + self.saved

  @property
  def fewest_servers(self) -> int:
    """The servers that hold the rows."""
    return math.ceil(self.rows * self.row_bytes / (_USED_MEMORY * self.memory))

  @property
  def ids(self) -> float:
    """Distinct ids of a step of one worker."""
    return self.batch * self.features * self.distinct

  @property
  def step(self) -> float:
    """Seconds of a worker's step where it waits for no server."""
    return self.batch / self.examples

  @property
  def month_price(self) -> float:
    """The price of all machines for a month."""
    return (self.servers + self.workers) * self.price * _HOURS_OF_MONTH

  def server_bytes(self) -> float:
    """Bytes that leave a server in a second: vectors; as many gradients come, with their ids."""
    return self.workers / self.step * self.ids / self.servers * 4 * self.dim

  def server_cores(self) -> float:
    """Cores of a server that are busy."""
    per_step = self.ids / self.servers * (1 / self.lookup + 1 / self.update) + 2 * self.message
    return self.workers / self.step * per_step


def simulate(job: Job, steps: int, seed: int = 1) -> float:
  """Returns the examples per second of all workers together.

  Args:
    job: what is trained.
    steps: of each worker.
    seed: of how ids fall on servers.
  """
  rng = np.random.default_rng(seed)
  server_free = np.zeros([job.servers])
  out_free = np.zeros([job.servers])  # links of servers
  worker_in = np.zeros([job.workers])
  worker_out = np.zeros([job.workers])
  vector = 4 * job.dim

  def exchange(worker: int, start: float, asked: int, answered: int, rate: float) -> float:
    """Sends a message to every server; returns when all answers are there."""
    counts = rng.poisson(job.ids / job.servers, job.servers)
    sent = max(start, worker_out[worker]) + np.cumsum(counts * asked / job.link)
    worker_out[worker] = sent[-1]
    # The cores of a server share its messages.
    begin = np.maximum(sent + job.delay, server_free)
    server_free[:] = begin + (job.message + counts / rate) / job.cores
    done = begin + job.message + counts / rate / min(job.cores, 4)
    left = np.maximum(done, out_free) + counts * answered / job.link
    out_free[:] = left
    arrived = max(left.max() + job.delay, worker_in[worker] + counts.sum() * answered / job.link)
    worker_in[worker] = arrived
    return float(arrived)

  # In the order of time, so that a server's messages wait for those that were there before.
  events = [
    (exchange(w, 0.0, _ID_BYTES, vector, job.lookup), w, "step") for w in range(job.workers)
  ]
  heapq.heapify(events)
  ready = np.zeros([job.workers])
  pushed = np.zeros([job.workers])
  left = np.full([job.workers], steps)
  now = 0.0
  while events:
    now, worker, what = heapq.heappop(events)
    if what == "step":
      ready[worker] = exchange(worker, now, _ID_BYTES, vector, job.lookup)
      heapq.heappush(events, (now + job.step, worker, "push"))
      continue
    left[worker] -= 1
    # A step waits for its rows, and for the push of the step before the last one.
    begin = max(now, ready[worker], pushed[worker])
    pushed[worker] = exchange(worker, now, _ID_BYTES + vector, 0, job.update)
    if left[worker]:
      heapq.heappush(events, (begin, worker, "step"))
  return job.workers * steps * job.batch / now


def lines(job: Job, steps: int = 200) -> list[str]:
  """Returns what there is to know of a job."""
  in_all = job.rows * job.row_bytes
  file = job.rows * job.saved_bytes
  ideal = job.workers * job.examples
  rate = simulate(job, steps)
  return [
    f"rows                       {job.rows:,.0f} of {job.row_bytes:.0f} bytes: "
    f"{in_all / _GB:,.0f} GB",
    f"servers for their memory   {job.fewest_servers} of {job.memory / _GB:.0f} GB",
    f"with {job.servers:>3} servers           {in_all / job.servers / _GB:.1f} GB on each",
    f"ids of a step              {job.ids:,.0f}, {job.ids / job.servers:,.0f} to each server",
    f"network of a step          {job.ids * (2 * _ID_BYTES + 4 * job.dim) / 1e6:.1f} MB from the "
    f"worker to servers, {job.ids * 4 * job.dim / 1e6:.1f} back",
    f"out of a server            {job.server_bytes() / 1e6:,.0f} MB/s of its link's "
    f"{job.link / 1e6:,.0f}",
    f"busy cores of a server     {job.server_cores():.1f} of {job.cores}",
    f"checkpoint                 {file / _GB:,.0f} GB, saved in "
    f"{file / job.servers / job.disk:.0f} s, restored in {file / job.servers / job.read:.0f}",
    f"simulated                  {rate / 1e6:.2f} M examples/s, {rate / ideal:.2f} of "
    f"{job.workers} workers that wait for no server",
    f"price                      {job.month_price:,.0f} a month at {job.price:g} for a "
    f"machine-hour, {job.month_price / (_HOURS_OF_MONTH * 3600 * rate) * 1e9:,.2f} for 1e9 "
    "examples",
  ]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for field in dataclasses.fields(Job):
    kind = int if isinstance(field.default, int) else float
    parser.add_argument(f"--{field.name}", type=kind, default=field.default)
  print("\n".join(lines(Job(**vars(parser.parse_args())))))


if __name__ == "__main__":
  main()
