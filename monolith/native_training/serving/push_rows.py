"""Rows of a push as arrays, without a Python object per number.

A `PushRequest` holds ids and values in repeated fields, whose elements Python can only take one by
one, at a tenth of a microsecond each, under the interpreter lock of a parameter server. Their wire
form can be read at once:

    unique_id, dim_size | (0x18, varint) per id | (0x25, 4 bytes) per value
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2

Delta = parameter_sync_pb2.PushRequest.DeltaEmbeddingHashTable

_ID_TAG = 0x18
_VALUE = np.dtype([("tag", "u1"), ("value", "<f4")])
_VALUE_TAG = 0x25
_MAX_VARINT_BYTES = 10


class TableRows(NamedTuple):
  """Changed rows of one table.

  Attributes:
    unique_id: the table.
    ids: int64 `[n]`.
    values: float32 `[n, dim]`.
  """

  unique_id: str
  ids: np.ndarray
  values: np.ndarray

  @property
  def num_bytes(self) -> int:
    return self.ids.nbytes + self.values.nbytes

  def part(self, index: int, parts: int) -> TableRows:
    """Returns one of several equal parts."""
    begin, end = (self.ids.size * i // parts for i in (index, index + 1))
    return TableRows(self.unique_id, self.ids[begin:end], self.values[begin:end])


def decode(delta: Delta) -> TableRows:
  """Returns the rows of a table.

  Raises:
    ValueError: the number of values is not that of ids times `dim_size`.
  """
  num_ids, num_values = len(delta.fids), len(delta.embeddings)
  if num_values != num_ids * delta.dim_size:
    raise ValueError(
      f"table {delta.unique_id!r} has {num_values} values for {num_ids} ids of {delta.dim_size}"
    )
  # Fields are serialized in the order of their numbers.
  data = np.frombuffer(delta.SerializeToString(), np.uint8)
  header = Delta()
  if delta.HasField("unique_id"):
    header.unique_id = delta.unique_id
  if delta.HasField("dim_size"):
    header.dim_size = delta.dim_size
  end_of_ids = data.size - num_values * _VALUE.itemsize
  ids = _decode_ids(data[header.ByteSize() : end_of_ids], num_ids)
  values = data[end_of_ids:].view(_VALUE)
  if not np.all(values["tag"] == _VALUE_TAG):
    raise ValueError(f"values of table {delta.unique_id!r} are not where they should be")
  shape = (num_ids, delta.dim_size)
  return TableRows(
    delta.unique_id, ids, np.ascontiguousarray(values["value"], np.float32).reshape(shape)
  )


def to_tensor_proto(array: np.ndarray) -> tensor_pb2.TensorProto:
  """Returns a tensor whose content is the array's buffer."""
  proto = tensor_pb2.TensorProto(
    dtype=tf.as_dtype(array.dtype).as_datatype_enum,
    tensor_content=np.ascontiguousarray(array).tobytes(),
  )
  for size in array.shape:
    proto.tensor_shape.dim.add(size=size)
  return proto


def _decode_ids(data: np.ndarray, num_ids: int) -> np.ndarray:
  # Only the last byte of a varint is below 0x80, and so is a tag: they alternate.
  ends = np.flatnonzero(data < 0x80)
  tags, lasts = ends[0::2], ends[1::2]
  if lasts.size != num_ids or tags.size != num_ids or np.any(data[tags] != _ID_TAG):
    raise ValueError(f"ids are not where they should be: found {lasts.size}, want {num_ids}")
  ids = np.zeros(num_ids, np.uint64)
  sizes = lasts - tags
  for i in range(min(_MAX_VARINT_BYTES, int(sizes.max(initial=0)))):
    longer = sizes > i
    digits = data[tags[longer] + 1 + i].astype(np.uint64) & np.uint64(0x7F)
    ids[longer] |= digits << np.uint64(7 * i)
  return ids.view(np.int64)
