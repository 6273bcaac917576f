"""Tests of the ranking losses."""

import math

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import ltr_losses

_KEY = ltr_losses.RankingLossKey
_REDUCTION = tf.compat.v1.losses.Reduction
_ALL_KEYS = [
  "pairwise_hinge_loss",
  "pairwise_logistic_loss",
  "pairwise_soft_zero_one_loss",
  "softmax_loss",
  "sigmoid_cross_entropy_loss",
  "mean_squared_loss",
  "list_mle_loss",
  "approx_ndcg_loss",
]
_LABELS = [[1.0, 0.0, 2.0]]
_LOGITS = [[1.0, 2.0, 3.0]]


class LtrTestCase(tf.test.TestCase):
  def evaluate_both(self, fn):
    """Returns the value of `fn()` in eager mode, after checking that a graph gives the same."""
    eager = tf.nest.map_structure(np.asarray, fn())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      graph = session.run(fn())
    tf.nest.map_structure(lambda a, b: self.assertAllClose(a, b, rtol=1e-6), eager, graph)
    return eager

  def loss(self, keys, labels=_LABELS, logits=_LOGITS, features=None, **kwargs):
    fn = ltr_losses.make_loss_fn(keys, **kwargs)
    value = self.evaluate_both(lambda: fn(tf.constant(labels), tf.constant(logits), features or {}))
    self.assertEqual(value.shape, ())
    return value


