"""Runs real-time training on one machine: `make demo-realtime`.

Starts a broker, ZooKeeper, users that click, the joiner, the trainer with its servers, and serving
replicas with their agents; shows freshness and AUC live, on a page and in the terminal; kills every
process once; and ends with a table of what was promised and what was measured. The exit status is 1
if a promise was not kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import pathlib
import shutil
import signal
import sys
import tempfile
import time

from examples.realtime import broker
from examples.realtime.faults import FaultRunner
from examples.realtime.monitor import Monitor, percentiles
from examples.realtime.options import (
  P50_SECS,
  P99_SECS,
  DemoOptions,
  Goal,
  format_goals,
  format_secs,
)
from examples.realtime.page import DemoPage
from examples.realtime.system import NEVER, System

_LINE_SECS = 2.0
_START_SECS = 300
# How long broker and ZooKeeper are away while every process is killed once.
_SHORT_AWAY_SECS = {"broker_away_secs": 5.0, "zookeeper_away_secs": 10.0}


class Demo:
  """One run.

  Args:
    options: what it does.
    folder: where everything is kept.
  """

  def __init__(self, options: DemoOptions, folder: pathlib.Path):
    self._options = options
    self.system = System(options, folder, self._tell)
    self.monitor = Monitor(options, self.system)
    self._faults = FaultRunner(options, self.system, self.monitor, self._tell)

  def start(self) -> None:
    """Starts everything and waits until all replicas serve what training publishes.

    Raises:
      TimeoutError: a process is not ready in time; the message has its output.
      examples.realtime.broker.BrokerError: no broker can be had.
    """
    self.system.start()
    self.monitor.start()
    prober = self.monitor.prober
    assert prober is not None
    self._tell("waiting for the first marked user")
    self.system.supervisor.wait_for(
      "the first marked user in all replicas", prober.newest_done, _START_SECS, "joiner", "trainer"
    )

  def stop(self) -> None:
    """Ends everything."""
    self.monitor.stop()
    self.system.stop()

  def measure(self) -> list[Goal]:
    """Measures undisturbed, and returns what was promised for that."""
    self._tell("measuring")
    since = time.time()
    while time.time() < since + self._options.seconds:
      time.sleep(_LINE_SECS)
      print(self.monitor.line(), flush=True)
    until = time.time()
    prober = self.monitor.prober
    assert prober is not None
    p50, p99 = percentiles(prober.latencies(since, until))
    goals = [
      Goal(
        "action to every replica, median", f"<= {P50_SECS:g} s", format_secs(p50), p50 <= P50_SECS
      ),
      Goal("action to every replica, p99", f"<= {P99_SECS:g} s", format_secs(p99), p99 <= P99_SECS),
    ]
    split = self.monitor.split(since, until)
    for stage, (median, slow) in split.items():
      goals.append(Goal(f"  {stage}, median / p99", "", f"{median:.2f} / {slow:.2f} s", True))
    goals.append(Goal("  stages observed", "5", str(len(split)), len(split) == 5))
    auc = self.monitor.auc()
    fresh, stale = auc.get(f"{self._options.sync_secs:g} s"), auc.get(NEVER)
    text = ", ".join(f"{name} {value:.3f}" for name, value in auc.items())
    is_better = fresh is not None and stale is not None and fresh > stale
    goals.append(Goal("AUC by sync interval", "fresh above never", text, is_better))
    return goals

  def run_faults(self) -> list[Goal]:
    """Runs the faults that were asked for, and returns the promises and results."""
    faults = self._options.faults
    if faults == "all":
      self._faults.run_all()
    elif faults == "kills":
      self._faults.kill_each()
    elif faults != "none":
      self._faults.kill_some(int(faults))
    self._faults.check_digests()
    self._faults.check_losses()
    load = self.monitor.load
    assert load is not None
    # Where all replicas die at once, nobody is left to answer: the rows above count the others.
    wanted = "as above" if faults == "all" else "0"
    self._faults.goals.append(
      Goal(
        "requests that failed",
        wanted,
        f"{load.failed} of {load.requests} ({load.retried} retried)",
        load.failed == 0 or faults == "all",
      )
    )
    for error in load.errors[:5]:
      print(f"failed request: {error}", flush=True)
    return self._faults.goals

  def _tell(self, note: str) -> None:
    self.monitor.note = note
    print(f"{time.strftime('%H:%M:%S')} {note}", flush=True)


def run(options: DemoOptions, folder: pathlib.Path) -> int:
  """Runs the demo and returns the exit status: 1 if a promise was not kept.

  Args:
    options: what it does.
    folder: where everything is kept.
  """
  try:
    demo = Demo(options, folder)
    page = DemoPage(demo.monitor.state, options.page_port)
  except (broker.BrokerError, FileNotFoundError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  try:
    page.start()
    print(f"live page: http://127.0.0.1:{page.port}/   logs: {folder}/logs", flush=True)
    demo.start()
    goals = demo.measure() + demo.run_faults()
  except (TimeoutError, broker.BrokerError, ConnectionError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  finally:
    demo.stop()
    page.stop()
  print(format_goals(goals))
  return 0 if all(goal.is_met for goal in goals) else 1


def parse_options(arguments: Sequence[str] | None) -> DemoOptions:
  """Returns what the command line asks for.

  Raises:
    SystemExit: it is wrong, or asks for help.
  """
  parser = argparse.ArgumentParser(
    prog="python -m examples.realtime.demo", description=(__doc__ or "").split("\n\n")[0]
  )
  for field in dataclasses.fields(DemoOptions):
    default = None if field.name in _SHORT_AWAY_SECS else field.default
    parser.add_argument(f"--{field.name}", type=type(field.default), default=default)
  flags = vars(parser.parse_args(arguments))
  for name, short in _SHORT_AWAY_SECS.items():
    if flags[name] is None:
      # The table of promises says for how long; a run that only kills each once need not wait.
      flags[name] = getattr(DemoOptions, name) if flags["faults"] == "all" else short
  try:
    return DemoOptions(**flags)
  except ValueError as error:
    parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
  """Parses flags, runs the demo and returns its exit status."""
  options = parse_options(arguments)
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
