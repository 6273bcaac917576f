"""Hurts the processes of the demo, one after another, and checks what was promised for it."""

from __future__ import annotations

from collections.abc import Callable
import random
import re
import time
from typing import TypeVar

from monolith.row_log import kafka_client, topics

from examples.realtime.audit import Audit, audit_samples
from examples.realtime.monitor import Monitor, read_metrics, total
from examples.realtime.options import (
  ALL_BACK_SECS,
  BACK_SECS,
  MODEL,
  P99_SECS,
  DemoOptions,
  Goal,
  format_secs,
)
from examples.realtime.system import (
  LATENESS_SECS,
  PARTITIONS,
  SAMPLE_RATE,
  WINDOW_SECS,
  System,
)

_RECOVERY_SECS = 180.0
_POISON_SECS = 30.0
_QUIET_SECS = 120.0
_POLL_SECS = 0.2
_Found = TypeVar("_Found")
_POISON = b"\xffthis is no message"

# Whom it is about -> what holds when it dies.
_PROMISES = (
  ("broker", "no process ends, no event is lost"),
  ("zookeeper", "0 failed requests, no missed sync"),
  ("joiner", "samples as in an undisturbed run"),
  ("trainer_ps", "serving answers, digests are equal after it"),
  ("trainer", "each sample is trained once"),
  ("tables", "0 failed requests, AVAILABLE and equal"),
  ("entry", "0 failed requests, AVAILABLE and equal"),
  ("agent", "0 failed requests, AVAILABLE and equal"),
  ("generator", "everything else goes on"),
)


def promise_of(target: str) -> str:
  """Returns what is promised when a process dies or stands still."""
  return next(text for prefix, text in _PROMISES if target.startswith(prefix))


