"""Embedding tables in the memory of a GPU, for PyTorch, CuPy, JAX and other owners of arrays there.

A table holds a row for every int64 id that was written, with the state of its optimizer. Arrays
come in by `__cuda_array_interface__`: nothing is copied, and none of these libraries is needed.
`docs/gpu_table.md` shows a training step.

Longer than 600 lines: half of it are docstrings of one class, which mirrors the C interface.
"""

from __future__ import annotations

import array as buffers
import ctypes
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
  "GpuTable",
  "GpuTableError",
  "OutOfGpuMemoryError",
  "Segment",
  "lookup_many",
  "optimize_many",
]

# The numbers of the engine's enumerations.
OPTIMIZERS = {
  "sgd": 2,
  "adagrad": 3,
  "adadelta": 4,
  "adam": 5,
  "amsgrad": 6,
  "momentum": 7,
  "moving_average": 8,
  "ftrl": 9,
  "group_ftrl": 10,
  "group_adagrad": 11,
  "rmsprop": 12,
  "rmsprop_v2": 13,
  "batch_softmax": 14,
  "dynamic_wd_adagrad": 15,
}
INITIALIZERS = {"zeros": 2, "ones": 3, "constants": 4, "random_uniform": 5}
COMPRESSORS = {None: 0, "fp32": 2, "fp16": 3, "fixed_r8": 4, "one_bit": 5}
_DUPLICATES = {"none": 0, "steps": 1, "sum": 2}
_SHARDS = 64
_NOT_FINITE = {"stop": 0, "skip": 1, "ignore": 2}
_VERSION = 3
_INVALID_ARGUMENT = 1
_OUT_OF_MEMORY = 3
_REFUSED = 6


class GpuTableError(RuntimeError):
  """The device failed, or a file is not what it should be."""


class OutOfGpuMemoryError(MemoryError):
  """Rows do not fit: the card, or what tables may have of it, is full. The table is as before."""


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


class _Segment(ctypes.Structure):
  _fields_ = [
    ("dim", ctypes.c_int64),
    ("optimizer", ctypes.c_int32),
    ("initializer", ctypes.c_int32),
    ("compressor", ctypes.c_int32),
    ("use_nesterov", ctypes.c_int32),
    ("decouple_weight_decay", ctypes.c_int32),
    ("stochastic_rounding_float16", ctypes.c_int32),
    ("initial_accumulator_value", ctypes.c_float),
    ("weight_decay", ctypes.c_float),
    ("beta", ctypes.c_float),
    ("l1", ctypes.c_float),
    ("l2", ctypes.c_float),
    ("averaging_ratio", ctypes.c_float),
    ("epsilon", ctypes.c_float),
    ("beta1", ctypes.c_float),
    ("beta2", ctypes.c_float),
    ("momentum", ctypes.c_float),
    ("constant", ctypes.c_float),
    ("minval", ctypes.c_float),
    ("maxval", ctypes.c_float),
    ("range", ctypes.c_float),
    ("init_scale", ctypes.c_float),
    ("max_scale", ctypes.c_float),
    ("amplitude", ctypes.c_float),
    ("decay_by_step", ctypes.c_int32),
    ("step_size", ctypes.c_int64),
  ]


_SEGMENT_FIELDS = frozenset(name for name, *_ in _Segment._fields_)


class _Config(ctypes.Structure):
  _fields_ = [
    ("segments", ctypes.POINTER(_Segment)),
    ("num_segments", ctypes.c_int64),
    ("initial_capacity", ctypes.c_int64),
    ("seed", ctypes.c_uint64),
    ("default_expire_days", ctypes.c_uint32),
    ("reserved", ctypes.c_uint32),
    ("expire_slots", ctypes.POINTER(ctypes.c_uint32)),
    ("expire_days", ctypes.POINTER(ctypes.c_uint32)),
    ("num_expire_slots", ctypes.c_int64),
    ("name", ctypes.c_char_p),
  ]


class _WriteOptions(ctypes.Structure):
  _fields_ = [
    ("req_time", ctypes.c_int64),
    ("global_step", ctypes.c_int64),
    ("learning_rates", ctypes.POINTER(ctypes.c_float)),
    ("num_learning_rates", ctypes.c_int64),
    ("duplicates", ctypes.c_int32),
    ("not_finite", ctypes.c_int32),
    ("filter", ctypes.c_void_p),
    ("filter_context", ctypes.c_void_p),
    ("chance_filter", ctypes.c_void_p),
  ]


