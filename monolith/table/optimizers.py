"""Describes a table without TensorFlow and protobuf: its optimizer, first values, lifetime.

  optimizers.find("adam")                          # Optimizer("adam", epsilon=1e-07, ...)
  optimizers.find(entry.AdamOptimizer(0.01))       # the same numbers, where protobuf is installed

A name means the same numbers here as in `monolith.HashTable`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import numbers
import re
from collections.abc import Iterable
from typing import Any, Union

from monolith.native_training import gpu_table

MAX_ADMIT_AFTER = 15
_MAX_DIM = 1 << 31

# Names of `monolith.entry`'s messages -> names of ours, where they differ.
_KINDS = {"rmspropv2": "rmsprop_v2"}
_FIELDS = {
  "l1_regularization_strength": "l1",
  "l2_regularization_strength": "l2",
  "weight_decay_factor": "weight_decay",
}


@dataclasses.dataclass(frozen=True)
class Segment(gpu_table.Segment):
  """Part of a vector, as `gpu_table.Segment` has it, with what main memory alone can do."""

  decay_by_step: bool = False
  enable_dynamic_wd: bool = False


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The rule by which a step changes a row. Each kind reads the numbers that it knows.

  Attributes:
    kind: `sgd`, `adagrad`, `adadelta`, `adam`, `amsgrad`, `momentum`, `moving_average`, `ftrl`,
      `group_ftrl`, `group_adagrad`, `rmsprop`, `rmsprop_v2`, `batch_softmax` or
      `dynamic_wd_adagrad`.
    learning_rate: what `HashTable` begins with.
    decay_by_step: of `adam`: moments are corrected as Keras and PyTorch do it.
    enable_dynamic_wd: of `dynamic_wd_adagrad`. Not on a GPU.
  """

  kind: str
  learning_rate: float = 0.01
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
  use_nesterov: bool = False
  decouple_weight_decay: bool = False
  stochastic_rounding_float16: bool = False
  decay_by_step: bool = False
  enable_dynamic_wd: bool = False

  def __post_init__(self) -> None:
    if self.kind not in gpu_table.OPTIMIZERS:
      raise ValueError(f"optimizer is {self.kind!r}, want one of {sorted(gpu_table.OPTIMIZERS)}")
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != "kind" and not math.isfinite(value):
        raise ValueError(f"{field.name} is {value!r}, want a finite number")


# The optimizer by default: Adam with Keras's and PyTorch's numbers.
DEFAULT = Optimizer("adam", learning_rate=0.001, beta2=0.999, epsilon=1e-7, decay_by_step=True)
NAMED = {
  "adadelta": Optimizer("adadelta"),
  "adagrad": Optimizer("adagrad", learning_rate=0.001, initial_accumulator_value=1e-6),
  "adam": Optimizer("adam", epsilon=1e-7),
  "amsgrad": Optimizer("amsgrad"),
  "ftrl": Optimizer("ftrl"),
  "momentum": Optimizer("momentum"),
  "rmsprop": Optimizer("rmsprop_v2"),
  "sgd": Optimizer("sgd"),
}

OptimizerLike = Union[str, Optimizer, Any]
# The first values of new rows, by name.
FIRST_VALUES = {"uniform": "random_uniform", "zeros": "zeros", "ones": "ones"}
InitializerLike = Union[str, float, tuple, Any]
Duration = Union[str, int, datetime.timedelta]


def find(value: OptimizerLike) -> Optimizer:
  """Returns the optimizer that runs on a table's rows.

  Args:
    value: an `Optimizer`, the name of one, or an optimizer of `monolith.entry`.

  Raises:
    ValueError: no optimizer has that name.
    TypeError: it is something else.
  """
  if isinstance(value, Optimizer):
    return value
  if isinstance(value, str):
    if value not in NAMED:
      raise _refusal("optimizer", value, NAMED)
    return NAMED[value]
  proto = _proto_of(value, "optimizer", "OptimizerConfig", NAMED)
  kind = proto.WhichOneof("type")
  member = getattr(proto, kind)
  found = {"stochastic_rounding_float16": proto.stochastic_rounding_float16}
  known = {field.name for field in dataclasses.fields(Optimizer)}
  for field in member.DESCRIPTOR.fields:
    name = _FIELDS.get(field.name, field.name)
    if name in known:
      found[name] = getattr(member, field.name)
  return Optimizer(kind=_KINDS.get(kind, kind), **found)


