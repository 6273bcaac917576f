"""The configuration of a training process, without any of the code that acts on it.

`cpu_training` and `runner_utils` both build on these classes; they live apart so that reading a
configuration needs neither the op library nor the training driver. A field with a `:param` line
becomes a command-line flag in `runner_utils.RunnerConfig`; the others get none.
"""

import dataclasses
from typing import Callable, Optional

from monolith.native_training import gflags_utils
from monolith.native_training.settings import (
  dataservice_flags,  # noqa: F401, defines the linked flag
)


@gflags_utils.LinkDataclassToFlags(linked_map={"use_dataservice": "dataset_use_dataservice"})
@dataclasses.dataclass
class CpuTrainingConfig:
  """Says how one process trains.

  :param server_type: role of this process, "ps" or "worker".
  :param index: index inside the role; worker 0 is the chief.
  :param num_ps: number of parameter servers; 0 keeps the tables in the worker.
  :param num_workers: number of workers, the chief included.
  :param model_name: name of the model when served; empty lets the driver choose one.
  :param filter_capacity: capacity of the occurrence filter.
  :param filter_split_num: number of splits of the sliding filter.
  :param filter_type: "sliding_hash_filter", "probabilistic_filter" or "no_filter".
  :param filter_equal_probability: whether a probabilistic filter treats every occurrence alike.
  :param hashtable_init_capacity: initial capacity of every table, if positive.
  :param use_native_multi_hash_table: whether tables are merged in the engine; None means yes.
  :param embedding_prefetch_capacity: capacity of the embedding prefetch queue; 0 means no queue.
  :param enable_embedding_postpush: whether embedding gradients are pushed asynchronously.
  :param steps_in_flight: how many steps a worker makes at the same time, each with a batch of its
    own. More than 1 keeps many cores busy; a step may miss the updates of that many others less
    one, besides those in queues, some updates of dense variables may be lost, results are not
    repeatable, and hooks see only one of these steps.
  :param enable_variable_prefetch: whether workers cache dense variables.
  :param enable_variable_postpush: whether async functions are asynchronous by default.
  :param enable_sync_training: whether gradients are all-reduced.
  :param enable_partial_sync_training: whether only the dense part is all-reduced, with sparse
    tables on parameter servers.
  :param enable_gpu_training: whether ops may be placed on a GPU.
  :param processes_per_gpu: not used.
  :param merge_sync_training_ckpt: whether synchronous training writes one merged checkpoint.
  :param mode: "train", "eval" or "infer".
  :param partial_recovery: whether only servers that lost their state are restored; None means yes
    under realtime training.
  :param tide_start_hour: UTC hour at which tide resources appear.
  :param tide_start_minute: minute of that hour.
  :param tide_end_hour: UTC hour at which tide resources vanish.
  :param tide_end_minute: minute of that hour.
  :param tide_save_secs: checkpoint interval outside the tide window.
  :param enable_realtime_training: whether this is a streaming job: parameters are synchronised to
    serving, servers are kept alive, save errors are ignored.
  :param realtime_kafka_servers: comma-separated host:port of the brokers to which realtime training
    writes its row log; empty pushes rows to serving replicas directly.
  :param realtime_model_name: name in the topics rows.<name> and dense.<name>; empty means that of
    the served model.
  :param sync_interval_secs: seconds between two batches of changed rows in the row log.
  :param dense_sync_secs: seconds between two sets of dense variables in the row log.
  :param realtime_digest_secs: seconds between two digests of the tables in the row log; 0 for none.
  :param enable_async_optimize: whether the optimizer of synchronous training runs behind a queue.
  :param enable_pipelined_fwda2a: whether the forward all-to-all is pipelined.
  :param enable_pipelined_bwda2a: whether the backward all-to-all is pipelined.
  :param profile_some_steps_from: profile ten steps from this one on.
  :param profile_with_nvprof_from_to: "a,b" runs the CUDA profiler from step a to step b.
  :param reorder_fids_in_data_pipeline: whether ids are de-duplicated and sharded inside tf.data.
  :param chief_timeout_secs: how long the chief waits for workers at the end.
  :param save_checkpoints_secs: seconds between full checkpoints.
  :param save_checkpoints_steps: steps between full checkpoints.
  :param dense_only_save_checkpoints_secs: seconds between dense-only checkpoints; under realtime
    training 1800 if neither dense-only interval is set.
  :param dense_only_save_checkpoints_steps: steps between dense-only checkpoints.
  :param dense_only_stop_training_when_save: whether dense-only saves use the barrier too.
  :param warmup_file: TF-Serving warm-up file attached to exports.
  :param skip_zero_embedding_when_serving: whether exports leave out rows that are all zero.
  :param max_rpc_deadline_millis: deadline of remote predictions in exported graphs.
  :param checkpoints_max_to_keep: how many recent checkpoints are kept.
  :param submit_time_secs: when the job was submitted, for metrics.
  :param containers_ready_time_secs: when the cluster was complete, for metrics.
  :param cluster_type: "stable", "tide" or "k8s", for metrics.
  :param max_slow_start_wait_minute: upper bound of slow start.
  :param enable_model_ckpt_info: whether ckpt.info-<step> is written next to checkpoints.
  :param feature_eviction_on_save: whether tables are restored after each save to drop expired
    entries.
  :param only_feature_engineering: whether parsed features are dumped instead of trained on.
  :param enable_variable_partition: whether variables are partitioned over the servers.
  :param enable_fused_layout: whether the fused-layout path is used.
  :param force_shutdown_ps: whether servers are shut down even in realtime training.
  :param clear_nn: whether the dense part is initialised anew at reload.
  :param continue_training: whether clear_nn keeps the global step.
  :param enable_alias_map_auto_gen: whether aliases of renamed variables are found; None means yes.
  :param enable_model_dump: refused: models cannot be dumped.
  :param enable_resource_constrained_roughsort: whether parsers add the feature item_id.
  :param roughsort_candidate_items_path: not used.
  :param roughsort_items_use_parquet: not used.
  :param items_input_lagrangex_header: not used.
  :param items_input_has_sort_id: not used.
  :param items_input_kafka_dump: not used.
  :param items_input_kafka_dump_prefix: not used.
  :param num_extra_dsworker_on_gpu_worker: tf.data service workers started beside each GPU worker.
  :param save_summary_steps: steps between summaries.
  :param log_step_count_steps: steps between logs of loss and speed.
  """

  server_type: str = "worker"
  index: int = 0
  num_ps: int = 0
  num_workers: int = 1
  model_name: str = ""
  filter_capacity: int = 300000000
  filter_split_num: int = 7
  filter_type: str = "sliding_hash_filter"  # hash_filter_ops.FilterType, without its op library
  filter_equal_probability: bool = True
  hashtable_init_capacity: int = 0
  use_native_multi_hash_table: Optional[bool] = None
  embedding_prefetch_capacity: int = 0
  enable_embedding_postpush: bool = False
  steps_in_flight: int = 1
  enable_variable_prefetch: bool = False
  enable_variable_postpush: bool = False
  enable_sync_training: bool = False
  enable_partial_sync_training: bool = False
  enable_gpu_training: bool = False
  processes_per_gpu: int = 1
  merge_sync_training_ckpt: bool = True
  mode: str = "train"  # graph_estimator.ModeKeys.TRAIN, without TensorFlow
  partial_recovery: Optional[bool] = None
  tide_start_hour: Optional[int] = None
  tide_start_minute: Optional[int] = None
  tide_end_hour: Optional[int] = None
  tide_end_minute: Optional[int] = None
  tide_save_secs: Optional[int] = None
  enable_realtime_training: bool = False
  realtime_kafka_servers: str = ""
  realtime_model_name: str = ""
  sync_interval_secs: float = 10.0
  dense_sync_secs: float = 1800.0
  realtime_digest_secs: float = 30.0
  enable_async_optimize: bool = False
  enable_pipelined_fwda2a: bool = False
  enable_pipelined_bwda2a: bool = False
  profile_some_steps_from: Optional[int] = None
  profile_save_steps_interval: int = 5000  # steps between profiles
  profile_with_nvprof_from_to: Optional[str] = None
  reorder_fids_in_data_pipeline: bool = False
  chief_timeout_secs: int = 1800
  save_checkpoints_secs: Optional[int] = None
  save_checkpoints_steps: Optional[int] = None
  dense_only_save_checkpoints_secs: Optional[int] = None
  dense_only_save_checkpoints_steps: Optional[int] = None
  dense_only_stop_training_when_save: bool = False
  warmup_file: str = "./warmup_file"
  skip_zero_embedding_when_serving: bool = False
  max_rpc_deadline_millis: int = 30000
  checkpoints_max_to_keep: int = 10
  submit_time_secs: Optional[int] = None
  containers_ready_time_secs: Optional[int] = None
  cluster_type: str = "stable"
  max_slow_start_wait_minute: int = 10
  enable_model_ckpt_info: bool = False
  feature_eviction_on_save: bool = False
  only_feature_engineering: bool = False
  enable_variable_partition: bool = True
  enable_fused_layout: bool = False
  force_shutdown_ps: bool = False
  clear_nn: bool = False
  continue_training: bool = False
  reload_alias_map: Optional[dict[str, str]] = None  # new variable name → old one
  enable_alias_map_auto_gen: Optional[bool] = None
  enable_model_dump: bool = False
  enable_resource_constrained_roughsort: bool = False
  roughsort_candidate_items_path: Optional[str] = None
  roughsort_items_use_parquet: bool = False
  items_input_lagrangex_header: bool = False
  items_input_has_sort_id: bool = False
  items_input_kafka_dump: bool = False
  items_input_kafka_dump_prefix: bool = False
  device_fn: Optional[Callable] = None  # for RunConfig in training with parameter servers
  use_dataservice: Optional[bool] = None  # linked to --dataset_use_dataservice
  num_extra_dsworker_on_gpu_worker: int = 0
  save_summary_steps: int = 100
  log_step_count_steps: int = 100

  @property
  def enable_full_sync_training(self) -> bool:
    return self.enable_sync_training and not self.enable_partial_sync_training

  def check_restore(self, model_dir: str) -> None:
    """Checks that the checkpoint that a configuration names can be restored; this one names none.

    Args:
      model_dir: the job's folder.
    """