class FaultRunner:
  """Runs faults, prints each promise with its result, and keeps the results.

  Args:
    options: for how long processes are away.
    system: the processes.
    monitor: knows whether all is well.
    tell: called with what happens.

  Attributes:
    goals: the results so far.
  """

  def __init__(
    self, options: DemoOptions, system: System, monitor: Monitor, tell: Callable[[str], None]
  ):
    self._options = options
    self._system = system
    self._monitor = monitor
    self._tell = tell
    self.goals: list[Goal] = []

  def kill_each(self) -> None:
    """Kills every process once."""
    for target in self._system.targets():
      self.kill(target)

  def kill_some(self, count: int) -> None:
    """Kills processes chosen at random."""
    draw = random.Random(count)
    for i in range(count):
      self.kill(draw.choice(self._system.targets()), f" (number {i + 1})")

  def run_all(self) -> None:
    """Runs the whole table: kills, processes that stand still, poison, and all at once."""
    self.kill_each()
    for target in self._system.targets():
      self.stand_still(target)
    self.poison()
    self.kill_all()

  def kill(self, target: str, suffix: str = "") -> None:
    """Kills one process."""
    away_secs = {
      "broker": self._options.broker_away_secs,
      "zookeeper": self._options.zookeeper_away_secs,
    }.get(target)
    away = f", {away_secs:g} s away" if away_secs else ""

    def hurt() -> None:
      self._system.kill(target)
      if away_secs is not None:
        time.sleep(away_secs)
        self._system.start_servers()

    # A process that comes back by itself is timed from its end, the others from their return.
    self._check(
      f"kill -9 of {target}{away}{suffix}", promise_of(target), hurt, away_secs is not None
    )

  def stand_still(self, target: str) -> None:
    """Stops one process for a while with SIGSTOP."""
    secs = self._options.still_secs
    self._check(
      f"SIGSTOP of {target}, {secs:g} s",
      promise_of(target),
      lambda: self._system.stand_still(target, secs),
      True,
    )

  def kill_all(self) -> None:
    """Kills all processes at once; with no replica left, requests fail until one is back."""

    def hurt() -> None:
      self._system.kill_all()
      self._system.start_servers()

    self._check(
      "kill -9 of all at once",
      "no event is lost, digests are equal",
      hurt,
      False,
      limit_secs=ALL_BACK_SECS,
      may_fail=True,
    )

  def poison(self) -> None:
    """Sends messages that nobody can read."""
    self._tell("sending poisoned messages")
    system = self._system
    before = self._count_poison()
    producer = kafka_client.make_producer(system.broker.servers)
    rows = topics.rows_topic(MODEL)
    names = (topics.IMPRESSIONS, topics.ACTIONS, topics.SAMPLES, rows)
    for topic in names:
      producer.produce(topic, _POISON, "poison", partition=0)
    producer.flush()
    # Two for the joiner, one for the trainer, one for each replica that holds tables.
    wanted = {"joiner": 2.0, "trainer": 1.0, **{name: 1.0 for name in system.holders}}
    deadline = time.monotonic() + _POISON_SECS
    counted: dict[str, float] = {}
    while counted != wanted and time.monotonic() < deadline:
      time.sleep(_POLL_SECS)
      after = self._count_poison()
      counted = {name: after[name] - before[name] for name in wanted}
    named = re.search(
      rf"message \d+ of {topics.IMPRESSIONS}, partition 0, is skipped",
      system.supervisor["joiner"].log_tail(100_000),
    )
    self._add(
      Goal(
        "poisoned messages: skipped, counted, the offset named",
        f"{sum(wanted.values()):g}",
        f"{sum(counted.values()):g}" + ("" if named else ", offset not named"),
        counted == wanted and named is not None,
      )
    )

  def check_losses(self) -> None:
    """Lets the stream end, and compares its topics with what was trained and is served."""
    self._tell("comparing events, samples and what was trained")
    system, prober = self._system, self._monitor.prober
    assert prober is not None
    prober.pause()
    system.supervisor["generator"].stop()
    waiting = _wait(prober.open, lambda users: not users, _QUIET_SECS)
    audit: Audit = _wait(
      lambda: audit_samples(
        system.broker.servers, PARTITIONS, WINDOW_SECS, LATENESS_SECS, SAMPLE_RATE
      ),
      lambda found: not found.missing,
      _QUIET_SECS,
    )
    lost = [user for user in waiting if user.request_id not in audit.late]
    measured = f"{len(lost)} ({len(waiting) - len(lost)} came too late for their window)"
    self._add(Goal("marked actions that no replica shows", "0", measured, not lost))
    is_equal = not audit.missing and not audit.unexpected
    self._add(Goal("samples as in an undisturbed run", "equal", audit.describe(), is_equal))
    # A server that dies goes back to its checkpoint, and others are asked again for what they have.
    is_once = self._options.num_ps <= 1

    def is_all_trained(count: float) -> bool:
      return count == audit.samples if is_once else count >= audit.samples

    trained = _wait(
      lambda: total(read_metrics(system.trainer_port), "monolith_trainer_samples"),
      is_all_trained,
      _QUIET_SECS,
    )
    self._add(
      Goal(
        "samples trained, each once" if is_once else "samples trained, none left out",
        str(audit.samples) if is_once else f">= {audit.samples}",
        f"{trained:.0f} ({audit.repeated} were in the topic twice)",
        is_all_trained(trained),
      )
    )

  def check_digests(self) -> None:
    """Waits for a comparison of all replicas with training."""
    self._tell("waiting for digests")
    begin = time.monotonic()
    equal = _wait(
      lambda: self._monitor.equal_replicas(begin), _all_equal, _RECOVERY_SECS, _POLL_SECS
    )
    count = sum(value is True for value in equal.values())
    self._add(
      Goal("replicas bit-equal to training", str(len(equal)), str(count), _all_equal(equal))
    )

  def _check(
    self,
    what: str,
    promise: str,
    hurt: Callable[[], None],
    is_timed_from_return: bool,
    limit_secs: float = BACK_SECS,
    may_fail: bool = False,
  ) -> None:
    """Hurts something, waits until all is well, and says whether that was soon enough."""
    monitor = self._monitor
    assert monitor.load is not None
    self._tell(what)
    failed = monitor.load.failed
    begin, begin_wall = time.monotonic(), time.time()
    hurt()
    if is_timed_from_return:
      begin, begin_wall = time.monotonic(), time.time()
    self._tell(f"waiting until all is well after {what}")
    fresh_secs = equal_secs = float("inf")
    while time.monotonic() < begin + _RECOVERY_SECS:
      passed = time.monotonic() - begin
      if fresh_secs == float("inf") and self._is_fresh(begin_wall):
        fresh_secs = passed
      if equal_secs == float("inf") and self._is_equal(begin):
        equal_secs = passed
      if max(fresh_secs, equal_secs) < float("inf"):
        break
      time.sleep(_POLL_SECS)
    failed = monitor.load.failed - failed
    monitor.recoveries[what] = max(fresh_secs, equal_secs)
    measured = f"fresh {format_secs(fresh_secs)}, equal {format_secs(equal_secs)}"
    measured += f", {failed} failed"
    is_met = max(fresh_secs, equal_secs) <= limit_secs and (may_fail or failed == 0)
    self._add(Goal(f"{what}: {promise}", f"<= {limit_secs:g} s", measured, is_met))
    print(monitor.line(), flush=True)

  def _is_fresh(self, since: float) -> bool:
    """Returns whether a later action was seen by all replicas within the bound."""
    assert self._monitor.prober is not None
    return any(probe.latency <= P99_SECS for probe in self._monitor.prober.done(since))

  def _is_equal(self, since: float) -> bool:
    """Returns whether everything runs, and all replicas have compared themselves later."""
    if any(self._system.pid(target) is None for target in self._system.targets()):
      return False
    return _all_equal(self._monitor.equal_replicas(since))

  def _count_poison(self) -> dict[str, float]:
    measures = self._monitor.measures()
    found = {
      "joiner": total(read_metrics(self._system.joiner_port), "monolith_joiner_poisoned_total"),
      "trainer": total(read_metrics(self._system.trainer_port), "monolith_trainer_bad_messages"),
    }
    for name in self._system.holders:
      metrics = measures.holders.get(name, {})
      found[name] = total(metrics, "monolith_sync_skipped_messages_total")
    return found

  def _add(self, goal: Goal) -> None:
    self.goals.append(goal)
    state = "ok" if goal.is_met else "MISSED"
    print(f"{goal.what}  (wanted {goal.wanted}): {goal.measured}  {state}", flush=True)


def _all_equal(equal: dict[str, bool | None]) -> bool:
  return bool(equal) and all(value is True for value in equal.values())


def _wait(
  get: Callable[[], _Found],
  is_good: Callable[[_Found], bool],
  limit_secs: float,
  poll_secs: float = 1.0,
) -> _Found:
  """Returns what `get` returns as soon as it is good, or at last."""
  deadline = time.monotonic() + limit_secs
  while True:
    value = get()
    if is_good(value) or time.monotonic() > deadline:
      return value
    time.sleep(poll_secs)
