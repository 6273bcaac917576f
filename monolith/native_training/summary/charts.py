"""Puts charts into a self-contained page, with the scripts of Plotly and our own inside.

The script is the one in PyPI's package `plotly`, the extra `report`. A page loads no other file
and no address: its policy (Content-Security-Policy) forbids that, and all other scripts. Names come
from files, so they are escaped twice: for HTML, and for Plotly, which takes `<b>` and the like for
markup.
"""

from __future__ import annotations

import html
import json
import math
import pathlib
import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from monolith import _install

# Colours of everything but tables: runs, training and evaluation.
COLORS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0a7b83", "#57606a")
# The step between further hues, in degrees: neighbours differ, and none repeats soon.
_GOLDEN_ANGLE = 137.508
_DASHES = ("solid", "dot", "dash", "dashdot", "longdash", "longdashdot")
_NUM_BUCKETS = 30
_MAX_POINTS = 2000
_LABEL_LENGTH = 36
# Longer legends are beside the chart, where they can be scrolled.
_NUM_BELOW = 4
_FOLDER = pathlib.Path(__file__).parent

Chart = dict[str, Any]


def plotly_script() -> str:
  """Returns Plotly's script, from the package that is installed.

  Raises:
    ModuleNotFoundError: it is not installed; the message says how to do that.
  """
  with _install.naming_extra("report"):
    from plotly import offline
  return offline.get_plotlyjs()


def charts_script() -> str:
  """Returns our script, with the colours, axes and buttons that all charts share."""
  return (_FOLDER / "charts.js").read_text("utf-8")


def color(index: int) -> str:
  """Returns the colour of the table or run of this number; the first ones differ best."""
  if index < len(COLORS):
    return COLORS[index]
  return f"hsl({index * _GOLDEN_ANGLE % 360:.0f},60%,45%)"


def dash(index: int) -> str:
  """Returns the line style of the run of this number."""
  return _DASHES[index % len(_DASHES)]


def line(
  name: str,
  x: Sequence[float],
  y: Sequence[float],
  *,
  color: str,
  dash: str = "solid",
  shown: bool = True,
) -> Chart:
  """Returns a curve for `figure`.

  Of more than 2,000 points, the least and the greatest of each stretch are drawn.

  Args:
    name: its name in the legend; may have any characters.
    x: its steps.
    y: its values; a value that is not finite becomes a gap.
    color: its colour.
    dash: its line style.
    shown: whether it is visible at first, or only after a click on its name.
  """
  kept = _thin_out(y)
  has_gaps = not all(map(math.isfinite, y))
  return {
    "type": "scatter",
    "mode": "lines+markers" if len(kept) < 60 or has_gaps else "lines",
    "name": _label(name),
    "x": [x[i] for i in kept],
    "y": [y[i] if math.isfinite(y[i]) else None for i in kept],
    "line": {"color": color, "dash": dash, "width": 2},
    "marker": {"size": 4},
    "visible": True if shown else "legendonly",
  }


def _label(name: str) -> str:
  """Returns a name for a legend, escaped for Plotly and not too long."""
  if len(name) > _LABEL_LENGTH:
    name = f"{name[: _LABEL_LENGTH // 2]}…{name[-(_LABEL_LENGTH // 2) :]}"
  return html.escape(name, quote=False)


