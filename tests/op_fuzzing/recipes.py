"""Accepted calls of ops whose arguments fit together in ways that chance does not find."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from tests.op_fuzzing import cases, messages

_LAYOUT = "MonolithEmbeddingToLayout"
_SPLIT = "SplitFlowDataset"


def exists(op: str) -> bool:
  """Tells whether there is a recipe for the op."""
  return op.startswith(_LAYOUT) or op == _SPLIT or "FusedLookup" in op or "FusedOptimize" in op


def make(maker: Any) -> cases.Case:
  """Returns a call of `maker.op` with the sizes of `maker`."""
  if maker.op.startswith(_LAYOUT):
    arguments = _layout(maker)
  elif maker.op == _SPLIT:
    arguments = _split(maker)
  else:
    arguments = _fused(maker)
  return cases.Case(maker.op, maker.seed, "eager", arguments)


def _tensor(values: Any, dtype: tf.DType, shape: tuple[int, ...] | None = None) -> cases.Tensor:
  array = np.array(values, dtype.as_numpy_dtype).reshape(-1)
  return cases.Tensor(array, (array.size,) if shape is None else shape, dtype)


def _layout(maker: Any) -> dict[str, Any]:
  """Returns a batch of `n` rows with one id each, in one table on one server."""
  n, dim, version = maker.n, maker.dim, 1
  if maker.op[-2] == "V":
    version = int(maker.op[-1])
  is_grad = "Grad" in maker.op
  if is_grad and version == 5:
    version = 3
  proto = example_pb2.FeatureConfigs()
  proto.feature_configs["f1"].table = "t0"
  proto.feature_configs["f1"].slice_dims.append(dim)
  out = proto.out_configs["o"]
  out.slice_configs.add(feature_name="f1", start=0, end=dim)
  out.shape.add(dims=[-1, dim])
  step = 1 if version in (1, 2) else dim
  floats = np.linspace(-1, 1, n * dim)
  arguments: dict[str, Any] = {
    "embeddings_list": [_tensor(floats, tf.float32, (n, dim))],
    "fid_offset": _tensor(np.arange(n) * step, tf.uint64),
    "feature_offset": _tensor(np.arange(n + 1), tf.int32),
    "nfl_offset": _tensor([0, n + 1], tf.uint32),
    "batch_size": _tensor([n], tf.int32, ()),
    "variant_type": "example",
    "feature_cfgs": proto.SerializeToString(),
  }
  if maker.rng.random() < 0.5:
    arguments["nfl_offset"] = _tensor([0, n], tf.uint32)
  if version > 1 or maker.op.endswith("V5"):
    arguments |= {"ps_num": 1, "parallel_flag": 0}
  if version == 2:
    arguments["fid_list_row_split"] = [_tensor([0, n], tf.int64)]
  if version == 4:
    arguments["fid_list_emb_row_lenth"] = _tensor([n * dim], tf.int32)
  if version == 5:
    arguments["batch_size"] = _tensor([n], tf.int32)
    arguments |= {
      "nfl_size": _tensor([2], tf.int32),
      "feature_size": _tensor([n + 1], tf.int32),
      "fid_size": _tensor([n], tf.int32),
      "emb_size": _tensor([n * dim], tf.int32),
    }
  if is_grad:
    arguments["tensors_grad"] = [_tensor(floats, tf.float32, (n, dim))]
  else:
    arguments["num_out"] = 1
  return arguments


def _split(maker: Any) -> dict[str, Any]:
  """Returns the flow of samples without a data source; the others have none."""
  records = [messages.record(maker.rng, maker.sample_type, False) for _ in range(maker.n)]
  return {
    "input_dataset": cases.Samples("dataset", records, maker.sample_type),
    "data_flow": ["", "other"],
    "index": 0,
    "max_queue_size": 100,
    "variant_type": maker.sample_type,
    "shared_name": f"flows{maker.rng.randrange(1 << 30)}",
  }


def _fused(maker: Any) -> dict[str, Any]:
  """Returns one or two tables, `n` ids in the first shard of each."""
  n, dim, shards = maker.n, maker.dim, maker.rng.choice([1, 2, 3])
  is_group = "Multi" in maker.op
  seed = maker.rng.randrange(1 << 30)
  handle = cases.Handle("multi_table" if is_group else "table", seed, dim)
  tables = cases.tables_of(handle) if is_group else 1
  sizes = [n] * tables + [0] * (tables * (shards - 1))
  ids = n * tables
  arguments: dict[str, Any] = {
    "ids": _tensor(np.arange(ids), tf.int64),
    "fused_slot_size": _tensor(sizes, tf.int32),
    "req_time": _tensor([1], tf.int64, ()),
    "num_of_shards": shards,
  }
  arguments["mtable" if is_group else "table_handles"] = handle if is_group else [handle]
  if "Optimize" in maker.op:
    id_offsets = np.concatenate([[0], np.cumsum(sizes)])
    segments = maker.rng.choice([1, 2]) * tables
    arguments |= {
      "indices": _tensor(np.arange(ids), tf.int64),
      "id_grads": _tensor(np.ones(ids * dim), tf.float32),
      "id_offsets": _tensor(id_offsets, tf.int32),
      "grad_offsets": _tensor(id_offsets * dim, tf.int32),
      "learning_rate_tensors": _tensor([0.1] * segments, tf.float32),
      "global_step": _tensor([1], tf.int64, ()),
      "enable_grad_accumulation": False,
    }
  return arguments
