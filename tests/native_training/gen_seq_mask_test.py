"""Sequence masks from row splits and ragged tensors."""

import numpy as np
import tensorflow as tf

from monolith.native_training.gen_seq_mask import gen_seq_mask

_WANT = [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


class GenSeqMaskTest(tf.test.TestCase):
  def test_gen_seq_mask_int32(self):
    mask = gen_seq_mask(tf.constant([0, 5, 7, 9, 13], dtype=tf.int32), max_seq_length=6)

    self.assertEqual(mask.dtype, tf.int32)
    self.assertAllEqual(mask, _WANT)

  def test_gen_seq_mask_int64(self):
    mask = gen_seq_mask(tf.constant([0, 5, 7, 9, 13], dtype=tf.int64), max_seq_length=6)

    self.assertEqual(mask.dtype, tf.int64)
    self.assertAllEqual(mask, _WANT)

  def test_ragged_tensor(self):
    ragged = tf.ragged.constant([[1, 2, 3, 4, 5], [6, 7], [8, 9], [10, 11, 12, 13]])

    self.assertAllEqual(gen_seq_mask(ragged, 6), _WANT)

  def test_python_list(self):
    self.assertAllEqual(gen_seq_mask([0, 5, 7, 9, 13], 6), _WANT)

  def test_long_rows_are_cut_and_empty_rows_are_zero(self):
    self.assertAllEqual(gen_seq_mask([0, 0, 100, 100], 2), [[0, 0], [1, 1], [0, 0]])

  def test_no_rows_and_no_width(self):
    self.assertEqual(gen_seq_mask([0], 3).shape, (0, 3))
    self.assertEqual(gen_seq_mask([0, 1, 2], 0).shape, (2, 0))

  def test_slice_of_longer_splits(self):
    self.assertAllEqual(gen_seq_mask([7, 9, 13], 6), _WANT[2:])

  def test_int64_extremes(self):
    top = 2**63 - 1
    mask = gen_seq_mask(tf.constant([0, top, top], dtype=tf.int64), 2)

    self.assertAllEqual(mask, [[1, 1], [0, 0]])

  def test_large_batch_against_sequence_mask(self):
    lengths = np.random.default_rng(6).integers(0, 40, size=5000)
    splits = np.concatenate([[0], np.cumsum(lengths)])

    self.assertAllEqual(
      gen_seq_mask(splits, 25), tf.sequence_mask(np.minimum(lengths, 25), 25, dtype=tf.int64)
    )

  def test_static_shape(self):
    with tf.Graph().as_default():
      known = gen_seq_mask(tf.compat.v1.placeholder(tf.int64, [5]), 6)
      unknown = gen_seq_mask(tf.compat.v1.placeholder(tf.int64, [None]), 6)
      any_shape = gen_seq_mask(tf.compat.v1.placeholder(tf.int64), 6)

      self.assertEqual(known.shape.as_list(), [4, 6])
      self.assertEqual(unknown.shape.as_list(), [None, 6])
      self.assertEqual(any_shape.shape.as_list(), [None, 6])

  def test_ragged_tensor_in_a_function(self):
    @tf.function
    def mask(ragged):
      return gen_seq_mask(ragged, 2)

    self.assertAllEqual(mask(tf.ragged.constant([[1], [], [2, 3, 4]])), [[1, 0], [0, 0], [1, 1]])

  def test_bad_input(self):
    for splits, message in (
      (np.zeros([0], np.int64), "splits is empty"),
      ([0, 3, 2], r"splits\[2\] = 2 follows 3"),
      ([-1, 2], r"splits\[0\] is -1"),
      ([[0, 1]], r"splits has shape \[1,2\], want rank 1"),
      (3, "splits has shape"),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        gen_seq_mask(splits, 3)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "max_seq_length"):
      gen_seq_mask([0, 1], -1)
    with self.assertRaises(tf.errors.ResourceExhaustedError):
      gen_seq_mask([0, 1], 2**62)


if __name__ == "__main__":
  tf.test.main()
