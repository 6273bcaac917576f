"""Softmax over the items of a batch, corrected for how often they occur."""

from __future__ import annotations

import tensorflow as tf


def batch_softmax_loss(
  query: tf.Tensor,
  item: tf.Tensor,
  item_step_interval: tf.Tensor,
  r: tf.Tensor | float,
  normalize: bool = True,
  temperature: float = 1.0,
) -> tf.Tensor:
  """Cross entropy of finding each query's own item among all items of the batch.

  Popular items are often in a batch by chance; each score is corrected by the log of how often its
  item occurs, which is once in `item_step_interval` steps.

  Args:
    query: float `[B, k]`.
    item: float `[B, k]`, the item of each query.
    item_step_interval: `[B]`, steps between two occurrences of the item; less than 1 counts as 1.
    r: weight of each query, `[B]` or a scalar.
    normalize: whether to make all vectors of length 1 first.
    temperature: the scores are divided by it.

  Returns:
    A scalar, the weighted sum over the batch.

  Raises:
    ValueError: `temperature` is not positive.
  """
  if temperature <= 0:
    raise ValueError(f"temperature should be positive, while got {temperature}")
  query, item = tf.convert_to_tensor(query), tf.convert_to_tensor(item)
  if normalize:
    query = tf.linalg.l2_normalize(query, axis=1)
    item = tf.linalg.l2_normalize(item, axis=1)
  interval = tf.maximum(tf.cast(item_step_interval, query.dtype), 1)
  scores = tf.matmul(query, item, transpose_b=True) / temperature + tf.math.log(interval)
  # Not by way of the exponentials, which overflow at low temperatures.
  log_likelihood = tf.linalg.diag_part(scores) - tf.reduce_logsumexp(scores, axis=1)
  return -tf.reduce_sum(tf.cast(r, query.dtype) * log_likelihood)
