"""What describes a table in plain arguments: optimizer, initializer, lifetime, admission.

The objects of `monolith.entry` describe the same things; a name stands for one with its defaults,
but for two that would hardly move a row: Keras divides the loss by the size of the batch, and the
gradients with it.

  settings.optimizer("sgd")                              # entry.SgdOptimizer()
  settings.optimizer(entry.AdamOptimizer(0.01))          # taken as it is
  settings.days("30d")                                   # 30
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any, Union

import tensorflow as tf

from monolith.native_training import entry
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

OptimizerLike = Union[str, entry.Optimizer]
InitializerLike = Union[str, float, entry.Initializer]
Duration = Union[str, int, datetime.timedelta]

# The filter's counters have four bits.
MAX_ADMIT_AFTER = 15

_OPTIMIZERS: dict[str, Callable[[], entry.Optimizer]] = {
  "adadelta": entry.AdadeltaOptimizer,
  "adagrad": functools.partial(entry.AdagradOptimizer, initial_accumulator_value=1e-6),
  "adam": functools.partial(entry.AdamOptimizer, epsilon=1e-7),
  "amsgrad": entry.AmsgradOptimizer,
  "ftrl": entry.FtrlOptimizer,
  "momentum": entry.MomentumOptimizer,
  "rmsprop": entry.RmspropV2Optimizer,
  "sgd": entry.SgdOptimizer,
}
_INITIALIZERS: dict[str, Callable[[], entry.Initializer]] = {
  "uniform": entry.RandomUniformInitializer,
  "zeros": entry.ZerosInitializer,
}
# Expired rows leave memory this often; a checkpoint never holds them.
_EVICT_EVERY_HOURS = 1


def optimizer(value: OptimizerLike) -> entry.Optimizer:
  """Returns the optimizer that runs on a table's rows.

  Args:
    value: an optimizer of `monolith.entry`, or the name of one.

  Raises:
    ValueError: no optimizer has that name.
    TypeError: it is something else, such as an optimizer of Keras, which keeps its state in dense
      variables and cannot work on rows that come and go.
  """
  return _named(value, "optimizer", _OPTIMIZERS, entry.Optimizer, "monolith.entry.AdagradOptimizer")


def _optimizer_of_kind(kind: str | None) -> entry.Optimizer | None:
  optimizers = (make() for make in _OPTIMIZERS.values())
  return next((one for one in optimizers if one.as_proto().WhichOneof("type") == kind), None)


def initializer(value: InitializerLike) -> entry.Initializer:
  """Returns what new rows begin with.

  Args:
    value: an initializer of `monolith.entry`, the name of one, or a number for all elements.

  Raises:
    ValueError: no initializer has that name.
    TypeError: it is something else.
  """
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return entry.ConstantsInitializer(float(value))
  return _named(
    value, "initializer", _INITIALIZERS, entry.Initializer, "monolith.entry.ZerosInitializer"
  )


def _named(
  value: Any, what: str, by_name: Mapping[str, Callable[[], Any]], base: type, example: str
) -> Any:
  if isinstance(value, base):
    return value
  if isinstance(value, str):
    if value in by_name:
      return by_name[value]()
    raise ValueError(f"{what} is {value!r}, want one of {sorted(by_name)} or such as {example}()")
  if isinstance(value, Mapping) and "class_name" in value:
    return deserialize(value)
  raise TypeError(
    f"{what} is {value!r} of type {type(value).__module__}.{type(value).__name__}, want one of "
    f"{sorted(by_name)} or an object of monolith.entry such as {example}()"
  )


def days(value: Duration | None) -> int | None:
  """Returns how many whole days a row lives without an update; `None` forever.

  Args:
    value: a number of days, text such as `"30d"` or `"2w"`, or a `datetime.timedelta`.

  Raises:
    ValueError: it is not a whole number of days of at least 1.
    TypeError: it is something else.
  """
  if value is None:
    return None
  wanted = "want whole days of at least 1, such as 30, '30d', '2w' or datetime.timedelta(days=30)"
  if isinstance(value, datetime.timedelta):
    number, rest = divmod(value, datetime.timedelta(days=1))
    if rest:
      raise ValueError(f"expire_after is {value!r}, {wanted}")
  elif isinstance(value, str):
    match = re.fullmatch(r"\s*(\d+)\s*([dw])\s*", value)
    if not match:
      raise ValueError(f"expire_after is {value!r}, {wanted}")
    number = int(match[1]) * (7 if match[2] == "w" else 1)
  elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
    number = int(value)
  else:
    raise TypeError(f"expire_after is {value!r}, {wanted}")
  if not 1 <= number < 1 << 32:
    raise ValueError(f"expire_after is {value!r}, {wanted}")
  return number


def admission(value: int) -> int:
  """Returns after how many occurrences an id gets a row.

  Raises:
    ValueError: it is not a whole number from 0 to 15.
  """
  if not isinstance(value, numbers.Integral) or not 0 <= value <= MAX_ADMIT_AFTER:
    raise ValueError(f"admit_after is {value!r}, want a whole number from 0 to {MAX_ADMIT_AFTER}")
  return int(value)


def learning_rate(config: entry.Optimizer) -> float:
  """Returns the learning rate that an optimizer of `monolith.entry` names, or its default."""
  proto = config.as_proto()
  return float(getattr(getattr(proto, proto.WhichOneof("type")), "learning_rate", 0.0))


def table_config(
  dim: int,
  row_optimizer: entry.Optimizer,
  row_initializer: entry.Initializer,
  expire_after: int | None,
) -> embedding_hash_table_pb2.EmbeddingHashTableConfig:
  """Returns the configuration of a table with one segment of full precision.

  Raises:
    ValueError: `dim` is not a whole number of at least 1.
  """
  if not isinstance(dim, numbers.Integral) or isinstance(dim, bool) or not 1 <= dim < 1 << 31:
    raise ValueError(f"dim is {dim!r}, want a whole number of at least 1")
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.entry_config.segments.append(
    entry.CombineAsSegment(int(dim), row_initializer, row_optimizer, entry.Fp32Compressor())
  )
  evict_every = 0
  if expire_after is not None:
    config.slot_expire_time_config.default_expire_time = expire_after
    evict_every = _EVICT_EVERY_HOURS
  entry.CuckooHashTableConfig(feature_evict_every_n_hours=evict_every).mutate_table(config)
  return config


def optimizer_kind(config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> str:
  """Returns the kind of a table's optimizer, a member of `OptimizerConfig`."""
  return config.entry_config.segments[0].opt_config.WhichOneof("type")


