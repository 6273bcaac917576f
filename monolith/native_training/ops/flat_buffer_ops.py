"""Many float tensors in one flat buffer, as a single all-reduce wants them. With gradients."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as aligned_flat_ops


def aligned_flat_concat(inputs: list[tf.Tensor], scale: tf.Tensor | float = 1.0) -> tf.Tensor:
  """Lays the flattened inputs end to end, each padded with zeros to a multiple of 16 floats.

  Args:
    inputs: float32 tensors of any shapes; at least one.
    scale: float32 scalar; every element is multiplied by it.

  Returns:
    float32 `[sum of the padded sizes]`.
  """
  return aligned_flat_ops.monolith_aligned_flat_concat(inputs, scale)


def aligned_flat_split(inputs: list[tf.Tensor], flat: tf.Tensor) -> list[tf.Tensor]:
  """Undoes `aligned_flat_concat` without copying.

  Args:
    inputs: the tensors that were concatenated; only their shapes count.
    flat: float32 `[sum of the padded sizes]`.

  Returns:
    Tensors of the shapes of `inputs`.
  """
  return aligned_flat_ops.monolith_aligned_flat_split(inputs, flat)


@tf.RegisterGradient("MonolithAlignedFlatConcat")
def _aligned_flat_concat_grad(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor]:
  *inputs, scale = op.inputs
  grads = aligned_flat_split(inputs, grad)
  scale_grad = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(inputs, grads)])
  return [*(piece * scale for piece in grads), scale_grad]


@tf.RegisterGradient("MonolithAlignedFlatSplit")
def _aligned_flat_split_grad(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
  return [*(None for _ in grads), aligned_flat_concat(list(grads))]
