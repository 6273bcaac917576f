"""Values and gradients of the layer ops, in eager mode, graphs and gradient tapes."""

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training.layers import layer_ops

keras = _tensorflow.import_keras()

_LEFT = [[1.0, 2.0, 3.0, 4.0]]
_RIGHT = [[5.0, 6.0, 7.0, 8.0, 9.0, 10.0]]


def _numpy_ffm(left: np.ndarray, right: np.ndarray, dim: int, int_type: str) -> np.ndarray:
  batch = left.shape[0]
  products = left.reshape(batch, -1, 1, dim) * right.reshape(batch, 1, -1, dim)
  if int_type == "dot":
    products = products.sum(axis=-1)
  return products.reshape(batch, -1)


class FFMTest(tf.test.TestCase):
  def test_worked_numbers(self):
    multiply = layer_ops.ffm(_LEFT, _RIGHT, dim_size=2)
    dot = layer_ops.ffm(_LEFT, _RIGHT, dim_size=2, int_type="dot")

    self.assertAllEqual(multiply, [[5, 12, 7, 16, 9, 20, 15, 24, 21, 32, 27, 40]])
    self.assertAllEqual(dot, [[17, 23, 29, 39, 53, 67]])

  def test_gradient_of_ones(self):
    for int_type in ("multiply", "dot"):
      left, right = tf.constant(_LEFT), tf.constant(_RIGHT)
      with tf.GradientTape() as tape:
        tape.watch([left, right])
        total = tf.reduce_sum(layer_ops.ffm(left, right, 2, int_type))

      left_grad, right_grad = tape.gradient(total, [left, right])

      self.assertAllEqual(left_grad, [[21, 24, 21, 24]])
      self.assertAllEqual(right_grad, [[4, 6, 4, 6, 4, 6]])

  def test_ffm_mul(self):
    left = tf.random.uniform((8, 10 * 4), minval=0, maxval=10)
    right = tf.random.uniform((8, 12 * 4), minval=0, maxval=10)

    out = layer_ops.ffm(left, right, dim_size=4)

    self.assertEqual(out.shape, (8, 480))
    self.assertAllClose(out, _numpy_ffm(left.numpy(), right.numpy(), 4, "multiply"))

  def test_ffm_dot(self):
    left = tf.random.uniform((8, 10 * 4), minval=0, maxval=10)
    right = tf.random.uniform((8, 12 * 4), minval=0, maxval=10)

    out = layer_ops.ffm(left, right, dim_size=4, int_type="dot")

    self.assertEqual(out.shape, (8, 120))
    self.assertAllClose(out, _numpy_ffm(left.numpy(), right.numpy(), 4, "dot"))

  def test_gradients_match_finite_differences(self):
    rng = np.random.default_rng(1)
    for int_type in ("multiply", "dot"):
      for dim in (1, 3, 5):
        left = rng.standard_normal((2, 2 * dim)).astype(np.float32)
        right = rng.standard_normal((2, 3 * dim)).astype(np.float32)
        weight = rng.standard_normal(_numpy_ffm(left, right, dim, int_type).shape)
        weight = weight.astype(np.float32)

        def loss(left, right, dim=dim, int_type=int_type, weight=weight):
          return tf.reduce_sum(layer_ops.ffm(left, right, dim, int_type) * weight)

        theoretical, numerical = tf.test.compute_gradient(loss, [left, right], delta=1e-2)

        self.assertAllClose(theoretical, numerical, atol=2e-3, rtol=2e-3)

  def test_two_calls_are_bit_equal(self):
    left = tf.random.normal((513, 7 * 9))
    right = tf.random.normal((513, 5 * 9))
    grad = tf.random.normal((513, 35))

    def run():
      with tf.GradientTape() as tape:
        tape.watch([left, right])
        out = layer_ops.ffm(left, right, 9, "dot")
      return [out, *tape.gradient(out, [left, right], grad)]

    for first, second in zip(run(), run()):
      self.assertAllEqual(first, second)

  def test_static_shape_in_a_graph(self):
    with tf.Graph().as_default():
      left = tf.compat.v1.placeholder(tf.float32, [None, 40])
      right = tf.compat.v1.placeholder(tf.float32, [None, 48])
      unknown = tf.compat.v1.placeholder(tf.float32)

      multiply = layer_ops.ffm(left, right, 4)
      dot = layer_ops.ffm(left, right, 4, "dot")
      self.assertEqual(multiply.shape.as_list(), [None, 480])
      self.assertEqual(dot.shape.as_list(), [None, 120])
      self.assertEqual(layer_ops.ffm(left, unknown, 4).shape.as_list(), [None, None])
      left_grad, right_grad = tf.gradients(dot, [left, right])
      self.assertEqual(left_grad.shape.as_list(), [None, 40])

      with tf.compat.v1.Session() as session:
        feed = {left: np.ones((3, 40)), right: np.ones((3, 48))}
        values = session.run([dot, left_grad, right_grad], feed)
      self.assertAllEqual(values[0], np.full((3, 120), 4.0))
      self.assertAllEqual(values[1], np.full((3, 40), 12.0))
      self.assertAllEqual(values[2], np.full((3, 48), 10.0))

  def test_inside_tf_function(self):
    @tf.function
    def step(left, right):
      with tf.GradientTape() as tape:
        tape.watch(left)
        out = layer_ops.ffm(left, right, 2)
      return tape.gradient(out, left)

    self.assertAllEqual(step(tf.constant(_LEFT), tf.constant(_RIGHT)), [[21, 24, 21, 24]])

  def test_empty_batch_and_no_features(self):
    empty_batch = layer_ops.ffm(tf.zeros((0, 4)), tf.zeros((0, 6)), 2)
    left, right = tf.ones((3, 0)), tf.ones((3, 6))
    with tf.GradientTape() as tape:
      tape.watch([left, right])
      out = layer_ops.ffm(left, right, 2)
    left_grad, right_grad = tape.gradient(out, [left, right])

    self.assertEqual(empty_batch.shape, (0, 12))
    self.assertEqual(out.shape, (3, 0))
    self.assertEqual(left_grad.shape, (3, 0))
    self.assertAllEqual(right_grad, np.zeros((3, 6)))

  def test_bad_input_is_an_error_that_names_it(self):
    lib = layer_ops.layer_ops_lib
    ones = tf.ones
    cases = [
      ("the left input tensor of ffm is not 2D", ones((4,)), ones((2, 4)), 2),
      ("the right input tensor of ffm is not 2D", ones((2, 4)), ones((2, 4, 1)), 2),
      (
        "the batch size of left and right tensor are not match: 2 and 3",
        ones((2, 4)),
        ones((3, 4)),
        2,
      ),
      ("the width of left is 5, want a multiple of dim_size = 2", ones((2, 5)), ones((2, 4)), 2),
      ("the width of right is 3, want a multiple of dim_size = 2", ones((2, 4)), ones((2, 3)), 2),
    ]
    for message, left, right, dim in cases:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        layer_ops.ffm(left, right, dim)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        lib.FFMGrad(grad=ones((2, 8)), left=left, right=right, dim_size=dim, int_type="multiply")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "the in/out shape not match"):
      lib.FFMGrad(
        grad=ones((2, 7)), left=ones((2, 4)), right=ones((2, 4)), dim_size=2, int_type="multiply"
      )
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "dim_size"):
      layer_ops.ffm(ones((2, 4)), ones((2, 4)), 0)

  def test_bad_static_shape_fails_where_the_graph_is_built(self):
    with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, "multiple of dim_size"):
      layer_ops.ffm(tf.ones((2, 5)), tf.ones((2, 4)), 2)


