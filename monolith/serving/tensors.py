"""`TensorProto` messages of requests to arrays, and arrays to messages of answers.

A message says its size, so it can claim any: what it claims is compared with what it holds before
memory is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from monolith.serving.errors import invalid

# A message may hold one value for all elements; beyond this many bytes it may not.
MAX_REPEATED_BYTES = 64 << 20
# Bytes of a string as an element of a tensor; longer ones have the rest elsewhere.
_STRING_BYTES = 24
_INLINE_STRING_BYTES = 22
_MAX_DIMENSIONS = 254

# Types that clients may send, with the field that holds their values.
_VALUE_FIELDS = {
  types_pb2.DT_FLOAT: "float_val",
  types_pb2.DT_DOUBLE: "double_val",
  types_pb2.DT_HALF: "half_val",
  types_pb2.DT_BFLOAT16: "half_val",
  types_pb2.DT_INT8: "int_val",
  types_pb2.DT_INT16: "int_val",
  types_pb2.DT_INT32: "int_val",
  types_pb2.DT_UINT8: "int_val",
  types_pb2.DT_UINT16: "int_val",
  types_pb2.DT_UINT32: "uint32_val",
  types_pb2.DT_INT64: "int64_val",
  types_pb2.DT_UINT64: "uint64_val",
  types_pb2.DT_BOOL: "bool_val",
  types_pb2.DT_STRING: "string_val",
}
_DTYPES = {kind: np.dtype(tf.dtypes.as_dtype(kind).as_numpy_dtype) for kind in _VALUE_FIELDS}
# Packed values of these fields are the bytes of the array: field number << 3 | length-delimited.
_PACKED_TAGS = {
  types_pb2.DT_FLOAT: bytes([5 << 3 | 2]),
  types_pb2.DT_DOUBLE: bytes([6 << 3 | 2]),
}


def to_array(name: str, proto: tensor_pb2.TensorProto) -> np.ndarray:
  """Returns the array in a message; strings become an array of `object` with bytes.

  Args:
    name: what an error calls it.
    proto: a message of any origin.

  Raises:
    ServingError: INVALID_ARGUMENT, the message is not a tensor, or is of a type that no client
      can make.
  """
  shape, count = _shape_of(name, proto)
  field = _VALUE_FIELDS.get(proto.dtype)
  if field is None:
    raise invalid(f"input {name!r} is of type {_type_name(proto.dtype)}, which cannot be sent")
  values = getattr(proto, field)
  if proto.dtype == types_pb2.DT_STRING:
    if proto.tensor_content:
      raise invalid(f"input {name!r} has strings in tensor_content, want string_val")
    return _strings(name, values, shape, count)
  dtype = _DTYPES[proto.dtype]
  size = dtype.itemsize
  if proto.tensor_content:
    if len(proto.tensor_content) != count * size:
      raise invalid(
        f"input {name!r} of shape {list(shape)} has {len(proto.tensor_content)} bytes of "
        f"tensor_content, want {count * size}"
      )
    if proto.dtype == types_pb2.DT_BOOL:  # Any byte but 0 and 1 would be a bool of its own kind.
      return np.frombuffer(proto.tensor_content, np.uint8).reshape(shape) != 0
    return np.frombuffer(proto.tensor_content, dtype).reshape(shape)
  _check_count(name, len(values), shape, count, size)
  if field == "half_val":
    bits = np.array(values, np.int64)
    if bits.size and (bits.min() < 0 or bits.max() > 0xFFFF):
      raise invalid(f"input {name!r} has a half_val that is not of 16 bits")
    array = bits.astype(np.uint16).view(dtype)
  else:
    wide = np.array(values, np.int64 if field == "int_val" else dtype)
    array = wide.astype(dtype, copy=False)
    if field == "int_val" and not np.array_equal(array, wide):
      raise invalid(f"input {name!r} has an int_val outside of {dtype.name}")
  return _expand(array, shape, count)


def to_proto(array: np.ndarray) -> tensor_pb2.TensorProto:
  """Returns a message with `array`, its values in the field of their type.

  Clients of TensorFlow Serving read `float_val` and the like, so `tensor_content` is not used.
  """
  proto = tensor_pb2.TensorProto(dtype=tf.dtypes.as_dtype(array.dtype).as_datatype_enum)
  if array.dtype == object or array.dtype.kind in "SU":
    proto.dtype = types_pb2.DT_STRING
  for size in array.shape:
    proto.tensor_shape.dim.add(size=size)
  if proto.dtype in _PACKED_TAGS:
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    if data:
      proto.MergeFromString(_PACKED_TAGS[proto.dtype] + _varint(len(data)) + data)
    return proto
  field = _VALUE_FIELDS.get(proto.dtype)
  if field is None:
    return tf.make_tensor_proto(array)
  if field == "half_val":
    array = array.view(np.uint16)
  elif field == "string_val":
    proto.string_val.extend(tf.compat.as_bytes(value) for value in array.ravel())
    return proto
  getattr(proto, field).extend(array.ravel().tolist())
  return proto


def _shape_of(name: str, proto: tensor_pb2.TensorProto) -> tuple[tuple[int, ...], int]:
  if proto.tensor_shape.unknown_rank:
    raise invalid(f"input {name!r} is of unknown rank")
  shape = tuple(dim.size for dim in proto.tensor_shape.dim)
  if len(shape) > _MAX_DIMENSIONS or any(size < 0 for size in shape):
    raise invalid(f"input {name!r} has shape {list(shape)[:16]}")
  # numpy multiplies all sizes but zeros into an int64.
  if math.prod(size for size in shape if size) >= 1 << 62:
    raise invalid(f"input {name!r} has shape {list(shape)[:16]}, which is too large")
  if len(shape) > 32:
    raise invalid(f"input {name!r} has {len(shape)} dimensions, want at most 32")
  return shape, math.prod(shape)


def _check_count(name: str, given: int, shape: tuple[int, ...], count: int, size: int) -> None:
  """Allows as many values as elements, or fewer: then the last one, or zero, is the rest."""
  if given > count:
    raise invalid(f"input {name!r} of shape {list(shape)} has {given} values, want {count}")
  if given < count and count * size > MAX_REPEATED_BYTES:
    raise invalid(
      f"input {name!r} of shape {list(shape)} has {given} values for {count} elements: a value may "
      f"be repeated to fill at most {MAX_REPEATED_BYTES} bytes"
    )


def _strings(name: str, values: Sequence[bytes], shape: tuple[int, ...], count: int) -> np.ndarray:
  # The array has one object many times; the tensor that is made of it has as many copies.
  last = len(values[-1]) if values else 0
  size = _STRING_BYTES + (last + 16 if last > _INLINE_STRING_BYTES else 0)
  _check_count(name, len(values), shape, count, size)
  array = np.empty(len(values), object)
  array[:] = list(values)
  return _expand(array, shape, count)


def _expand(array: np.ndarray, shape: tuple[int, ...], count: int) -> np.ndarray:
  if array.size == 0 and count:  # TensorFlow leaves out values that are all zero
    return np.full(shape, b"", object) if array.dtype == object else np.zeros(shape, array.dtype)
  if array.size < count:
    array = np.concatenate([array, np.repeat(array[-1:], count - array.size)])
  return array.reshape(shape)


def _type_name(number: int) -> str:
  try:
    return types_pb2.DataType.Name(number)
  except ValueError:
    return str(number)


def _varint(value: int) -> bytes:
  encoded = bytearray()
  while value >= 0x80:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)
