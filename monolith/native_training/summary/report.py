"""Makes one HTML page of a training run: `monolith_report MODEL_DIR`, or the log folder of Keras.

The page stands alone: its charts are drawn by Plotly (the extra `report`), whose script is in it,
and it loads nothing. It begins with a summary: the last metrics, and how they differ from those of
the last run, or of another folder (`monolith_report RUN_A RUN_B`), whose curves lie over one
another. Below are the curves of training and evaluations, those of each table, where the time of a
step goes, the tables of the newest checkpoint by size, how long their rows are, and histograms of
gradients: of a sample of all, or with the model's `enable_grads_and_vars_summary` of each variable
and feature.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections.abc import Sequence

import tensorflow as tf

from monolith import _quiet
from monolith.native_training.summary import charts, report_summary, run_reader
from monolith.native_training.summary.run_reader import EVALUATION, TRAINING, Run, Table

# Also here, where they were before they had modules of their own.
from monolith.native_training.summary.run_reader import read_tables as read_tables

# More can be chosen in the legend, and more again are only in the table of tables.
_MAX_SHOWN_TABLES = len(charts.COLORS)
_MAX_DRAWN_TABLES = 50
_TABLE_TITLES = dict(
  zip(
    run_reader.TABLE_CURVES,
    ("rows", "rows admitted in the run", "rows expired in the run", "memory, MB"),
  )
)
# These come first; others follow by name.
_FIRST_CURVES = ("loss", "auc", "log_loss", "examples_per_second", "step_ms", "rows", "memory_mb")


def write_report(model_dir: str, path: str | None = None, compared_with: Sequence[str] = ()) -> str:
  """Writes the page of a training run.

  Args:
    model_dir: the folder of the model, or the one that Keras's `TensorBoard` writes to.
    path: the file to write, `<model_dir>/report.html` by default.
    compared_with: folders of other runs, drawn into the same charts.

  Returns:
    The path of the page.

  Raises:
    FileNotFoundError: a folder has neither curves nor a checkpoint.
    ModuleNotFoundError: Plotly is not installed; the message says how to install it.
    ValueError: a profile is damaged.
  """
  folders = [model_dir, *compared_with]
  runs = [run_reader.read_run(folder, name) for folder, name in zip(folders, _name_runs(folders))]
  title = " and ".join(run.name for run in runs)
  page = charts.make_page(title, _make_body(runs, title))
  path = path or os.path.join(model_dir, "report.html")
  with open(path, "w", encoding="utf-8") as f:
    f.write(page)
  return path


def _name_runs(folders: Sequence[str]) -> list[str]:
  """Returns the last parts of paths, as many as tell them apart."""
  parts = [os.path.abspath(folder).split(os.sep) for folder in folders]
  for length in range(1, max(map(len, parts))):
    names = [os.sep.join(of_path[-length:]) for of_path in parts]
    if len(set(names)) == len(names):
      return names
  return list(folders)


def _make_body(runs: Sequence[Run], title: str) -> str:
  colors = _choose_table_colors(runs)
  sections = [
    ("Curves", "charts", _draw_curves(runs)),
    ("Curves of tables", "wide", _draw_tables(runs, colors)),
    ("Where the time of a step goes", "wide", _draw_times(runs)),
    ("Tables by size", "scroll", _list_tables(runs, colors)),
    ("Lengths of rows", "charts", _draw_norms(runs, colors)),
    ("Gradients and variables", "charts", _draw_histograms(runs)),
  ]
  body = "".join(
    f"<h2>{heading}</h2><section class='{kind}'>{content}</section>\n"
    for heading, kind, content in sections
  )
  return f"<h1>{html.escape(title)}</h1>\n{report_summary.make(runs)}\n{body}"


def _choose_table_colors(runs: Sequence[Run]) -> dict[str, str]:
  """Returns table -> its colour in all charts of the page; the largest get the clearest ones."""
  names = [table.name for run in runs for table in run.tables]
  for kind in _TABLE_TITLES:
    names += _by_size(runs, kind)
  return {name: charts.color(i) for i, name in enumerate(dict.fromkeys(names))}


def _by_size(runs: Sequence[Run], kind: str) -> list[str]:
  """Returns the tables with a curve of a kind, the one with the largest last value first."""
  last: dict[str, float] = {}
  for run in runs:
    for tag, points in run.points[TRAINING].items():
      if points and tag.startswith(f"{kind}/"):
        name = tag.partition("/")[2]
        last[name] = max(last.get(name, points[-1].value), points[-1].value)
  return sorted(last, key=lambda name: (-last[name], name))


def _draw_curves(runs: Sequence[Run]) -> str:
  tags = {
    tag
    for run in runs
    for of_kind in run.points.values()
    for tag, points in of_kind.items()
    if points and not run_reader.is_of_table(tag)
  }
  order = [tag for tag in _FIRST_CURVES if tag in tags] + sorted(tags.difference(_FIRST_CURVES))
  return "".join(_draw_curve(runs, tag) for tag in order) or "<p>none yet</p>"


def _draw_curve(runs: Sequence[Run], tag: str) -> str:
  traces = []
  for i, run in enumerate(runs):
    for j, kind in enumerate((TRAINING, EVALUATION)):
      points = run.curve(kind, tag)
      if points:
        # One run: a colour for each kind. Several: one for each run.
        look = (
          {"color": charts.color(j)}
          if len(runs) == 1
          else {"color": charts.color(i), "dash": charts.dash(j)}
        )
        name = kind if len(runs) == 1 else f"{run.name}, {kind}"
        traces.append(
          charts.line(name, [p.step for p in points], [p.value for p in points], **look)
        )
  return charts.figure(tag, traces, x_title=_x_title(runs, tag))


def _x_title(runs: Sequence[Run], tag: str) -> str:
  return "epoch" if any(tag in run.epochs for run in runs) else "step"


def _draw_tables(runs: Sequence[Run], colors: dict[str, str]) -> str:
  """Returns a chart for each kind of curve that tables have."""
  figures = []
  for kind, title in _TABLE_TITLES.items():
    names = _by_size(runs, kind)
    if not names:
      continue
    traces = []
    for i, name in enumerate(names[:_MAX_DRAWN_TABLES]):
      for j, run in enumerate(runs):
        points = run.curve(TRAINING, f"{kind}/{name}")
        if points:
          traces.append(
            charts.line(
              name if len(runs) == 1 else f"{name}, {run.name}",
              [p.step for p in points],
              [p.value for p in points],
              color=colors[name],
              dash=charts.dash(j),
              shown=i < _MAX_SHOWN_TABLES,
            )
          )
    notes = []
    if len(names) > _MAX_SHOWN_TABLES:
      notes.append(f"The largest {_MAX_SHOWN_TABLES} are drawn: a click at a name draws another.")
    if len(names) > _MAX_DRAWN_TABLES:
      notes.append(f"{len(names) - _MAX_DRAWN_TABLES} smaller ones are left out.")
    figures.append(charts.figure(title, traces, x_title="step", note=" ".join(notes)))
  return "".join(figures) or "<p>none yet</p>"


def _draw_times(runs: Sequence[Run]) -> str:
  newest = [(run, run.profiles[-1]) for run in runs if run.profiles]
  if not newest:
    return (
      "<p>no profile yet: a training run writes one of ten steps, 20 seconds or 500 steps after "
      "its first one, whichever comes sooner</p>"
    )
  parts = dict.fromkeys(part for _, times in newest for part in ("a step", *times.parts_ms))
  traces = [
    {
      "type": "bar",
      "orientation": "h",
      "name": html.escape(run.name),
      "x": [times.step_ms, *(times.parts_ms.get(part, 0) for part in list(parts)[1:])],
      "y": list(parts),
      "hovertemplate": "%{x:.3f} ms",
      "marker": {"color": charts.color(i)},
    }
    for i, (run, times) in enumerate(newest)
  ]
  figures = [
    charts.figure(
      "the newest profile",
      traces,
      x_title="milliseconds",
      note=f"{newest[-1][1].num_steps} steps of a profile, which itself takes time. "
      "Threads work at the same time: parts may add up to more than a step.",
      log_scale=False,
      layout={
        "barmode": "group",
        "bargap": 0.3,
        "hovermode": "y",
        "yaxis": {"autorange": "reversed"},
        "showlegend": len(newest) > 1,
      },
    )
  ]
  figures += [_draw_profiles(run) for run in runs if len(run.profiles) > 1]
  return "".join(figures)


def _draw_profiles(run: Run) -> str:
  """Returns a chart of all profiles of a run, one above another's place in time."""
  start = run.sessions[0].start if run.sessions else run.profiles[0].time
  minutes = [(times.time - start) / 60 for times in run.profiles]
  parts = dict.fromkeys(part for times in run.profiles for part in times.parts_ms)
  traces = [
    charts.line(
      part,
      minutes,
      [times.parts_ms.get(part, 0.0) for times in run.profiles],
      color=charts.color(i),
    )
    for i, part in enumerate(parts)
  ]
  return charts.figure(
    f"{run.name}: milliseconds of a step in its last {len(run.profiles)} profiles",
    traces,
    x_title="minutes since the first start",
  )


