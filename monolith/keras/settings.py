"""Reads plain arguments that describe a table: optimizer, initializer, lifetime, admission.

The objects of `monolith.entry` describe the same things, and a name stands for such an object with
its defaults. Two names have numbers of their own, as the defaults would hardly move a row: Keras
divides the loss, and so the gradients, by the size of the batch.

  settings.optimizer("sgd")                              # entry.SgdOptimizer()
  settings.optimizer(entry.AdamOptimizer(0.01))          # taken as it is
  settings.initializer(0.25)                             # entry.ConstantsInitializer(0.25)

Names, numbers and checks are those of `monolith.table.optimizers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Union

import tensorflow as tf

from monolith.native_training import entry
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.table import optimizers
from monolith.table.optimizers import Duration, days

__all__ = [
  "Duration",
  "InitializerLike",
  "OptimizerLike",
  "days",
  "deserialize",
  "initializer",
  "learning_rate",
  "optimizer",
  "optimizer_kind",
  "saved_optimizer",
  "serialize",
  "table_config",
  "without_rate",
]

OptimizerLike = Union[str, optimizers.Optimizer, entry.Optimizer]
InitializerLike = Union[str, float, tuple, entry.Initializer]

# Kinds of `monolith.table.Optimizer`, as classes of `monolith.entry`.
_CLASSES: dict[str, type] = {
  "adadelta": entry.AdadeltaOptimizer,
  "adagrad": entry.AdagradOptimizer,
  "adam": entry.AdamOptimizer,
  "amsgrad": entry.AmsgradOptimizer,
  "batch_softmax": entry.BatchSoftmaxOptimizer,
  "dynamic_wd_adagrad": entry.DynamicWdAdagradOptimizer,
  "ftrl": entry.FtrlOptimizer,
  "group_adagrad": entry.AdaGradWithGroupLassoOptimizer,
  "group_ftrl": entry.FTRLWithGroupSparsityOptimizer,
  "momentum": entry.MomentumOptimizer,
  "moving_average": entry.MovingAverageOptimizer,
  "rmsprop": entry.RmspropOptimizer,
  "rmsprop_v2": entry.RmspropV2Optimizer,
  "sgd": entry.SgdOptimizer,
}
_FIELDS = {"l1": "l1_regularization", "l2": "l2_regularization"}
# Expired rows leave memory this often; a checkpoint never holds them.
_EVICT_EVERY_HOURS = 1


def optimizer(value: OptimizerLike) -> entry.Optimizer:
  """Returns the optimizer that runs on a table's rows.

  Args:
    value: an optimizer of `monolith.entry` or `monolith.table`, or the name of one.

  Raises:
    ValueError: no optimizer has that name.
    TypeError: it is something else, such as an optimizer of Keras, which keeps its state in dense
      variables and cannot work on rows that come and go.
  """
  if isinstance(value, entry.Optimizer):
    return value
  if isinstance(value, Mapping) and "class_name" in value:
    return deserialize(value)
  found = optimizers.find(value)
  numbers = {
    field.name: getattr(found, field.name)
    for field in dataclasses.fields(found)
    if field.name != "kind"
  }
  if isinstance(value, str):
    # Those that are not of the kind itself; `monolith.entry` has the same rates by default.
    plain = optimizers.Optimizer(found.kind)
    numbers = {name: one for name, one in numbers.items() if one != getattr(plain, name)}
    numbers.pop("learning_rate", None)
  return _of_entry(found.kind, numbers)


def _of_entry(kind: str, numbers: Mapping[str, Any]) -> entry.Optimizer:
  """Returns an optimizer of `monolith.entry`; it has the numbers that its kind knows."""
  cls = _CLASSES[kind]
  known = {field.name for field in dataclasses.fields(cls)}
  named = {_FIELDS.get(name, name): value for name, value in numbers.items()}
  if "weight_decay" in named:
    named["weight_decay_factor"] = named.pop("weight_decay")
  made = cls(**{name: value for name, value in named.items() if name in known})
  is_wrapped = numbers.get("stochastic_rounding_float16", False)
  return entry.StochasticRoundingFloat16OptimizerWrapper(made) if is_wrapped else made


def _optimizer_of_kind(kind: str | None) -> entry.Optimizer | None:
  named = (optimizer(name) for name in optimizers.NAMED)
  return next((one for one in named if one.as_proto().WhichOneof("type") == kind), None)


def initializer(value: InitializerLike) -> entry.Initializer:
  """Returns what new rows begin with.

  Args:
    value: an initializer of `monolith.entry`, the name of one, a number for all elements, or a pair
      of the least and the largest value.

  Raises:
    ValueError: no initializer has that name, or a number is not finite.
    TypeError: it is something else.
  """
  if isinstance(value, entry.Initializer):
    return value
  if isinstance(value, Mapping) and "class_name" in value:
    return deserialize(value)
  first = optimizers.first_values(value)
  kind = first.pop("initializer")
  if kind == "random_uniform":
    return entry.RandomUniformInitializer(**first)
  if kind == "zeros":
    return entry.ZerosInitializer()
  return entry.ConstantsInitializer(first.get("constant", 1.0))


def learning_rate(config: entry.Optimizer) -> float:
  """Returns the learning rate that an optimizer of `monolith.entry` names, or its default."""
  proto = config.as_proto()
  return float(getattr(getattr(proto, proto.WhichOneof("type")), "learning_rate", 0.0))


def table_config(
  dim: int,
  row_optimizer: entry.Optimizer,
  row_initializer: entry.Initializer,
  expire_after: int | None,
  on_gpu: bool = False,
) -> embedding_hash_table_pb2.EmbeddingHashTableConfig:
  """Returns the configuration of a table with one segment of full precision.

  Raises:
    ValueError: `dim` is not a whole number of at least 1.
  """
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.entry_config.segments.append(
    entry.CombineAsSegment(
      optimizers.dimension(dim), row_initializer, row_optimizer, entry.Fp32Compressor()
    )
  )
  evict_every = 0
  if expire_after is not None:
    config.slot_expire_time_config.default_expire_time = expire_after
    evict_every = _EVICT_EVERY_HOURS
  place = entry.GpucucoHashTableConfig if on_gpu else entry.CuckooHashTableConfig
  place(feature_evict_every_n_hours=evict_every).mutate_table(config)
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