def without_rate(config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> bytes:
  """Returns a configuration without learning rates, which come with each update, serialized."""
  copy = type(config)()
  copy.CopyFrom(config)
  for segment in copy.entry_config.segments:
    kind = segment.opt_config.WhichOneof("type")
    getattr(segment.opt_config, kind).ClearField("learning_rate")
  return copy.SerializeToString(deterministic=True)


def saved_optimizer(path: Any) -> entry.Optimizer | None:
  """Returns an optimizer of the kind whose state is in a table's files; `None` without rows."""
  text = path.numpy().decode() if tf.is_tensor(path) else str(path)
  for file in sorted(tf.io.gfile.glob(f"{text}-?????-of-?????")):
    for record in tf.data.TFRecordDataset(file).take(1):
      dumps = embedding_hash_table_pb2.EntryDump.FromString(record.numpy()).opt.dump
      kind = dumps[0].WhichOneof("type") if dumps else None
      return _optimizer_of_kind(kind)
  return None


def serialize(value: Any) -> dict[str, Any]:
  """Returns an optimizer or initializer of `monolith.entry` as a dictionary for JSON."""
  fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  return {
    "class_name": type(value).__name__,
    "config": {
      name: serialize(field) if dataclasses.is_dataclass(field) else field
      for name, field in fields.items()
    },
  }


def deserialize(value: Mapping[str, Any]) -> Any:
  """Returns what `serialize` was given.

  Raises:
    ValueError: `monolith.entry` has no such class.
  """
  name = value["class_name"]
  cls: Any = getattr(entry, name, None) if name in entry.__all__ else None
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise ValueError(f"class_name is {name!r}, want an optimizer or initializer of monolith.entry")
  fields = {
    key: deserialize(field) if isinstance(field, Mapping) else field
    for key, field in value["config"].items()
  }
  return cls(**fields)
