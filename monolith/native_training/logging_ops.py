"""Timestamps, metrics and the health of the machine, from inside a graph.

Differences from ByteDance's Monolith: `tensors_timestamp` passes gradients on.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from absl import flags, logging

from monolith import utils
from monolith.native_training.runtime.ops import gen_monolith_ops as logging_ops

flags.DEFINE_integer(
  "monolith_default_machine_info_mem_limit",
  1 << 62,
  "Resident memory in bytes from which on a machine counts as out of memory, where machine_info is "
  "given no limit.",
)
FLAGS = flags.FLAGS

_LIBRARY = "monolith/native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so"


def tensors_timestamp(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
  """Tells when all of the tensors were there.

  Returns:
    (the same tensors, int64 scalar with the Unix time in microseconds).
  """
  return logging_ops.monolith_tensors_timestamp(tensors)


@tf.RegisterGradient("MonolithTensorsTimestamp")
def _tensors_timestamp_grad(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor]:
  del op
  return list(grads[:-1])


def emit_timer(
  key: str, value: tf.Tensor | float, tags: Mapping[str, str] | None = None
) -> tf.Operation | None:
  """Emits a metric.

  Args:
    key: its name.
    value: a float32 scalar.
    tags: sent along as `name=value` joined by `|`, in their order.

  Returns:
    The op (None in eager mode, where it is done at once).
  """
  tags = "|".join(f"{name}={tag}" for name, tag in (tags or {}).items())
  return logging_ops.monolith_metric_v2(value, key=key, tags=tags)


def machine_info(mem_limit: int | None = None, shared_name: str | None = None) -> tf.Tensor:
  """Limits of the machine, a resource; the first op that runs with a shared name decides.

  Args:
    mem_limit: bytes of resident memory, by default the flag
      `monolith_default_machine_info_mem_limit`.
    shared_name: name of the resource and of the op.
  """
  if mem_limit is None:
    # Not by attribute, which fails before flags are parsed; then the flag has its default.
    mem_limit = FLAGS["monolith_default_machine_info_mem_limit"].value
  return logging_ops.monolith_machine_info(
    mem_limit=mem_limit, shared_name=shared_name or "", name=shared_name
  )


def check_machine_health(tensor: tf.Tensor) -> tf.Tensor:
  """Checks this process against a `machine_info`.

  Returns:
    A string scalar: a serialized `MachineHealthResult`, empty if all is well.
  """
  return logging_ops.monolith_check_machine_health(tensor)


_SinkFunction = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_float, ctypes.c_char_p)
# The C++ side holds a plain pointer: the function must stay referenced here.
_sink: ctypes._CFuncPtr | None = None


def set_metric_sink(sink: Callable[[str, float, str], None] | None) -> None:
  """Sends every metric that ops of this process emit to a function; None ends that.

  Args:
    sink: called as `sink(key, value, tags)` from TensorFlow's threads. What it raises is logged.
      It must not call this function.
  """
  global _sink
  library = ctypes.CDLL(utils.get_libops_path(_LIBRARY))
  function = None if sink is None else _SinkFunction(_guarded(sink))
  library.MonolithSetMetricSink.argtypes = [_SinkFunction]
  library.MonolithSetMetricSink.restype = None
  # Returns when no thread is inside the old function any more, so that it may be dropped.
  library.MonolithSetMetricSink(function or ctypes.cast(None, _SinkFunction))
  if _sink is None and function is not None:
    atexit.register(set_metric_sink, None)
  elif function is None:
    atexit.unregister(set_metric_sink)
  _sink = function


def _guarded(sink: Callable[[str, float, str], None]) -> Callable[[bytes, float, bytes], None]:
  def call(key: bytes, value: float, tags: bytes) -> None:
    try:
      sink(key.decode(errors="replace"), value, tags.decode(errors="replace"))
    except Exception:  # Metrics must never stop training.
      logging.exception("the metric sink failed for %s", key)

  return call
