"""Pools and arranges the embeddings of all features with one op: the fused layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf

from idl.matrix.proto.example_pb2 import FeatureConfigs
from monolith.native_training.runtime.ops import gen_monolith_ops as gen_distribution_ops

# One per input of an op; none where it has no gradient.
Grads = list[Optional[tf.Tensor]]

_VARIANT_TYPES = ("example", "example_batch", "examplebatch", "instance")


def _layout_attrs(variant_type: str, feature_cfgs: FeatureConfigs) -> dict[str, Any]:
  assert (
    variant_type in _VARIANT_TYPES
  ), f"variant_type is {variant_type!r}, want one of {_VARIANT_TYPES}"
  return {
    "variant_type": "example_batch" if variant_type == "examplebatch" else variant_type,
    "feature_cfgs": feature_cfgs.SerializeToString(deterministic=True),
  }


def _check_row_length(version: int, fid_list_emb_row_lenth: tf.Tensor | None) -> None:
  if version == 4:
    assert fid_list_emb_row_lenth is not None, "version 4 needs fid_list_emb_row_lenth"
  else:
    assert (
      fid_list_emb_row_lenth is None
    ), f"fid_list_emb_row_lenth belongs to version 4, not to {version}"


def _as_list(tensors: Any) -> list[Any]:
  return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _row_splits(fid_list_row_split: Any) -> list[tf.Tensor]:
  return [tf.convert_to_tensor(split, tf.int64) for split in fid_list_row_split]


def fused_embedding_to_layout(
  embeddings_list: Sequence[tf.Tensor],
  fid_list_row_split: Sequence[tf.Tensor] | None,
  fid_offset: tf.Tensor,
  feature_offset: tf.Tensor,
  nfl_offset: tf.Tensor,
  batch_size: tf.Tensor,
  variant_type: str,
  feature_cfgs: FeatureConfigs,
  ps_num: int,
  fid_list_emb_row_lenth: tf.Tensor | None = None,
  nfl_size: tf.Tensor | None = None,
  feature_size: tf.Tensor | None = None,
  fid_size: tf.Tensor | None = None,
  emb_size: tf.Tensor | None = None,
  parallel_flag: int = 0,
  version: int = 3,
) -> list[tf.Tensor]:
  """Pools the embeddings of a batch's ids into the layout tensors of `feature_cfgs`.

  Features, tables and layouts count in the order of their names; P is `ps_num`. The high and low 32
  bits of an entry of `fid_offset` say where the id's embedding is:

    version 2: index in the nesting table, ps, feature; row inside that block
    version 3, 5: table * P + ps; float offset in that vector
    version 4: table * P + ps; float offset in that block of the one vector, blocks by ps, table
    any other: index of a [n, dim] tensor; row

  Args:
    embeddings_list: float, one flat vector per table and ps, table-major; one vector in version
      4, `[n, dim]` tensors in version 1.
    fid_list_row_split: version 2: int64 [features of the table + 1] per vector, rows of each
      feature.
    fid_offset: uint64, one per id occurrence.
    feature_offset: int32, start in `fid_offset` of each (feature, example).
    nfl_offset: uint32, start in `feature_offset` of each feature; bit 31: one row for the whole
      batch.
    batch_size: int32, one element; version 5: one per request.
    variant_type: example, example_batch, examplebatch or instance.
    feature_cfgs: features and layouts.
    ps_num: number of parameter servers.
    fid_list_emb_row_lenth: version 4: int32 [P * tables], block lengths in the order ps, table.
    nfl_size: version 5: int32 [R], part of `nfl_offset` of each request.
    feature_size: version 5: int32 [R], part of `feature_offset`.
    fid_size: version 5: int32 [R], part of `fid_offset`.
    emb_size: version 5: int32 [R * len(embeddings_list)], request-major, part of each vector.
    parallel_flag: kept for compatibility; the result does not depend on it.
    version: which of the layouts above.

  Returns:
    The layout tensors, layouts in the order of their names, one per configured shape.
  """
  attrs = _layout_attrs(variant_type, feature_cfgs)
  attrs["num_out"] = sum(len(out.shape) for out in feature_cfgs.out_configs.values())
  _check_row_length(version, fid_list_emb_row_lenth)
  embeddings_list = _as_list(embeddings_list)
  offsets = (fid_offset, feature_offset, nfl_offset, batch_size)
  if version in (2, 3, 4, 5):
    attrs.update(ps_num=ps_num, parallel_flag=parallel_flag)
  if version == 2:
    return gen_distribution_ops.monolith_embedding_to_layout_v2(
      embeddings_list, _row_splits(fid_list_row_split), *offsets, **attrs
    )
  if version == 3:
    return gen_distribution_ops.monolith_embedding_to_layout_v3(embeddings_list, *offsets, **attrs)
  if version == 4:
    return gen_distribution_ops.monolith_embedding_to_layout_v4(
      embeddings_list, fid_list_emb_row_lenth, *offsets, **attrs
    )
  if version == 5:
    return gen_distribution_ops.monolith_embedding_to_layout_v5(
      embeddings_list, *offsets, nfl_size, feature_size, fid_size, emb_size, **attrs
    )
  return gen_distribution_ops.monolith_embedding_to_layout(embeddings_list, *offsets, **attrs)


def fused_embedding_to_layout_grad(
  nfl_offset: tf.Tensor,
  feature_offset: tf.Tensor,
  fid_offset: tf.Tensor,
  batch_size: tf.Tensor,
  embeddings_list: Sequence[tf.Tensor],
  fid_list_row_split: Sequence[tf.Tensor] | None,
  layout_tensors_grad: Sequence[tf.Tensor],
  variant_type: str,
  feature_cfgs: FeatureConfigs,
  ps_num: int,
  fid_list_emb_row_lenth: tf.Tensor | None = None,
  layout_tensors_grad_scale: tf.Tensor | None = None,
  parallel_flag: int = 0,
  version: int = 3,
) -> list[tf.Tensor]:
  """Computes the gradient of `fused_embedding_to_layout`; arguments of one name mean the same.

  Version 5 with one request is the same as version 3.

  Args:
    layout_tensors_grad: gradients of all layout tensors.
    layout_tensors_grad_scale: multiplies every layout gradient first.

  Returns:
    float, like `embeddings_list`.
  """
  attrs = _layout_attrs(variant_type, feature_cfgs)
  _check_row_length(version, fid_list_emb_row_lenth)
  grads = list(layout_tensors_grad)
  if layout_tensors_grad_scale is not None:
    grads = [grad * layout_tensors_grad_scale for grad in grads]
  embeddings_list = _as_list(embeddings_list)
  offsets = (fid_offset, feature_offset, nfl_offset, batch_size)
  if version in (2, 3, 4, 5):
    attrs.update(ps_num=ps_num, parallel_flag=parallel_flag)
  if version == 2:
    return gen_distribution_ops.monolith_embedding_to_layout_grad_v2(
      embeddings_list, _row_splits(fid_list_row_split), *offsets, grads, **attrs
    )
  if version in (3, 5):
    return gen_distribution_ops.monolith_embedding_to_layout_grad_v3(
      embeddings_list, *offsets, grads, **attrs
    )
  if version == 4:
    return gen_distribution_ops.monolith_embedding_to_layout_grad_v4(
      embeddings_list, fid_list_emb_row_lenth, *offsets, grads, **attrs
    )
  return gen_distribution_ops.monolith_embedding_to_layout_grad(
    embeddings_list, *offsets, grads, **attrs
  )


def _layout_gradient(
  op: tf.Operation,
  grads: Sequence[tf.Tensor],
  gradient_op: Callable[..., Sequence[tf.Tensor]],
  num_inputs: int,
) -> Grads:
  """Calls `gradient_op` on the first inputs after embeddings_list and pads the result with None.

  Args:
    op: the forward op.
    grads: gradients of the layout tensors.
    gradient_op: wrapper of the matching gradient op.
    num_inputs: tensor arguments of the gradient op between embeddings_list and the gradients.
  """
  num_lists = op.get_attr("M")
  attrs = {name: op.get_attr(name) for name in ("variant_type", "feature_cfgs")}
  if op.type != "MonolithEmbeddingToLayout":
    attrs.update(ps_num=op.get_attr("ps_num"), parallel_flag=0)
  others = list(op.inputs[num_lists:])
  embedding_grads = gradient_op(
    list(op.inputs[:num_lists]), *others[:num_inputs], list(grads), **attrs
  )
  return list(embedding_grads) + [None] * len(others)


@tf.RegisterGradient("MonolithEmbeddingToLayout")
def _embedding_to_layout_gradient(op: tf.Operation, *grads: tf.Tensor) -> Grads:
  return _layout_gradient(op, grads, gen_distribution_ops.monolith_embedding_to_layout_grad, 4)


@tf.RegisterGradient("MonolithEmbeddingToLayoutV2")
def _embedding_to_layout_v2_gradient(op: tf.Operation, *grads: tf.Tensor) -> Grads:
  num_lists = op.get_attr("M")

  def gradient_op(embeddings_list: Any, *others: Any, **attrs: Any) -> Any:
    return gen_distribution_ops.monolith_embedding_to_layout_grad_v2(
      embeddings_list, list(others[:num_lists]), *others[num_lists:], **attrs
    )

  return _layout_gradient(op, grads, gradient_op, num_lists + 4)


@tf.RegisterGradient("MonolithEmbeddingToLayoutV3")
def _embedding_to_layout_v3_gradient(op: tf.Operation, *grads: tf.Tensor) -> Grads:
  return _layout_gradient(op, grads, gen_distribution_ops.monolith_embedding_to_layout_grad_v3, 4)


@tf.RegisterGradient("MonolithEmbeddingToLayoutV4")
def _embedding_to_layout_v4_gradient(op: tf.Operation, *grads: tf.Tensor) -> Grads:
  return _layout_gradient(op, grads, gen_distribution_ops.monolith_embedding_to_layout_grad_v4, 5)


@tf.RegisterGradient("MonolithEmbeddingToLayoutV5")
def _embedding_to_layout_v5_gradient(op: tf.Operation, *grads: tf.Tensor) -> Grads:
  return _layout_gradient(op, grads, gen_distribution_ops.monolith_embedding_to_layout_grad_v3, 4)
