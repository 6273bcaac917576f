import numpy as np
import tensorflow as tf

from monolith.native_training import ragged_utils
from monolith.native_training.runtime.ops import gen_monolith_ops

tf.compat.v1.disable_eager_execution()


class RaggedUtilsTestCase(tf.test.TestCase):
  def test_basic(self):
    rt = tf.ragged.constant([[], [1], [2, 3]])
    rowids = ragged_utils.fused_value_rowids(rt)
    again = ragged_utils.fused_value_rowids(rt)
    self.assertIs(rowids, again)
    self.assertAllEqual(self.evaluate(rowids), [1, 2, 2])

  def test_not_ragged(self):
    with self.assertRaisesRegex(ValueError, "rt must be RaggedTensor"):
      ragged_utils.fused_value_rowids(tf.constant([[1]]))

  def test_int32_splits(self):
    rt = tf.ragged.constant([[1], [2, 3]], row_splits_dtype=tf.int32)
    rowids = ragged_utils.fused_value_rowids(rt)
    self.assertEqual(rowids.dtype, tf.int64)
    self.assertAllEqual(self.evaluate(rowids), [0, 1, 1])

  def test_empty(self):
    for rows in (0, 1, 3):
      rt = tf.RaggedTensor.from_row_splits(tf.zeros([0]), tf.zeros([rows + 1], tf.int64))
      self.assertAllEqual(self.evaluate(ragged_utils.fused_value_rowids(rt)), [])

  def test_static_shape_is_a_vector(self):
    rowids = ragged_utils.fused_value_rowids(tf.ragged.constant([[1]]))
    self.assertEqual(rowids.shape.as_list(), [None])

  def test_large_skewed_rows(self):
    lengths = np.random.default_rng(3).geometric(0.02, 20_000) - 1
    lengths[100:5000] = 0
    lengths[7777] = 500_000
    rt = tf.RaggedTensor.from_row_lengths(tf.zeros([int(lengths.sum())]), lengths)
    rowids = self.evaluate(ragged_utils.fused_value_rowids(rt))
    self.assertAllEqual(rowids, np.repeat(np.arange(20_000), lengths))

  def test_malformed_splits(self):
    with self.session() as sess:
      splits = tf.compat.v1.placeholder(tf.int64)
      rowids = gen_monolith_ops.monolith_fused_value_rowids(splits)
      for bad in ([], [1, 2], [-1, 2], [0, 3, 2], [0, -5], [[0, 1]], 0, [0, -(1 << 63)]):
        with self.subTest(splits=bad):
          with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "splits"):
            sess.run(rowids, {splits: np.array(bad, np.int64)})
    with self.assertRaises(ValueError):
      gen_monolith_ops.monolith_fused_value_rowids(tf.zeros([2, 2], tf.int64))


if __name__ == "__main__":
  tf.test.main()
