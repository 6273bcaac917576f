"""Parses serialized Instances to tensors, with the features listed by type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import tensorflow as tf

from monolith.native_training.data import feature_list
from monolith.native_training.runtime.ops import gen_monolith_ops

Features = dict[str, Union[tf.Tensor, tf.RaggedTensor]]

monolith_raw_parse_instance = gen_monolith_ops.monolith_raw_parse_instance


def parse_instances2(
  serialized: tf.Tensor,
  fidv1_features: Sequence[int] | None = None,
  fidv2_features: Sequence[str] | None = None,
  float_features: Sequence[str] | None = None,
  float_feature_dims: Sequence[int] | None = None,
  int64_features: Sequence[str] | None = None,
  int64_feature_dims: Sequence[int] | None = None,
  string_features: Sequence[str] | None = None,
  string_feature_dims: Sequence[int] | None = None,
  misc_float_features: Sequence[str] | None = None,
  misc_float_dims: Sequence[int] | None = None,
  misc_int64_features: Sequence[str] | None = None,
  misc_int64_dims: Sequence[int] | None = None,
  misc_string_features: Sequence[str] | None = None,
  misc_string_dims: Sequence[int] | None = None,
) -> Features:
  """Parses a batch of Instances.

  Args:
    serialized: string [batch].
    fidv1_features: slots; their features are named `slot_<n>`.
    fidv2_features: sparse features; if there are any, v1 ids become v2 ids.
    float_features: features with floats.
    float_feature_dims: number of values of each; other sizes read as zeros.
    int64_features: features with integers.
    int64_feature_dims: number of values of each; other sizes read as zeros.
    string_features: features with strings.
    string_feature_dims: number of values of each; other sizes read as empty.
    misc_float_features: `label`, `instance_weight` and float fields of `LineId`.
    misc_float_dims: number of values of each, cut or padded.
    misc_int64_features: integer fields of `LineId`.
    misc_int64_dims: number of values of each, cut or padded.
    misc_string_features: string fields of `LineId`.
    misc_string_dims: number of values of each, cut or padded.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, `[batch, dim]` for others.
  """
  slots = list(fidv1_features or [])
  names = [feature_list.get_feature_name_and_slot(slot)[0] for slot in slots]
  names += fidv2_features or []
  out = gen_monolith_ops.monolith_parse_instances(
    serialized,
    N=len(names),
    M=len(float_features or []),
    O=len(int64_features or []),
    P=len(string_features or []),
    Q=len(misc_float_features or []),
    R=len(misc_int64_features or []),
    S=len(misc_string_features or []),
    fidv1_features=slots,
    fidv2_features=fidv2_features or [],
    float_features=float_features or [],
    float_feature_dims=float_feature_dims or [],
    int64_features=int64_features or [],
    int64_feature_dims=int64_feature_dims or [],
    string_features=string_features or [],
    string_feature_dims=string_feature_dims or [],
    misc_float_features=misc_float_features or [],
    misc_float_dims=misc_float_dims or [],
    misc_int64_features=misc_int64_features or [],
    misc_int64_dims=misc_int64_dims or [],
    misc_string_features=misc_string_features or [],
    misc_string_dims=misc_string_dims or [],
  )
  features: Features = {
    name: tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    for name, values, splits in zip(names, out.fid_values, out.fid_splits)
  }
  for dense_names, tensors in (
    (float_features, out.float_values),
    (int64_features, out.int64_values),
    (string_features, out.string_values),
    (misc_float_features, out.misc_float_values),
    (misc_int64_features, out.misc_int64_values),
    (misc_string_features, out.misc_string_values),
  ):
    features.update(zip(dense_names or [], tensors))
  return features


def parse_instances(
  serialized: tf.Tensor,
  fidv1_features: Sequence[int] | None = None,
  fidv2_features: Sequence[str] | None = None,
  float_features: Sequence[str] | None = None,
  float_feature_dims: Sequence[int] | None = None,
  int64_features: Sequence[str] | None = None,
  int64_feature_dims: Sequence[int] | None = None,
  string_features: Sequence[str] | None = None,
  string_feature_dims: Sequence[int] | None = None,
  misc_float_features: Sequence[str] | None = ("sample_rate",),
  misc_int64_features: Sequence[str] | None = ("req_time", "uid"),
  misc_string_features: Sequence[str] | None = None,
  misc_repeated_float_features: Sequence[str] | None = ("label",),
  misc_repeated_float_dims: Sequence[int] | None = None,
  misc_repeated_int64_features: Sequence[str] | None = None,
  misc_repeated_int64_dims: Sequence[int] | None = None,
  misc_repeated_string_features: Sequence[str] | None = None,
  misc_repeated_string_dims: Sequence[int] | None = None,
) -> Features:
  """Parses like `parse_instances2`, with scalar and repeated misc features apart.

  Args:
    serialized: string [batch].
    fidv1_features: slots; their features are named `slot_<n>`.
    fidv2_features: sparse features; if there are any, v1 ids become v2 ids.
    float_features: features with floats.
    float_feature_dims: number of values of each; other sizes read as zeros.
    int64_features: features with integers.
    int64_feature_dims: number of values of each; other sizes read as zeros.
    string_features: features with strings.
    string_feature_dims: number of values of each; other sizes read as empty.
    misc_float_features: scalar floats, returned as `[batch]`.
    misc_int64_features: scalar integers, returned as `[batch]`.
    misc_string_features: scalar strings, returned as `[batch, 1]`.
    misc_repeated_float_features: returned as `[batch, dim]`.
    misc_repeated_float_dims: by default 1 each.
    misc_repeated_int64_features: returned as `[batch, dim]`.
    misc_repeated_int64_dims: by default 1 each.
    misc_repeated_string_features: returned as `[batch, dim]`.
    misc_repeated_string_dims: by default 1 each.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, a dense tensor for others.
  """

  def join(
    scalars: Sequence[str] | None,
    repeated: Sequence[str] | None,
    dims: Sequence[int] | None,
  ) -> tuple[list[str], list[int]]:
    scalars, repeated = list(scalars or []), list(repeated or [])
    return scalars + repeated, [1] * len(scalars) + list(dims or [1] * len(repeated))

  floats, float_dims = join(
    misc_float_features, misc_repeated_float_features, misc_repeated_float_dims
  )
  ints, int_dims = join(misc_int64_features, misc_repeated_int64_features, misc_repeated_int64_dims)
  strings, string_dims = join(
    misc_string_features, misc_repeated_string_features, misc_repeated_string_dims
  )
  features = parse_instances2(
    serialized,
    fidv1_features,
    fidv2_features,
    float_features,
    float_feature_dims,
    int64_features,
    int64_feature_dims,
    string_features,
    string_feature_dims,
    misc_float_features=floats,
    misc_float_dims=float_dims,
    misc_int64_features=ints,
    misc_int64_dims=int_dims,
    misc_string_features=strings,
    misc_string_dims=string_dims,
  )
  for name in [*(misc_float_features or ()), *(misc_int64_features or ())]:
    features[name] = tf.reshape(features[name], [-1])
  return features
