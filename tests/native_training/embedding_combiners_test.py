"""Sum, mean and first-N of ragged embeddings."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from monolith.native_training import embedding_combiners
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()


def keys(row_lengths) -> tf.RaggedTensor:
  return tf.RaggedTensor.from_row_lengths(
    tf.range(sum(row_lengths), dtype=tf.int64), tf.constant(row_lengths, tf.int64)
  )


class CombinerTest(tf.test.TestCase):
  def run_tensors(self, tensors):
    with self.session(use_gpu=False) as sess:
      return sess.run(tensors)

  def test_reduce_sum(self):
    combiner = embedding_combiners.ReduceSum()
    combined = combiner.combine(keys([1, 2]), [[1.0], [2.0], [3.0]], name="summed")
    self.assertEqual(combiner.max_seq_length, 0)
    self.assertEqual(combined.op.name, "summed")
    self.assertEqual(combined.op.type, "MonolithReduceSum")
    self.assertAllEqual(self.run_tensors(combined), [[1], [5]])

  def test_reduce_mean(self):
    combiner = embedding_combiners.ReduceMean()
    combined = combiner.combine(keys([1, 2]), [[1.0], [2.0], [3.0]])
    self.assertEqual(combiner.max_seq_length, 0)
    self.assertEqual(combined.op.type, "MonolithReduceMean")
    self.assertAllEqual(self.run_tensors(combined), [[1], [2.5]])

  def test_first_n(self):
    combiner = embedding_combiners.FirstN(2)
    combined = combiner.combine(keys([1, 2, 3]), [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    self.assertEqual(combiner.max_seq_length, 2)
    self.assertAllEqual(self.run_tensors(combined), [[[1], [0]], [[2], [3]], [[4], [5]]])

  def test_first_n_unknown_shape(self):
    key = tf.compat.v1.ragged.placeholder(tf.int64, 1, [])
    embedding = tf.compat.v1.placeholder(tf.float32, [None, 6])
    combined = embedding_combiners.FirstN(2).combine(key, embedding)
    self.assertEqual(combined.shape.as_list(), [None, 2, 6])
    self.assertStartsWith(combined.op.name, "FirstNCombiner/")
    with self.session(use_gpu=False) as sess:
      got = sess.run(
        combined,
        {
          key: tf.compat.v1.ragged.constant_value([[7, 8, 9], [], [3]], dtype=np.int64),
          embedding: np.repeat(np.arange(1.0, 5.0)[:, None], 6, axis=1),
        },
      )
    self.assertAllEqual(got[:, :, 0], [[1, 2], [0, 0], [4, 0]])

  def test_first_n_needs_a_length(self):
    for seq_length in (0, -1):
      with self.assertRaisesRegex(AssertionError, "seq_length must be greater than 0"):
        embedding_combiners.FirstN(seq_length)

  def test_first_n_does_not_pay_for_a_long_row(self):
    lengths = [1] * 999 + [1000000]
    embedding = tf.ones([sum(lengths), 1])
    combined = embedding_combiners.FirstN(2).combine(keys(lengths), embedding)
    # Padded to the longest row first, this would be 4 GB.
    self.assertEqual(self.run_tensors(tf.reduce_sum(combined)), 1001)

  def test_empty_rows_give_zeros_and_no_gradient_is_lost(self):
    embedding = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    key = keys([0, 2, 0, 1, 0])
    for combiner, want, want_grad in (
      (embedding_combiners.ReduceSum(), [[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]], [1, 1, 1]),
      (embedding_combiners.ReduceMean(), [[0, 0], [2, 3], [0, 0], [5, 6], [0, 0]], [0.5, 0.5, 1]),
      (
        embedding_combiners.FirstN(1),
        [[[0, 0]], [[1, 2]], [[0, 0]], [[5, 6]], [[0, 0]]],
        [1, 0, 1],
      ),
    ):
      combined = combiner.combine(key, embedding)
      got, grad = self.run_tensors([combined, tf.gradients(combined, embedding)[0]])
      self.assertAllEqual(got, want)
      self.assertAllEqual(grad, np.repeat(np.array(want_grad)[:, None], 2, axis=1))

  def test_empty_batch(self):
    key, embedding = keys([]), tf.zeros([0, 3])
    self.assertEqual(
      self.run_tensors(embedding_combiners.ReduceSum().combine(key, embedding)).shape, (0, 3)
    )
    self.assertEqual(
      self.run_tensors(embedding_combiners.FirstN(4).combine(key, embedding)).shape, (0, 4, 3)
    )

  def test_first_n_scatters_on_the_gpu(self):
    gpu_placement.allow(self)
    combined = embedding_combiners.FirstN(2).combine(keys([1, 3]), tf.ones([4, 3]))
    self.assertEqual(gpu_placement.devices_of("ScatterNd"), {"GPU"})
    with self.session(config=gpu_placement.SOFT_PLACEMENT) as sess:
      self.assertAllEqual(sess.run(combined)[0], [[1, 1, 1], [0, 0, 0]])

  def test_combiner_is_abstract(self):
    with self.assertRaises(TypeError):
      embedding_combiners.Combiner(1)


if __name__ == "__main__":
  tf.test.main()
