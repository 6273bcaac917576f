"""Measures ours and a peer in turn and prints their ratio: above 1 means ours is faster."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: seconds of ours and of the peer, and the ratio that is wanted."""

  name: str
  peer_name: str
  ours: float
  peer: float
  wanted: float | None

  @property
  def ratio(self) -> float:
    return self.peer / self.ours


def interleaved_medians(
  runs: Sequence[Callable[[], object]], repeats: int, warm_up: int = 2, inner: int = 1
) -> list[float]:
  """Returns the median seconds of each of `runs`, called in turn: a busy machine slows all alike.

  Args:
    runs: what to measure.
    repeats: how often each is measured.
    warm_up: rounds that do not count.
    inner: calls per measurement, for runs that take microseconds.
  """
  times: list[list[float]] = [[] for _ in runs]
  for repeat in range(-warm_up, repeats):
    for run, seconds in zip(runs, times):
      start = time.perf_counter()
      for _ in range(inner):
        run()
      if repeat >= 0:
        seconds.append((time.perf_counter() - start) / inner)
  return [statistics.median(seconds) for seconds in times]


def record(rows: Sequence[tuple[str, str, float]]) -> None:
  """Keeps ratios of the running benchmark in `build/benchmarks/`, where `make plots` finds them.

  An indented name, and one without a peer, belong to the row before them and get its name in front.

  Args:
    rows: names, what they are measured against, and ratios.
  """
  named: dict[str, float] = {}
  above, above_peer = "", ""
  for text, peer, ratio in rows:
    name = text.partition(":")[0]  # what follows are times
    if name.startswith(" ") or not peer:
      named[f"{above} > {name.strip()} | {peer or above_peer}"] = ratio
    else:
      above, above_peer = name, peer
      named[f"{name} | {peer}"] = ratio
  folder = pathlib.Path(__file__).resolve().parent.parent / "build/benchmarks"
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / f"{pathlib.Path(sys.argv[0]).stem}.json"
  before = json.loads(file.read_text()) if file.exists() else {}
  file.write_text(json.dumps({**before, **named}, indent=2))


def print_rows(rows: Sequence[Row]) -> None:
  print(f"\n{'op':<50} {'against':<44} {'ours ms':>9} {'peer ms':>9} {'ratio':>7} {'want':>6}")
  for row in rows:
    wanted = "" if row.wanted is None else f"{row.wanted:.1f}x"
    below = row.wanted is not None and row.ratio < row.wanted
    print(
      f"{row.name:<50} {row.peer_name:<44} {row.ours * 1e3:>9.3f} {row.peer * 1e3:>9.3f} "
      f"{row.ratio:>6.2f}x {wanted:>6}{'  BELOW' if below else ''}"
    )
  record([(row.name, row.peer_name, row.ratio) for row in rows])
