"""The tables of a fused-layout run in the process that trains, or spread over ranks.

  input pipeline   ids by (rank, table), all in one tensor
  lookup_flat      to their owners, and the rows back: `distributed_ps_sync` draws the way
  layouts          from one flat tensor, on the GPU if it may be used
  apply_flat       gradients to the owners

Nothing leaves the GPU between the lookup and the update if the tables are there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import tensorflow as tf

from monolith.native_training import hash_table_utils
from monolith.native_training.graph import export_context
from monolith.native_training.tables import (
  id_pairs,
  id_sharding,
  layout_config,
  protocols,
  ps_group,
)

# Keys of a batch from the input pipeline: its ids, and how many are for each rank, and for each of
# its tables.
_IDS = ("shards_value", "shards_row_lengths", "shards_table_row_lengths")
# Where the embeddings of a batch lie.
_OFFSETS = ("fid_offset", "feature_offset", "nfl_offset", "batch_size", "fid_list_emb_row_lenth")
# Tensors of the lookup that the update needs.
_UPDATE = ("id_flat_t", "indices", "id_size_flat_t", "id_offsets", "emb_offsets", "recv_emb_splits")
_FEATURES = "__features"


def key(name: str) -> str:
  """Returns the name of a tensor in an auxiliary bundle."""
  return id_sharding.ParserCtx.sharding_sparse_fids_features_prefix + name


class RankLayout:
  """This rank's tables, and the way to those of the others.

  Args:
    num_ranks: how many there are; 0 for a process alone.
    params: how ids are sharded.
    table_factory: `(rank, table name -> configuration) -> group of tables`.
    queue_configs: capacities of the queues, as in `DistributedMultiTypeHashTableMpi`. That of the
      embedding prefetch is an argument of `look_up`.
    enable_grad_accumulation: add the gradients of an id up over all ranks, instead of one step per
      rank.

  Raises:
    AssertionError: there is another number of ranks.
    ValueError: the graph is exported, whose tables are those of parameter servers.
  """

  def __init__(
    self,
    num_ranks: int,
    params: layout_config.ShardingSparseFidsOpParams,
    table_factory: ps_group.TableFactory,
    queue_configs: Mapping[str, int],
    enable_grad_accumulation: bool = False,
  ):
    # Not needed by training on servers.
    from monolith.native_training import distributed_ps_sync

    if export_context.is_exporting():
      raise ValueError("enable_gpu_emb is set while exporting, want tables of parameter servers")
    self.names = sorted(params.sub_table_name_to_config)
    self.table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(
      num_ranks,
      lambda rank: cast(protocols.FusedGroup, table_factory(rank, params.sub_table_name_to_config)),
      dict(queue_configs),
      enable_grad_accumulation=enable_grad_accumulation,
      transfer_float16=params.transfer_float16,
    )
    self._num_ranks = max(num_ranks, 1)

  def put_shards(self, sharded: Mapping[str, Any], bundle: dict[str, tf.Tensor]) -> None:
    """Puts what the input pipeline made into a bundle.

    Raises:
      ValueError: something is missing: ids were sharded for servers.
    """
    for name in (*_IDS, *_OFFSETS):
      if sharded.get(name) is None:
        raise ValueError(f"features have no {key(name)}: were the ids sharded for ranks?")
      bundle[key(name)] = sharded[name]

  def look_up(
    self, bundle: dict[str, tf.Tensor], features: dict[str, Any], prefetch_capacity: int
  ) -> None:
    """Replaces the ids in `bundle` by their embeddings, and what an update needs.

    Args:
      bundle: of `put_shards`. What it held before and `features` come out of the queues in place.
      features: the rest of the batch.
      prefetch_capacity: number of batches to look up ahead.
    """
    ids, rank_sizes, table_sizes = (bundle.pop(key(name)) for name in _IDS)
    req_time = features.get("req_time")
    if req_time is not None:
      req_time = tf.reduce_max(tf.cast(req_time, tf.int64))
    travelling = {**bundle, _FEATURES: dict(features)}
    with tf.device("/device:CPU:0"):
      num_tables = len(self.names)
      travelling["emb_offset_sz"] = tf.reduce_sum(tf.reshape(table_sizes, [-1, num_tables]), axis=0)
    queued = self.table.lookup_flat(
      travelling,
      ids,
      rank_sizes,
      table_sizes,
      hash_table_utils.as_req_time(req_time),
      prefetch_capacity,
    )
    self.table.add_summaries(self.names, queued)
    features.update(queued[_FEATURES])
    for name in list(bundle):
      bundle[name] = queued[name]
    for name in (*_UPDATE, "recv_embeddings"):
      bundle[key(name)] = queued[name]

  def apply(
    self,
    grad_flat: tf.Tensor,
    bundle: Mapping[str, tf.Tensor],
    global_step: tf.Tensor,
    req_time: tf.Tensor,
  ) -> RankLayout:
    """Updates the rows of a lookup; returns the tables after it.

    Args:
      grad_flat: the gradient of `recv_embeddings`.
      bundle: what `look_up` filled.
      global_step: int64 scalar.
      req_time: int64 scalar.
    """
    updated = copy.copy(self)
    updated.table = self.table.apply_flat(
      grad_flat, {name: bundle[key(name)] for name in _UPDATE}, global_step, req_time
    )
    return updated

  def write(
    self,
    data: Mapping[int, Mapping[str, tuple[Any, Any]]],
    write_fn: Callable[[Any, dict[str, Any]], Any],
    op: str,
  ) -> RankLayout:
    """Writes rows into the tables of all ranks; returns the tables after it.

    Args:
      data: rank -> table -> (its ids, values); what a rank has for others travels to them. All
        ranks have to run it together.
      write_fn: `(group, table -> (ids, values)) -> group after the write`.
      op: prefix of the names of exchanges.

    Raises:
      ValueError: there is no such rank or table.
    """
    dims = dict(zip(self.names, self.table.get_table_dim_sizes()))
    shards: list[dict[str, tuple[tf.Tensor, tf.Tensor]]] = [{} for _ in range(self._num_ranks)]
    for rank, name_to_pair in data.items():
      if not 0 <= rank < self._num_ranks:
        raise ValueError(f"{op} has rows for rank {rank}, but there are {self._num_ranks} ranks")
      for name, pair in name_to_pair.items():
        if name not in dims:
          raise ValueError(f"{op} has rows for table {name!r}, want one of {self.names}")
        ids, values = id_pairs.split_pair(pair)
        values = tf.reshape(tf.convert_to_tensor(values, tf.float32), [-1, dims[name]])
        shards[rank][name] = (ids, values)
    updated = copy.copy(self)
    updated.table = self.table.write_shards(self.names, shards, write_fn, op)
    return updated
