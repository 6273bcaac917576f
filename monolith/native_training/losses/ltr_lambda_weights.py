"""Lambda weights: how much a pair or a position of a list matters to a ranking metric.

Every class takes labels `[batch, list]` in the order of the scores, highest first: the position is
the rank. They come from "The LambdaLoss Framework for Ranking Metric Optimization" (Wang et al.,
2018).
"""

from __future__ import annotations

import abc

import tensorflow as tf

from monolith.native_training.losses import ltr_ranking_ops
from monolith.native_training.losses.ltr_ranking_ops import ElementFn


def _identity(labels: tf.Tensor) -> tf.Tensor:
  return labels


def _reciprocal(ranks: tf.Tensor) -> tf.Tensor:
  return 1.0 / ranks


def _at_least_one(labels: tf.Tensor) -> tf.Tensor:
  return tf.greater_equal(labels, tf.ones([], labels.dtype))


class LambdaWeight(abc.ABC):
  """Weights of pairs and of single items, from labels sorted by score."""

  @abc.abstractmethod
  def pair_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor | float:
    """Returns the weight of each pair.

    Args:
      sorted_labels: `[batch, list]`.

    Returns:
      `[batch, list, list]`, or something that can be broadcast to it.
    """

  def individual_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor | float:
    """Returns the weight of each item.

    Args:
      sorted_labels: `[batch, list]`.

    Returns:
      `[batch, list]`, or something that can be broadcast to it. Here: the labels.
    """
    return tf.convert_to_tensor(sorted_labels)


