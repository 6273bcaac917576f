"""Tensor pipelines between the ids of a batch and the dense tensors of a model.

Ids are de-duplicated and split by server, looked up, brought back into the order of the batch and
pooled; gradients take the same way back. An id has one home, `shard_of_ids`: every op here that
shards by itself uses the same signed floor modulo.

Three ops of the family are known as GPU ops; they run on the CPU as well. The scale of
`fused_gather_embeddings_by_input_gradient` is applied on every device, the mean of no ids is 0, and
`finalize_shared_tensor` passes its gradient on to every handle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from idl.matrix.proto.example_pb2 import FeatureConfigs  # noqa: F401  (part of this module)
from monolith.native_training.ops.layout_ops import (  # noqa: F401  (part of this module)
  fused_embedding_to_layout,
  fused_embedding_to_layout_grad,
)
from monolith.native_training.runtime.ops import gen_monolith_ops

gen_distribution_ops = gen_monolith_ops


def shard_of_ids(ids: tf.Tensor, num_shards: int) -> tf.Tensor:
  """Returns the server of each id, in [0, num_shards): floor modulo of the signed id."""
  ids = tf.convert_to_tensor(ids, tf.int64)
  return tf.math.floormod(ids, tf.constant(num_shards, tf.int64))


# ---- split and reorder ----


def split_by_indices(indices: tf.Tensor, tensor: tf.Tensor, num_splits: int) -> list[tf.Tensor]:
  """Splits the rows of `tensor`.

  Args:
    indices: int64 [n], each in [0, num_splits).
    tensor: [n, ...], float, int64, int32 or bool.
    num_splits: number of parts.

  Returns:
    Part s has the rows i with `indices[i] == s`, in their order.
  """
  return gen_distribution_ops.monolith_split_by_indices(indices, tensor, num_splits)


@tf.RegisterGradient("MonolithSplitByIndices")
def _split_by_indices_gradient(op: tf.Operation, *grads: tf.Tensor):
  return None, gen_distribution_ops.monolith_split_by_indices_gradient(
    op.inputs[0], op.inputs[1], list(grads)
  )


def ragged_split_by_indices(
  indices: tf.Tensor, num: tf.RaggedTensor, num_splits: int
) -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor]]:
  """Splits the values of a ragged tensor; every part keeps the number of rows.

  Args:
    indices: int64 [number of values of `num`], each in [0, num_splits).
    num: int64, ragged rank 1.
    num_splits: number of parts.

  Returns:
    The parts, and for each part the position of its values in `num.values`, equally ragged.
  """
  values, splits, positions = gen_distribution_ops.monolith_ragged_split_by_indices(
    indices, num.values, num.row_splits, num_splits
  )

  def ragged(parts: list[tf.Tensor]) -> list[tf.RaggedTensor]:
    return [
      tf.RaggedTensor.from_row_splits(part, split, validate=False)
      for part, split in zip(parts, splits)
    ]

  return ragged(values), ragged(positions)


def reorder_by_indices(
  input: tf.Tensor, shard_ids: tf.Tensor, num_of_shards: int
) -> tuple[tf.Tensor, tf.Tensor]:
  """Drops repeated elements and groups the rest by shard.

  Args:
    input: int64 or float, [n], or [n, d] compared by the first column.
    shard_ids: int32 [n], each in [0, num_of_shards).
    num_of_shards: number of groups.

  Returns:
    The elements, inside a shard in reverse order of first appearance, and int32 [num_of_shards]
    sizes.
  """
  return gen_distribution_ops.monolith_reorder_by_indices(input, shard_ids, num_of_shards)


def is_rank0_empty(num_of_shards: int, by_default: bool = True) -> bool:
  """Returns whether rank 0 owns no ids: with more than 4 ranks, if the environment says so.

  Args:
    num_of_shards: the number of ranks.
    by_default: where MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD is not set. It is on for scripts that call
      `fused_reorder_by_indices` themselves, and off for the driver, whose checkpoints and exports
      know one home of an id: its floor modulo by the number of ranks.
  """
  is_asked_for = os.environ.get("MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD", str(int(by_default))) == "1"
  return is_asked_for and num_of_shards > 4


def fused_reorder_by_indices(
  inputs: Sequence[tf.Tensor],
  num_of_shards: int,
  dim_sizes: Sequence[int],
  rank0_empty: bool | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
  """Drops repeated ids per table and orders them by shard, then table, then first appearance.

  Args:
    inputs: int64 vectors, one per table.
    num_of_shards: number of shards n.
    dim_sizes: embedding width of each table.
    rank0_empty: whether shard 0 gets no ids. By default only with more than 4 shards, unless the
      environment variable MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD is something else than "1".

  Returns:
    (ids, ids per shard [n], ids per shard and table [n * M], lengths of the inputs [M], and for
    every input id the float offset of its embedding in the looked-up ids).
  """
  if rank0_empty is None:
    rank0_empty = is_rank0_empty(num_of_shards)
  return gen_distribution_ops.fused_reorder_by_indices(
    [tf.convert_to_tensor(ids, tf.int64) for ids in inputs],
    num_of_shards,
    slot_embedding_dims=list(dim_sizes),
    rank0_empty=rank0_empty,
  )


# ---- unique keys and the shared value buffer ----


class _UniqueKeyWithValueAndOffsetResult(NamedTuple):
  """Result of `unique_key_with_value_and_offset`."""

  unique_key: tf.RaggedTensor
  # Ragged rank 2: row, key, offsets of the key's occurrences.
  value_offset: tf.RaggedTensor
  value_buffer: tf.Tensor


def unique_key_with_value_and_offset(
  key: tf.RaggedTensor, dims: Sequence[int], generate_buffer: bool = True
) -> _UniqueKeyWithValueAndOffsetResult:
  """Returns the unique keys of each row and where their occurrences lie in a flat buffer of values.

  Args:
    key: int64, ragged rank 1, `len(dims)` rows.
    dims: width of the values of each row.
    generate_buffer: allocate the buffer, uninitialised. It lives for one step at most.
  """
  result = gen_distribution_ops.monolith_unique_key_with_value_and_offset(
    key.values, key.row_splits, list(dims), generate_buffer
  )
  unique_key = tf.RaggedTensor.from_row_splits(
    result.unique_key, result.unique_key_split, validate=False
  )
  offsets_of_keys = tf.RaggedTensor.from_row_splits(
    result.value_offset, result.value_offset_split, validate=False
  )
  value_offset = tf.RaggedTensor.from_row_splits(
    offsets_of_keys, result.unique_key_split, validate=False
  )
  return _UniqueKeyWithValueAndOffsetResult(unique_key, value_offset, result.value_buffer)


def fill_with_offset_map(
  pos: tf.RaggedTensor,
  value: tf.Tensor,
  value_offset_map: tf.RaggedTensor,
  value_buffer: tf.Tensor,
  dims: Sequence[int],
) -> tf.Tensor:
  """Copies each value to every place of its key.

  Args:
    pos: int64, ragged, `len(dims)` rows of indices into the flattened unique keys.
    value: float vector, one slice of its row's width per entry of `pos`.
    value_offset_map: `value_offset` of `unique_key_with_value_and_offset`.
    value_buffer: its buffer.
    dims: width of the values of each row.

  Returns:
    The handle of the buffer. Its gradient is that of the whole buffer.
  """
  return gen_distribution_ops.monolith_fill_with_offset_map(
    pos.values,
    pos.row_splits,
    value,
    value_offset_map.flat_values,
    value_offset_map.nested_row_splits[-1],
    value_buffer,
    list(dims),
  )


@tf.RegisterGradient("MonolithFillWithOffsetMap")
def _fill_with_offset_map_gradient(op: tf.Operation, grad: tf.Tensor):
  pos, pos_split, _, offset_map, offset_map_split, _ = op.inputs
  value_grad = gen_distribution_ops.monolith_fill_with_offset_map_gradient(
    pos, pos_split, grad, offset_map, offset_map_split, op.get_attr("dims")
  )
  return None, None, value_grad, None, None, None


def fill_with_offset_map_gradient(
  pos: tf.RaggedTensor, grad: tf.Tensor, value_offset_map: tf.RaggedTensor, dims: Sequence[int]
) -> tf.Tensor:
  """Returns the gradient of `fill_with_offset_map`'s values: `grad` summed by key."""
  return gen_distribution_ops.monolith_fill_with_offset_map_gradient(
    pos.values,
    pos.row_splits,
    grad,
    value_offset_map.flat_values,
    value_offset_map.nested_row_splits[-1],
    list(dims),
  )


