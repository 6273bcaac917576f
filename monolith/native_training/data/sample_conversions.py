"""Samples made from strings: serialized samples of ours, and `tf.train.Example`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from monolith.native_training.data import data_op_config_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops as ragged_data_ops

_MAX_SLOT_V2 = 1 << 15


def string_to_variant(
  tensor: tf.Tensor,
  variant_type: str = "example",
  has_header: bool = False,
  has_sort_id: bool = False,
  lagrangex_header: bool = False,
  kafka_dump_prefix: bool = False,
  kafka_dump: bool = False,
  chnids: Sequence[int] | None = None,
  datasources: Sequence[str] | None = None,
  default_datasource: str = "",
) -> tf.Tensor:
  """Parses serialized samples.

  Args:
    tensor: strings of any shape; an empty one is a default sample.
    variant_type: `"instance"`, `"example"` or `"example_batch"`.
    has_header: whether strings are framed records; if so, the next four say with which headers.
    has_sort_id: whether a record has a sort id.
    lagrangex_header: whether it has a Lagrangex header.
    kafka_dump_prefix: whether it has the prefix of a dump.
    kafka_dump: whether it has the header of a dump.
    chnids: channels whose data source is known.
    datasources: the data source of each of `chnids`.
    default_datasource: the data source of other channels.

  Returns:
    Variants of the same shape.
  """
  return ragged_data_ops.string_to_variant(
    tensor,
    variant_type=variant_type,
    has_header=has_header,
    has_sort_id=has_sort_id,
    lagrangex_header=lagrangex_header,
    kafka_dump_prefix=kafka_dump_prefix,
    kafka_dump=kafka_dump,
    chnids=list(chnids or []),
    datasources=list(datasources or []),
    default_datasource=default_datasource,
  )


def string_to_variant_with_transform(
  tensor: tf.Tensor,
  input_type: str = "example",
  output_type: str = "example",
  has_header: bool = False,
  has_sort_id: bool = False,
  lagrangex_header: bool = False,
  kafka_dump_prefix: bool = False,
  kafka_dump: bool = False,
  chnids: Sequence[int] | None = None,
  datasources: Sequence[str] | None = None,
  default_datasource: str = "",
) -> tf.Tensor:
  """Parses serialized samples of `input_type` and converts them to `output_type`.

  Other arguments are those of `string_to_variant`.

  Returns:
    A vector of variants; every row of an ExampleBatch becomes a sample.
  """
  return ragged_data_ops.string_to_variant_with_transform(
    tensor,
    input_type=input_type,
    output_type=output_type,
    has_header=has_header,
    has_sort_id=has_sort_id,
    lagrangex_header=lagrangex_header,
    kafka_dump_prefix=kafka_dump_prefix,
    kafka_dump=kafka_dump,
    chnids=list(chnids or []),
    datasources=list(datasources or []),
    default_datasource=default_datasource,
  )


def tf_example_to_example(
  serialized: tf.Tensor,
  sparse_features: Mapping[str, int],
  dense_features: Sequence[str],
  label: str,
  instance_weight: str | None = None,
) -> tf.Tensor:
  """Converts a `tf.train.Example`.

  Args:
    serialized: a string scalar.
    sparse_features: feature -> slot; integers become ids of the slot, floats their logarithm.
    dense_features: features that are copied.
    label: the feature with the labels.
    instance_weight: the feature with the weight.

  Returns:
    An Example variant.

  Raises:
    AssertionError: a feature has two roles, or a slot is used twice or out of range.
  """
  names = [*sparse_features, *dense_features, *filter(None, [label, instance_weight])]
  assert len(names) == len(set(names)), f"a feature of {names} has two roles"
  slots = list(sparse_features.values())
  assert len(slots) == len(set(slots)), f"a slot of {slots} is used twice"
  assert all(
    1 <= slot < _MAX_SLOT_V2 for slot in slots
  ), f"slots {slots} must be in [1, {_MAX_SLOT_V2})"
  description = data_op_config_pb2.TFRecordFeatureDescription(
    sparse_features=dict(sparse_features),
    dense_features=list(dense_features),
    label=label or "",
    instance_weight=instance_weight or "",
  )
  return ragged_data_ops.monolith_tf_example_to_example(
    serialized, feature_description=description.SerializeToString()
  )
