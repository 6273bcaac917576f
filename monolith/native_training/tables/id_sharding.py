"""Splits the ids of a fused-layout batch by table and server, and says how to.

Parsers hand samples on, tables want the ids of each server: a `ParserCtx` is what the two tell one
another. `data.parsers` publishes these names.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import tensorflow as tf
from absl import logging

from idl.matrix.proto import example_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.tables.layout_config import ShardingSparseFidsOpParams


class ParserCtx:
  """Carries messages between parsers and the embedding layer; a context manager.

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


def sharding_sparse_fids(
  tensor: tf.Tensor,
  ps_num: int,
  feature_cfgs: example_pb2.FeatureConfigs | bytes,
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
    1: gen_monolith_ops.sharding_sparse_fids,
    2: gen_monolith_ops.sharding_sparse_fids_v2,
    3: gen_monolith_ops.sharding_sparse_fids_v3,
    4: gen_monolith_ops.sharding_sparse_fids_v4,
    5: gen_monolith_ops.sharding_sparse_fids_v5,
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
    ValueError: the context has no sharding parameters, or no parser was called yet.
  """
  ctx = parser_ctx or get_default_parser_ctx()
  params = ctx.sharding_sparse_fids_op_params
  if params is None:
    raise ValueError("sharding_sparse_fids_op_params of the parser context is not set")
  if ctx.parser_type is None:
    raise ValueError("parser_type of the parser context is not set: no parser was called yet")
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
    emb_row_lenth,
    table_row_length,
    shard_row_lenth,
  ) = sharding_sparse_fids(
    sparse_features,
    ps_num=params.num_ps,
    feature_cfgs=params.feature_configs,
    unique=params.unique() if callable(params.unique) else bool(params.unique),
    input_type=ctx.parser_type,
    # Among ranks: the ids of all tables in one tensor, ready to be exchanged.
    version=4 if params.enable_gpu_emb else 5,
  )
  sharded = {
    "fid_offset": fid_offset,
    "feature_offset": feature_offset,
    "nfl_offset": nfl_offset,
    "batch_size": batch_size,
  }
  if params.enable_gpu_emb:
    sharded["shards_value"] = shards
    sharded["shards_row_lengths"] = shard_row_lenth
    sharded["shards_table_row_lengths"] = table_row_length
    sharded["fid_list_emb_row_lenth"] = emb_row_lenth
    ParserCtx.sharding_sparse_fids_features_insert_to_features(sharded, features)
    return
  sharded["shards"] = shards
  sharded["nfl_size"] = nfl_size
  sharded["feature_size"] = feature_size
  sharded["fid_size"] = fid_size
  sharded["emb_size"] = emb_size
  if params.use_native_multi_hash_table:
    sharded["shards_row_split"] = row_splits
    sharded["shards_row_split_size"] = row_splits_size
  ParserCtx.sharding_sparse_fids_features_insert_to_features(sharded, features)
