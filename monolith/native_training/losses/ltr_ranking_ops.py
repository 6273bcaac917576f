"""Prepares ranking losses: sorts lists, groups a batch into lists, computes ranks and ideal DCG.

Lists are rows of `[batch, list]` tensors. A negative label marks an item that is padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

# A function of labels or ranks that works on every element.
ElementFn = Callable[[tf.Tensor], tf.Tensor]

# The label of padding that `get_batch_idx_size` writes: just enough to be invalid.
_PADDING_LABEL = -1e-6


def exponential_gain(labels: tf.Tensor) -> tf.Tensor:
  """Returns `2 ** label - 1`, the usual gain of DCG."""
  return tf.math.expm1(labels * math.log(2.0))


def log_discount(ranks: tf.Tensor) -> tf.Tensor:
  """Returns `1 / ln(1 + rank)`, the usual discount of DCG; ranks start at 1."""
  return 1.0 / tf.math.log1p(ranks)


def label_valid_fn(labels: tf.Tensor) -> tf.Tensor:
  """Tells which items are real.

  Args:
    labels: numbers of any shape.

  Returns:
    bool of the same shape: whether the label is at least 0.
  """
  labels = tf.convert_to_tensor(labels)
  return tf.greater_equal(labels, tf.zeros([], labels.dtype))


def sort_by_scores(
  scores: tf.Tensor, features_list: Sequence[tf.Tensor], topn: int | tf.Tensor | None = None
) -> list[tf.Tensor]:
  """Sorts the items of each list by score, highest first; equal scores keep their order.

  Args:
    scores: `[batch, list]`.
    features_list: tensors `[batch, list, ...]` to put into that order.
    topn: how many items of each list to keep; None, or more than there are, keeps all.

  Returns:
    The tensors of `features_list` in order, each `[batch, min(topn, list), ...]`.

  Raises:
    ValueError: `scores` is not a matrix.
  """
  with tf.name_scope("sort_by_scores"):
    scores = _matrix(scores, "scores")
    size = tf.shape(scores)[1]
    topn = size if topn is None else tf.minimum(tf.cast(topn, tf.int32), size)
    _, indices = tf.math.top_k(scores, topn, sorted=True)
    return [tf.gather(feature, indices, axis=1, batch_dims=1) for feature in features_list]


def organize_valid_indices(
  is_valid: tf.Tensor, shuffle: bool = True, seed: int | None = None
) -> tf.Tensor:
  """Returns indices that bring the valid items of each list to its front.

  Args:
    is_valid: bool `[batch, list]`.
    shuffle: whether valid items come in random order; otherwise they keep theirs.
    seed: seed of the shuffle.

  Returns:
    int32 `[batch, list, 2]`, to be used with `tf.gather_nd`. Invalid items keep their order.

  Raises:
    ValueError: `is_valid` is not a matrix.
  """
  with tf.name_scope("organize_valid_indices"):
    is_valid = tf.cast(_matrix(is_valid, "is_valid"), tf.bool)
    shape = tf.shape(is_valid)
    rows, columns = shape[0], shape[1]
    # Valid items sort by a key in [0, 1) and the others after all of them; the sort is stable.
    keys = tf.random.uniform(shape, seed=seed) if shuffle else tf.zeros(shape)
    order = tf.argsort(tf.where(is_valid, keys, tf.fill(shape, 2.0)), axis=1, stable=True)
    row = tf.tile(tf.range(rows)[:, tf.newaxis], tf.stack([1, columns]))
    return tf.stack([row, order], axis=2)


def shuffle_valid_indices(is_valid: tf.Tensor, seed: int | None = None) -> tf.Tensor:
  """Orders like `organize_valid_indices`, with the valid items in random order."""
  return organize_valid_indices(is_valid, shuffle=True, seed=seed)


def reshape_first_ndims(
  tensor: tf.Tensor | tf.SparseTensor, first_ndims: int, new_shape: Sequence[int] | tf.Tensor
) -> tf.Tensor | tf.SparseTensor:
  """Gives the leading dimensions of a tensor another shape.

  Args:
    tensor: dense or sparse.
    first_ndims: how many leading dimensions to replace.
    new_shape: what to put there; one of them may be -1.

  Returns:
    A tensor of the same kind of shape `new_shape + tensor.shape[first_ndims:]`.

  Raises:
    ValueError: `tensor` is known to have fewer dimensions.
  """
  sparse = isinstance(tensor, (tf.SparseTensor, tf.compat.v1.SparseTensorValue))
  if sparse:
    tensor = tf.SparseTensor.from_value(tensor)
  else:
    tensor = tf.convert_to_tensor(tensor)
  rank = tensor.shape.rank
  if first_ndims < 0 or (rank is not None and rank < first_ndims):
    raise ValueError(f"tensor has {rank} dimensions, cannot reshape the first {first_ndims}")
  if sparse:
    rest = tensor.dense_shape[first_ndims:]
    shape = tf.concat([tf.cast(new_shape, rest.dtype), rest], axis=0)
    return tf.sparse.reshape(tensor, shape)
  rest = tf.shape(tensor)[first_ndims:]
  return tf.reshape(tensor, tf.concat([tf.cast(new_shape, rest.dtype), rest], axis=0))


def approx_ranks(logits: tf.Tensor, alpha: float = 10.0) -> tf.Tensor:
  """Returns ranks that have a gradient: `sum_j sigmoid(alpha * (s_j - s_i)) + 0.5`.

  Args:
    logits: float `[batch, list]`.
    alpha: the larger, the closer to the true ranks.

  Returns:
    `[batch, list]` in the dtype of `logits`, 1 for the highest score. Each item counts half of
    itself in the sum, which makes the other half of that 1.
  """
  with tf.name_scope("approx_ranks"):
    logits = _matrix(logits, "logits")
    pairs = logits[:, tf.newaxis, :] - logits[:, :, tf.newaxis]
    return tf.reduce_sum(tf.sigmoid(alpha * pairs), axis=2) + 0.5


def inverse_max_dcg(
  labels: tf.Tensor,
  gain_fn: ElementFn = exponential_gain,
  rank_discount_fn: ElementFn = log_discount,
  topn: int | None = None,
) -> tf.Tensor:
  """Returns one over the DCG of each list in its best order.

  Args:
    labels: `[batch, list]`; items with a negative label gain nothing.
    gain_fn: gain of a label.
    rank_discount_fn: factor of a rank; ranks start at 1.
    topn: the last rank that counts; None counts all.

  Returns:
    `[batch, 1]`, 0 where the DCG is 0.
  """
  with tf.name_scope("inverse_max_dcg"):
    labels = to_floating(_matrix(labels, "labels"))
    (ideal,) = sort_by_scores(labels, [labels], topn=topn)
    gain = valid_gain(ideal, gain_fn)
    dcg = tf.reduce_sum(gain * rank_discount_fn(positions(ideal)), axis=1, keepdims=True)
    return tf.where(dcg > 0, tf.math.divide_no_nan(tf.ones_like(dcg), dcg), tf.zeros_like(dcg))


def get_batch_idx_size(
  logits: tf.Tensor, labels: tf.Tensor, rank_id: tf.Tensor, name_prefix: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
  """Groups a flat batch into lists: items with the same `rank_id` make one.

  Row i of the results is the list of item i, with every other item of the batch as padding.
  Gather the rows at the returned first indices to have each list once:

      rank_id [7, 7, 9], labels [1, 0, 2]  ->  labels  [[1, 0, -], [1, 0, -], [-, -, 2]]
                                               indices [0, 2]

  Args:
    logits: float, B elements, `[B]` or `[B, 1]`.
    labels: B elements.
    rank_id: B elements of any dtype that can be compared.
    name_prefix: what the names of the ops begin with.

  Returns:
    `logits` `[B, B]`, 0 in padding; `labels` `[B, B]` in the dtype of the logits, -1e-6 in padding
    (so that it is invalid) and otherwise unchanged; a mask `[B, B]` of the same dtype, 1 for
    items and 0 for padding; int32, the index of the first item of each list, ascending.
  """
  with tf.name_scope(f"{name_prefix}_batch_idx_size"):
    logits = tf.reshape(to_floating(tf.convert_to_tensor(logits)), [-1])
    labels = tf.reshape(tf.cast(labels, logits.dtype), [-1])
    rank_id = tf.reshape(tf.convert_to_tensor(rank_id), [-1])
    same = tf.equal(rank_id[:, tf.newaxis], rank_id[tf.newaxis, :])
    groups, group = tf.unique(rank_id)
    first_indices = tf.math.unsorted_segment_min(
      tf.range(tf.size(rank_id)), group, num_segments=tf.size(groups)
    )
    zeros = tf.zeros_like(same, dtype=logits.dtype)
    return (
      tf.where(same, logits[tf.newaxis, :], zeros),
      tf.where(same, labels[tf.newaxis, :], zeros + _PADDING_LABEL),
      tf.cast(same, logits.dtype),
      first_indices,
    )


def positions(lists: tf.Tensor) -> tf.Tensor:
  """Returns ranks 1, 2, ... of sorted lists `[batch, list]`: `[1, list]` in their dtype."""
  return tf.cast(tf.range(tf.shape(lists)[1])[tf.newaxis, :] + 1, lists.dtype)


def valid_gain(labels: tf.Tensor, gain_fn: ElementFn) -> tf.Tensor:
  """Returns `gain_fn(labels)`, 0 for invalid items."""
  is_valid = label_valid_fn(labels)
  gain = gain_fn(tf.where(is_valid, labels, tf.zeros_like(labels)))
  return tf.where(is_valid, gain, tf.zeros_like(gain))


def to_floating(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor itself if it has a floating dtype, else as float32."""
  return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float32)


def _matrix(tensor: tf.Tensor, name: str) -> tf.Tensor:
  tensor = tf.convert_to_tensor(tensor)
  if tensor.shape.rank not in (None, 2):
    raise ValueError(f"{name} has shape {tensor.shape}, want [batch, list]")
  return tensor
