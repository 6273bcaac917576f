"""Tests of the ranking losses."""

import math

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training.losses import ltr_losses
from tests.native_training.losses.ltr_testing import LABELS as _LABELS
from tests.native_training.losses.ltr_testing import LOGITS as _LOGITS
from tests.native_training.losses.ltr_testing import LtrTestCase

pytestmark = pytest.mark.thorough

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
