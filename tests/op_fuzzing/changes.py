"""Turns a call that an op accepts into one that it may not accept."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import tensorflow as tf

from tests.op_fuzzing import cases, messages


def change(rng: random.Random, base: cases.Case, seed: int) -> cases.Case:
  """Returns a copy of `base` with none to three of its arguments changed, in any mode."""
  arguments = copy.deepcopy(base.arguments)
  names = list(arguments)
  for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
    if names:
      name = rng.choice(names)
      if name == "random_sleep_ms":
        continue  # an op that is told to sleep does
      arguments[name] = _change(rng, arguments[name])
      if name in cases.output_counts(base.op):
        arguments[name] = min(arguments[name], cases.MAX_OUTPUTS)
  return cases.Case(base.op, seed, rng.choice(cases.MODES), arguments)


def _change(rng: random.Random, value: Any) -> Any:
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return rng.choice([*cases.INTS, value + 1, value - 1, value * 2])
  if isinstance(value, float):
    return rng.choice(cases.FLOATS)
  if isinstance(value, str):
    return rng.choice([value + "x", value[:-1], "", "\0", "9" * 30, "-1:-1", "a:99999999999"])
  if isinstance(value, bytes):
    return messages.mutate(rng, value)
  if isinstance(value, list):
    return _change_list(rng, value)
  if isinstance(value, tf.DType):
    return rng.choice(cases.DTYPES)
  if isinstance(value, tf.TensorShape):
    return tf.TensorShape(rng.choice([None, [], [None, None], [1 << 62], [1] * 254, [0]]))
  if isinstance(value, cases.Tensor):
    return _change_tensor(rng, value)
  if isinstance(value, cases.Handle):
    kinds = sorted(set(cases.HANDLES.values()) | set(cases.HANDLES_BY_OP.values()))
    if rng.random() < 0.3:
      return dataclasses.replace(value, shape=rng.choice([(1,), (0,), (2, 2)]))
    return dataclasses.replace(
      value, kind=rng.choice([*kinds, "null", "missing"]), dim=rng.choice([1, 2, 5])
    )
  if isinstance(value, cases.Samples):
    return _change_samples(rng, value)
  raise NotImplementedError(f"a {type(value).__name__}: say how to change one")


def _change_list(rng: random.Random, value: list) -> list:
  how = rng.randrange(5)
  if how == 0 and value:
    return value[:-1]
  if how == 1 and value:
    return value + [value[rng.randrange(len(value))]]
  if how == 2:
    return value * rng.choice([0, 2, 30])
  value = list(value)
  if value:
    i = rng.randrange(len(value))
    value[i] = _change(rng, value[i])
  return value


def _change_tensor(rng: random.Random, tensor: cases.Tensor) -> cases.Tensor:
  how = rng.randrange(6)
  if how == 0:
    shape = rng.choice(cases.SHAPES)
    size = int(np.prod([int(d) for d in shape], dtype=object)) if shape else 1
    return dataclasses.replace(tensor, values=np.resize(tensor.values, size), shape=shape)
  if how == 1:
    # The same values, in another shape.
    size = tensor.values.size
    shapes = [(size,), (1, size), (size, 1), (1,) * 20 + (size,), (size, 1, 1)]
    return dataclasses.replace(tensor, shape=rng.choice(shapes))
  if how == 2 and tensor.shape:
    rows = tensor.shape[0]
    shape = (rng.choice([0, 1, rows + 1, rows * 3, max(0, rows - 1)]), *tensor.shape[1:])
    size = int(np.prod([int(d) for d in shape], dtype=object))
    if size < 100000:
      return dataclasses.replace(tensor, values=np.resize(tensor.values, size), shape=shape)
  values = tensor.values.copy()
  if not values.size:
    return tensor
  for _ in range(rng.choice([1, 1, 2, values.size])):
    i = rng.randrange(values.size)
    if values.dtype == object:
      text = values[i]
      values[i] = _change(rng, text if isinstance(text, (bytes, str)) else str(text))
    elif values.dtype == bool:
      values[i] = not values[i]
    elif np.issubdtype(values.dtype, np.integer):
      info = np.iinfo(values.dtype)
      number = rng.choice([*cases.INTS, int(values[i]) + 1, int(values[i]) - 1])
      values[i] = min(max(number, info.min), info.max)
    elif np.issubdtype(values.dtype, np.floating):
      with np.errstate(all="ignore"):
        values[i] = rng.choice(cases.FLOATS)
  return dataclasses.replace(tensor, values=values)


def _change_samples(rng: random.Random, samples: cases.Samples) -> cases.Samples:
  how = rng.randrange(4)
  if how == 0:
    return dataclasses.replace(samples, kind=rng.choice(cases.VARIANTS))
  if how == 1:
    types = ["instance", "example", "example_batch"]
    kind = rng.choice(types)
    records = [messages.record(rng, kind, False) for _ in samples.records]
    return dataclasses.replace(samples, records=records, sample_type=kind)
  if how == 2 and samples.kind == "samples":
    return dataclasses.replace(samples, shape=(1,) if samples.shape == () else ())
  records = list(samples.records)
  if records:
    i = rng.randrange(len(records))
    records[i] = messages.record(rng, samples.sample_type, rng.random() < 0.3)
  return dataclasses.replace(samples, records=records)