_INSIGHT_INPUT = np.array(
  [[base + 0.1 * j for j in range(1, 10)] for base in (0, 1, 2)], dtype=np.float32
)
_INSIGHT_WEIGHT = np.array(
  [0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.6, 0.7, 0.8, 0.9],
  dtype=np.float32,
).reshape(9, 2)


class FeatureInsightTest(tf.test.TestCase):
  def test_feature_insight(self):
    out = layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [3, 2, 4])

    self.assertAllClose(
      out,
      [
        [0.22, 0.22, 0.17, 0.53, 2.1, 2.14],
        [1.12, 1.22, 0.57, 1.63, 4.9, 4.94],
        [2.02, 2.22, 0.97, 2.73, 7.7, 7.74],
      ],
    )

  def test_aggregate(self):
    out = layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [3, 2, 4], aggregate=True)

    self.assertAllClose(
      out,
      [[0.0968, 0.3098, 8.9896], [2.7428, 2.9818, 48.4136], [9.0088, 8.3938, 119.1976]],
    )

  def test_feature_insight_grad(self):
    x, weight = tf.constant(_INSIGHT_INPUT), tf.constant(_INSIGHT_WEIGHT)
    with tf.GradientTape() as tape:
      tape.watch([x, weight])
      total = tf.reduce_sum(layer_ops.feature_insight(x, weight, [3, 2, 4]))

    x_grad, weight_grad = tape.gradient(total, [x, weight])

    self.assertAllClose(x_grad, [[0.3, 0.7, 0.9, 0.5, 1, 1.5, 1.1, 1.3, 1.7]] * 3)
    column = [3.3, 3.6, 3.9, 4.2, 4.5, 4.8, 5.1, 5.4, 5.7]
    self.assertAllClose(weight_grad, np.stack([column, column], axis=1))

  def test_equals_split_and_matmul(self):
    rng = np.random.default_rng(2)
    for batch, segments, columns in ((1, [1], 1), (65, [8, 0, 17, 3], 33), (300, [64] * 4, 16)):
      x = rng.standard_normal((batch, sum(segments))).astype(np.float32)
      weight = rng.standard_normal((sum(segments), columns)).astype(np.float32)
      ends = np.cumsum(segments)[:-1]
      want = np.concatenate(
        [a @ b for a, b in zip(np.split(x, ends, axis=1), np.split(weight, ends, axis=0))], axis=1
      )

      out = layer_ops.feature_insight(x, weight, segments)

      self.assertAllClose(out, want, atol=1e-4, rtol=1e-4)

  def test_gradients_match_finite_differences(self):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    weight = rng.standard_normal((6, 3)).astype(np.float32)
    for aggregate in (False, True):
      theoretical, numerical = tf.test.compute_gradient(
        lambda x, weight, aggregate=aggregate: layer_ops.feature_insight(
          x, weight, [1, 3, 2], aggregate
        ),
        [x, weight],
        delta=1e-2,
      )

      self.assertAllClose(theoretical, numerical, atol=1e-2, rtol=1e-2)

  def test_unknown_shapes_in_a_graph(self):
    with tf.Graph().as_default():
      x = tf.compat.v1.placeholder(tf.float32)
      weight = tf.compat.v1.placeholder(tf.float32)
      out = layer_ops.feature_insight(x, weight, [3, 2, 4], aggregate=True)
      grads = tf.gradients(out, [x, weight])
      with tf.compat.v1.Session() as session:
        feed = {x: _INSIGHT_INPUT, weight: _INSIGHT_WEIGHT}
        value, x_grad, weight_grad = session.run([out, *grads], feed)

    self.assertAllClose(value[0], [0.0968, 0.3098, 8.9896])
    self.assertEqual(x_grad.shape, (3, 9))
    self.assertEqual(weight_grad.shape, (9, 2))

  def test_static_shape(self):
    with tf.Graph().as_default():
      x = tf.compat.v1.placeholder(tf.float32, [None, 9])

      out = layer_ops.feature_insight(x, _INSIGHT_WEIGHT, [3, 2, 4])

      self.assertEqual(out.shape.as_list(), [None, 6])

  def test_empty_batch(self):
    x, weight = tf.zeros((0, 9)), tf.constant(_INSIGHT_WEIGHT)
    with tf.GradientTape() as tape:
      tape.watch([x, weight])
      out = layer_ops.feature_insight(x, weight, [3, 2, 4], aggregate=True)
    x_grad, weight_grad = tape.gradient(out, [x, weight])

    self.assertEqual(out.shape, (0, 3))
    self.assertEqual(x_grad.shape, (0, 9))
    self.assertAllEqual(weight_grad, np.zeros((9, 2)))

  def test_no_columns(self):
    out = layer_ops.feature_insight(tf.ones((2, 3)), tf.ones((3, 0)), [1, 2])
    aggregated = layer_ops.feature_insight(tf.ones((2, 3)), tf.ones((3, 0)), [1, 2], True)

    self.assertEqual(out.shape, (2, 0))
    self.assertAllEqual(aggregated, np.zeros((2, 2)))

  def test_bad_input(self):
    with self.assertRaisesRegex(AssertionError, "segment_sizes"):
      layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [])
    with self.assertRaisesRegex(AssertionError, "9.*8"):
      layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT[:8], [3, 2, 4])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "is 9, want the sum .* = 10"):
      layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [3, 2, 5])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"segment_sizes\[1\] is -2"):
      layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [11, -2])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "overflows"):
      layer_ops.feature_insight(_INSIGHT_INPUT, _INSIGHT_WEIGHT, [2**63 - 1, 10])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "K is 3, want .* = 2"):
      layer_ops.layer_ops_lib.FeatureInsightGrad(
        grad=tf.ones((3, 6)),
        input=_INSIGHT_INPUT,
        weight=_INSIGHT_WEIGHT,
        segment_sizes=[3, 2, 4],
        K=3,
      )