def first_values(value: InitializerLike) -> dict[str, Any]:
  """Returns what new rows begin with, as arguments of `Segment`.

  Args:
    value: `"uniform"` (from -0.05 to 0.05), `"zeros"`, `"ones"`, a number, a pair of the least and
      the largest value, or an initializer of `monolith.entry`.

  Raises:
    ValueError: no initializer has that name, or a number is not finite.
    TypeError: it is something else.
  """
  names = FIRST_VALUES
  if isinstance(value, str):
    if value not in names:
      raise _refusal("initializer", value, names)
    return {"initializer": names[value]}
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    if not math.isfinite(value):
      raise ValueError(f"initializer is {value!r}, want a finite number")
    return {"initializer": "constants", "constant": float(value)}
  if isinstance(value, tuple) and len(value) == 2:
    least, most = map(float, value)
    if not (math.isfinite(least) and math.isfinite(most) and least <= most):
      raise ValueError(f"initializer is {value!r}, want a pair of the least and the largest value")
    return {"initializer": "random_uniform", "minval": least, "maxval": most}
  proto = _proto_of(value, "initializer", "InitializerConfig", names)
  kind = proto.WhichOneof("type")
  member = getattr(proto, kind)
  known = ("constant", "minval", "maxval")
  found = {
    field.name: getattr(member, field.name)
    for field in member.DESCRIPTOR.fields
    if field.name in known
  }
  return {"initializer": kind, **found}


def _proto_of(value: Any, what: str, message: str, names: Iterable[str]) -> Any:
  """Returns the message of an object of `monolith.entry`."""
  as_proto = getattr(value, "as_proto", None)
  proto = as_proto() if callable(as_proto) else None
  if proto is None or type(proto).__name__ != message:
    raise _refusal(what, value, names)
  return proto


def _refusal(what: str, value: Any, names: Iterable[str]) -> Exception:
  """Returns what is raised where a value describes nothing."""
  wanted = f"want one of {sorted(names)}, or an {what} of monolith.table or monolith.entry"
  if isinstance(value, str):
    return ValueError(f"{what} is {value!r}, {wanted}")
  cls = type(value)
  return TypeError(f"{what} is {value!r} of type {cls.__module__}.{cls.__name__}, {wanted}")


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


def dimension(value: Any) -> int:
  """Returns the length of a vector.

  Raises:
    ValueError: it is not a whole number of at least 1.
  """
  is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_number or not 1 <= value < _MAX_DIM:
    raise ValueError(f"dim is {value!r}, want a whole number of at least 1")
  return int(value)


def admission(value: Any) -> int:
  """Returns after how many occurrences an id gets a row.

  Raises:
    ValueError: it is not a whole number from 0 to 15.
  """
  if not isinstance(value, numbers.Integral) or not 0 <= int(value) <= MAX_ADMIT_AFTER:
    raise ValueError(f"admit_after is {value!r}, want a whole number from 0 to {MAX_ADMIT_AFTER}")
  return int(value)


def capacity(value: Any) -> int:
  """Returns how many ids without a row are counted.

  Raises:
    ValueError: it is not a whole number of at least 1.
  """
  if not isinstance(value, numbers.Integral) or value < 1:
    raise ValueError(f"admit_capacity is {value!r}, want a whole number of at least 1")
  return int(value)


def rate(value: Any) -> Any:
  """Returns a learning rate, a number or a function of the step.

  Raises:
    ValueError: the number is not finite.
  """
  if callable(value):
    return value
  if not math.isfinite(value):
    raise ValueError(f"learning_rate is {value!r}, want a finite number")
  return float(value)


def segment(dim: int, optimizer: Optimizer, first: dict[str, Any]) -> Segment:
  """Returns the one segment of a table, in full precision."""
  row_optimizer = {
    field.name: getattr(optimizer, field.name)
    for field in dataclasses.fields(optimizer)
    if field.name not in ("kind", "learning_rate")
  }
  return Segment(dim, optimizer.kind, compressor="fp32", **row_optimizer, **first)
