"""Ops on single samples and on ids: filters, labels, slots, item pools.

Functions that return a bool are meant for `Dataset.filter`, those that return a variant for
`Dataset.map`. `use_f100_multi_head`, which no published kernel implements, is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

import tensorflow as tf

from idl.matrix.proto import line_id_pb2
from monolith import _tensorflow
from monolith.native_training.data import parsers
from monolith.native_training.data.item_pools import (  # noqa: F401  (part of this module)
  create_item_pool,
  item_pool_check,
  item_pool_random_fill,
  restore_item_pool,
  save_item_pool,
)
from monolith.native_training.data.kafka_resource import (  # noqa: F401  (part of this module)
  kafka_read_next,
  kafka_read_next_v2,
  kafka_resource_init,
)
from monolith.native_training.data.sample_conversions import (  # noqa: F401  (part of this module)
  string_to_variant,
  string_to_variant_with_transform,
  tf_example_to_example,
)
from monolith.native_training.runtime.ops import gen_monolith_ops as ragged_data_ops

Operand = Union[int, float, str, bytes, Sequence[Union[int, float, str, bytes]], None]

_LIST_OPS = ("any", "all", "diff")
_FILE_OPS = ("in", "not-in")


def _to_int64(values: Sequence[int] | None) -> list[int]:
  """Reinterprets unsigned 64-bit integers as signed ones."""
  result = []
  for value in values or []:
    if not -(1 << 63) <= value < 1 << 64:
      raise ValueError(f"{value} does not fit into 64 bits")
    result.append(value - (1 << 64) if value >= 1 << 63 else value)
  return result


def _as_list(operand: Operand) -> list:
  if operand is None:
    return []
  return list(operand) if isinstance(operand, (list, tuple, set)) else [operand]


def _operand_attrs(kind: tf.DType, operand: Operand) -> dict[str, list]:
  values = _as_list(operand)
  attrs: dict[str, list] = {"float_operand": [], "int_operand": [], "string_operand": []}
  if kind == tf.int64:
    attrs["int_operand"] = _to_int64([int(value) for value in values])
  elif kind == tf.float32:
    attrs["float_operand"] = [float(value) for value in values]
  else:
    attrs["string_operand"] = values
  return attrs


def _check_operand(op: str, operand: Operand, operand_filepath: str | None) -> None:
  given = [operand is not None, bool(operand_filepath)]
  assert sum(given) == 1, "give exactly one of operand and operand_filepath"
  assert (
    not operand_filepath or op in _FILE_OPS
  ), f"operand_filepath is only for {' and '.join(_FILE_OPS)}, but op is {op}"


def _line_id_field(field_name: str) -> tuple[tf.DType, bool]:
  """Returns dtype and whether it is a list."""
  field = line_id_pb2.LineId.DESCRIPTOR.fields_by_name.get(field_name)
  if field is None:
    raise ValueError(f"{field_name} is not a field of LineId")
  return parsers.ProtoType.get_tf_type(field.type), _tensorflow.is_repeated(field)


def filter_by_fids(
  variant: tf.Tensor,
  filter_fids: Sequence[int] | None = None,
  has_fids: Sequence[int] | None = None,
  select_fids: Sequence[int] | None = None,
  has_actions: Sequence[int] | None = None,
  req_time_min: int = 0,
  select_slots: Sequence[int] | None = None,
  variant_type: str = "instance",
) -> tf.Tensor:
  """Keeps samples by ids, slots, actions and request time.

  Args:
    variant: a sample.
    filter_fids: none of these ids.
    has_fids: at least one of these.
    select_fids: all of these.
    has_actions: at least one of these actions.
    req_time_min: earliest request time.
    select_slots: ids in all of these slots.
    variant_type: `"instance"` or `"example"`.

  Returns:
    A bool scalar.
  """
  return ragged_data_ops.set_filter(
    variant,
    filter_fids=_to_int64(filter_fids),
    has_fids=_to_int64(has_fids),
    select_fids=_to_int64(select_fids),
    has_actions=list(has_actions or []),
    req_time_min=req_time_min,
    select_slots=list(select_slots or []),
    variant_type=variant_type,
  )


def filter_by_value(
  variant: tf.Tensor,
  field_name: str,
  op: str,
  operand: Operand,
  variant_type: str = "instance",
  keep_empty: bool = False,
  operand_filepath: str | None = None,
) -> tf.Tensor:
  """Keeps samples by a field of `LineId`.

  Args:
    variant: a sample.
    field_name: the field.
    op: `gt ge eq lt le neq between in not-in`, strings also `startswith endswith`, lists only
      `any all diff`.
    operand: one or several values.
    variant_type: `"instance"` or `"example"`.
    keep_empty: what to do with an empty list field.
    operand_filepath: a file with a serialized `FilterValues` instead of `operand`.

  Returns:
    A bool scalar.
  """
  _check_operand(op, operand, operand_filepath)
  dtype, is_list = _line_id_field(field_name)
  assert is_list == (
    op in _LIST_OPS
  ), f"{field_name} is {'a' if is_list else 'no'} list, which op {op} cannot compare"
  return ragged_data_ops.value_filter(
    variant,
    field_name=field_name,
    op=op,
    operand_filepath=operand_filepath or "",
    keep_empty=keep_empty,
    variant_type=variant_type,
    **_operand_attrs(dtype, operand),
  )


def filter_by_feature_value(
  variant: tf.Tensor,
  field_name: str,
  op: str,
  operand: Operand,
  field_type: str,
  keep_empty: bool = False,
  operand_filepath: str | None = None,
) -> tf.Tensor:
  """Keeps Examples by a named feature.

  Args:
    variant: an Example.
    field_name: the feature.
    op: `gt ge eq lt le neq between in not-in`, bytes also `startswith endswith`, int64 also
      `any all diff`.
    operand: one or several values.
    field_type: `"int64"`, `"float"`, `"double"` or `"bytes"`.
    keep_empty: what to do when the feature is missing, empty or of another type.
    operand_filepath: a file with a serialized `FilterValues` instead of `operand`.

  Returns:
    A bool scalar.
  """
  _check_operand(op, operand, operand_filepath)
  dtypes = {"int64": tf.int64, "float": tf.float32, "double": tf.float32, "bytes": tf.string}
  assert field_type in dtypes, f"field_type is {field_type!r}, want one of {sorted(dtypes)}"
  return ragged_data_ops.feature_value_filter(
    variant,
    field_name=field_name,
    op=op,
    operand_filepath=operand_filepath or "",
    field_type=field_type,
    keep_empty=keep_empty,
    **_operand_attrs(dtypes[field_type], operand),
  )


def filter_by_label(
  variant: tf.Tensor,
  label_threshold: Sequence[float],
  filter_equal: bool = False,
  variant_type: str = "example",
) -> tf.Tensor:
  """Keeps samples with a label above its threshold, or equal to it unless `filter_equal`."""
  return ragged_data_ops.filter_by_label(
    variant,
    label_threshold=list(label_threshold),
    filter_equal=filter_equal,
    variant_type=variant_type,
  )


def special_strategy(
  variant: tf.Tensor,
  strategy_list: str | Sequence[int],
  strategy_conf: str | None = None,
  variant_type: str = "instance",
  keep_empty_strategy: bool = True,
) -> tf.Tensor:
  """Keeps samples by their special strategies.

  Args:
    variant: a sample; its first label changes when `strategy_conf` says so.
    strategy_list: strategies; the first one the sample has decides, a sample with none is dropped.
    strategy_conf: `"strategy:rate[:label],..."`.
    variant_type: `"instance"` or `"example"`.
    keep_empty_strategy: what to do with samples that have no strategies at all.

  Returns:
    A bool scalar.
  """
  if isinstance(strategy_list, str):
    strategy_list = [int(strategy) for strategy in strategy_list.split(",") if strategy.strip()]
  return ragged_data_ops.special_strategy(
    variant,
    special_strategies=list(strategy_list),
    strategy_conf=strategy_conf or "",
    variant_type=variant_type,
    keep_empty_strategy=keep_empty_strategy,
  )


def negative_sample(
  variant: tf.Tensor,
  drop_rate: float,
  label_index: int = 0,
  threshold: float = 0.0,
  variant_type: str = "instance",
  action_priority: str | None = None,
  per_action_drop_rate: str | None = None,
) -> tf.Tensor:
  """Drops a share of the samples whose label is below `threshold`.

  Args:
    variant: a sample.
    drop_rate: the share to drop.
    label_index: the label that counts.
    threshold: samples with this label or more are kept.
    variant_type: `"instance"` or `"example"`.
    action_priority: `"2,3,4"`, the best action first; a sample's best action gives its rate.
    per_action_drop_rate: `"1:1.0,2:0.0"`, the rates of actions.

  Returns:
    A bool scalar.
  """
  return ragged_data_ops.negative_sample(
    variant,
    drop_rate=drop_rate,
    label_index=label_index,
    threshold=threshold,
    variant_type=variant_type,
    action_priority=action_priority or "",
    per_action_drop_rate=per_action_drop_rate or "",
  )


def add_action(
  variant: tf.Tensor,
  field_name: str,
  op: str,
  operand: Operand,
  action: int,
  variant_type: str = "example",
) -> tf.Tensor:
  """Appends `action` when a scalar field of `LineId` compares true, as in `filter_by_value`."""
  dtype, is_list = _line_id_field(field_name)
  assert not is_list, f"{field_name} is a list"
  return ragged_data_ops.add_action(
    variant,
    field_name=field_name,
    op=op,
    action=action,
    variant_type=variant_type,
    **_operand_attrs(dtype, operand),
  )


def add_label(
  variant: tf.Tensor,
  config: str,
  negative_value: float,
  new_sample_rate: float,
  variant_type: str = "example",
) -> tf.Tensor:
  """Appends a label per task.

  Args:
    variant: a sample.
    config: `"pos,pos:neg,neg:rate;..."`: actions that make a task positive and negative, and the
      share of negatives to label.
    negative_value: the label of negatives.
    new_sample_rate: written into `LineId.sample_rate`, in (0, 1].
    variant_type: `"instance"` or `"example"`.

  Returns:
    The changed sample.
  """
  assert 0 < new_sample_rate <= 1, f"new_sample_rate is {new_sample_rate}, want it in (0, 1]"
  return ragged_data_ops.add_label(
    variant,
    config=parsers.parse_label_config(config).SerializeToString(),
    negative_value=negative_value,
    sample_rate=new_sample_rate,
    variant_type=variant_type,
  )


def scatter_label(variant: tf.Tensor, config: str, variant_type: str = "example") -> tf.Tensor:
  """Moves the first label to the index of the sample's channel, `"chnid:index,..."`."""
  return ragged_data_ops.scatter_label(variant, config=config, variant_type=variant_type)