class RankingOpsTest(LtrTestCase):
  def test_label_valid_fn(self):
    valid = self.evaluate_both(lambda: ltr_losses.label_valid_fn([[0.0, -1.0, 2.0, -1e-6]]))
    self.assertAllEqual(valid, [[True, False, True, False]])
    self.assertAllEqual(ltr_losses.label_valid_fn(tf.constant([-1, 0])), [False, True])

  def test_sort_by_scores(self):
    scores = [[1.0, 3.0, 2.0], [1.0, 2.0, 3.0]]
    positions, pairs = self.evaluate_both(
      lambda: ltr_losses.sort_by_scores(
        scores,
        [tf.constant([[1, 2, 3], [4, 5, 6]]), tf.reshape(tf.range(12), [2, 3, 2])],
      )
    )
    self.assertAllEqual(positions, [[2, 3, 1], [6, 5, 4]])
    self.assertAllEqual(pairs[0], [[2, 3], [4, 5], [0, 1]])

  def test_sort_by_scores_topn(self):
    scores = tf.constant([[1.0, 3.0, 2.0]])
    for topn, expected in ((2, [[3.0, 2.0]]), (5, [[3.0, 2.0, 1.0]]), (0, np.zeros([1, 0]))):
      (cut,) = ltr_losses.sort_by_scores(scores, [scores], topn=topn)
      self.assertAllEqual(cut, expected)

  def test_sort_by_scores_keeps_ties_in_order(self):
    (order,) = ltr_losses.sort_by_scores([[1.0, 2.0, 1.0, 2.0]], [tf.constant([[0, 1, 2, 3]])])
    self.assertAllEqual(order, [[1, 3, 0, 2]])

  def test_sort_by_scores_wants_a_matrix(self):
    with self.assertRaisesRegex(ValueError, r"scores has shape \(2,\), want \[batch, list\]"):
      ltr_losses.sort_by_scores([1.0, 2.0], [])

  def test_organize_valid_indices_in_order(self):
    indices = self.evaluate_both(
      lambda: ltr_losses.organize_valid_indices(
        [[False, True, False, True], [True, True, True, True]], shuffle=False
      )
    )
    self.assertAllEqual(indices[0], [[0, 1], [0, 3], [0, 0], [0, 2]])
    self.assertAllEqual(indices[1], [[1, 0], [1, 1], [1, 2], [1, 3]])

  def test_organize_valid_indices_shuffles(self):
    is_valid = np.arange(64)[np.newaxis, :] % 2 == 0
    tf.random.set_seed(1)
    first, second = (ltr_losses.organize_valid_indices(is_valid, seed=3) for _ in range(2))

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
        orders.append(session.run(ltr_losses.shuffle_valid_indices(is_valid, seed=7)))
    self.assertAllEqual(orders[0], orders[1])
    self.assertNotAllEqual(orders[0][0, :, 1], np.arange(32))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      other = session.run(ltr_losses.shuffle_valid_indices(is_valid, seed=8))
    self.assertNotAllEqual(orders[0], other)

  def test_reshape_first_ndims(self):
    tensor = tf.reshape(tf.range(24), [2, 3, 4])
    flat = self.evaluate_both(
      lambda: ltr_losses.reshape_first_ndims(tf.reshape(tf.range(24), [2, 3, 4]), 2, [6])
    )
    self.assertAllEqual(flat, tf.reshape(tensor, [6, 4]))
    self.assertAllEqual(
      ltr_losses.reshape_first_ndims(flat, 1, [-1, 3]), tf.reshape(tensor, [2, 3, 4])
    )
    self.assertAllEqual(
      ltr_losses.reshape_first_ndims(tensor, 3, tf.constant([24], tf.int64)), tf.range(24)
    )

  def test_reshape_first_ndims_of_sparse(self):
    dense = np.array([[[0, 1], [2, 0], [0, 0]], [[0, 0], [0, 3], [4, 0]]])
    reshaped = ltr_losses.reshape_first_ndims(tf.sparse.from_dense(dense), 2, [6])
    self.assertIsInstance(reshaped, tf.SparseTensor)
    self.assertAllEqual(tf.sparse.to_dense(reshaped), dense.reshape([6, 2]))
    self.assertAllEqual(reshaped.values, [1, 2, 3, 4])

  def test_reshape_first_ndims_of_too_few(self):
    for tensor in (tf.zeros([2, 2]), tf.sparse.from_dense([[1, 0]])):
      with self.assertRaisesRegex(ValueError, "has 2 dimensions, cannot reshape the first 3"):
        ltr_losses.reshape_first_ndims(tensor, 3, [4])

  def test_approx_ranks(self):
    ranks = self.evaluate_both(lambda: ltr_losses.approx_ranks(tf.constant([[1.0, 2.0, 3.0]])))
    self.assertAllClose(ranks, [[2.999955, 2.0, 1.000045]])
    self.assertAllClose(ltr_losses.approx_ranks([[1.0, 1.0]]), [[1.5, 1.5]])
    soft = ltr_losses.approx_ranks(tf.constant([[0.0, 1.0]]), alpha=1.0)
    self.assertAllClose(soft, [[1 + 1 / (1 + math.exp(-1)), 1 + 1 / (1 + math.e)]])

  def test_inverse_max_dcg(self):
    inverse = self.evaluate_both(
      lambda: ltr_losses.inverse_max_dcg([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [-1.0, 1.0, -1.0]])
    )
    self.assertAllClose(inverse, [[0.1909007], [0.0], [math.log(2)]])

  def test_inverse_max_dcg_options(self):
    labels = tf.constant([[1, 0, 2]])
    self.assertAllClose(ltr_losses.inverse_max_dcg(labels, topn=1), [[math.log(2) / 3]])
    inverse = ltr_losses.inverse_max_dcg(
      labels, gain_fn=lambda x: x, rank_discount_fn=lambda r: 1 / r
    )
    self.assertAllClose(inverse, [[1 / 2.5]])

  def test_get_batch_idx_size(self):
    logits, labels, mask, first = self.evaluate_both(
      lambda: ltr_losses.get_batch_idx_size(
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
    self.assertAllEqual(ltr_losses.label_valid_fn(labels), mask == 1)

  def test_get_batch_idx_size_makes_lists_of_a_flat_batch(self):
    # Two lists, each in a flat column, must have the loss of the same lists laid out by hand.
    logits, labels, _, first = ltr_losses.get_batch_idx_size(
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
    logits, labels, mask, first = ltr_losses.get_batch_idx_size([2.0], [1.0], [3], "x")
    self.assertAllEqual([logits, labels, mask], [[[2.0]], [[1.0]], [[1.0]]])
    self.assertAllEqual(first, [0])
    empty = tf.zeros([0])
    outputs = ltr_losses.get_batch_idx_size(empty, empty, empty, "x")
    self.assertEqual([tuple(o.shape) for o in outputs], [(0, 0), (0, 0), (0, 0), (0,)])


class LambdaWeightTest(LtrTestCase):
  def test_dcg_pair_weights(self):
    weights = self.evaluate_both(
      lambda: ltr_losses.DCGLambdaWeight().pair_weights(tf.constant([[2.0, 0.0, 1.0]]))
    )
    # |gain difference| * |1/d - 1/(d+1)| with d the distance of the ranks.
    self.assertAllClose(weights, [[[0, 1, 1 / 6], [1, 0, 0.5], [1 / 6, 0.5, 0]]])

  def test_dcg_pair_weights_smooth(self):
    labels = tf.constant([[2.0, 0.0, 1.0]])
    absolute = [[[0, 1, 2 / 3], [1, 0, 1 / 6], [2 / 3, 1 / 6, 0]]]
    relative = [[[0, 1, 1 / 6], [1, 0, 0.5], [1 / 6, 0.5, 0]]]
    self.assertAllClose(
      ltr_losses.DCGLambdaWeight(smooth_fraction=1.0).pair_weights(labels), absolute
    )
    self.assertAllClose(
      ltr_losses.DCGLambdaWeight(smooth_fraction=0.25).pair_weights(labels),
      0.75 * np.array(relative) + 0.25 * np.array(absolute),
    )

  def test_dcg_pair_weights_topn(self):
    labels = tf.constant([[3.0, 2.0, 1.0, 0.0]])
    weights = ltr_losses.DCGLambdaWeight(topn=1).pair_weights(labels)
    # All ranks from 2 on count as 2: pairs among them weigh nothing.
    self.assertAllClose(weights[0, 0], [0, 0.5, 1, 1.5])
    self.assertAllClose(weights[0, 1:, 1:], np.zeros([3, 3]))
    both = ltr_losses.DCGLambdaWeight(topn=2, smooth_fraction=1.0).pair_weights(labels)
    self.assertAllClose(both[0, 0], [0, 0.5, 2 * 2 / 3, 3 * 2 / 3])
    self.assertAllClose(both[0, 2:, 2:], np.zeros([2, 2]))

  def test_dcg_individual_weights(self):
    labels = tf.constant([[2.0, 0.0, 1.0, -1.0]])
    self.assertAllClose(
      ltr_losses.DCGLambdaWeight().individual_weights(labels), [[2.0, 0.0, 1 / 3, 0.0]]
    )
    normalized = ltr_losses.DCGLambdaWeight(normalized=True).individual_weights(labels)
    self.assertAllClose(normalized, np.array([[2.0, 0.0, 1 / 3, 0.0]]) / 2.5)

  def test_dcg_smooth_fraction_out_of_range(self):
    for fraction in (-0.1, 1.1):
      with self.assertRaises(AssertionError):
        ltr_losses.DCGLambdaWeight(smooth_fraction=fraction)
      with self.assertRaises(AssertionError):
        ltr_losses.create_ndcg_lambda_weight(smooth_fraction=fraction)

  def test_ndcg_lambda_weight(self):
    labels = tf.constant([[2.0, 0.0, 1.0]])
    inverse = 0.1909007
    individual = ltr_losses.create_ndcg_lambda_weight().individual_weights(labels)
    self.assertAllClose(individual, [[3 / math.log(2) * inverse, 0.0, 1 / math.log(4) * inverse]])
    pairs = ltr_losses.create_ndcg_lambda_weight().pair_weights(labels)
    self.assertAllClose(pairs[0, 2, 1], inverse * (1 / math.log(2) - 1 / math.log(3)), rtol=1e-5)

  def test_reciprocal_rank_lambda_weight(self):
    pairs = ltr_losses.create_reciprocal_rank_lambda_weight().pair_weights([[2.0, 0.0, 1.0]])
    self.assertAllClose(pairs[0, 0], [0, 0.4, 0.4 / 6])
    top = ltr_losses.create_reciprocal_rank_lambda_weight(topn=1, smooth_fraction=1.0)
    self.assertAllClose(top.pair_weights([[1.0, 0.0]]), [[[0, 0.5], [0.5, 0]]])

  def test_p_list_mle_lambda_weight(self):
    weights = ltr_losses.create_p_list_mle_lambda_weight(4).individual_weights(tf.zeros([2, 3]))
    self.assertAllClose(weights, [[7, 3, 1]] * 2)

  def test_precision_lambda_weight(self):
    labels = tf.constant([[0.0, 1.0, 2.0, 0.0]])
    weights = self.evaluate_both(
      lambda: ltr_losses.PrecisionLambdaWeight(2).pair_weights([[0.0, 1.0, 2.0, 0.0]])
    )
    expected = np.zeros([1, 4, 4])
    for i, j in ((0, 2), (1, 3)):
      expected[0, i, j] = expected[0, j, i] = 1
    self.assertAllClose(weights, expected)
    stricter = ltr_losses.PrecisionLambdaWeight(2, positive_fn=lambda x: x >= 2)
    self.assertAllClose(stricter.pair_weights(labels)[0, 2], [1, 1, 0, 0])

  def test_identity_lambda_weight(self):
    weight = ltr_losses.IdentityLambdaWeight()
    self.assertEqual(weight.pair_weights(tf.zeros([1, 2])), 1.0)
    self.assertEqual(weight.individual_weights(tf.zeros([1, 2])), 1.0)
    # Lacks the factors |l_i - l_j| and gains the list size; nothing else changes.
    self.assertAllClose(self.loss("pairwise_hinge_loss", lambda_weight=weight), 2.0)

  def test_list_mle_weights_are_not_of_pairs(self):
    fn = ltr_losses.make_loss_fn(
      "pairwise_hinge_loss", lambda_weight=ltr_losses.create_p_list_mle_lambda_weight(3)
    )
    with self.assertRaisesRegex(ValueError, "ListMLELambdaWeight weighs positions"):
      fn(_LABELS, _LOGITS, {})


class LossValuesTest(LtrTestCase):
  def test_keys(self):
    keys = [v for k, v in vars(ltr_losses.RankingLossKey).items() if k.isupper()]
    self.assertCountEqual(keys, _ALL_KEYS)
    self.assertEqual(_KEY.LIST_MLE_LOSS, "list_mle_loss")

  def test_values(self):
    for key, expected in (
      (_KEY.PAIRWISE_HINGE_LOSS, 0.666667),
      (_KEY.PAIRWISE_LOGISTIC_LOSS, 0.688904),
      (_KEY.PAIRWISE_SOFT_ZERO_ONE_LOSS, 0.462715),
      (_KEY.SOFTMAX_LOSS, 3.222818),
      (_KEY.SIGMOID_CROSS_ENTROPY_LOSS, -0.170408),
      (_KEY.MEAN_SQUARED_LOSS, 1.666667),
    ):
      with self.subTest(key):
        self.assertAllClose(self.loss(key), expected, atol=2e-6)

  def test_values_with_an_invalid_item(self):
    for key, expected in (
      (_KEY.PAIRWISE_HINGE_LOSS, 2.0),
      (_KEY.PAIRWISE_LOGISTIC_LOSS, 1.313262),
      (_KEY.PAIRWISE_SOFT_ZERO_ONE_LOSS, 0.731059),
      (_KEY.SOFTMAX_LOSS, 1.313262),
      (_KEY.SIGMOID_CROSS_ENTROPY_LOSS, 1.220095),
      (_KEY.MEAN_SQUARED_LOSS, 2.0),
    ):
      with self.subTest(key):
        self.assertAllClose(self.loss(key, labels=[[1.0, 0.0, -1.0]]), expected, atol=2e-6)

  def test_values_with_lambda_weights(self):
    ndcg = ltr_losses.create_ndcg_lambda_weight()
    mrr = ltr_losses.create_reciprocal_rank_lambda_weight()
    self.assertAllClose(self.loss("pairwise_hinge_loss", lambda_weight=ndcg), 0.203292, atol=2e-6)
    self.assertAllClose(self.loss("pairwise_logistic_loss", lambda_weight=mrr), 0.396419, atol=2e-6)
    self.assertAllClose(self.loss("softmax_loss", lambda_weight=ndcg), 0.668319, atol=2e-6)

  def test_weighted_sum(self):
    loss = self.loss(["mean_squared_loss", "pairwise_hinge_loss"], loss_weights=[0.5, 2.0])
    self.assertAllClose(loss, 2.166667)

  def test_list_mle(self):
    labels, logits = [[2.0, 1.0, 0.0]], [[3.0, 2.0, 1.0]]
    self.assertAllClose(self.loss("list_mle_loss", labels, logits), 0.720868)
    position_aware = ltr_losses.create_p_list_mle_lambda_weight(3)
    self.assertAllClose(
      self.loss("list_mle_loss", labels, logits, lambda_weight=position_aware), 1.536080
    )

  def test_approx_ndcg(self):
    labels, logits = [[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]], [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
    key = "approx_ndcg_loss"
    self.assertAllClose(self.loss(key, labels, logits, reduction=_REDUCTION.SUM), -1.594844)
    self.assertAllClose(self.loss(key, labels, logits), -0.797422)
    self.assertAllClose(ltr_losses.approx_ndcg_loss(labels, logits), -1.594844)

  def test_approx_ndcg_of_a_batch_of_one(self):
    first = self.loss("approx_ndcg_loss", [[1.0, 0.0, 2.0]], [[1.0, 2.0, 3.0]])
    second = self.loss("approx_ndcg_loss", [[0.0, 1.0, 0.0]], [[3.0, 2.0, 1.0]])
    self.assertAllClose(first + second, -1.594844)
    self.assertAllClose(second, -math.log(2) / math.log(3), atol=1e-4)

  def test_padding_changes_nothing(self):
    rng = np.random.default_rng(1)
    labels, logits = np.float32([[2, 0, 1]]), np.float32(rng.normal(size=[1, 3]))
    padded_labels = np.float32([[-1, 2, -1, 0, 1]])
    padded_logits = np.float32([[np.inf, logits[0, 0], np.nan, logits[0, 1], logits[0, 2]]])
    for key in _ALL_KEYS:
      with self.subTest(key):
        expected = self.loss(key, labels, logits)
        self.assertAllClose(self.loss(key, padded_labels, padded_logits), expected, rtol=1e-5)

  def test_order_of_the_items_changes_nothing(self):
    rng = np.random.default_rng(2)
    labels, logits = np.float32([[3, 0, 1, 2]]), np.float32(rng.normal(size=[1, 4]))
    order = [2, 0, 3, 1]
    ndcg = ltr_losses.create_ndcg_lambda_weight(topn=2, smooth_fraction=0.3)
    for key in _ALL_KEYS:
      with self.subTest(key):
        self.assertAllClose(
          self.loss(key, labels[:, order], logits[:, order], lambda_weight=ndcg),
          self.loss(key, labels, logits, lambda_weight=ndcg),
          rtol=1e-5,
        )


class LossEdgesTest(LtrTestCase):
  def test_all_items_invalid(self):
    for key in _ALL_KEYS:
      for reduction in (r for r in _REDUCTION.all() if r != _REDUCTION.NONE):
        with self.subTest(f"{key} {reduction}"):
          loss = self.loss(key, [[-1.0, -1.0]], [[1.0, 2.0]], reduction=reduction)
          self.assertAllEqual(loss, 0.0)

  def test_empty_batch(self):
    for key in _ALL_KEYS:
      with self.subTest(key):
        self.assertAllEqual(self.loss(key, np.zeros([0, 3]), np.zeros([0, 3])), 0.0)

  def test_list_of_one(self):
    for key, expected in zip(_ALL_KEYS, (0.0, 0.0, 0.0, 0.0, math.log1p(math.exp(-2)), 1.0, 0.0)):
      with self.subTest(key):
        self.assertAllClose(self.loss(key, [[1.0]], [[2.0]]), expected)
    self.assertAllClose(self.loss("approx_ndcg_loss", [[1.0]], [[2.0]]), -1.0)

  def test_float64_gradients_are_finite(self):
    labels = tf.constant([[2, 0, 0, -1], [-1, -1, -1, -1], [0, 0, 0, 0], [1, 1, 3, 0]])
    logits = tf.constant(
      [[500.0, -500.0, 3.0, np.inf], [1.0, 2.0, np.nan, 3.0], [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]],
      tf.float64,
    )
    for key in _ALL_KEYS:
      for weight in (None, ltr_losses.create_ndcg_lambda_weight(topn=2)):
        with self.subTest(key):
          fn = ltr_losses.make_loss_fn(key, lambda_weight=weight, seed=1)
          with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = fn(labels, logits, {})
          gradient = tape.gradient(loss, logits)
          self.assertEqual(loss.dtype, tf.float64)
          self.assertEqual(gradient.dtype, tf.float64)
          self.assertAllInRange(gradient, -1e6, 1e6)
          # Padding changes nothing.
          self.assertAllEqual(tf.boolean_mask(gradient, labels < 0), np.zeros(5))

  def test_float64_is_not_computed_in_float32(self):
    labels, logits = np.float64([[1, 0]]), np.float64([[0, 1e-12]])
    loss = self.loss("pairwise_hinge_loss", labels, logits)
    self.assertEqual(float(loss), 1 + 1e-12)

  def test_gradients(self):
    labels = [[2.0, 0.0, 1.0, -1.0], [1.0, 0.0, 3.0, 2.0]]
    logits = tf.constant(np.random.default_rng(3).normal(size=[2, 4]))
    ndcg = ltr_losses.create_ndcg_lambda_weight()
    p_list_mle = ltr_losses.create_p_list_mle_lambda_weight(4)
    for key in _ALL_KEYS:
      weight = p_list_mle if key == "list_mle_loss" else ndcg
      fn = ltr_losses.make_loss_fn(key, lambda_weight=weight)
      with self.subTest(key):
        theoretical, numerical = tf.test.compute_gradient(
          lambda x, fn=fn: fn(labels, x, {}), [logits], delta=1e-5
        )
        self.assertAllClose(theoretical, numerical, atol=1e-6)

  def test_weights_get_no_gradient(self):
    weights = tf.Variable([[2.0, 3.0, 4.0]])
    for key in _ALL_KEYS[:6]:
      with self.subTest(key):
        fn = ltr_losses.make_loss_fn(key, weights_feature_name="w")
        with tf.GradientTape() as tape:
          loss = fn(_LABELS, _LOGITS, {"w": weights})
        self.assertIsNone(tape.gradient(loss, weights))

  def test_ties_are_shuffled_by_seed(self):
    labels, logits = np.zeros([1, 8], np.float32), np.float32(np.arange(8)[np.newaxis, :])

    def losses(seed, count=4):
      fn = ltr_losses.make_loss_fn("list_mle_loss", seed=seed)
      with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss = fn(labels, logits, {})
        return [session.run(loss) for _ in range(count)]

    self.assertEqual(losses(5), losses(5))
    self.assertGreater(len(set(losses(5))), 1)
    self.assertNotEqual(losses(5), losses(6))

  def test_integer_labels(self):
    self.assertAllClose(self.loss("softmax_loss", labels=[[1, 0, 2]]), 3.222818)

  def test_unknown_shapes(self):
    for key in _ALL_KEYS:
      expected = self.loss(key)
      with self.subTest(key), tf.Graph().as_default(), tf.compat.v1.Session() as session:
        labels = tf.compat.v1.placeholder(tf.float32, [None, None])
        logits = tf.compat.v1.placeholder(tf.float32, [None, None])
        loss = ltr_losses.make_loss_fn(key)(labels, logits, {})
        for size in (1, 3):
          value = session.run(
            loss, {labels: np.float32(_LABELS * size), logits: np.float32(_LOGITS * size)}
          )
          self.assertAllClose(value, expected, rtol=1e-5)

  def test_shapes_must_agree(self):
    with self.assertRaisesRegex(
      ValueError, r"labels has shape \(1, 3\), logits has shape \(1, 2\), want \[batch, list\]"
    ):
      ltr_losses.make_loss_fn("softmax_loss")(_LABELS, [[1.0, 2.0]], {})
    with self.assertRaisesRegex(ValueError, r"logits has shape \(3,\)"):
      ltr_losses.make_loss_fn("softmax_loss")([1.0, 0.0, 2.0], [1.0, 2.0, 3.0], {})


class WeightsTest(LtrTestCase):
  def test_item_weights(self):
    features = {"w": np.float32([[2.0, 3.0, 0.0]])}

    def loss(key):
      return self.loss(key, features=features, weights_feature_name="w")

    # Pair (0, 1) has weight 2; (2, 0) and (2, 1) have weight 0.
    self.assertAllClose(loss("pairwise_hinge_loss"), 4.0)
    self.assertAllClose(loss("mean_squared_loss"), (2 * 0 + 3 * 4) / 2)
    self.assertAllClose(loss("softmax_loss"), 2 * (3.407606 - 1))
    self.assertAllClose(
      loss("sigmoid_cross_entropy_loss"), (2 * 0.3132617 + 3 * 2.126928) / 2, rtol=1e-5
    )

  def test_list_weights(self):
    labels, logits = [[1.0, 0.0], [1.0, 0.0]], [[1.0, 2.0], [0.0, 3.0]]
    for key in _ALL_KEYS:
      parts = [self.loss(key, [labels[i]], [logits[i]], reduction=_REDUCTION.SUM) for i in (0, 1)]
      for weights in ([[3.0], [0.5]], [[2.0], [0.0]]):
        with self.subTest(f"{key} {weights}"):
          loss = self.loss(
            key,
            labels,
            logits,
            features={"w": np.float32(weights)},
            weights_feature_name="w",
            reduction=_REDUCTION.SUM,
          )
          self.assertAllClose(loss, parts[0] * weights[0][0] + parts[1] * weights[1][0], rtol=1e-5)

  def test_list_losses_want_one_weight_for_each_list(self):
    for key in ("list_mle_loss", "approx_ndcg_loss"):
      fn = ltr_losses.make_loss_fn(key, weights_feature_name="w")
      with self.assertRaisesRegex(ValueError, r"weights has shape \(1, 3\), want a scalar or"):
        fn(_LABELS, _LOGITS, {"w": tf.ones([1, 3])})

  def test_weights_of_another_rank(self):
    fn = ltr_losses.make_loss_fn("softmax_loss", weights_feature_name="w")
    with self.assertRaisesRegex(ValueError, r"weights has shape \(3,\), want a scalar"):
      fn(_LABELS, _LOGITS, {"w": tf.ones([3])})

  def test_missing_feature(self):
    fn = ltr_losses.make_loss_fn("softmax_loss", weights_feature_name="w")
    with self.assertRaisesRegex(ValueError, "weights_feature_name is 'w', features has \\['x'\\]"):
      fn(_LABELS, _LOGITS, {"x": tf.ones([1, 1])})

  def test_reductions(self):
    for reduction, expected in (
      (_REDUCTION.SUM, 2.0),
      (_REDUCTION.SUM_BY_NONZERO_WEIGHTS, 2 / 3),
      (_REDUCTION.SUM_OVER_NONZERO_WEIGHTS, 2 / 3),
      (_REDUCTION.SUM_OVER_BATCH_SIZE, 2 / 9),
      (_REDUCTION.MEAN, 2 / 4),
    ):
      with self.subTest(reduction):
        self.assertAllClose(self.loss("pairwise_hinge_loss", reduction=reduction), expected)

  def test_softmax_drops_lists_without_labels(self):
    labels, logits = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [1.0, 5.0]]
    for reduction in (_REDUCTION.SUM, _REDUCTION.SUM_OVER_BATCH_SIZE, _REDUCTION.MEAN):
      loss = self.loss("softmax_loss", labels, logits, reduction=reduction)
      self.assertAllClose(loss, 1.313262)

  def test_no_loss_is_added_to_the_graph(self):
    with tf.Graph().as_default():
      ltr_losses.make_loss_fn(_ALL_KEYS)(_LABELS, _LOGITS, {})
      self.assertEmpty(tf.compat.v1.losses.get_losses())


class MakeLossFnTest(LtrTestCase):
  def test_invalid_reduction(self):
    for reduction in ("unknown", "none", None):
      with self.assertRaisesRegex(ValueError, f"^Invalid reduction: {reduction}$"):
        ltr_losses.make_loss_fn("softmax_loss", reduction=reduction)

  def test_no_keys(self):
    for keys in (None, "", []):
      with self.assertRaisesRegex(ValueError, r"^loss_keys cannot be None or empty\.$"):
        ltr_losses.make_loss_fn(keys)

  def test_sizes_differ(self):
    for keys, weights in (("softmax_loss", [1.0, 2.0]), (["softmax_loss"], []), (_ALL_KEYS, [1.0])):
      with self.assertRaisesRegex(
        ValueError, r"^loss_keys and loss_weights must have the same size\.$"
      ):
        ltr_losses.make_loss_fn(keys, loss_weights=weights)

  def test_one_key_as_a_string_has_one_weight(self):
    self.assertAllClose(self.loss("mean_squared_loss", loss_weights=[3.0]), 5.0)

  def test_invalid_key(self):
    for keys in ("no_loss", ["softmax_loss", "no_loss"]):
      with self.assertRaisesRegex(ValueError, r"^Invalid loss_key: no_loss\.$"):
        ltr_losses.make_loss_fn(keys)

  def test_extra_args(self):
    coarse = self.loss(
      ["approx_ndcg_loss", "mean_squared_loss"], loss_weights=[1, 0], extra_args={"alpha": 0.1}
    )
    self.assertAllClose(coarse, ltr_losses.approx_ndcg_loss(_LABELS, _LOGITS, alpha=0.1), rtol=1e-5)
    self.assertNotAllClose(coarse, self.loss("approx_ndcg_loss"))

  def test_unknown_extra_args(self):
    for extra in ({"alpha": 1.0}, {"weights": 1.0}):
      with self.assertRaisesRegex(ValueError, "extra_args has .*, which no loss of"):
        ltr_losses.make_loss_fn("softmax_loss", extra_args=extra)

  def test_name(self):
    with tf.Graph().as_default():
      loss = ltr_losses.make_loss_fn("softmax_loss", name="my_loss")(_LABELS, _LOGITS, {})
      self.assertStartsWith(loss.name, "my_loss/")

  def test_trains(self):
    scores = tf.Variable([[0.0, 0.0, 0.0]])
    fn = ltr_losses.make_loss_fn("pairwise_logistic_loss")
    for _ in range(20):
      with tf.GradientTape() as tape:
        loss = fn(_LABELS, scores, {})
      scores.assign_sub(tape.gradient(loss, scores))
    self.assertAllEqual(tf.argsort(scores, direction="DESCENDING"), [[2, 0, 1]])


if __name__ == "__main__":
  tf.test.main()
