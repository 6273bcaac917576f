"""Makes one HTML page of a training run: `monolith_report MODEL_DIR`, or the log folder of Keras.

The page stands alone: its curves are drawn as SVG, and it loads nothing. It has the curves that
training and evaluations have written, those of each table, where the time of a step goes, the
tables of the newest checkpoint by size, how long their rows are, and histograms of gradients: of a
sample of all, or with the model's `enable_grads_and_vars_summary` of each variable and feature.
"""

from __future__ import annotations

import argparse
import collections
import glob
import html
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io

from monolith import _quiet
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.summary import step_time

_ROWS_PER_TABLE = 5000
_NUM_BUCKETS = 30
_WIDTH, _HEIGHT, _MARGIN = 420, 200, 48
_COLORS = {"training": "#1f6feb", "evaluation": "#d1570b"}
_TABLE_COLORS = (
  "#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0a7b83", "#57606a",
)  # fmt: skip
# Between the hues of further tables, in degrees: neighbours differ, and none comes twice soon.
_GOLDEN_ANGLE = 137.508
# So many in a drawing.
_MAX_DRAWN_TABLES = len(_TABLE_COLORS)
# Curves that there is one of for each table, `rows/user` and so on.
_OF_TABLES = {
  "rows": "rows",
  "admitted": "rows admitted in the run",
  "expired": "rows expired in the run",
  "memory_mb": "memory, MB",
}
# These come first; others follow by name.
_FIRST_CURVES = ("loss", "auc", "log_loss", "examples_per_second", "step_ms", "rows", "memory_mb")

# The second ones are those of `tf.keras.callbacks.TensorBoard`.
_FOLDERS = {"training": ("", "train"), "evaluation": ("eval", "validation")}
_KERAS_PREFIX = "epoch_"

Curve = dict[int, float]


class Table(NamedTuple):
  """A table in a checkpoint.

  Attributes:
    name: its name.
    num_rows: all of them.
    dim: floats of a row.
    optimizers: what its slices are trained with.
    norms: the lengths of some rows' vectors.
  """

  name: str
  num_rows: int
  dim: int
  optimizers: str
  norms: Sequence[float]


def write_report(model_dir: str, path: str | None = None) -> str:
  """Writes the page of a training run.

  Args:
    model_dir: the folder of the model, or the one that Keras's `TensorBoard` writes to.
    path: the file to write, `<model_dir>/report.html` by default.

  Returns:
    The path of the page.

  Raises:
    FileNotFoundError: the folder has neither curves nor a checkpoint.
    ValueError: its profile is damaged.
  """
  curves: dict[str, dict[str, Curve]] = {}
  histograms: dict[str, Any] = {}
  for kind, folders in _FOLDERS.items():
    curves[kind] = {}
    for folder in folders:
      found_curves, found_histograms = _read_events(os.path.join(model_dir, folder))
      curves[kind].update(found_curves)
      histograms.update(found_histograms)
  speed = curves["training"].pop("steps_per_second", {})
  curves["training"]["step_ms"] = {step: 1000 / value for step, value in speed.items() if value}
  checkpoint = tf.train.latest_checkpoint(model_dir)
  if checkpoint is None and not any(curves["training"].values()):
    raise FileNotFoundError(f"{model_dir} has neither curves nor a checkpoint: train there first")
  tables = [] if checkpoint is None else read_tables(checkpoint)
  path = path or os.path.join(model_dir, "report.html")
  with open(path, "w", encoding="utf-8") as f:
    f.write(
      _make_page(model_dir, checkpoint, curves, tables, histograms, step_time.read(model_dir))
    )
  return path


