import collections

import numpy as np
import tensorflow as tf

from monolith.native_training import nested_tensors

tf.compat.v1.disable_eager_execution()

_Pair = collections.namedtuple("_Pair", ["first", "second"])


class NestedTensorTest(tf.test.TestCase):
  def testBasic(self):
    ones = tf.ones([])
    nested = nested_tensors.NestedTensors({"a": ones, "b": (tf.ones([]), tf.ones([]))})

    replaced = [tf.zeros_like(tensor) for tensor in nested.get_tensors()]
    result = nested.get_nested_result(replaced)

    with self.session() as sess:
      self.assertEqual(sess.run(result), {"a": 0, "b": (0, 0)})

  def testConstant(self):
    nested = nested_tensors.NestedTensors({"a": {"b": 2}})

    tensors = nested.get_tensors()

    self.assertEqual(tensors, [])
    self.assertEqual(nested.get_nested_result(tensors), {"a": {"b": 2}})

  def testRaggedTensor(self):
    ragged = tf.ragged.constant([[], [1], [2, 3]])
    nested = nested_tensors.NestedTensors(ragged)

    result = nested.get_nested_result(nested.get_tensors())

    self.assertIsInstance(result, tf.RaggedTensor)
    with self.session() as sess:
      self.assertEqual(sess.run(result).to_list(), [[], [1], [2, 3]])

  def testRaggedTensorWithPlaceHolder(self):
    nested = nested_tensors.NestedTensors(tf.ragged.constant([[], [1], [2, 3]]))
    placeholders = [
      tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in nested.get_tensors()
    ]

    result = nested.get_nested_result(placeholders)

    with self.session() as sess:
      values, row_splits = placeholders
      out = sess.run(result, {values: [7, 8, 9], row_splits: [0, 2, 2, 3]})
      self.assertEqual(out.to_list(), [[7, 8], [], [9]])

  def test_order_is_dense_first_then_ragged(self):
    ragged1, ragged2 = tf.ragged.constant([[1]]), tf.ragged.constant([[2.0], []])
    dense1, dense2 = tf.constant(1), tf.constant(2)

    tensors = nested_tensors.NestedTensors([ragged1, dense1, {"x": ragged2}, dense2]).get_tensors()

    expected = [
      dense1, dense2, ragged1.values, ragged1.row_splits, ragged2.values, ragged2.row_splits
    ]  # fmt: skip
    self.assertEqual([id(t) for t in tensors], [id(t) for t in expected])

  def test_leaf_met_twice_is_stored_once(self):
    dense, ragged = tf.constant(1), tf.ragged.constant([[1]])
    nested = nested_tensors.NestedTensors((dense, [ragged, dense], {"r": ragged}))

    tensors = nested.get_tensors()
    result = nested.get_nested_result([tf.identity(tensor) for tensor in tensors])

    self.assertLen(tensors, 3)
    self.assertIs(result[0], result[1][1])
    self.assertIs(result[1][0], result[2]["r"])
    self.assertIsNot(result[0], dense)

  def test_input_containers_are_not_written_to(self):
    dense, other = tf.constant(1), tf.constant(2)
    inner = {"x": dense}
    items = [dense, inner]
    structure = {"items": items, "none": None}

    nested = nested_tensors.NestedTensors(structure)
    nested.get_nested_result([other])

    self.assertIs(structure["items"], items)
    self.assertIs(items[0], dense)
    self.assertIs(items[1], inner)
    self.assertIs(inner["x"], dense)

  def test_result_can_be_built_more_than_once(self):
    nested = nested_tensors.NestedTensors({"a": tf.constant(0)})
    first, second = tf.constant(1), tf.constant(2)

    self.assertIs(nested.get_nested_result([first])["a"], first)
    self.assertIs(nested.get_nested_result([second])["a"], second)

  def test_constants_come_back_as_the_same_object(self):
    variable = tf.Variable(1.0)
    big, text = 2**40, "abc" * 3
    structure = {"v": variable, "i": big, "s": text, "t": True, "f": False, "n": None}

    result = nested_tensors.NestedTensors(structure).get_nested_result([])

    self.assertEqual(list(result), list(structure))
    for key, value in structure.items():
      self.assertIs(result[key], value)

  def test_containers(self):
    dense = tf.constant(1)
    structure = _Pair(first=[], second=({}, (), [dense], collections.OrderedDict(z=dense, a=None)))

    result = nested_tensors.NestedTensors(structure).get_nested_result([dense])

    self.assertIs(type(result), tuple)
    self.assertEqual(result[0], [])
    self.assertEqual(result[1][:2], ({}, ()))
    self.assertIs(type(result[1][3]), collections.OrderedDict)
    self.assertEqual(list(result[1][3]), ["z", "a"])

  def test_bare_none(self):
    nested = nested_tensors.NestedTensors(None)

    self.assertEqual(nested.get_tensors(), [])
    self.assertIsNone(nested.get_nested_result([]))

  def test_rebuilt_ragged_tensor_knows_only_its_row_splits(self):
    ragged = tf.RaggedTensor.from_value_rowids(tf.constant([1, 2]), tf.constant([0, 2]))

    result = nested_tensors.NestedTensors(ragged)
    rebuilt = result.get_nested_result(result.get_tensors())

    self.assertFalse(rebuilt._row_partition._has_precomputed_value_rowids())
    with self.session() as sess:
      self.assertEqual(sess.run(rebuilt).to_list(), [[1], [], [2]])

  def test_nested_ragged_tensor_is_refused(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, "Nested tensor doesn't support nested RaggedTensor."
    ):
      nested_tensors.NestedTensors({"x": tf.ragged.constant([[[1], []], []])})

  def test_unsupported_leaves_are_refused(self):
    sparse = tf.sparse.from_dense([[1]])
    for leaf in (1.5, np.int64(3), np.zeros([2]), sparse, object(), b"bytes"):
      with self.assertRaises(ValueError) as raised:
        nested_tensors.NestedTensors({"x": [leaf]})
      self.assertEqual(str(raised.exception), f"Tensor is not supported. {leaf}")

  def test_wrong_number_of_tensors(self):
    nested = nested_tensors.NestedTensors([tf.constant(1), tf.ragged.constant([[1]])])
    dense = tf.constant(0)

    for tensors in ([], [dense, dense], [dense] * 4):
      with self.assertRaises(AssertionError):
        nested.get_nested_result(tensors)


if __name__ == "__main__":
  tf.test.main()