def finalize_shared_tensor(
  shared_tensor_handles: Sequence[tf.Tensor], dtype: tf.DType, shape
) -> tf.Tensor:
  """Takes the tensor out of the shared buffer; the handles must not be used afterwards.

  Args:
    shared_tensor_handles: the same resource, as returned by every op that wrote to it.
    dtype: the tensor's dtype.
    shape: the tensor's shape, may be partial.
  """
  return gen_distribution_ops.monolith_finalize_shared_tensor(
    shared_tensor_handles, dtype=dtype, shape=shape
  )


@tf.RegisterGradient("MonolithFinalizeSharedTensor")
def _finalize_shared_tensor_gradient(op: tf.Operation, grad: tf.Tensor):
  return [grad] * len(op.inputs)


# ---- ids to embeddings ----


def map_id_to_embedding(
  ids: Sequence[tf.Tensor],
  embeddings: Sequence[tf.Tensor],
  input: tf.Tensor,
  use_multi_threads: bool = True,
) -> tf.Tensor:
  """Returns the embedding of every id of `input`.

  Args:
    ids: int64 vectors, one per server; the first occurrence of an id counts.
    embeddings: float [len(ids[s]), dim] per server.
    input: int64 of any shape, all of it in `ids`.
    use_multi_threads: use the thread pool for large inputs.

  Returns:
    float, input.shape + [dim].

  Raises:
    ValueError: ids and embeddings have different lengths.
  """
  if len(ids) != len(embeddings):
    raise ValueError(
      f"ids length and embeddings lenght must match. {len(ids)} vs {len(embeddings)}"
    )
  return gen_distribution_ops.monolith_map_id_to_embedding(
    ids, embeddings, input, use_multi_threads=use_multi_threads
  )


