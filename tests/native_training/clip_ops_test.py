import numpy as np
import tensorflow as tf

from monolith.native_training import clip_ops
from monolith.native_training.runtime.ops import gen_monolith_ops

tf.compat.v1.disable_eager_execution()

INF, NAN = float("inf"), float("nan")


class ClipOpsTest(tf.test.TestCase):
  def _test_clip_by_global_norm(self, arrays, clip_norm, expected=None, use_norm=None):
    """Clips, compares with TensorFlow (or `expected`), and checks that the inputs are untouched."""
    arrays = [np.array(a, np.float32) for a in arrays]
    with tf.Graph().as_default(), self.session(use_gpu=True) as sess:
      tensors = [tf.Variable(a) for a in arrays]
      reads = [t.read_value() for t in tensors]
      clipped, norm = clip_ops.clip_by_global_norm(reads, clip_norm, use_norm)
      want, want_norm = tf.clip_by_global_norm(reads, clip_norm)
      sess.run(tf.compat.v1.global_variables_initializer())

      got, got_norm = sess.run((clipped, norm))
      if expected is None:
        expected, expected_norm = sess.run((want, want_norm))
        self.assertAllClose(got_norm, expected_norm, rtol=1e-5)
      self.assertEqual(len(got), len(arrays))
      for g, w in zip(got, expected):
        self.assertAllClose(g, w, rtol=1e-5)
      for after, before in zip(sess.run(tensors), arrays):
        self.assertAllEqual(after, before)
    return got_norm

  def test_clip_by_global_norm(self):
    # Simple.
    norm = self._test_clip_by_global_norm(
      [[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]], 4.0, [[-2.4, 0.0, 0.0], [3.2, 0.0, 0.0]]
    )
    self.assertAllClose(norm, 5.0)
    self._test_clip_by_global_norm([[-3.0, 0.0, 0.0], [4.0, 0.0, 0.0]], 4.0)
    # Uneven shapes.
    self._test_clip_by_global_norm([[-3.0], [[4.0, 0.0], [1.0, 7.0]], 2.0, [[[1.0]]]], 4.0)
    # No clipping.
    self._test_clip_by_global_norm(
      [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], 4.0, [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    )
    # Zero norm.
    self._test_clip_by_global_norm([[0.0, 0.0], [0.0]], 4.0, [[0.0, 0.0], [0.0]])
    # Infinite.
    self._test_clip_by_global_norm([[INF, INF], [INF]], 4.0, [[NAN, NAN], [NAN]])
    # Large random gradients.
    random = np.random.default_rng(0)
    shapes = [(1000, 200), (70_001,), (3, 5, 7), (0,), (1,), (128, 1024)]
    self._test_clip_by_global_norm([random.normal(size=s) for s in shapes], 10.0)

  def test_norm_that_is_not_finite_makes_all_nan(self):
    for bad in (INF, -INF, NAN):
      self._test_clip_by_global_norm([[bad, 1.0], [2.0, 0.0]], 4.0, [[NAN, NAN], [NAN, NAN]])

  def test_fused_op(self):
    grads = [tf.constant([-3.0, 0.0]), tf.constant([[4.0]])]
    for clip_norm, want in ((4.0, [[-2.4, 0.0], [[3.2]]]), (5.0, [[-3.0, 0.0], [[4.0]]])):
      clipped, norm = self.evaluate(
        gen_monolith_ops.monolith_clip_by_global_norm_fused(grads, clip_norm)
      )
      self.assertAllClose(norm, 5.0)
      for got, expected in zip(clipped, want):
        self.assertAllClose(got, expected)
    clipped, norm = self.evaluate(
      gen_monolith_ops.monolith_clip_by_global_norm_fused([[1.0, INF], [2.0]], 4.0)
    )
    self.assertEqual(norm, INF)
    self.assertAllEqual(np.isnan(np.concatenate(clipped)), [True, True, True])

  def test_use_norm(self):
    clipped, norm = clip_ops.clip_by_global_norm([tf.constant([3.0])], 1.0, use_norm=2.0)
    self.assertEqual(norm, 2.0)
    self.assertAllClose(self.evaluate(clipped), [[1.5]])

  def test_gpu_context_uses_the_fused_op(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/device:GPU:0"):
        clip_ops.clip_by_global_norm([tf.constant([3.0])], 1.0)
      self.assertIn("MonolithClipByGlobalNormFused", [op.type for op in graph.get_operations()])
    with tf.Graph().as_default() as graph:
      clip_ops.clip_by_global_norm([tf.constant([3.0])], 1.0)
      types = {op.name: op.type for op in graph.get_operations()}
      self.assertNotIn("MonolithClipByGlobalNormFused", types.values())
      self.assertEqual(
        types["clip_by_global_norm/MonolithClipByGlobalNorm"], "MonolithClipByGlobalNorm"
      )

  def test_not_a_list_and_empty(self):
    with self.assertRaisesRegex(TypeError, "t_list should be a list"):
      clip_ops.clip_by_global_norm((tf.constant([1.0]),), 1.0)
    self.assertEqual(clip_ops.clip_by_global_norm([], 1.0), ([], 0))

  def test_indexed_slices(self):
    slices = tf.IndexedSlices(
      tf.constant([[3.0], [4.0]]), tf.constant([0, 2]), dense_shape=tf.constant([3, 1])
    )
    clipped, norm = clip_ops.clip_by_global_norm([slices], 1.0)
    self.assertAllClose(self.evaluate(norm), 5.0)
    self.assertAllClose(self.evaluate(clipped), [[[0.6], [0.0], [0.8]]])

  def test_outputs_are_the_inputs_only_within_the_limit(self):
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    for clip_norm, aliases in ((1e9, True), (1.0, False)):
      with tf.Graph().as_default(), self.session() as sess:
        tensors = [tf.random.normal([n], name=f"t{n}") for n in (1, 1000, 2_000_000)]
        clipped, _ = clip_ops.clip_by_global_norm(tensors, clip_norm)
        metadata = tf.compat.v1.RunMetadata()
        sess.run((tensors, clipped), options=options, run_metadata=metadata)

        buffers = {
          (node.node_name, output.slot): output.tensor_description.allocation_description.ptr
          for device in metadata.step_stats.dev_stats
          for node in device.node_stats
          for output in node.output
        }
        for i, tensor in enumerate(tensors):
          before, after = buffers[tensor.op.name, 0], buffers[clipped[i].op.name, i]
          self.assertEqual(before == after, aliases)

  def test_temporary_is_scaled_in_place(self):
    with self.session() as sess:
      x = tf.compat.v1.placeholder(tf.float32, [None])
      clipped, norm = clip_ops.clip_by_global_norm([x + 1.0, x * 2.0, x], 1.0)
      value = np.full([100], 1.0, np.float32)
      (a, b, c), n = sess.run((clipped, norm), {x: value})
      self.assertAllClose(n, 30.0)
      self.assertAllClose(a, np.full([100], 2.0 / 30.0))
      self.assertAllClose(b, np.full([100], 2.0 / 30.0))
      self.assertAllClose(c, np.full([100], 1.0 / 30.0))
      self.assertAllEqual(value, np.full([100], 1.0))

  def test_norm_of_many_values_is_exact(self):
    # A float accumulator would stop counting at 2^24 ones.
    ones = tf.ones([20_000_002])
    self.assertEqual(self.evaluate(gen_monolith_ops.global_l2_reduce([ones])), 20_000_002)

  def test_norm_does_not_depend_on_scheduling(self):
    values = np.random.default_rng(5).normal(size=1_000_003).astype(np.float32)
    op = gen_monolith_ops.global_l2_reduce([values[:7], values[7:500_000], values[500_000:]])
    with self.session() as sess:
      self.assertLen({float(sess.run(op)) for _ in range(20)}, 1)

  def test_gradients_match_tensorflow(self):
    random = np.random.default_rng(6)
    arrays = [random.normal(size=s).astype(np.float32) for s in ((4,), (2, 3))]
    weights = [random.normal(size=a.shape).astype(np.float32) for a in arrays]

    def gradients(clip, clip_norm):
      tensors = [tf.constant(a) for a in arrays]
      limit = tf.constant(clip_norm)
      clipped, norm = clip(tensors, limit)
      loss = tf.add_n([tf.reduce_sum(c * w) for c, w in zip(clipped, weights)]) + 0.5 * norm
      return self.evaluate(tf.gradients(loss, [*tensors, limit]))

    def fused(tensors, clip_norm):
      return gen_monolith_ops.monolith_clip_by_global_norm_fused(tensors, clip_norm)

    for clip in (clip_ops.clip_by_global_norm, fused):
      for clip_norm in (1.0, 100.0):
        ours = gradients(clip, clip_norm)
        want = gradients(tf.clip_by_global_norm, clip_norm)
        for got, expected in zip(ours[:-1], want[:-1]):
          self.assertAllClose(got, expected, rtol=1e-4, atol=1e-5)
        if clip_norm == 1.0:
          self.assertAllClose(ours[-1], want[-1], rtol=1e-4)
        else:
          self.assertAllClose(ours[-1], 0.0)

  def test_gradient_of_zeros_is_finite(self):
    x = tf.zeros([3])
    clipped, norm = gen_monolith_ops.monolith_clip_by_global_norm_fused([x], 1.0)
    grad = tf.gradients(tf.reduce_sum(clipped[0]) + norm, x)[0]
    self.assertAllEqual(self.evaluate(grad), [1.0, 1.0, 1.0])

  def test_bad_scalars(self):
    for norm, clip_norm, name in (([1.0], 1.0, "rank"), (1.0, [1.0], "rank")):
      with self.assertRaisesRegex(ValueError, name):
        gen_monolith_ops.monolith_clip_by_global_norm([tf.zeros([1])], norm, clip_norm)
    for clip_norm in (-1.0, NAN):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "clip_norm"):
        self.evaluate(clip_ops.clip_by_global_norm([tf.zeros([1])], clip_norm)[0])


class NormOpsTest(tf.test.TestCase):
  def test_it(self):
    self.assertIsNone(clip_ops._global_norm([]))
    self.assertIs(clip_ops.gen_clip_ops, gen_monolith_ops)
    norm = clip_ops._global_norm([tf.constant([-3.0, 0.0, 0.0]), tf.constant([0.0, 0.0, 4.0, 0.0])])
    self.assertAllClose(self.evaluate(norm), 5.0)
    norm = clip_ops._global_norm([tf.constant([INF, INF]), tf.constant([INF])])
    self.assertEqual(self.evaluate(norm), INF)


if __name__ == "__main__":
  tf.test.main()
