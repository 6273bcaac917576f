"""Measures the demo while it runs, and shows it: on the page, and in a line of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import http.client
import re
import threading
import time
from typing import Any
import urllib.request

from monolith.row_log import topics
import numpy as np

from examples.realtime import stages
from examples.realtime.freshness import AucMeter, FreshnessProber, RequestLoad
from examples.realtime.generator import World
from examples.realtime.options import MODEL, DemoOptions
from examples.realtime.system import ENTRY, System

_ASK_SECS = 1.0
_ANSWER_SECS = 1.0
_SHARD = re.compile(r'shard="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Measures:
  """Keeps the last answers of processes.

  Attributes:
    when: `time.monotonic()`.
    joiner: its metrics.
    trainer: its metrics.
    holders: metrics of the replicas that hold tables.
    counts: totals of the stages.
    rates: events per second of the stages.
  """

  when: float
  joiner: dict[str, float] = dataclasses.field(default_factory=dict)
  trainer: dict[str, float] = dataclasses.field(default_factory=dict)
  holders: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
  counts: dict[str, float] = dataclasses.field(default_factory=dict)
  rates: dict[str, float] = dataclasses.field(default_factory=dict)


class Monitor:
  """Asks all processes now and then, sends marked users and requests, and knows the results.

  Args:
    options: what the demo does.
    system: its processes, which need not run yet.
  """

  def __init__(self, options: DemoOptions, system: System):
    self._options = options
    self._system = system
    self.note = "starting"
    # Fault -> seconds until everything was well again.
    self.recoveries: dict[str, float] = {}
    self.prober: FreshnessProber | None = None
    self.load: RequestLoad | None = None
    self.tracer: stages.StageTracer | None = None
    self._auc: AucMeter | None = None
    self._holder_clients = {name: system.holder_client(name) for name in system.holders}
    self._lock = threading.Lock()
    self._measures = Measures(time.monotonic())
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="metrics", daemon=True)

  def start(self) -> None:
    """Begins to measure; the system runs."""
    system, world = self._system, World(turn_secs=self._options.turn_secs)
    prober = FreshnessProber(
      system.broker.servers, world, {name: system.entry_client(name) for name in system.entries}
    )
    read = {name: system.topics[name] for name in (topics.SAMPLES, topics.rows_topic(MODEL))}
    self.tracer = stages.StageTracer(
      system.broker.servers, MODEL, read, system.trainer_port, prober.open
    )
    fresh = f"{self._options.sync_secs:g} s"
    compared = {fresh: system.entry_client(system.entries[0]), **system.compared_clients()}
    self._auc = AucMeter(world, compared)
    self.load = RequestLoad(world, system.find_entries, f"{MODEL}:{ENTRY}")
    self.prober = prober
    for part in (self.tracer, prober, self._auc, self.load, self._thread):
      part.start()

  def stop(self) -> None:
    """Ends measuring."""
    self._stopping.set()
    if self._thread.is_alive():
      self._thread.join()
    for part in (self.prober, self.tracer, self._auc, self.load):
      if part is not None:
        part.stop()

  # Results.

  def auc(self) -> dict[str, float]:
    """Returns the AUC of the last minute by how often a server is synced."""
    return {k: v for k, v in (self._auc.auc() if self._auc else {}).items() if v == v}

  def split(self, since: float = 0, until: float = float("inf")) -> dict[str, tuple[float, float]]:
    """Returns stage -> median and p99 of its seconds, of the actions between two times."""
    done = self.prober.done(since, until) if self.prober else []
    splits = [p.trace.split(p.event_time, p.event_time + p.latency) for p in done]
    return stages.summarize(split for split in splits if split is not None)

  def measures(self) -> Measures:
    """Returns what processes answered last."""
    with self._lock:
      return self._measures

  def equal_replicas(self, since: float) -> dict[str, bool | None]:
    """Returns, for each replica that holds tables, whether they equal those of training.

    Args:
      since: only digests that training published later count, `time.monotonic()`.

    Returns:
      Replica -> whether all its tables are equal bit by bit; `None` where it has not compared them.
    """
    marks = self.tracer.digests() if self.tracer is not None else {}
    num_shards = max(1, self._options.num_ps)
    found: dict[str, bool | None] = {}
    for name, client in self._holder_clients.items():
      by_shard = _by_shard(client.metrics())
      values: list[float | None] = []
      for shard in range(num_shards):
        mark, metrics = marks.get(shard), by_shard.get(shard, {})
        applied = (metrics.get("epoch", -1), metrics.get("seq", -1))
        if mark is None or mark.when < since or applied < (mark.epoch, mark.seq):
          values.append(None)
        else:
          values.append(metrics.get("digest_ok"))
      found[name] = None if None in values else all(value == 1 for value in values)
    return found

  # The state that the page shows.

  def line(self) -> str:
    """Returns one line for the terminal."""
    state = self.state()
    fresh = state["freshness"]
    auc = "  ".join(f"AUC {name}: {value:.3f}" for name, value in state["auc"].items())
    rates = "  ".join(f"{name} {value:.0f}/s" for name, value in state["rates"].items())
    return (
      f"fresh after {fresh['p50']:.2f} s (p99 {fresh['p99']:.2f} s, {fresh['count']} actions)  "
      f"{auc}  {rates}  requests {state['requests']['failed']} failed of "
      f"{state['requests']['made']}  {state['note']}"
    )

  def state(self) -> dict[str, Any]:
    """Returns everything that the page shows."""
    now = time.time()
    latencies = self.prober.latencies(since=now - 60) if self.prober else []
    p50, p99 = percentiles(latencies)
    measures = self.measures()
    joiner, trainer = measures.joiner, measures.trainer
    counts = np.histogram(np.minimum(latencies, 9.99), bins=40, range=(0, 10))[0]
    digests = {
      name: metrics["digest_ok"]
      for name, metrics in self._by_holder(measures).items()
      if "digest_ok" in metrics
    }
    return {
      "time": now,
      "note": self.note,
      "freshness": {
        "p50": p50 if latencies else 0,
        "p99": p99 if latencies else 0,
        "count": len(latencies),
        "histogram": counts.tolist(),
        "bin_secs": 0.25,
      },
      "split": {
        stage: {"p50": median, "p99": slow}
        for stage, (median, slow) in self.split(since=now - 60).items()
      },
      "auc": self.auc(),
      "rates": measures.rates,
      "lag": {
        "joiner": total(joiner, "monolith_joiner_lag_messages"),
        "trainer": total(trainer, "monolith_trainer_lag_messages"),
        **{n: m.get("lag_messages", 0.0) for n, m in self._by_holder(measures).items()},
      },
      "tables": {
        name: dataclasses.asdict(figures)
        for name, figures in sorted(self.tracer.tables().items() if self.tracer else ())
      },
      "open_impressions": total(joiner, "monolith_joiner_open_impressions"),
      "digests": digests,
      "requests": {
        "made": self.load.requests if self.load else 0,
        "retried": self.load.retried if self.load else 0,
        "failed": self.load.failed if self.load else 0,
      },
      # JSON has no number for something that never came back.
      "recoveries": {k: v if v < float("inf") else None for k, v in self.recoveries.items()},
      "processes": self._system.states(),
    }

  def _by_holder(self, measures: Measures) -> dict[str, dict[str, float]]:
    """Returns the metrics of each replica's log: the worst of its shards."""
    found = {}
    for name, metrics in measures.holders.items():
      shards = list(_by_shard(metrics).values())
      digests = [shard["digest_ok"] for shard in shards if "digest_ok" in shard]
      lags = [shard.get("lag_messages", 0.0) for shard in shards]
      found[name] = {"lag_messages": max(lags, default=0.0)}
      if digests:
        found[name]["digest_ok"] = min(digests)
    return found

  def _watch(self) -> None:
    """Asks all processes in turn, so that one that hangs delays no page."""
    clients = {name: self._system.holder_client(name) for name in self._system.holders}
    while not self._stopping.wait(_ASK_SECS):
      before = self.measures()
      # A process that does not answer in time keeps its last figures.
      joiner = read_metrics(self._system.joiner_port) or before.joiner
      trainer = read_metrics(self._system.trainer_port) or before.trainer
      counts = {
        "impressions": total(joiner, "monolith_joiner_impressions_total"),
        "clicks": total(joiner, "monolith_joiner_joined_total"),
        "trained": total(trainer, "monolith_trainer_samples"),
        "rows": float(sum(t.set for t in self.tracer.tables().values()) if self.tracer else 0),
      }
      now = time.monotonic()
      passed = now - before.when
      # A process that starts again counts from 0.
      rates = {k: max(0.0, v - before.counts.get(k, v)) / passed for k, v in counts.items()}
      holders = {name: client.metrics() for name, client in clients.items()}
      with self._lock:
        self._measures = Measures(now, joiner, trainer, holders, counts, rates)


