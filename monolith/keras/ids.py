"""Turns what a user calls ids into int64 ids.

A string becomes FarmHash's `Fingerprint64` of its bytes, modulo `2**63 - 1`. TensorFlow promises
that this function never changes, so a string has the same id in every process, on every machine and
in every version:

  tf.strings.to_hash_bucket_fast(["tea"], 2**63 - 1)

Two of a hundred million different strings share an id with a probability of about 0.05 %.
"""

from __future__ import annotations

import numbers
from typing import Any, Union

import numpy as np
import tensorflow as tf

Ids = Union[tf.Tensor, tf.RaggedTensor, tf.SparseTensor]

_HASH_RANGE = 2**63 - 1
_LENGTHS = (
  "ids are lists of several lengths{}: give tf.ragged.constant(ids), or pad them and call a layer "
  "that has a combiner with weights=, 0 where there is no id"
)
_SAFE_INTEGERS = (tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32)


def hash_strings(strings: Any) -> tf.Tensor:
  """Returns the int64 ids of strings, in the shape of `strings`."""
  return tf.strings.to_hash_bucket_fast(strings, _HASH_RANGE)


def as_ids(ids: Any) -> Ids:
  """Returns ids as int64, dense, ragged or sparse as they came.

  Args:
    ids: integers or strings: a tensor of any shape, a NumPy array, or nested lists.

  Raises:
    TypeError: they are neither integers nor strings, or uint64.
    ValueError: a Python integer does not fit into int64.
  """
  if isinstance(ids, tf.RaggedTensor):
    return ids.with_flat_values(_dense(ids.flat_values))
  if isinstance(ids, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
    return tf.SparseTensor(ids.indices, _dense(ids.values), ids.dense_shape)
  return _dense(ids)


def _dense(ids: Any) -> tf.Tensor:
  if not tf.is_tensor(ids):
    ids = _from_python(ids)
  tensor = tf.convert_to_tensor(ids)
  if tensor.dtype == tf.int64:
    return tensor
  if tensor.dtype == tf.string:
    return hash_strings(tensor)
  check_dtype(tensor.dtype)
  return tf.cast(tensor, tf.int64)


def check_dtype(dtype: tf.DType) -> None:
  """Checks that ids can have a dtype.

  Raises:
    TypeError: they are neither integers nor strings, or uint64.
  """
  if dtype in _SAFE_INTEGERS or dtype == tf.string:
    return
  if dtype == tf.uint64:
    raise TypeError(
      "ids have dtype uint64, of which half does not fit into int64: "
      "give tf.bitcast(ids, tf.int64), which keeps every id apart"
    )
  raise TypeError(
    f"ids have dtype {dtype.name}, want integers or strings: in a Keras model, "
    "tf.keras.Input(..., dtype=tf.int64) or dtype=tf.string, also first in a Sequential of Keras 3"
  )


def _from_python(ids: Any) -> Any:
  """Returns ids of Python and NumPy as something that TensorFlow does not narrow to int32."""
  try:
    array = np.asarray(ids)
  except ValueError as error:
    raise ValueError(_LENGTHS.format(f" ({error})")) from None
  if array.size == 0 and not isinstance(ids, np.ndarray):
    return array.astype(np.int64)
  # Numbers beyond int64 become uint64, float64 or objects, depending on their company.
  if array.dtype.kind == "O" or (not isinstance(ids, np.ndarray) and array.dtype.kind in "uf"):
    for value in np.ravel(np.asarray(ids, dtype=object)):
      if isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"id {value} does not fit into int64, want -2**63 <= id < 2**63")
  return _from_objects(array) if array.dtype.kind == "O" else array


def _from_objects(array: np.ndarray) -> np.ndarray:
  """Returns an array of objects as one of integers or strings."""
  values = array.ravel().tolist()
  if all(isinstance(value, (str, bytes)) for value in values):
    return array
  if all(isinstance(value, numbers.Integral) and not isinstance(value, bool) for value in values):
    return array.astype(np.int64)
  if any(isinstance(value, (list, tuple, np.ndarray)) for value in values):
    raise ValueError(_LENGTHS.format(""))
  found = sorted({type(value).__name__ for value in values})
  raise TypeError(f"ids are objects of {', '.join(found)}, want integers or strings alone")


def as_dense_ids(ids: Any) -> tf.Tensor:
  """Returns what `as_ids` does, of dense ids only.

  Raises:
    TypeError: the ids are ragged or sparse, or none.
    ValueError: as `as_ids`.
  """
  converted = as_ids(ids)
  if not isinstance(converted, tf.Tensor):
    raise TypeError(
      f"ids are a {type(converted).__name__}, want a dense tensor: give its values, or use "
      "monolith.keras.layers.Embedding"
    )
  return converted
