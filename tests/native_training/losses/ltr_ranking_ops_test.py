"""Tests of what ranking losses stand on: sorting, grouping, ranks and ideal DCG."""

import math

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import ltr_ranking_ops
from tests.native_training.losses.ltr_testing import LtrTestCase


class RankingOpsTest(LtrTestCase):
  def test_label_valid_fn(self):
    valid = self.evaluate_both(lambda: ltr_ranking_ops.label_valid_fn([[0.0, -1.0, 2.0, -1e-6]]))
    self.assertAllEqual(valid, [[True, False, True, False]])
    self.assertAllEqual(ltr_ranking_ops.label_valid_fn(tf.constant([-1, 0])), [False, True])

  def test_sort_by_scores(self):
    scores = [[1.0, 3.0, 2.0], [1.0, 2.0, 3.0]]
    positions, pairs = self.evaluate_both(
      lambda: ltr_ranking_ops.sort_by_scores(
        scores,
        [tf.constant([[1, 2, 3], [4, 5, 6]]), tf.reshape(tf.range(12), [2, 3, 2])],
      )
    )
    self.assertAllEqual(positions, [[2, 3, 1], [6, 5, 4]])
    self.assertAllEqual(pairs[0], [[2, 3], [4, 5], [0, 1]])

  def test_sort_by_scores_topn(self):
    scores = tf.constant([[1.0, 3.0, 2.0]])
    for topn, expected in ((2, [[3.0, 2.0]]), (5, [[3.0, 2.0, 1.0]]), (0, np.zeros([1, 0]))):
      (cut,) = ltr_ranking_ops.sort_by_scores(scores, [scores], topn=topn)
      self.assertAllEqual(cut, expected)

  def test_sort_by_scores_keeps_ties_in_order(self):
    (order,) = ltr_ranking_ops.sort_by_scores([[1.0, 2.0, 1.0, 2.0]], [tf.constant([[0, 1, 2, 3]])])
    self.assertAllEqual(order, [[1, 3, 0, 2]])

  def test_sort_by_scores_wants_a_matrix(self):
    with self.assertRaisesRegex(ValueError, r"scores has shape \(2,\), want \[batch, list\]"):
      ltr_ranking_ops.sort_by_scores([1.0, 2.0], [])

  def test_organize_valid_indices_in_order(self):
    indices = self.evaluate_both(
      lambda: ltr_ranking_ops.organize_valid_indices(
        [[False, True, False, True], [True, True, True, True]], shuffle=False
      )
    )
    self.assertAllEqual(indices[0], [[0, 1], [0, 3], [0, 0], [0, 2]])
    self.assertAllEqual(indices[1], [[1, 0], [1, 1], [1, 2], [1, 3]])

  def test_organize_valid_indices_shuffles(self):
    is_valid = np.arange(64)[np.newaxis, :] % 2 == 0
    tf.random.set_seed(1)
    first, second = (ltr_ranking_ops.organize_valid_indices(is_valid, seed=3) for _ in range(2))

    for indices in (first, second):
      self.assertAllEqual(indices[0, :, 0], np.zeros(64))
      self.assertCountEqual(indices[0, :32, 1].numpy(), np.arange(0, 64, 2))
      self.assertAllEqual(indices[0, 32:, 1], np.arange(1, 64, 2))
    self.assertNotAllEqual(first, second)

  def test_shuffle_valid_indices_repeats_with_its_seed(self):
    is_valid = np.ones([2, 32], bool)
    orders = []
    for _ in range(2):
      with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        orders.append(session.run(ltr_ranking_ops.shuffle_valid_indices(is_valid, seed=7)))
    self.assertAllEqual(orders[0], orders[1])
    self.assertNotAllEqual(orders[0][0, :, 1], np.arange(32))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      other = session.run(ltr_ranking_ops.shuffle_valid_indices(is_valid, seed=8))
    self.assertNotAllEqual(orders[0], other)

  def test_reshape_first_ndims(self):
    tensor = tf.reshape(tf.range(24), [2, 3, 4])
    flat = self.evaluate_both(
      lambda: ltr_ranking_ops.reshape_first_ndims(tf.reshape(tf.range(24), [2, 3, 4]), 2, [6])
    )
    self.assertAllEqual(flat, tf.reshape(tensor, [6, 4]))
    self.assertAllEqual(
      ltr_ranking_ops.reshape_first_ndims(flat, 1, [-1, 3]), tf.reshape(tensor, [2, 3, 4])
    )
    self.assertAllEqual(
      ltr_ranking_ops.reshape_first_ndims(tensor, 3, tf.constant([24], tf.int64)), tf.range(24)
    )

  def test_reshape_first_ndims_of_sparse(self):
    dense = np.array([[[0, 1], [2, 0], [0, 0]], [[0, 0], [0, 3], [4, 0]]])
    reshaped = ltr_ranking_ops.reshape_first_ndims(tf.sparse.from_dense(dense), 2, [6])
    self.assertIsInstance(reshaped, tf.SparseTensor)
    self.assertAllEqual(tf.sparse.to_dense(reshaped), dense.reshape([6, 2]))
    self.assertAllEqual(reshaped.values, [1, 2, 3, 4])

  def test_reshape_first_ndims_of_too_few(self):
    for tensor in (tf.zeros([2, 2]), tf.sparse.from_dense([[1, 0]])):
      with self.assertRaisesRegex(ValueError, "has 2 dimensions, cannot reshape the first 3"):
        ltr_ranking_ops.reshape_first_ndims(tensor, 3, [4])

  def test_approx_ranks(self):
    ranks = self.evaluate_both(lambda: ltr_ranking_ops.approx_ranks(tf.constant([[1.0, 2.0, 3.0]])))
    self.assertAllClose(ranks, [[2.999955, 2.0, 1.000045]])
    self.assertAllClose(ltr_ranking_ops.approx_ranks([[1.0, 1.0]]), [[1.5, 1.5]])
    soft = ltr_ranking_ops.approx_ranks(tf.constant([[0.0, 1.0]]), alpha=1.0)
    self.assertAllClose(soft, [[1 + 1 / (1 + math.exp(-1)), 1 + 1 / (1 + math.e)]])

  def test_inverse_max_dcg(self):
    inverse = self.evaluate_both(
      lambda: ltr_ranking_ops.inverse_max_dcg([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [-1.0, 1.0, -1.0]])
    )
    self.assertAllClose(inverse, [[0.1909007], [0.0], [math.log(2)]])

  def test_inverse_max_dcg_options(self):
    labels = tf.constant([[1, 0, 2]])
    self.assertAllClose(ltr_ranking_ops.inverse_max_dcg(labels, topn=1), [[math.log(2) / 3]])
    inverse = ltr_ranking_ops.inverse_max_dcg(
      labels, gain_fn=lambda x: x, rank_discount_fn=lambda r: 1 / r
    )
    self.assertAllClose(inverse, [[1 / 2.5]])

  def test_get_batch_idx_size(self):
    logits, labels, mask, first = self.evaluate_both(
      lambda: ltr_ranking_ops.get_batch_idx_size(
        tf.constant([1.0, 2.0, 3.0, 4.0]),
        tf.constant([0.0, 1.0, 2.0, 0.0]),
        tf.constant([7, 9, 7, 5], tf.int64),
        "rank",
      )
    )
    pad = -1e-6
    self.assertAllClose(mask, [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]])
    self.assertAllClose(logits, [[1, 0, 3, 0], [0, 2, 0, 0], [1, 0, 3, 0], [0, 0, 0, 4]])
    self.assertAllEqual(first, [0, 1, 3])
    # True negatives stay valid; padding does not.
    self.assertAllEqual(
      labels,
      np.float32([[0, pad, 2, pad], [pad, 1, pad, pad], [0, pad, 2, pad], [pad, pad, pad, 0]]),
    )
    self.assertAllEqual(ltr_ranking_ops.label_valid_fn(labels), mask == 1)

  def test_get_batch_idx_size_makes_lists_of_a_flat_batch(self):
    # Two lists, each in a flat column, must have the loss of the same lists laid out by hand.
    logits, labels, _, first = ltr_ranking_ops.get_batch_idx_size(
      [[1.0], [3.0], [2.0], [2.0], [1.0]],
      [[1], [0], [0], [1], [2]],
      [b"a", b"b", b"a", b"b", b"a"],
      "x",
    )
    grouped = self.loss("softmax_loss", tf.gather(labels, first), tf.gather(logits, first))
    by_hand = self.loss(
      "softmax_loss", [[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]], [[1.0, 2.0, 1.0], [3.0, 2.0, 0.0]]
    )
    self.assertAllClose(grouped, by_hand)

  def test_get_batch_idx_size_of_one_and_none(self):
    logits, labels, mask, first = ltr_ranking_ops.get_batch_idx_size([2.0], [1.0], [3], "x")
    self.assertAllEqual([logits, labels, mask], [[[2.0]], [[1.0]], [[1.0]]])
    self.assertAllEqual(first, [0])
    empty = tf.zeros([0])
    outputs = ltr_ranking_ops.get_batch_idx_size(empty, empty, empty, "x")
    self.assertEqual([tuple(o.shape) for o in outputs], [(0, 0), (0, 0), (0, 0), (0,)])


if __name__ == "__main__":
  tf.test.main()
