"""Calls for several tables at a time: a batch of a model has too few ids of each to fill a GPU."""

from __future__ import annotations

import array as buffers
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from monolith.native_training.gpu import structures
from monolith.native_training.gpu.library import check, load
from monolith.native_training.gpu.table import GpuTable


def lookup_many(
  lookups: Iterable[tuple[GpuTable, Any, Any] | tuple[GpuTable, Any, Any, Any]], *, stream: int = 0
) -> list[Any]:
  """Does what `GpuTable.lookup` does for several tables, in one launch.

  A batch of a model has ids of many tables, of which each is too few to fill a GPU.

  Args:
    lookups: `(table, ids, out)` or `(table, ids, out, found)`, as `GpuTable.lookup` takes them. A
      table may come several times. All are on one GPU.
    stream: to run on.

  Returns:
    `out` of each.

  Raises:
    TypeError, ValueError: an array is not as it has to be, or a table is closed. The text names
      which lookup; nothing was launched.
  """
  lookups = list(lookups)
  jobs = (structures.LookupJob * max(1, len(lookups)))()
  for i, (table, ids, out, *found) in enumerate(lookups):
    try:
      jobs[i] = table._lookup_job(ids, out, *(found or [None]))
    except (TypeError, ValueError) as error:
      raise type(error)(f"lookups[{i}]: {error}") from error
  if lookups:
    library = load()
    check(
      library,
      library.mono_gpu_table_lookup_many(stream, jobs, len(lookups)),
    )
  return [lookup[2] for lookup in lookups]


# A table, the address of its int64 ids, how many these are, and the address of their vectors.
Place = tuple[GpuTable, int, int, int]
# 64-bit words of the structures, which arrays of words are quicker to make than.
_LOOKUP_WORDS = ctypes.sizeof(structures.LookupJob) // 8
_OPTIMIZE_WORDS = ctypes.sizeof(structures.OptimizeJob) // 8
_OPTIONS_WORDS = ctypes.sizeof(structures.WriteOptions) // 8


