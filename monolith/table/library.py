"""`libmonolith_engine.so` by ctypes: structures, and errors as exceptions.

ctypes gives the GIL away for the length of a call.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
from typing import Any

from monolith.native_training import gpu_table
from monolith.table import optimizers

_INVALID_ARGUMENT = 1
_OUT_OF_MEMORY = 3
_NOT_FOUND = 6
_PERMISSION_DENIED = 7


class TableError(RuntimeError):
  """Raised for a damaged file or a missing library; arguments and memory have other errors."""


class _Segment(ctypes.Structure):
  _fields_ = [
    ("dim", ctypes.c_int64),
    *(
      (name, ctypes.c_int32)
      for name in (
        "optimizer",
        "initializer",
        "compressor",
        "use_nesterov",
        "decouple_weight_decay",
        "stochastic_rounding_float16",
        "decay_by_step",
        "enable_dynamic_wd",
      )
    ),
    *(
      (name, ctypes.c_float)
      for name in (
        "initial_accumulator_value",
        "weight_decay",
        "beta",
        "l1",
        "l2",
        "averaging_ratio",
        "epsilon",
        "beta1",
        "beta2",
        "momentum",
        "constant",
        "minval",
        "maxval",
        "range",
        "init_scale",
        "max_scale",
        "amplitude",
      )
    ),
    ("step_size", ctypes.c_int64),
  ]


class _Config(ctypes.Structure):
  _fields_ = [
    ("segments", ctypes.POINTER(_Segment)),
    ("num_segments", ctypes.c_int64),
    ("initial_capacity", ctypes.c_int64),
    ("seed", ctypes.c_uint64),
    ("name", ctypes.c_char_p),
    ("default_expire_days", ctypes.c_uint32),
    ("skip_zero_embedding", ctypes.c_uint32),
    ("expire_slots", ctypes.POINTER(ctypes.c_uint32)),
    ("expire_days", ctypes.POINTER(ctypes.c_uint32)),
    ("num_expire_slots", ctypes.c_int64),
    ("admit_after", ctypes.c_uint32),
    ("evict_every_hours", ctypes.c_uint32),
    ("admit_capacity", ctypes.c_int64),
  ]


class WriteOptions(ctypes.Structure):
  """`MonoWriteOptions`."""

  _fields_ = [
    ("req_time", ctypes.c_int64),
    ("global_step", ctypes.c_int64),
    ("learning_rates", ctypes.POINTER(ctypes.c_float)),
    ("num_learning_rates", ctypes.c_int64),
    ("non_finite", ctypes.c_int32),
    ("sum_duplicates", ctypes.c_int32),
  ]


class Stats(ctypes.Structure):
  """`MonoTableStats`."""

  _fields_ = [
    (name, ctypes.c_int64)
    for name in (
      "size",
      "memory",
      "row_memory",
      "index_memory",
      "free_rows",
      "expired",
      "filtered",
      "nonfinite_gradients",
      "max_update_ts",
    )
  ]


class LookupJob(ctypes.Structure):
  """`MonoLookupJob`."""

  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("out", ctypes.c_void_p),
    ("found", ctypes.c_void_p),
  ]


class OptimizeJob(ctypes.Structure):
  """`MonoOptimizeJob`."""

  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("gradients", ctypes.c_void_p),
    ("options", ctypes.POINTER(WriteOptions)),
  ]


ROW_SINK = ctypes.CFUNCTYPE(
  ctypes.c_int,
  ctypes.c_void_p,
  ctypes.c_void_p,
  ctypes.c_void_p,
  ctypes.c_void_p,
  ctypes.c_int64,
)
ENTRY_SINK = ctypes.CFUNCTYPE(
  ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
)

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
  "mono_set_num_threads": (_INT64,),
  "mono_table_create": (_POINTER, _POINTER),
  "mono_table_configure": (_POINTER, _POINTER),
  "mono_table_size": (_POINTER, _POINTER),
  "mono_table_stats": (_POINTER, _POINTER),
  "mono_table_lookup": (_POINTER, _POINTER, _INT64, _POINTER, _POINTER),
  "mono_table_contains": (_POINTER, _POINTER, _INT64, _POINTER),
  "mono_table_assign": (_POINTER, _POINTER, _INT64, _POINTER, _POINTER),
  "mono_table_assign_add": (_POINTER, _POINTER, _INT64, _POINTER, _POINTER),
  "mono_table_optimize": (_POINTER, _POINTER, _INT64, _POINTER, _POINTER),
  "mono_table_lookup_many": (_POINTER, _INT64),
  "mono_table_optimize_many": (_POINTER, _INT64),
  "mono_table_reinitialize": (_POINTER, _POINTER, _INT64, _INT64, _POINTER),
  "mono_table_erase": (_POINTER, _POINTER, _INT64),
  "mono_table_evict": (_POINTER, _POINTER),
  "mono_table_reserve": (_POINTER, _INT64),
  "mono_table_clear": (_POINTER,),
  "mono_table_rows": (_POINTER, ROW_SINK, _POINTER),
  "mono_table_entries": (_POINTER, _POINTER, _INT64, ENTRY_SINK, _POINTER),
  "mono_table_save": (_POINTER, ctypes.c_char_p, _INT64, _POINTER, _POINTER),
  "mono_table_load": (_POINTER, ctypes.c_char_p, _POINTER, _POINTER),
}
_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
  """Returns the library.

  Raises:
    TableError: it is missing.
  """
  global _library
  if _library is not None:
    return _library
  beside = pathlib.Path(gpu_table.__file__).with_name("runtime") / "ops" / "libmonolith_engine.so"
  path = os.environ.get("MONOLITH_ENGINE_LIBRARY") or str(beside)
  try:
    library = ctypes.CDLL(path)
  except OSError as error:
    raise TableError(
      f"Tables need libmonolith_engine.so, which the build makes (make build): {error}"
    ) from error
  library.mono_last_error.restype = ctypes.c_char_p
  library.mono_table_destroy.restype = None
  library.mono_table_destroy.argtypes = [ctypes.c_void_p]
  for name, arguments in _ARGUMENTS.items():
    getattr(library, name).argtypes = arguments
  _library = library
  return library


def check(code: int, *, of_files: bool = False) -> None:
  """Raises what a call has returned.

  Args:
    code: of the call.
    of_files: the call works on files: what is full then is the disk.

  Raises:
    ValueError, MemoryError, OSError, TableError: the call failed.
  """
  if code == 0:
    return
  message = load().mono_last_error().decode("utf-8", "replace")
  if code == _INVALID_ARGUMENT:
    raise ValueError(message)
  if code == _OUT_OF_MEMORY:
    raise OSError(message) if of_files else MemoryError(message)
  if code == _NOT_FOUND:
    raise FileNotFoundError(message)
  if code == _PERMISSION_DENIED:
    raise PermissionError(message)
  raise TableError(message)


def call(function: str, *arguments: Any) -> None:
  """Calls a function of the library; raises what `check` does."""
  check(getattr(load(), function)(*arguments))


def set_num_threads(threads: int) -> None:
  """Sets how many threads one call may use, for all tables of the process.

  Args:
    threads: at least 1; 0: as many as this process may run on, which is the default.

  Raises:
    ValueError: it is negative.
  """
  call("mono_set_num_threads", int(threads))


def config(
  segment: optimizers.Segment,
  *,
  name: str,
  seed: int,
  initial_capacity: int,
  expire_days: int | None,
  admit_after: int,
  admit_capacity: int,
  evict_every_hours: int,
) -> _Config:
  """Returns a `MonoTableConfig`; it keeps alive what it points to."""
  c_segment = _Segment()
  kinds: dict[str, Any] = {
    "optimizer": gpu_table.OPTIMIZERS,
    "initializer": gpu_table.INITIALIZERS,
    "compressor": gpu_table.COMPRESSORS,
  }
  for field in dataclasses.fields(segment):
    value = getattr(segment, field.name)
    setattr(c_segment, field.name, kinds[field.name][value] if field.name in kinds else value)
  return _Config(
    segments=ctypes.pointer(c_segment),
    num_segments=1,
    initial_capacity=initial_capacity,
    seed=seed,
    name=name.encode("utf-8"),
    default_expire_days=_FOREVER if expire_days is None else expire_days,
    admit_after=admit_after,
    evict_every_hours=evict_every_hours,
    admit_capacity=admit_capacity,
  )


_FOREVER = 36500
