"""A table in the memory of a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monolith.native_training.gpu import arrays, structures
from monolith.native_training.gpu.library import GpuTableError, check, load


@dataclasses.dataclass(frozen=True)
class Segment:
  """Part of a vector, with an optimizer and first values of its own.

  Attributes:
    dim: how many floats it has.
    optimizer: `sgd`, `adagrad`, `adadelta`, `adam`, `amsgrad`, `momentum`, `moving_average`,
      `ftrl`, `group_ftrl`, `group_adagrad`, `rmsprop`, `rmsprop_v2`, `batch_softmax` or
      `dynamic_wd_adagrad`. Of the fields below it reads those that it knows.
    initializer: `zeros`, `ones`, `constants` or `random_uniform`. Random values depend on the seed,
      the id and the element alone.
    compressor: what lookups see of a value: None and `fp32`, `fp16` the value itself, `fixed_r8`
      what eight bits of it leave, `one_bit` the smooth sign of hash-net.
  """

  dim: int
  optimizer: str = "adagrad"
  initializer: str = "random_uniform"
  compressor: str | None = None
  use_nesterov: bool = False
  decouple_weight_decay: bool = False
  stochastic_rounding_float16: bool = False
  initial_accumulator_value: float = 0.1
  weight_decay: float = 0.0
  beta: float = 0.0
  l1: float = 0.0
  l2: float = 0.0
  averaging_ratio: float = 0.9
  epsilon: float = 0.01
  beta1: float = 0.9
  beta2: float = 0.99
  momentum: float = 0.9
  constant: float = 0.0
  minval: float = -0.05
  maxval: float = 0.05
  range: float = 1.0
  init_scale: float = 1.0
  max_scale: float = 10000.0
  amplitude: float = 0.1
  decay_by_step: bool = False
  step_size: int = 200


_SEGMENT_FIELDS = frozenset(name for name, *_ in structures.Segment._fields_)
_SHARDS = 64  # of a file of records


class GpuTable:
  """A collisionless embedding table on the GPU that is current when it is made.

  Work is enqueued on a stream, an integer; 0 is the default one (of PyTorch:
  `torch.cuda.current_stream().cuda_stream`). Calls on different streams are put in order.

  Gradients and values with NaN or infinity are not written: the row of such an id stays as it is,
  and a new one is not made. No call waits to find them. A later `optimize`, `assign`, `assign_add`,
  `check` or `save` raises ValueError, which names table and ids, before it does anything, and the
  call after that goes on. With `MONOLITH_BAD_GRADIENTS=skip` there is a warning on standard error
  instead; `ignore` writes everything. `stats` counts.
  """

  # Tables of this process that were closed: while it stays, handles stay good.
  num_closed = 0

  def __init__(
    self,
    segments: Sequence[Segment] | Segment,
    *,
    initial_capacity: int = 1,
    seed: int = 0,
    expire_days: int = 36500,
    slot_expire_days: Mapping[int, int] | None = None,
    name: str = "",
  ):
    """Makes an empty table.

    Args:
      segments: the parts of a vector, in order.
      initial_capacity: rows to have room for from the start.
      seed: for random first values; 0: `MONOLITH_TABLE_SEED`, else another for every table.
      expire_days: rows that were not written for so long are removed by `evict`.
      slot_expire_days: the same for the ids of some slots (bits 48 to 62 of an id).
      name: what messages call it.

    Raises:
      ValueError: the configuration is wrong; the text names the segment, the field and the value.
      OutOfGpuMemoryError: there is no room for it.
      GpuTableError: there is no CUDA device, or no libmonolith_cuda.so.
    """
    self._handle: ctypes.c_void_p | None = None
    library = load()
    self._library = library
    self._segments = [segments] if isinstance(segments, Segment) else list(segments)
    self.dim = sum(segment.dim for segment in self._segments)
    array = (structures.Segment * max(1, len(self._segments)))()
    for c_segment, segment in zip(array, self._segments):
      for field in dataclasses.fields(segment):
        value = getattr(segment, field.name)
        if field.name not in _SEGMENT_FIELDS:
          if value != field.default:
            raise ValueError(f"{field.name} is {value!r}, which works in main memory alone")
          continue
        if field.name == "optimizer":
          value = structures.choose(structures.OPTIMIZERS, "optimizer", value)
        elif field.name == "initializer":
          value = structures.choose(structures.INITIALIZERS, "initializer", value)
        elif field.name == "compressor":
          value = structures.choose(structures.COMPRESSORS, "compressor", value)
        setattr(c_segment, field.name, value)
    slots = dict(slot_expire_days or {})
    config = structures.Config(
      segments=array,
      num_segments=len(self._segments),
      initial_capacity=initial_capacity,
      seed=seed,
      default_expire_days=expire_days,
      expire_slots=(ctypes.c_uint32 * max(1, len(slots)))(*slots),
      expire_days=(ctypes.c_uint32 * max(1, len(slots)))(*slots.values()),
      num_expire_slots=len(slots),
      name=name.encode(),
    )
    handle = ctypes.c_void_p()
    check(library, library.mono_gpu_table_create(ctypes.byref(config), ctypes.byref(handle)))
    self._handle = handle

  def close(self) -> None:
    """Frees the table; waits for the device."""
    handle, self._handle = self._handle, None
    if handle is not None:
      GpuTable.num_closed += 1
      self._library.mono_gpu_table_destroy(handle)

  def __enter__(self) -> GpuTable:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __del__(self) -> None:
    if getattr(self, "_handle", None) is not None:
      self.close()

  def __len__(self) -> int:
    return self.stats()["size"]

  def _call(self, function: str, *arguments: Any) -> None:
    if self._handle is None:
      raise ValueError("the table is closed")
    check(self._library, getattr(self._library, function)(self._handle, *arguments))

  def lookup(self, ids: Any, out: Any, found: Any = None, *, stream: int = 0) -> Any:
    """Copies the vectors of ids, zeros where there is none. Nothing is inserted.

    Args:
      ids: int64 [n].
      out: float32 [n, dim], to be written.
      found: uint8 or bool [n], or None: 1 where there is a row.
      stream: to run on.

    Returns:
      `out`.

    Raises:
      TypeError, ValueError: an array does not have the dtype or shape above.
    """
    job = self._lookup_job(ids, out, found)
    self._call(
      "mono_gpu_table_lookup",
      ctypes.c_void_p(stream),
      ctypes.c_void_p(job.ids),
      ctypes.c_int64(job.n),
      ctypes.c_void_p(job.out),
      ctypes.c_void_p(job.found),
    )
    return out

  def _open_handle(self) -> int:
    if self._handle is None or self._handle.value is None:
      raise ValueError("the table is closed")
    return self._handle.value

  def _lookup_job(self, ids: Any, out: Any, found: Any) -> structures.LookupJob:
    handle = self._open_handle()
    n = arrays.length_of(ids)
    flags = None
    if found is not None:
      typestr = getattr(found, "__cuda_array_interface__", {}).get("typestr", "")
      kind = typestr if typestr == "|b1" else "|u1"
      flags = arrays.address_of(found, "found", kind, (n,), writable=True)
    return structures.LookupJob(
      table=handle,
      ids=arrays.address_of(ids, "ids", "<i8", (n,)),
      n=n,
      out=arrays.address_of(out, "out", "<f4", (n, self.dim), writable=True),
      found=flags,
    )

  def _optimize_job(
    self, ids: Any, gradients: Any, options: structures.WriteOptions
  ) -> structures.OptimizeJob:
    handle = self._open_handle()
    n = arrays.length_of(ids)
    address, kind = arrays.gradients_at(gradients, (n, self.dim))
    return structures.OptimizeJob(
      table=handle,
      ids=arrays.address_of(ids, "ids", "<i8", (n,)),
      n=n,
      gradients=address,
      options=ctypes.pointer(options),
      gradient_type=kind,
    )

  def _write(
    self,
    function: str,
    ids: Any,
    values: Any,
    what: str,
    duplicates: str,
    req_time: int,
    stream: int,
  ) -> None:
    n = arrays.length_of(ids)
    options = structures.write_options(duplicates, req_time, 0, ())
    self._call(
      function,
      ctypes.c_void_p(stream),
      ctypes.c_void_p(arrays.address_of(ids, "ids", "<i8", (n,))),
      ctypes.c_int64(n),
      ctypes.c_void_p(arrays.address_of(values, what, "<f4", (n, self.dim))),
      ctypes.byref(options),
    )

  def assign(
    self, ids: Any, values: Any, *, req_time: int = 0, duplicates: str = "steps", stream: int = 0
  ) -> None:
    """Overwrites vectors; rows that are missing are made.

    Args:
      ids: int64 [n].
      values: float32 [n, dim].
      req_time: seconds, becomes the rows' time.
      duplicates: `none`: ids are distinct, which saves a sort; else the last one stays.
      stream: to run on.

    Raises:
      TypeError, ValueError: an array does not have the dtype or shape above, or an earlier call had
        values that are not finite.
      OutOfGpuMemoryError: new rows do not fit; nothing has changed.
    """
    self._write("mono_gpu_table_assign", ids, values, "values", duplicates, req_time, stream)

  def assign_add(
    self, ids: Any, values: Any, *, req_time: int = 0, duplicates: str = "steps", stream: int = 0
  ) -> None:
    """Adds to vectors; as `assign` otherwise."""
    self._write("mono_gpu_table_assign_add", ids, values, "values", duplicates, req_time, stream)

  def optimize(
    self,
    ids: Any,
    gradients: Any,
    learning_rates: Sequence[float],
    *,
    global_step: int = 0,
    req_time: int = 0,
    duplicates: str = "sum",
    stream: int = 0,
  ) -> None:
    """Takes one optimizer step for every id; rows that are missing are made.

    Args:
      ids: int64 [n].
      gradients: float32, float16 or, of PyTorch, bfloat16 [n, dim]. Sums and steps are in float32.
      learning_rates: one for each segment.
      global_step: for optimizers and compressors that count steps.
      req_time: seconds, becomes the rows' time.
      duplicates: what equal ids get. `sum`: one step on the sum of gradients; `steps`: one each, in
        order; `none`: there are none, which saves a sort.
      stream: to run on.

    Raises:
      TypeError, ValueError: an array does not have the dtype or shape above, a learning rate is
        missing, or an earlier call had values that are not finite.
      OutOfGpuMemoryError: new rows do not fit; nothing has changed.
    """
    options = structures.write_options(duplicates, req_time, global_step, learning_rates)
    job = self._optimize_job(ids, gradients, options)
    library = self._library
    check(library, library.mono_gpu_table_optimize_many(stream, ctypes.byref(job), 1))

  def erase(self, ids: Any, *, stream: int = 0) -> None:
    """Removes rows; ids without one are ignored."""
    n = arrays.length_of(ids)
    self._call(
      "mono_gpu_table_erase",
      ctypes.c_void_p(stream),
      ctypes.c_void_p(arrays.address_of(ids, "ids", "<i8", (n,))),
      ctypes.c_int64(n),
    )

  def evict(self, *, stream: int = 0) -> int:
    """Removes rows that are expired against the newest time of a write; returns how many."""
    erased = ctypes.c_int64()
    self._call("mono_gpu_table_evict", ctypes.c_void_p(stream), ctypes.byref(erased))
    return erased.value

  def reserve(self, rows: int, *, stream: int = 0) -> None:
    """Makes room for `rows` rows in all; raises OutOfGpuMemoryError where there is none."""
    self._call("mono_gpu_table_reserve", ctypes.c_void_p(stream), ctypes.c_int64(rows))

  def clear(self, *, stream: int = 0) -> None:
    """Removes all rows."""
    self._call("mono_gpu_table_clear", ctypes.c_void_p(stream))

  def stats(self) -> dict[str, int]:
    """Returns rows, bytes and counters; waits for the device."""
    stats = structures.Stats()
    self._call("mono_gpu_table_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) for name, *_ in structures.Stats._fields_}

  def check(self) -> None:
    """Waits for the device, and raises where writes so far had what is not finite.

    Raises:
      ValueError: it names table and ids; a second call does not raise again.
    """
    self._call("mono_gpu_table_check")

  def save(self, path: str | os.PathLike[str], *, leave_out_expired: bool = False) -> int:
    """Writes all rows to a file of the records that CPU tables write, too; returns their number.

    Raises:
      OSError: the file cannot be written.
      ValueError: as `check`.
    """
    self.check()
    errors: list[OSError] = []
    saved = ctypes.c_int64()
    with open(path, "wb") as file:

      def write(_: Any, data: int, size: int) -> int:
        try:
          file.write(ctypes.string_at(data, size))
        except OSError as error:
          errors.append(error)
          return 1
        return 0

      sink = structures.SINK(write)
      for shard in range(_SHARDS):
        try:
          self._call(
            "mono_gpu_table_save_shard",
            None,
            ctypes.c_int32(shard),
            ctypes.c_int32(leave_out_expired),
            sink,
            None,
            ctypes.byref(saved),
          )
        except GpuTableError:
          if errors:
            raise errors[0] from None
          raise
    return saved.value

  def load(self, paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> int:
    """Stores the rows of files that a GPU table or a CPU table wrote; returns their number.

    Raises:
      OSError: a file cannot be read.
      GpuTableError: a file is damaged. Some rows are stored.
      ValueError: rows have another dimension. Some rows are stored.
    """
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    loaded, reset = ctypes.c_int64(), ctypes.c_int64()
    for name in names:
      rest = b""
      with open(name, "rb") as file:
        while chunk := file.read(64 << 20):
          rest += chunk
          consumed = ctypes.c_int64()
          self._call(
            "mono_gpu_table_load",
            None,
            ctypes.c_char_p(rest),
            ctypes.c_int64(len(rest)),
            ctypes.byref(consumed),
            ctypes.byref(loaded),
            ctypes.byref(reset),
          )
          rest = rest[consumed.value :]
      if rest:
        raise GpuTableError(f"{os.fspath(name)} ends inside a record")
    return loaded.value
