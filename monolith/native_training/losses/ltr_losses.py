"""Learning to rank: pointwise, pairwise and listwise losses over lists of items.

Labels and logits are `[batch, list]`; an item with a negative label is padding and never counts.
`make_loss_fn` builds a loss from keys:

    loss_fn = make_loss_fn(
      [RankingLossKey.PAIRWISE_LOGISTIC_LOSS, RankingLossKey.SOFTMAX_LOSS],
      loss_weights=[0.5, 1.0],
      lambda_weight=create_ndcg_lambda_weight(topn=10),
    )
    loss = loss_fn(labels, logits, features)

How lists are sorted is in `ltr_ranking_ops`, the lambda weights are in `ltr_lambda_weights`; their
public names are also names of this module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training.losses.ltr_lambda_weights import (
  DCGLambdaWeight,
  IdentityLambdaWeight,
  LambdaWeight,
  ListMLELambdaWeight,
  PrecisionLambdaWeight,
  create_ndcg_lambda_weight,
  create_p_list_mle_lambda_weight,
  create_reciprocal_rank_lambda_weight,
)
from monolith.native_training.losses.ltr_ranking_ops import (
  approx_ranks,
  exponential_gain,
  get_batch_idx_size,
  inverse_max_dcg,
  label_valid_fn,
  log_discount,
  organize_valid_indices,
  reshape_first_ndims,
  shuffle_valid_indices,
  sort_by_scores,
  to_floating,
)

__all__ = [
  "DCGLambdaWeight",
  "IdentityLambdaWeight",
  "LambdaWeight",
  "ListMLELambdaWeight",
  "PrecisionLambdaWeight",
  "RankingLossKey",
  "approx_ndcg_loss",
  "approx_ranks",
  "create_ndcg_lambda_weight",
  "create_p_list_mle_lambda_weight",
  "create_reciprocal_rank_lambda_weight",
  "get_batch_idx_size",
  "inverse_max_dcg",
  "label_valid_fn",
  "list_mle_loss",
  "make_loss_fn",
  "mean_squared_loss",
  "organize_valid_indices",
  "pairwise_hinge_loss",
  "pairwise_logistic_loss",
  "pairwise_soft_zero_one_loss",
  "reshape_first_ndims",
  "shuffle_valid_indices",
  "sigmoid_cross_entropy_loss",
  "softmax_loss",
  "sort_by_scores",
]

Reduction = tf.compat.v1.losses.Reduction
LossFn = Callable[[tf.Tensor, tf.Tensor, Mapping[str, tf.Tensor]], tf.Tensor]

# The value that softmax puts for the exponential of an invalid logit.
_EPSILON = 1e-10
# How far below the lowest valid logit `approx_ndcg_loss` puts invalid ones.
_LOGIT_GAP = 1e3


class RankingLossKey:
  """Names of the losses that `make_loss_fn` knows."""

  PAIRWISE_HINGE_LOSS = "pairwise_hinge_loss"
  PAIRWISE_LOGISTIC_LOSS = "pairwise_logistic_loss"
  PAIRWISE_SOFT_ZERO_ONE_LOSS = "pairwise_soft_zero_one_loss"
  SOFTMAX_LOSS = "softmax_loss"
  SIGMOID_CROSS_ENTROPY_LOSS = "sigmoid_cross_entropy_loss"
  MEAN_SQUARED_LOSS = "mean_squared_loss"
  LIST_MLE_LOSS = "list_mle_loss"
  APPROX_NDCG_LOSS = "approx_ndcg_loss"


def make_loss_fn(
  loss_keys: str | Sequence[str],
  loss_weights: Sequence[float] | None = None,
  weights_feature_name: str | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
  name: str | None = None,
  seed: int | None = None,
  extra_args: Mapping[str, Any] | None = None,
) -> LossFn:
  """Makes a loss function out of one or more ranking losses.

  Args:
    loss_keys: one value of `RankingLossKey`, or several.
    loss_weights: factor of each of `loss_keys`; None: 1 for all.
    weights_feature_name: key in `features` of the weights, `[batch, 1]` for lists or
      `[batch, list]` for items; losses of whole lists (`list_mle_loss`, `approx_ndcg_loss`) take
      weights of lists only.
    lambda_weight: weights of the pairs for pairwise losses; a `DCGLambdaWeight` also replaces the
      labels of `softmax_loss`, a `ListMLELambdaWeight` weighs the positions of `list_mle_loss`.
      The other losses have no use for it.
    reduction: one of `tf.compat.v1.losses.Reduction` but not `NONE`.
    name: scope of the ops.
    seed: seed of losses that order ties at random.
    extra_args: more arguments of the losses, such as `alpha` of `approx_ndcg_loss`; each loss gets
      those that it has.

  Returns:
    `fn(labels, logits, features)`: the weighted sum of the losses, a scalar.

  Raises:
    ValueError: an argument is not valid.
  """
  if reduction not in Reduction.all() or reduction == Reduction.NONE:
    raise ValueError(f"Invalid reduction: {reduction}")
  if not loss_keys:
    raise ValueError("loss_keys cannot be None or empty.")
  keys = [loss_keys] if isinstance(loss_keys, str) else list(loss_keys)
  factors = [1.0] * len(keys) if loss_weights is None else list(loss_weights)
  if len(keys) != len(factors):
    raise ValueError("loss_keys and loss_weights must have the same size.")
  for key in keys:
    if key not in _LOSSES:
      raise ValueError(f"Invalid loss_key: {key}.")
  arguments = {"lambda_weight": lambda_weight, "seed": seed, **(extra_args or {})}
  accepted = [_accepted_arguments(_LOSSES[key], arguments) for key in keys]
  unknown = set(extra_args or {}).difference(*accepted)
  if unknown:
    raise ValueError(f"extra_args has {sorted(unknown)}, which no loss of {keys} takes")

  def loss_fn(labels: tf.Tensor, logits: tf.Tensor, features: Mapping[str, tf.Tensor]) -> tf.Tensor:
    with tf.name_scope(name or "ranking_loss"):
      weights = None
      if weights_feature_name is not None:
        if weights_feature_name not in features:
          raise ValueError(
            f"weights_feature_name is {weights_feature_name!r}, features has {sorted(features)}"
          )
        weights = features[weights_feature_name]
      losses = []
      for key, factor, kwargs in zip(keys, factors, accepted):
        loss = _LOSSES[key](labels, logits, weights=weights, reduction=reduction, **kwargs)
        losses.append(factor * loss)
      return tf.add_n(losses)

  return loss_fn


def pairwise_hinge_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Computes `relu(1 - (s_i - s_j))` over pairs with `l_i > l_j`.

  Arguments as in `make_loss_fn`.
  """
  with tf.name_scope("pairwise_hinge_loss"):
    return _pairwise_loss(
      lambda s: tf.nn.relu(1 - s), labels, logits, weights, lambda_weight, reduction
    )


