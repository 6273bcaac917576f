"""Metrics of an evaluation, collected batch by batch in local variables of the graph.

TensorFlow's own AUC knows 200 thresholds between 0 and 1, too few for click rates near 0: here
65,536 buckets of the logit keep the order of nearly all predictions.
"""

from __future__ import annotations

import tensorflow as tf

Metric = tuple[tf.Tensor, tf.Operation]

NUM_BUCKETS = 1 << 16
# Probabilities beyond this logit, nearer than 2e-9 to 0 or 1, are not told apart.
MAX_LOGIT = 20.0
EPSILON = 1e-7


def classification_metrics(labels: tf.Tensor, predictions: tf.Tensor) -> dict[str, Metric]:
  """Returns the metrics of a binary target.

  Args:
    labels: 0 or 1 (more than 0.5 counts as 1) per example, of any shape.
    predictions: as many probabilities.

  Returns:
    `auc`, `log_loss` (the mean per example) and `calibration` (the sum of the predictions over that
    of the labels, 1 for a model that is right on average): each a value and its update.
  """
  labels, predictions = _flatten(labels, predictions)
  is_positive = tf.cast(labels > 0.5, predictions.dtype)
  clipped = tf.clip_by_value(predictions, EPSILON, 1 - EPSILON)
  log_losses = -tf.where(labels > 0.5, tf.math.log(clipped), tf.math.log(1 - clipped))
  return {
    "auc": auc(labels, predictions),
    "log_loss": tf.compat.v1.metrics.mean(log_losses),
    "calibration": _ratio(tf.reduce_sum(predictions), tf.reduce_sum(is_positive), "calibration"),
  }


def regression_metrics(labels: tf.Tensor, predictions: tf.Tensor) -> dict[str, Metric]:
  """Returns `mse` and `mae` of a target that is a number: each a value and its update."""
  labels, predictions = _flatten(labels, predictions)
  error = predictions - labels
  return {
    "mse": tf.compat.v1.metrics.mean(tf.square(error)),
    "mae": tf.compat.v1.metrics.mean(tf.abs(error)),
  }


def auc(labels: tf.Tensor, predictions: tf.Tensor) -> Metric:
  """Returns the area under the ROC curve of all examples so far, and its update.

  Args:
    labels: `[batch]`; more than 0.5 is positive.
    predictions: `[batch]`, probabilities.

  Returns:
    The value, 0 while one class is missing; ties count half.
  """
  with tf.name_scope("auc"):
    histograms = tf.compat.v1.get_variable(
      tf.compat.v1.get_default_graph().unique_name("auc_histograms"),
      shape=[2, NUM_BUCKETS],
      dtype=tf.float64,
      initializer=tf.compat.v1.zeros_initializer(),
      trainable=False,
      collections=[
        tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
        tf.compat.v1.GraphKeys.METRIC_VARIABLES,
      ],
      use_resource=True,
      partitioner=None,
    )
    tiny = tf.constant(1e-12, tf.float64)
    p = tf.clip_by_value(tf.cast(predictions, tf.float64), tiny, 1 - tiny)
    logit = tf.clip_by_value(tf.math.log(p) - tf.math.log1p(-p), -MAX_LOGIT, MAX_LOGIT)
    bucket = tf.cast((logit + MAX_LOGIT) * ((NUM_BUCKETS - 1) / (2 * MAX_LOGIT)), tf.int32)
    index = tf.stack([tf.cast(labels > 0.5, tf.int32), bucket], axis=1)
    update = histograms.assign_add(
      tf.scatter_nd(index, tf.ones_like(p), [2, NUM_BUCKETS]), read_value=False
    )
    negatives, positives = tf.unstack(histograms.read_value())
    below = tf.cumsum(negatives, exclusive=True) + negatives / 2
    pairs = tf.reduce_sum(positives) * tf.reduce_sum(negatives)
    value = tf.math.divide_no_nan(tf.reduce_sum(positives * below), pairs)
    return tf.cast(value, tf.float32), update


def _flatten(labels: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  return (
    tf.reshape(tf.cast(labels, tf.float32), [-1]),
    tf.reshape(tf.cast(predictions, tf.float32), [-1]),
  )


def _ratio(numerator: tf.Tensor, denominator: tf.Tensor, name: str) -> Metric:
  sums = tf.compat.v1.get_variable(
    tf.compat.v1.get_default_graph().unique_name(name),
    shape=[2],
    dtype=tf.float64,
    initializer=tf.compat.v1.zeros_initializer(),
    trainable=False,
    collections=[
      tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
      tf.compat.v1.GraphKeys.METRIC_VARIABLES,
    ],
    use_resource=True,
    partitioner=None,
  )
  update = sums.assign_add(
    tf.cast(tf.stack([numerator, denominator]), tf.float64), read_value=False
  )
  value = sums.read_value()
  return tf.cast(tf.math.divide_no_nan(value[0], value[1]), tf.float32), update