class FidCounterTest(tf.test.TestCase):
  def test_value_and_gradient(self):
    for counter, step, want, want_grad in (
      (1.0, 1.0, 2.0, -1.0),
      (1.0, 0.01, 1.01, -0.01),
      (1000.0, 1.0, 1000.0, 0.0),
      (1001.0, 1.0, 1000.0, 0.0),
      (999.5, 1.0, 1000.0, -1.0),
    ):
      x = tf.constant([[counter]])
      with tf.GradientTape() as tape:
        tape.watch(x)
        value = layer_ops.fid_counter(x, counter_threshold=1000, step=step)
        loss = 17.0 * tf.reduce_sum(value)

      self.assertAllClose(value, [[want]])
      self.assertAllClose(tape.gradient(loss, x), [[want_grad]])

  def test_sgd_counts_to_the_threshold(self):
    counter = tf.Variable([[0.0], [3.0]])
    optimizer = keras.optimizers.legacy.SGD(1.0)

    for _ in range(6):
      optimizer.minimize(lambda: layer_ops.fid_counter(counter, 4), [counter])

    self.assertAllEqual(counter, [[4.0], [4.0]])

  def test_graph_mode_and_empty(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      counter = tf.compat.v1.placeholder(tf.float32, [None, 1])
      value = layer_ops.fid_counter(counter, 10, 2.0)
      (grad,) = tf.gradients(value, counter)

      self.assertEqual(value.shape.as_list(), [None, 1])
      self.assertAllEqual(session.run(value, {counter: [[1], [9]]}), [[3], [10]])
      self.assertAllEqual(session.run(grad, {counter: [[1], [10]]}), [[-2], [0]])
      self.assertEqual(session.run(value, {counter: np.zeros((0, 1))}).shape, (0, 1))

  def test_op_is_the_identity(self):
    x = tf.constant([1.0, 2.0])

    out = layer_ops.layer_ops_lib.MonolithFidCounter(counter=x, step=1.0, counter_threshold=5)

    self.assertAllEqual(out, x)


if __name__ == "__main__":
  tf.test.main()
