"""Creates the tables and occurrence filters of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training import (
  device_utils,
  distributed_ps_factory,
  distributed_serving_ops,
  entry,
  feature,
  hash_filter_ops,
  multi_type_hash_table,
)
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.native_training.tables import protocols
from monolith.row_log import row_log

Configs = Mapping[str, entry.HashTableConfigInstance]

_GPU = "/device:GPU:0"


class Tables(NamedTuple):
  """A graph's tables and filters.

  Attributes:
    hash_table: the tables.
    hash_filters: one per server, `None` while exporting.
    enable_hash_filter: whether the filters are real.
  """

  hash_table: protocols.AnyGroup
  hash_filters: list[Any]
  enable_hash_filter: bool


def create(
  config: CpuTrainingConfig,
  use_gpu_emb_table: bool,
  feature_configs: Configs,
  slot_to_occurrence_threshold: Mapping[int, int],
  slot_to_expire_time: Mapping[int, int],
  shared_tables: Mapping[str, str] | None = None,
  feature_to_admission: Mapping[str, feature.Admission] | None = None,
) -> Tables:
  """Creates tables and filters in the default graph.

  Args:
    config: the process's configuration.
    use_gpu_emb_table: whether tables live on the GPU; they become `gpucuco` tables then.
    feature_configs: feature name -> table; expiry is written into them unless exporting.
    slot_to_occurrence_threshold: how often an id must be seen before it gets a row.
    slot_to_expire_time: days after which an unused row expires.
    shared_tables: feature name -> table, for features of a slot that has several.
    feature_to_admission: thresholds and days by feature. Where each feature has a table of its own,
      they hold for every id of it; merged tables and fused layouts know ids by their slot bits.

  Raises:
    ValueError: a feature without a slot id has a threshold or days that only slot bits could tell,
      tables on GPUs are asked for with parameter servers or real-time training, or an update that
      is pushed later with a fused layout over ranks.
    tf.errors.FailedPreconditionError: they are, and there is no GPU.
  """
  if use_gpu_emb_table:
    _check_gpu_tables(config)
    for feature_config in feature_configs.values():
      feature_config.table_config.gpucuco.SetInParent()
  num_shards = max(1, config.num_ps)
  hash_filters: list[Any] = [None] * num_shards
  sync_clients: list[Any] = [None] * num_shards
  feature_to_admission = feature_to_admission or {}
  enable_hash_filter = any(slot_to_occurrence_threshold.values()) or any(
    admission.threshold for admission in feature_to_admission.values()
  )
  if not export_context.is_exporting():
    # Where their tables are.
    with device_utils.maybe_device_if_allowed(_GPU) if use_gpu_emb_table else nullcontext():
      hash_filters = _create_hash_filters(config, slot_to_occurrence_threshold, enable_hash_filter)
    _set_expire_times(feature_configs, slot_to_expire_time)
    if config.use_native_multi_hash_table and not config.enable_fused_layout:
      _set_admission(feature_configs, feature_to_admission)
    else:
      _check_slot_bits(feature_to_admission)
    if config.realtime_kafka_servers and not config.enable_full_sync_training:
      sync_clients = row_log.create_row_log_clients(config.num_ps)
    elif config.enable_realtime_training and config.enable_full_sync_training:
      # The one from which `ParameterSyncHook` pushes.
      client = distributed_serving_ops.parameter_sync_client_from_config(
        name_suffix=str(config.index)
      )
      sync_clients = [client]
    elif config.enable_realtime_training:
      sync_clients = distributed_serving_ops.create_parameter_sync_clients(config.num_ps)
  if config.enable_fused_layout:
    hash_table = _create_for_layouts(
      config, layout_ranks(config, use_gpu_emb_table), hash_filters, sync_clients
    )
    return Tables(hash_table, hash_filters, enable_hash_filter)
  create_table = _create_in_worker if config.enable_full_sync_training else _create_on_servers

  def create_tables(configs: Configs) -> Any:
    return create_table(config, configs, hash_filters, sync_clients)

  if shared_tables and config.use_native_multi_hash_table:
    hash_table = multi_type_hash_table.SharedSlotHashTable(
      feature_configs, shared_tables, create_tables
    )
  else:
    hash_table = create_tables(feature_configs)
  return Tables(hash_table, hash_filters, enable_hash_filter)


def layout_ranks(config: CpuTrainingConfig, use_gpu_emb_table: bool) -> int | None:
  """Returns how many ranks hold the tables of a fused layout.

  0 is this process, which is no rank. `None`: there is no such layout, or its tables are on
  parameter servers, or in this process and main memory.
  """
  if not config.enable_fused_layout:
    return None
  if config.enable_full_sync_training:
    return config.num_workers if use_gpu_emb_table or config.num_workers > 1 else None
  return 0 if use_gpu_emb_table else None


def _check_gpu_tables(config: CpuTrainingConfig) -> None:
  """Raises an error that says why tables cannot be on a GPU, if they cannot."""
  if not config.enable_full_sync_training and config.num_ps > 0:
    raise ValueError(
      f"train.use_gpu_emb_table is set, but {config.num_ps} parameter servers hold the tables: "
      "leave it unset, and enable_gpu_training runs the dense part on the GPU"
    )
  if config.enable_realtime_training or config.realtime_kafka_servers:
    raise ValueError(
      "train.use_gpu_emb_table is set, but the updates of tables on a GPU cannot be pushed: leave "
      "it unset for real-time training"
    )
  if not (device_utils.is_gpu_training() and tf.config.list_physical_devices("GPU")):
    raise tf.errors.FailedPreconditionError(
      None,
      None,
      "no CUDA device for the tables of train.use_gpu_emb_table (it also needs "
      "enable_gpu_training); use CuckooHashTableConfig",
    )


def _set_expire_times(feature_configs: Configs, slot_to_expire_time: Mapping[int, int]) -> None:
  expire_times = embedding_hash_table_pb2.SlotExpireTimeConfig()
  for slot, days in sorted(slot_to_expire_time.items()):
    expire_times.slot_expire_times.add(slot=slot, expire_time=days)
  for feature_config in feature_configs.values():
    feature_config.table_config.slot_expire_time_config.CopyFrom(expire_times)


def _set_admission(
  feature_configs: Configs, feature_to_admission: Mapping[str, feature.Admission]
) -> None:
  """Lets each table know its own limits: ids need no slot bits then."""
  for name, admission in feature_to_admission.items():
    if name in feature_configs:
      table_config = feature_configs[name].table_config
      table_config.occurrence_threshold = admission.threshold
      table_config.slot_expire_time_config.Clear()
      table_config.slot_expire_time_config.default_expire_time = admission.days


def _check_slot_bits(feature_to_admission: Mapping[str, feature.Admission]) -> None:
  for name, admission in sorted(feature_to_admission.items()):
    if not admission.is_default and not admission.has_slot_id:
      raise ValueError(
        f"feature {name!r} has an occurrence threshold of {admission.threshold} and expires after "
        f"{admission.days} days, but its slot has no slot_id: in merged tables and fused layouts "
        "ids are known by their slot bits alone. Give the slot a slot_id and the ids its bits, or "
        "use native tables (use_native_multi_hash_table) without a fused layout"
      )


def _create_hash_filters(
  config: CpuTrainingConfig,
  slot_to_occurrence_threshold: Mapping[int, int],
  enable_hash_filter: bool,
) -> list[tf.Tensor]:
  thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig()
  for slot, threshold in sorted(slot_to_occurrence_threshold.items()):
    thresholds.slot_occurrence_thresholds.add(slot=slot, occurrence_threshold=threshold)
  return hash_filter_ops.create_hash_filters(
    config.num_ps,
    enable_hash_filter,
    config=thresholds.SerializeToString(),
    filter_capacity=config.filter_capacity,
    filter_split_num=config.filter_split_num,
    filter_equal_probability=config.filter_equal_probability,
    filter_type=config.filter_type,
  )


def _create_on_servers(
  config: CpuTrainingConfig,
  feature_configs: Configs,
  hash_filters: list[Any],
  sync_clients: list[Any],
) -> Any:
  """Returns the tables of asynchronous training, on parameter servers or in this process."""
  if config.use_native_multi_hash_table:
    return distributed_ps_factory.create_native_multi_hash_table(
      config.num_ps,
      feature_configs,
      hash_filters,
      sync_clients,
      max_rpc_deadline_millis=config.max_rpc_deadline_millis,
    )
  return distributed_ps_factory.create_multi_type_hash_table(
    config.num_ps,
    feature_configs,
    hash_filters,
    sync_clients,
    reduce_network_packets=True,
    max_rpc_deadline_millis=config.max_rpc_deadline_millis,
  )


def _create_in_worker(
  config: CpuTrainingConfig,
  feature_configs: Configs,
  hash_filters: list[Any],
  sync_clients: list[Any],
) -> Any:
  """Returns the tables of synchronous training, where each worker owns a share of the ids."""
  create_table = (
    distributed_ps_factory.create_in_worker_native_multi_hash_table
    if config.use_native_multi_hash_table
    else distributed_ps_factory.create_in_worker_multi_type_hash_table
  )
  return create_table(
    config.num_workers,
    feature_configs,
    hash_filters[0],
    sync_client=sync_clients[0],
    queue_configs=_queue_configs(config),
  )


def _create_for_layouts(
  config: CpuTrainingConfig,
  num_ranks: int | None,
  hash_filters: list[Any],
  sync_clients: list[Any],
) -> Any:
  """Returns the tables of a fused layout, whose features the parser context knows.

  Args:
    config: the process's configuration.
    num_ranks: what `layout_ranks` returned.
    hash_filters, sync_clients: one per server.
  """
  if num_ranks is None:
    return distributed_ps_factory.create_partitioned_hash_table(
      config.num_ps,
      bool(config.use_native_multi_hash_table),
      max_rpc_deadline_millis=config.max_rpc_deadline_millis,
      hash_filters=hash_filters,
      sync_clients=sync_clients,
    )
  if config.enable_embedding_postpush:
    raise ValueError(
      "enable_embedding_postpush is set, but the tables of a fused layout are in this process and "
      "its ranks: leave it unset, and enable_async_optimize updates them during the next step"
    )
  return distributed_ps_factory.create_partitioned_hash_table(
    num_ranks,
    bool(config.use_native_multi_hash_table),
    # A rank makes its own tables alone, and takes these by its number.
    hash_filters=hash_filters * max(num_ranks, 1),
    sync_clients=sync_clients * max(num_ranks, 1),
    enable_gpu_emb=True,
    queue_configs=_queue_configs(config),
  )


def _queue_configs(config: CpuTrainingConfig) -> dict[str, int]:
  return {
    name: int(getattr(config, name))
    for name in (
      "embedding_prefetch_capacity",
      "enable_async_optimize",
      "enable_pipelined_fwda2a",
      "enable_pipelined_bwda2a",
    )
  }