@dataclasses.dataclass
class DistributedCpuTrainingConfig(CpuTrainingConfig):
  """Says how one process of a cluster trains.

  :param model_dir: folder of checkpoints and metadata.
  :param tensorboard_log_path: not used.
  :param intra_op_parallelism_threads: threads of a server or synchronous session inside one op; 0
    for one per core. Set it where a process has more than eight cores.
  :param inter_op_parallelism_threads: threads of a server or synchronous session across ops.
  :param num_extra_ps: servers started in addition and removed by the server benchmark.
  :param num_redundant_ps: servers started in addition, of which the first to register win.
  :param uuid: id of the job.
  :param operation_timeout_in_ms: timeout of every session call; -1 means none.
  :param session_creation_timeout_secs: how long a worker waits for the chief's session.
  :param max_retry_times: retries after a changed cluster; 0 means 6 with partial recovery in
    asynchronous training, else none.
  :param retry_wait_in_secs: pause before a retry.
  :param fountain_zk_host: not used.
  :param fountain_model_name: not used.
  :param dc_aware: whether parameters are synchronised to replicas of the same data centre only.
  """

  model_dir: str = ""
  tensorboard_log_path: str = ""
  intra_op_parallelism_threads: int = 8
  inter_op_parallelism_threads: int = 16
  num_extra_ps: int = 0
  num_redundant_ps: int = 0
  uuid: str = ""
  operation_timeout_in_ms: int = -1
  session_creation_timeout_secs: int = 7200
  max_retry_times: int = 0
  retry_wait_in_secs: int = 30
  fountain_zk_host: str = ""
  fountain_model_name: str = ""
  dc_aware: bool = False
