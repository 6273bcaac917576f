"""The role that a process plays, and what its configuration leaves to the driver."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from absl import logging

from monolith.native_training import native_task, native_task_context
from monolith.native_training.settings import rank_environment as mpi_utils
from monolith.native_training.settings.training_config import CpuTrainingConfig

_REALTIME_DENSE_ONLY_SECS = 1800

# These belong to tools that are not public, or are decided elsewhere.
_UNUSED_FIELDS = (
  "processes_per_gpu",
  "roughsort_candidate_items_path",
  "roughsort_items_use_parquet",
  "items_input_lagrangex_header",
  "items_input_has_sort_id",
  "items_input_kafka_dump",
  "items_input_kafka_dump_prefix",
  "tensorboard_log_path",
  "fountain_zk_host",
  "fountain_model_name",
  "enable_fid_dedup",
  "ps_replica_num",
  "use_estimator",
)
# Fields that only have an effect if ranks share tables and variables, or only if they do not.
_FULL_SYNC_FIELDS = (
  "merge_sync_training_ckpt",
  "enable_async_optimize",
  "enable_pipelined_fwda2a",
  "enable_pipelined_bwda2a",
  "reorder_fids_in_data_pipeline",
)
_NO_FULL_SYNC_FIELDS = ("only_feature_engineering",)
_NO_SYNC_FIELDS = ("enable_variable_prefetch",)
# All of them off or empty by default.
_UNUSED_PARAMS = (
  "metrics.use_data_service",
  "train.use_fountain",
  "train.fountain_zk_host",
  "train.fountain_model_name",
  "train.fountain_parse_on_server",
  "train.fountain_precompute_value_rowids",
)


def is_chief(config: CpuTrainingConfig) -> bool:
  """Returns whether this process is the one that initialises, restores and saves."""
  if config.server_type != "worker":
    return False
  if config.enable_sync_training or config.enable_partial_sync_training:
    return mpi_utils.get_mpi_rank() == 0
  return config.index == 0


def make_native_task_context(
  config: CpuTrainingConfig, sync_backend: Any = None
) -> native_task_context.NativeTaskContext:
  """Returns the context that describes the role of this process."""
  return native_task_context.NativeTaskContext(
    num_ps=config.num_ps,
    ps_index=config.index if config.server_type == "ps" else 0,
    num_workers=config.num_workers,
    worker_index=config.index if config.server_type == "worker" else 0,
    model_name=config.model_name,
    sync_backend=sync_backend,
    server_type=config.server_type,
  )


def check_options(config: CpuTrainingConfig) -> None:
  """Refuses options that cannot be met.

  Raises:
    ValueError: the model is to be dumped, or an option of the row log or `steps_in_flight` makes no
      sense.
  """
  if config.enable_model_dump:
    raise ValueError(
      "enable_model_dump is True, but models cannot be dumped: the format belongs to tools that "
      "are not public. Leave it False; serving.export_when_saving writes models to serve."
    )
  if config.steps_in_flight < 1:
    raise ValueError(f"steps_in_flight is {config.steps_in_flight}, want at least 1")
  if config.steps_in_flight > 1 and (
    config.enable_sync_training or config.enable_partial_sync_training
  ):
    raise ValueError(
      f"steps_in_flight is {config.steps_in_flight}, but synchronous ranks make one step at a "
      "time: leave it at 1"
    )
  if config.realtime_kafka_servers:
    if not config.enable_realtime_training:
      raise ValueError(
        f"realtime_kafka_servers is {config.realtime_kafka_servers!r}, but nothing is published "
        "without enable_realtime_training: set both, or neither"
      )
    for server in config.realtime_kafka_servers.split(","):
      host, _, port = server.strip().rpartition(":")
      if not host or not port.isdigit():
        raise ValueError(
          f"realtime_kafka_servers is {config.realtime_kafka_servers!r}, want comma-separated "
          f"host:port, and {server.strip()!r} is none"
        )
  for name in ("sync_interval_secs", "dense_sync_secs"):
    if not getattr(config, name) > 0:
      raise ValueError(f"{name} is {getattr(config, name)}, want seconds, more than 0")
  if not config.realtime_digest_secs >= 0:
    raise ValueError(f"realtime_digest_secs is {config.realtime_digest_secs}, want seconds, or 0")


def report_unused_options(config: CpuTrainingConfig, params: Any) -> None:
  """Logs, in one line, the options that were set and have no effect in this kind of training."""
  names = list(_UNUSED_FIELDS)
  names += _NO_FULL_SYNC_FIELDS if config.enable_full_sync_training else _FULL_SYNC_FIELDS
  if config.enable_sync_training or config.enable_partial_sync_training:
    names += _NO_SYNC_FIELDS
  defaults = {field.name: field.default for field in dataclasses.fields(config)}
  unused = {
    name: getattr(config, name)
    for name in names
    if name in defaults and getattr(config, name) != defaults[name]
  }
  unused.update({name: params.get(name) for name in _UNUSED_PARAMS if params.get(name)})
  if unused:
    text = ", ".join(f"{name} = {value!r}" for name, value in unused.items())
    logging.warning("Options that are set and have no effect: %s", text)


def fill_in_defaults(config: CpuTrainingConfig, task: native_task.NativeTask) -> None:
  """Sets the options that were left to the driver, in the caller's object."""
  if not config.model_name:
    config.model_name = task.p.metrics.deep_insight_name or f"di_name_{type(task).__name__}"
  if config.enable_realtime_training and config.partial_recovery is None:
    config.partial_recovery = True
  intervals = (config.dense_only_save_checkpoints_secs, config.dense_only_save_checkpoints_steps)
  if intervals == (None, None):
    train = task.p.train
    intervals = (train.dense_only_save_checkpoints_secs, train.dense_only_save_checkpoints_steps)
    if intervals == (None, None) and config.enable_realtime_training:
      intervals = (_REALTIME_DENSE_ONLY_SECS, None)
    config.dense_only_save_checkpoints_secs, config.dense_only_save_checkpoints_steps = intervals
  if config.use_native_multi_hash_table is None:
    config.use_native_multi_hash_table = True


def to_serving_config(config: CpuTrainingConfig) -> CpuTrainingConfig:
  """Returns a copy for exported graphs, which run in one process and have no queues."""
  serving = copy.deepcopy(config)
  serving.embedding_prefetch_capacity = 0
  serving.enable_embedding_postpush = False
  serving.enable_variable_prefetch = False
  serving.enable_variable_postpush = False
  serving.reorder_fids_in_data_pipeline = False
  serving.enable_model_ckpt_info = False
  if config.enable_sync_training:
    serving.enable_sync_training = False
    if config.enable_full_sync_training:
      serving.num_ps = config.num_workers
  serving.enable_partial_sync_training = False
  return serving