def label_upper_bound(
  variant: tf.Tensor, label_upper_bounds: Sequence[float], variant_type: str = "instance"
) -> tf.Tensor:
  """Cuts each label at its bound."""
  return ragged_data_ops.label_upper_bound(
    variant, label_upper_bounds=list(label_upper_bounds), variant_type=variant_type
  )


def label_normalization(
  variant: tf.Tensor,
  norm_methods: Sequence[str],
  norm_values: Sequence[float],
  variant_type: str = "instance",
) -> tf.Tensor:
  """Applies each method with its value, in turn, to every label.

  Args:
    variant: a sample.
    norm_methods: `log`, `scale`, `scale2int`, `pow`, `repow` or `scalelog` each.
    norm_values: one per method.
    variant_type: `"instance"` or `"example"`.

  Returns:
    The changed sample.
  """
  assert len(norm_methods) == len(
    norm_values
  ), f"{len(norm_methods)} norm_methods, but {len(norm_values)} norm_values"
  return ragged_data_ops.label_normalization(
    variant,
    norm_methods=list(norm_methods),
    norm_values=list(norm_values),
    variant_type=variant_type,
  )


def use_field_as_label(
  variant: tf.Tensor,
  field_name: str,
  overwrite_invalid_value: bool = False,
  label_threshold: float = 7200,
  variant_type: str = "instance",
) -> tf.Tensor:
  """Raises every label to a field of `LineId`.

  Args:
    variant: a sample.
    field_name: a numeric field.
    overwrite_invalid_value: count large values as 0.
    label_threshold: values from here on are large.
    variant_type: `"instance"` or `"example"`.

  Returns:
    The changed sample.
  """
  return ragged_data_ops.use_field_as_label(
    variant,
    field_name=field_name,
    overwrite_invalid_value=overwrite_invalid_value,
    label_threshold=label_threshold,
    variant_type=variant_type,
  )


