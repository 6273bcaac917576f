"""Tests of lambda weights."""

import math

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import ltr_lambda_weights, ltr_losses
from tests.native_training.losses.ltr_testing import LABELS, LOGITS, LtrTestCase


class LambdaWeightTest(LtrTestCase):
  def test_dcg_pair_weights(self):
    weights = self.evaluate_both(
      lambda: ltr_lambda_weights.DCGLambdaWeight().pair_weights(tf.constant([[2.0, 0.0, 1.0]]))
    )
    # |gain difference| * |1/d - 1/(d+1)| with d the distance of the ranks.
    self.assertAllClose(weights, [[[0, 1, 1 / 6], [1, 0, 0.5], [1 / 6, 0.5, 0]]])

  def test_dcg_pair_weights_smooth(self):
    labels = tf.constant([[2.0, 0.0, 1.0]])
    absolute = [[[0, 1, 2 / 3], [1, 0, 1 / 6], [2 / 3, 1 / 6, 0]]]
    relative = [[[0, 1, 1 / 6], [1, 0, 0.5], [1 / 6, 0.5, 0]]]
    self.assertAllClose(
      ltr_lambda_weights.DCGLambdaWeight(smooth_fraction=1.0).pair_weights(labels), absolute
    )
    self.assertAllClose(
      ltr_lambda_weights.DCGLambdaWeight(smooth_fraction=0.25).pair_weights(labels),
      0.75 * np.array(relative) + 0.25 * np.array(absolute),
    )

  def test_dcg_pair_weights_topn(self):
    labels = tf.constant([[3.0, 2.0, 1.0, 0.0]])
    weights = ltr_lambda_weights.DCGLambdaWeight(topn=1).pair_weights(labels)
    # All ranks from 2 on count as 2: pairs among them weigh nothing.
    self.assertAllClose(weights[0, 0], [0, 0.5, 1, 1.5])
    self.assertAllClose(weights[0, 1:, 1:], np.zeros([3, 3]))
    both = ltr_lambda_weights.DCGLambdaWeight(topn=2, smooth_fraction=1.0).pair_weights(labels)
    self.assertAllClose(both[0, 0], [0, 0.5, 2 * 2 / 3, 3 * 2 / 3])
    self.assertAllClose(both[0, 2:, 2:], np.zeros([2, 2]))

  def test_dcg_individual_weights(self):
    labels = tf.constant([[2.0, 0.0, 1.0, -1.0]])
    self.assertAllClose(
      ltr_lambda_weights.DCGLambdaWeight().individual_weights(labels), [[2.0, 0.0, 1 / 3, 0.0]]
    )
    normalized = ltr_lambda_weights.DCGLambdaWeight(normalized=True).individual_weights(labels)
    self.assertAllClose(normalized, np.array([[2.0, 0.0, 1 / 3, 0.0]]) / 2.5)

  def test_dcg_smooth_fraction_out_of_range(self):
    for fraction in (-0.1, 1.1):
      with self.assertRaises(AssertionError):
        ltr_lambda_weights.DCGLambdaWeight(smooth_fraction=fraction)
      with self.assertRaises(AssertionError):
        ltr_lambda_weights.create_ndcg_lambda_weight(smooth_fraction=fraction)

  def test_ndcg_lambda_weight(self):
    labels = tf.constant([[2.0, 0.0, 1.0]])
    inverse = 0.1909007
    individual = ltr_lambda_weights.create_ndcg_lambda_weight().individual_weights(labels)
    self.assertAllClose(individual, [[3 / math.log(2) * inverse, 0.0, 1 / math.log(4) * inverse]])
    pairs = ltr_lambda_weights.create_ndcg_lambda_weight().pair_weights(labels)
    self.assertAllClose(pairs[0, 2, 1], inverse * (1 / math.log(2) - 1 / math.log(3)), rtol=1e-5)

  def test_reciprocal_rank_lambda_weight(self):
    pairs = ltr_lambda_weights.create_reciprocal_rank_lambda_weight().pair_weights(
      [[2.0, 0.0, 1.0]]
    )
    self.assertAllClose(pairs[0, 0], [0, 0.4, 0.4 / 6])
    top = ltr_lambda_weights.create_reciprocal_rank_lambda_weight(topn=1, smooth_fraction=1.0)
    self.assertAllClose(top.pair_weights([[1.0, 0.0]]), [[[0, 0.5], [0.5, 0]]])

  def test_p_list_mle_lambda_weight(self):
    weights = ltr_lambda_weights.create_p_list_mle_lambda_weight(4).individual_weights(
      tf.zeros([2, 3])
    )
    self.assertAllClose(weights, [[7, 3, 1]] * 2)

  def test_precision_lambda_weight(self):
    labels = tf.constant([[0.0, 1.0, 2.0, 0.0]])
    weights = self.evaluate_both(
      lambda: ltr_lambda_weights.PrecisionLambdaWeight(2).pair_weights([[0.0, 1.0, 2.0, 0.0]])
    )
    expected = np.zeros([1, 4, 4])
    for i, j in ((0, 2), (1, 3)):
      expected[0, i, j] = expected[0, j, i] = 1
    self.assertAllClose(weights, expected)
    stricter = ltr_lambda_weights.PrecisionLambdaWeight(2, positive_fn=lambda x: x >= 2)
    self.assertAllClose(stricter.pair_weights(labels)[0, 2], [1, 1, 0, 0])

  def test_identity_lambda_weight(self):
    weight = ltr_lambda_weights.IdentityLambdaWeight()
    self.assertEqual(weight.pair_weights(tf.zeros([1, 2])), 1.0)
    self.assertEqual(weight.individual_weights(tf.zeros([1, 2])), 1.0)
    # Lacks the factors |l_i - l_j| and gains the list size; nothing else changes.
    self.assertAllClose(self.loss("pairwise_hinge_loss", lambda_weight=weight), 2.0)

  def test_list_mle_weights_are_not_of_pairs(self):
    fn = ltr_losses.make_loss_fn(
      "pairwise_hinge_loss", lambda_weight=ltr_lambda_weights.create_p_list_mle_lambda_weight(3)
    )
    with self.assertRaisesRegex(ValueError, "ListMLELambdaWeight weighs positions"):
      fn(LABELS, LOGITS, {})


if __name__ == "__main__":
  tf.test.main()