def _read_events(folder: str) -> tuple[dict[str, Curve], dict[str, Any]]:
  """Returns tag -> step -> value, and tag -> the newest histogram."""
  curves: dict[str, Curve] = collections.defaultdict(dict)
  histograms = {}
  for path in sorted(glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*"))):
    try:
      for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
          if value.HasField("simple_value"):
            curves[value.tag][event.step] = value.simple_value
          elif value.metadata.plugin_data.plugin_name == "scalars":  # as TensorFlow 2 writes them
            tag = value.tag.removeprefix(_KERAS_PREFIX)
            curves[tag][event.step] = float(tf.make_ndarray(value.tensor))
          elif value.HasField("histo"):
            histograms[value.tag] = value.histo
    except tf.errors.DataLossError:
      continue  # The run may be writing the last record.
  return curves, histograms


def read_tables(checkpoint: str) -> list[Table]:
  """Returns the tables of a checkpoint, the largest first.

  Args:
    checkpoint: its prefix.
  """
  counts: dict[str, int] = collections.Counter()
  norms: dict[str, list[float]] = collections.defaultdict(list)
  for name, count, rows in _read_parts(checkpoint + ".assets"):
    counts[name] += count
    left = max(0, _ROWS_PER_TABLE - len(norms[name]))
    norms[name] += [float(np.linalg.norm(row.num)) for row in itertools.islice(rows, left)]
  known = checkpoint_slices.read(checkpoint) or {}
  tables = []
  for name, count in counts.items():
    slices = known.get(name, [])
    optimizers = ", ".join(sorted({s.optimizer for s in slices}))
    tables.append(Table(name, count, sum(s.dim for s in slices), optimizers, norms[name]))
  return sorted(tables, key=lambda table: (-table.num_rows, table.name))


def _read_parts(assets: str) -> Iterator[tuple[str, int, Iterator[Any]]]:
  """Yields table name, number of rows and the rows, for each table in each file."""
  for path in sorted(glob.glob(os.path.join(glob.escape(assets), "*-of-*"))):
    base, _, shard = os.path.basename(path).rpartition("-of-")
    if ".meta-" in base:
      continue
    base, _, number = base.rpartition("-")
    meta = os.path.join(assets, f"{base}.meta-{number}-of-{shard}")
    if not os.path.exists(meta):
      continue
    rows = _read_rows(path)
    for record in _pywrap_record_io.RecordIterator(meta, ""):
      entry = embedding_hash_table_pb2.MultiHashTableMetadata.FromString(record)
      part = itertools.islice(rows, entry.num_entries)
      yield entry.table_name, entry.num_entries, part
      collections.deque(part, maxlen=0)


def _read_rows(path: str) -> Iterator[Any]:
  for record in _pywrap_record_io.RecordIterator(path, "SNAPPY"):
    yield embedding_hash_table_pb2.EntryDump.FromString(record)


def _make_page(
  model_dir: str,
  checkpoint: str | None,
  curves: dict[str, dict[str, Curve]],
  tables: Sequence[Table],
  histograms: dict[str, Any],
  times: step_time.StepTime | None,
) -> str:
  tags = {tag for of_kind in curves.values() for tag, curve in of_kind.items() if curve}
  order = [tag for tag in _FIRST_CURVES if tag in tags] + sorted(tags.difference(_FIRST_CURVES))
  drawings = [
    _figure(tag, _draw_curves({kind: c[tag] for kind, c in curves.items() if c.get(tag)}))
    for tag in order
    if tag.partition("/")[0] not in _OF_TABLES or "/" not in tag
  ]
  colors = _choose_table_colors(curves["training"], tables)
  largest = max((table.num_rows for table in tables), default=0)
  rows = "".join(
    f"<tr><td>{html.escape(table.name)}</td><td class=n>{table.num_rows:,}</td>"
    f"<td><div class=bar style='width:{160 * table.num_rows / max(largest, 1):.0f}px;"
    f"background:{colors[table.name]}'></div></td>"
    f"<td class=n>{table.dim or '?'}</td><td>{html.escape(table.optimizers)}</td></tr>"
    for table in tables
  )
  norms = [
    _figure(table.name, _draw_histogram(table.norms, colors[table.name]))
    for table in tables
    if table.norms
  ]
  summaries = [
    _figure(tag, _draw_bars(histo.bucket_limit, histo.bucket))
    for tag, histo in sorted(histograms.items())
  ]
  sections = [
    ("Curves", "".join(drawings) or "<p>none yet</p>"),
    ("Curves of tables", _draw_tables(curves["training"], colors) or "<p>none yet</p>"),
    ("Where the time of a step goes", _draw_times(times)),
    (
      "Tables by size",
      f"<table><tr><th>table<th>rows<th><th>floats per row<th>optimizer</tr>{rows}</table>",
    ),
    ("Lengths of rows", "".join(norms) or "<p>no rows</p>"),
  ]
  sections.append(
    (
      "Gradients and variables",
      "".join(summaries)
      or "<p>not summarised: a <code>MonolithModel</code> does so every 100 steps</p>",
    )
  )
  body = "".join(f"<h2>{title}</h2><section>{content}</section>" for title, content in sections)
  name = html.escape(os.path.basename(os.path.normpath(model_dir)))
  newest = html.escape(os.path.basename(checkpoint)) if checkpoint else "no checkpoint"
  legend = "".join(
    f"<span style='color:{color}'>● {kind}</span> " for kind, color in _COLORS.items()
  )
  return (
    "<!DOCTYPE html><html lang=en><meta charset=utf-8>"
    f"<title>{name}</title><style>{_STYLE}</style>"
    f"<h1>{name}</h1><p>{newest} &nbsp; {legend}</p>{body}</html>\n"
  )


_STYLE = """
body{font:15px/1.4 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem}
section{display:flex;flex-wrap:wrap;gap:1rem}
figure{margin:0;border:1px solid #d6dce4;padding:.5rem}
figcaption{font-weight:600}td,th{padding:.2rem .8rem;text-align:left}.n{text-align:right}
.bar{background:#1f6feb;height:.8rem}svg text{font:11px system-ui,sans-serif;fill:#57606a}
.legend{margin:0;max-width:420px;font-size:13px}
"""


def _figure(title: str, drawing: str) -> str:
  return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawing}</figure>"


