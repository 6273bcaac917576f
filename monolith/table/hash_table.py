"""`HashTable` on NumPy arrays. `monolith.table` says what it is for."""

from __future__ import annotations

import ctypes
import glob
import math
import numbers
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np

from monolith.table import arrays, library, methods, optimizers

LearningRate = Union[float, Callable[[int], Any]]

_EVICT_EVERY_HOURS = 1
_NON_FINITE = {"stop": 0, "skip": 1, "ignore": 2}
_SAVE_FILES = -1  # the size decides
# Asked for the step of Adam that they have seen, which takes a fraction of a second.
_ROWS_ASKED_FOR_STEPS = 1 << 16
_PAGES_KEPT = 32


class HashTable(methods.TableMethods):
  """A map from int64 ids to rows of `dim` floats, each with the state of its own optimizer.

  Rows are created by writes, never by lookups. Any mix of calls from several threads is safe; they
  give the GIL away. Ids are integers of any shape, as arrays of NumPy or of others that share their
  memory, or lists. Files are those of TensorFlow's tables, on local disks.

  Args:
    dim: length of a row's vector.
    optimizer: an `Optimizer`, an optimizer of `monolith.entry`, or `"adagrad"`, `"adam"`, `"sgd"`,
      `"ftrl"`, ... By default Adam with the numbers of Keras and PyTorch.
    initializer: what a new row begins with before its first update: `"uniform"` (from -0.05 to
      0.05), `"zeros"`, a number, a pair of the least and the largest value, or an initializer of
      `monolith.entry`.
    learning_rate: instead of the optimizer's own: a number, or a callable that gets the number of
      steps taken and returns one.
    expire_after: rows that were not updated for this long go: `"30d"`, days, or a `timedelta`.
    admit_after: an id gets a row only after it was written this often, from 0 to 15. Counts are not
      saved, and `load` and `clear` leave them as they are.
    admit_capacity: how many ids that have no row yet are counted at the same time.
    name: what messages call the table.
    seed: of random first values; 0: `MONOLITH_TABLE_SEED`, else another for every table.
    initial_capacity: rows to have room for from the start.

  Raises:
    ValueError, TypeError: an argument is not as described.
    MemoryError: there is no room for `initial_capacity` rows.
    TableError: `libmonolith_engine.so` is missing.
  """

  def __init__(
    self,
    dim: int,
    optimizer: optimizers.OptimizerLike | None = None,
    initializer: optimizers.InitializerLike = "uniform",
    *,
    learning_rate: LearningRate | None = None,
    expire_after: optimizers.Duration | None = None,
    admit_after: int = 0,
    admit_capacity: int = 1 << 22,
    name: str | None = None,
    seed: int = 0,
    initial_capacity: int = 1,
  ):
    self._handle: ctypes.c_void_p | None = None
    self._describe(dim, expire_after, admit_after, admit_capacity, name)
    self._optimizer = optimizers.DEFAULT if optimizer is None else optimizers.find(optimizer)
    self._first = optimizers.first_values(initializer)
    if not 0 <= seed < 1 << 64:
      raise ValueError(f"seed is {seed}, want 0 <= seed < 2**64")
    self._seed = int(seed)
    self._initial_capacity = int(initial_capacity)
    self.learning_rate = self._optimizer.learning_rate if learning_rate is None else learning_rate
    self._step = 0
    # The steps of Adam before this table's first one, where loaded rows tell them.
    self._steps_before = 0
    self._was_loaded = False
    self._step_lock = threading.Lock()
    self._library = library.load()
    handle = ctypes.c_void_p()
    config = self._config()
    library.call("mono_table_create", ctypes.byref(config), ctypes.byref(handle))
    self._handle = handle

  def _config(self) -> Any:
    return library.config(
      optimizers.segment(self._dim, self._optimizer, self._first),
      name=self._name or "HashTable",
      seed=self._seed,
      initial_capacity=self._initial_capacity,
      expire_days=self._expire_days,
      admit_after=self._admit_after,
      admit_capacity=self._admit_capacity,
      evict_every_hours=0 if self._expire_days is None else _EVICT_EVERY_HOURS,
    )

  @property
  def name(self) -> str | None:
    """The name of the table in messages."""
    return self._name

  @property
  def optimizer(self) -> optimizers.Optimizer:
    """The optimizer of the rows."""
    return self._optimizer

  @property
  def learning_rate(self) -> LearningRate:
    """The rate, or the schedule; a new one holds from the next update on."""
    return self._learning_rate

  @learning_rate.setter
  def learning_rate(self, value: LearningRate) -> None:
    self._learning_rate = optimizers.rate(value)

  @property
  def steps(self) -> int:
    """How many updates the table has made; a run that goes on may set it."""
    return self._step

  @steps.setter
  def steps(self, value: int) -> None:
    if not isinstance(value, numbers.Integral) or not 0 <= value < 1 << 63:
      raise ValueError(f"steps is {value!r}, want a whole number of at least 0")
    with self._step_lock:
      self._step, self._steps_before, self._was_loaded = int(value), 0, False

  def close(self) -> None:
    """Frees the table. No other call may be under way."""
    handle, self._handle = self._handle, None
    if handle is not None:
      self._library.mono_table_destroy(handle)

  def __enter__(self) -> HashTable:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __del__(self) -> None:
    if getattr(self, "_handle", None) is not None:
      self.close()

  def __reduce__(self) -> Any:
    raise TypeError("a HashTable cannot be pickled or copied: save it, and load it into another")

  @property
  def handle(self) -> ctypes.c_void_p:
    """The table in the engine.

    Raises:
      ValueError: the table is closed.
    """
    if self._handle is None:
      raise ValueError("the table is closed")
    return self._handle

  def lookup(self, ids: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Returns the vectors of ids; zeros for ids without a row. Creates nothing.

    Args:
      ids: integers of any shape.
      out: float32, to be written and returned; a new array if `None`.

    Returns:
      float32, the shape of `ids` and `[dim]` behind it.

    Raises:
      TypeError, ValueError: `ids` are not ids, or `out` is not as it has to be.
    """
    keys = arrays.as_ids(ids)
    if out is None:
      out = np.empty((*keys.shape, self._dim), np.float32)
    else:
      arrays.check_out(out, keys.size, self._dim)
    code = self._library.mono_table_lookup(
      self._handle or self.handle, arrays.address(keys), keys.size, arrays.address(out), None
    )
    if code != 0:
      library.check(code)
    return out

  def contains(self, ids: Any) -> np.ndarray:
    keys = arrays.as_ids(ids)
    found = np.empty(keys.shape, np.bool_)
    library.call(
      "mono_table_contains", self.handle, arrays.address(keys), keys.size, arrays.address(found)
    )
    return found

  def update(self, ids: Any, gradients: Any, *, now: int | None = None) -> None:
    """Runs the table's optimizer on rows, creating absent ones.

    Gradients of equal ids are summed first: an id makes one step.

    Args:
      ids: integers of any shape.
      gradients: floats, `dim` for each id.
      now: seconds, becomes the rows' time; the clock's if `None`.

    Raises:
      TypeError, ValueError: `ids` are not ids, or there is not a gradient of `dim` for each; or
        gradients are not finite: their rows are left as they were. With
        `MONOLITH_BAD_GRADIENTS=skip` there is a warning instead.
      MemoryError: new rows do not fit.
    """
    update_many([(self, ids, gradients)], now=now)

  def assign(self, ids: Any, values: Any, *, now: int | None = None) -> None:
    """Overwrites the vectors of ids, creating absent rows; the optimizer's state stays.

    Of equal ids the last one stays. With `admit_after`, an assignment counts as an occurrence, too,
    and is dropped while an id has not been seen often enough.

    Args:
      ids: integers of any shape.
      values: floats, `dim` for each id.
      now: seconds, becomes the rows' time; the clock's if `None`.

    Raises:
      TypeError, ValueError, MemoryError: as `update`.
    """
    self._write("mono_table_assign", ids, values, now)

  def assign_add(self, ids: Any, values: Any, *, now: int | None = None) -> None:
    """Adds to the vectors of ids; as `assign` otherwise, but that each of equal ids counts."""
    self._write("mono_table_assign_add", ids, values, now)

  def _write(self, function: str, ids: Any, values: Any, now: int | None) -> None:
    keys = arrays.as_ids(ids)
    floats = arrays.as_floats(values, "values", keys, self._dim)
    options = _options(now)
    library.call(
      function,
      self.handle,
      arrays.address(keys),
      keys.size,
      arrays.address(floats),
      ctypes.byref(options),
    )

  def reinitialize(self, ids: Any) -> np.ndarray:
    """Gives ids new rows, as if they had never had one; returns which had one, bool."""
    keys = arrays.as_ids(ids)
    existed = np.zeros(keys.shape, np.int32)
    library.call(
      "mono_table_reinitialize",
      self.handle,
      arrays.address(keys),
      keys.size,
      int(time.time()),
      arrays.address(existed),
    )
    return existed == 1

  def erase(self, ids: Any) -> None:
    keys = arrays.as_ids(ids)
    library.call("mono_table_erase", self.handle, arrays.address(keys), keys.size)

  def evict(self) -> int:
    """Removes rows that have expired against the newest update; returns how many.

    A table with `expire_after` does so every hour by itself.
    """
    erased = ctypes.c_int64()
    library.call("mono_table_evict", self.handle, ctypes.byref(erased))
    return erased.value

  def clear(self) -> None:
    library.call("mono_table_clear", self.handle)

  def reserve(self, rows: int) -> None:
    """Makes room for `rows` rows in all.

    Raises:
      ValueError: there cannot be so many.
      MemoryError: there is no room.
    """
    library.call("mono_table_reserve", self.handle, int(rows))

  def configure(self, optimizer: optimizers.OptimizerLike) -> None:
    """Gives the table another optimizer from now on.

    Rows keep their values, and their state where the optimizer is of the same kind. The learning
    rate stays what it is. Other calls wait.

    Raises:
      ValueError, TypeError: it is no optimizer.
      MemoryError: there is no room for a second table meanwhile.
    """
    before, self._optimizer = self._optimizer, optimizers.find(optimizer)
    config = self._config()
    try:
      library.call("mono_table_configure", self.handle, ctypes.byref(config))
    except BaseException:
      self._optimizer = before
      raise

  def size(self) -> int:
    rows = ctypes.c_int64()
    library.call("mono_table_size", self.handle, ctypes.byref(rows))
    return rows.value

  def stats(self) -> dict[str, int]:
    """Returns what the table holds and has done.

    `size` in rows; `memory`, `row_memory` and `index_memory` in bytes; `free_rows`; rows that have
    `expired`; `filtered`, writes of ids that were seen too seldom; `nonfinite_gradients`, rows of
    gradients and values that were not finite; `max_update_ts`, the newest time of a row.
    """
    stats = library.Stats()
    library.call("mono_table_stats", self.handle, ctypes.byref(stats))
    return {name: getattr(stats, name) for name, *_ in library.Stats._fields_}

  def _state(self) -> str:
    return "closed" if self._handle is None else super()._state()

  def _kind(self) -> str:
    return self._optimizer.kind

  def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pages: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    failures: list[BaseException] = []

    def take(_: Any, ids: int, times: int, values: int, n: int) -> int:
      try:
        page = (
          _copy(ids, ctypes.c_int64, n),
          _copy(times, ctypes.c_uint32, n),
          _copy(values, ctypes.c_float, n * self._dim).reshape(n, self._dim),
        )
      except BaseException as error:
        failures.append(error)
        return 1
      pages.append(page)
      return 0

    sink = library.ROW_SINK(take)
    code = self._library.mono_table_rows(self.handle, sink, None)
    if failures:
      raise failures[0]
    library.check(code)
    if not pages:
      empty = np.zeros([0, self._dim], np.float32)
      return np.zeros([0], np.int64), np.zeros([0], np.uint32), empty
    ids, times, rows = (np.concatenate(parts) for parts in zip(*pages))
    order = np.argsort(ids)
    return ids[order], times[order], rows[order]

  def entries(self, ids: Any = None) -> list[bytes]:
    """Returns rows with the state of their optimizers, as serialized `EntryDump` messages.

    Args:
      ids: whose; all of the table in ascending order if `None`. An id without a row has `b""`.
        Messages do not name their id.
    """
    keys = self._rows()[0] if ids is None else arrays.as_ids(ids)
    found = [b""] * keys.size

    def take(_: Any, i: int, data: int, size: int) -> int:
      found[i] = ctypes.string_at(data, size)
      return 0

    sink = library.ENTRY_SINK(take)
    library.call("mono_table_entries", self.handle, arrays.address(keys), keys.size, sink, None)
    return found

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes all rows that have not expired, with the state of their optimizers.

    Args:
      path: the files are `<path>-00000-of-00001` and so on; the folder is created. They replace
        those of an earlier save at once, or not at all.

    Returns:
      How many rows were written.

    Raises:
      OSError, TableError: writing failed; files of an earlier save stay as they were.
      ValueError: the path has a null byte, with which a name would end.
    """
    saved = ctypes.c_int64()
    code = self._library.mono_table_save(
      self.handle, _encode(path), _SAVE_FILES, ctypes.byref(saved), None
    )
    library.check(code, of_files=True)
    return saved.value

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by what `save` wrote; nothing changes if that cannot be read.

    The state of another optimizer is left out: rows of this one begin with a new state.

    Args:
      path: what `save` was given, here or in TensorFlow.

    Returns:
      How many rows were read.

    Raises:
      ValueError: there are no such files, they hold several tables, or rows of another dimension.
      OSError, TableError: the files cannot be read, or are damaged.
    """
    return self.load_state(path)[0]

  def load_state(self, path: str | os.PathLike[str]) -> tuple[int, int]:
    """Does what `load` does; returns also how many rows have begun with a new state."""
    if glob.glob(f"{glob.escape(os.fsdecode(path))}.meta-?????-of-?????"):
      raise ValueError(
        f"{os.fsdecode(path)} has the files of a group of tables: load it with "
        "monolith.table.load_group({name: table}, path)"
      )
    loaded, reset = ctypes.c_int64(), ctypes.c_int64()
    code = self._library.mono_table_load(
      self.handle, _encode(path), ctypes.byref(loaded), ctypes.byref(reset)
    )
    library.check(code, of_files=True)
    self._was_loaded = True
    return loaded.value, reset.value

  def _find_last_step(self) -> int:
    """Returns the last step of Adam that the newest rows have seen; 0 where they have seen none."""
    pages: list[np.ndarray] = []
    failures: list[BaseException] = []

    def newest() -> np.ndarray:
      rows = np.concatenate(pages) if pages else np.zeros([0, 2], np.int64)
      if len(rows) <= _ROWS_ASKED_FOR_STEPS:
        return rows
      return rows[np.argpartition(rows[:, 0], -_ROWS_ASKED_FOR_STEPS)[-_ROWS_ASKED_FOR_STEPS:]]

    def take(_: Any, ids: int, times: int, values: int, n: int) -> int:
      try:
        of_page = _copy(times, ctypes.c_uint32, n).astype(np.int64)
        pages.append(np.stack([of_page, _copy(ids, ctypes.c_int64, n)], 1))
        if len(pages) == _PAGES_KEPT:
          pages[:] = [newest()]
      except BaseException as error:
        failures.append(error)
        return 1
      return 0

    sink = library.ROW_SINK(take)
    code = self._library.mono_table_rows(self.handle, sink, None)
    if failures:
      raise failures[0]
    library.check(code)
    return int(max(map(_step_of, self.entries(newest()[:, 1])), default=0))

  def take_step(self) -> tuple[int, float]:
    """Counts a step; returns how many there were before, and the learning rate of this one.

    Of an Adam that counts the table's steps, those that loaded rows have behind them are among the
    steps before: to it, steps that begin anew are another run, and rows would lose their moments. A
    schedule of learning rates counts this table's own.

    Raises:
      ValueError: the learning rate is not finite, or has no room in a float32.
    """
    with self._step_lock:
      if self._was_loaded and self._optimizer.decay_by_step:
        if last := self._find_last_step():
          self._steps_before = last - self._step
        self._was_loaded = False
      step, self._step = self._step, self._step + 1
      before = step + self._steps_before
    schedule = self._learning_rate
    rate = float(schedule(step) if callable(schedule) else schedule)
    if not math.isfinite(ctypes.c_float(rate).value):
      raise ValueError(f"learning_rate of step {step} is {rate!r}, want a finite number of float32")
    return before, rate


def _encode(path: str | os.PathLike[str]) -> bytes:
  """Returns a path as the engine takes it: a text that ends with a null byte."""
  encoded = os.fsencode(path)
  if b"\0" in encoded:
    raise ValueError(f"path is {path!r}, want one without null bytes")
  return encoded


def lookup_many(lookups: Sequence[tuple[HashTable, Any, np.ndarray]]) -> None:
  """Looks ids up in several tables at once, which share the threads.

  Args:
    lookups: tables, ids, and float32 arrays to be written, as `HashTable.lookup` takes them. A
      table may come several times.

  Raises:
    TypeError, ValueError: an array is not as it has to be; nothing was written.
  """
  jobs = (library.LookupJob * max(1, len(lookups)))()
  alive = []
  for i, (table, ids, out) in enumerate(lookups):
    keys = arrays.as_ids(ids)
    arrays.check_out(out, keys.size, table.dim)
    alive.append(keys)
    jobs[i] = library.LookupJob(
      table=table.handle.value, ids=arrays.address(keys), n=keys.size, out=arrays.address(out)
    )
  library.call("mono_table_lookup_many", jobs, len(lookups))


def update_many(updates: Sequence[tuple[HashTable, Any, Any]], *, now: int | None = None) -> None:
  """Runs the optimizers of several tables at once, which share the threads.

  Args:
    updates: tables, none twice, ids and gradients, as `HashTable.update` takes them.
    now: seconds, becomes the rows' time; the clock's if `None`.

  Raises:
    TypeError, ValueError: an array is not as it has to be; no row has changed. Or gradients are not
      finite, as `HashTable.update` has it.
    MemoryError: new rows do not fit.
  """
  jobs = (library.OptimizeJob * max(1, len(updates)))()
  alive: list[Any] = []
  for i, (table, ids, gradients) in enumerate(updates):
    keys = arrays.as_ids(ids)
    floats = arrays.as_floats(gradients, "gradients", keys, table.dim)
    alive.append((keys, floats))
    jobs[i] = library.OptimizeJob(
      table=table.handle.value,
      ids=arrays.address(keys),
      n=keys.size,
      gradients=arrays.address(floats),
    )
  for i, (table, _, _) in enumerate(updates):
    step, rate = table.take_step()
    options = _options(now, global_step=step, learning_rate=rate)
    alive.append(options)
    jobs[i].options = ctypes.pointer(options)
  library.call("mono_table_optimize_many", jobs, len(updates))


def _options(
  now: int | None, *, global_step: int = 0, learning_rate: float | None = None
) -> library.WriteOptions:
  setting = os.environ.get("MONOLITH_BAD_GRADIENTS", "stop")
  if setting not in _NON_FINITE:
    raise ValueError(f"MONOLITH_BAD_GRADIENTS is {setting!r}, want stop, skip or ignore")
  rates = None if learning_rate is None else (ctypes.c_float * 1)(learning_rate)
  return library.WriteOptions(
    req_time=int(time.time()) if now is None else int(now),
    global_step=global_step,
    learning_rates=rates,
    num_learning_rates=0 if rates is None else 1,
    non_finite=_NON_FINITE[setting],
    sum_duplicates=1,
  )


def _step_of(entry: bytes) -> float:
  """Returns which step a serialized `EntryDump` has seen last, by Adam's state; 0 if it has none.

  Below 1 it is the power of an Adam that counts the steps of each row.
  """
  # The time comes last: a varint, of which all bytes but the last have the top bit.
  at = len(entry) - 1
  while at > 0 and entry[at - 1] >= 128:
    at -= 1
  # The number before it is field 4 of AdamOptimizerDump, of 32 bits.
  if at < 6 or entry[at - 1] != 0x20 or entry[at - 6] != 0x25:
    return 0.0
  return struct.unpack_from("<f", entry, at - 5)[0]


def _copy(address: int, kind: Any, n: int) -> np.ndarray:
  return np.ctypeslib.as_array((kind * n).from_address(address)).copy()