def _list_tables(runs: Sequence[Run], colors: dict[str, str]) -> str:
  tables: dict[str, list[Table | None]] = {}
  for i, run in enumerate(runs):
    for table in run.tables:
      tables.setdefault(table.name, [None] * len(runs))[i] = table
  if not tables:
    return "<p>no checkpoint</p>"

  def num_rows(of_runs: Sequence[Table | None]) -> int:
    return max(table.num_rows for table in of_runs if table)

  order = sorted(tables, key=lambda name: (-num_rows(tables[name]), name))
  largest = max(num_rows(tables[order[0]]), 1)
  counted = [f"rows of {run.name}" for run in runs] if len(runs) > 1 else ["rows"]
  head = "".join(f"<th class=n>{html.escape(title)}</th>" for title in counted)
  rows = []
  for name in order:
    known = next(table for table in reversed(tables[name]) if table)
    counts = "".join(
      f"<td class=n>{table.num_rows:,}</td>" if table else "<td class=n>none</td>"
      for table in tables[name]
    )
    rows.append(
      f"<tr><td><span class=name style='border-color:{colors[name]}'>{html.escape(name)}</span>"
      f"</td>{counts}<td><div class=bar style='background:{colors[name]};"
      f"width:{240 * num_rows(tables[name]) / largest:.0f}px'></div></td>"
      f"<td class=n>{known.dim or '?'}</td><td>{html.escape(known.optimizers)}</td></tr>"
    )
  return (
    f"<table><tr><th>table</th>{head}<th></th><th class=n>floats per row</th><th>optimizer</th>"
    f"</tr>{''.join(rows)}</table>"
  )