def _choose_table_colors(curves: dict[str, Curve], tables: Sequence[Table]) -> dict[str, str]:
  """Returns table -> its colour in all drawings of the page; the largest get the clearest ones."""
  names = [table.name for table in tables]
  for kind in _OF_TABLES:
    names += _by_size(_curves_of_kind(curves, kind))
  colors = {}
  for i, name in enumerate(dict.fromkeys(names)):
    hue = i * _GOLDEN_ANGLE % 360
    colors[name] = _TABLE_COLORS[i] if i < len(_TABLE_COLORS) else f"hsl({hue:.0f},60%,40%)"
  return colors


def _curves_of_kind(curves: dict[str, Curve], kind: str) -> dict[str, Curve]:
  """Returns table -> its curve of one kind."""
  return {
    tag.partition("/")[2]: curve
    for tag, curve in curves.items()
    if curve and tag.startswith(f"{kind}/")
  }


def _by_size(of_tables: dict[str, Curve]) -> list[str]:
  """Returns the tables, the one with the largest last value first."""
  return sorted(of_tables, key=lambda name: (-of_tables[name][max(of_tables[name])], name))


def _draw_tables(curves: dict[str, Curve], colors: dict[str, str]) -> str:
  """Returns a drawing for each kind of curve that tables have, with the largest tables in it."""
  figures = []
  for kind, title in _OF_TABLES.items():
    of_kind = _curves_of_kind(curves, kind)
    if not of_kind:
      continue
    drawn = _by_size(of_kind)[:_MAX_DRAWN_TABLES]
    names = "".join(
      f"<span style='color:{colors[name]}'>● {html.escape(name)}</span> " for name in drawn
    )
    if len(of_kind) > len(drawn):
      names += f"and {len(of_kind) - len(drawn)} smaller ones"
    drawing = _draw_curves({name: of_kind[name] for name in drawn}, colors)
    figures.append(_figure(title, f"{drawing}<p class=legend>{names}</p>"))
  return "".join(figures)


def _draw_times(times: step_time.StepTime | None) -> str:
  if times is None:
    return (
      "<p>no profile yet: a training run writes one of ten steps, 500 steps after its first one"
      "</p>"
    )
  longest = max([times.step_ms, *times.parts_ms.values()])
  rows = "".join(
    f"<tr><td>{html.escape(part)}</td><td class=n>{ms:.3f} ms</td>"
    f"<td><div class=bar style='width:{300 * ms / longest:.0f}px'></div></td></tr>"
    for part, ms in (("a step", times.step_ms), *times.parts_ms.items())
  )
  return (
    f"<table>{rows}</table><p>{times.num_steps} steps of a profile, which itself takes time. "
    "Threads work at the same time: parts may add up to more than a step.</p>"
  )