def multi_label_gen(
  variant: tf.Tensor,
  head_to_index: Mapping[str | int, int],
  head_field: str = "chnid",
  pos_actions: Sequence[int] | None = None,
  neg_actions: Sequence[int] | None = None,
  use_origin_label: bool = False,
  pos_label: float = 1.0,
  neg_label: float = 0.0,
  action_priority: str | None = None,
  task_num: int | None = None,
  variant_type: str = "example",
) -> tf.Tensor:
  """Puts the sample's label at the index of its head; other labels are invalid.

  Args:
    variant: a sample.
    head_to_index: value of the head field -> index of the label.
    head_field: an integer or string field of `LineId`.
    pos_actions: actions that make the label positive.
    neg_actions: actions that make it negative.
    use_origin_label: take the first label instead of looking at actions.
    pos_label: the positive label.
    neg_label: the negative label.
    action_priority: `"4,3,2"`, the best action, which decides, first.
    task_num: number of labels, by default one more than the largest index.
    variant_type: `"instance"` or `"example"`.

  Returns:
    The changed sample.
  """
  largest = max(head_to_index.values()) + 1
  task_num = task_num or largest
  assert task_num >= largest, f"task_num is {task_num}, want at least {largest}"
  assert use_origin_label or pos_actions, "give pos_actions or use_origin_label"
  return ragged_data_ops.multi_label_gen(
    variant,
    head_to_index=",".join(f"{head}:{index}" for head, index in head_to_index.items()),
    head_field=head_field,
    pos_actions=list(pos_actions or []),
    neg_actions=list(neg_actions or []),
    use_origin_label=use_origin_label,
    pos_label=pos_label,
    neg_label=neg_label,
    action_priority=action_priority or "",
    task_num=task_num,
    variant_type=variant_type,
  )


