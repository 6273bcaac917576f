"""The first part of a run's page: its last figures, and how they differ from those of the last run.

The last run is the one before the newest start in the same folder. Where a page has several
folders, each is compared with the first.
"""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monolith.native_training.summary.run_reader import (
  EVALUATION,
  TRAINING,
  Checkpoint,
  Run,
  is_of_table,
)

_MAX_CHECKPOINTS = 10
_MAX_NAMES = 5
# Curves that are shown on tiles, the most important first.
_TILES = ("loss", "auc", "log_loss", "examples_per_second", "step_ms")
_MEMORY = "memory_mb"


class _Fact(NamedTuple):
  """A figure, and how it is written."""

  value: float
  format: Callable[[float], str]


# Name of a figure -> figure.
_Facts = dict[str, _Fact]


def make(runs: Sequence[Run]) -> str:
  """Returns the HTML of the summary.

  Args:
    runs: what the page shows; the others are compared with the first.
  """
  if len(runs) > 1:
    columns = [(run.name, _find_facts(run, 0.0, math.inf)) for run in runs]
    return _beside("<h2>Summary</h2>" + _make_table(columns), *map(_list_checkpoints, runs))
  (run,) = runs
  facts = _find_facts(run, 0.0, math.inf)
  parts = []
  if len(run.sessions) > 1:
    before, newest = run.sessions[-2:]
    columns = [
      (f"last run, to {_format_time(before.end)}", _find_facts(run, before.start, newest.start)),
      (f"this run, from {_format_time(newest.start)}", _find_facts(run, newest.start, math.inf)),
    ]
    parts += ["<h2>What changed since the last run</h2>", _make_table(columns), _list_names(run)]
  else:
    parts += ["<h2>Summary</h2>", _make_table([("last value", facts)])]
    if run.sessions:
      parts.append("<p class=soft>The first run in this folder: nothing to compare with.</p>")
  return (
    _describe_times(run) + _make_tiles(run, facts) + _beside("".join(parts), _list_checkpoints(run))
  )


def _beside(*parts: str) -> str:
  """Returns parts side by side where the page is wide enough."""
  return f"<div class=beside>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _find_facts(run: Run, since: float, until: float) -> _Facts:
  """Returns the last figures that were written between two times."""
  sessions = [session for session in run.sessions if since <= session.start < until]
  facts: _Facts = {}
  last: dict[str, dict[str, float]] = {}
  steps = []
  for kind in (TRAINING, EVALUATION):
    last[kind] = {}
    for tag, points in run.points[kind].items():
      within = [point for point in points if since <= point.time < until]
      if within:
        last[kind][tag] = within[-1].value
        if kind == TRAINING and tag not in run.epochs:
          steps.append(within[-1].step)
  if steps:
    facts["step"] = _Fact(max(steps), _format_count)
  if sessions:
    seconds = sum(session.end - session.start for session in sessions)
    facts["duration"] = _Fact(seconds, _format_seconds)
  for tag in _in_order([*last[TRAINING], *last[EVALUATION]]):
    for kind in (TRAINING, EVALUATION):
      if tag in last[kind]:
        facts[f"{kind} {tag}"] = _Fact(last[kind][tag], _format_number)
  rows = f"{TRAINING} rows"
  if rows not in facts and run.tables and math.isinf(until):
    facts[rows] = _Fact(sum(table.num_rows for table in run.tables), _format_count)
  if rows in facts:
    facts[rows] = facts[rows]._replace(format=_format_count)
  peak = [p.value for p in run.points[TRAINING].get(_MEMORY, []) if since <= p.time < until]
  if peak:
    facts["most memory_mb"] = _Fact(max(peak), _format_number)
  return facts


def _in_order(tags: Sequence[str]) -> list[str]:
  """Returns the tags that are no table's, each once, the important ones first."""
  known = {tag for tag in tags if not is_of_table(tag)}
  return [tag for tag in _TILES if tag in known] + sorted(known.difference(_TILES))