class _LookupJob(ctypes.Structure):
  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("out", ctypes.c_void_p),
    ("found", ctypes.c_void_p),
    ("out_stride", ctypes.c_int64),
  ]


class _OptimizeJob(ctypes.Structure):
  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("gradients", ctypes.c_void_p),
    ("options", ctypes.POINTER(_WriteOptions)),
    ("gradient_stride", ctypes.c_int64),
    ("gradient_type", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
  ]


class _Stats(ctypes.Structure):
  _fields_ = [
    (name, ctypes.c_int64)
    for name in (
      "size",
      "row_bytes",
      "index_bytes",
      "other_bytes",
      "slots",
      "free_rows",
      "spilled",
      "nonfinite_gradients",
      "filtered",
      "expired",
      "max_update_ts",
      "rebuilds",
      "waits",
    )
  ]


_SINK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_library: ctypes.CDLL | None = None


def _load_library() -> ctypes.CDLL:
  global _library
  if _library is not None:
    return _library
  beside = pathlib.Path(__file__).with_name("runtime") / "ops" / "libmonolith_cuda.so"
  path = os.environ.get("MONOLITH_CUDA_LIBRARY") or str(beside)
  try:
    library = ctypes.CDLL(path)
  except OSError as error:
    raise GpuTableError(
      f"GPU tables need libmonolith_cuda.so, which is built where nvcc is found (make gpu): {error}"
    ) from error
  version = library.mono_gpu_version()
  if version != _VERSION:
    raise GpuTableError(f"{path} has version {version}, want {_VERSION}: run `make gpu` again")
  library.mono_gpu_last_error.restype = ctypes.c_char_p
  library.mono_gpu_table_destroy.restype = None
  library.mono_gpu_table_destroy.argtypes = [ctypes.c_void_p]
  for name in ("mono_gpu_table_lookup_many", "mono_gpu_table_optimize_many"):
    getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
  _library = library
  return library


def _check(library: ctypes.CDLL, code: int) -> None:
  if code == 0:
    return
  message = library.mono_gpu_last_error().decode("utf-8", "replace")
  if code in (_INVALID_ARGUMENT, _REFUSED):
    raise ValueError(message)
  if code == _OUT_OF_MEMORY:
    raise OutOfGpuMemoryError(message)
  raise GpuTableError(message)


def _choose(kinds: Mapping[Any, int], what: str, name: Any) -> int:
  if name not in kinds:
    raise ValueError(f"{what} is {name!r}, want one of {sorted(map(str, kinds))}")
  return kinds[name]


# Types of gradients, as the interface of arrays calls them. It has no name for bfloat16: tensors of
# PyTorch say what they are.
_GRADIENT_TYPES = {"<f4": 0, "<f2": 1, "bfloat16": 2}
# How PyTorch calls the types of arrays.
_TORCH_TYPES = {
  "<i8": "torch.int64",
  "<f4": "torch.float32",
  "<f2": "torch.float16",
  "bfloat16": "torch.bfloat16",
  "|u1": "torch.uint8",
  "|b1": "torch.bool",
}


def _is_plain_tensor(array: Any) -> bool:
  """Tells whether an array is a packed tensor of PyTorch on a GPU, that no gradient is wanted of.

  The interface of a tensor is made anew in every call, which takes longer than a launch.
  """
  return (
    type(array).__module__ == "torch"
    and array.is_cuda
    and array.is_contiguous()
    and not array.requires_grad
  )


def _address(
  array: Any, what: str, dtype: str, shape: tuple[int, ...], *, writable: bool = False
) -> int:
  """Returns where an array lies on the device.

  Raises:
    TypeError: it is no array on a GPU, or of another type.
    ValueError: it has another shape, has gaps, or must not be written.
  """
  if _is_plain_tensor(array) and str(array.dtype) == _TORCH_TYPES[dtype] and array.shape == shape:
    return int(array.data_ptr())
  try:
    interface = array.__cuda_array_interface__
  except (AttributeError, RuntimeError) as error:
    raise TypeError(f"{what} is no array on a GPU: {type(array).__name__}") from error
  if interface["typestr"] != dtype:
    raise TypeError(f"{what} has type {interface['typestr']}, want {dtype}")
  if tuple(interface["shape"]) != shape:
    raise ValueError(f"{what} has shape {tuple(interface['shape'])}, want {shape}")
  strides = interface.get("strides")
  if strides is not None:
    packed, step = [], int(dtype[2:])
    for size in reversed(shape):
      packed.append(step)
      step *= size
    if 0 not in shape and tuple(strides) != tuple(reversed(packed)):
      raise ValueError(f"{what} has gaps: strides are {tuple(strides)}; copy it first")
  address, read_only = interface["data"]
  if writable and read_only:
    raise ValueError(f"{what} must not be written")
  return int(address)


