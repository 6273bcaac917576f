"""`monolith.table.HashTable` on NumPy arrays against the engine that it calls.

  python benchmarks/numpy_table.py [--rows 1000000] [--dim 16] [--threads 2]

The peer is the library's `mono_table_lookup` on addresses that were taken before, which is the
engine's own loop without any Python. Both look up the same batches in the same table, in turn. The
engine's call writes one array again and again; into a new one it writes pages that caches of the
processor know less well, which is no work of ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import ratio_table

from monolith import table as tables
from monolith.table import arrays, library

BATCHES = 16


def cycle(functions: list[Callable[[], object]]) -> Callable[[], None]:
  """Returns a function that calls one after the other."""

  def endless() -> Iterator[Callable[[], object]]:
    while True:
      yield from functions

  calls = endless()
  return lambda: void(next(calls)())


def void(_: object) -> None:
  """Drops a result before the next call, as training does."""


def compare(
  table: tables.HashTable, batches: list[np.ndarray], repeats: int
) -> list[ratio_table.Row]:
  """Returns the rows of batches of one size."""
  n = len(batches[0])
  out = np.empty([n, table.dim], np.float32)
  function, handle, into = library.load().mono_table_lookup, table.handle, out.ctypes.data
  engine = cycle(
    [lambda at=ids.ctypes.data: function(handle, at, n, into, None) for ids in batches]
  )

  def into_new(at: int) -> None:
    new = np.empty([n, table.dim], np.float32)
    function(handle, at, n, arrays.address(new), None)

  engine_new = cycle([lambda at=ids.ctypes.data: into_new(at) for ids in batches])
  fresh = cycle([lambda ids=ids: table.lookup(ids) for ids in batches])
  reused = cycle([lambda ids=ids: table.lookup(ids, out=out) for ids in batches])
  measured = [engine, engine_new, fresh, reused]
  ours = ratio_table.interleaved_medians(measured, repeats, inner=BATCHES)
  name, peer = f"NumPy: lookup of {n:,} ids", "the engine's own call"
  wanted = 0.95 if n == 65536 else None
  return [
    ratio_table.Row(name, peer, ours[2], ours[0], wanted),
    ratio_table.Row(name, f"{peer}, into a new array", ours[2], ours[1], wanted),
    ratio_table.Row(f"{name}, into `out`", peer, ours[3], ours[0], wanted),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rows", type=int, default=1_000_000)
  parser.add_argument("--dim", type=int, default=16)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--repeats", type=int, default=31)
  options = parser.parse_args()
  tables.set_num_threads(options.threads)
  table = tables.HashTable(options.dim, "adagrad", initial_capacity=options.rows)
  page = 1 << 16
  for begin in range(0, options.rows, page):
    ids = np.arange(begin, min(begin + page, options.rows))
    table.assign(ids, np.ones([len(ids), options.dim], np.float32))
  rng = np.random.default_rng(1)
  rows: list[ratio_table.Row] = []
  for n in (1, 4096, 65536):
    batches = [rng.integers(0, options.rows, n) for _ in range(BATCHES)]
    rows += compare(table, batches, options.repeats)
  ratio_table.print_rows(rows)


if __name__ == "__main__":
  main()