def _make_table(columns: Sequence[tuple[str, _Facts]]) -> str:
  """Returns a table of figures; from the second column on with the change from the first."""
  base = columns[0][1]
  names = list(dict.fromkeys(name for _, facts in columns for name in facts))
  head = "".join(f"<th class=n>{html.escape(title)}</th>" for title, _ in columns)
  rows = []
  for name in names:
    cells = [f"<td>{html.escape(name)}</td>"]
    for i, (_, facts) in enumerate(columns):
      fact = facts.get(name)
      text = "-" if fact is None else html.escape(fact.format(fact.value))
      if i and fact is not None and name in base:
        text += f" <span class=soft>({_format_change(base[name], fact)})</span>"
      cells.append(f"<td class=n>{text}</td>")
    rows.append(f"<tr>{''.join(cells)}</tr>")
  return (
    f"<div class=scroll><table class=summary><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"
  )


def _format_change(before: _Fact, now: _Fact) -> str:
  change = now.value - before.value
  if not math.isfinite(change):
    return "?"
  if not change:
    return "same"
  text = f"{'+' if change > 0 else '−'}{now.format(abs(change))}"
  return f"{text}, {100 * change / abs(before.value):+.1f}%" if before.value else text


def _make_tiles(run: Run, facts: _Facts) -> str:
  tiles = [("step", facts.get("step")), ("duration", facts.get("duration"))]
  for tag in _TILES:
    for kind in (TRAINING, EVALUATION):
      tiles.append((f"{kind} {tag}", facts.get(f"{kind} {tag}")))
  tiles.append(("rows", facts.get(f"{TRAINING} rows")))
  tiles.append(("MB of memory", facts.get(f"{TRAINING} {_MEMORY}")))
  texts = [(name, fact.format(fact.value)) for name, fact in tiles if fact is not None]
  if run.tables:
    texts.append(("tables", str(len(run.tables))))
  texts.append(("checkpoints on disk", str(len(run.checkpoints))))
  return (
    "<div class=tiles>"
    + "".join(f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in texts)
    + "</div>"
  )


def _describe_times(run: Run) -> str:
  if not run.sessions:
    return "<p class=soft>no curves of training</p>"
  first, last = run.sessions[0], run.sessions[-1]
  count = len(run.sessions)
  runs = "one run" if count == 1 else f"{count} runs"
  return f"<p class=soft>{runs}, from {_format_time(first.start)} to {_format_time(last.end)}</p>"


def _list_names(run: Run) -> str:
  """Returns sentences about tables that came or went with the newest run."""
  newest = run.sessions[-1].start
  before: set[str] = set()
  now: set[str] = set()
  for tag, points in run.points[TRAINING].items():
    if tag.startswith("rows/") and points:
      name = tag.partition("/")[2]
      if points[0].time < newest:
        before.add(name)
      if points[-1].time >= newest:
        now.add(name)
  sentences = []
  for title, names in (("New tables", now - before), ("Tables no longer there", before - now)):
    if names and before and now:
      shown = ", ".join(html.escape(name) for name in sorted(names)[:_MAX_NAMES])
      more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
      sentences.append(f"<p>{title}: {shown}{more}.</p>")
  return "".join(sentences)


def _list_checkpoints(run: Run) -> str:
  title = f"<h2>Checkpoints of {html.escape(run.name)}</h2>"
  if not run.checkpoints:
    return f"{title}<p>none</p>"

  def row(checkpoint: Checkpoint) -> str:
    return (
      f"<tr><td>{html.escape(checkpoint.name)}</td><td>{_format_time(checkpoint.time)}</td>"
      f"<td class=n>{checkpoint.num_bytes / (1 << 20):,.1f} MB</td></tr>"
    )

  shown = run.checkpoints[::-1][:_MAX_CHECKPOINTS]
  older = len(run.checkpoints) - len(shown)
  more = f"<p class=soft>and {older} older ones</p>" if older else ""
  return f"{title}<div class=scroll><table>{''.join(map(row, shown))}</table></div>{more}"


def _format_number(value: float) -> str:
  if not math.isfinite(value):
    return str(value)
  if abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.4g}"


def _format_count(value: float) -> str:
  return f"{value:,.0f}"


def _format_seconds(seconds: float) -> str:
  whole = round(seconds)
  if whole < 60:
    return f"{seconds:.1f} s"
  return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _format_time(seconds: float) -> str:
  return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