def _gradients(array: Any, shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns where gradients lie on the device, and the number of their type.

  Raises:
    TypeError, ValueError: as `_address`.
  """
  if type(array).__module__ == "torch":
    found = str(array.dtype)
    wanted = next((name for name in _GRADIENT_TYPES if _TORCH_TYPES[name] == found), "<f4")
  else:
    wanted = getattr(array, "__cuda_array_interface__", {}).get("typestr", "<f4")
    wanted = wanted if wanted in _GRADIENT_TYPES else "<f4"
  return _address(array, "gradients", wanted, shape), _GRADIENT_TYPES[wanted]


def _not_finite() -> int:
  """Returns the number of what becomes of gradients that are not finite."""
  setting = os.environ.get("MONOLITH_BAD_GRADIENTS", "stop")
  if setting not in _NOT_FINITE:
    raise ValueError(f"MONOLITH_BAD_GRADIENTS is {setting!r}, want stop, skip or ignore")
  return _NOT_FINITE[setting]


def _write_options(
  duplicates: str, req_time: int, global_step: int, learning_rates: Sequence[float]
) -> _WriteOptions:
  return _WriteOptions(
    req_time=req_time,
    global_step=global_step,
    learning_rates=(ctypes.c_float * max(1, len(learning_rates)))(*learning_rates),
    num_learning_rates=len(learning_rates),
    duplicates=_choose(_DUPLICATES, "duplicates", duplicates),
    not_finite=_not_finite(),
  )


def _length(ids: Any) -> int:
  if _is_plain_tensor(ids) and ids.dim() == 1:
    return len(ids)
  interface = getattr(ids, "__cuda_array_interface__", None)
  if interface is None:
    raise TypeError(f"ids is no array on a GPU: {type(ids).__name__}")
  shape = tuple(interface["shape"])
  if len(shape) != 1:
    raise ValueError(f"ids has shape {shape}, want one dimension")
  return int(shape[0])


def is_available() -> bool:
  """Tells whether this process has a CUDA device, and the library of tables on it."""
  try:
    library = _load_library()
  except GpuTableError:
    return False
  count = ctypes.c_int32()
  return library.mono_gpu_device_count(ctypes.byref(count)) == 0 and count.value > 0


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
    library = _load_library()
    self._library = library
    self._segments = [segments] if isinstance(segments, Segment) else list(segments)
    self.dim = sum(segment.dim for segment in self._segments)
    array = (_Segment * max(1, len(self._segments)))()
    for c_segment, segment in zip(array, self._segments):
      for field in dataclasses.fields(segment):
        value = getattr(segment, field.name)
        if field.name not in _SEGMENT_FIELDS:
          if value != field.default:
            raise ValueError(f"{field.name} is {value!r}, which works in main memory alone")
          continue
        if field.name == "optimizer":
          value = _choose(OPTIMIZERS, "optimizer", value)
        elif field.name == "initializer":
          value = _choose(INITIALIZERS, "initializer", value)
        elif field.name == "compressor":
          value = _choose(COMPRESSORS, "compressor", value)
        setattr(c_segment, field.name, value)
    slots = dict(slot_expire_days or {})
    config = _Config(
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
    _check(library, library.mono_gpu_table_create(ctypes.byref(config), ctypes.byref(handle)))
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
    _check(self._library, getattr(self._library, function)(self._handle, *arguments))

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

  def _lookup_job(self, ids: Any, out: Any, found: Any) -> _LookupJob:
    handle = self._open_handle()
    n = _length(ids)
    flags = None
    if found is not None:
      typestr = getattr(found, "__cuda_array_interface__", {}).get("typestr", "")
      kind = typestr if typestr == "|b1" else "|u1"
      flags = _address(found, "found", kind, (n,), writable=True)
    return _LookupJob(
      table=handle,
      ids=_address(ids, "ids", "<i8", (n,)),
      n=n,
      out=_address(out, "out", "<f4", (n, self.dim), writable=True),
      found=flags,
    )

  def _optimize_job(self, ids: Any, gradients: Any, options: _WriteOptions) -> _OptimizeJob:
    handle = self._open_handle()
    n = _length(ids)
    address, kind = _gradients(gradients, (n, self.dim))
    return _OptimizeJob(
      table=handle,
      ids=_address(ids, "ids", "<i8", (n,)),
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
    n = _length(ids)
    options = _write_options(duplicates, req_time, 0, ())
    self._call(
      function,
      ctypes.c_void_p(stream),
      ctypes.c_void_p(_address(ids, "ids", "<i8", (n,))),
      ctypes.c_int64(n),
      ctypes.c_void_p(_address(values, what, "<f4", (n, self.dim))),
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
    options = _write_options(duplicates, req_time, global_step, learning_rates)
    job = self._optimize_job(ids, gradients, options)
    library = self._library
    _check(library, library.mono_gpu_table_optimize_many(stream, ctypes.byref(job), 1))

  def erase(self, ids: Any, *, stream: int = 0) -> None:
    """Removes rows; ids without one are ignored."""
    n = _length(ids)
    self._call(
      "mono_gpu_table_erase",
      ctypes.c_void_p(stream),
      ctypes.c_void_p(_address(ids, "ids", "<i8", (n,))),
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
    stats = _Stats()
    self._call("mono_gpu_table_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) for name, *_ in _Stats._fields_}

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

      sink = _SINK(write)
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
  jobs = (_LookupJob * max(1, len(lookups)))()
  for i, (table, ids, out, *found) in enumerate(lookups):
    try:
      jobs[i] = table._lookup_job(ids, out, *(found or [None]))
    except (TypeError, ValueError) as error:
      raise type(error)(f"lookups[{i}]: {error}") from error
  if lookups:
    library = _load_library()
    _check(
      library,
      library.mono_gpu_table_lookup_many(stream, jobs, len(lookups)),
    )
  return [lookup[2] for lookup in lookups]


# A table, the address of its int64 ids, how many these are, and the address of their vectors.
Place = tuple[GpuTable, int, int, int]
# 64-bit words of the structures, which arrays of words are quicker to make than.
_LOOKUP_WORDS = ctypes.sizeof(_LookupJob) // 8
_OPTIMIZE_WORDS = ctypes.sizeof(_OptimizeJob) // 8
_OPTIONS_WORDS = ctypes.sizeof(_WriteOptions) // 8


def _run(library: ctypes.CDLL, function: str, stream: int, words: list[int], size: int) -> None:
  """Calls a function with jobs of `size` words."""
  jobs = buffers.array("q", words)
  _check(library, getattr(library, function)(stream, jobs.buffer_info()[0], len(words) // size))


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
    kinds = _choose(_DUPLICATES, "duplicates", duplicates) | _not_finite() << 32
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
    _run(_load_library(), "mono_gpu_table_lookup_many", stream, words, _LOOKUP_WORDS)


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
  words: list[int] = []
  for (table, ids, n, rows), address in zip(places, options.addresses, strict=True):
    words += (table._open_handle(), ids, n, rows, address, 0, 0)
  if words:
    _run(_load_library(), "mono_gpu_table_optimize_many", stream, words, _OPTIMIZE_WORDS)


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
    self._library = _load_library()
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
  jobs = (_OptimizeJob * max(1, len(steps)))()
  options: dict[GpuTable, tuple[list[float], _WriteOptions]] = {}
  for i, (table, ids, gradients, learning_rates) in enumerate(steps):
    try:
      rates = [float(rate) for rate in learning_rates]
      if table not in options:
        options[table] = rates, _write_options(duplicates, req_time, global_step, rates)
      elif options[table][0] != rates:
        raise ValueError(f"learning_rates are {rates}, those before {options[table][0]}")
      jobs[i] = table._optimize_job(ids, gradients, options[table][1])
    except (TypeError, ValueError) as error:
      raise type(error)(f"steps[{i}]: {error}") from error
  if steps:
    library = _load_library()
    _check(
      library,
      library.mono_gpu_table_optimize_many(stream, jobs, len(steps)),
    )