def percentiles(latencies: Sequence[float]) -> tuple[float, float]:
  """Returns median and 99th percentile; both infinite without any."""
  if not latencies:
    return float("inf"), float("inf")
  p50, p99 = np.percentile(latencies, [50, 99])
  return float(p50), float(p99)


def read_metrics(port: int) -> dict[str, float]:
  """Returns the metrics of a process on loopback; none if it does not answer."""
  try:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_ANSWER_SECS) as answer:
      return stages.parse_metrics(answer.read().decode())
  except (OSError, http.client.HTTPException):  # as where it dies while it answers
    return {}


def total(metrics: dict[str, float], name: str) -> float:
  """Returns the sum of a metric over its labels."""
  return sum(v for k, v in metrics.items() if k == name or k.startswith(name + "{"))


def _by_shard(metrics: dict[str, float]) -> dict[int, dict[str, float]]:
  """Returns shard -> name -> value of the metrics of a row log."""
  found: dict[int, dict[str, float]] = {}
  prefix = "monolith_sync_"
  for key, value in metrics.items():
    name, _, labels = key.partition("{")
    shard = _SHARD.search(labels)
    if name.startswith(prefix) and not name.startswith(f"{prefix}dense") and shard is not None:
      found.setdefault(int(shard[1]), {})[name[len(prefix) :]] = value
  return found
