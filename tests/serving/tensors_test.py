"""Messages of a server become arrays, and arrays messages."""

import unittest

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from monolith.serving import tensors
from monolith.serving.errors import ServingError


class TensorsTest(unittest.TestCase):
  def make(self, dtype, shape, **fields):
    proto = tensor_pb2.TensorProto(dtype=dtype, **fields)
    for size in shape:
      proto.tensor_shape.dim.add(size=size)
    return proto

  def test_every_type_comes_back(self):
    for kind, dtype in tensors._DTYPES.items():
      values = [b"a", b""] if kind == types_pb2.DT_STRING else [1, 0]
      for array in (np.array([values, values], dtype), np.zeros([0, 3], dtype)):
        with self.subTest(kind=types_pb2.DataType.Name(kind), shape=array.shape):
          found = tensors.to_array("x", tensors.to_proto(array))
          self.assertEqual((found.dtype, found.shape), (array.dtype, array.shape))
          self.assertEqual(found.tolist(), array.tolist())
          np.testing.assert_array_equal(tf.make_ndarray(tensors.to_proto(array)), array)

  def test_a_value_may_stand_for_the_rest(self):
    found = tensors.to_array("x", self.make(types_pb2.DT_INT32, [4], int_val=[1, 2]))
    self.assertEqual(found.tolist(), [1, 2, 2, 2])
    found = tensors.to_array("x", self.make(types_pb2.DT_STRING, [2]))
    self.assertEqual(found.tolist(), [b"", b""])
    found = tensors.to_array("x", self.make(types_pb2.DT_FLOAT, [2, 0]))
    self.assertEqual(found.shape, (2, 0))

  def test_bytes_of_bools_are_bools(self):
    proto = self.make(types_pb2.DT_BOOL, [3], tensor_content=b"\x00\x01\x07")
    self.assertEqual(tensors.to_array("x", proto).tolist(), [False, True, True])

  def test_claims_are_checked_before_memory_is_taken(self):
    integer, half, string = types_pb2.DT_INT8, types_pb2.DT_HALF, types_pb2.DT_STRING
    for proto, message in (
      (self.make(integer, [1 << 40]), "repeated to fill at most"),
      (self.make(integer, [1 << 31, 1 << 31, 4]), "too large"),
      (self.make(integer, [0, 1 << 62]), "too large"),
      (self.make(integer, [-1]), "shape"),
      (self.make(integer, [1] * 33), "33 dimensions"),
      (self.make(integer, [1], int_val=[1, 2]), "2 values, want 1"),
      (self.make(integer, [1], int_val=[128]), "outside of int8"),
      (self.make(integer, [2], tensor_content=b"abc"), "3 bytes of tensor_content, want 2"),
      (self.make(half, [1], half_val=[65536]), "not of 16 bits"),
      (self.make(half, [1], half_val=[-1]), "not of 16 bits"),
      (self.make(string, [1], tensor_content=b"a"), "want string_val"),
      (self.make(string, [1 << 22], string_val=[b"x"]), "repeated to fill at most"),
      (self.make(string, [1 << 13], string_val=[b"x" * 10_000]), "repeated to fill at most"),
      (self.make(types_pb2.DT_RESOURCE, [1]), "DT_RESOURCE, which cannot be sent"),
      (self.make(types_pb2.DT_INVALID, []), "DT_INVALID, which cannot be sent"),
    ):
      with self.subTest(message=message), self.assertRaisesRegex(ServingError, message):
        tensors.to_array("x", proto)
    unknown = tensor_pb2.TensorProto(dtype=integer)
    unknown.tensor_shape.unknown_rank = True
    with self.assertRaisesRegex(ServingError, "input 'x' is of unknown rank"):
      tensors.to_array("x", unknown)


if __name__ == "__main__":
  unittest.main()
