"""The dry run, which finds out which tables a model needs.

It calls a task's model function once in a throw-away graph that is never executed. The declarations
made there become one table configuration per feature.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from google.protobuf import text_format

from monolith.native_training import (
  embedding_combiners,
  entry,
  feature,
  graph_estimator,
  native_task,
  prefetch_queue,
)
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.data import parsers
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2


class FeatureConfigs(NamedTuple):
  """Holds the declarations of a model by feature name.

  Attributes:
    configs: the table of each feature.
    unmerged_slice_dims: the sizes of its slices, in call order.
    combiners: how its embeddings are pooled.
  """

  configs: dict[str, entry.HashTableConfigInstance]
  unmerged_slice_dims: dict[str, Sequence[int]]
  combiners: dict[str, embedding_combiners.Combiner]

  def for_training(self, initial_capacity: int, is_raw: bool) -> FeatureConfigs:
    """Returns a copy for a training run.

    Args:
      initial_capacity: the initial capacity of every table, if positive.
      is_raw: whether entries have the type RAW, as the tables of ranks want them.
    """
    configs = copy.deepcopy(self.configs)
    for config in configs.values():
      if initial_capacity > 0:
        config.table_config.initial_capacity = initial_capacity
      if is_raw:
        config.table_config.entry_type = (
          embedding_hash_table_pb2.EmbeddingHashTableConfig.EntryType.RAW
        )
    return self._replace(configs=configs)

  def for_serving(self, skip_zero_embedding: bool) -> FeatureConfigs:
    """Returns a copy for exported graphs, whose tables are read only.

    Args:
      skip_zero_embedding: whether rows that are all zero are left out.
    """
    configs = copy.deepcopy(self.configs)
    for config in configs.values():
      table_config = config.table_config
      table_config.entry_config.entry_type = embedding_hash_table_pb2.EntryConfig.EntryType.SERVING
      table_config.skip_zero_embedding = skip_zero_embedding
      table_config.cuckoo.SetInParent()
    return self._replace(configs=configs)


class CollectedFeatures(NamedTuple):
  """The result of a dry run.

  Attributes:
    feature_configs: the declarations by feature name.
    slot_to_occurrence_threshold: by slot id, the number of batches that only count an id.
    slot_to_expire_time: by slot id, the days after which an unused row expires.
    slices: table name -> the slices of its rows.
    feature_to_admission: by feature name, when ids get rows and how long they keep them.
    shared_tables: the name of the table, for features whose slot has more than one of them. The
      table of any other feature has the name of the feature.
  """

  feature_configs: FeatureConfigs
  slot_to_occurrence_threshold: dict[int, int]
  slot_to_expire_time: dict[int, int]
  slices: dict[str, tuple[checkpoint_slices.Slice, ...]]
  feature_to_admission: Mapping[str, feature.Admission] = types.MappingProxyType({})
  shared_tables: Mapping[str, str] = types.MappingProxyType({})


def collect(task: native_task.NativeTask) -> CollectedFeatures:
  """Runs the model function of `task` once in a graph of its own, without executing anything.

  Raises:
    AssertionError: a feature name is bound to two slots.
    NameError: two slots have the same name.
    RuntimeError: a slot has no slice.
  """
  factory = feature.DummyFeatureFactory(task.p.train.per_replica_batch_size)
  graph = tf.Graph()
  graph.dry_run = True
  with graph.as_default(), parsers.ParserCtx(enable_fused_layout=False):
    task.ctx.feature_factory = factory
    task.ctx.layout_factory = None
    task.ctx.async_function_mgr = prefetch_queue.AsyncFunctionMgr(is_async=False)
    tf.compat.v1.train.get_or_create_global_step()
    element = task.create_input_fn(graph_estimator.ModeKeys.TRAIN)()
    if isinstance(element, tf.data.Dataset):
      element = element.get_single_element()
    task.create_model_fn()(
      features=element, mode=graph_estimator.ModeKeys.TRAIN, config=graph_estimator.RunConfig()
    )
  tables = factory.get_table_name_to_table_config()
  shared_tables = _find_shared_tables(tables)
  return CollectedFeatures(
    _to_feature_configs(tables),
    {slot: times or 0 for slot, times in factory.slot_to_occurrence_threshold.items()},
    dict(factory.slot_to_expire_time),
    {
      shared_tables.get(name, name): _describe_slices(table)
      for table in tables.values()
      for name in table.feature_names
    },
    {
      name: factory.name_to_admission[slot]
      for slot, table in tables.items()
      for name in table.feature_names
    },
    shared_tables,
  )


def _to_feature_configs(tables: dict[str, feature.TableConfig]) -> FeatureConfigs:
  result = FeatureConfigs({}, {}, {})
  for table in tables.values():
    for name in table.feature_names:
      assert name not in result.configs, "Feature must only belongs to one table."
      result.configs[name] = _combine_slices_as_table(table.slice_configs, table.hashtable_config)
      result.unmerged_slice_dims[name] = table.unmerged_slice_dims
      result.combiners[name] = table.feature_to_combiners[name]
  return result


def _find_shared_tables(tables: dict[str, feature.TableConfig]) -> dict[str, str]:
  return {
    name: _shared_table_name(slot, tables)
    for slot, table in tables.items()
    if len(table.feature_names) > 1
    for name in table.feature_names
  }


def _shared_table_name(slot: str, tables: dict[str, feature.TableConfig]) -> str:
  """Returns the slot's name, marked if the table of a feature of another slot has that name.

  The name is part of checkpoints and must not depend on the order in which features are bound.
  """
  is_taken = any(slot in table.feature_names for other, table in tables.items() if other != slot)
  return f"{slot}/shared" if is_taken else slot


def _combine_slices_as_table(
  slices: Sequence[feature.SliceConfig], hashtable_config: entry.HashTableConfig
) -> entry.HashTableConfigInstance:
  """Returns a table whose rows consist of the given slices, in order."""
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  learning_rate_fns: list[Any] = []
  for slice_config in slices:
    table_config.entry_config.segments.add().CopyFrom(slice_config.segment)
    learning_rate_fns.append(slice_config.learning_rate_fn)
  hashtable_config.mutate_table(table_config)
  return entry.HashTableConfigInstance(table_config, learning_rate_fns)


def _describe_slices(table: feature.TableConfig) -> tuple[checkpoint_slices.Slice, ...]:
  """Returns the slices as declared, before equal neighbours were merged."""
  configs = []
  for segment, learning_rate_fn in table.slice_configs:
    without_dim = embedding_hash_table_pb2.EntryConfig.Segment()
    without_dim.CopyFrom(segment)
    without_dim.ClearField("dim_size")
    text = text_format.MessageToString(without_dim, as_one_line=True)
    config = f"{text}, learning rate {learning_rate_fn}"
    configs += [(segment.opt_config.WhichOneof("type"), config)] * segment.dim_size
  slices, start = [], 0
  for dim in table.unmerged_slice_dims:
    slices.append(checkpoint_slices.Slice(dim, *configs[start]))
    start += dim
  return tuple(slices)