@tf.RegisterGradient("MonolithMapIdToEmbedding")
def _map_id_to_embedding_gradient(op: tf.Operation, grad: tf.Tensor):
  num_splits = op.get_attr("num_splits")
  grads = map_id_to_embedding_gradient_back_prop(
    list(op.inputs[:num_splits]), op.inputs[2 * num_splits], grad
  )
  return [None] * num_splits + list(grads) + [None]


def map_id_to_embedding_gradient_back_prop(
  ids: Sequence[tf.Tensor], input: tf.Tensor, grads: tf.Tensor
) -> list[tf.Tensor]:
  """Gradients of the embeddings of `map_id_to_embedding`: rows of `grads` summed per id."""
  return gen_distribution_ops.monolith_map_id_to_embedding_gradient(ids, input, grads)


def gather_embeddings_by_input(
  ids: tf.Tensor, embeddings: tf.Tensor, input: tf.Tensor, use_multi_threads: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the embedding of every id of `input`, and the row of `ids` it was found in.

  Args:
    ids: int64 [n].
    embeddings: float [n, dim].
    input: int64 of any shape, all of it in `ids`.
    use_multi_threads: use the thread pool for large inputs.

  Returns:
    (float, input.shape + [dim]; int64, input.shape).
  """
  return gen_distribution_ops.monolith_gather_embeddings_by_input(
    ids, embeddings, input, use_multi_threads=use_multi_threads
  )


@tf.RegisterGradient("MonolithGatherEmbeddingsByInput")
def _gather_embeddings_by_input_gradient(op: tf.Operation, grad: tf.Tensor, _):
  embedding_grads = gather_embeddings_by_ids_gradient_back_prop(op.inputs[0], grad, op.outputs[1])
  return [None, embedding_grads, None]


def gather_embeddings_by_ids_gradient_back_prop(
  ids: tf.Tensor, grads: tf.Tensor, index_mapping: tf.Tensor
) -> tf.Tensor:
  """Returns the gradient of `gather_embeddings_by_input`: `grads` summed at `index_mapping`."""
  return gen_distribution_ops.monolith_gather_embeddings_by_input_gradient(
    ids, grads, index_mapping
  )


def fused_gather_embeddings_by_input(
  fused_embeddings: tf.Tensor,
  fused_embedding_offsets: Sequence[tf.Tensor],
  embedding_dims: Sequence[int],
) -> list[tf.Tensor]:
  """Gathers the embeddings of several tables from one flat buffer.

  Args:
    fused_embeddings: float vector.
    fused_embedding_offsets: int32 vectors of float offsets, one per table.
    embedding_dims: width of each table.

  Returns:
    float [len(offsets), dim] per table.
  """
  return gen_distribution_ops.monolith_fused_gather_embeddings_by_input(
    fused_embeddings, fused_embedding_offsets, list(embedding_dims)
  )


def fused_gather_embeddings_by_input_gradient(
  fused_embeddings: int | tf.Tensor,
  grads: Sequence[tf.Tensor],
  embedding_offsets: Sequence[tf.Tensor],
  embedding_dims: Sequence[int],
  scale: float | tf.Tensor = 1,
) -> tf.Tensor:
  """Returns the gradient of the flat buffer of `fused_gather_embeddings_by_input`.

  Args:
    fused_embeddings: int32, the number of floats of the buffer.
    grads: float [len(offsets), dim] per table.
    embedding_offsets: int32 vectors of float offsets, one per table.
    embedding_dims: width of each table.
    scale: every gradient is multiplied by it.
  """
  return gen_distribution_ops.monolith_fused_gather_embeddings_by_input_gradient(
    fused_embeddings, grads, embedding_offsets, tf.cast(scale, tf.float32), list(embedding_dims)
  )


# ---- reductions ----


def reduce_sum(
  id_indices: tf.Tensor, id_values: tf.Tensor, id_length: tf.Tensor, name: str | None = None
) -> tf.Tensor:
  """Returns the sum of each example's rows; examples without ids give 0.

  Args:
    id_indices: int64 [k, 1], example of every row.
    id_values: float [k, dim].
    id_length: int64 [1], number of examples.
    name: name of the op.

  Returns:
    float [number of examples, dim].
  """
  return gen_distribution_ops.monolith_reduce_sum(id_indices, id_values, id_length, name=name)


@tf.RegisterGradient("MonolithReduceSum")
def _reduce_sum_gradient(op: tf.Operation, grad: tf.Tensor):
  return None, gen_distribution_ops.monolith_reduce_sum_gradient(op.inputs[0], grad), None


def reduce_mean(
  id_indices: tf.Tensor, id_values: tf.Tensor, id_length: tf.Tensor, name: str | None = None
) -> tf.Tensor:
  """Returns the mean of each example's rows; takes what `reduce_sum` takes."""
  return gen_distribution_ops.monolith_reduce_mean(id_indices, id_values, id_length, name=name)


@tf.RegisterGradient("MonolithReduceMean")
def _reduce_mean_gradient(op: tf.Operation, grad: tf.Tensor):
  return None, gen_distribution_ops.monolith_reduce_mean_gradient(op.inputs[0], grad), None


def reduce_sqrtn(id_indices: tf.Tensor, id_values: tf.Tensor, id_length: tf.Tensor) -> tf.Tensor:
  """Returns the L2 norm of each example's rows, by column; takes what `reduce_sum` takes."""
  return gen_distribution_ops.monolith_reduce_square_norm(id_indices, id_values, id_length)


@tf.RegisterGradient("MonolithReduceSquareNorm")
def _reduce_square_norm_gradient(op: tf.Operation, grad: tf.Tensor):
  value_grads = gen_distribution_ops.monolith_reduce_square_norm_gradient(
    op.inputs[0], op.inputs[1], grad
  )
  return None, value_grads, None


def fused_sorted_segment_sum(
  indices: Sequence[tf.Tensor], values: Sequence[tf.Tensor], shapes: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Computes several segment sums in one op.

  Args:
    indices: int32 or int64 vectors, sorted.
    values: float [len(indices[i]), ...].
    shapes: shape of each result, of the type of `indices`.
  """
  return gen_distribution_ops.monolith_fused_segment_sum(indices, values, shapes)


@tf.RegisterGradient("MonolithFusedSegmentSum")
def _fused_segment_sum_gradient(op: tf.Operation, *grads: tf.Tensor):
  n = len(grads)
  gathered = [tf.gather(grad, tf.reshape(index, [-1])) for grad, index in zip(grads, op.inputs[:n])]
  return [None] * n + gathered + [None] * n


def fused_reduce_sum_and_split(
  id_indices: tf.Tensor,
  id_values: tf.Tensor,
  id_length: tf.Tensor,
  split_dims: Sequence[int],
  name: str | None = None,
) -> list[tf.Tensor]:
  """Returns the sum of each example's rows, its columns split.

  Args:
    id_indices: int64 [k], example of every row.
    id_values: float [k, sum(split_dims)].
    id_length: scalar, number of examples.
    split_dims: width of each result.
    name: name of the op.

  Returns:
    float [number of examples, split_dims[i]] each.
  """
  return gen_distribution_ops.monolith_fused_reduce_sum_and_split(
    tf.expand_dims(tf.convert_to_tensor(id_indices, tf.int64), -1),
    id_values,
    tf.expand_dims(tf.cast(id_length, tf.int64), 0),
    M=len(split_dims),
    split_dims=list(split_dims),
    name=name,
  )


@tf.RegisterGradient("MonolithFusedReduceSumAndSplit")
def _fused_reduce_sum_and_split_gradient(op: tf.Operation, *grads: tf.Tensor):
  value_grads = gen_distribution_ops.monolith_fused_reduce_sum_and_split_gradient(
    op.inputs[0], list(grads), op.get_attr("split_dims")
  )
  return None, value_grads, None


def fused_reduce_and_split_gpu(
  splits: Sequence[tf.Tensor],
  embeddings: Sequence[tf.Tensor],
  slice_dims: Sequence[Sequence[int]],
  name: str | None = None,
  has_one_each: tf.Tensor | None = None,
) -> list[tf.Tensor]:
  """Sums each table's rows between its row splits and cuts the columns into slices.

  Args:
    splits: row splits of each table, [batch + 1], of static length; every table has the same batch.
    embeddings: float [splits[i][-1], sum(slice_dims[i])].
    slice_dims: widths of the slices of each table.
    name: name of the op.
    has_one_each: bool [tables], on the host: whether each row has one id. The host that
      tells it has checked the splits, so that no step waits for a GPU to report on them.

  Returns:
    float [batch, width], the slices of all tables in order.

  Raises:
    ValueError: the length of some splits is not static.
  """
  starts = [0]
  for i, split in enumerate(splits):
    length = tf.convert_to_tensor(split).shape.as_list()[0]
    if length is None:
      raise ValueError(f"splits[{i}] has no static length")
    starts.append(starts[-1] + length)
  flat_dims = [dim for dims in slice_dims for dim in dims]
  if all("GPU" in getattr(split, "device", "") for split in splits):
    # There is nothing to copy then, if they stay. TensorFlow keeps int32 on the host otherwise.
    with tf.device(splits[0].device):
      merged_splits = tf.cast(tf.concat(splits, 0), tf.int32)
  else:
    with tf.device("/device:CPU:0"):
      merged_splits = tf.concat([tf.cast(split, tf.int32) for split in splits], 0)
  if has_one_each is not None:
    return gen_distribution_ops.monolith_pool_packed_ids(
      merged_splits,
      embeddings,
      has_one_each,
      num_slices=len(flat_dims),
      slice_dims=flat_dims,
      row_split_splits=starts,
      name=name,
    )
  return gen_distribution_ops.monolith_fused_reduce_and_split_gpu(
    merged_splits,
    embeddings,
    num_slices=len(flat_dims),
    slice_dims=flat_dims,
    row_split_splits=starts,
    name=name,
  )


@tf.RegisterGradient("MonolithFusedReduceAndSplitGPU")
def _fused_reduce_and_split_gpu_gradient(op: tf.Operation, *grads: tf.Tensor):
  embedding_grads = gen_distribution_ops.monolith_fused_reduce_and_split_gpu_grad(
    op.inputs[0],
    list(op.inputs[1:]),
    list(grads),
    slice_dims=op.get_attr("slice_dims"),
    row_split_splits=op.get_attr("row_split_splits"),
  )
  return [None] + list(embedding_grads)


@tf.RegisterGradient("MonolithPoolPackedIds")
def _pool_packed_ids_gradient(op: tf.Operation, *grads: tf.Tensor):
  splits, *embeddings, has_one_each = op.inputs
  embedding_grads = gen_distribution_ops.monolith_pool_packed_ids_grad(
    splits,
    embeddings,
    list(grads),
    has_one_each,
    slice_dims=op.get_attr("slice_dims"),
    row_split_splits=op.get_attr("row_split_splits"),
  )
  return [None] + list(embedding_grads) + [None]


def normalize_merged_split(row_split: tf.Tensor, row_split_size: tf.Tensor) -> tf.Tensor:
  """Makes one vector of row splits of several glued together.

  Args:
    row_split: int64, R row-split vectors one after the other.
    row_split_size: int32 [R], their lengths.

  Returns:
    int64 [len(row_split) + 1 - R].
  """
  return gen_distribution_ops.monolith_normalize_merged_split(row_split, row_split_size)
