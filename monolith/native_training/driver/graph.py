"""`CpuTraining`: turns a task into the input and model functions of a `graph_estimator.Estimator`.

    input_fn -> features: ragged ids, dense tensors
             -> hash_table.lookup            (in this process, or on parameter servers)
             -> [prefetch queue]
             -> pool and slice               -> the feature factory in task.ctx
             -> the task's model_fn          -> loss, gradients of the looked-up embeddings
             -> ctx.apply_embedding_gradients -> [post-push queue] -> hash_table.apply_gradients

`cpu_training` publishes its names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import flags

from monolith import _quiet
from monolith.native_training import (
  distributed_ps,
  feature,
  gflags_utils,
  graph_estimator,
  mlp_utils,
  native_task,
  native_task_context,
  prefetch_queue,
)
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.checkpoints import topology as training_topology
from monolith.native_training.data import datasets, item_pool_hook, parsers, stream_positions
from monolith.native_training.driver import dense_parcels, dense_variables, dry_run, lookups
from monolith.native_training.driver import export as training_export
from monolith.native_training.driver import hooks as training_hooks
from monolith.native_training.driver import roles as training_roles
from monolith.native_training.driver import tables as training_tables
from monolith.native_training.graph import export_context
from monolith.native_training.hooks import data_position
from monolith.native_training.model_export import export_utils
from monolith.native_training.ranks import agreement as sync_agreement
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.native_training.tables import merging

# Any: the flags' types are known at run time only.
FLAGS: Any = flags.FLAGS

ModelFn = Callable[..., graph_estimator.EstimatorSpec]
Features = dict[str, Any]

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT


class CpuTraining:
  """Trains a task with tables in this process or on parameter servers.

  Args:
    config: the configuration of this process, a worker. Fills in the fields left to the driver.
    task: what to train.
    sync_backend: knows the serving replicas that need the updated rows.
    collected: the result of an earlier dry run of the same task, which is then not repeated.
    resume: when a training run goes on in its data where an earlier one has stopped.
    num_steps: how many steps a training run has, to tell the time left; `None` if not known.
    last_step: the step at which it ends; `None` if not known.

  Raises:
    ValueError: the process is no worker, or an option cannot be met.
  """

  def __init__(
    self,
    config: CpuTrainingConfig,
    task: native_task.NativeTask,
    sync_backend: Any = None,
    collected: dry_run.CollectedFeatures | None = None,
    resume: data_position.Resume = data_position.Resume.SAME_DATA,
    num_steps: int | None = None,
    last_step: int | None = None,
  ):
    if config.server_type != "worker":
      raise ValueError("server_type in CpuTraining must be `worker`")
    gflags_utils.ensure_parsed()
    _quiet.filter_tensorflow()
    training_roles.check_options(config)
    training_roles.fill_in_defaults(config, task)
    training_roles.report_unused_options(config, task.p)
    parsers.get_default_parser_ctx().enable_fused_layout = config.enable_fused_layout
    parsers.ParserCtx.enable_resource_constrained_roughsort = (
      config.enable_resource_constrained_roughsort
    )
    FLAGS.dataset_worker_idx = config.index
    FLAGS.dataset_num_workers = config.num_workers

    self._config = copy.deepcopy(config)
    self._serving_config = training_roles.to_serving_config(config)
    self._task = task
    self._params = task.p
    self._resume = resume
    self._num_steps = num_steps
    self._last_step = last_step
    self._batch_size: tf.Tensor | None = None
    self._data_fingerprint: str | None = None
    self._enable_hash_filter = False
    self._task_context = training_roles.make_native_task_context(self._config, sync_backend)
    with native_task_context.with_ctx(self._task_context):
      self._collected = self._collect_feature_name_to_table_config(collected)
      self._slot_to_occurrence_threshold = self._collected.slot_to_occurrence_threshold
      self._slot_to_expire_time = self._collected.slot_to_expire_time
      self._feature_configs = self._collected.feature_configs.for_training(
        initial_capacity=self._config.hashtable_init_capacity,
        is_raw=self._config.enable_full_sync_training,
      )
      self._serving_feature_configs = self._feature_configs.for_serving(
        skip_zero_embedding=self._config.skip_zero_embedding_when_serving
      )
      slot_merging = self._merge_slots()
      self._lookup, self._serving_lookup = (
        lookups.create(own_config, self._params, configs, slot_merging, task.ctx)
        for own_config, configs in (
          (self._config, self._feature_configs),
          (self._serving_config, self._serving_feature_configs),
        )
      )
      self._init_fused_layout_params()
    self._export_context_list = [
      training_export.create_context_class(
        self._params, self._serving_config.enable_fused_layout, self._init_fused_layout_params
      )
    ]

  @property
  def config(self) -> CpuTrainingConfig:
    """The configuration; while exporting, a copy fit for serving."""
    return self._serving_config if export_context.is_exporting() else self._config

  @property
  def feature_configs(self) -> dry_run.FeatureConfigs:
    """Returns the declarations of the task; while exporting, a copy fit for serving."""
    if export_context.is_exporting():
      return self._serving_feature_configs
    return self._feature_configs

  def _lookup_of_graph(self) -> lookups.InputLookup:
    return self._serving_lookup if export_context.is_exporting() else self._lookup

  @property
  def collected(self) -> dry_run.CollectedFeatures:
    """The result of the dry run."""
    return self._collected

  def check_checkpoint(self, model_dir: str) -> None:
    """Checks that this model reads the rows of the newest checkpoint as they were saved.

    Raises:
      ValueError: the slices of a table differ, or their order does.
      tf.errors.DataLossError: the record of slices is damaged.
    """
    checkpoint_slices.check_newest(model_dir, self._collected.slices)

  def create_serving_input_receiver_fn(self) -> Callable[[], Any] | None:
    """Returns the task's function that makes an export's inputs; `None` if it has none."""
    return self._task.create_serving_input_receiver_fn()

  def _collect_feature_name_to_table_config(
    self, collected: dry_run.CollectedFeatures | None = None
  ) -> dry_run.CollectedFeatures:
    # The task that is trained must declare a fused layout itself, in its own dry run.
    if collected is None or self._config.enable_fused_layout:
      collected = dry_run.collect(self._task)
    return collected

  def _merge_slots(self) -> merging.SlotMerging | None:
    """Returns the features that share a table; `None` if none does."""
    configs = self._feature_configs.configs
    if not self._config.use_native_multi_hash_table:
      return merging.SlotMerging.by_config(configs)
    if self._collected.shared_tables:
      return merging.SlotMerging.by_name(configs, self._collected.shared_tables)
    return None

  def _init_fused_layout_params(self) -> None:
    """Tells the input pipeline how to shard ids, where the layout is fused."""
    config = self.config
    parser_ctx = parsers.get_default_parser_ctx()
    parser_ctx.enable_fused_layout = config.enable_fused_layout
    if not config.enable_fused_layout:
      return
    num_ranks = training_tables.layout_ranks(config, self._params.train.use_gpu_emb_table)
    export_ctx = export_context.get_current_export_ctx()
    parser_ctx.sharding_sparse_fids_op_params = (
      distributed_ps.PartitionedHashTable.gen_feature_configs(
        num_ps=config.num_ps if num_ranks is None else num_ranks,
        feature_name_to_config=self.feature_configs.configs,
        layout_configs=self._task.layout_dict,
        feature_to_combiner=self.feature_configs.combiners,
        feature_to_unmerged_slice_dims=self.feature_configs.unmerged_slice_dims,
        use_native_multi_hash_table=bool(config.use_native_multi_hash_table),
        unique=lambda: not export_context.is_exporting(),
        transfer_float16=False,
        enable_gpu_emb=num_ranks is not None,
        use_gpu=config.enable_gpu_training if export_ctx is None else export_ctx.with_remote_gpu,
        shared_tables=self._collected.shared_tables,
      )
    )

  def create_input_fn(self, mode: str) -> Callable[[], Any]:
    """Returns a function that makes the dataset of a mode."""
    with native_task_context.with_ctx(self._task_context):
      input_fn = self._task.create_input_fn(mode)

    def wrapped_input_fn() -> Any:
      with native_task_context.with_ctx(self._task_context):
        dataset = input_fn()
        if not isinstance(dataset, tf.data.Dataset):
          return dataset
        config, lookup = self.config, self._lookup_of_graph()
        if mode != _PREDICT:
          # Before the fingerprint: a position in packed data is none in the plain data.
          dataset = lookup.pack_ids(dataset)
        if mode == _TRAIN:
          self._data_fingerprint = data_position.fingerprint(dataset)
        if mode != _PREDICT:
          dataset = lookup.reorder_ids(dataset)
        if config.use_dataservice and not export_context.is_dry_run_or_exporting():
          env = mlp_utils.MLPEnv()
          dataset = datasets.distribute(
            dataset,
            target=env.dispatcher_target(),
            num_worker=env.num_replicas("worker"),
            worker_idx=env.index,
            # Ranks have sessions of their own, which share no device.
            queue_device=env.queue_device
            if config.num_ps and not config.enable_sync_training
            else None,
          )
        return dataset.prefetch(tf.data.AUTOTUNE)

    return wrapped_input_fn

  def create_model_fn(self) -> ModelFn:
    """Returns the model function for an Estimator.

    A task without embedding features gets its own model function back: no hooks, no saver.
    """
    with native_task_context.with_ctx(self._task_context):
      if not self.feature_configs.configs:
        self._task.ctx.feature_factory = None
        return self._task.create_model_fn()

    def model_fn(features: Features, mode: str, config: Any) -> graph_estimator.EstimatorSpec:
      with native_task_context.with_ctx(self._task_context):
        return self._build_model(features, mode, config)

    return model_fn

  def _build_model(
    self, features: Features, mode: str, run_config: Any
  ) -> graph_estimator.EstimatorSpec:
    if run_config.model_dir:
      self._prepare_checkpoint(mode, run_config.model_dir)
    tables = training_tables.create(
      self.config,
      self._params.train.use_gpu_emb_table,
      self.feature_configs.configs,
      self._slot_to_occurrence_threshold,
      self._slot_to_expire_time,
      self._collected.shared_tables,
      self._collected.feature_to_admission,
    )
    hash_table = tables.hash_table
    self._enable_hash_filter = tables.enable_hash_filter
    self._maybe_add_item_pool_hook(mode, run_config)
    async_function_mgr = prefetch_queue.AsyncFunctionMgr(
      is_async=self.config.enable_variable_postpush
    )
    self._task.ctx.async_function_mgr = async_function_mgr
    features, auxiliary_bundle = _take_eof(features)
    features, stream_batch = stream_positions.take(features)
    if stream_batch is not None:
      self._check_stream(mode)
      auxiliary_bundle[lookups.STREAM_KEY] = stream_batch._asdict()
    trains = mode == _TRAIN and not export_context.is_exporting()
    lookup = self._lookup_of_graph()
    inputs, auxiliary_bundle = lookup.look_up(
      hash_table, features, auxiliary_bundle, async_function_mgr, trains=trains
    )
    self._batch_size = inputs.batch_size()
    spec = self._call_task(inputs, mode, run_config)
    if export_context.is_exporting():
      return spec
    if trains:
      made = [one for one in (spec.train_op, spec.loss) if one is not None]
      lookup.finish([one if isinstance(one, tf.Operation) else one.op for one in made])
    if self.config.num_ps and mode == _TRAIN:
      dense_parcels.combine(spec.train_op)
    spec = training_hooks.TrainingHooks(
      self.config,
      self._params,
      run_config.model_dir,
      hash_table,
      tables.hash_filters,
      self._enable_hash_filter,
      self._collected.slices,
      async_function_mgr.hooks,
      self.create_serving_input_receiver_fn() if mode == _TRAIN else None,
      lambda dense_only, include_graphs, export_dir_base: training_export.create_exporter(
        self,
        run_config.model_dir,
        self.config.warmup_file,
        export_dir_base,
        dense_only,
        include_graphs,
      ),
      self._data_fingerprint,
      self._resume,
      batch_size=self._batch_size,
      num_steps=self._num_steps,
      last_step=self._last_step,
    ).attach(spec, mode)
    if self.config.enable_partial_sync_training and self.config.index != 0:
      spec = spec._replace(scaffold=dense_variables.create_own_variables_scaffold())
    if not self.config.num_ps and not self.config.enable_sync_training:
      dense_variables.report_with_few_ops(spec.scaffold)
    if sync_agreement.EOF_KEY in auxiliary_bundle:
      tf.compat.v1.add_to_collection(
        sync_agreement.EOF_KEY, auxiliary_bundle[sync_agreement.EOF_KEY]
      )
    return spec

  def _check_stream(self, mode: str) -> None:
    """Refuses options under which positions in a stream cannot move together with the rows.

    Raises:
      ValueError: such an option is set.
    """
    config = self.config
    refused = {
      "enable_sync_training": config.enable_sync_training,
      "enable_partial_sync_training": config.enable_partial_sync_training,
      "enable_fused_layout": config.enable_fused_layout,
      "reorder_fids_in_data_pipeline": config.reorder_fids_in_data_pipeline,
      "use_dataservice": config.use_dataservice,
      "steps_in_flight": config.steps_in_flight > 1,
      "resume_data=False": self._resume == data_position.Resume.NEVER,
    }
    names = [name for name, is_set in refused.items() if is_set]
    if mode != _TRAIN:
      names.append(f"mode {mode!r}")
    if names:
      raise ValueError(
        f'the input reads Kafka with offsets="checkpoint", which does not go with '
        f"{' and '.join(names)}"
      )

  def _prepare_checkpoint(self, mode: str, model_dir: str) -> None:
    """Checks the newest checkpoint, and prepares it for a training run."""
    self.check_checkpoint(model_dir)
    # Exporters look at the checkpoint that they export, ranks do so together before they start.
    # Readers get a copy when they restore.
    if (
      mode == _TRAIN
      and not export_context.is_exporting()
      and not self.config.enable_full_sync_training
      and training_roles.is_chief(self.config)
    ):
      training_topology.reshard_if_needed(model_dir, self.config.num_ps)

  def _maybe_add_item_pool_hook(self, mode: str, run_config: Any) -> None:
    if (
      mode == _PREDICT
      or not tf.compat.v1.get_collection(datasets.POOL_KEY)
      or not hasattr(self._task, "add_training_hook")
    ):
      return
    _, save_steps = training_hooks.get_save_interval(self.config, self._params)
    self._task.add_training_hook(
      item_pool_hook.ItemPoolSaveRestoreHook(
        run_config.model_dir,
        save_steps=save_steps or training_hooks.DEFAULT_SAVE_STEPS,
        mode=self._params.mode,
      )
    )

  def _call_task(
    self, inputs: lookups.ModelInputs, mode: str, run_config: Any
  ) -> graph_estimator.EstimatorSpec:
    def call(features: Features) -> graph_estimator.EstimatorSpec:
      return self._task.create_model_fn()(features=features, mode=mode, config=run_config)

    with dense_variables.variable_scopes(self.config):
      export_ctx = export_context.get_current_export_ctx()
      if export_ctx is None or not export_ctx.with_remote_gpu:
        return call(inputs.features)

      def remote_call(remote_inputs: tuple) -> Any:
        # In the other graph, slots must hand out the tensors of that graph.
        features, embeddings, slices, layouts = remote_inputs
        if layouts is None:
          self._task.ctx.feature_factory = feature.FeatureFactoryFromEmbeddings(embeddings, slices)
        else:
          self._task.ctx.layout_factory = feature.EmbeddingLayoutFactory(None, layouts)
        with tf.device("/device:GPU:0"):
          return call(features).predictions

      with export_ctx.dense_sub_graph("dense_0").as_default():
        helper = export_utils.RemotePredictHelper("gpu_remote_call", inputs[:4], remote_call)
      predictions = helper.call_remote_predict(
        f"{self.config.model_name}:dense_0", old_model_name="dense_0"
      )
      return graph_estimator.EstimatorSpec(mode, predictions=predictions)


def _take_eof(features: Features) -> tuple[Features, dict[str, Any]]:
  """Moves the end-of-data mark, if there is one, into a new auxiliary bundle."""
  if not isinstance(features, Mapping):
    raise TypeError(f"features is {features}, want a dict: the model looks up features by name")
  features = dict(features)
  if sync_agreement.EOF_KEY in features:
    return features, {sync_agreement.EOF_KEY: features.pop(sync_agreement.EOF_KEY)}
  return features, {}
