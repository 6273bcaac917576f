"""The hooks that the driver attaches to a model: restore, save, export, barrier, health, metrics.

All graph parts are built on every worker, so that all workers have the same graph; Estimator runs
the chief's hooks on the chief only. The order of the lists is the order of execution and matters:
the restore comes before the signal that lets workers start, waiting hooks come before hooks that
consume data, and at the end the chief waits for its workers before the last save.

Longer than 600 lines: that order is one decision, and is only seen where all hooks are listed.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import (
  barrier_ops,
  basic_restore_hook,
  dense_reload_utils,
  env_utils,
  graph_estimator,
  hash_filter_ops,
  hash_table_ops,
  multi_hash_table_ops,
  save_utils,
  session_run_hooks,
  sync_hooks,
  sync_training_hooks,
  variables,
)
from monolith.native_training.checkpoints import ckpt_hooks, graph_files
from monolith.native_training.checkpoints import ranks as sync_checkpoint
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.checkpoints import state as checkpoint_state
from monolith.native_training.checkpoints import topology as training_topology
from monolith.native_training.data import stream_positions
from monolith.native_training.driver import observers, steps_in_flight
from monolith.native_training.graph import export_context, session_hooks
from monolith.native_training.hooks import ckpt_info, data_position, ps_check_hooks
from monolith.native_training.hooks.server import server_lib
from monolith.native_training.model_export import export_hooks
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.native_training.tables import protocols
from monolith.row_log import sync_state

Hooks = list[tf.compat.v1.train.SessionRunHook]
SaverListeners = list[tf.compat.v1.train.CheckpointSaverListener]
# (dense_only, include_graphs, export_dir_base) -> an exporter of the model.
ExporterFactory = Callable[[bool, "list[str] | None", str], Any]

# The default interval between checkpoints, which bounds what a crash may cost.
DEFAULT_SAVE_SECS = 300
# More steps than a run has.
DEFAULT_SAVE_STEPS = 100000000

_CHECKPOINT_BASENAME = "model.ckpt"
_DENSE_ONLY_DIR = "dense_only"
_KEEP_CHECKPOINT_EVERY_N_HOURS = 24
# Steps between looks at the files with which an operator controls synchronous training.
_CONTROL_STEPS_ENV = "MONOLITH_SYNC_CONTROL_STEPS"
_REQ_TIME_COLLECTION = "req_time"


def get_save_interval(config: CpuTrainingConfig, params: Any) -> tuple[int | None, int | None]:
  """Returns seconds and steps between full checkpoints, of which exactly one is set.

  Raises:
    ValueError: both are given.
  """
  secs = config.save_checkpoints_secs or params.train.save_checkpoints_secs
  steps = config.save_checkpoints_steps or params.train.save_checkpoints_steps
  if secs is not None and steps is not None:
    raise ValueError("Can not provide both save_checkpoints_secs and save_checkpoints_steps.")
  if secs is None and steps is None:
    secs = DEFAULT_SAVE_SECS
  return secs, steps


class _FinishAsyncHook(tf.compat.v1.train.SessionRunHook):
  """Waits at the end for asynchronous functions, before other hooks save or report success.

  A background thread that fails, say because a server is gone, stops the steps like the end of the
  data does. But then no hook may wait for workers, save or report success.

  Args:
    hooks: the hooks of these functions.
  """

  def __init__(self, hooks: Sequence[tf.compat.v1.train.SessionRunHook]):
    self._hooks = hooks
    self._coord: tf.train.Coordinator | None = None

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._coord = coord

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._coord is not None:
      self._coord.raise_requested_exception()
    for hook in self._hooks:
      hook.end(session)


class TrainingHooks:
  """Builds the hooks of one graph.

  Args:
    config: the process's configuration.
    params: the task's params.
    model_dir: where checkpoints are.
    hash_table: the graph's tables, for their queues.
    hash_filters: their occurrence filters.
    enable_hash_filter: whether the filters are real.
    slices: table name -> the slices of its rows.
    async_hooks: the hooks of functions that run asynchronously.
    serving_input_receiver_fn: the task's receiver function, for exports.
    create_exporter: makes exporters.
    data_fingerprint: identifies the data; `None` if it is not known.
    resume: when to go on in the data where an earlier run has stopped.
    batch_size: the examples of a step, scalar; `None` if not known.
    num_steps: how many steps this run has; `None` if not known.
    last_step: the step at which it ends; `None` if not known.
  """

  def __init__(
    self,
    config: CpuTrainingConfig,
    params: Any,
    model_dir: str,
    hash_table: protocols.HasQueueHooks,
    hash_filters: Sequence[tf.Tensor],
    enable_hash_filter: bool,
    slices: checkpoint_slices.Tables,
    async_hooks: Sequence[tf.compat.v1.train.SessionRunHook],
    serving_input_receiver_fn: Callable[[], Any] | None,
    create_exporter: ExporterFactory,
    data_fingerprint: str | None = None,
    resume: data_position.Resume = data_position.Resume.SAME_DATA,
    batch_size: tf.Tensor | None = None,
    num_steps: int | None = None,
    last_step: int | None = None,
  ):
    self._config = config
    self._params = params
    self._model_dir = model_dir
    self._hash_table = hash_table
    self._hash_filters = hash_filters
    self._enable_hash_filter = enable_hash_filter
    self._slices = slices
    self._async_hooks = async_hooks
    self._serving_input_receiver_fn = serving_input_receiver_fn
    self._create_exporter = create_exporter
    self._data_fingerprint = data_fingerprint
    self._resume = resume
    self._batch_size = batch_size
    self._num_steps = num_steps
    self._last_step = last_step
    self._row_log_listener: tf.compat.v1.train.CheckpointSaverListener | None = None
    self._is_async = not (config.enable_sync_training or config.enable_partial_sync_training)
    self._is_root_node = not config.enable_sync_training or config.index == 0
    # Each rank may have a folder of its own.
    self._owns_folder = self._is_root_node or (
      config.enable_full_sync_training and not config.merge_sync_training_ckpt
    )
    self._stream = stream_positions.get()
    # One server loses all or nothing. Streams must know that nothing is to be restored, as they go
    # on where the server stands.
    min_ps = 2 if self._stream is None else 1
    self._ps_monitor = (
      save_utils.PsMonitor(config.num_ps)
      if config.partial_recovery and config.num_ps >= min_ps
      else None
    )

  def attach(self, spec: graph_estimator.EstimatorSpec, mode: str) -> graph_estimator.EstimatorSpec:
    """Returns `spec` with the driver's hooks before its own.

    Args:
      spec: the result of the task's model function.
      mode: the mode in which it was built. Evaluation and prediction only restore and read.
    """
    graph_files.leave_out_large_constants(tf.compat.v1.get_default_graph())
    restore_hooks = self.get_restore_hooks(mode)
    if mode != graph_estimator.ModeKeys.TRAIN:
      if self._model_dir:
        self._add_saver_to_collection()
      hooks = [session_hooks.SetCurrentSessionHook(), *restore_hooks, *self._get_data_hooks()]
      return spec._replace(
        prediction_hooks=(*hooks, *spec.prediction_hooks),
        evaluation_hooks=(*hooks, *spec.evaluation_hooks),
      )

    finish_async = _FinishAsyncHook([*self._async_hooks, *self._hash_table.get_queue_hooks()])
    training_hooks: Hooks = [session_hooks.SetCurrentSessionHook(), finish_async]
    chief_hooks: Hooks = [finish_async]
    chief_sync_hooks: Sequence[tf.compat.v1.train.SessionRunHook] = ()
    barrier_op = barrier_listener = None
    if self._is_async:
      sync_helper = self._create_sync_helper()
      if self._config.mode == graph_estimator.ModeKeys.EVAL:
        # Evaluation neither reads nor moves training's position in the data.
        ckpt_hooks.disable_iterator_save_restore()
      worker_ckpt_helper = ckpt_hooks.WorkerCkptHelper(self._model_dir, self._config.index)
      barrier_op = barrier_ops.BarrierOp(
        self._config.num_workers,
        is_chief=self._config.index == 0,
        barrier_callbacks=[worker_ckpt_helper.create_save_iterator_callback()],
      )
      barrier_listener = ckpt_hooks.BarrierSaverListener(
        barrier_op,
        max_pending_seconds=self._params.train.max_pending_seconds_for_barrier,
        get_running_workers=sync_helper.get_alive_workers,
      )
      training_hooks += sync_helper.training_hooks
      training_hooks.append(barrier_ops.BarrierHook(self._config.index, barrier_op))
      training_hooks += self._get_slow_start_hooks()
      training_hooks.append(
        data_position.DataPositionHook(
          worker_ckpt_helper.create_restorer_hook(),
          self._model_dir,
          self._config.index,
          self._data_fingerprint,
          self._resume,
        )
      )
      chief_sync_hooks = sync_helper.training_chief_hooks
      chief_hooks.append(
        ps_check_hooks.PsHealthCheckerHook(
          ps_check_hooks.Config(barrier_op=barrier_op, num_ps=self._config.num_ps)
        )
      )
    training_hooks += self._get_data_hooks()
    training_hooks += self._async_hooks
    training_hooks += self._get_steps_in_flight_hooks(spec)
    chief_hooks += restore_hooks
    chief_hooks += self._get_row_log_hooks()
    chief_hooks += chief_sync_hooks
    chief_hooks += self.get_save_hooks(barrier_op, barrier_listener)
    chief_hooks += self._get_dense_set_hooks()
    if self._is_root_node:
      chief_hooks += observers.get_metric_hooks(self._config, self._params.metrics, self._model_dir)
      chief_hooks += observers.get_progress_hooks(
        spec,
        self._config,
        self._model_dir,
        batch_size=self._batch_size,
        num_steps=self._num_steps,
        last_step=self._last_step,
        stream=self._stream,
      )
    return spec._replace(
      training_hooks=(*training_hooks, *spec.training_hooks),
      training_chief_hooks=(*chief_hooks, *spec.training_chief_hooks),
      prediction_hooks=(*restore_hooks, *spec.prediction_hooks),
    )

  def _create_sync_helper(self) -> sync_hooks.TrainingHooksHelper:
    return sync_hooks.TrainingHooksHelper(
      self._config.num_workers > 1,
      self._config.num_workers,
      self._config.index,
      self._config.chief_timeout_secs,
    )

  def _get_slow_start_hooks(self) -> Hooks:
    slow_start_steps = self._params.train.slow_start_steps
    if self._params.mode != graph_estimator.ModeKeys.TRAIN or not slow_start_steps:
      return []
    return [
      session_run_hooks.CustomGlobalStepWaiterHook(
        int(slow_start_steps * math.log(1 + self._config.index)),
        max_non_tide_wait_minute=self._config.max_slow_start_wait_minute,
      )
    ]

  def _get_data_hooks(self) -> Hooks:
    """Returns the hooks that fill the queues of the graph."""
    hooks: Hooks = list(self._hash_table.get_queue_hooks())
    if self._config.enable_variable_prefetch and self._is_async:
      hooks.append(variables.FetchAllCachedVariablesHook())
    return hooks

  def _get_steps_in_flight_hooks(self, spec: graph_estimator.EstimatorSpec) -> Hooks:
    config = self._config
    if config.steps_in_flight == 1:
      return []
    # Other workers count global steps, too: a limit is then reached within as many steps more.
    is_alone = config.num_workers == 1
    return [
      steps_in_flight.StepsInFlightHook(
        config.steps_in_flight,
        spec.train_op,
        spec.loss,
        [*self._async_hooks, *self._hash_table.get_queue_hooks()],
        num_left=self._num_steps if is_alone else None,
        last_step=self._last_step if is_alone else None,
      )
    ]

  def get_restore_hooks(self, mode: str = graph_estimator.ModeKeys.TRAIN) -> Hooks:
    """Returns the hooks that restore tables and filters; none without a model folder.

    Args:
      mode: only a model that trains may have variables that the checkpoint lacks.
    """
    if not self._model_dir:
      return []
    config = self._config
    basename = os.path.join(self._model_dir, _CHECKPOINT_BASENAME)
    filters_are_saved = (
      not config.enable_full_sync_training
      and config.filter_type != hash_filter_ops.FilterType.PROBABILISTIC_FILTER
    )
    # Training rewrites a checkpoint for another number of servers; a reader may not.
    is_reader = mode != graph_estimator.ModeKeys.TRAIN and not config.enable_full_sync_training
    copies = [training_topology.CopyListener(self._model_dir, config.num_ps)] if is_reader else []
    return [
      basic_restore_hook.CheckpointRestorerHook(
        listeners=[
          *copies,
          hash_table_ops.HashTableCheckpointRestorerListener(basename, self._ps_monitor),
          multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(basename, self._ps_monitor),
          hash_filter_ops.HashFilterCheckpointRestorerListener(
            basename,
            self._hash_filters,
            self._enable_hash_filter,
            enable_save_restore=filters_are_saved,
          ),
          dense_reload_utils.CustomRestoreListener(
            alias_map=config.reload_alias_map,
            clear_nn=config.clear_nn,
            continue_training=config.continue_training,
            model_dir=self._model_dir,
            enable_alias_map_auto_gen=config.enable_alias_map_auto_gen,
            allow_new_variables=mode == graph_estimator.ModeKeys.TRAIN,
          ),
        ]
      )
    ]

  def _create_saver(self) -> save_utils.PartialRecoverySaver:
    return save_utils.PartialRecoverySaver(
      sharded=not self._config.enable_full_sync_training,
      max_to_keep=self._config.checkpoints_max_to_keep,
      keep_checkpoint_every_n_hours=_KEEP_CHECKPOINT_EVERY_N_HOURS,
      ps_monitor=self._ps_monitor,
      exempt_checkpoint_paths=checkpoint_state.get_exempt_checkpoint_paths(self._model_dir),
      skip_save=not self._owns_folder,
      model_dir=self._model_dir,
    )

  def _add_saver_to_collection(self) -> save_utils.PartialRecoverySaver:
    saver = self._create_saver()
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVERS, saver)
    return saver

  def get_save_hooks(
    self,
    barrier_op: barrier_ops.BarrierOp | None,
    barrier_listener: ckpt_hooks.BarrierSaverListener | None,
  ) -> Hooks:
    """Returns the hooks that save and export checkpoints.

    Args:
      barrier_op: makes workers wait, `None` in synchronous training.
      barrier_listener: makes them wait while a checkpoint is saved.

    Raises:
      ValueError: there is no model folder, two intervals are given, or exports are impossible.
    """
    if not self._model_dir:
      raise ValueError("model_dir must be provided")
    config = self._config
    listeners = self._get_saver_listeners()
    saver = self._add_saver_to_collection()
    guards: SaverListeners = [] if barrier_listener is None else [barrier_listener]
    secs, steps = get_save_interval(config, self._params)
    saver_hook = self._create_saver_hook(
      self._model_dir, secs, steps, saver, listeners, guards, is_dense_only=False
    )
    if self._has_dense_only:
      # On all ranks, as they save together.
      saver_hook.always_save_at_end()
    hooks: Hooks = [*self._get_control_hooks(saver_hook.timer), saver_hook]
    if barrier_op is not None:
      hooks.append(server_lib.ServerHook(self._model_dir, barrier_op, saver_hook))
    if self._has_dense_only and self._is_root_node:
      hooks += self._get_dense_only_hooks(saver_hook, guards)
    return hooks

  def _get_control_hooks(self, timer: save_utils.SecondOrStepTimerWithTideSetting) -> Hooks:
    """Returns the hooks with which an operator saves or stops all ranks by files, if enabled."""
    steps = env_utils.get_int(_CONTROL_STEPS_ENV, 0)
    if not self._config.enable_full_sync_training or not steps:
      return []
    hooks: Hooks = [sync_training_hooks.SyncTrainingForceDumpHook(self._model_dir, timer, steps)]
    if tf.compat.v1.get_collection(_REQ_TIME_COLLECTION):
      hooks.append(sync_training_hooks.ReqTimeControlDumpHook(self._model_dir, timer, steps))
    return hooks

  @property
  def _has_dense_only(self) -> bool:
    return bool(
      self._config.dense_only_save_checkpoints_secs
      or self._config.dense_only_save_checkpoints_steps
    )

  def _create_saver_hook(
    self,
    folder: str,
    secs: int | None,
    steps: int | None,
    saver: save_utils.PartialRecoverySaver,
    listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener],
    guards: Sequence[tf.compat.v1.train.CheckpointSaverListener],
    is_dense_only: bool,
  ) -> save_utils.NoFirstSaveCheckpointSaverHook:
    config = self._config
    hook_type: Callable[..., save_utils.NoFirstSaveCheckpointSaverHook]
    hook_type = save_utils.NoFirstSaveCheckpointSaverHook
    if config.enable_full_sync_training and config.num_workers > 1 and not is_dense_only:
      hook_type = functools.partial(
        sync_checkpoint.SyncCheckpointSaverHook, is_root=self._is_root_node
      )
    return hook_type(
      folder,
      save_secs=secs,
      save_steps=steps,
      saver=saver,
      listeners=listeners,
      save_graph_def=self._owns_folder,
      tide_start_hour=config.tide_start_hour,
      tide_start_minute=config.tide_start_minute,
      tide_end_hour=config.tide_end_hour,
      tide_end_minute=config.tide_end_minute,
      tide_save_secs=config.tide_save_secs,
      ignore_save_errors=config.enable_realtime_training,
      is_dense_only=is_dense_only,
      use_native_multi_hash_table=bool(config.use_native_multi_hash_table),
      # Without a checkpoint, a restarted chief would begin anew on servers that have learnt
      # something.
      no_first_save=self._stream is None
      or is_dense_only
      or tf.train.latest_checkpoint(folder) is not None,
      guard_saver_listeners=guards,
    )

  def _get_saver_listeners(self) -> SaverListeners:
    config = self._config
    basename = os.path.join(self._model_dir, _CHECKPOINT_BASENAME)
    listeners: SaverListeners = [
      # Before the tables are saved.
      *self._get_log_listeners(basename),
      hash_table_ops.HashTableCheckpointSaverListener(basename),
      multi_hash_table_ops.MultiHashTableCheckpointSaverListener(
        basename, write_ckpt_info=self._is_root_node
      ),
      hash_filter_ops.HashFilterCheckpointSaverListener(
        basename,
        self._hash_filters,
        self._enable_hash_filter,
        enable_save_restore=not config.enable_full_sync_training
        and config.filter_type != hash_filter_ops.FilterType.PROBABILISTIC_FILTER,
      ),
    ]
    if self._stream is not None:
      listeners.append(stream_positions.CommitListener(self._stream))
    if self._owns_folder:
      listeners.append(checkpoint_slices.SlicesSaverListener(basename, self._slices))
    listeners += self.get_export_listeners(basename, dense_only=False)
    if config.enable_model_ckpt_info and self._is_root_node:
      listeners.append(ckpt_info.FidSlotCountSaverListener(self._model_dir))
    if config.feature_eviction_on_save:
      listeners.append(hash_table_ops.HashTableRestorerSaverListener(basename))
      listeners.append(multi_hash_table_ops.MultiHashTableRestorerSaverListener(basename))
    if self._row_log_listener is not None:
      listeners.append(self._row_log_listener)
    return listeners

  def _get_log_listeners(self, basename: str) -> SaverListeners:
    """Returns the hooks that record the position in the row log, if there is one."""
    if not self._writes_row_log:
      return []
    # Needs a client of Kafka.
    from monolith.row_log import partition_reader, topics

    config = self._config
    model = config.realtime_model_name or config.model_name
    return [
      sync_state.SyncStateListener(
        basename,
        functools.partial(partition_reader.read_log_ends, config.realtime_kafka_servers),
        topics.rows_topic(model),
        max(1, config.num_ps),
        topics.dense_topic(model),
      )
    ]

  def _get_dense_set_hooks(self) -> Hooks:
    """Returns the hooks that publish the dense variables, if there is a row log."""
    if not self._writes_row_log:
      return []
    # Needs a client of Kafka.
    from monolith.row_log import dense_sets

    config = self._config
    return [
      dense_sets.DenseSetHook(
        config.realtime_kafka_servers,
        config.realtime_model_name or config.model_name,
        config.dense_sync_secs,
      )
    ]

  @property
  def _writes_row_log(self) -> bool:
    config = self._config
    return bool(config.realtime_kafka_servers) and not config.enable_full_sync_training

  def _get_row_log_hooks(self) -> Hooks:
    """Returns the hooks that tell writers of a row log, if any, that tables are restored."""
    if not self._writes_row_log:
      return []
    # Needs a client of Kafka.
    from monolith.row_log import row_log_hooks

    hook = row_log_hooks.RowLogHook(self._config, self._model_dir)
    self._row_log_listener = row_log_hooks.RowLogSavedListener(hook)
    return [hook]

  def _get_dense_only_hooks(
    self,
    saver_hook: save_utils.NoFirstSaveCheckpointSaverHook,
    guards: Sequence[tf.compat.v1.train.CheckpointSaverListener],
  ) -> Hooks:
    config = self._config
    folder = os.path.join(self._model_dir, _DENSE_ONLY_DIR)
    saver = self._create_saver()
    state = tf.train.get_checkpoint_state(folder)
    if state is not None:
      saver.recover_last_checkpoints(state.all_model_checkpoint_paths)
    dense_hook = self._create_saver_hook(
      folder,
      config.dense_only_save_checkpoints_secs,
      config.dense_only_save_checkpoints_steps,
      saver,
      self.get_export_listeners(os.path.join(folder, _CHECKPOINT_BASENAME), dense_only=True),
      guards if config.dense_only_stop_training_when_save else [],
      is_dense_only=True,
    )
    dense_hook.skip_steps_saved_by(saver_hook)
    if config.enable_sync_training and config.enable_realtime_training:
      return [
        sync_training_hooks.SyncTrainingSaverControlHook(self._model_dir, dense_hook.timer),
        dense_hook,
      ]
    return [dense_hook]

  def get_export_listeners(self, save_path: str, dense_only: bool) -> SaverListeners:
    """Returns the listener that exports each checkpoint `<save_path>-<step>`.

    Raises:
      ValueError: this is an export itself, or the task cannot be exported in this way.
    """
    if export_context.is_exporting():
      raise ValueError("Logic corrupted: exports cannot be attached while exporting.")
    serving = self._params.serving
    if dense_only and serving.export_mode != export_context.ExportMode.DISTRIBUTED:
      raise ValueError(
        f"dense only checkpoints need export mode DISTRIBUTED, got {serving.export_mode}"
      )
    if not serving.export_when_saving:
      return []
    if self._serving_input_receiver_fn is None:
      raise ValueError(
        "export_when_saving needs a task whose create_serving_input_receiver_fn returns a function"
      )
    config = self._config
    include_graphs = None
    if config.enable_full_sync_training:
      include_graphs = [f"ps_{config.index}"]
      if self._is_root_node:
        include_graphs += ["entry", "dense_0"]
    export_dir_base = os.path.join(
      # Dense-only checkpoints lie one folder deeper, but export to the same place.
      self._model_dir,
      serving.export_dir_base,
    )
    listeners: SaverListeners = []
    if config.enable_full_sync_training and not dense_only:
      listeners.append(sync_training_hooks.SyncTrainingBarrierSaverListener())
      if serving.export_mode == export_context.ExportMode.STANDALONE and not self._is_root_node:
        # There is one model, not one part per rank.
        return listeners
    listeners.append(
      export_hooks.ExportSaverListener(
        save_path,
        self._serving_input_receiver_fn,
        self._create_exporter(dense_only, include_graphs, export_dir_base),
        exempt_checkpoint_paths=checkpoint_state.get_exempt_checkpoint_paths(self._model_dir),
        dense_only=dense_only,
      )
    )
    return listeners
