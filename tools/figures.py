"""Renews the tables and plots of measured figures: `make plots`.

`benchmarks/results.json` is the one source. Benchmarks leave their ratios in `build/benchmarks/`;
`figures.py --read arm64` (or `x86_64`) takes them over for this kind of machine, and a figure that
was measured twice becomes a range with `--widen`. Then the blocks between `<!-- figures: NAME -->`
and `<!-- end of figures -->` and the plots are written again, and a test compares them.
"""

from __future__ import annotations

import argparse
import html
import json
import pathlib
import re
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks/results.json"
_MACHINES = {"arm64": "ARM64, 2 cores", "x86_64": "x86-64, 16 cores"}
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_PAGES = ("README.md", "docs/speed.md")

# The plots: a row is 34 units high, its label ends where the bars begin.
_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _BAR = 760, 250, 90, 76, 34, 18
_TEXT, _FAINT, _COLOR, _BELOW = "#24292f", "#6e7781", "#3f51b5", "#9fa8da"


def load() -> dict[str, list[dict[str, Any]]]:
  """Returns the measured figures by kind."""
  return json.loads(_RESULTS.read_text())


def _save(results: dict[str, list[dict[str, Any]]]) -> None:
  parts = [
    f"{json.dumps(kind)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
    for kind, rows in results.items()
  ]
  _RESULTS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def read(rows: list[dict[str, Any]], machine: str, folder: pathlib.Path, widen: bool) -> int:
  """Takes over what benchmarks have left in a folder, and returns how many rows that changes.

  Args:
    rows: the rows of ratios, changed in place.
    machine: the kind of this machine.
    folder: has a file for each benchmark that ran.
    widen: whether figures before this run count as well.
  """
  changed = 0
  for row in rows:
    script, name, peer = row["prints"]
    file = folder / f"{script}.json"
    if not file.exists():
      continue
    pairs = [(key.partition(" | "), ratio) for key, ratio in json.loads(file.read_text()).items()]
    found = [
      round(ratio, 2)
      for (own, _, against), ratio in pairs
      if (own == name or (not name and peer)) and against.startswith(peer)
    ]
    if found:
      found += row.get(machine, []) if widen else []
      before, row[machine] = row.get(machine), [min(found), max(found)]
      changed += before != row[machine]
  return changed


def _range(row: dict[str, Any], machine: str) -> str:
  if machine not in row:
    return ""
  low, high = (f"{value:.2f}" for value in row[machine])
  return low if low == high else f"{low} to {high}"


def _table(head: list[str], lines: list[list[str]]) -> str:
  cells = [head, ["---"] * len(head), *lines]
  return "".join(
    "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in cells
  )


