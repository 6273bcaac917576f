"""Runs real-time training on one machine: `make demo-realtime`.

Starts a broker, users that click, the joiner, the trainer and serving replicas; shows freshness and
AUC live, on a page and in the terminal; kills every process once; and ends with a table of what was
promised and what was measured. The exit status is 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence

import numpy as np

from monolith.agent_service.ports import find_free_port
from monolith.realtime import broker, topics
from monolith.realtime.demo_page import DemoPage
from monolith.realtime.freshness import (
  AucMeter,
  Client,
  FreshnessProber,
  RequestLoad,
  parse_metrics,
)
from monolith.realtime.generator import World
from monolith.realtime.processes import Command, Supervisor

MODEL = "clicks"
PARTITIONS = 2
_WINDOW_SECS = 20
_START_SECS = 300
_LINE_SECS = 2.0
_RECOVERY_SECS = 120
_DIGEST_SECS = 90
NEVER = "never"
P50_SECS, P99_SECS, BACK_SECS = 2.0, 4.0, 15.0


@dataclasses.dataclass(frozen=True)
class DemoOptions:
  """What the demo does.

  Attributes:
    seconds: how long to measure before the first kill.
    folder: where everything is kept; a temporary one, deleted at the end, if empty.
    rate: impressions per second.
    sync_secs: seconds between two batches of changed rows.
    save_secs: seconds between two checkpoints with exports.
    turn_secs: how long a user likes one genre.
    replicas: serving processes that follow training.
    slow_syncs: comma-separated seconds: for each a replica that applies changes so seldom, to show
      its AUC beside the others'; none with parameter servers.
    num_ps: parameter servers, in training and, as many parts, in serving; 0: tables are in the
      training process and in the replicas themselves.
    kills: kill every process once.
    broker_away_secs: how long a killed broker stays away.
    zookeeper_away_secs: how long its ZooKeeper does.
    page_port: port of the live page on loopback; 0: any free.
  """

  seconds: float = 120
  folder: str = ""
  rate: float = 300
  sync_secs: float = 1.0
  save_secs: int = 30
  turn_secs: float = 60
  replicas: int = 2
  slow_syncs: str = "10,60"
  num_ps: int = 0
  kills: bool = True
  broker_away_secs: float = 5
  zookeeper_away_secs: float = 10
  page_port: int = 0


@dataclasses.dataclass(frozen=True)
class Goal:
  """One line of the table at the end.

  Attributes:
    what: what was promised.
    wanted: how much, in words.
    measured: what was measured, in words.
    is_met: whether it was kept.
  """

  what: str
  wanted: str
  measured: str
  is_met: bool


def format_goals(goals: Sequence[Goal]) -> str:
  """Returns the table at the end of a demo."""
  rows = [("promise", "wanted", "measured", "")]
  rows += [(g.what, g.wanted, g.measured, "ok" if g.is_met else "MISSED") for g in goals]
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


@dataclasses.dataclass(frozen=True)
class _Metrics:
  """What processes answered last: their metrics, totals and events per second of the stages."""

  when: float
  joiner: dict[str, float] = dataclasses.field(default_factory=dict)
  trainer: dict[str, float] = dataclasses.field(default_factory=dict)
  counts: dict[str, float] = dataclasses.field(default_factory=dict)
  rates: dict[str, float] = dataclasses.field(default_factory=dict)
  digests: dict[str, float] = dataclasses.field(default_factory=dict)


class Demo:
  """All processes of the demo, and what measures them.

  Args:
    options: what it does.
    folder: where everything is kept.
  """

  def __init__(self, options: DemoOptions, folder: pathlib.Path):
    self._options = options
    self._folder = folder
    self._world = World(turn_secs=options.turn_secs)
    self._broker = broker.make_broker(folder / "broker")
    self._supervisor = Supervisor(folder / "logs")
    self._model_dir = folder / "model"
    self._replica_ports = {f"replica_{i}": find_free_port() for i in range(options.replicas)}
    self._never_port = find_free_port()
    slow = [] if options.num_ps else [float(s) for s in options.slow_syncs.split(",") if s.strip()]
    self._slow_ports = {secs: find_free_port() for secs in slow}
    # Processes that serve the tables of a replica: (gRPC port, REST port).
    self._part_ports = {
      f"ps_of_{name}": (find_free_port(), find_free_port())
      for name in (*self._replica_ports, NEVER)
      if options.num_ps
    }
    self._joiner_port, self._trainer_port = find_free_port(), find_free_port()
    self._prober: FreshnessProber | None = None
    self._auc: AucMeter | None = None
    self._load: RequestLoad | None = None
    self._final_auc: dict[str, float] = {}
    self._recoveries: dict[str, float] = {}
    self._note = "starting"
    self._lock = threading.Lock()
    self._metrics = _Metrics(time.monotonic())
    self._stopping = threading.Event()
    self._metrics_thread = threading.Thread(target=self._watch_metrics, daemon=True)

  # Set-up.

  def start(self) -> None:
    """Starts everything and waits until all replicas serve what training publishes.

    Raises:
      TimeoutError: a process is not ready in time; the message has its output.
      monolith.realtime.broker.BrokerError: no broker can be had.
    """
    self._tell("starting the broker")
    self._metrics_thread.start()
    self._broker.start()
    self._broker.create_topics(
      {
        topics.IMPRESSIONS: PARTITIONS,
        topics.ACTIONS: PARTITIONS,
        topics.SAMPLES: PARTITIONS,
        topics.rows_topic(MODEL): max(1, self._options.num_ps),
        topics.dense_topic(MODEL): 1,
      }
    )
    self._add(
      "generator",
      "monolith.realtime.generator",
      *(f"--rate={self._options.rate}", f"--turn_secs={self._options.turn_secs}"),
    )
    self._add(
      "joiner",
      "monolith.realtime.joiner",
      *(f"--window_secs={_WINDOW_SECS}", "--partitions=all", "--lateness_secs=1"),
      *(f"--metrics_port={self._joiner_port}", "--sample_rate=0.5"),
    )
    self._add_trainers()
    self._tell("waiting for an export of what was learnt")
    self._supervisor.wait_for("the second export", self._has_exports, _START_SECS, "trainer")
    self._add_serving()
    following = {name: (port, MODEL) for name, port in self._replica_ports.items()}
    self._prober = FreshnessProber(self._broker.servers, self._world, following)
    compared = {self._options.sync_secs: next(iter(self._replica_ports.values()))}
    compared.update(self._slow_ports)
    groups = {f"{secs:g} s": (port, MODEL) for secs, port in compared.items()}
    self._auc = AucMeter(self._world, {**groups, NEVER: (self._never_port, MODEL)})
    self._load = RequestLoad(self._world, list(self._replica_ports.values()), MODEL)
    for part in (self._prober, self._auc, self._load):
      part.start()
    self._tell("waiting for the first marked user")
    self._supervisor.wait_for(
      "the first marked user in all replicas",
      lambda: self._prober.newest_done(),
      _START_SECS,
      *("joiner", "trainer", *self._replica_ports),
    )

  def stop(self) -> None:
    """Ends everything."""
    self._stopping.set()
    if self._metrics_thread.is_alive():
      self._metrics_thread.join()
    for part in (self._prober, self._auc, self._load):
      if part is not None:
        part.stop()
    self._supervisor.stop()
    self._broker.stop()

  # The two parts of a run.

  def measure(self) -> tuple[float, float]:
    """Measures undisturbed, and returns from when until when."""
    self._tell("measuring")
    since = time.time()
    while time.time() < since + self._options.seconds:
      time.sleep(_LINE_SECS)
      print(self.line(), flush=True)
    self._final_auc = self._auc.auc() if self._auc else {}
    return since, time.time()

  def kill_all_once(self) -> None:
    """Kills one process after the other, and measures how long freshness is away."""
    parts = [name for name in self._part_ports if NEVER not in name]
    servers = [f"trainer_ps_{i}" for i in range(self._options.num_ps)]
    for name in ("joiner", *self._replica_ports, *parts, "trainer", *servers, "generator"):
      self._kill(name, lambda name=name: self._supervisor.kill(name), None)
    if isinstance(self._broker, broker.LocalBroker):
      self._kill("broker", self._broker.kill_broker, self._options.broker_away_secs)
      if self._broker.zookeeper:
        self._kill("zookeeper", self._broker.kill_zookeeper, self._options.zookeeper_away_secs)

  def goals(self, since: float, until: float) -> list[Goal]:
    """Returns what was promised and measured."""
    assert self._prober is not None and self._load is not None
    latencies = self._prober.latencies(since, until)
    p50, p99 = _percentiles(latencies)
    goals = [
      Goal("action to every replica, median", f"<= {P50_SECS:g} s", _secs(p50), p50 <= P50_SECS),
      Goal("action to every replica, p99", f"<= {P99_SECS:g} s", _secs(p99), p99 <= P99_SECS),
      Goal("actions lost", "0", str(self._prober.num_lost()), self._prober.num_lost() == 0),
      Goal(
        "requests that failed",
        "0",
        f"{self._load.failed} of {self._load.requests} ({self._load.retried} retried)",
        self._load.failed == 0,
      ),
    ]
    digests = self._wait_for_digests()
    goals.append(
      Goal(
        "replicas bit-equal to training",
        f"{len(self._replica_ports)}",
        f"{sum(d == 1 for d in digests.values())}",
        len(digests) == len(self._replica_ports) and all(d == 1 for d in digests.values()),
      )
    )
    auc = self._final_auc
    fresh, stale = auc.get(f"{self._options.sync_secs:g} s"), auc.get(NEVER)
    if fresh is not None and stale is not None:
      goals.append(
        Goal(
          "AUC, fresh against never synced", "higher", f"{fresh:.3f} / {stale:.3f}", fresh > stale
        )
      )
    for name, secs in self._recoveries.items():
      what = f"fresh again after kill -9 of {name}"
      goals.append(Goal(what, f"<= {BACK_SECS:g} s", _secs(secs), secs <= BACK_SECS))
    return goals

  # What is shown.

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

  def state(self) -> dict:
    """Returns everything that the page shows."""
    now = time.time()
    latencies = self._prober.latencies(since=now - 60) if self._prober else []
    p50, p99 = _percentiles(latencies)
    with self._lock:
      metrics = self._metrics
    joiner, trainer = metrics.joiner, metrics.trainer
    states = self._supervisor.states()
    if isinstance(self._broker, broker.LocalBroker):
      pids = self._broker.pids()
      for name in ("zookeeper", "broker") if self._broker.zookeeper else ("broker",):
        state = "running" if name in pids else "dead"
        states[name] = {"state": state, "pid": pids.get(name), "starts": 1}
    counts = np.histogram(np.minimum(latencies, 9.99), bins=40, range=(0, 10))[0]
    return {
      "time": now,
      "note": self._note,
      "freshness": {
        "p50": p50 if latencies else 0,
        "p99": p99 if latencies else 0,
        "count": len(latencies),
        "histogram": counts.tolist(),
        "bin_secs": 0.25,
      },
      "auc": {k: v for k, v in (self._auc.auc() if self._auc else {}).items() if v == v},
      "rates": metrics.rates,
      "lag": {
        "joiner": _total(joiner, "monolith_joiner_lag_messages"),
        "trainer": _total(trainer, "monolith_trainer_lag_messages"),
      },
      "open_impressions": _total(joiner, "monolith_joiner_open_impressions"),
      "digests": metrics.digests,
      "requests": {
        "made": self._load.requests if self._load else 0,
        "retried": self._load.retried if self._load else 0,
        "failed": self._load.failed if self._load else 0,
      },
      "recoveries": dict(self._recoveries),
      "processes": states,
    }

  def _watch_metrics(self) -> None:
    """Asks all processes in turn, so that one that hangs delays no page."""
    while not self._stopping.wait(1.0):
      # What a process does not answer in time is as it was.
      joiner = _read_metrics(self._joiner_port) or self._metrics.joiner
      trainer = _read_metrics(self._trainer_port) or self._metrics.trainer
      counts = {
        "impressions": _total(joiner, "monolith_joiner_impressions_total"),
        "clicks": _total(joiner, "monolith_joiner_joined_total"),
        "trained": _total(trainer, "monolith_trainer_samples"),
      }
      before, now = self._metrics, time.monotonic()
      passed = now - before.when
      # A process that starts again counts from 0.
      rates = {k: max(0.0, v - before.counts.get(k, v)) / passed for k, v in counts.items()}
      metrics = _Metrics(now, joiner, trainer, counts, rates, self._digests())
      with self._lock:
        self._metrics = metrics

  def _wait_for_digests(self) -> dict[str, float]:
    """Returns the digests of all replicas, which compare them every half a minute."""
    self._tell("waiting for digests")
    deadline = time.monotonic() + _DIGEST_SECS
    while True:
      digests = self._digests()
      if len(digests) == len(self._replica_ports) or time.monotonic() > deadline:
        return digests
      time.sleep(1)

  def _digests(self) -> dict[str, float]:
    """Returns 1 by replica where its rows equal those of training, 0 where not."""
    found = {}
    ports = self._replica_ports
    if self._part_ports:
      ports = {name: rest for name, (_, rest) in self._part_ports.items() if NEVER not in name}
    for name, port in ports.items():
      metrics = Client(port, MODEL).metrics()
      values = [v for k, v in metrics.items() if k.startswith("monolith_sync_digest_ok")]
      if values:
        found[name] = min(values)
    return found

  # Helpers.

  def _add(self, name: str, module: str, *flags: str) -> None:
    arguments = [sys.executable, "-m", module, f"--kafka_servers={self._broker.servers}", *flags]
    self._supervisor.add(Command(name, arguments, _environment()))

  def _add_trainers(self) -> None:
    options = self._options
    shared = [
      *(f"--model_dir={self._model_dir}", f"--model_name={MODEL}", "--publish"),
      *(f"--sync_secs={options.sync_secs}", "--dense_sync_secs=5"),
      *(f"--save_secs={options.save_secs}", f"--num_ps={options.num_ps}"),
    ]
    for i in range(options.num_ps):
      discovery = f"--discovery={self._folder / 'discovery'}"
      self._add(
        f"trainer_ps_{i}",
        "monolith.realtime.trainer",
        *("--role=ps", f"--index={i}", discovery, *shared),
      )
    role = ["--role=local"]
    if options.num_ps:
      role = ["--role=worker", f"--discovery={self._folder / 'discovery'}"]
    metrics = f"--metrics_port={self._trainer_port}"
    self._add("trainer", "monolith.realtime.trainer", *role, metrics, *shared)

  def _add_serving(self) -> None:
    """Starts all replicas and waits until they serve."""
    following = f"--row_log_servers={self._broker.servers}"
    config = self._folder / "ps.config"
    config.write_text(
      "model_config_list {\n"
      + "".join(
        f'  config {{ name: "ps_{i}" base_path: "{self._exports(f"ps_{i}")}" '
        'model_platform: "tensorflow" }\n'
        for i in range(self._options.num_ps)
      )
      + "}\n"
    )
    for name, (grpc_port, rest_port) in self._part_ports.items():
      self._add_server(
        name,
        *(f"--port={grpc_port}", f"--rest_api_port={rest_port}", f"--model_config_file={config}"),
        *([] if NEVER in name else [following]),
      )
    entries = {name: (port, [following]) for name, port in self._replica_ports.items()}
    for secs, port in self._slow_ports.items():
      flags = [following, f"--row_log_interval_secs={secs:g}"]
      entries[f"replica_every_{secs:g}_s"] = (port, flags)
    # That one shows what serving is worth when nothing reaches it.
    entries[NEVER] = (self._never_port, [])
    for name, (port, flags) in entries.items():
      # Replicas share the servers of tables, so that each has another one to ask.
      parts = "|".join(
        f"127.0.0.1:{grpc_port}"
        for part, (grpc_port, _) in self._part_ports.items()
        if (NEVER in part) == (name == NEVER)
      )
      addresses = ",".join(f"ps_{i}={parts}" for i in range(self._options.num_ps))
      self._add_server(
        name,
        *("--port=0", f"--rest_api_port={port}", f"--model_name={MODEL}"),
        f"--model_base_path={self._exports('entry')}",
        *([f"--ps_address={addresses}"] if addresses else []),
        *flags,
      )
    for name, (port, _) in entries.items():
      self._tell(f"waiting for {name}")
      client = Client(port, MODEL)
      self._supervisor.wait_for(f"{name} to serve", client.is_available, _START_SECS, name)
    for name, (_, rest_port) in self._part_ports.items():
      for i in range(self._options.num_ps):
        client = Client(rest_port, f"ps_{i}")
        self._supervisor.wait_for(f"{name} to serve", client.is_available, _START_SECS, name)

  def _add_server(self, name: str, *flags: str) -> None:
    # The row log keeps it new, so it looks for exports when it starts and never again.
    arguments = [sys.executable, "-m", "monolith.serving.model_server", *flags]
    arguments.append("--file_system_poll_wait_seconds=0")
    self._supervisor.add(Command(name, arguments, _environment()))

  def _exports(self, part: str) -> pathlib.Path:
    return self._model_dir / "exported_models" / part

  def _has_exports(self) -> bool:
    """Returns whether each part was exported twice: the first time nothing was learnt yet."""
    parts = ["entry", *(f"ps_{i}" for i in range(self._options.num_ps))]
    return all(len(list(self._exports(part).glob("*/saved_model.pb"))) >= 2 for part in parts)

  def _kill(self, name: str, kill, away_secs: float | None) -> None:
    """Kills a process and waits until an action that came later is seen everywhere."""
    assert self._prober is not None
    self._tell(f"kill -9 of {name}")
    kill()
    if away_secs is not None:
      time.sleep(away_secs)
      self._broker.start()
    else:
      self._supervisor.wait_for(
        f"restart of {name}", lambda: self._supervisor[name].pid, _RECOVERY_SECS, name
      )
    back = time.time()
    self._tell(f"{name} is back")
    deadline = back + _RECOVERY_SECS
    while self._prober.newest_done() < back and time.time() < deadline:
      time.sleep(0.1)
    self._recoveries[name] = time.time() - back
    print(self.line(), flush=True)

  def _tell(self, note: str) -> None:
    self._note = note
    print(f"{time.strftime('%H:%M:%S')} {note}", flush=True)


def _environment() -> dict[str, str]:
  return {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}


def _percentiles(latencies: Sequence[float]) -> tuple[float, float]:
  if not latencies:
    return float("inf"), float("inf")
  p50, p99 = np.percentile(latencies, [50, 99])
  return float(p50), float(p99)


def _secs(value: float) -> str:
  return f"{value:.2f} s" if value < float("inf") else "no answer"


def _read_metrics(port: int) -> dict[str, float]:
  try:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as answer:
      return parse_metrics(answer.read().decode())
  except OSError:
    return {}


def _total(metrics: dict[str, float], name: str) -> float:
  return sum(v for k, v in metrics.items() if k == name or k.startswith(name + "{"))


def run(options: DemoOptions, folder: pathlib.Path) -> int:
  """Runs the demo and returns the exit status: 1 if a promise was not kept.

  Args:
    options: what it does.
    folder: where everything is kept.
  """
  demo = Demo(options, folder)
  page = DemoPage(demo.state, options.page_port)
  try:
    page.start()
    print(f"live page: http://127.0.0.1:{page.port}/   logs: {folder}/logs", flush=True)
    demo.start()
    since, until = demo.measure()
    if options.kills:
      demo.kill_all_once()
    goals = demo.goals(since, until)
  except (TimeoutError, broker.BrokerError, ConnectionError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  finally:
    demo.stop()
    page.stop()
  print(format_goals(goals))
  return 0 if all(goal.is_met for goal in goals) else 1


def main(arguments: Sequence[str] | None = None) -> int:
  """Parses flags, runs the demo and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m monolith.realtime.demo", description=__doc__.split("\n\n")[0]
  )
  for field in dataclasses.fields(DemoOptions):
    if field.name != "kills":
      kind = type(field.default)
      parser.add_argument(f"--{field.name}", type=kind, default=field.default)
  parser.add_argument("--no_kills", action="store_true", help="leave all processes alive")
  parser.add_argument(
    "--faults", action="store_true", help="let brokers be away for as long as the promises say"
  )
  flags = vars(parser.parse_args(arguments))
  flags["kills"] = not flags.pop("no_kills")
  if flags.pop("faults"):
    flags.update(broker_away_secs=20.0, zookeeper_away_secs=60.0)
  options = DemoOptions(**flags)
  signal.signal(signal.SIGTERM, _interrupt)
  folder = pathlib.Path(options.folder or tempfile.mkdtemp(prefix="monolith_realtime_")).absolute()
  folder.mkdir(parents=True, exist_ok=True)
  try:
    status = run(options, folder)
  except KeyboardInterrupt:
    status = 130
  if status == 1:
    print(f"what all processes wrote is in {folder}/logs", file=sys.stderr)
  elif not options.folder:
    shutil.rmtree(folder, ignore_errors=True)
  return status


def _interrupt(*unused: object) -> None:
  raise KeyboardInterrupt


if __name__ == "__main__":
  sys.exit(main())