def pairwise_logistic_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Computes `log(1 + exp(-(s_i - s_j)))` over pairs with `l_i > l_j`.

  Arguments as in `make_loss_fn`.
  """
  with tf.name_scope("pairwise_logistic_loss"):
    return _pairwise_loss(
      lambda s: tf.nn.softplus(-s), labels, logits, weights, lambda_weight, reduction
    )


def pairwise_soft_zero_one_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Computes `sigmoid(-(s_i - s_j))` over pairs with `l_i > l_j`.

  Arguments as in `make_loss_fn`.
  """
  with tf.name_scope("pairwise_soft_zero_one_loss"):
    return _pairwise_loss(
      lambda s: tf.sigmoid(-s), labels, logits, weights, lambda_weight, reduction
    )


def softmax_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Cross entropy between the labels of a list, made a distribution, and its softmax.

  A list weighs as much as its weighted labels add up to; lists where that is 0 are left out. A
  `DCGLambdaWeight` replaces the labels by its individual weights. Arguments as in `make_loss_fn`.
  """
  with tf.name_scope("softmax_loss"):
    labels, logits, is_valid = _prepare(labels, logits)
    items = _broadcast_weights(weights, labels)
    if isinstance(lambda_weight, DCGLambdaWeight):
      labels, logits, items, is_valid = _sort_by_logits(labels, logits, items, is_valid)
      labels = lambda_weight.individual_weights(labels)
    # Stops here for the sake of weights that are trained elsewhere.
    targets = tf.stop_gradient(tf.where(is_valid, labels * items, tf.zeros_like(labels)))
    totals = tf.reduce_sum(targets, axis=1)
    logits = tf.where(is_valid, logits, tf.zeros_like(logits) + math.log(_EPSILON))
    kept = totals > 0
    totals = tf.boolean_mask(totals, kept)
    losses = tf.nn.softmax_cross_entropy_with_logits(
      labels=tf.boolean_mask(targets, kept) / totals[:, tf.newaxis],
      logits=tf.boolean_mask(logits, kept),
    )
    return _reduce(losses, totals, reduction)


def sigmoid_cross_entropy_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Computes the sigmoid cross entropy of each item; arguments as in `make_loss_fn`."""
  with tf.name_scope("sigmoid_cross_entropy_loss"):
    labels, logits, is_valid = _prepare(labels, logits)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(
      labels=tf.where(is_valid, labels, tf.zeros_like(labels)), logits=logits
    )
    return _pointwise_loss(losses, weights, is_valid, reduction)