def _draw_norms(runs: Sequence[Run], colors: dict[str, str]) -> str:
  norms: dict[str, list[charts.Chart]] = {}
  for run in runs:
    for table in run.tables:
      trace = charts.histogram(run.name, table.norms, color=colors[table.name])
      if trace is not None:
        # A colour is a table's: runs differ in how dark they are.
        trace["opacity"] = 0.85 if run is runs[0] else 0.45
        norms.setdefault(table.name, []).append(trace)
  layout = {"showlegend": len(runs) > 1, "hovermode": "closest"}
  return (
    "".join(
      charts.figure(name, traces, x_title="length", layout=layout) for name, traces in norms.items()
    )
    or "<p>no rows</p>"
  )


def _draw_histograms(runs: Sequence[Run]) -> str:
  figures = []
  for tag in sorted({tag for run in runs for tag in run.histograms}):
    traces = []
    for i, run in enumerate(runs):
      histo = run.histograms.get(tag)
      if histo is not None:
        edges = [histo.min, *histo.bucket_limit]
        trace = charts.bars(run.name, edges, histo.bucket, color=charts.color(i))
        if trace is not None:
          traces.append(trace)
    layout = {"showlegend": len(runs) > 1, "hovermode": "closest"}
    figures.append(charts.figure(tag, traces, x_title="value", layout=layout))
  return "".join(figures) or (
    "<p>not summarised: a <code>MonolithModel</code> does so every 100 steps</p>"
  )


def cli(argv: Sequence[str] | None = None) -> int:
  """Runs the command `monolith_report`; returns the exit status."""
  parser = argparse.ArgumentParser(prog="monolith_report", description=__doc__.split("\n")[0])
  parser.add_argument("model_dir", help="the folder of the model, or that of Keras's curves")
  parser.add_argument(
    "others", nargs="*", metavar="model_dir", help="folders of other runs, drawn over the first"
  )
  parser.add_argument("--output", help="the page, MODEL_DIR/report.html by default")
  arguments = parser.parse_args(argv)
  _quiet.filter_tensorflow()
  try:
    print(write_report(arguments.model_dir, arguments.output, arguments.others))
  except (FileNotFoundError, ModuleNotFoundError, ValueError, tf.errors.OpError) as e:
    print(f"monolith_report: {getattr(e, 'message', e)}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(cli())
