"""Writes rows of `docs/tested.md` from what runs of the tests left in JSON files.

  make test-all                                       leaves build/results/test-all.json
  make TENSORFLOW=2.15 test-chosen                    leaves build/results/test-chosen-tf2.15.json
  python tools/tested_page.py build/results/*.json    renews the rows of this kind of machine

A row stands for a machine, its system, the versions of Python and TensorFlow, and the command; a
later run takes the place of an earlier one. Rows are sorted, newest first.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

_PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/tested.md"
_TITLES = "| machine | Python | TensorFlow | command | date | Python tests | time |\n"
_HEADER = _TITLES + "|---|---|---|---|---|---|---|\n"
_KEY_COLUMNS = 4  # machine, Python, TensorFlow, command


def row_of(results: dict[str, Any]) -> str:
  """Returns the line of a table that says what ran.

  Args:
    results: what `pytest --results` wrote.

  Raises:
    ValueError: no target of make ran the tests, so that nobody knows which they were.
  """
  command = results["command"]
  if not command.startswith("make "):
    raise ValueError(f"the tests were run by {command!r}, want a target of make")
  machine = f"{results['machine']}, {results['cores']} cores, {results['system']}"
  outcome = (
    f"{len(results['files'])} files: {results['passed']:,} passed, {results['failed']:,} failed, "
    f"{results['skipped']:,} skipped"
  )
  minutes = f"{results['seconds'] / 60:.0f} min"
  cells = (
    machine,
    results["python"],
    results["tensorflow"],
    f"`{command}`",
    results["date"],
    outcome,
    minutes,
  )
  return f"| {' | '.join(cells)} |\n"


def renew(page: str, row: str) -> str:
  """Returns the page with a row in the place of an older one of the same kind.

  Raises:
    ValueError: the page has no such table.
  """
  head, header, rest = page.partition(_HEADER)
  if not header:
    raise ValueError(f"the page has no table that begins with {_TITLES.strip()!r}")
  old = list(itertools.takewhile(lambda line: line.startswith("|"), rest.splitlines(True)))
  tail = rest[sum(map(len, old)) :]
  rows = [line for line in old if _key(line) != _key(row)] + [row]
  rows.sort(key=_key)
  rows.sort(key=_date, reverse=True)
  return head + header + "".join(rows) + tail


def _cells(row: str) -> list[str]:
  return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _key(row: str) -> list[str]:
  return _cells(row)[:_KEY_COLUMNS]


def _date(row: str) -> str:
  return _cells(row)[_KEY_COLUMNS]


def main() -> int:
  if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    return 2
  page = _PAGE.read_text("utf-8")
  for path in sys.argv[1:]:
    page = renew(page, row_of(json.loads(pathlib.Path(path).read_text("utf-8"))))
  _PAGE.write_text(page, "utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
