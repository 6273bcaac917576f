import numpy as np
import tensorflow as tf

from monolith.native_training import distribution_ops
from monolith.native_training.ops import flat_buffer_ops as aligned_flat_ops

tf.compat.v1.disable_eager_execution()


class AlignedFlatOpsTest(tf.test.TestCase):
  def test_concat_scales_and_pads(self):
    a, b = np.arange(1, 4, dtype=np.float32), np.arange(1, 18, dtype=np.float32)
    flat = self.evaluate(aligned_flat_ops.aligned_flat_concat([a, b], 2.0))
    want = np.zeros(48, np.float32)
    want[:3], want[16:33] = 2 * a, 2 * b
    self.assertAllEqual(flat, want)

  def test_round_trip_is_exact(self):
    random = np.random.default_rng(0)
    shapes = [(), (0,), (3, 0, 2), (16,), (17,), (5, 7, 9), (1,), (100_003,)]
    arrays = [random.normal(size=s).astype(np.float32) for s in shapes]
    flat = aligned_flat_ops.aligned_flat_concat(arrays)
    back, length = self.evaluate((aligned_flat_ops.aligned_flat_split(arrays, flat), tf.size(flat)))
    for got, want in zip(back, arrays):
      self.assertAllEqual(got, want)
    self.assertEqual(length, sum(-(-a.size // 16) * 16 for a in arrays))

  def test_scale_of_the_generated_wrapper_defaults_to_one(self):
    ops = distribution_ops.gen_distribution_ops
    arrays = [np.arange(3, dtype=np.float32), np.arange(17, dtype=np.float32)]
    flat = ops.monolith_aligned_flat_concat(arrays, name="flat")
    self.assertEqual(flat.op.name, "flat")
    self.assertAllEqual(flat, aligned_flat_ops.aligned_flat_concat(arrays, 1.0))
    self.assertAllEqual(ops.monolith_aligned_flat_concat(arrays, 3.0), 3.0 * flat)

  def test_many_inputs(self):
    arrays = [np.full([i % 40], i, np.float32) for i in range(2000)]
    flat = aligned_flat_ops.aligned_flat_concat(arrays)
    for got, want in zip(self.evaluate(aligned_flat_ops.aligned_flat_split(arrays, flat)), arrays):
      self.assertAllEqual(got, want)

  def test_static_shapes(self):
    inputs = [tf.zeros([2, 3]), tf.zeros([])]
    flat = aligned_flat_ops.aligned_flat_concat(inputs)
    self.assertEqual(flat.shape.as_list(), [None])
    split = aligned_flat_ops.aligned_flat_split(inputs, flat)
    self.assertEqual([t.shape.as_list() for t in split], [[2, 3], []])

  def test_gradients(self):
    a, b, scale = tf.constant([1.0, 2.0]), tf.constant([[3.0]]), tf.constant(2.0)
    flat = aligned_flat_ops.aligned_flat_concat([a, b], scale)
    first, second = aligned_flat_ops.aligned_flat_split([a, b], flat * flat)
    loss = tf.reduce_sum(first) + 10.0 * tf.reduce_sum(second)
    # loss = scale^2 * (a.a + 10 b.b)
    grads = self.evaluate(tf.gradients(loss, [a, b, scale]))
    self.assertAllClose(grads[0], [8.0, 16.0])
    self.assertAllClose(grads[1], [[240.0]])
    self.assertAllClose(grads[2], 2 * 2.0 * (5.0 + 90.0))

  def test_flat_of_wrong_size(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "size of flat is 15, want .* = 16"):
      self.evaluate(aligned_flat_ops.aligned_flat_split([tf.zeros([3])], tf.zeros([15])))
    with self.assertRaises(ValueError):
      aligned_flat_ops.aligned_flat_split([tf.zeros([3])], tf.zeros([16, 1]))


if __name__ == "__main__":
  tf.test.main()
