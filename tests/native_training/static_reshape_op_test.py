import numpy as np
import tensorflow as tf

from monolith.native_training import static_reshape_op
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.static_reshape_op import StaticReshapeNBuilder, static_reshape

tf.compat.v1.disable_eager_execution()


class StaticReshapeOpTest(tf.test.TestCase):
  def test_static_reshape_n(self):
    inputs = [
      tf.constant([1, 2, 3, 4, 5], tf.int32),
      tf.ones([4, 10], tf.float32),
      tf.ones([2, 2, 3], tf.int64),
    ]
    shapes = [(1, 5), (5, 8), (None, 2)]

    outputs, sizes = self.evaluate(static_reshape(inputs, shapes))

    self.assertAllEqual(sizes, [5, 40, 12])
    for output, shape in zip(outputs, shapes):
      self.assertEqual(len(output.shape), len(shape))
      for got, want in zip(output.shape, shape):
        if want is not None:
          self.assertEqual(got, want)
    self.assertEqual(outputs[2].shape, (6, 2))

  def test_nested_reshape_n(self):
    arrays = {
      "a": np.arange(6, dtype=np.float32).reshape(2, 3),
      "b": [np.arange(4, dtype=np.int64).reshape(2, 2), np.arange(5, dtype=np.int32)],
      "c": (np.arange(8, dtype=np.float64).reshape(2, 2, 2),),
    }
    builder = StaticReshapeNBuilder()
    indices = tf.nest.map_structure(lambda a: builder.add(tf.constant(a), (None,)), arrays)

    outputs, sizes = builder.build()
    flattened = tf.nest.map_structure(lambda i: outputs[i], indices)

    got, got_sizes = self.evaluate((flattened, sizes))
    tf.nest.map_structure(lambda g, a: self.assertAllEqual(g, a.reshape(-1)), got, arrays)
    self.assertAllEqual(got_sizes, [6, 4, 5, 8])
    self.assertEqual(tf.nest.flatten(indices), [0, 1, 2, 3])

  def test_builder_attributes(self):
    builder = StaticReshapeNBuilder(enable_parallelism=False)
    tensor = tf.constant([1.0, 2.0])
    builder.add(tensor, [2, 1])
    self.assertEqual(builder.inputs, [tensor])
    self.assertEqual(builder.shapes, [[2, 1]])
    self.assertFalse(builder.enable_parallelism)
    self.assertIs(static_reshape_op.reshape_ops, gen_monolith_ops)
    op = builder.build().sizes.op
    self.assertFalse(op.get_attr("enable_parallelism"))
    self.assertEqual(op.get_attr("cost_per_tensor"), 10000000)

  def test_static_shapes(self):
    outputs, sizes = static_reshape(
      [tf.zeros([6]), tf.zeros([6]), tf.zeros([1])], [[None, 3], tf.TensorShape([2, 3]), []]
    )
    self.assertEqual([o.shape.as_list() for o in outputs], [[None, 3], [2, 3], []])
    self.assertEqual(sizes.shape.as_list(), [3])

  def test_zero_elements(self):
    inputs = [tf.zeros([0, 3]), tf.zeros([0]), tf.zeros([4, 0])]
    outputs, sizes = self.evaluate(static_reshape(inputs, [(None, 0), (None, 5), (0, 7)]))
    self.assertEqual([o.shape for o in outputs], [(0, 0), (0, 5), (0, 7)])
    self.assertAllEqual(sizes, [0, 0, 0])

  def test_scalar_target_strings_and_single_input(self):
    outputs, _ = self.evaluate(static_reshape([tf.constant([3.0])], [()]))
    self.assertEqual(outputs[0], 3.0)
    self.assertEqual(outputs[0].shape, ())
    outputs, _ = self.evaluate(static_reshape([tf.constant([["a", "b"]])], [(2,)]))
    self.assertAllEqual(outputs[0], [b"a", b"b"])

  def test_dynamic_input_shape(self):
    with self.session() as sess:
      x = tf.compat.v1.placeholder(tf.float32)
      outputs, sizes = static_reshape([x], [(2, None, 3)])
      self.assertEqual(sess.run(outputs, {x: np.zeros([4, 6])})[0].shape, (2, 4, 3))
      self.assertAllEqual(sess.run(sizes, {x: np.zeros([12])}), [12])
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"inputs\[0\].*shapes\[0\]"):
        sess.run(outputs, {x: np.zeros([7])})

  def test_gradient_reshapes_back(self):
    x = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ids = tf.constant([1, 2], tf.int64)
    outputs, _ = static_reshape([x, ids], [(3, None), (2, 1)])
    weights = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    grad = tf.gradients(tf.reduce_sum(outputs[0] * weights), x)[0]

    self.assertAllEqual(self.evaluate(grad), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

  def test_mismatches(self):
    for inputs, shapes, message in [
      ([tf.zeros([4])], [(2, 2), (4,)], "number of shapes is 2, want number of inputs = 1"),
      ([tf.zeros([4])], [None], "Shape cannot be unknown rank for input \\[0\\]!"),
      ([tf.zeros([4])], [(None, None)], "more than one unknown dimension"),
      ([tf.zeros([4])], [(None, 3)], "does not fit"),
      ([tf.zeros([4])], [(5,)], "does not fit"),
      ([tf.zeros([4])], [(None, 0)], "does not fit"),
      ([tf.zeros([2])], [()], "does not fit"),
    ]:
      # Not before it runs.
      reshaped = static_reshape(inputs, shapes)
      with self.subTest(shapes=shapes):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          self.evaluate(reshaped)
    errors = (ValueError, tf.errors.InvalidArgumentError)
    with self.assertRaisesRegex(errors, "shapes\\[0\\]|overflow"):
      self.evaluate(static_reshape([tf.zeros([4])], [(None, 1 << 62, 1 << 62)]))
    with self.assertRaises(errors):
      static_reshape([], [])


if __name__ == "__main__":
  tf.test.main()