def speed_block(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns the tables of all ratios, one under each heading."""
  sections = dict.fromkeys(row["section"] for row in results["rows"])
  parts = []
  for section in sections:
    rows = [row for row in results["rows"] if row["section"] == section]
    machines = [machine for machine in _MACHINES if any(machine in row for row in rows)]
    lines = [
      [row["what"], row["against"], *(_range(row, m) for m in machines), row.get("goal", "")]
      for row in rows
    ]
    head = ["what", "against", *(_MACHINES[m] for m in machines), "goal"]
    parts.append(f"### {section}\n\n{_table(head, lines)}")
  return "\n" + "\n".join(parts) + "\n"


def readme_block(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns the table of the rows that the README shows."""
  rows = [row for row in results["rows"] if row.get("readme")]
  lines = [[row["what"], row["against"], _range(row, "arm64")] for row in rows]
  return "\n" + _table(["what", "against", "ratio"], lines) + "\n"


def real_time_block(results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns the table of the demo of real time."""
  lines = [
    [row["what"], *(row.get(key, "") for key in ("arm64", "x86_64", "goal"))]
    for row in results["real_time"]
  ]
  return "\n" + _table(["what", "ARM64, 2 cores", "x86-64, 2 cores", "goal"], lines) + "\n"


_BLOCKS = {"readme": readme_block, "speed": speed_block, "real_time": real_time_block}


def page(text: str, results: dict[str, list[dict[str, Any]]]) -> str:
  """Returns a page's text with its blocks of figures made again.

  Raises:
    KeyError: a block has a name that is none of ours.
  """
  return _BLOCK.sub(lambda match: match[1] + _BLOCKS[match[2]](results) + match[3], text)


def _label(x: float, y: float, text: str, color: str = _TEXT, **attributes: str) -> str:
  more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
  return f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}"{more}>{html.escape(text)}</text>'


def plot(title: str, subtitle: str, bars: list[tuple[str, list[float]]]) -> str:
  """Returns a drawing of ratios as bars, beside the peer at 1, on paper that suits dark pages too.

  Args:
    title: what is drawn, read out to those who cannot see it.
    subtitle: how it was measured.
    bars: names with the least and greatest ratio.
  """
  height = _TOP + _STEP * len(bars) + 34
  most = max(high for _, (_, high) in bars)
  scale = (_WIDTH - _LEFT - _RIGHT) / most
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
    'font-family="system-ui, sans-serif" font-size="14">',
    f"<title>{html.escape(title)}</title>",
    f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    _label(24, 32, title, font_size="18", font_weight="600"),
    _label(24, 54, subtitle, _FAINT),
  ]
  for i, (name, (low, high)) in enumerate(bars):
    top = _TOP + _STEP * i
    middle = top + _BAR / 2 + 5
    parts.append(_label(_LEFT - 12, middle, name, text_anchor="end"))
    parts.append(
      f'<rect x="{_LEFT}" y="{top}" width="{low * scale:.0f}" height="{_BAR}" rx="3" '
      f'fill="{_COLOR}"/>'
    )
    if high > low:
      parts.append(
        f'<rect x="{_LEFT + low * scale:.0f}" y="{top + 5}" width="{(high - low) * scale:.0f}" '
        f'height="{_BAR - 10}" fill="{_BELOW}"/>'
      )
    text = f"{low:.2f}" if low == high else f"{low:.2f}–{high:.2f}"
    parts.append(_label(_LEFT + high * scale + 8, middle, text, font_weight="600"))
  one, bottom = _LEFT + scale, _TOP + _STEP * len(bars)
  parts.append(
    f'<path d="M{one:.0f} {_TOP - 8}V{bottom - 6}" stroke="{_TEXT}" stroke-width="1.5" '
    'stroke-dasharray="4 3"/>'
  )
  parts.append(_label(one, bottom + 12, "the peer: 1", _FAINT, text_anchor="middle"))
  return "\n".join([*parts, "</svg>"]) + "\n"


def plots(results: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
  """Returns the drawings by their paths below the repository."""
  rows = results["rows"]
  chosen = [(row["plot"], row["arm64"]) for row in rows if "plot" in row]
  table = [
    (row["what"].replace(", uniform ids", ""), row["x86_64"])
    for row in rows
    if row["section"] == "The table" and "uniform" in row["what"] and "x86_64" in row
  ]
  return {
    "docs/images/speed.svg": plot(
      "Speed against TensorFlow",
      "Times as fast on 2 ARM64 cores, 10 million rows; dark: worst run, light: best",
      chosen,
    ),
    "docs/images/speed_sizes.svg": plot(
      "Lookups and updates by size",
      "Times as fast as TensorFlow on x86-64, one thread, uniform ids",
      table,
    ),
  }


def outputs() -> dict[str, str]:
  """Returns what every page and drawing should hold, by its path below the repository."""
  results = load()
  pages = {name: page((_ROOT / name).read_text(), results) for name in _PAGES}
  return {**pages, **plots(results)}


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--read", choices=sorted(_MACHINES), help="take over build/benchmarks")
  parser.add_argument("--widen", action="store_true", help="keep figures of earlier runs as ranges")
  args = parser.parse_args(arguments)
  if args.read:
    results = load()
    count = read(results["rows"], args.read, _ROOT / "build/benchmarks", args.widen)
    _save(results)
    print(f"{count} figures changed in {_RESULTS.relative_to(_ROOT)}")
  for name, text in outputs().items():
    (_ROOT / name).write_text(text)


if __name__ == "__main__":
  main(sys.argv[1:])
