"""From samples to tensors: parsing, and sharding of ids for the fused embedding layout.

    batch of samples -- parse_examples --> {name: RaggedTensor of ids | [batch, shape] tensor}

With `ParserCtx.enable_fused_layout` sparse features are not parsed: the samples are handed on and
`sharding_sparse_fids` splits their ids by hash table and parameter server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf
from google.protobuf.descriptor import FieldDescriptor

from idl.matrix.proto import line_id_pb2
from monolith.native_training import utils
from monolith.native_training.data import data_op_config_pb2, feature_list
from monolith.native_training.data import utils as data_utils
from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.runtime.ops import gen_monolith_ops as parse_instance_ops
from monolith.native_training.tables import id_sharding, layout_config

ShardingSparseFidsOpParams = layout_config.ShardingSparseFidsOpParams
ParserCtx = id_sharding.ParserCtx
get_default_parser_ctx = id_sharding.get_default_parser_ctx
sharding_sparse_fids = id_sharding.sharding_sparse_fids
sharding_sparse_fids_with_context = id_sharding.sharding_sparse_fids_with_context

Features = dict[str, Union[tf.Tensor, tf.RaggedTensor]]

# Lets an op run that would otherwise have no output.
_FAKE_FEATURE = "__FAKE_FEATURE__"


class ProtoType:
  """Kinds of proto fields, and the dtype of their tensors."""

  TYPE_INT = frozenset(
    {
      FieldDescriptor.TYPE_INT32,
      FieldDescriptor.TYPE_INT64,
      FieldDescriptor.TYPE_UINT32,
      FieldDescriptor.TYPE_UINT64,
      FieldDescriptor.TYPE_FIXED32,
      FieldDescriptor.TYPE_FIXED64,
      FieldDescriptor.TYPE_SFIXED32,
      FieldDescriptor.TYPE_SFIXED64,
      FieldDescriptor.TYPE_SINT32,
      FieldDescriptor.TYPE_SINT64,
      FieldDescriptor.TYPE_ENUM,
    }
  )
  TYPE_FLOAT = frozenset({FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE})
  TYPE_STRING = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})

  @classmethod
  def get_tf_type(cls, proto_type: int) -> tf.DType:
    """Returns the dtype for a `FieldDescriptor.TYPE_*`.

    Raises:
      Exception: it is a bool or a message.
    """
    if proto_type in cls.TYPE_INT:
      return tf.int64
    if proto_type in cls.TYPE_FLOAT:
      return tf.float32
    if proto_type in cls.TYPE_STRING:
      return tf.string
    raise Exception(f"proto_type {proto_type} is not a number or a string")


def _line_id_type(name: str) -> tf.DType:
  field = line_id_pb2.LineId.DESCRIPTOR.fields_by_name.get(name)
  try:
    return ProtoType.get_tf_type(field.type)
  except Exception as e:
    raise Exception(f"{name} is not in line id, pls check!") from e


@dataclasses.dataclass
class _Request:
  """`names`, `shapes` and `dtypes` of a parse op."""

  names: list[str] = dataclasses.field(default_factory=list)
  shapes: list[int] = dataclasses.field(default_factory=list)
  dtypes: list[tf.DType] = dataclasses.field(default_factory=list)
  extra_names: list[str] = dataclasses.field(default_factory=list)

  def add_sparse(self, names: Sequence[str]) -> None:
    self.names += names
    self.shapes += [-1] * len(names)
    self.dtypes += [tf.int64] * len(names)

  def add_dense(
    self,
    names: Sequence[str] | None,
    shapes: Sequence[int] | None,
    dtypes: Sequence[tf.DType] | None,
  ) -> None:
    if not names:
      return
    assert shapes is not None and len(names) == len(
      shapes
    ), f"dense_features has {len(names)} names, but dense_feature_shapes is {shapes}"
    assert all(shape > 0 for shape in shapes), f"dense_feature_shapes {shapes} must be positive"
    dtypes = dtypes or [tf.float32] * len(names)
    assert len(names) == len(
      dtypes
    ), f"dense_features has {len(names)} names, but dense_feature_types has {len(dtypes)}"
    self.names += names
    self.shapes += shapes
    self.dtypes += [tf.as_dtype(dtype) for dtype in dtypes]

  def add_extra(self, names: Sequence[str] | None, shapes: Sequence[int] | None) -> None:
    if not names:
      return
    shapes = shapes or [1] * len(names)
    assert len(names) == len(
      shapes
    ), f"extra_features has {len(names)} names, but extra_feature_shapes has {len(shapes)}"
    assert all(shape > 0 for shape in shapes), f"extra_feature_shapes {shapes} must be positive"
    self.names += names
    self.shapes += shapes
    self.dtypes += [_line_id_type(name) for name in names]
    self.extra_names += names

  @property
  def num_sparse(self) -> int:
    return self.shapes.count(-1)

  def attrs(self) -> dict[str, Any]:
    assert len(self.names) == len(set(self.names)), "deplicate names, pls check!"
    return {
      "names": self.names,
      "shapes": self.shapes,
      "dtypes": self.dtypes + [tf.int64] * self.num_sparse,
      "extra_names": self.extra_names,
    }

  def collect(self, tensors: Sequence[tf.Tensor], batch_size: int | None = None) -> Features:
    """Turns the outputs of the op into features."""
    features: Features = {}
    for i, name in enumerate(self.names):
      if self.shapes[i] != -1:
        features[name] = tensors[i]
        continue
      splits = tensors[i]
      if batch_size is not None:
        splits = tf.ensure_shape(splits, [batch_size + 1])
      features[name] = tf.RaggedTensor.from_row_splits(
        tensors[len(self.names) + i], splits, validate=False
      )
    return features


def _record(variant_type: str, parser_type: str, **arguments: Any) -> ParserCtx:
  """Notes the arguments of a parser in collections and its type in the context."""
  for name, value in arguments.items():
    utils.add_to_collections(name, value)
  utils.add_to_collections("variant_type", variant_type)
  ctx = get_default_parser_ctx()
  ctx.parser_type = parser_type
  return ctx


class _OtherFeatures(NamedTuple):
  """The arguments that all parsers share: features that are not sparse."""

  dense_features: Sequence[str] | None
  dense_feature_shapes: Sequence[int] | None
  dense_feature_types: Sequence[tf.DType] | None
  extra_features: Sequence[str] | None
  extra_feature_shapes: Sequence[int] | None

  def with_defaults(self) -> _OtherFeatures:
    """Copies the extra features, and adds what resource-constrained rough sorting needs."""
    names = list(self.extra_features or [])
    shapes = list(self.extra_feature_shapes or [1] * len(names))
    if ParserCtx.enable_resource_constrained_roughsort and "item_id" not in names:
      names.append("item_id")
      shapes.append(1)
    return self._replace(extra_features=names, extra_feature_shapes=shapes)


def _parse_samples(
  variant_type: str,
  op: Callable[..., Any],
  op_v2: Callable[..., Any],
  tensor: Any,
  sparse_features: Sequence[str],
  sparse_arguments: Mapping[str, Any],
  others: _OtherFeatures,
  **attrs: Any,
) -> Features:
  """Notes the arguments of a parser and runs its op.

  Args:
    variant_type: what the samples are, as the ops that filter samples call it.
    op: parses all features.
    op_v2: parses all but the sparse ones, and hands the samples on for the fused layout.
    tensor: the samples.
    sparse_features: the names of the sparse features in the result.
    sparse_arguments: the parser's arguments about sparse features.
    others: the parser's other arguments.
    **attrs: attributes of the op.
  """
  others = others.with_defaults()
  parser_type = variant_type.replace("_", "")
  ctx = _record(variant_type, parser_type, **sparse_arguments, **others._asdict())
  request = _Request()
  if not ctx.enable_fused_layout:
    request.add_sparse(list(sparse_features))
  request.add_dense(others.dense_features, others.dense_feature_shapes, others.dense_feature_types)
  request.add_extra(others.extra_features, others.extra_feature_shapes)
  batch_size = ctx.get("batch_size") if parser_type == "examplebatch" else None
  return _parse(
    op, op_v2, tensor, request, ctx, batch_size if isinstance(batch_size, int) else None, **attrs
  )


def _parse(
  op: Callable[..., Any],
  op_v2: Callable[..., Any],
  tensor: Any,
  request: _Request,
  ctx: ParserCtx,
  batch_size: int | None = None,
  **attrs: Any,
) -> Features:
  tensor = tf.convert_to_tensor(tensor)
  if not ctx.enable_fused_layout:
    if not request.names:
      raise ValueError("nothing to parse: all feature lists are empty")
    return request.collect(op(tensor, **request.attrs(), **attrs), batch_size)
  fake = not request.names
  if fake:
    request.add_dense([_FAKE_FEATURE], [1], None)
  tensors, protos = op_v2(tensor, **request.attrs(), **attrs)
  features = request.collect(tensors)
  if fake:
    del features[_FAKE_FEATURE]
  params = ctx.sharding_sparse_fids_op_params
  if params is not None and (params.use_gpu or get_flag("dataset_use_dataservice", False)):
    sharding_sparse_fids_with_context(protos, features, ctx)
  else:
    features[ParserCtx.sharding_sparse_fids_sparse_features_key] = protos
  return features


def parse_instances(
  tensor: tf.Tensor,
  fidv1_features: Sequence[int | str] | None = None,
  fidv2_features: Sequence[str] | None = None,
  dense_features: Sequence[str] | None = None,
  dense_feature_shapes: Sequence[int] | None = None,
  dense_feature_types: Sequence[tf.DType] | None = None,
  extra_features: Sequence[str] | None = None,
  extra_feature_shapes: Sequence[int] | None = None,
) -> Features:
  """Parses a batch of Instances.

  Args:
    tensor: [batch], variants or serialized Instances.
    fidv1_features: slots, or names of features whose slots are known.
    fidv2_features: names of sparse features; if there are any, v1 ids become v2 ids.
    dense_features: names of dense features, `label` and `instance_weight` among them.
    dense_feature_shapes: number of values of each dense feature.
    dense_feature_types: dtype of each dense feature, float32 by default.
    extra_features: names of fields of `LineId`.
    extra_feature_shapes: number of values of each extra feature, 1 by default.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, `[batch, shape]` for others.

  Raises:
    RuntimeError: a name in `fidv1_features` has no known slot.
  """
  names, slots = _resolve_fidv1(fidv1_features or [])
  fidv2_features = list(fidv2_features or [])
  is_fused = get_default_parser_ctx().enable_fused_layout
  return _parse_samples(
    "instance",
    parse_instance_ops.parse_instances,
    parse_instance_ops.parse_instances_v2,
    tensor,
    names + fidv2_features,
    {"fidv1_features": slots, "fidv2_features": fidv2_features},
    _OtherFeatures(
      dense_features,
      dense_feature_shapes,
      dense_feature_types,
      extra_features,
      extra_feature_shapes,
    ),
    fidv1_features=[] if is_fused else slots,
    fidv2_features=[] if is_fused else fidv2_features,
  )


def _resolve_fidv1(features: Sequence[int | str]) -> tuple[list[str], list[int]]:
  given = [feature for feature in features if isinstance(feature, int)]
  if len(given) == len(features):
    return [feature_list.get_feature_name_and_slot(slot)[0] for slot in given], given
  names, slots = [], []
  for feature in features:
    known = isinstance(feature, str) and (
      get_flag("feature_list") or data_utils.find_slot(feature) is not None
    )
    if not known:
      raise RuntimeError("fidv1_features error")
    name, slot = feature_list.get_feature_name_and_slot(feature)
    names.append(name)
    slots.append(slot)
  return names, slots


def parse_examples(
  tensor: tf.Tensor,
  sparse_features: Sequence[str],
  dense_features: Sequence[str] | None = None,
  dense_feature_shapes: Sequence[int] | None = None,
  dense_feature_types: Sequence[tf.DType] | None = None,
  extra_features: Sequence[str] | None = None,
  extra_feature_shapes: Sequence[int] | None = None,
) -> Features:
  """Parses a batch of Examples.

  Args:
    tensor: [batch], variants or serialized Examples.
    sparse_features: names of features with ids; v1 ids become v2 ids.
    dense_features: names of dense features, `label` and `instance_weight` among them.
    dense_feature_shapes: number of values of each dense feature.
    dense_feature_types: dtype of each dense feature, float32 by default.
    extra_features: names of fields of `LineId`.
    extra_feature_shapes: number of values of each extra feature, 1 by default.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, `[batch, shape]` for others.
  """
  return _parse_samples(
    "example",
    parse_instance_ops.parse_examples,
    parse_instance_ops.parse_examples_v2,
    tensor,
    sparse_features,
    {"sparse_features": sparse_features},
    _OtherFeatures(
      dense_features,
      dense_feature_shapes,
      dense_feature_types,
      extra_features,
      extra_feature_shapes,
    ),
  )


def parse_example_batch(
  tensor: tf.Tensor,
  sparse_features: Sequence[str],
  dense_features: Sequence[str] | None = None,
  dense_feature_shapes: Sequence[int] | None = None,
  dense_feature_types: Sequence[tf.DType] | None = None,
  extra_features: Sequence[str] | None = None,
  extra_feature_shapes: Sequence[int] | None = None,
) -> Features:
  """Parses one ExampleBatch.

  Args:
    tensor: a scalar, or a vector of which the first element is used.
    sparse_features: names of features with ids; v1 ids become v2 ids.
    dense_features: names of dense features, `label` and `instance_weight` among them.
    dense_feature_shapes: number of values of each dense feature.
    dense_feature_types: dtype of each dense feature, float32 by default.
    extra_features: names of fields of `LineId`.
    extra_feature_shapes: number of values of each extra feature, 1 by default.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, `[batch, shape]` for others.
    Row splits have a static shape if the parser context knows `batch_size`.
  """
  return _parse_samples(
    "example_batch",
    parse_instance_ops.parse_example_batch,
    parse_instance_ops.parse_example_batch_v2,
    tensor,
    sparse_features,
    {"sparse_features": sparse_features},
    _OtherFeatures(
      dense_features,
      dense_feature_shapes,
      dense_feature_types,
      extra_features,
      extra_feature_shapes,
    ),
  )


def parse_example_batch_list(
  tensor: list[tf.Tensor],
  label_config: str | None = None,
  positive_label: float = 1.0,
  negative_label: float = 0.0,
  names: Sequence[str] | None = None,
  shapes: Sequence[int] | None = None,
  dtypes: Sequence[tf.DType] | None = None,
  extra_features: Sequence[str] | None = None,
) -> Features:
  """Merges ExampleBatches of the same rows and parses the result.

  Args:
    tensor: variants, one ExampleBatch each. Ids get the `id` of their column as slot.
    label_config: `"pos,pos:neg,neg;..."`, one part per task: builds `label` from the actions.
    positive_label: the label of a task with a positive action.
    negative_label: the label of a task with a negative one, or without if none are listed.
    names: features, sparse ones first.
    shapes: -1 for a sparse feature, else the number of its values.
    dtypes: dtype of each name.
    extra_features: those of `names` that are fields of `LineId`.

  Returns:
    name -> ragged int64 `[batch, None]` for sparse features, `[batch, shape]` for others;
    with `label_config` also `label`, `[batch, tasks]`.
  """
  assert names and shapes and dtypes, "names, shapes and dtypes are needed"
  assert (
    len(names) == len(shapes) == len(dtypes)
  ), f"names, shapes and dtypes have {len(names)}, {len(shapes)} and {len(dtypes)} elements"
  labels = parse_label_config(label_config) if label_config else None
  request = _Request(
    list(names), list(shapes), [tf.as_dtype(t) for t in dtypes], list(extra_features or [])
  )
  if labels is not None and "label" not in names:
    request.add_dense(["label"], [len(labels.conf)], [tf.float32])
  _record(
    "example_batch", "examplebatch", names=names, shapes=shapes, extra_features=extra_features
  )
  tensors = parse_instance_ops.parse_example_batch_list(
    tensor,
    label_config=b"" if labels is None else labels.SerializeToString(),
    positive_label=positive_label,
    negative_label=negative_label,
    **request.attrs(),
  )
  return request.collect(tensors)


def parse_label_config(config: str) -> data_op_config_pb2.LabelConf:
  """Parses `"1,2:3:1.0;4::0.5"`: positive actions, negative actions, sample rate of each task.

  Negative actions and the rate may be left out.

  Raises:
    ValueError: a task has no positive action, or an action that is both.
  """
  result = data_op_config_pb2.LabelConf()
  for task in filter(None, (part.strip() for part in config.split(";"))):
    parts = task.split(":")
    if len(parts) > 3:
      raise ValueError(f"label config {task!r} has {len(parts)} parts, want at most 3")
    actions = [[int(action) for action in part.split(",") if action.strip()] for part in parts[:2]]
    positive, negative = actions[0], actions[1] if len(actions) > 1 else []
    if not positive:
      raise ValueError(f"label config {task!r} has no positive action")
    both = set(positive) & set(negative)
    if both:
      raise ValueError(f"label config {task!r}: actions {sorted(both)} are positive and negative")
    conf = result.conf.add(pos_actions=positive, neg_actions=negative)
    if len(parts) > 2 and parts[2].strip():
      conf.sample_rate = float(parts[2])
  return result
