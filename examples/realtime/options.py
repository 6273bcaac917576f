"""Holds the options of the demo, and the promises that it holds itself to."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

MODEL = "clicks"
P50_SECS, P99_SECS, BACK_SECS, ALL_BACK_SECS = 2.0, 4.0, 15.0, 60.0


@dataclasses.dataclass(frozen=True)
class DemoOptions:
  """Holds the options of the demo.

  Attributes:
    seconds: how long to measure before the first fault.
    folder: where everything is kept; a temporary one, deleted at the end, if empty.
    rate: impressions per second.
    sync_secs: seconds between two batches of changed rows.
    save_secs: seconds between two checkpoints with exports.
    digest_secs: seconds between two digests of the tables in the row log.
    turn_secs: how long a user likes one genre.
    replicas: serving processes of each kind that follow training.
    slow_syncs: comma-separated seconds: for each a server that applies changes so seldom, to show
      its AUC beside the others'.
    num_ps: parameter servers, in training and, as many parts, in serving; 0: tables are in the
      training process and in the entry itself.
    faults: `none`, `kills` (every process once), `all` (the whole table of promises), or a number
      of kills of processes chosen at random.
    broker_away_secs: how long a killed broker stays away.
    zookeeper_away_secs: how long ZooKeeper does.
    still_secs: how long a process that is made to stand still does.
    page_port: port of the live page on loopback; 0: any free.
  """

  seconds: float = 120
  folder: str = ""
  rate: float = 300
  sync_secs: float = 1.0
  save_secs: int = 30
  digest_secs: float = 1.0
  turn_secs: float = 60
  replicas: int = 2
  slow_syncs: str = "10,60"
  num_ps: int = 1
  faults: str = "kills"
  broker_away_secs: float = 20
  zookeeper_away_secs: float = 60
  still_secs: float = 30
  page_port: int = 0

  def __post_init__(self) -> None:
    if self.faults not in ("none", "kills", "all") and not self.faults.isdigit():
      raise ValueError(f"faults is {self.faults!r}, want none, kills, all, or a number of kills")
    if self.replicas < 2:
      raise ValueError(f"replicas is {self.replicas}, want 2: with one, its end ends serving")
    if self.num_ps < 0:
      raise ValueError(f"num_ps is {self.num_ps}, want at least 0")
    self.slow_sync_secs()

  def slow_sync_secs(self) -> list[float]:
    """Returns `slow_syncs` as numbers.

    Raises:
      ValueError: it holds something else.
    """
    return [float(text) for text in self.slow_syncs.split(",") if text.strip()]


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


def format_secs(value: float) -> str:
  """Returns seconds in words."""
  return f"{value:.2f} s" if value < float("inf") else "no answer"
