"""From samples to tensors: parsing, and sharding of ids for the fused embedding layout.

    batch of samples -- parse_examples --> {name: RaggedTensor of ids | [batch, shape] tensor}

With `ParserCtx.enable_fused_layout` sparse features are not parsed: the samples are handed on and
`sharding_sparse_fids` splits their ids by hash table and parameter server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Union

import tensorflow as tf
from absl import logging
from google.protobuf.descriptor import FieldDescriptor

from idl.matrix.proto import example_pb2, line_id_pb2
from monolith.native_training import utils
from monolith.native_training.data import data_op_config_pb2, feature_list
from monolith.native_training.data import utils as data_utils
from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.runtime.ops import gen_monolith_ops as parse_instance_ops

Features = dict[str, Union[tf.Tensor, tf.RaggedTensor]]

# Lets an op run that would otherwise have no output.
_FAKE_FEATURE = "__FAKE_FEATURE__"


@dataclasses.dataclass
class ShardingSparseFidsOpParams:
  """How `PartitionedHashTable` wants ids to be sharded.

  Attributes:
    num_ps: number of parameter servers.
    use_native_multi_hash_table: whether tables are one native multi table.
    unique: returns whether an id is listed once per feature.
    transfer_float16: whether embeddings travel as float16.
    sub_table_name_to_config: merged table -> its configuration.
    feature_configs: features, tables and layouts.
    enable_gpu_emb: whether embeddings live on GPUs.
    use_gpu: whether the dense part runs on a GPU.
    shared_tables: feature -> table, for native tables that several features share.
  """

  num_ps: int
  use_native_multi_hash_table: bool
  unique: Callable[[], bool]
  transfer_float16: bool
  sub_table_name_to_config: Mapping[str, Any]
  feature_configs: example_pb2.FeatureConfigs
  enable_gpu_emb: bool
  use_gpu: bool
  shared_tables: Mapping[str, str] = dataclasses.field(default_factory=dict)


class ParserCtx:
  """What parsers and the embedding layer tell one another; a context manager.

  Args:
    enable_fused_layout: hand samples on instead of parsing their sparse features.

  Attributes:
    parser_type: `"instance"`, `"example"` or `"examplebatch"` once a parser was called.
    sharding_sparse_fids_op_params: set by `PartitionedHashTable`.
  """

  enable_resource_constrained_roughsort = False
  sharding_sparse_fids_features_prefix = "__sharding_sparse_fids__"
  sharding_sparse_fids_sparse_features_key = "__sharding_sparse_fids__sparse_features"

  def __init__(self, enable_fused_layout: bool = False):
    self.parser_type: str | None = None
    self.enable_fused_layout = enable_fused_layout
    self.sharding_sparse_fids_op_params: ShardingSparseFidsOpParams | None = None
    self._values: dict[str, Any] = {}
    self._outer: list[ParserCtx | None] = []

  def __enter__(self) -> ParserCtx:
    global _default_parser_ctx
    self._outer.append(_default_parser_ctx)
    _default_parser_ctx = self
    return self

  def __exit__(self, *exc_info: Any) -> None:
    global _default_parser_ctx
    _default_parser_ctx = self._outer.pop()

  def set(self, key: str, value: Any) -> None:
    """Keeps `value` for `get`."""
    self._values[key] = value

  def get(self, key: str, default: Any = None) -> Any:
    """Returns what was kept under `key`."""
    return self._values.get(key, default)

  @classmethod
  def sharding_sparse_fids_features_insert_to_features(
    cls, inputs: Mapping[str, Any], features: MutableMapping[str, Any]
  ) -> None:
    """Puts tensors into `features` under `prefix + key`, or `prefix + key/sub` for a dict."""
    for key, value in inputs.items():
      name = cls.sharding_sparse_fids_features_prefix + key
      if isinstance(value, Mapping):
        for sub, tensor in value.items():
          if isinstance(tensor, Mapping):
            raise ValueError(f"{key}/{sub} is a dict, want at most two levels")
          features[f"{name}/{sub}"] = tensor
      elif value is not None:
        features[name] = value

  @classmethod
  def sharding_sparse_fids_features_parse_from_features(
    cls, features: MutableMapping[str, Any]
  ) -> dict[str, Any]:
    """Takes the tensors out of `features` again; the inverse of `..._insert_to_features`."""
    result: dict[str, Any] = {}
    prefix = cls.sharding_sparse_fids_features_prefix
    for name in [name for name in features if name.startswith(prefix)]:
      key, separator, sub = name[len(prefix) :].partition("/")
      value = features.pop(name)
      if separator:
        result.setdefault(key, {})[sub] = value
      else:
        result[key] = value
    return result


_default_parser_ctx: ParserCtx | None = None


def get_default_parser_ctx() -> ParserCtx:
  """Returns the innermost context, or one for the whole process."""
  global _default_parser_ctx
  if _default_parser_ctx is None:
    _default_parser_ctx = ParserCtx()
  return _default_parser_ctx


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
  if all(isinstance(feature, int) for feature in features):
    return [feature_list.get_feature_name_and_slot(slot)[0] for slot in features], list(features)
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


def sharding_sparse_fids(
  tensor: tf.Tensor,
  ps_num: int,
  feature_cfgs: example_pb2.FeatureConfigs,
  unique: bool,
  input_type: str,
  parallel_flag: int = 0,
  fid_list_ret_list: bool = False,
  version: int = 5,
) -> tuple[Any, ...]:
  """Splits the ids of a batch by hash table and parameter server.

  Tables and features are numbered in the order of their names; list j = table * servers + server.

  Args:
    tensor: samples in the form that `input_type` names.
    ps_num: number of parameter servers, at least 1 is used.
    feature_cfgs: features and their tables.
    unique: list an id once per feature.
    input_type: `"example"` or `"instance"`: a vector; `"examplebatch"`: a scalar or `[1]`.
    parallel_flag: 0: one thread.
    fid_list_ret_list: return lists instead of dicts keyed `"<table>:<ps>"`.
    version: 1 to 5, how offsets are counted and lists packed.

  Returns:
    `(fid_list, fid_offset, feature_offset, nfl_offset, batch_size, nfl_size, feature_size,
    fid_size, emb_size, row_splits, row_splits_size, emb_row_lenth, table_row_length,
    shard_row_lenth)`, `None` where a version has no such output.
  """
  serialized = feature_cfgs if isinstance(feature_cfgs, bytes) else feature_cfgs.SerializeToString()
  tables = sorted(
    {config.table for config in _as_feature_configs(feature_cfgs).feature_configs.values()}
  )
  servers = max(ps_num, 1)
  ops = {
    1: parse_instance_ops.sharding_sparse_fids,
    2: parse_instance_ops.sharding_sparse_fids_v2,
    3: parse_instance_ops.sharding_sparse_fids_v3,
    4: parse_instance_ops.sharding_sparse_fids_v4,
    5: parse_instance_ops.sharding_sparse_fids_v5,
  }
  if version not in ops:
    raise ValueError(f"version is {version}, want one of {sorted(ops)}")
  attrs = {
    "ps_num": ps_num,
    "feature_cfgs": serialized,
    "unique": unique,
    "input_type": input_type,
    "parallel_flag": parallel_flag,
  }
  if version != 4:
    attrs["N"] = len(tables) * servers
  out = ops[version](tensor, **attrs)._asdict()
  fid_list = out["fid_list"]
  row_splits = out["fid_list_row_splits"]
  row_splits_size = out.get("fid_list_row_splits_size")
  if version != 4 and not fid_list_ret_list:
    keys = [f"{table}:{ps}" for table in tables for ps in range(servers)]
    fid_list = dict(zip(keys, fid_list))
    row_splits = dict(zip(keys, row_splits))
    row_splits_size = None if row_splits_size is None else dict(zip(keys, row_splits_size))
  return (
    fid_list,
    out["fid_offset"],
    out["feature_offset"],
    out["nfl_offset"],
    out["batch_size"],
    out.get("nfl_size"),
    out.get("feature_size"),
    out.get("fid_size"),
    out.get("emb_size"),
    row_splits,
    row_splits_size,
    out.get("fid_list_emb_row_lenth"),
    out.get("fid_list_table_row_length"),
    out.get("fid_list_shard_row_lenth"),
  )


def _as_feature_configs(
  feature_cfgs: bytes | example_pb2.FeatureConfigs,
) -> example_pb2.FeatureConfigs:
  if isinstance(feature_cfgs, bytes):
    return example_pb2.FeatureConfigs.FromString(feature_cfgs)
  return feature_cfgs


def sharding_sparse_fids_with_context(
  sparse_features: tf.Tensor,
  features: MutableMapping[str, Any],
  parser_ctx: ParserCtx | None = None,
) -> None:
  """Shards samples as the context says and puts the result into `features`.

  Args:
    sparse_features: samples of the context's `parser_type`.
    features: gains the keys with the prefix of `ParserCtx`.
    parser_ctx: by default the innermost one.

  Raises:
    ValueError: the context has no sharding parameters.
    NotImplementedError: embeddings are to live on GPUs.
  """
  ctx = parser_ctx or get_default_parser_ctx()
  params = ctx.sharding_sparse_fids_op_params
  if params is None:
    raise ValueError("sharding_sparse_fids_op_params of the parser context is not set")
  if params.enable_gpu_emb:
    raise NotImplementedError("enable_gpu_emb is not supported")
  logging.debug("sharding ids of %s for %d servers", ctx.parser_type, params.num_ps)
  (
    shards,
    fid_offset,
    feature_offset,
    nfl_offset,
    batch_size,
    nfl_size,
    feature_size,
    fid_size,
    emb_size,
    row_splits,
    row_splits_size,
    *_,
  ) = sharding_sparse_fids(
    sparse_features,
    ps_num=params.num_ps,
    feature_cfgs=params.feature_configs,
    unique=params.unique() if callable(params.unique) else bool(params.unique),
    input_type=ctx.parser_type,
  )
  sharded = {
    "shards": shards,
    "fid_offset": fid_offset,
    "feature_offset": feature_offset,
    "nfl_offset": nfl_offset,
    "batch_size": batch_size,
    "nfl_size": nfl_size,
    "feature_size": feature_size,
    "fid_size": fid_size,
    "emb_size": emb_size,
  }
  if params.use_native_multi_hash_table:
    sharded["shards_row_split"] = row_splits
    sharded["shards_row_split_size"] = row_splits_size
  ParserCtx.sharding_sparse_fids_features_insert_to_features(sharded, features)
