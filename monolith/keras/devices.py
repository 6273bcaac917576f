"""Decides where the rows of a table are: in main memory, or in the memory of a GPU.

`None` follows the `tf.device` in which the table is made, as a variable does. Where there is none,
a variable is on the GPU if there is one, but a table is in main memory, which holds more rows.
Where a layer is called does not matter: rows do not move.

  Embedding(16)                                   # in main memory
  Embedding(16, device="gpu")                     # on the GPU, or an error
  with tf.device("GPU:0"):
    Embedding(16)                                 # on the GPU, or a warning
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging
from tensorflow.python.eager import context

from monolith.native_training import gpu_table

HOST = "/device:CPU:0"
GPU = "/device:GPU:0"
_KEEPS = "leave device out, which keeps the table in main memory"


class Placed(Protocol):
  """A table, as far as it is needed here."""

  device: str


def parse(device: Any) -> str | None:
  """Returns an argument `device` as `"cpu"`, `"gpu"`, or `None`.

  Args:
    device: `"cpu"` or `"gpu"`, or as TensorFlow writes them: `"GPU:0"`, `"/device:GPU:0"`.

  Raises:
    TypeError: it is no text.
    ValueError: it is another device.
  """
  if device is None:
    return None
  if not isinstance(device, str):
    raise TypeError(f"device is {device!r}, want 'cpu', 'gpu' or None")
  kind, _, number = device.lower().removeprefix("/").removeprefix("device:").partition(":")
  if kind not in ("cpu", "gpu") or number not in ("", "0"):
    raise ValueError(
      f"device is {device!r}, want 'cpu' or 'gpu': a table is in main memory or on GPU:0"
    )
  return kind


def is_on(table: Placed, device: Any) -> bool:
  """Tells whether a table is on the device that an argument names."""
  return (table.device == GPU) == (parse(device) == "gpu")


def resolve(device: Any, label: str) -> str:
  """Returns the device of a table that is being made, `HOST` or `GPU`.

  Args:
    device: the argument; `None` for that of the scope.
    label: what messages call the table.

  Raises:
    TypeError, ValueError: `device` is no device of a table.
    RuntimeError: a GPU is asked for, and none can hold tables here.
  """
  kind = parse(device)
  if kind == "cpu" or (kind is None and not _is_in_gpu_scope()):
    return HOST
  reason = why_not_gpu()
  if reason is None:
    return GPU
  if kind is None:
    logging.warning(
      "Table %r is in main memory, although tf.device says that it is on a GPU: %s", label, reason
    )
    return HOST
  raise RuntimeError(f"table {label!r} has device={device!r}, but {reason}: {_KEEPS}")


def restored(device: Any, label: str) -> Any:
  """Returns the device of a layer that is made from a configuration, perhaps of another machine.

  Args:
    device: what `get_config` had.
    label: what the warning calls the layer.

  Returns:
    `device`, or `"cpu"` where it is a GPU and none can hold tables here.
  """
  if parse(device) != "gpu":
    return device
  reason = why_not_gpu()
  if reason is None:
    return device
  logging.warning(
    "The tables of layer %r were on a GPU and are in main memory now: %s", label, reason
  )
  return "cpu"


def why_not_gpu() -> str | None:
  """Returns why no GPU can hold tables in this process; `None` if one can."""
  if not tf.config.list_logical_devices("GPU"):
    return "TensorFlow finds no GPU here"
  if not gpu_table.is_available():
    return "libmonolith_cuda.so, which `make gpu` builds, is missing or of another version"
  return None


def _is_in_gpu_scope() -> bool:
  # Scopes inside of a function, around it, and that of a strategy for one device.
  name = "" if tf.executing_eagerly() else tf.no_op().device
  if not name:
    with tf.init_scope():
      name = context.context().device_name if tf.executing_eagerly() else ""
  if not name and tf.distribute.has_strategy():
    name = tf.distribute.get_strategy().extended.worker_devices[0]
  return bool(name) and tf.DeviceSpec.from_string(name).device_type == "GPU"


def scope(device: str) -> contextlib.AbstractContextManager:
  """Returns a scope for ops on tables of a device.

  On a GPU it names no device: ops are where the table is. So a function that was traced with tables
  on a GPU serves in an exported model, whose tables are in main memory.
  """
  return tf.device(HOST if device == HOST else None)


def by_device(tables: Sequence[Placed]) -> list[tuple[str, list[int]]]:
  """Returns each device of tables, with the places of its tables in the sequence."""
  places: dict[str, list[int]] = {}
  for i, table in enumerate(tables):
    places.setdefault(table.device, []).append(i)
  return list(places.items())


def common(named: Iterable[tuple[str, Placed]], remedy: str) -> str:
  """Returns the device of tables that have to be in one place.

  Args:
    named: names and tables.
    remedy: the end of the message.

  Raises:
    ValueError: some are on a GPU and some in main memory.
  """
  pairs = list(named)
  on_gpu = sorted(name for name, table in pairs if table.device == GPU)
  on_host = sorted(name for name, table in pairs if table.device != GPU)
  if on_gpu and on_host:
    raise ValueError(f"Tables {on_gpu} are on a GPU and {on_host} in main memory: {remedy}")
  return GPU if on_gpu else HOST
