"""Layers that are one op, with gradients: FFM interactions, feature insight, the id counter."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as layer_ops_lib


def ffm(left: tf.Tensor, right: tf.Tensor, dim_size: int, int_type: str = "multiply") -> tf.Tensor:
  """Computes interactions of every left with every right feature of the same example.

  Args:
    left: float32 `[B, L * dim_size]`, L features side by side.
    right: float32 `[B, R * dim_size]`.
    dim_size: floats per feature.
    int_type: `"dot"` for inner products; anything else multiplies by element.

  Returns:
    float32, `[B, L * R]` for `"dot"`, otherwise `[B, L * R * dim_size]`; left feature major.

  Raises:
    tf.errors.InvalidArgumentError: an input is not a matrix, the batches differ, or a width is not
      a multiple of `dim_size` (`ValueError` where a graph is built and the shapes are known).
  """
  return layer_ops_lib.FFM(left=left, right=right, dim_size=dim_size, int_type=int_type)


@tf.RegisterGradient("FFM")
def _ffm_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  left, right = op.inputs
  left_grad, right_grad = layer_ops_lib.FFMGrad(
    grad=grad,
    left=left,
    right=right,
    dim_size=op.get_attr("dim_size"),
    int_type=op.get_attr("int_type"),
  )
  return left_grad, right_grad


def feature_insight(
  input_embedding: tf.Tensor,
  weight: tf.Tensor,
  segment_sizes: Sequence[int],
  aggregate: bool = False,
) -> tf.Tensor:
  """Computes what each feature contributes to each unit of a dense layer.

  Args:
    input_embedding: float32 `[B, E]`, F features side by side.
    weight: float32 `[E, K]`, the kernel of the dense layer.
    segment_sizes: widths of the F features; they add up to E.
    aggregate: return one number per feature instead of K.

  Returns:
    float32 `[B, F * K]`; with `aggregate`, `[B, F]`: the sum over k of the squares.

  Raises:
    AssertionError: no segments, or the static sizes of the inputs do not match.
  """
  assert segment_sizes, "segment_sizes is empty, want at least one feature"
  input_embedding = tf.convert_to_tensor(input_embedding)
  weight = tf.convert_to_tensor(weight)
  width, rows = _static_dim(input_embedding, -1), _static_dim(weight, 0)
  assert (
    width is None or rows is None or width == rows
  ), f"the last dimension of input_embedding is {width}, want that of the rows of weight: {rows}"
  segment_sizes = list(segment_sizes)
  out = layer_ops_lib.FeatureInsight(
    input=input_embedding, weight=weight, segment_sizes=segment_sizes
  )
  if not aggregate:
    return out
  # Sizes are spelled out: reshape cannot infer one of an empty batch.
  shape = [tf.shape(out)[0], len(segment_sizes), tf.shape(weight)[1]]
  return tf.reduce_sum(tf.square(tf.reshape(out, shape)), axis=2)


@tf.RegisterGradient("FeatureInsight")
def _feature_insight_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  input_embedding, weight = op.inputs
  columns = _static_dim(weight, -1)
  input_grad, weight_grad = layer_ops_lib.FeatureInsightGrad(
    grad=grad,
    input=input_embedding,
    weight=weight,
    segment_sizes=op.get_attr("segment_sizes"),
    K=-1 if columns is None else columns,
  )
  return input_grad, weight_grad


def _static_dim(tensor: tf.Tensor, axis: int) -> int | None:
  """Returns the size, None if unknown, by way of a list: in v1 `shape[i]` is not an int."""
  return None if tensor.shape.rank is None else tensor.shape.as_list()[axis]


def fid_counter(counter: tf.Tensor, counter_threshold: int, step: float = 1.0) -> tf.Tensor:
  """Counts how often an id is trained, up to a threshold.

  The gradient with respect to `counter` is `-step` below the threshold and 0 from there on,
  whatever the gradient of the result is: a one-wide slice trained by SGD with learning rate 1
  counts up by `step` per update.

  Args:
    counter: float32, the slice.
    counter_threshold: where counting stops.
    step: what one update adds.

  Returns:
    `min(counter + step, counter_threshold)`, of the shape of `counter`.
  """
  counter = layer_ops_lib.MonolithFidCounter(
    counter=counter, step=step, counter_threshold=counter_threshold
  )
  return tf.minimum(counter + step, float(counter_threshold))


@tf.RegisterGradient("MonolithFidCounter")
def _fid_counter_grad(op: tf.Operation, grad: tf.Tensor) -> tf.Tensor:
  del grad  # Counting does not depend on the loss.
  counter = op.inputs[0]
  below = counter < float(op.get_attr("counter_threshold"))
  return tf.where(below, -op.get_attr("step") * tf.ones_like(counter), tf.zeros_like(counter))