def mean_squared_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
  """Computes `(label - logit) ** 2` of each item; arguments as in `make_loss_fn`."""
  with tf.name_scope("mean_squared_loss"):
    labels, logits, is_valid = _prepare(labels, logits)
    return _pointwise_loss(tf.math.squared_difference(labels, logits), weights, is_valid, reduction)


def list_mle_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  lambda_weight: LambdaWeight | None = None,
  reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
  seed: int | None = None,
) -> tf.Tensor:
  """Minus the log-likelihood of the order by label under the Plackett-Luce model of the logits.

  Items with equal labels come in random order. A `ListMLELambdaWeight` weighs the positions.
  Arguments as in `make_loss_fn`; weights are of lists.
  """
  with tf.name_scope("list_mle_loss"):
    labels, logits, is_valid = _prepare(labels, logits)
    shuffled = shuffle_valid_indices(is_valid, seed=seed)
    # After the shuffle the sort, which is stable, leaves ties in random order.
    labels, logits, is_valid = (tf.gather_nd(x, shuffled) for x in (labels, logits, is_valid))
    scores = tf.where(is_valid, labels, -tf.ones_like(labels))
    labels, logits, is_valid = sort_by_scores(scores, [labels, logits, is_valid])
    # Valid items are in front: an item that starts a tail finds only padding behind the others.
    masked = tf.where(is_valid, logits, tf.fill(tf.shape(logits), logits.dtype.min))
    tails = tf.math.cumulative_logsumexp(masked, axis=1, reverse=True)
    losses = tf.where(is_valid, tails - logits, tf.zeros_like(logits))
    if isinstance(lambda_weight, ListMLELambdaWeight):
      losses *= lambda_weight.individual_weights(labels)
    return _reduce(tf.reduce_sum(losses, axis=1), _list_weights(weights, logits), reduction)


def approx_ndcg_loss(
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None = None,
  reduction: str = Reduction.SUM,
  alpha: float = 10.0,
) -> tf.Tensor:
  """Minus the NDCG of each list at the ranks of `approx_ranks`.

  Arguments as in `make_loss_fn`; weights are of lists, `alpha` is that of `approx_ranks`.
  """
  with tf.name_scope("approx_ndcg_loss"):
    labels, logits, is_valid = _prepare(labels, logits)
    labels = tf.where(is_valid, labels, tf.zeros_like(labels))
    lowest = tf.reduce_min(logits, axis=1, keepdims=True)
    logits = tf.where(is_valid, logits, tf.zeros_like(logits) + lowest - _LOGIT_GAP)
    discount = log_discount(approx_ranks(logits, alpha=alpha))
    dcg = tf.reduce_sum(exponential_gain(labels) * discount, axis=1)
    losses = -dcg * tf.squeeze(inverse_max_dcg(labels), axis=-1)
    return _reduce(losses, _list_weights(weights, logits), reduction)


_LOSSES: dict[str, Callable[..., tf.Tensor]] = {
  RankingLossKey.PAIRWISE_HINGE_LOSS: pairwise_hinge_loss,
  RankingLossKey.PAIRWISE_LOGISTIC_LOSS: pairwise_logistic_loss,
  RankingLossKey.PAIRWISE_SOFT_ZERO_ONE_LOSS: pairwise_soft_zero_one_loss,
  RankingLossKey.SOFTMAX_LOSS: softmax_loss,
  RankingLossKey.SIGMOID_CROSS_ENTROPY_LOSS: sigmoid_cross_entropy_loss,
  RankingLossKey.MEAN_SQUARED_LOSS: mean_squared_loss,
  RankingLossKey.LIST_MLE_LOSS: list_mle_loss,
  RankingLossKey.APPROX_NDCG_LOSS: approx_ndcg_loss,
}


def _accepted_arguments(
  loss: Callable[..., tf.Tensor], arguments: Mapping[str, Any]
) -> dict[str, Any]:
  parameters = inspect.signature(loss).parameters
  # `extra_args` may not set the arguments that `make_loss_fn` sets itself.
  reserved = ("labels", "logits", "weights", "reduction")
  return {k: v for k, v in arguments.items() if k in parameters and k not in reserved}


