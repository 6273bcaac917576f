"""Looks up the embeddings of a batch, ahead of the step where that is wanted.

features -> [reordered ids] -> hash_table.lookup -> [queue] -> pool and slice -> ModelInputs
                                                            -> the feature factory in the context
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import ops

from monolith.native_training import (
  distribution_ops,
  feature,
  hash_table_utils,
  native_task,
  prefetch_queue,
)
from monolith.native_training.data import stream_positions
from monolith.native_training.data.training_instance.python import parser_utils
from monolith.native_training.driver import dry_run, pooled_steps
from monolith.native_training.driver.feature_factories import (
  _CpuFeatureFactory,
  _FusedCpuFeatureFactory,
  get_req_time,
)
from monolith.native_training.graph import export_context
from monolith.native_training.hooks import stream_hook
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.native_training.tables import merging, packed_ids, pooling, protocols

Features = dict[str, Any]

# Key in the auxiliary bundle of what a batch knows of the stream that it comes from.
STREAM_KEY = "stream"

# Key of an element whose ids are reordered: in a dict, so that Estimator does not take it for
# features and labels.
_ELEMENT_KEY = "1"

_SPARSE_FEATURES_COLLECTION = "dequeued_sparse_features"

_GPU = "/device:GPU:0"

# Their content has no place in a meta graph; TensorFlow would warn of it with every checkpoint.
for _collection in (tf.compat.v1.GraphKeys.RESOURCES, _SPARSE_FEATURES_COLLECTION):
  if ops.get_to_proto_function(_collection) is None:
    ops.register_proto_function(_collection, to_proto=lambda value, export_scope=None: None)


class ModelInputs(NamedTuple):
  """The tensors that a model is computed from.

  Attributes:
    features: what the task's model function sees.
    embeddings: feature name -> looked-up embeddings; `None` for a fused layout.
    slices: the pooled slices of them.
    layouts: layout name -> tensors of a fused layout.
    ids: feature name -> the ids that were looked up, where one of these tells the batch's size.
  """

  features: Features
  embeddings: dict[str, tf.Tensor] | None = None
  slices: dict[pooling.SliceKey, tf.Tensor] | None = None
  layouts: dict[str, Any] | None = None
  ids: dict[str, tf.RaggedTensor] | None = None

  def batch_size(self) -> tf.Tensor | None:
    """Returns how many examples a step has; `None` if no tensor tells."""
    for ids in (self.ids or {}).values():
      return ids.nrows(out_type=tf.int32)
    for value in tf.nest.flatten([self.slices, self.layouts], expand_composites=False):
      if isinstance(value, tf.Tensor) and value.shape.rank:
        return tf.shape(value)[0]
    return None


class InputLookup(abc.ABC):
  """Looks up the embeddings of a batch and hands them to the slots of a task.

  There is one subclass for each kind of table group of `tables/protocols.py`; `create` chooses.

  Args:
    config: the configuration of this process.
    params: the task's params, which say whether tables are on the GPU.
    feature_configs: what the task declared.
    slot_merging: which features share a table; `None` if none does.
    ctx: the task's context, which gets the factory of its features.
  """

  def __init__(
    self,
    config: CpuTrainingConfig,
    params: Any,
    feature_configs: dry_run.FeatureConfigs,
    slot_merging: merging.SlotMerging | None,
    ctx: native_task.NativeContext,
  ):
    self._config = config
    self._params = params
    self._feature_configs = feature_configs
    self._slot_merging = slot_merging
    self._ctx = ctx

  def pack_ids(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with all ids of a batch in one tensor, where they travel like that."""
    return dataset

  def reorder_ids(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with what else can be done with ids in the input pipeline."""
    return dataset

  @abc.abstractmethod
  def look_up(
    self,
    hash_table: Any,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    trains: bool = False,
  ) -> tuple[ModelInputs, dict[str, Any]]:
    """Returns the inputs of the model, and the auxiliary bundle as it comes out of the queue.

    Args:
      hash_table: the tables, of this kind.
      features: what the input function gave.
      auxiliary_bundle: tensors that travel with the batch.
      async_function_mgr: runs what a step need not wait for.
      trains: whether `finish` will be told what makes a step.

    Raises:
      KeyError: an embedding feature is missing.
      TypeError: one is not a ragged tensor of int64.
    """

  def finish(self, roots: Sequence[tf.Operation]) -> None:
    """Completes the graph of a model that trains; to be called once it is built.

    Args:
      roots: the ops that make a step.
    """

  def _split(self, features: Features) -> tuple[dict[str, tf.RaggedTensor], dict[str, tf.Tensor]]:
    """Returns the ids of the embedding features, and everything that is not ragged.

    Raises:
      KeyError: an embedding feature is missing.
      TypeError: one is not a ragged tensor of int64.
    """
    ids = {}
    for name in self._feature_configs.configs:
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

  def _pool(
    self,
    embeddings: dict[str, tf.Tensor],
    ids: dict[str, tf.RaggedTensor],
    dense: dict[str, tf.Tensor],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
  ) -> tuple[dict[pooling.SliceKey, tf.Tensor], tf.Tensor]:
    """Returns the pooled slices, and when the batch was requested."""
    # All come out of one queue, or one iterator.
    async_function_mgr.wait_for([ragged.values for ragged in ids.values()][:1])
    _collect_dequeued(_SPARSE_FEATURES_COLLECTION, ids)
    has_one_each = packed_ids.take_has_one_each(dense, list(self._feature_configs.configs))
    _collect_dequeued("dequeued_features", dense)
    slices = pooling.create_embedding_slices(
      embeddings,
      ids,
      self._feature_configs.combiners,
      self._feature_configs.unmerged_slice_dims,
      has_one_each,
    )
    req_time = get_req_time(dense)
    if req_time is None:
      # Rows must have an age, or none expires.
      req_time = tf.cast(tf.timestamp(), tf.int64)
    self._ctx.layout_factory = None
    return slices, req_time


def create(config: CpuTrainingConfig, *args: Any) -> InputLookup:
  """Returns the lookup for the kind of tables that a configuration asks for.

  Args:
    config: the configuration.
    *args: the other arguments of `InputLookup`.
  """
  if config.enable_fused_layout:
    return LayoutLookup(config, *args)
  if config.enable_full_sync_training:
    return RankLookup(config, *args)
  return TableLookup(config, *args)


class TableLookup(InputLookup):
  """Looks up tables that take ids as they are: in this process, or on parameter servers."""

  # The static batch size of each feature, where the input pipeline has packed their ids.
  _packed_rows: dict[str, int | None] | None = None
  # Makes the queue of a model that is being built; returns the hook that fills it.
  _finish: Callable[[Sequence[tf.Operation]], None] | None = None

  def pack_ids(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Packs the ids of a batch into one tensor for a GPU, but for those the lookup will refuse."""
    if not self._params.train.use_gpu_emb_table or export_context.is_dry_run_or_exporting():
      return dataset
    names = list(self._feature_configs.configs)
    rows = packed_ids.static_rows(dataset.element_spec, names)
    if not names or rows is None:
      return dataset
    self._packed_rows = rows
    return _with_spare_cores(
      dataset.map(
        lambda features: packed_ids.pack(features, names), num_parallel_calls=tf.data.AUTOTUNE
      )
    )

  def look_up(
    self,
    hash_table: protocols.TableGroup,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    trains: bool = False,
  ) -> tuple[ModelInputs, dict[str, Any]]:
    """Looks up embeddings, perhaps ahead of the step."""
    config = self._config
    if packed_ids.PACKED_KEY in features:
      assert self._packed_rows is not None
      ids, dense = packed_ids.unpack(features, self._packed_rows, _GPU)
    else:
      ids, dense = self._split(features)
    stream = auxiliary_bundle.get(STREAM_KEY)
    has_samples = None if stream is None else stream["counts"][0] > 0
    if stream is not None and not config.embedding_prefetch_capacity:
      # A step cannot be left out once it has begun, so empty batches must not begin one.
      (ids, dense, auxiliary_bundle), stream_queue = prefetch_queue.enqueue_dicts_with_queue_return(
        (ids, dense, auxiliary_bundle), queue_name="stream_queue", condition=has_samples
      )
      hash_table.add_queue_hook(
        stream_hook.StreamHook(stream_queue, has_samples, auxiliary_bundle[STREAM_KEY]["counts"])
      )
      has_samples = None  # Now it is told for all that follows.
    slot_to_id = {name: ragged.values for name, ragged in ids.items()}
    embeddings = hash_table.lookup(slot_to_id)
    if (
      trains
      and config.embedding_prefetch_capacity
      and pooled_steps.can_pool(hash_table, embeddings)
    ):
      return self._look_up_pooled(
        hash_table, embeddings, ids, dense, auxiliary_bundle, async_function_mgr, has_samples
      )
    id_split = hash_table.get_id_split(slot_to_id)
    (embeddings, ids, dense, id_split, auxiliary_bundle), queue = (
      prefetch_queue.enqueue_dicts_with_queue_return(
        (embeddings, ids, dense, id_split, auxiliary_bundle),
        capacity=config.embedding_prefetch_capacity,
        condition=has_samples,
      )
    )
    hash_table.set_id_split({name: ragged.values for name, ragged in ids.items()}, id_split)
    if queue is not None:
      hash_table.add_queue_hook(
        prefetch_queue.EnqueueHook(queue)
        if has_samples is None
        else stream_hook.StreamHook(queue, has_samples, auxiliary_bundle[STREAM_KEY]["counts"])
      )
    slices, req_time = self._pool(embeddings, ids, dense, async_function_mgr)
    self._ctx.feature_factory = _CpuFeatureFactory(
      hash_table,
      ids,
      embeddings,
      slices,
      req_time,
      async_function_mgr,
      async_push=config.enable_embedding_postpush,
      stream_batch=_take_stream_batch(auxiliary_bundle),
    )
    return ModelInputs({**dense, **embeddings}, embeddings, slices), auxiliary_bundle

  def _look_up_pooled(
    self,
    hash_table: Any,
    embeddings: dict[str, tf.Tensor],
    ids: dict[str, tf.RaggedTensor],
    dense: dict[str, tf.Tensor],
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    has_samples: tf.Tensor | None,
  ) -> tuple[ModelInputs, dict[str, Any]]:
    """Does the rest of `look_up` where rows can be pooled ahead of the step."""

    def make_queue(tensors: list[tf.Tensor]) -> prefetch_queue._MultiFIFOQueue:
      return prefetch_queue._MultiFIFOQueue(
        tensors, self._config.embedding_prefetch_capacity, condition=has_samples
      )

    step = pooled_steps.PooledStep(
      hash_table, embeddings, ids, (dense, auxiliary_bundle), make_queue
    )
    dense, auxiliary_bundle = step.others
    counts = None if has_samples is None else auxiliary_bundle[STREAM_KEY]["counts"]
    slices, req_time = self._pool(step.embeddings, step.ids, dense, async_function_mgr)
    step.set_slices(slices)
    self._ctx.feature_factory = _CpuFeatureFactory(
      hash_table,
      step.ids,
      step.embeddings,
      slices,
      req_time,
      async_function_mgr,
      async_push=self._config.enable_embedding_postpush,
      stream_batch=_take_stream_batch(auxiliary_bundle),
      pooled_step=step,
    )

    def finish(roots: Sequence[tf.Operation]) -> None:
      queue = step.finish(roots)
      if counts is None:
        hash_table.add_queue_hook(prefetch_queue.EnqueueHook(queue))
        return
      # Steps take what comes out of the queue, and not the stand-in for it.
      [dequeued] = counts.op.inputs
      hash_table.add_queue_hook(stream_hook.StreamHook(queue, has_samples, dequeued))

    self._finish = finish
    features = {**dense, **step.embeddings}
    return ModelInputs(features, step.embeddings, slices, ids=step.ids), auxiliary_bundle

  def finish(self, roots: Sequence[tf.Operation]) -> None:
    """Makes the queue of the graph, if it was left for now."""
    if self._finish is not None:
      self._finish(roots)
      self._finish = None


class RankLookup(InputLookup):
  """Looks up tables over synchronous ranks, which take ids that are reordered by rank."""

  def reorder_ids(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """De-duplicates ids and reorders them by rank, where the configuration wants it here."""
    if not self._config.reorder_fids_in_data_pipeline or not self._feature_configs.configs:
      return dataset
    return dataset.map(self._reorder, num_parallel_calls=tf.data.AUTOTUNE)

  def look_up(
    self,
    hash_table: protocols.ReorderedGroup,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    trains: bool = False,
  ) -> tuple[ModelInputs, dict[str, Any]]:
    """Looks up embeddings, ahead of the step where the tables have queues."""
    if _ELEMENT_KEY not in features:  # As in a prediction.
      features = self._reorder(features)
    dense, (expanded, lookup_args) = features[_ELEMENT_KEY]
    auxiliary_bundle["features"] = dense
    auxiliary_bundle["embedding_ragged_ids"] = parser_utils.RaggedEncodingHelper.contract(expanded)
    embeddings, auxiliary_bundle = hash_table.lookup(
      {name: None for name in self._feature_configs.configs}, auxiliary_bundle, lookup_args
    )
    ids = auxiliary_bundle.pop("embedding_ragged_ids")
    dense = auxiliary_bundle.pop("features")
    slices, req_time = self._pool(embeddings, ids, dense, async_function_mgr)
    self._ctx.feature_factory = _FusedCpuFeatureFactory(
      hash_table,
      embeddings,
      slices,
      req_time,
      auxiliary_bundle,
      self._slot_merging is None,
    )
    return ModelInputs({**dense, **embeddings}, embeddings, slices), auxiliary_bundle

  def _reorder(self, features: Features) -> Features:
    ids, dense = self._split(features)
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
    reordered = distribution_ops.fused_reorder_by_indices(
      values,
      self._config.num_workers,
      dims,
      distribution_ops.is_rank0_empty(self._config.num_workers, by_default=False),
    )
    lookup_args = (*reordered, get_req_time(dense))
    if sizes is not None:
      lookup_args = (sizes, lookup_args)
    expanded = parser_utils.RaggedEncodingHelper.expand(
      ids, with_precomputed_nrows=True, with_precomputed_value_rowids=False
    )
    return {_ELEMENT_KEY: (dense, (expanded, lookup_args))}


class LayoutLookup(InputLookup):
  """Looks up tables of a fused layout, whose ids the parsers have sharded already."""

  def look_up(
    self,
    hash_table: protocols.LayoutGroup,
    features: Features,
    auxiliary_bundle: dict[str, Any],
    async_function_mgr: prefetch_queue.AsyncFunctionMgr,
    trains: bool = False,
  ) -> tuple[ModelInputs, dict[str, Any]]:
    """Looks up layouts, perhaps ahead of the step."""
    self._ctx.feature_factory = None
    look_up = hash_table.lookup(
      features,
      auxiliary_bundle,
      ret_lookup_callable_fn=True,
      embedding_prefetch_capacity=self._config.embedding_prefetch_capacity,
    )
    layouts = look_up(auxiliary_bundle, features)
    async_function_mgr.wait_for(tf.nest.flatten(layouts)[:1])
    auxiliary_bundle.update(features)
    self._ctx.layout_factory = feature.EmbeddingLayoutFactory(
      hash_table,
      layouts,
      auxiliary_bundle=auxiliary_bundle,
      async_function_mgr=async_function_mgr,
      async_push=self._config.enable_embedding_postpush,
    )
    return ModelInputs(features, layouts=layouts), auxiliary_bundle


def _with_spare_cores(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Leaves a quarter of the cores to the threads that feed the GPU, unless told otherwise.

  One of those waits for copies to the GPU. With all cores busy in the input pipeline it wakes up to
  a millisecond late, and a step takes a few.
  """
  if dataset.options().threading.private_threadpool_size is not None:
    return dataset
  options = tf.data.Options()
  options.threading.private_threadpool_size = max(1, len(os.sched_getaffinity(0)) * 3 // 4)
  return dataset.with_options(options)


def _take_stream_batch(
  auxiliary_bundle: dict[str, Any],
) -> stream_positions.StreamBatch | None:
  fields = auxiliary_bundle.pop(STREAM_KEY, None)
  return None if fields is None else stream_positions.StreamBatch(**fields)


def _collect_dequeued(collection: str, name_to_tensor: Mapping[str, Any]) -> None:
  for name, tensor in name_to_tensor.items():
    tensor.feature_name = name
    tf.compat.v1.add_to_collection(collection, tensor)
