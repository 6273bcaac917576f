"""The structures of `runtime/gpu/c_api.h`, and the numbers that stand in them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

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
DUPLICATES = {"none": 0, "steps": 1, "sum": 2}
_NOT_FINITE = {"stop": 0, "skip": 1, "ignore": 2}


class Segment(ctypes.Structure):
  """`MonoGpuTableSegment`."""

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


class Config(ctypes.Structure):
  """`MonoGpuTableConfig`."""

  _fields_ = [
    ("segments", ctypes.POINTER(Segment)),
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


class WriteOptions(ctypes.Structure):
  """`MonoGpuWriteOptions`."""

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


class LookupJob(ctypes.Structure):
  """`MonoGpuLookupJob`."""

  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("out", ctypes.c_void_p),
    ("found", ctypes.c_void_p),
    ("out_stride", ctypes.c_int64),
  ]


class OptimizeJob(ctypes.Structure):
  """`MonoGpuOptimizeJob`."""

  _fields_ = [
    ("table", ctypes.c_void_p),
    ("ids", ctypes.c_void_p),
    ("n", ctypes.c_int64),
    ("gradients", ctypes.c_void_p),
    ("options", ctypes.POINTER(WriteOptions)),
    ("gradient_stride", ctypes.c_int64),
    ("gradient_type", ctypes.c_int32),
    ("reserved", ctypes.c_int32),
  ]


class Stats(ctypes.Structure):
  """`MonoGpuTableStats`."""

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


# Takes bytes of a file: context, where they are, how many; returns 0, or another number to stop.
SINK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def choose(kinds: Mapping[Any, int], what: str, name: Any) -> int:
  """Returns the number of a kind.

  Raises:
    ValueError: there is none of this name; the text says what it is for.
  """
  if name not in kinds:
    raise ValueError(f"{what} is {name!r}, want one of {sorted(map(str, kinds))}")
  return kinds[name]


def not_finite() -> int:
  """Returns the number of what becomes of gradients that are not finite.

  Raises:
    ValueError: `MONOLITH_BAD_GRADIENTS` has another value.
  """
  setting = os.environ.get("MONOLITH_BAD_GRADIENTS", "stop")
  if setting not in _NOT_FINITE:
    raise ValueError(f"MONOLITH_BAD_GRADIENTS is {setting!r}, want stop, skip or ignore")
  return _NOT_FINITE[setting]


def write_options(
  duplicates: str, req_time: int, global_step: int, learning_rates: Sequence[float]
) -> WriteOptions:
  """Returns the options of a write.

  Raises:
    ValueError: `duplicates` is no kind, or `MONOLITH_BAD_GRADIENTS` has another value.
  """
  return WriteOptions(
    req_time=req_time,
    global_step=global_step,
    learning_rates=(ctypes.c_float * max(1, len(learning_rates)))(*learning_rates),
    num_learning_rates=len(learning_rates),
    duplicates=choose(DUPLICATES, "duplicates", duplicates),
    not_finite=not_finite(),
  )