def _prepare(labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Checks and converts the inputs of a loss.

  Returns:
    Labels in the dtype of the logits, logits, validity, all `[batch, list]`. Invalid logits are 0,
    so that not even an infinite one gets into a value or gradient.
  """
  logits = to_floating(tf.convert_to_tensor(logits))
  labels = tf.cast(labels, logits.dtype)
  if logits.shape.rank not in (None, 2) or not labels.shape.is_compatible_with(logits.shape):
    raise ValueError(
      f"labels has shape {labels.shape}, logits has shape {logits.shape}, want [batch, list]"
    )
  is_valid = label_valid_fn(labels)
  return labels, tf.where(is_valid, logits, tf.zeros_like(logits)), is_valid


def _broadcast_weights(weights: tf.Tensor | float | None, lists: tf.Tensor) -> tf.Tensor:
  """Returns weights of items, `[batch, list]`, from weights that broadcast to it or None."""
  if weights is None:
    return tf.ones_like(lists)
  weights = tf.cast(weights, lists.dtype)
  if weights.shape.rank not in (None, 0, 2):
    raise ValueError(
      f"weights has shape {weights.shape}, want a scalar, [batch, 1] or {lists.shape}"
    )
  return tf.broadcast_to(weights, tf.shape(lists))


def _list_weights(weights: tf.Tensor | float | None, lists: tf.Tensor) -> tf.Tensor:
  """Returns weights of lists, `[batch]`, from a scalar, `[batch, 1]` or None."""
  if weights is None:
    return tf.ones_like(lists[:, 0])
  weights = tf.cast(weights, lists.dtype)
  if not (weights.shape.rank == 0 or weights.shape.is_compatible_with([None, 1])):
    raise ValueError(
      f"weights has shape {weights.shape}, want a scalar or [batch, 1]: one weight for each list"
    )
  weights = tf.stop_gradient(weights)
  return tf.broadcast_to(tf.reshape(weights, [-1]), tf.shape(lists)[:1])


def _sort_by_logits(
  labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor, is_valid: tf.Tensor
) -> list[tf.Tensor]:
  """Sorts the four `[batch, list]` tensors by descending logits, invalid items last."""
  lowest = tf.fill(tf.shape(logits), logits.dtype.min)
  scores = tf.where(is_valid, logits, lowest)
  return sort_by_scores(scores, [labels, logits, weights, is_valid])


def _pairwise_loss(
  loss_fn: Callable[[tf.Tensor], tf.Tensor],
  labels: tf.Tensor,
  logits: tf.Tensor,
  weights: tf.Tensor | float | None,
  lambda_weight: LambdaWeight | None,
  reduction: str,
) -> tf.Tensor:
  """Applies `loss_fn` to `s_i - s_j` of the pairs whose first item has the higher label."""
  labels, logits, is_valid = _prepare(labels, logits)
  items = _broadcast_weights(weights, labels)
  labels, logits, items, is_valid = _sort_by_logits(labels, logits, items, is_valid)
  label_pairs = labels[:, :, tf.newaxis] - labels[:, tf.newaxis, :]
  ordered = (label_pairs > 0) & is_valid[:, :, tf.newaxis] & is_valid[:, tf.newaxis, :]
  pair_weights = items[:, :, tf.newaxis] * tf.cast(ordered, labels.dtype)
  if lambda_weight is None:
    pair_weights *= tf.abs(label_pairs)
  else:
    # Lambda weights get smaller with longer lists.
    pair_weights *= tf.cast(lambda_weight.pair_weights(labels), labels.dtype)
    pair_weights *= tf.cast(tf.shape(labels)[1], labels.dtype)
  losses = loss_fn(logits[:, :, tf.newaxis] - logits[:, tf.newaxis, :])
  return _reduce(losses, tf.stop_gradient(pair_weights), reduction)


def _pointwise_loss(
  losses: tf.Tensor, weights: tf.Tensor | float | None, is_valid: tf.Tensor, reduction: str
) -> tf.Tensor:
  weights = _broadcast_weights(weights, losses) * tf.cast(is_valid, losses.dtype)
  return _reduce(losses, tf.stop_gradient(weights), reduction)


def _reduce(losses: tf.Tensor, weights: tf.Tensor, reduction: str) -> tf.Tensor:
  """Reduces losses to a scalar, as `tf.compat.v1.losses.compute_weighted_loss` does.

  It keeps the dtype, where that goes by way of float32, and adds nothing to a collection: a part of
  a weighted sum is not a loss of the graph.
  """
  total = tf.reduce_sum(losses * weights)
  if reduction == Reduction.SUM:
    return total
  if reduction == Reduction.MEAN:
    count = tf.reduce_sum(weights)
  elif reduction == Reduction.SUM_OVER_BATCH_SIZE:
    count = tf.cast(tf.size(losses), losses.dtype)
  elif reduction == Reduction.SUM_BY_NONZERO_WEIGHTS:
    count = tf.cast(tf.math.count_nonzero(weights), losses.dtype)
  else:
    raise ValueError(f"Invalid reduction: {reduction}")
  return tf.math.divide_no_nan(total, count)
