import numpy as np
import tensorflow as tf

from monolith.native_training import tensor_utils

tf.compat.v1.disable_eager_execution()


class TensorUtilsTest(tf.test.TestCase):
  def test_maybe_squeeze_3d_tensor(self):
    two_d = tf.ragged.constant([[1, 2], [], [3]])
    three_d = tf.ragged.constant([[[1, 2]], [[]], [[3]]], dtype=tf.int32)

    self.assertIs(tensor_utils.maybe_squeeze_3d_tensor(two_d), two_d)
    squeezed = tensor_utils.maybe_squeeze_3d_tensor(three_d)

    self.assertEqual(squeezed.shape.rank, 2)
    with self.session() as sess:
      self.assertEqual(sess.run(squeezed).to_list(), [[1, 2], [], [3]])

  def test_maybe_squeeze_3d_tensor_of_uniform_rows(self):
    values = tf.ragged.constant([[1], [2, 3]])
    x = tf.RaggedTensor.from_uniform_row_length(values, 1)

    self.assertEqual(x.shape.as_list(), [2, 1, None])
    with self.session() as sess:
      squeezed = sess.run(tensor_utils.maybe_squeeze_3d_tensor(x))
    self.assertEqual(squeezed.to_list(), [[1], [2, 3]])

  def test_maybe_squeeze_3d_tensor_refuses_others(self):
    with self.assertRaisesWithLiteralMatch(ValueError, "input must be RaggedTensor"):
      tensor_utils.maybe_squeeze_3d_tensor(tf.constant([[1]]))
    with self.assertRaisesRegex(ValueError, "^Unknown shape of RaggedTensor. "):
      tensor_utils.maybe_squeeze_3d_tensor(tf.ragged.constant([[[[1]]]]))

  def test_pack_tensors(self):
    keyed_tensors = {"y": tf.constant([[4, 5], [6, 7]]), "x": tf.constant([1, 2])}

    packed = tensor_utils.pack_tensors(keyed_tensors)
    unpacked = tensor_utils.unpack_tensors(tensor_utils.get_keyed_shape(keyed_tensors), packed)

    self.assertEqual(list(unpacked), ["x", "y"])
    self.assertEqual(unpacked["y"].shape.as_list(), [2, 2])
    with self.session() as sess:
      (values, sizes), tensors = sess.run((packed, unpacked))
    self.assertAllEqual(values, [1, 2, 4, 5, 6, 7])
    self.assertAllEqual(sizes, [2, 4])
    self.assertEqual(sizes.dtype, np.int64)
    self.assertAllEqual(tensors["x"], [1, 2])
    self.assertAllEqual(tensors["y"], [[4, 5], [6, 7]])

  def _typed_tensors(self):
    return [
      {"t1": tf.reshape(tf.range(8, dtype=tf.int64), [2, 4]), "t2": tf.range(4, dtype=tf.int64)},
      {"t4": tf.constant([[1.0, 2.0], [3.0, 4.0]]), "t3": tf.constant([5.0, 6.0])},
      {"t5": tf.range(7, dtype=tf.float64)},
    ]

  def test_pack_typed_keyed_tensors(self):
    tensors = self._typed_tensors()

    packed = tensor_utils.pack_typed_keyed_tensors(tensors)
    unpacked = tensor_utils.unpack_packed_tensors(
      tensor_utils.get_typed_keyed_shape(tensors), packed
    )

    self.assertEqual([t.dtype for t in packed], [tf.int64, tf.float32, tf.float64, tf.int64])
    self.assertEqual([list(d) for d in unpacked], [["t1", "t2"], ["t3", "t4"], ["t5"]])
    with self.session() as sess:
      packed_values, expected, values = sess.run((packed, tensors, unpacked))
    self.assertAllEqual(packed_values[0], list(range(8)) + list(range(4)))
    self.assertAllEqual(packed_values[1], [5, 6, 1, 2, 3, 4])
    self.assertAllEqual(packed_values[2], np.arange(7))
    self.assertAllEqual(packed_values[3], [2, 2, 1, 8, 4, 2, 4, 7])
    for expected_dict, value_dict in zip(expected, values):
      self.assertCountEqual(value_dict, expected_dict)
      for key in expected_dict:
        self.assertAllEqual(value_dict[key], expected_dict[key])

  def test_pack_typed_keyed_tensors_with_placeholder(self):
    matrix = tf.compat.v1.placeholder(tf.int64, [None, 2])
    vector = tf.compat.v1.placeholder(tf.float32, [None])
    tensors = [{"m": matrix, "c": tf.constant([9], tf.int64)}, {"v": vector}]

    packed = tensor_utils.pack_typed_keyed_tensors(tensors)
    unpacked = tensor_utils.unpack_packed_tensors(
      tensor_utils.get_typed_keyed_shape(tensors), packed
    )

    self.assertEqual(unpacked[0]["m"].shape.as_list(), [None, 2])
    with self.session() as sess:
      for rows, length in ((3, 2), (0, 5), (1, 0)):
        feed = {matrix: np.arange(rows * 2).reshape([rows, 2]), vector: np.ones([length])}
        packed_values, values = sess.run((packed, unpacked), feed)
        self.assertAllEqual(packed_values[-1], [2, 1, 1, rows * 2, length])
        self.assertAllEqual(values[0]["m"], feed[matrix])
        self.assertAllEqual(values[0]["c"], [9])
        self.assertAllEqual(values[1]["v"], feed[vector])

  def test_split_tensors_with_type_and_merge_dicts(self):
    tensors = {
      "z": tf.constant([1], tf.int64),
      "b": tf.constant([1.0]),
      "a": tf.constant([2], tf.int64),
      "c": tf.constant([1.0], tf.float64),
    }

    split = tensor_utils.split_tensors_with_type(tensors)

    self.assertEqual([list(d) for d in split], [["b"], ["c"], ["a", "z"]])
    merged = tensor_utils.merge_dicts(split)
    self.assertCountEqual(merged, tensors)
    for key, tensor in tensors.items():
      self.assertIs(merged[key], tensor)

  def test_merge_dicts_lets_later_entries_win(self):
    self.assertEqual(tensor_utils.merge_dicts([{"a": 1, "b": 2}, {"a": 3}, {}]), {"a": 3, "b": 2})
    self.assertEqual(tensor_utils.merge_dicts([]), {})

  def test_split_of_nothing(self):
    self.assertEqual(tensor_utils.split_tensors_with_type({}), [])

  def test_shapes(self):
    unknown = tf.compat.v1.placeholder(tf.float32, [None, 3])

    self.assertEqual(
      tensor_utils.get_keyed_shape({"a": unknown, "b": tf.zeros([0])}), {"a": [None, 3], "b": [0]}
    )
    self.assertEqual(
      tensor_utils.get_typed_keyed_shape([{"a": unknown}, {}]), [{"a": [None, 3]}, {}]
    )

  def test_split_pack_unpack_merge(self):
    rng = np.random.RandomState(0)
    dtypes = [tf.float32, tf.int64, tf.int32, tf.bool, tf.string]
    arrays = {}
    for i in range(40):
      shape = rng.randint(0, 4, size=rng.randint(1, 4))
      values = rng.randint(0, 2, size=shape)
      dtype = dtypes[i % len(dtypes)]
      arrays[f"k{i}"] = (
        values.astype(str) if dtype == tf.string else values.astype(dtype.as_numpy_dtype)
      )
    groups = tensor_utils.split_tensors_with_type(
      {key: tf.constant(array) for key, array in arrays.items()}
    )

    packed = tensor_utils.pack_typed_keyed_tensors(groups)
    unpacked = tensor_utils.merge_dicts(
      tensor_utils.unpack_packed_tensors(tensor_utils.get_typed_keyed_shape(groups), packed)
    )

    self.assertLen(packed, len(dtypes) + 1)
    with self.session() as sess:
      values = sess.run(unpacked)
    self.assertCountEqual(values, arrays)
    for key, array in arrays.items():
      self.assertAllEqual(values[key], array.astype("S") if array.dtype.kind == "U" else array)

  def test_one_reshape_op_per_call(self):
    tensors = self._typed_tensors()

    packed = tensor_utils.pack_typed_keyed_tensors(tensors)
    tensor_utils.unpack_packed_tensors(tensor_utils.get_typed_keyed_shape(tensors), packed)

    types = [op.type for op in tf.compat.v1.get_default_graph().get_operations()]
    self.assertEqual(types.count("MonolithStaticReshapeN"), 2)

  def test_gradients_flow_back(self):
    x, y = tf.constant([1.0, 2.0]), tf.constant([[3.0], [4.0]])
    packed, _ = tensor_utils.pack_tensors({"x": x, "y": y})

    grads = tf.gradients(packed * [1.0, 2.0, 3.0, 4.0], [x, y])

    with self.session() as sess:
      grad_x, grad_y = sess.run(grads)
    self.assertAllEqual(grad_x, [1, 2])
    self.assertAllEqual(grad_y, [[3], [4]])

  def test_nothing_to_pack(self):
    for call in (
      lambda: tensor_utils.pack_tensors({}),
      lambda: tensor_utils.pack_typed_keyed_tensors([]),
      lambda: tensor_utils.pack_typed_keyed_tensors([{"a": tf.constant([1])}, {}]),
    ):
      with self.assertRaisesRegex(ValueError, "nothing to pack"):
        call()

  def test_nothing_to_unpack(self):
    packed = (tf.constant([], tf.int32), tf.constant([], tf.int64))

    self.assertEqual(tensor_utils.unpack_tensors({}, packed), {})

  def test_wrong_number_of_packed_tensors(self):
    vector, sizes = tf.constant([1]), tf.constant([1, 1], tf.int64)
    shape = {"a": [None]}
    for shapes, packed in (
      ([shape], []), ([], [sizes]), ([shape], [sizes]), ([shape], [vector, vector, sizes])
    ):  # fmt: skip
      with self.assertRaisesWithLiteralMatch(ValueError, "Wrong packed_list length"):
        tensor_utils.unpack_packed_tensors(shapes, packed)


if __name__ == "__main__":
  tf.test.main()
