"""One table of very many rows: seconds of each operation, and bytes per row.

  python benchmarks/scale.py [--rows 100e6] [--dim 16] [--folder DIR]

Rows have Adagrad state. The engine runs without TensorFlow, through `monolith.table`, on all cores
that the process may use. docs/scale.md reckons from such figures how many servers a job needs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402

import monolith.table  # noqa: E402

_BATCH = 1 << 20
_LOOKED_UP = 20  # batches
_DAY = 86400
_GIB = float(1 << 30)
# More than a file's record takes beside the floats: id, time, lengths, checksum.
_RECORD_BYTES = 96


def ids_between(begin: int, end: int) -> np.ndarray:
  """Returns ids that are spread over all int64; no two numbers have the same."""
  numbers = np.arange(begin, end, dtype=np.uint64)
  return (numbers * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def memory_of_process() -> int:
  """Returns the bytes of memory that the process has now."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGESIZE")


def seconds_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
  """Returns how long a call takes."""
  start = time.perf_counter()
  function(*args, **kwargs)
  return time.perf_counter() - start


def show(what: str, rows: int, seconds: float, more: str = "") -> None:
  print(f"{what:<34}{seconds:>9.2f} s {rows / seconds / 1e6:>9.2f} M rows/s  {more}", flush=True)


def batches(rows: int) -> Iterator[tuple[int, int]]:
  for begin in range(0, rows, _BATCH):
    yield begin, min(rows, begin + _BATCH)


def insert(table: monolith.table.HashTable, rows: int, now: int) -> None:
  """Creates rows by updates; the first half are ten days old."""
  gradients = np.ones([_BATCH, table.dim], np.float32)
  seconds = []
  for begin, end in batches(rows):
    ids = ids_between(begin, end)
    age = 10 * _DAY if begin < rows // 2 else 0
    seconds.append(seconds_of(table.update, ids, gradients[: len(ids)], now=now - age))
  slowest = max(seconds) / statistics.median(seconds)
  show("insert by update", rows, sum(seconds), f"slowest batch {slowest:.1f} of the median")


def read_and_write(table: monolith.table.HashTable, rows: int, now: int) -> None:
  """Looks up and updates batches of random rows."""
  rng = np.random.default_rng(1)
  gradients = np.ones([_BATCH, table.dim], np.float32)
  out = np.empty([_BATCH, table.dim], np.float32)
  lookups, updates = [], []
  for _ in range(_LOOKED_UP):
    numbers = rng.integers(0, rows, _BATCH)
    ids = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)
    # Updates renew the time of a row: those of the first half would not expire.
    fresh = ids_between(0, 0) if rows < 2 else ids[numbers >= rows // 2]
    lookups.append(seconds_of(table.lookup, ids, out))
    updates.append((len(fresh), seconds_of(table.update, fresh, gradients[: len(fresh)], now=now)))
  show(f"lookup of {_BATCH:,} random ids", _BATCH, statistics.median(lookups))
  each = statistics.median(seconds / max(1, n) for n, seconds in updates)
  show(f"update of {_BATCH:,} random ids", _BATCH, each * _BATCH)


def save_and_restore(table: monolith.table.HashTable, rows: int, folder: str) -> None:
  need = rows * (8 * table.dim + _RECORD_BYTES)
  free = shutil.disk_usage(folder).free
  if free < 1.1 * need:
    print(f"save, restore: left out, {folder} has {free / _GIB:.0f} GiB, want {need / _GIB:.0f}")
    return
  with tempfile.TemporaryDirectory(dir=folder) as own:
    path = os.path.join(own, "rows")
    saving = seconds_of(table.save, path)
    size = sum(file.stat().st_size for file in pathlib.Path(own).iterdir())
    rate = f"{size / rows:.0f} bytes per row, {size / saving / 1e6:,.0f} MB/s"
    show("save", rows, saving, rate)
    before = table.size()
    loading = seconds_of(table.load, path)
    if table.size() != before:
      raise RuntimeError(f"{table.size()} rows were restored, {before} were saved")
    show("restore", rows, loading, f"{size / loading / 1e6:,.0f} MB/s, from the page cache")


def expire(table: monolith.table.HashTable, rows: int, now: int) -> None:
  table.update(
    ids_between(rows - 1, rows), np.ones([1, table.dim], np.float32), now=now + 15 * _DAY
  )
  before = memory_of_process()
  start = time.perf_counter()
  erased = table.evict()
  seconds = time.perf_counter() - start
  given_back = (before - memory_of_process()) / _GIB
  show("expiry of half of the rows", rows, seconds, f"{erased:,} went, {given_back:.1f} GiB back")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rows", type=float, default=100e6)
  parser.add_argument("--dim", type=int, default=16)
  parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the save")
  args = parser.parse_args()
  rows, now = int(args.rows), int(time.time())
  print(f"{rows:,} rows of dimension {args.dim} with Adagrad state, {os.cpu_count()} cores")
  at_start = memory_of_process()
  with monolith.table.HashTable(args.dim, "adagrad", expire_after="20d") as table:
    try:
      table.reserve(1 << 32)
    except (ValueError, MemoryError) as error:
      print(f"2**32 rows: {type(error).__name__}: {error}")
    insert(table, rows, now)
    memory = table.stats()["memory"]
    print(
      f"{table.size():,} rows, {memory / rows:.1f} bytes each by the table's count, "
      f"{(memory_of_process() - at_start) / rows:.1f} by the process's; payload {8 * args.dim}",
      flush=True,
    )
    read_and_write(table, rows, now)
    save_and_restore(table, rows, args.folder)
    expire(table, rows, now)


if __name__ == "__main__":
  main()
