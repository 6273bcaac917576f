"""Makes the tables of a run: where they live, how they are named, which filters they use.

Without parameter servers every update sums the gradients of equal ids first, as it does with
servers, so that results do not depend on their number. The environment variable
`MONOLITH_UPDATE_PER_OCCURRENCE=1` brings back one optimizer step per occurrence in that case.

Tables in the workers of a synchronous run make one optimizer step per worker that sent a gradient;
`MONOLITH_SYNC_SUM_GRADIENTS=1` lets them add up the gradients of an id over all workers first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import (
  distributed_ps,
  distribution_ops,
  entry,
  env_utils,
  hash_table_ops,
  hash_table_utils,
  multi_hash_table_ops,
  multi_type_hash_table,
)
from monolith.native_training.model_export import export_context

SlotToConfig = Mapping[str, entry.HashTableConfigInstance]
Handles = Sequence["tf.Tensor | None"]

_PER_OCCURRENCE_ENV = "MONOLITH_UPDATE_PER_OCCURRENCE"
_SUM_OVER_RANKS_ENV = "MONOLITH_SYNC_SUM_GRADIENTS"


def _sum_duplicates() -> bool:
  return os.environ.get(_PER_OCCURRENCE_ENV, "0") != "1"


def _as_ids(ids: Any) -> tf.Tensor:
  return tf.reshape(tf.convert_to_tensor(ids, tf.int64), [-1])


class _LocalMultiTypeHashTable(multi_type_hash_table.MultiTypeHashTable):
  """Tables in this process; equal ids of an update make one step on the sum of their gradients."""

  def apply_gradients(
    self, slot_to_id_and_grad: Mapping[str, Any], *args: Any, **kwargs: Any
  ) -> _LocalMultiTypeHashTable:
    if _sum_duplicates():
      kwargs.setdefault("enable_dedup", True)
    return super().apply_gradients(slot_to_id_and_grad, *args, **kwargs)


class _LocalMultiHashTable(multi_hash_table_ops.MultiHashTable):
  """A group in this process; equal ids of an update make one step on the sum of their gradients.

  What belongs to one table stays in one tensor: nothing is packed, as it never travels.
  """

  def lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    slot_to_id = self._known_slots(slot_to_id)
    if export_context.is_exporting() or not slot_to_id:
      return super().lookup(slot_to_id)
    tables = [self._table_names.index(slot) for slot in slot_to_id]
    embeddings = multi_hash_table_ops.hash_table_ops.monolith_multi_hash_table_lookup_list(
      self._handle,
      [_as_ids(ids) for ids in slot_to_id.values()],
      tables=tables,
      dims=[self._dims[table] for table in tables],
    )
    return dict(zip(slot_to_id, embeddings))

  def apply_gradients(
    self,
    slot_to_id_and_grad: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> _LocalMultiHashTable:
    slot_to_id_and_grad = self._known_slots(slot_to_id_and_grad)
    if not _sum_duplicates() or not slot_to_id_and_grad:
      return super().apply_gradients(slot_to_id_and_grad, global_step, req_time)
    return self._with_handle(
      multi_hash_table_ops.hash_table_ops.monolith_multi_hash_table_optimize_list(
        self._handle,
        [_as_ids(ids) for ids, _ in slot_to_id_and_grad.values()],
        [tf.convert_to_tensor(grad, tf.float32) for _, grad in slot_to_id_and_grad.values()],
        self._learning_rate_tensor,
        hash_table_utils.as_req_time(req_time),
        tf.cast(global_step, tf.int64),
        tables=[self._table_names.index(slot) for slot in slot_to_id_and_grad],
      )
    )

  def _known_slots(self, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Native tables ignore slots that they do not have."""
    return {slot: value for slot, value in slots.items() if slot in self._table_names}

  def raw_apply_gradients(
    self,
    ragged_id: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> _LocalMultiHashTable:
    if _sum_duplicates():
      dims = self.get_table_dim_sizes()
      unique = distribution_ops.unique_key_with_value_and_offset(
        ragged_id, dims, generate_buffer=False
      )
      ragged_id = unique.unique_key
      positions = ragged_id.with_values(tf.range(tf.size(ragged_id.values, out_type=tf.int64)))
      flat_grad = distribution_ops.fill_with_offset_map_gradient(
        positions, flat_grad, unique.value_offset, dims
      )
    return super().raw_apply_gradients(ragged_id, flat_grad, global_step, req_time)


class MultiHashTableFactory:
  """Makes native groups, one per server: `factory(index, slot_to_config)`.

  Args:
    hash_filters: handle of each server's filter.
    sync_clients: handle of each server's client.
  """

  # Learning rates are part of the group's own graph, see `distributed_ps`.
  computes_learning_rates = True

  def __init__(self, hash_filters: Handles, sync_clients: Handles):
    self._hash_filters = hash_filters
    self._sync_clients = sync_clients
    # By identity of the dict, which is kept so that another one cannot get its identity.
    self._converted: dict[int, tuple[SlotToConfig, multi_hash_table_ops.CachedConfig]] = {}

  def __call__(self, idx: int, slot_to_config: SlotToConfig) -> multi_hash_table_ops.MultiHashTable:
    config = self._convert(slot_to_config)
    return multi_hash_table_ops.MultiHashTable.from_cached_config(
      # A constant on each server: none depends on another one to start again.
      config._replace(mconfig_tensor=tf.constant(config.mconfig)),
      hash_filter=self._hash_filters[idx],
      sync_client=self._sync_clients[idx],
      name_suffix=str(idx),
    )

  def _convert(self, slot_to_config: SlotToConfig) -> multi_hash_table_ops.CachedConfig:
    key = id(slot_to_config)
    if key not in self._converted:
      self._converted[key] = (
        slot_to_config,
        multi_hash_table_ops.convert_to_cached_config(slot_to_config),
      )
    return self._converted[key][1]


def _check_sync_clients(num_ps: int, sync_clients: Handles | None) -> Handles:
  if num_ps and sync_clients:
    assert num_ps == len(sync_clients), (
      "Number of PS should be equal to number of sync clients, "
      f"while got {num_ps} vs {len(sync_clients)}"
    )
  return sync_clients or [None] * max(num_ps, 1)


def create_multi_type_hash_table(
  num_ps: int,
  slot_to_config: SlotToConfig,
  hash_filters: Handles,
  sync_clients: Handles | None = None,
  reduce_network_packets: bool = False,
  max_rpc_deadline_millis: int = 30,
) -> multi_type_hash_table.BaseMultiTypeHashTable:
  """Makes one table per distinct configuration.

  Args:
    num_ps: number of parameter servers; 0 for tables in this process.
    slot_to_config: slot name -> configuration.
    hash_filters: handle of each server's filter, or of the only one.
    sync_clients: handle of each server's client, or of the only one.
    reduce_network_packets: send the ids of all tables of a server together.
    max_rpc_deadline_millis: of remote lookups in an export.
  """
  sync_clients = _check_sync_clients(num_ps, sync_clients)

  def make_table(name: str, ps: int, config: entry.HashTableConfigInstance) -> Any:
    return hash_table_ops.hash_table_from_config(
      config,
      hash_filter=hash_filters[ps],
      name_suffix=name if num_ps == 0 else f"{name}_{ps}",
      sync_client=sync_clients[ps],
    )

  def make_group(ps: int, configs: SlotToConfig) -> multi_type_hash_table.MultiTypeHashTable:
    return multi_type_hash_table.MultiTypeHashTable(
      configs, lambda name, config: make_table(name, ps, config)
    )

  def make_local(configs: SlotToConfig) -> multi_type_hash_table.MultiTypeHashTable:
    return _LocalMultiTypeHashTable(configs, lambda name, config: make_table(name, 0, config))

  def make_packed(configs: SlotToConfig) -> multi_type_hash_table.BaseMultiTypeHashTable:
    return distributed_ps.DistributedMultiTypeHashTable(
      num_ps, configs, make_group, max_rpc_deadline_millis=max_rpc_deadline_millis
    )

  def make_distributed(configs: SlotToConfig) -> multi_type_hash_table.BaseMultiTypeHashTable:
    def make(name: str, config: entry.HashTableConfigInstance) -> hash_table_ops.BaseHashTable:
      return distributed_ps.DistributedHashTable(
        num_ps, config, lambda ps, config: make_table(name, ps, config)
      )

    return multi_type_hash_table.MultiTypeHashTable(configs, make)

  if num_ps == 0:
    factory = make_local
  elif reduce_network_packets:
    factory = make_packed
  else:
    factory = make_distributed
  return multi_type_hash_table.MergedMultiTypeHashTable(slot_to_config, factory)


def create_native_multi_hash_table(
  num_ps: int,
  slot_to_config: SlotToConfig,
  hash_filters: Handles,
  sync_clients: Handles | None = None,
  max_rpc_deadline_millis: int = 30,
) -> multi_type_hash_table.BaseMultiTypeHashTable:
  """Makes one native group of all tables per server; arguments as above."""
  sync_clients = _check_sync_clients(num_ps, sync_clients)
  if num_ps == 0:
    return _LocalMultiHashTable.from_configs(
      slot_to_config, hash_filter=hash_filters[0], sync_client=sync_clients[0]
    )
  return distributed_ps.DistributedMultiTypeHashTable(
    num_ps,
    slot_to_config,
    MultiHashTableFactory(hash_filters, sync_clients),
    max_rpc_deadline_millis=max_rpc_deadline_millis,
  )


def create_partitioned_hash_table(
  num_ps: int,
  use_native_multi_hash_table: bool,
  max_rpc_deadline_millis: int = 30,
  hash_filters: Handles | None = None,
  sync_clients: Handles | None = None,
  enable_gpu_emb: bool = False,
  queue_configs: dict[str, int] | None = None,
) -> distributed_ps.PartitionedHashTable:
  """Makes the tables of a fused-layout run, as the default parser context describes them.

  Args:
    num_ps: number of parameter servers; 0 for tables in this process.
    use_native_multi_hash_table: one native group per server, instead of merged tables.
    max_rpc_deadline_millis: of remote lookups in an export.
    hash_filters: handle of each server's filter, or of the only one.
    sync_clients: handle of each server's client, or of the only one.
    enable_gpu_emb: tables on GPUs.
    queue_configs: capacities of the queues of synchronous training.

  Raises:
    NotImplementedError: `enable_gpu_emb`.
  """
  if enable_gpu_emb:
    raise NotImplementedError("There are no tables on GPUs.")
  sync_clients = _check_sync_clients(num_ps, sync_clients)
  hash_filters = hash_filters or [None] * max(num_ps, 1)

  def make_group(ps: int, configs: SlotToConfig) -> multi_type_hash_table.MultiTypeHashTable:
    return multi_type_hash_table.MultiTypeHashTable(
      configs,
      lambda name, config: hash_table_ops.hash_table_from_config(
        config,
        hash_filter=hash_filters[ps],
        name_suffix=name if num_ps == 0 else f"{name}_{ps}",
        sync_client=sync_clients[ps],
      ),
    )

  return distributed_ps.PartitionedHashTable(
    num_ps,
    MultiHashTableFactory(hash_filters, sync_clients)
    if use_native_multi_hash_table
    else make_group,
    use_native_multi_hash_table,
    max_rpc_deadline_millis=max_rpc_deadline_millis,
    queue_configs=queue_configs,
  )


def create_in_worker_multi_type_hash_table(
  shard_num: int,
  slot_to_config: SlotToConfig,
  hash_filter: tf.Tensor,
  sync_client: tf.Tensor | None = None,
  queue_configs: dict[str, int] | None = None,
) -> multi_type_hash_table.BaseMultiTypeHashTable:
  """Makes merged tables whose shards live in the workers of a synchronous run.

  Args:
    shard_num: number of workers.
    slot_to_config: slot name -> configuration.
    hash_filter: handle of this worker's filter.
    sync_client: handle of this worker's client.
    queue_configs: capacities of the queues.

  Raises:
    AssertionError: `shard_num` is not the number of ranks.
    ImportError: there are several, and Horovod is not installed.
  """

  def make_group(configs: SlotToConfig) -> Any:
    # Named as on a server of the same index, so that all ranks can save into one checkpoint.
    def make(index: int) -> multi_type_hash_table.MultiTypeHashTable:
      return multi_type_hash_table.MultiTypeHashTable(
        configs,
        lambda name, config: hash_table_ops.hash_table_from_config(
          config, hash_filter=hash_filter, name_suffix=f"{name}_{index}", sync_client=sync_client
        ),
      )

    return _all_to_all_table(shard_num, make, queue_configs)

  return multi_type_hash_table.MergedMultiTypeHashTable(slot_to_config, make_group)


def create_in_worker_native_multi_hash_table(
  shard_num: int,
  slot_to_config: SlotToConfig,
  hash_filter: tf.Tensor,
  sync_client: tf.Tensor | None = None,
  queue_configs: dict[str, int] | None = None,
) -> multi_type_hash_table.BaseMultiTypeHashTable:
  """Makes a native group whose shards live in the workers of a synchronous run; see above."""

  def make(index: int) -> multi_hash_table_ops.MultiHashTable:
    return multi_hash_table_ops.MultiHashTable.from_configs(
      slot_to_config, hash_filter=hash_filter, sync_client=sync_client, name_suffix=str(index)
    )

  return _all_to_all_table(shard_num, make, queue_configs)


def _all_to_all_table(shard_num: int, make: Any, queue_configs: dict[str, int] | None) -> Any:
  # Not needed by training on servers.
  from monolith.native_training import distributed_ps_sync

  return distributed_ps_sync.DistributedMultiTypeHashTableMpi(
    shard_num,
    make,
    queue_configs,
    enable_grad_accumulation=env_utils.get_bool(_SUM_OVER_RANKS_ENV),
  )