def _draw_curves(curves: dict[str, Curve], colors: dict[str, str] | None = None) -> str:
  steps = [step for curve in curves.values() for step in curve]
  values = [v for curve in curves.values() for v in curve.values() if np.isfinite(v)]
  if not values:
    return "<p>no finite value</p>"
  x, y = _scale(min(steps), max(steps), _WIDTH), _scale(min(values), max(values), _HEIGHT)
  shapes = []
  for kind, curve in curves.items():
    points = [(x(step), _HEIGHT - y(v)) for step, v in sorted(curve.items()) if np.isfinite(v)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    color = (colors or _COLORS)[kind]
    shapes.append(f"<polyline points='{path}' fill=none stroke='{color}' stroke-width=1.5 />")
    shapes += [f"<circle cx='{a:.1f}' cy='{b:.1f}' r=2 fill='{color}' />" for a, b in points[-1:]]
  return _svg(shapes, (min(steps), max(steps)), (min(values), max(values)))


def _draw_histogram(values: Sequence[float], color: str) -> str:
  counts, edges = np.histogram(values, _NUM_BUCKETS)
  return _draw_bars(edges[1:], counts, float(edges[0]), color)


def _draw_bars(
  limits: Iterable[float],
  counts: Iterable[float],
  first: float | None = None,
  color: str = _COLORS["training"],
) -> str:
  counts = np.asarray(list(counts), float)
  limits = np.asarray(list(limits), float)
  is_used = np.nonzero(counts)[0]
  if not len(is_used):
    return "<p>empty</p>"
  used = slice(max(0, is_used[0] - 1), is_used[-1] + 1)
  counts, limits = counts[used], limits[used]
  width = (_WIDTH - _MARGIN) / len(counts)
  y = _scale(0, float(counts.max()), _HEIGHT)
  shapes = [
    f"<rect x='{_MARGIN + i * width:.1f}' y='{_HEIGHT - y(c):.1f}' width='{max(width - 1, 1):.1f}' "
    f"height='{max(0.0, y(c) - y(0)):.1f}' fill='{color}' />"
    for i, c in enumerate(counts)
  ]
  low = float(limits[0]) if first is None else first
  return _svg(shapes, (low, float(limits[-1])), (0, float(counts.max())))


def _scale(low: float, high: float, size: int) -> Any:
  """Returns a function from values to places between the margin and the size."""
  span = (high - low) or 1.0
  return lambda value: _MARGIN + (value - low) / span * (size - _MARGIN - 8)


def _svg(shapes: Sequence[str], x: tuple[float, float], y: tuple[float, float]) -> str:
  bottom = _HEIGHT - _MARGIN
  axes = (
    f"<path d='M{_MARGIN} 4V{bottom}H{_WIDTH}' fill=none stroke='#afb8c1' />"
    f"<text x=4 y=14>{y[1]:.4g}</text><text x=4 y={bottom}>{y[0]:.4g}</text>"
    f"<text x={_MARGIN} y={bottom + 16}>{x[0]:.4g}</text>"
    f"<text x={_WIDTH} y={bottom + 16} text-anchor=end>{x[1]:.4g}</text>"
  )
  return f"<svg width={_WIDTH + 8} height={_HEIGHT} role=img>{axes}{''.join(shapes)}</svg>"


def cli(argv: Sequence[str] | None = None) -> int:
  """Runs the command `monolith_report`; returns the exit status."""
  parser = argparse.ArgumentParser(prog="monolith_report", description=__doc__.split("\n")[0])
  parser.add_argument("model_dir", help="the folder of the model, or that of Keras's curves")
  parser.add_argument("--output", help="the page, MODEL_DIR/report.html by default")
  arguments = parser.parse_args(argv)
  _quiet.filter_tensorflow()
  try:
    print(write_report(arguments.model_dir, arguments.output))
  except (FileNotFoundError, ValueError, tf.errors.OpError) as e:
    print(f"monolith_report: {getattr(e, 'message', e)}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(cli())