def _thin_out(values: Sequence[float]) -> list[int]:
  """Returns the indices of the values to draw."""
  if len(values) <= _MAX_POINTS:
    return list(range(len(values)))
  kept = {0, len(values) - 1}
  for part in np.array_split(np.arange(len(values)), _MAX_POINTS // 2):
    within = np.asarray([values[i] for i in part], float)
    kept |= {int(part[i]) for i in np.flatnonzero(~np.isfinite(within))}
    if np.isfinite(within).any():
      kept |= {int(part[np.nanargmin(within)]), int(part[np.nanargmax(within)])}
  return sorted(kept)


def bars(
  name: str, limits: Iterable[float], counts: Iterable[float], *, color: str
) -> Chart | None:
  """Returns a histogram for `figure`, `None` if it is empty.

  Args:
    name: its name in the legend.
    limits: the edges of the buckets, one more than there are counts.
    counts: the number of values in each.
    color: its colour.
  """
  counts = np.asarray(list(counts), float)
  edges = np.clip(np.asarray(list(limits), float), -1e30, 1e30)
  used = np.flatnonzero(counts)
  if not len(used):
    return None
  part = slice(max(0, used[0] - 1), used[-1] + 2)
  low, high = edges[:-1][part], edges[1:][part]
  return {
    "type": "bar",
    "name": _label(name),
    "x": ((low + high) / 2).tolist(),
    "width": (high - low).tolist(),
    "y": counts[part].tolist(),
    "customdata": np.stack([low, high], 1).tolist(),
    "hovertemplate": "%{customdata[0]:.4~g} to %{customdata[1]:.4~g}: %{y:,}",
    "opacity": 0.75,
    "marker": {"color": color, "line": {"width": 0}},
  }


def histogram(name: str, values: Sequence[float], *, color: str) -> Chart | None:
  """Returns a histogram of values for `figure`, `None` if none is finite."""
  finite = [value for value in values if math.isfinite(value)]
  if not finite:
    return None
  counts, edges = np.histogram(finite, _NUM_BUCKETS)
  return bars(name, edges, counts, color=color)


def figure(
  title: str,
  traces: Sequence[Chart],
  *,
  x_title: str,
  note: str = "",
  log_scale: bool = True,
  layout: Chart | None = None,
) -> str:
  """Returns the HTML of a chart, which the script draws.

  Args:
    title: its caption.
    traces: its curves or histograms.
    x_title: the title of the horizontal axis.
    note: a sentence below it.
    log_scale: whether a button offers a logarithmic axis.
    layout: differences from the layout of all charts, in Plotly's terms.
  """
  button = "<button type=button class=log aria-pressed=false>log</button>" if log_scale else ""
  if not any(value is not None for trace in traces for value in trace["y"]):
    content, button = "", ""
    note = note or "There is nothing to draw."
  else:
    data = {"traces": list(traces), "layout": {"xaxis": {"title": {"text": x_title}}}}
    if len(traces) > _NUM_BELOW:
      data["layout"]["legend"] = {"orientation": "v", "x": 1.02, "y": 1}
    data["layout"].update(layout or {})
    content = (
      f"<div class=chart role=img aria-label='{html.escape(title)}'></div>"
      f"<script type=application/json>{_to_json(data)}</script>"
    )
  num_gaps = sum(value is None for trace in traces for value in trace["y"])
  if num_gaps:
    note = f"{note} {num_gaps:,} values are not finite.".strip()
  below = f"<p class=soft>{html.escape(note)}</p>" if note else ""
  caption = f"<figcaption><span>{html.escape(title)}</span>{button}</figcaption>"
  return f"<figure>{caption}{content}{below}</figure>"


def _to_json(value: Any) -> str:
  """Returns JSON that cannot end a script element."""
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_page(title: str, body: str) -> str:
  """Returns a page with charts in it.

  Args:
    title: the title of the browser's window.
    body: HTML, with results of `figure` in it.

  Raises:
    ModuleNotFoundError: Plotly is not installed; the message says how to install it.
  """
  nonce = secrets.token_urlsafe(16)
  parts = {
    "policy": "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; "
    f"style-src 'unsafe-inline'; script-src 'nonce-{nonce}'",
    "title": html.escape(title),
    "body": body,
    "scripts": "".join(
      f"<script nonce={nonce}>{script}</script>\n" for script in (plotly_script(), charts_script())
    ),
  }
  template = string.Template((_FOLDER / "report.html").read_text("utf-8"))
  return template.substitute(parts)
