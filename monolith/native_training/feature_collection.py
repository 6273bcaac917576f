"""The dry run: which tables does a model want?

A task's model function is run once in a throw-away graph that is never executed. What it declares
there becomes one table configuration per feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training import (
  embedding_combiners,
  entry,
  feature,
  native_task,
  prefetch_queue,
)
from monolith.native_training.data import parsers
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2


class FeatureConfigs(NamedTuple):
  """What a model declared, by feature name.

  Attributes:
    configs: the table of each feature.
    unmerged_slice_dims: the sizes of its slices, in call order.
    combiners: how its embeddings are pooled.
  """

  configs: dict[str, entry.HashTableConfigInstance]
  unmerged_slice_dims: dict[str, Sequence[int]]
  combiners: dict[str, embedding_combiners.Combiner]


class CollectedFeatures(NamedTuple):
  """The result of a dry run.

  Attributes:
    feature_configs: what was declared, by feature name.
    slot_to_occurrence_threshold: by slot id, how often an id must be seen before it gets a row.
    slot_to_expire_time: by slot id, the days after which an unused row expires.
  """

  feature_configs: FeatureConfigs
  slot_to_occurrence_threshold: dict[int, int]
  slot_to_expire_time: dict[int, int]


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
    element = task.create_input_fn(tf.estimator.ModeKeys.TRAIN)()
    if isinstance(element, tf.data.Dataset):
      element = element.get_single_element()
    task.create_model_fn()(
      features=element, mode=tf.estimator.ModeKeys.TRAIN, config=tf.estimator.RunConfig()
    )
  return CollectedFeatures(
    _to_feature_configs(factory.get_table_name_to_table_config()),
    {slot: times or 0 for slot, times in factory.slot_to_occurrence_threshold.items()},
    dict(factory.slot_to_expire_time),
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
