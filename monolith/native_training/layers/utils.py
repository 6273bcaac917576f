"""Helps the layers: merging of outputs, static sizes, initializers, relaxed sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils

keras = _tensorflow.import_keras()


class MergeType:
  """Names a way to make one tensor of a list."""

  CONCAT = "concat"
  STACK = "stack"
  NONE = None


class DCNType:
  """Names the kinds of weights of a cross layer."""

  Vector = "vector"
  Matrix = "matrix"
  Mixed = "mixed"


def check_dim(dim: Any) -> int:
  """Returns a dimension as an int, -1 if it is unknown.

  Raises:
    ValueError: neither an int nor a dimension.
  """
  return utils.int_dim(dim)


def dim_size(tensor: tf.Tensor, axis: int) -> int | tf.Tensor:
  """Returns the size of an axis: an int if it is static, else a tensor."""
  size = check_dim(tensor.shape[axis])
  return tf.shape(tensor)[axis] if size == -1 else size


def merge_tensor_list(
  tensor_list: tf.Tensor | Sequence[tf.Tensor],
  merge_type: str | None = "concat",
  num_feature: int | None = None,
  axis: int = 1,
  keep_list: bool = False,
) -> Any:
  """Joins the outputs of a layer, or takes one output apart.

  Args:
    tensor_list: tensors `[B, E]`, or a single one `[B, F, E]` or `[B, E]`.
    merge_type: `concat`, `stack`, or `None` for a list.
    num_feature: number of features in a single `[B, E]`.
    axis: along which several tensors are joined.
    keep_list: return a single tensor as a list of one.

  Raises:
    AssertionError: another `merge_type`.
    Exception: a single tensor of another rank.
  """
  assert merge_type in (
    MergeType.CONCAT,
    MergeType.STACK,
    MergeType.NONE,
  ), f"merge_type is {merge_type!r}, want 'concat', 'stack' or None"
  tensors: list[Any] = (
    list(tensor_list) if isinstance(tensor_list, (list, tuple)) else [tensor_list]
  )
  if len(tensors) > 1:
    if merge_type == MergeType.NONE:
      return tensors
    join = tf.stack if merge_type == MergeType.STACK else tf.concat
    return _maybe_list(join(tensors, axis=axis), keep_list)
  tensor = tensors[0]
  if tensor.shape.rank == 3:
    num_feature, emb_size = check_dim(tensor.shape[1]), check_dim(tensor.shape[2])
    if merge_type == MergeType.NONE:
      return tf.unstack(tensor, num=num_feature, axis=1)
    if merge_type == MergeType.CONCAT:
      tensor = tf.reshape(tensor, [-1, num_feature * emb_size])
  elif tensor.shape.rank == 2:
    if num_feature is not None and num_feature > 1:
      if merge_type == MergeType.NONE:
        return tf.split(tensor, num_feature, axis=1)
      if merge_type == MergeType.STACK:
        emb_size = check_dim(tensor.shape[1]) // num_feature
        tensor = tf.reshape(tensor, [-1, num_feature, emb_size])
  else:
    raise Exception(f"shape error: {tensor.shape}, want rank 2 or 3")
  return _maybe_list(tensor, keep_list)


def _maybe_list(tensor: tf.Tensor, keep_list: bool) -> Any:
  return [tensor] if keep_list else tensor


def new_initializer(identifier: Any, default: Any = None) -> Any:
  """Returns an initializer that no other variable uses.

  A random initializer of Keras without a seed draws the same values for every variable.

  Args:
    identifier: anything that `tf.keras.initializers.get` understands.
    default: what `None` stands for.
  """
  initializer = keras.initializers.get(default if identifier is None else identifier)
  if hasattr(initializer, "get_config") and hasattr(initializer, "from_config"):
    return type(initializer).from_config(initializer.get_config())
  return initializer


def serialize_initializer(initializer: Any) -> Any:
  """Returns the initializer in a form that `tf.keras.initializers.get` understands."""
  if initializer is None or isinstance(initializer, (str, dict)):
    return initializer
  return keras.initializers.serialize(keras.initializers.get(initializer))


def serialize_regularizer(regularizer: Any) -> Any:
  """Returns the regularizer in a form that `tf.keras.regularizers.get` understands."""
  if regularizer is None or isinstance(regularizer, (str, dict)):
    return regularizer
  return keras.regularizers.serialize(keras.regularizers.get(regularizer))


def gumbel_keys(w: tf.Tensor) -> tf.Tensor:
  """Returns `w - ln(-ln U)`, whose largest elements are a sample without replacement."""
  tiny = np.finfo(w.dtype.as_numpy_dtype).tiny
  uniform = tf.random.uniform(tf.shape(w), minval=tiny, maxval=1.0, dtype=w.dtype)
  return w - tf.math.log(-tf.math.log(uniform))


def continuous_topk(w: tf.Tensor, k: int, t: float, separate: bool = False) -> Any:
  """Chooses the k largest elements of the last axis in a relaxed way.

  Args:
    w: keys.
    k: how many to choose.
    t: temperature; the lower, the closer to zeros and ones.
    separate: return the k choices instead of their sum.
  """
  tiny = np.finfo(w.dtype.as_numpy_dtype).tiny
  choices = []
  choice = tf.zeros_like(w)
  for _ in range(k):
    w = w + tf.math.log(tf.maximum(1.0 - choice, tiny))
    choice = tf.nn.softmax(w / t, axis=-1)
    choices.append(choice)
  return choices if separate else tf.add_n(choices)


def sample_subset(w: tf.Tensor, k: int, t: float = 0.1) -> tf.Tensor:
  """Samples k elements of the last axis without replacement, by weights `exp(w)`, relaxed."""
  return continuous_topk(gumbel_keys(w), k, t)
