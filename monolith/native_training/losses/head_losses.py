"""Loss and prediction of one head of a model."""

from __future__ import annotations

import math

import tensorflow as tf

from monolith.native_training import graph_estimator
from monolith.native_training.layers.logit_correction import LogitCorrection

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT


def get_sigmoid_loss_and_pred(
  name: str,
  logits: tf.Tensor,
  label: tf.Tensor | None,
  batch_size: int | tf.Tensor | None,
  sample_rate: tf.Tensor | float | None = 1.0,
  sample_bias: bool = False,
  mode: str = _TRAIN,
  instance_weight: tf.Tensor | None = None,
  mask: tf.Tensor | None = None,
  logit_clip_threshold: float | None = None,
  predict_before_correction: bool = True,
) -> tuple[tf.Tensor | None, tf.Tensor]:
  """Returns loss and prediction of a binary target.

  Args:
    name: the head's name; the tensors are `<name>_sigmoid_loss` and `<name>_sigmoid_pred`.
    logits: one per example.
    label: 0 or 1 per example; not needed to predict.
    batch_size: unused, it is that of `logits`.
    sample_rate: the share of such examples that is in the data, for all or for each.
    sample_bias: whether the logits are those of a model that is biased by the sampling.
    mode: a `graph_estimator.ModeKeys` mode.
    instance_weight: weight of each example in the loss.
    mask: bool, the examples that count.
    logit_clip_threshold: between 0 and 1; corrected logits are clipped to what has a probability
      between it and one minus it.
    predict_before_correction: whether the prediction ignores the sample rate.

  Returns:
    The sum of the losses, `None` to predict; and the probabilities `[batch]`.

  Raises:
    AssertionError: `logit_clip_threshold` is out of range.
    ValueError: there is no label, and the mode is not to predict.
  """
  del batch_size
  logits = tf.reshape(logits, [-1])
  pred_name, loss_name = f"{name}_sigmoid_pred", f"{name}_sigmoid_loss"
  if mode == _PREDICT:
    return None, tf.nn.sigmoid(logits, name=pred_name)
  _check_label(name, label, mode)
  if sample_rate is None:
    sample_rate = 1.0
  if isinstance(sample_rate, (int, float)):
    sample_rate = tf.fill(tf.shape(logits), float(sample_rate))
  biased = LogitCorrection.get_sample_logits(logits, tf.reshape(sample_rate, [-1]), sample_bias)
  pred = tf.nn.sigmoid(logits if predict_before_correction else biased, name=pred_name)
  if logit_clip_threshold is not None:
    assert (
      0 < logit_clip_threshold < 1
    ), f"logit_clip_threshold is {logit_clip_threshold}, want more than 0 and less than 1"
    limit = abs(math.log((1 - logit_clip_threshold) / logit_clip_threshold))
    biased = tf.clip_by_value(biased, -limit, limit)
  losses = tf.nn.sigmoid_cross_entropy_with_logits(
    labels=tf.cast(tf.reshape(label, [-1]), biased.dtype), logits=biased
  )
  if instance_weight is not None:
    instance_weight = tf.reshape(instance_weight, [-1])
  if mask is not None:
    mask = tf.reshape(mask, [-1])
    losses = tf.boolean_mask(losses, mask)
    if instance_weight is not None:
      instance_weight = tf.boolean_mask(instance_weight, mask)
  if instance_weight is not None:
    losses *= instance_weight
  return tf.reduce_sum(losses, name=loss_name), pred


def _check_label(name: str, label: tf.Tensor | None, mode: str) -> None:
  if label is None:
    raise ValueError(
      f"label of head {name!r} is None, and the mode is {mode!r}: does features.get(...) name a "
      "feature that input_fn gives?"
    )


def get_softmax_loss_and_pred(
  name: str, logits: tf.Tensor, label: tf.Tensor | None, mode: str
) -> tuple[tf.Tensor | None, tf.Tensor]:
  """Returns losses and predictions of a target with several classes.

  Args:
    name: the head's name.
    logits: `[batch, classes]`.
    label: `[batch, classes]`, probabilities; not needed to predict.
    mode: a `graph_estimator.ModeKeys` mode.

  Returns:
    The losses `[batch]`, not summed, `None` to predict; and the likeliest class of each example.

  Raises:
    ValueError: there is no label, and the mode is not to predict.
  """
  pred = tf.argmax(tf.nn.softmax(logits), axis=1, name=f"{name}_softmax_pred")
  if mode == _PREDICT:
    return None, pred
  _check_label(name, label, mode)
  loss = tf.nn.softmax_cross_entropy_with_logits(
    labels=label, logits=logits, name=f"{name}_softmax_loss"
  )
  return loss, pred
