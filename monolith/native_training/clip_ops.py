"""Clipping gradients by their global norm, without a copy when nothing is clipped. With gradients.

Differences from ByteDance's Monolith: a norm that is not finite makes every output NaN.
"""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training import device_utils
from monolith.native_training.runtime.ops import gen_monolith_ops as gen_clip_ops


def clip_by_global_norm(
  t_list: list[tf.Tensor],
  clip_norm: tf.Tensor | float,
  use_norm: tf.Tensor | float | None = None,
) -> tuple[list[tf.Tensor], tf.Tensor]:
  """Scales tensors by `clip_norm / norm` if their global norm exceeds `clip_norm`.

  Args:
    t_list: float32 tensors of any shapes. They are not modified.
    clip_norm: float32 scalar, at least 0.
    use_norm: the norm, if it is known already.

  Returns:
    The list of clipped tensors, which are the inputs themselves if the norm is within the limit and
    all NaN if it is not finite; and the norm before clipping (0 for an empty list).

  Raises:
    TypeError: `t_list` is not a list.
  """
  if not isinstance(t_list, list):
    raise TypeError("t_list should be a list")
  if not t_list:
    return t_list, 0
  with tf.name_scope("clip_by_global_norm"):
    if use_norm is not None:
      return gen_clip_ops.monolith_clip_by_global_norm(t_list, use_norm, clip_norm), use_norm
    if device_utils.within_placement_context_of("GPU"):
      clipped, norm = gen_clip_ops.monolith_clip_by_global_norm_fused(t_list, clip_norm)
      return clipped, norm
    if any(isinstance(t, tf.IndexedSlices) for t in t_list):
      # The norm of the slices, as TensorFlow defines it: rows that occur twice are not added up.
      norm = tf.linalg.global_norm(t_list)
    else:
      norm = _global_norm(t_list)
    return gen_clip_ops.monolith_clip_by_global_norm(t_list, norm, clip_norm), norm


def _global_norm(t_list: list[tf.Tensor]) -> tf.Tensor | None:
  """Returns the square root of the sum of squares of all elements; None for an empty list."""
  if not t_list:
    return None
  return tf.sqrt(gen_clip_ops.global_l2_reduce(t_list))


@tf.RegisterGradient("MonolithClipByGlobalNorm")
def _clip_by_global_norm_grad(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor]:
  *tensors, norm, clip_norm = op.inputs
  clips, factor = _clip_factor(norm, clip_norm)
  dot = _dot(tensors, grads)
  norm_grad = tf.where(clips, -dot * clip_norm / (norm * norm), 0.0)
  clip_norm_grad = tf.where(clips, dot / norm, 0.0)
  return [*(grad * factor for grad in grads), norm_grad, clip_norm_grad]


@tf.RegisterGradient("MonolithClipByGlobalNormFused")
def _clip_by_global_norm_fused_grad(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor]:
  *tensors, clip_norm = op.inputs
  *grads, norm_grad = grads
  norm = op.outputs[-1]
  clips, factor = _clip_factor(norm, clip_norm)
  dot = _dot(tensors, grads)
  norm_grad += tf.where(clips, -dot * clip_norm / (norm * norm), 0.0)
  # The norm has no slope at 0: like TensorFlow's clipping of zeros, nothing flows through it there.
  direction = tf.math.divide_no_nan(norm_grad, norm)
  clip_norm_grad = tf.where(clips, dot / norm, 0.0)
  return [
    *(grad * factor + direction * tensor for tensor, grad in zip(tensors, grads)),
    clip_norm_grad,
  ]


@tf.RegisterGradient("GlobalL2Reduce")
def _global_l2_reduce_grad(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor]:
  return [2.0 * grad * tensor for tensor in op.inputs]


def _clip_factor(norm: tf.Tensor, clip_norm: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Tells whether the tensors are scaled, and by what: NaN for a norm that is not finite."""
  clips = tf.logical_or(norm > clip_norm, tf.math.is_nan(norm))
  scale = tf.where(tf.math.is_finite(norm), clip_norm / norm, float("nan"))
  return clips, tf.where(clips, scale, 1.0)


def _dot(tensors: list[tf.Tensor], others: list[tf.Tensor]) -> tf.Tensor:
  return tf.add_n([tf.reduce_sum(a * b) for a, b in zip(tensors, others)])