class DCGLambdaWeight(LambdaWeight):
  """Weighs a pair of items by the DCG that is gained if they swap places.

  The pair weight is `|gain_i - gain_j| * ((1 - f) * |D(|i - j|) - D(|i - j| + 1)| + f * |D(i) -
  D(j)|)` with ranks i and j and `f = smooth_fraction`: 0 is LambdaLoss, 1 is LambdaMART.
  """

  def __init__(
    self,
    topn: int | None = None,
    gain_fn: ElementFn = _identity,
    rank_discount_fn: ElementFn = _reciprocal,
    normalized: bool = False,
    smooth_fraction: float = 0.0,
  ) -> None:
    """Constructs the weights.

    Args:
      topn: ranks above it count as `topn + 1`: pairs with neither item in the top n weigh nothing.
      gain_fn: gain of a label.
      rank_discount_fn: `D`, factor of a rank; ranks start at 1.
      normalized: whether to divide gains by the best DCG of the list.
      smooth_fraction: `f` above, in [0, 1].

    Raises:
      AssertionError: `smooth_fraction` is outside [0, 1].
    """
    if not 0.0 <= smooth_fraction <= 1.0:
      raise AssertionError(f"smooth_fraction is {smooth_fraction}, want a value in [0, 1]")
    self._topn = topn
    self._gain_fn = gain_fn
    self._rank_discount_fn = rank_discount_fn
    self._normalized = normalized
    self._smooth_fraction = smooth_fraction

  def pair_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    with tf.name_scope("dcg_lambda_weight"):
      gain = self._gain(sorted_labels)
      ranks = ltr_ranking_ops.positions(gain)
      if self._topn is not None:
        ranks = tf.minimum(ranks, tf.cast(self._topn + 1, ranks.dtype))
      distance = _absolute_differences(ranks)
      # Two items of one rank have no discount to exchange; D need not be defined at 0.
      apart = distance > 0
      distance = tf.where(apart, distance, tf.ones_like(distance))
      relative = tf.abs(self._rank_discount_fn(distance) - self._rank_discount_fn(distance + 1))
      relative = tf.where(apart, relative, tf.zeros_like(relative))
      absolute = _absolute_differences(self._rank_discount_fn(ranks))
      smooth = self._smooth_fraction
      return _absolute_differences(gain) * ((1 - smooth) * relative + smooth * absolute)

  def individual_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    """Returns `gain * D(rank)`."""
    with tf.name_scope("dcg_lambda_weight"):
      gain = self._gain(sorted_labels)
      return gain * self._rank_discount_fn(ltr_ranking_ops.positions(gain))

  def _gain(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    labels = ltr_ranking_ops.to_floating(tf.convert_to_tensor(sorted_labels))
    gain = ltr_ranking_ops.valid_gain(labels, self._gain_fn)
    if self._normalized:
      gain *= ltr_ranking_ops.inverse_max_dcg(
        labels, gain_fn=self._gain_fn, rank_discount_fn=self._rank_discount_fn, topn=self._topn
      )
    return gain


class PrecisionLambdaWeight(LambdaWeight):
  """1 for pairs whose swap changes the precision of the top n, else 0."""

  def __init__(self, topn: int, positive_fn: ElementFn = _at_least_one) -> None:
    """Constructs the weights.

    Args:
      topn: how many ranks the precision is about.
      positive_fn: bool, whether a label is positive.
    """
    self._topn = topn
    self._positive_fn = positive_fn

  def pair_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    with tf.name_scope("precision_lambda_weight"):
      labels = ltr_ranking_ops.to_floating(tf.convert_to_tensor(sorted_labels))
      positive = tf.cast(self._positive_fn(labels), labels.dtype)
      in_top = tf.cast(ltr_ranking_ops.positions(labels) <= self._topn, labels.dtype)
      return _absolute_differences(positive) * _absolute_differences(in_top)


class ListMLELambdaWeight(LambdaWeight):
  """Weights of positions, for the position-aware list MLE loss."""

  def __init__(self, rank_discount_fn: ElementFn) -> None:
    """Constructs the weights.

    Args:
      rank_discount_fn: weight of a rank; ranks start at 1.
    """
    self._rank_discount_fn = rank_discount_fn

  def pair_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    """Refuses: pairs have no such weights.

    Raises:
      ValueError: always; only the list MLE loss can use these weights.
    """
    del sorted_labels
    raise ValueError("ListMLELambdaWeight weighs positions; a pairwise loss needs weights of pairs")

  def individual_weights(self, sorted_labels: tf.Tensor) -> tf.Tensor:
    """Returns `rank_discount_fn` of each position, `[batch, list]`."""
    with tf.name_scope("list_mle_lambda_weight"):
      labels = ltr_ranking_ops.to_floating(tf.convert_to_tensor(sorted_labels))
      weights = self._rank_discount_fn(ltr_ranking_ops.positions(labels))
      return tf.ones_like(labels) * weights


class IdentityLambdaWeight(LambdaWeight):
  """1.0 for every pair and every item."""

  def pair_weights(self, sorted_labels: tf.Tensor) -> float:
    del sorted_labels
    return 1.0

  def individual_weights(self, sorted_labels: tf.Tensor) -> float:
    del sorted_labels
    return 1.0


def create_ndcg_lambda_weight(
  topn: int | None = None, smooth_fraction: float = 0.0
) -> DCGLambdaWeight:
  """Returns weights for NDCG: gain `2 ** label - 1`, discount `1 / ln(1 + rank)`."""
  return DCGLambdaWeight(
    topn,
    gain_fn=ltr_ranking_ops.exponential_gain,
    rank_discount_fn=ltr_ranking_ops.log_discount,
    normalized=True,
    smooth_fraction=smooth_fraction,
  )


def create_reciprocal_rank_lambda_weight(
  topn: int | None = None, smooth_fraction: float = 0.0
) -> DCGLambdaWeight:
  """Returns weights like those of MRR: the label is the gain, discount `1 / rank`."""
  return DCGLambdaWeight(topn, normalized=True, smooth_fraction=smooth_fraction)


def create_p_list_mle_lambda_weight(list_size: int) -> ListMLELambdaWeight:
  """Returns weights `2 ** (list_size - rank) - 1` for the position-aware list MLE loss."""
  return ListMLELambdaWeight(lambda rank: ltr_ranking_ops.exponential_gain(list_size - rank))


def _absolute_differences(values: tf.Tensor) -> tf.Tensor:
  """Returns `|v_i - v_j|`, `[batch, list, list]`."""
  return tf.abs(values[:, :, tf.newaxis] - values[:, tf.newaxis, :])