def _run(library: ctypes.CDLL, function: str, stream: int, words: list[int], size: int) -> None:
  """Calls a function with jobs of `size` words."""
  jobs = buffers.array("q", words)
  check(library, getattr(library, function)(stream, jobs.buffer_info()[0], len(words) // size))


class _Options:
  """The options of a write of several tables, one for each learning rate that comes.

  Attributes:
    addresses: where those of each table are, as long as this object is there.
  """

  def __init__(
    self, learning_rates: Sequence[float], duplicates: str, req_time: int, global_step: int
  ):
    distinct = list(dict.fromkeys(learning_rates))
    self._rates = buffers.array("f", distinct)
    first, size = self._rates.buffer_info()[0], self._rates.itemsize
    # Two numbers of 32 bits are a word.
    kinds = (
      structures.choose(structures.DUPLICATES, "duplicates", duplicates)
      | structures.not_finite() << 32
    )
    words: list[int] = []
    for i in range(len(distinct)):
      words += (req_time, global_step, first + i * size, 1, kinds, 0, 0, 0)
    self._words = buffers.array("q", words)
    begin = self._words.buffer_info()[0]
    at = {rate: begin + i * _OPTIONS_WORDS * 8 for i, rate in enumerate(distinct)}
    self.addresses = [at[rate] for rate in learning_rates]


def lookup_at(places: Sequence[Place], *, stream: int = 0) -> None:
  """Does what `lookup_many` does, for a caller that knows its arrays.

  Only addresses are handed over, and nothing is looked at: for many small tables, looking takes
  longer than the launch.

  Args:
    places: where the ids of each table are, and where their vectors, float32 `[n, dim]`, go.
    stream: to run on.

  Raises:
    ValueError: a table is closed; nothing was launched.
  """
  words: list[int] = []
  for table, ids, n, rows in places:
    words += (table._open_handle(), ids, n, rows, 0, 0)
  if words:
    _run(load(), "mono_gpu_table_lookup_many", stream, words, _LOOKUP_WORDS)


def optimize_at(
  places: Sequence[Place],
  learning_rates: Sequence[float],
  *,
  global_step: int = 0,
  req_time: int = 0,
  duplicates: str = "sum",
  stream: int = 0,
) -> None:
  """Does what `optimize_many` does, for a caller that knows its arrays; see `lookup_at`.

  Args:
    places: where the ids and the gradients, float32 `[n, dim]`, of each table are; tables are
      distinct.
    learning_rates: one for each table, which has one segment.
    global_step, req_time, duplicates, stream: as `optimize_many` has them.

  Raises:
    ValueError: a table is closed or has several segments; nothing was launched.
    OutOfGpuMemoryError: new rows do not fit; no table has changed.
  """
  options = _Options(learning_rates, duplicates, req_time, global_step)
  if len(places) != len(options.addresses):
    raise ValueError(f"{len(options.addresses)} learning rates for {len(places)} tables")
  words: list[int] = []
  for (table, ids, n, rows), address in zip(places, options.addresses):
    words += (table._open_handle(), ids, n, rows, address, 0, 0)
  if words:
    _run(load(), "mono_gpu_table_optimize_many", stream, words, _OPTIMIZE_WORDS)


class TableRow:
  """Tables whose vectors of an example lie side by side, in a row of floats.

  Addresses are handed over as in `lookup_at`, and what is the same in every call is packed once:
  for many small tables packing takes longer than the launch.

  Args:
    places: tables of one GPU, and the column at which the vectors of each begin; where a table
      comes several times, its ids are one batch.
    width: floats of a row.

  Raises:
    ValueError: a table is closed.
  """

  def __init__(self, places: Sequence[tuple[GpuTable, int]], width: int):
    self._library = load()
    self._tables = [table for table, _ in places]
    self._bytes = [4 * column for _, column in places]  # before its vectors
    self._num_closed = GpuTable.num_closed
    handles = [table._open_handle() for table in self._tables]
    self._lookups = [word for handle in handles for word in (handle, 0, 0, 0, 0, width)]
    self._steps = [word for handle in handles for word in (handle, 0, 0, 0, 0, width, 0)]

  def is_open(self) -> bool:
    """Returns whether none of the tables was closed."""
    if self._num_closed != GpuTable.num_closed:
      if any(table._handle is None for table in self._tables):
        return False
      self._num_closed = GpuTable.num_closed
    return True

  def lookup(self, ids: Sequence[int], n: int, out: int, *, stream: int = 0) -> None:
    """Looks ids up in all tables, in one launch.

    Args:
      ids: addresses of int64 `[n]`, one for each table.
      n: examples.
      out: address of float32 `[n, width]`, to be written.
      stream: to run on.

    Raises:
      ValueError: a table is closed; nothing was launched.
    """
    self._check_open()
    words = self._lookups[:]
    words[1::_LOOKUP_WORDS] = ids
    words[2::_LOOKUP_WORDS] = [n] * len(self._tables)
    words[3::_LOOKUP_WORDS] = [out + offset for offset in self._bytes]
    _run(self._library, "mono_gpu_table_lookup_many", stream, words, _LOOKUP_WORDS)

  def optimize(
    self,
    ids: Sequence[int],
    n: int,
    gradients: int,
    learning_rates: Sequence[float],
    *,
    global_step: int = 0,
    req_time: int = 0,
    stream: int = 0,
  ) -> None:
    """Steps all tables, on the sums of the gradients of equal ids.

    Args:
      ids: addresses of int64 `[n]`, one for each table.
      n: examples.
      gradients: address of float32 `[n, width]`.
      learning_rates: one for each table, which has one segment.
      global_step, req_time, stream: as `optimize_many` has them.

    Raises:
      ValueError: a table is closed or has several segments, or an earlier call had gradients that
        are not finite; nothing was launched.
      OutOfGpuMemoryError: new rows do not fit; no table has changed.
    """
    self._check_open()
    options = _Options(learning_rates, "sum", req_time, global_step)
    words = self._steps[:]
    words[1::_OPTIMIZE_WORDS] = ids
    words[2::_OPTIMIZE_WORDS] = [n] * len(self._tables)
    words[3::_OPTIMIZE_WORDS] = [gradients + offset for offset in self._bytes]
    words[4::_OPTIMIZE_WORDS] = options.addresses
    _run(self._library, "mono_gpu_table_optimize_many", stream, words, _OPTIMIZE_WORDS)

  def _check_open(self) -> None:
    if not self.is_open():
      raise ValueError("the table is closed")


def optimize_many(
  steps: Iterable[tuple[GpuTable, Any, Any, Sequence[float]]],
  *,
  global_step: int = 0,
  req_time: int = 0,
  duplicates: str = "sum",
  stream: int = 0,
) -> None:
  """Does what `GpuTable.optimize` does for several tables, in as many launches as one table takes.

  Tables that are alike go through the same launches; up to 64 together where equal ids are looked
  for. Where memory is missing for one table, none has changed.

  Args:
    steps: `(table, ids, gradients, learning_rates)`, as `GpuTable.optimize` takes them. Where a
      table comes several times, its ids are one batch, in this order, and its rates are the same.
      All tables are on one GPU.
    global_step: for optimizers and compressors that count steps.
    req_time: seconds, becomes the rows' time.
    duplicates: what equal ids of a table get, as `GpuTable.optimize` has it.
    stream: to run on.

  Raises:
    TypeError, ValueError: an array is not as it has to be, a table is closed, or its rates differ:
      the text names which step. Or an earlier call had gradients that are not finite. Nothing was
      launched.
    OutOfGpuMemoryError: new rows do not fit; no table has changed.
  """
  steps = list(steps)
  jobs = (structures.OptimizeJob * max(1, len(steps)))()
  options: dict[GpuTable, tuple[list[float], structures.WriteOptions]] = {}
  for i, (table, ids, gradients, learning_rates) in enumerate(steps):
    try:
      rates = [float(rate) for rate in learning_rates]
      if table not in options:
        options[table] = rates, structures.write_options(duplicates, req_time, global_step, rates)
      elif options[table][0] != rates:
        raise ValueError(f"learning_rates are {rates}, those before {options[table][0]}")
      jobs[i] = table._optimize_job(ids, gradients, options[table][1])
    except (TypeError, ValueError) as error:
      raise type(error)(f"steps[{i}]: {error}") from error
  if steps:
    library = load()
    check(
      library,
      library.mono_gpu_table_optimize_many(stream, jobs, len(steps)),
    )
