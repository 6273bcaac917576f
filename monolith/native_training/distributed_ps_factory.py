"""Makes the tables of a run: where they live, how they are named, which filters they use.

Without parameter servers tables live in this process (`tables/local.py`).

Tables in the workers of a synchronous run make one optimizer step per worker that sent a gradient;
`MONOLITH_SYNC_SUM_GRADIENTS=1` lets them add up the gradients of an id over all workers first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from monolith.native_training import (
  distributed_ps,
  distributed_ps_near,
  entry,
  env_utils,
  hash_table_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
)
from monolith.native_training.graph import export_context
from monolith.native_training.tables import id_sharding, local, protocols, ps_transfer

SlotToConfig = Mapping[str, entry.HashTableConfigInstance]
Handles = Sequence["tf.Tensor | None"]

_SUM_OVER_RANKS_ENV = "MONOLITH_SYNC_SUM_GRADIENTS"


class MultiHashTableFactory:
  """Makes native groups, one per server: `factory(index, slot_to_config)`.

  Args:
    hash_filters: handle of each server's filter.
    sync_clients: handle of each server's client.
    group: the class of the groups.
  """

  # Tells `PsGroup` that learning rates are part of the group's own graph.
  computes_learning_rates = True

  def __init__(
    self,
    hash_filters: Handles,
    sync_clients: Handles,
    group: type[multi_hash_table_ops.MultiHashTable] = multi_hash_table_ops.MultiHashTable,
  ):
    self._group = group
    self._hash_filters = hash_filters
    self._sync_clients = sync_clients
    # By identity of the dict, which is kept so that another one cannot get its identity.
    self._converted: dict[int, tuple[SlotToConfig, multi_hash_table_ops.CachedConfig]] = {}

  def __call__(self, idx: int, slot_to_config: SlotToConfig) -> multi_hash_table_ops.MultiHashTable:
    config = self._convert(slot_to_config)
    return self._group.from_cached_config(
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
    max_rpc_deadline_millis: deadline of remote lookups in an export.
  """
  sync_clients = _check_sync_clients(num_ps, sync_clients)

  def make_table(
    name: str, ps: int, config: entry.HashTableConfigInstance
  ) -> hash_table_ops.HashTable:
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
    return local.LocalMultiTypeHashTable(configs, lambda name, config: make_table(name, 0, config))

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

  factory: Callable[[SlotToConfig], multi_type_hash_table.BaseMultiTypeHashTable]
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
  """Makes one native group of all tables per server.

  Inside `ps_transfer.servers_on_this_machine`, the only server of a run does what tables in this
  process would do.

  Args:
    num_ps: number of parameter servers; 0 for tables in this process.
    slot_to_config: slot name -> configuration.
    hash_filters: handle of each server's filter, or of the only one.
    sync_clients: handle of each server's client, or of the only one.
    max_rpc_deadline_millis: deadline of remote lookups in an export.
  """
  sync_clients = _check_sync_clients(num_ps, sync_clients)
  if num_ps == 0:
    return local.LocalMultiHashTable.from_configs(
      slot_to_config, hash_filter=hash_filters[0], sync_client=sync_clients[0]
    )
  if (
    num_ps == 1
    and ps_transfer.are_servers_near()
    and local.sums_duplicates()
    and not export_context.is_exporting()
  ):
    return distributed_ps_near.NearServerHashTable(
      slot_to_config,
      MultiHashTableFactory(hash_filters, sync_clients, local.LocalMultiHashTable),
      max_rpc_deadline_millis=max_rpc_deadline_millis,
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
    num_ps: number of parameter servers, or of ranks; 0 for tables in this process.
    use_native_multi_hash_table: one native group per server, instead of merged tables.
    max_rpc_deadline_millis: deadline of remote lookups in an export.
    hash_filters: handle of each server's filter, or of the only one.
    sync_clients: handle of each server's client, or of the only one.
    enable_gpu_emb: tables are in the ranks, on GPUs if the configurations say so; the parser
      context must say the same.
    queue_configs: capacities of the queues of synchronous training.

  Raises:
    AssertionError: `enable_gpu_emb` is set, and there are not `num_ps` ranks.
    ValueError: the parser context says something else.
  """
  params = id_sharding.get_default_parser_ctx().sharding_sparse_fids_op_params
  if params is not None and params.enable_gpu_emb != enable_gpu_emb:
    raise ValueError(
      f"enable_gpu_emb is {enable_gpu_emb}, but {params.enable_gpu_emb} where ids are sharded"
    )
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
    enable_grad_accumulation=enable_gpu_emb and env_utils.get_bool(_SUM_OVER_RANKS_ENV),
  )


def create_in_worker_multi_type_hash_table(
  shard_num: int,
  slot_to_config: SlotToConfig,
  hash_filter: tf.Tensor,
  sync_client: tf.Tensor | None = None,
  queue_configs: dict[str, int] | None = None,
) -> protocols.ReorderedGroup:
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

  def make_group(configs: SlotToConfig) -> protocols.ReorderedGroup:
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
) -> protocols.ReorderedGroup:
  """Makes a native group whose shards live in the workers of a synchronous run.

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

  def make(index: int) -> multi_hash_table_ops.MultiHashTable:
    return multi_hash_table_ops.MultiHashTable.from_configs(
      slot_to_config, hash_filter=hash_filter, sync_client=sync_client, name_suffix=str(index)
    )

  return _all_to_all_table(shard_num, make, queue_configs)


def _all_to_all_table(
  shard_num: int,
  make: Callable[[int], protocols.FusedGroup],
  queue_configs: dict[str, int] | None,
) -> protocols.ReorderedGroup:
  # Not needed by training on servers.
  from monolith.native_training import distributed_ps_sync

  return distributed_ps_sync.DistributedMultiTypeHashTableMpi(
    shard_num,
    make,
    queue_configs,
    enable_grad_accumulation=env_utils.get_bool(_SUM_OVER_RANKS_ENV),
  )
