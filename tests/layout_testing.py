"""A small fused-layout model over serialized examples, for tests of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import (
  distributed_ps,
  distributed_ps_factory,
  embedding_combiners,
  entry,
)
from monolith.native_training.data import parsers
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

SLICE_DIMS = {"uid": [1, 4], "gid": [1, 4, 8], "cid": [1, 4, 8]}
# Slices of each layout, and its width.
LAYOUTS = {
  "bias": ([("uid", 0, 1), ("gid", 0, 1), ("cid", 0, 1)], 3),
  "vec": ([("uid", 1, 5), ("gid", 1, 5), ("cid", 1, 5)], 12),
  "deep": ([("gid", 5, 13), ("cid", 5, 13)], 16),
}
# The ids of two examples; some are in both, some twice in one.
ROWS = {
  "uid": [[1, 2, -7], [2, 4]],
  "gid": [[5, 5, 9], [9, 2**62]],
  "cid": [[], [8, -(2**63), 3]],
}
_KINDS = {"cuckoo": entry.CuckooHashTableConfig, "gpucuco": entry.GpucucoHashTableConfig}


class Built(NamedTuple):
  """A graph.

  Attributes:
    table: the tables.
    bundle: what a lookup left for the update.
    flat: the layouts' tensors.
    fetches: layout name -> tensor, and `batch`, the number of the batch.
    update: the op of a step.
  """

  table: distributed_ps.PartitionedHashTable
  bundle: dict[str, tf.Tensor]
  flat: list[tf.Tensor]
  fetches: dict[str, Any]
  update: tf.Operation


def config(
  slice_dims: Sequence[int], kind: str = "cuckoo", plain_steps: bool = False
) -> entry.HashTableConfigInstance:
  """Returns rows of zeros with FTRL in column 0 and Adagrad in the others, or with plain steps."""
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  _KINDS[kind]().mutate_table(table_config)
  for i, dim in enumerate(slice_dims):
    optimizer: entry.Optimizer = entry.AdagradOptimizer(initial_accumulator_value=0.1)
    if i == 0:
      optimizer = entry.FtrlOptimizer(initial_accumulator_value=0.1, beta=0.0)
    if plain_steps:
      optimizer = entry.SgdOptimizer()
    table_config.entry_config.segments.append(
      entry.CombineAsSegment(dim, entry.ZerosInitializer(), optimizer, entry.Fp32Compressor())
    )
  return entry.HashTableConfigInstance(table_config, [0.5] * len(slice_dims))


def params(
  num_ps: int, native: bool, kind: str = "cuckoo", plain_steps: bool = False, **kwargs: Any
) -> Any:
  """Returns how the input pipeline of the model shards ids."""
  layouts = {}
  for name, (slices, width) in LAYOUTS.items():
    layouts[name] = example_pb2.OutConfig(out_type=example_pb2.OutType.CONCAT)
    for feature, start, end in slices:
      layouts[name].slice_configs.add(feature_name=feature, start=start, end=end)
    layouts[name].shape.add(dims=[-1, width])
  return distributed_ps.PartitionedHashTable.gen_feature_configs(
    num_ps,
    {name: config(dims, kind, plain_steps) for name, dims in SLICE_DIMS.items()},
    layouts,
    SLICE_DIMS,
    {name: embedding_combiners.ReduceSum() for name in SLICE_DIMS},
    native,
    **kwargs,
  )


def _serialized(rows: Mapping[str, Sequence[Sequence[int]]], offset: int) -> list[bytes]:
  examples = []
  for ids in zip(*rows.values()):
    example = example_pb2.Example()
    for name, row in zip(rows, ids):
      values = example.named_feature.add(name=name).feature.fid_v2_list.value
      values.extend((id_ + offset) % 2**64 for id_ in row)
    examples.append(example.SerializeToString())
  return examples


def build(
  ctx: parsers.ParserCtx,
  num_ps: int,
  native: bool,
  rows: Mapping[str, Sequence[Sequence[int]]] = ROWS,
  kind: str = "cuckoo",
  capacity: int = 0,
  *,
  enable_gpu_emb: bool = False,
  queue_configs: dict[str, int] | None = None,
  batches: int | None = None,
  **kwargs: Any,
) -> Built:
  """Builds a training step in the default graph.

  Args:
    ctx: the parser context, which is told how to shard.
    num_ps: number of servers or ranks.
    native: one group of tables.
    rows: ids of each example, by feature.
    kind: where the tables are.
    capacity: of the embedding prefetch.
    enable_gpu_emb: tables are in ranks.
    queue_configs: of ranks.
    batches: how many there are, each with ids of its own; by default the same one forever.
    **kwargs: of `params`.
  """
  ctx.parser_type = "example"
  ctx.sharding_sparse_fids_op_params = params(
    num_ps, native, kind, enable_gpu_emb=enable_gpu_emb, **kwargs
  )
  samples = [_serialized(rows, 1000 * i) for i in range(batches or 1)]

  def shard(i: tf.Tensor, examples: tf.Tensor) -> dict[str, tf.Tensor]:
    features = {"batch": i, "req_time": tf.constant([100, 200], tf.int64)}
    parsers.sharding_sparse_fids_with_context(examples, features, ctx)
    return features

  dataset = tf.data.Dataset.from_tensor_slices((tf.range(len(samples)), tf.constant(samples)))
  dataset = dataset.map(shard)
  if batches is None:
    dataset = dataset.repeat()
  iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
  tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
  features = iterator.get_next()
  table = distributed_ps_factory.create_partitioned_hash_table(
    num_ps, native, enable_gpu_emb=enable_gpu_emb, queue_configs=queue_configs
  )
  bundle: dict[str, tf.Tensor] = {}
  layouts = table.lookup(features, bundle, embedding_prefetch_capacity=capacity)
  flat = table.flatten_layout(layouts)
  # Differs from place to place, and from step to step.
  grads = [
    0.1 * layout + tf.reshape(tf.range(1.0, 1.0 + layout.shape[1]), [1, -1]) * 0.2
    for layout in flat
  ]
  step = tf.compat.v1.train.get_or_create_global_step()
  update = table.apply_gradients(
    zip(grads, flat), step, tf.constant(300, tf.int64), auxiliary_bundle=bundle
  )
  return Built(table, bundle, flat, {**layouts, "batch": features["batch"]}, update)


def train(
  built: Built, steps: int | None, session_config: tf.compat.v1.ConfigProto
) -> list[dict[str, Any]]:
  """Runs steps, or until the data ends; returns what each has fetched."""
  creator = tf.compat.v1.train.ChiefSessionCreator(config=session_config)
  seen: list[dict[str, Any]] = []
  with tf.compat.v1.train.MonitoredSession(creator, built.table.get_queue_hooks()) as session:
    while not session.should_stop() and (steps is None or len(seen) < steps):
      seen.append(session.run((built.fetches, built.update))[0])
  return seen


def rows_of_ranks(
  ctx: parsers.ParserCtx, num_ranks: int, seed: int
) -> dict[int, dict[str, tuple[list[int], np.ndarray]]]:
  """Returns rank -> table -> (the ids of `ROWS` that it owns, some values)."""
  op_params = ctx.sharding_sparse_fids_op_params
  assert op_params is not None
  rng = np.random.default_rng(seed)
  data: dict[int, dict[str, tuple[list[int], np.ndarray]]] = {}
  for name in SLICE_DIMS:
    table = op_params.feature_configs.feature_configs[name].table
    if op_params.use_native_multi_hash_table:
      table = name
    ids = sorted({id_ for row in ROWS[name] for id_ in row})
    values = rng.integers(-50, 50, [len(ids), sum(SLICE_DIMS[name])]) / 4
    for rank in range(num_ranks):
      own = [i for i, id_ in enumerate(ids) if id_ % num_ranks == rank]
      old_ids, old_values = data.setdefault(rank, {}).get(table, ([], values[:0]))
      data[rank][table] = (
        old_ids + [ids[i] for i in own],
        np.concatenate([old_values, values[own]]),
      )
  return data


def write_and_look_up(
  built: Built, writes: Sequence[tf.Operation], session_config: tf.compat.v1.ConfigProto
) -> dict[str, Any]:
  """Runs writes, one after the other; returns what a step fetches then."""
  creator = tf.compat.v1.train.ChiefSessionCreator(config=session_config)
  with tf.compat.v1.train.MonitoredSession(creator) as session:
    for write in writes:
      session.run(write)
    return session.run(built.fetches)
