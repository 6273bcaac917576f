"""`CpuTraining`: turns a task into the input and model functions of a `tf.estimator.Estimator`.

    input_fn -> features: ragged ids, dense tensors
             -> hash_table.lookup            (in this process, or on parameter servers)
             -> [prefetch queue]
             -> pool and slice               -> the feature factory in task.ctx
             -> the task's model_fn          -> loss, gradients of the looked-up embeddings
             -> ctx.apply_embedding_gradients -> [post-push queue] -> hash_table.apply_gradients

`cpu_training` publishes its names.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import tensorflow as tf
from absl import flags
from tensorflow.python.framework import ops
from tensorflow.python.ops import resources

from monolith import _quiet
from monolith.native_training import (
  distributed_ps,
  distribution_ops,
  env_utils,
  feature,
  gflags_utils,
  hash_table_utils,
  mlp_utils,
  native_task,
  native_task_context,
  prefetch_queue,
  variables,
)
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.checkpoints import topology as training_topology
from monolith.native_training.data import datasets, item_pool_hook, parsers, stream_positions
from monolith.native_training.data.training_instance.python import parser_utils
from monolith.native_training.driver import dry_run
from monolith.native_training.driver import export as training_export
from monolith.native_training.driver import hooks as training_hooks
from monolith.native_training.driver import roles as training_roles
from monolith.native_training.driver import tables as training_tables
from monolith.native_training.driver.config import CpuTrainingConfig
from monolith.native_training.driver.feature_factories import (
  _CpuFeatureFactory,
  _FusedCpuFeatureFactory,
  get_req_time,
)
from monolith.native_training.hooks import data_position, stream_hook
from monolith.native_training.model_export import (
  export_context,
  export_utils,
)
from monolith.native_training.ranks import agreement as sync_agreement
from monolith.native_training.tables import merging, pooling, protocols

# Any: the flags' types are known at run time only.
FLAGS: Any = flags.FLAGS

ModelFn = Callable[..., tf.estimator.EstimatorSpec]
Features = dict[str, Any]

_TRAIN = tf.estimator.ModeKeys.TRAIN
_PREDICT = tf.estimator.ModeKeys.PREDICT

# Key of an element whose ids are reordered: in a dict, so that Estimator does not take it for
# features and labels.
_ELEMENT_KEY = "1"

# Key in the auxiliary bundle of what a batch knows of the stream that it comes from.
_STREAM_KEY = "stream"

_MAX_SHARD_BYTES = 1 << 17

_SPARSE_FEATURES_COLLECTION = "dequeued_sparse_features"

# What these hold has no place in a meta graph; TensorFlow would warn of it with every checkpoint.
for _collection in (tf.compat.v1.GraphKeys.RESOURCES, _SPARSE_FEATURES_COLLECTION):
  if ops.get_to_proto_function(_collection) is None:
    ops.register_proto_function(_collection, to_proto=lambda value, export_scope=None: None)


class _ModelInputs(NamedTuple):
  """The tensors that a model is computed from.

  Attributes:
    features: what the task's model function sees.
    embeddings: feature name -> looked-up embeddings; `None` for a fused layout.
    slices: the pooled slices of them.
    layouts: layout name -> tensors of a fused layout.
  """

  features: Features
  embeddings: dict[str, tf.Tensor] | None = None
  slices: dict[str, tf.Tensor] | None = None
  layouts: dict[str, Any] | None = None


class CpuTraining:
  """Trains a task with tables in this process or on parameter servers.

  Args:
    config: the configuration of this process, a worker. Fills in the fields left to the driver.
    task: what to train.
    sync_backend: knows which serving replicas want the updated rows.
    collected: the result of an earlier dry run of the same task, to save doing it again.
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
      self._slot_merging = self._merge_slots()
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
    """What the task declared; while exporting, a copy fit for serving."""
    if export_context.is_exporting():
      return self._serving_feature_configs
    return self._feature_configs

  @property
  def collected(self) -> dry_run.CollectedFeatures:
    """The result of the dry run."""
    return self._collected

  def check_checkpoint(self, model_dir: str) -> None:
    """Checks that the rows of the newest checkpoint mean to this model what they meant when saved.

    Raises:
      ValueError: the slices of a table are others, or in another order.
      tf.errors.DataLossError: the record of slices is damaged.
    """
    checkpoint_slices.check_newest(model_dir, self._collected.slices)

  def create_serving_input_receiver_fn(self) -> Callable[[], Any] | None:
    """Returns the task's function that makes an export's inputs; `None` if it has none."""
    return self._task.create_serving_input_receiver_fn()

  def _collect_feature_name_to_table_config(
    self, collected: dry_run.CollectedFeatures | None = None
  ) -> dry_run.CollectedFeatures:
    # A fused layout is declared by the very task that is trained, in its own dry run.
    if collected is None or self._config.enable_fused_layout:
      collected = dry_run.collect(self._task)
    return collected

  def _merge_slots(self) -> merging.SlotMerging | None:
    """Returns which features share a table, as the tables do; `None` if none does."""
    configs = self._feature_configs.configs
    if not self._config.use_native_multi_hash_table:
      return merging.SlotMerging.by_config(configs)
    if self._feature_configs.shared_tables:
      return merging.SlotMerging.by_name(configs, self._feature_configs.shared_tables)
    return None

  def _init_fused_layout_params(self) -> None:
    """Tells the input pipeline how to shard ids, where the layout is fused."""
    config = self.config
    parser_ctx = parsers.get_default_parser_ctx()
    parser_ctx.enable_fused_layout = config.enable_fused_layout
    if not config.enable_fused_layout:
      return
    use_gpu_emb_table = self._params.train.use_gpu_emb_table
    export_ctx = export_context.get_current_export_ctx()
    parser_ctx.sharding_sparse_fids_op_params = (
      distributed_ps.PartitionedHashTable.gen_feature_configs(
        num_ps=config.num_workers if use_gpu_emb_table else config.num_ps,
        feature_name_to_config=self.feature_configs.configs,
        layout_configs=self._task.layout_dict,
        feature_to_combiner=self.feature_configs.combiners,
        feature_to_unmerged_slice_dims=self.feature_configs.unmerged_slice_dims,
        use_native_multi_hash_table=bool(config.use_native_multi_hash_table),
        unique=lambda: not export_context.is_exporting(),
        transfer_float16=False,
        enable_gpu_emb=use_gpu_emb_table,
        use_gpu=config.enable_gpu_training if export_ctx is None else export_ctx.with_remote_gpu,
        shared_tables=self.feature_configs.shared_tables,
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
        config = self.config
        if mode == _TRAIN:
          self._data_fingerprint = data_position.fingerprint(dataset)
        if (
          mode != _PREDICT
          and config.reorder_fids_in_data_pipeline
          and not config.enable_fused_layout
          and self.feature_configs.configs
        ):
          dataset = dataset.map(self._reorder_fids, num_parallel_calls=tf.data.AUTOTUNE)
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

  def _reorder_fids(self, features: Features) -> Features:
    """De-duplicates and shards ids in the input pipeline, for synchronous training."""
    ids, dense = self._split_features(features)
    names = sorted(ids)
    lookup_args: Any
    if self._slot_merging is None:
      values = [ids[name].values for name in names]
      configs = [self._feature_configs.configs[name] for name in names]
      sizes = None
    else:
      merged, sizes = self._slot_merging.merge({name: ids[name].values for name in names})
      merged_names = sorted(merged)
      values = [merged[name] for name in merged_names]
      configs = [self._slot_merging.merged_to_config[name] for name in merged_names]
    dims = [hash_table_utils.infer_dim_size(config.table_config) for config in configs]
    # Checkpoints and exports know one home of an id, so by default no rank stays without ids.
    rank0_empty = (
      env_utils.get_bool("MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD") and self._config.num_workers > 4
    )
    reordered = distribution_ops.fused_reorder_by_indices(
      values, self._config.num_workers, dims, rank0_empty
    )
    lookup_args = (*reordered, get_req_time(dense))
    if sizes is not None:
      lookup_args = (sizes, lookup_args)
    expanded = parser_utils.RaggedEncodingHelper.expand(
      ids, with_precomputed_nrows=True, with_precomputed_value_rowids=False
    )
    return {_ELEMENT_KEY: (dense, (expanded, lookup_args))}

  def _split_features(
    self, features: Features
  ) -> tuple[dict[str, tf.RaggedTensor], dict[str, tf.Tensor]]:
    """Returns the ids of the embedding features, and everything that is not ragged.

    Raises:
      KeyError: an embedding feature is missing.
      TypeError: one is not a ragged tensor of int64.
    """
    ids = {}
    for name in self.feature_configs.configs:
      if name not in features:
        raise KeyError(
          f"the input has no feature {name!r}, which the model looks up; it has {sorted(features)}"
        )
      value = features[name]
      if not isinstance(value, tf.RaggedTensor) or value.dtype != tf.int64:
        raise TypeError(f"feature {name!r} is {value}, want a tf.RaggedTensor of int64 ids")
      ids[name] = value
    dense = {
      name: value for name, value in features.items() if not isinstance(value, tf.RaggedTensor)
    }
    return ids, dense

  def create_model_fn(self) -> ModelFn:
    """Returns the model function for an Estimator.

    A task without embedding features gets its own model function back: no hooks, no saver.
    """
    with native_task_context.with_ctx(self._task_context):
      if not self.feature_configs.configs:
        self._task.ctx.feature_factory = None
        return self._task.create_model_fn()

    def model_fn(features: Features, mode: str, config: Any) -> tf.estimator.EstimatorSpec:
      with native_task_context.with_ctx(self._task_context):
        return self._build_model(features, mode, config)

    return model_fn

  def _build_model(
    self, features: Features, mode: str, run_config: Any
  ) -> tf.estimator.EstimatorSpec:
    checkpoint_copy = None
    if run_config.model_dir:
      checkpoint_copy = self._prepare_checkpoint(mode, run_config.model_dir)
    tables = training_tables.create(
      self.config,
      self._params.train.use_gpu_emb_table,
      self.feature_configs.configs,
      self._slot_to_occurrence_threshold,
      self._slot_to_expire_time,
      self.feature_configs.shared_tables,
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
      auxiliary_bundle[_STREAM_KEY] = stream_batch._asdict()
    if self.config.enable_fused_layout:
      inputs, auxiliary_bundle = self._look_up_layouts(
        # As the configuration says; so it is below.
        cast(protocols.LayoutGroup, hash_table),
        features,
        auxiliary_bundle,
        async_function_mgr,
      )
    else:
      inputs, auxiliary_bundle = self._look_up(
        hash_table, features, auxiliary_bundle, async_function_mgr
      )
    self._batch_size = _get_batch_size(inputs)
    spec = self._call_task(inputs, mode, run_config)
    if export_context.is_exporting():
      return spec
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
      checkpoint_copy,
      self._data_fingerprint,
      self._resume,
      batch_size=self._batch_size,
      num_steps=self._num_steps,
      last_step=self._last_step,
    ).attach(spec, mode)
    if self.config.enable_partial_sync_training and self.config.index != 0:
      spec = spec._replace(scaffold=_create_own_variables_scaffold())
    if sync_agreement.EOF_KEY in auxiliary_bundle:
      tf.compat.v1.add_to_collection(
        sync_agreement.EOF_KEY, auxiliary_bundle[sync_agreement.EOF_KEY]
      )
    return spec

  def _check_stream(self, mode: str) -> None:
    """Refuses what cannot move the positions in a stream together with what is learnt from it.

    Raises:
      ValueError: the kind of training or of reading is one of those.
    """
    config = self.config
    refused = {
      "enable_sync_training": config.enable_sync_training,
      "enable_partial_sync_training": config.enable_partial_sync_training,
      "enable_fused_layout": config.enable_fused_layout,
      "reorder_fids_in_data_pipeline": config.reorder_fids_in_data_pipeline,
      "use_dataservice": config.use_dataservice,
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

  def _prepare_checkpoint(self, mode: str, model_dir: str) -> tempfile.TemporaryDirectory | None:
    """Makes the newest checkpoint fit to be restored; returns where it is, if not in its folder."""
    self.check_checkpoint(model_dir)
    # Exporters look at the checkpoint that they export, ranks do so together before they start.
    if export_context.is_exporting() or self.config.enable_full_sync_training:
      return None
    if mode != _TRAIN:
      return training_topology.copy_if_needed(model_dir, self.config.num_ps)
    if training_roles.is_chief(self.config):
      training_topology.reshard_if_needed(model_dir, self.config.num_ps)
    return None

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

  def _look_up_layouts(
    self,
    hash_table: protocols.LayoutGroup,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
  ) -> tuple[_ModelInputs, dict[str, Any]]:
    ctx = self._task.ctx
    ctx.feature_factory = None
    look_up = hash_table.lookup(
      features,
      auxiliary_bundle,
      ret_lookup_callable_fn=True,
      embedding_prefetch_capacity=self.config.embedding_prefetch_capacity,
    )
    layouts = look_up(auxiliary_bundle, features)
    async_function_mgr.wait_for(tf.nest.flatten(layouts)[:1])
    auxiliary_bundle.update(features)
    ctx.layout_factory = feature.EmbeddingLayoutFactory(
      hash_table,
      layouts,
      auxiliary_bundle=auxiliary_bundle,
      async_function_mgr=async_function_mgr,
      async_push=self.config.enable_embedding_postpush,
    )
    return _ModelInputs(features, layouts=layouts), auxiliary_bundle

  def _look_up(
    self,
    hash_table: protocols.AnyGroup,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
  ) -> tuple[_ModelInputs, dict[str, Any]]:
    """Looks up embeddings, perhaps ahead of the step, and hands them to the task's slots."""
    config = self.config
    is_reordered = config.reorder_fids_in_data_pipeline and _ELEMENT_KEY in features
    if config.enable_full_sync_training and not is_reordered:
      # Tables of workers take reordered ids only; in a prediction the pipeline leaves ids alone.
      features = self._reorder_fids(features)
      is_reordered = True
    if is_reordered:
      embeddings, ids, dense, auxiliary_bundle = self._look_up_reordered(
        cast(protocols.ReorderedGroup, hash_table), features[_ELEMENT_KEY], auxiliary_bundle
      )
    else:
      group = cast(protocols.TableGroup, hash_table)
      ids, dense = self._split_features(features)
      stream = auxiliary_bundle.get(_STREAM_KEY)
      has_samples = None if stream is None else stream["counts"][0] > 0
      if stream is not None and not config.embedding_prefetch_capacity:
        # A step cannot be left out once it has begun, so empty batches must not begin one.
        (ids, dense, auxiliary_bundle), stream_queue = (
          prefetch_queue.enqueue_dicts_with_queue_return(
            (ids, dense, auxiliary_bundle), queue_name="stream_queue", condition=has_samples
          )
        )
        hash_table.add_queue_hook(
          stream_hook.StreamHook(stream_queue, has_samples, auxiliary_bundle[_STREAM_KEY]["counts"])
        )
        has_samples = None  # Now it is told for all that follows.
      slot_to_id = {name: ragged.values for name, ragged in ids.items()}
      embeddings = group.lookup(slot_to_id)
      id_split = group.get_id_split(slot_to_id)
      (embeddings, ids, dense, id_split, auxiliary_bundle), queue = (
        prefetch_queue.enqueue_dicts_with_queue_return(
          (embeddings, ids, dense, id_split, auxiliary_bundle),
          capacity=config.embedding_prefetch_capacity,
          condition=has_samples,
        )
      )
      group.set_id_split({name: ragged.values for name, ragged in ids.items()}, id_split)
      if queue is not None:
        hash_table.add_queue_hook(
          prefetch_queue.EnqueueHook(queue)
          if has_samples is None
          else stream_hook.StreamHook(queue, has_samples, auxiliary_bundle[_STREAM_KEY]["counts"])
        )
    # All come out of one queue, or one iterator.
    async_function_mgr.wait_for([ragged.values for ragged in ids.values()][:1])
    _collect_dequeued(_SPARSE_FEATURES_COLLECTION, ids)
    _collect_dequeued("dequeued_features", dense)
    slices = pooling.create_embedding_slices(
      embeddings, ids, self.feature_configs.combiners, self.feature_configs.unmerged_slice_dims
    )
    req_time = get_req_time(dense)
    if req_time is None:
      # Rows must have an age, or none expires.
      req_time = tf.cast(tf.timestamp(), tf.int64)
    ctx = self._task.ctx
    ctx.layout_factory = None
    if config.enable_full_sync_training:
      ctx.feature_factory = _FusedCpuFeatureFactory(
        cast(protocols.ReorderedGroup, hash_table),
        embeddings,
        slices,
        req_time,
        auxiliary_bundle,
        self._slot_merging is None,
      )
    else:
      ctx.feature_factory = _CpuFeatureFactory(
        cast(protocols.TableGroup, hash_table),
        ids,
        embeddings,
        slices,
        req_time,
        async_function_mgr,
        async_push=config.enable_embedding_postpush,
        stream_batch=_take_stream_batch(auxiliary_bundle),
      )
    inputs = _ModelInputs({**dense, **embeddings}, embeddings=embeddings, slices=slices)
    return inputs, auxiliary_bundle

  def _look_up_reordered(
    self, hash_table: protocols.ReorderedGroup, element: Any, auxiliary_bundle: dict[str, Any]
  ) -> tuple[dict, dict, dict, dict]:
    dense, (expanded, lookup_args) = element
    auxiliary_bundle["features"] = dense
    auxiliary_bundle["embedding_ragged_ids"] = parser_utils.RaggedEncodingHelper.contract(expanded)
    embeddings, auxiliary_bundle = hash_table.lookup(
      {name: None for name in self.feature_configs.configs}, auxiliary_bundle, lookup_args
    )
    ids = auxiliary_bundle.pop("embedding_ragged_ids")
    dense = auxiliary_bundle.pop("features")
    return embeddings, ids, dense, auxiliary_bundle

  def _call_task(
    self, inputs: _ModelInputs, mode: str, run_config: Any
  ) -> tf.estimator.EstimatorSpec:
    def call(features: Features) -> tf.estimator.EstimatorSpec:
      return self._task.create_model_fn()(features=features, mode=mode, config=run_config)

    with self._variable_scopes():
      export_ctx = export_context.get_current_export_ctx()
      if export_ctx is None or not export_ctx.with_remote_gpu:
        return call(inputs.features)

      def remote_call(remote_inputs: tuple) -> Any:
        # In the other graph slots must hand out that graph's tensors.
        features, embeddings, slices, layouts = remote_inputs
        if layouts is None:
          self._task.ctx.feature_factory = feature.FeatureFactoryFromEmbeddings(embeddings, slices)
        else:
          self._task.ctx.layout_factory = feature.EmbeddingLayoutFactory(None, layouts)
        with tf.device("/device:GPU:0"):
          return call(features).predictions

      with export_ctx.dense_sub_graph("dense_0").as_default():
        helper = export_utils.RemotePredictHelper("gpu_remote_call", tuple(inputs), remote_call)
      predictions = helper.call_remote_predict(
        f"{self.config.model_name}:dense_0", old_model_name="dense_0"
      )
      return tf.estimator.EstimatorSpec(mode, predictions=predictions)

  @contextlib.contextmanager
  def _variable_scopes(self) -> Iterator[None]:
    config = self.config
    with contextlib.ExitStack() as stack:
      if config.enable_variable_prefetch and not config.enable_sync_training:
        stack.enter_context(tf.variable_creator_scope(variables.cached_variable_creator))
      # With one server there is nothing to spread, and `max_shards=0` would mean any number.
      if (
        config.enable_variable_partition and config.num_ps > 1 and not export_context.is_exporting()
      ):
        partitioner = tf.compat.v1.variable_axis_size_partitioner(
          max_shard_bytes=_MAX_SHARD_BYTES, max_shards=config.num_ps
        )
        stack.enter_context(
          tf.compat.v1.variable_scope(
            "", partitioner=partitioner, custom_getter=_get_constant_whole
          )
        )
      yield


def _get_constant_whole(getter: Callable[..., Any], name: str, **kwargs: Any) -> Any:
  """Makes a variable that begins with a given value in one piece.

  TensorFlow learns the shape of such a variable from its value, but wants to know it beforehand
  where variables are partitioned, even of `get_variable("bias", initializer=0.0)`.
  """
  initializer = kwargs.get("initializer")
  if kwargs.get("shape") is None and initializer is not None and not callable(initializer):
    kwargs["partitioner"] = None
  return getter(name, **kwargs)


def _get_batch_size(inputs: _ModelInputs) -> tf.Tensor | None:
  """Returns how many examples a step has; `None` if no tensor tells."""
  for value in tf.nest.flatten([inputs.slices, inputs.layouts], expand_composites=False):
    if isinstance(value, tf.Tensor) and value.shape.rank:
      return tf.shape(value)[0]
  return None


def _take_eof(features: Features) -> tuple[Features, dict[str, Any]]:
  """Moves the mark of the last element, if there is one, into a new auxiliary bundle."""
  if not isinstance(features, Mapping):
    raise TypeError(f"features is {features}, want a dict: the model looks up features by name")
  features = dict(features)
  if sync_agreement.EOF_KEY in features:
    return features, {sync_agreement.EOF_KEY: features.pop(sync_agreement.EOF_KEY)}
  return features, {}


def _take_stream_batch(
  auxiliary_bundle: dict[str, Any],
) -> stream_positions.StreamBatch | None:
  fields = auxiliary_bundle.pop(_STREAM_KEY, None)
  return None if fields is None else stream_positions.StreamBatch(**fields)


def _collect_dequeued(collection: str, name_to_tensor: Mapping[str, Any]) -> None:
  for name, tensor in name_to_tensor.items():
    tensor.feature_name = name
    tf.compat.v1.add_to_collection(collection, tensor)


def _create_own_variables_scaffold() -> tf.compat.v1.train.Scaffold:
  """Returns a scaffold for a worker whose dense variables are its own, which it initialises."""
  keys = tf.compat.v1.GraphKeys

  def default_init_op() -> tf.Operation:
    return tf.group(
      tf.compat.v1.global_variables_initializer(),
      resources.initialize_resources(resources.shared_resources()),
    )

  get = tf.compat.v1.train.Scaffold.get_or_default
  init_op = get("init_op", keys.INIT_OP, default_init_op)
  local_init_op = get(
    "local_init_op", keys.LOCAL_INIT_OP, tf.compat.v1.train.Scaffold.default_local_init_op
  )
  return tf.compat.v1.train.Scaffold(
    local_init_op=tf.group(init_op, local_init_op), ready_for_local_init_op=tf.no_op()
  )