def fill_multi_rank_output(
  variant: tf.Tensor,
  enable_draw_as_rank: bool = False,
  enable_chnid_as_rank: bool = False,
  enable_lineid_rank_as_rank: bool = False,
  rank_num: int = 18,
  variant_type: str = "instance",
) -> tf.Tensor:
  """Appends the rank of the sample to its labels: is_draw, chnid (0, 1, else 2) or rank."""
  return ragged_data_ops.fill_multi_rank_output(
    variant,
    enable_draw_as_rank=enable_draw_as_rank,
    enable_chnid_as_rank=enable_chnid_as_rank,
    enable_lineid_rank_as_rank=enable_lineid_rank_as_rank,
    rank_num=rank_num,
    variant_type=variant_type,
  )


def use_f100_multi_head(variant: tf.Tensor, variant_type: str = "instance") -> tf.Tensor:
  """Refuses: the strategy has no published definition.

  Raises:
    NotImplementedError: always.
  """
  raise NotImplementedError("use_f100_multi_head has no published definition")


def switch_slot(ragged: tf.RaggedTensor, slot: int) -> tf.RaggedTensor:
  """Replaces the slot of every v2 id."""
  _, values = ragged_data_ops.switch_slot(
    ragged.nested_row_splits, ragged.flat_values, slot=slot, fid_version=2
  )
  return ragged.with_flat_values(values)


def feature_combine(src1: tf.RaggedTensor, src2: tf.RaggedTensor, slot: int) -> tf.RaggedTensor:
  """Crosses the ids of each row to v2 ids of `slot`, those of `src1` outer."""
  splits, values = ragged_data_ops.feature_combine(
    src1.nested_row_splits,
    src1.flat_values,
    src2.nested_row_splits,
    src2.flat_values,
    slot=slot,
    fid_version=2,
  )
  return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)


def switch_slot_batch(
  variant: tf.Tensor,
  features: Mapping[str, tuple[bool, int]],
  variant_type: str = "example_batch",
  suffix: str = "share",
) -> tf.Tensor:
  """Replaces the slot of the ids of features.

  Args:
    variant: an ExampleBatch, or Examples of any shape.
    features: name -> (in place, slot); if not in place, another feature is added.
    variant_type: `"example_batch"` or `"example"`.
    suffix: the feature that is added is named `<name>_<suffix>`.

  Returns:
    The changed samples.
  """
  return ragged_data_ops.switch_slot_batch(
    variant,
    features=list(features),
    inplaces=[inplace for inplace, _ in features.values()],
    slots=[slot for _, slot in features.values()],
    suffix=suffix,
    variant_type=variant_type,
  )


def map_id(tensor: tf.Tensor, map_dict: Mapping[int, int], default: int = -1) -> tf.Tensor:
  """Maps integers; those that are not in `map_dict` become `default`."""
  return ragged_data_ops.map_id(
    tensor,
    from_value=list(map_dict.keys()),
    to_value=list(map_dict.values()),
    default_value=default,
  )


def gen_fid_mask(ragged: tf.RaggedTensor, fid: int) -> tf.Tensor:
  """Returns float [rows]: 1 for rows that have the id."""
  return ragged_data_ops.monolith_gen_fid_mask(
    ragged.row_splits, ragged.flat_values, fid=_to_int64([fid])[0]
  )


def variant_to_zeros(tensor: tf.Tensor) -> tf.Tensor:
  """Returns int64 zeros of the shape of `tensor`."""
  return ragged_data_ops.variant_to_zeros(tensor)


def has_variant(input: tf.Tensor, variant_type: str = "example") -> tf.Tensor:
  """Returns whether the sample has any content."""
  return ragged_data_ops.has_variant(input, variant_type=variant_type)
