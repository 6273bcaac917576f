"""Pools the vectors of each example's ids and cuts them into the slices of its feature."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from monolith.native_training import (
  device_utils,
  distribution_ops,
  embedding_combiners,
  ragged_utils,
)
from monolith.native_training.graph import export_context

# Graph collection of the pooled embeddings of an exported graph.
_REDUCED_EMBEDDINGS = "monolith_reduced_embs"

# Marks the ops that pool, for the model server in C++.
_POOLS_ATTRIBUTE = "_monolith_pools"

_GPU = "/device:GPU:0"


class PooledPart(NamedTuple):
  """Tells where columns of a feature's rows lie in a tensor of pooled rows.

  Attributes:
    feature: the feature's name.
    column: the first of these columns in its rows.
    width: how many there are.
    pooled: the number of the tensor of pooled rows.
    pooled_column: the first of these columns there.
  """

  feature: str
  column: int
  width: int
  pooled: int
  pooled_column: int


def to_numbers(parts: Sequence[PooledPart], features: Sequence[str]) -> list[int]:
  """Returns parts as ops on pooled rows take them, with the place of each feature for its name."""
  return [number for part in parts for number in (features.index(part.feature), *part[1:])]


class SliceKey(str):
  """Names columns `[start, end)` of a feature; its text is `<feature>:<start>_<end>`."""

  feature: str
  start: int
  end: int

  def __new__(cls, feature: str, start: int, end: int) -> SliceKey:
    key = super().__new__(cls, f"{feature}:{start}_{end}")
    key.feature, key.start, key.end = feature, start, end
    return key

  def __getnewargs__(self) -> tuple[str, int, int]:  # type: ignore[override]
    return self.feature, self.start, self.end


def create_embedding_slices(
  name_to_embeddings: dict[str, tf.Tensor],
  name_to_embedding_ids: dict[str, tf.RaggedTensor],
  feature_to_combiner: dict[str, embedding_combiners.Combiner],
  feature_to_unmerged_slice_dims: dict[str, Sequence[int]],
  has_one_each: Mapping[str, tf.Tensor] | None = None,
) -> dict[SliceKey, tf.Tensor]:
  """Pools the embeddings of each feature per example and splits them into slices.

  Args:
    name_to_embeddings: feature name -> `[ids, dim]`, tensor or variable.
    name_to_embedding_ids: feature name -> ragged ids `[batch, None]`; only the rows matter.
    feature_to_combiner: feature name -> how to pool.
    feature_to_unmerged_slice_dims: feature name -> sizes of the slices, which sum up to `dim`.
    has_one_each: feature name -> whether each of its rows has one id, a bool scalar on the host;
      `None` where nobody has looked at the rows.

  Returns:
    Key `<feature name>:<start>_<end>` -> `[batch, end - start]`, or `[batch, n, end - start]` for a
    `FirstN(n)` combiner. Examples without ids get zeros; gradients flow back to the embeddings.
  """
  with device_utils.maybe_device_if_allowed(_GPU):
    on_gpu = device_utils.within_placement_context_of("GPU")
  slices: dict[SliceKey, tf.Tensor] = {}
  gpu_features: list[str] = []
  for name, embeddings in name_to_embeddings.items():
    ids, combiner = name_to_embedding_ids[name], feature_to_combiner[name]
    dims = list(feature_to_unmerged_slice_dims[name])
    if not isinstance(combiner, embedding_combiners.ReduceSum):
      combined = combiner.combine(ids, embeddings, name=f"{type(combiner).__name__}_{name}_vv")
      with device_utils.maybe_device_if_allowed(_GPU):
        parts = tf.split(combined, dims, axis=-1)
    elif export_context.is_exporting():
      parts = _reduce_sum_in_plain_tensorflow(name, ids, embeddings, dims)
    elif on_gpu:
      if _can_fuse(ids):
        gpu_features.append(name)
        continue
      with device_utils.maybe_device_if_allowed(_GPU):
        parts = _reduce_sum_in_plain_tensorflow(name, ids, embeddings, dims)
    else:
      with tf.device("/device:CPU:0"):
        parts = distribution_ops.fused_reduce_sum_and_split(
          ragged_utils.fused_value_rowids(ids),
          tf.convert_to_tensor(embeddings),
          ids.nrows(),
          dims,
          name=f"ReduceSumAndSplit_{name}",
        )
    _add_slices(slices, name, dims, parts)
  if gpu_features:
    _reduce_sum_on_gpu(
      slices,
      gpu_features,
      name_to_embeddings,
      name_to_embedding_ids,
      feature_to_unmerged_slice_dims,
      has_one_each,
    )
  return slices


def _can_fuse(ids: tf.RaggedTensor) -> bool:
  """Tells whether the fused op of the GPU can pool a feature: it needs a static batch size."""
  is_allowed = os.environ.get("MONOLITH_GPU_FEATURE_FACTORY_FUSION_LEVEL", "1") == "1"
  return is_allowed and ids.row_splits.shape.is_fully_defined()


def _add_slices(
  slices: dict[SliceKey, tf.Tensor], name: str, dims: Sequence[int], parts: Sequence[tf.Tensor]
) -> None:
  start = 0
  for dim, part in zip(dims, parts):
    slices[SliceKey(name, start, start + dim)] = part
    start += dim


def _reduce_sum_in_plain_tensorflow(
  name: str, ids: tf.RaggedTensor, embeddings: tf.Tensor, dims: Sequence[int]
) -> list[tf.Tensor]:
  """Pools with ops that are there also where the training ops are not loaded."""
  embeddings = tf.convert_to_tensor(embeddings)
  if _has_one_id_per_row(ids):
    reduced = tf.identity(embeddings, name=name)
  else:
    shape = tf.stack([ids.nrows(out_type=tf.int64), tf.constant(sum(dims), tf.int64)])
    reduced = tf.scatter_nd(_row_of_each_id(ids), embeddings, shape, name=name)
    if not tf.executing_eagerly():
      # The model server in C++ joins marked ops; it finds the row splits by the ops that lead here.
      reduced.op._set_attr(_POOLS_ATTRIBUTE, attr_value_pb2.AttrValue(b=True))
  tf.compat.v1.add_to_collection(_REDUCED_EMBEDDINGS, reduced)
  return tf.split(reduced, dims, axis=1, name=f"{name}_split")


def _has_one_id_per_row(ids: tf.RaggedTensor) -> bool:
  """Tells whether that is known of any batch, as of `tf.RaggedTensor.from_tensor(ids[:, None])`."""
  length = ids.uniform_row_length
  return length is not None and tf.get_static_value(length) == 1


def _row_of_each_id(ids: tf.RaggedTensor) -> tf.Tensor:
  """Returns `ids.value_rowids()` as int64 `[ids, 1]`, with a fifth of the ops."""
  splits = tf.cast(ids.row_splits, tf.int64)
  places = tf.range(splits[-1])
  ends = tf.raw_ops.UpperBound(
    sorted_inputs=tf.expand_dims(splits, 0), values=tf.expand_dims(places, 0), out_type=tf.int64
  )
  return tf.reshape(ends - 1, [-1, 1])


def _reduce_sum_on_gpu(
  slices: dict[SliceKey, tf.Tensor],
  names: Sequence[str],
  name_to_embeddings: dict[str, tf.Tensor],
  name_to_embedding_ids: dict[str, tf.RaggedTensor],
  feature_to_unmerged_slice_dims: dict[str, Sequence[int]],
  has_one_each: Mapping[str, tf.Tensor] | None,
) -> None:
  """Pools all features in one op: a kernel per feature would cost more to launch than the sums."""
  dims = [list(feature_to_unmerged_slice_dims[name]) for name in names]
  flags = None
  if has_one_each is not None:
    with tf.device("/device:CPU:0"):
      flags = tf.stack([has_one_each[name] for name in names])
  with device_utils.maybe_device_if_allowed(_GPU):
    parts = distribution_ops.fused_reduce_and_split_gpu(
      [name_to_embedding_ids[name].row_splits for name in names],
      [tf.convert_to_tensor(name_to_embeddings[name]) for name in names],
      dims,
      has_one_each=flags,
    )
  for name, feature_dims in zip(names, dims):
    _add_slices(slices, name, feature_dims, parts[: len(feature_dims)])
    parts = parts[len(feature_dims) :]
