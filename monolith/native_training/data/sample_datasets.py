"""Datasets of samples made from samples: repeated, negative, transformed, or marked as the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training.data import item_pools
from monolith.native_training.runtime.ops import gen_monolith_ops as pb_datasource_ops

POOL_KEY = "TF_ITEMPOOL"


class CacheOneDataset(dataset_ops.UnaryDataset):
  """Elements `(x, is_last)`, where `is_last` is true for the last element of the input."""

  def __init__(self, input_dataset: tf.data.Dataset):
    self._input = input_dataset
    variant = pb_datasource_ops.monolith_cache_one_dataset(input_dataset._variant_tensor)
    super().__init__(input_dataset, variant)

  @property
  def element_spec(self) -> Any:
    return (self._input.element_spec, tf.TensorSpec([], tf.bool))


class _SampleDataset(dataset_ops.UnaryUnchangedStructureDataset):
  """Samples made from samples."""


class InstanceReweightDataset(_SampleDataset):
  """Repeats each sample as often as its actions weigh.

  Args:
    input_dataset: samples.
    action_priority: `"2,7,..."`, the best action first.
    reweight: `"action:weight:label,..."`.
    variant_type: `"example"` or `"instance"`.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    action_priority: str | None = None,
    reweight: str | None = None,
    variant_type: str = "example",
  ):
    priorities = [int(action) for action in (action_priority or "").split(",") if action.strip()]
    actions, weights, labels = [], [], []
    for part in filter(None, (part.strip() for part in (reweight or "").split(","))):
      fields = part.split(":")
      if len(fields) != 3:
        raise ValueError(f"reweight has {part!r}, want action:weight:label")
      actions.append(int(fields[0]))
      weights.append(int(fields[1]))
      labels.append(int(fields[2]))
    variant = pb_datasource_ops.instance_reweight_dataset(
      input_dataset._variant_tensor,
      method=0,
      actions=actions,
      weights=weights,
      labels=labels,
      priorities=priorities,
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)


class NegativeGenDataset(_SampleDataset):
  """Puts sampled negatives before each positive sample.

  Args:
    input_dataset: samples.
    neg_num: most negatives per positive.
    per_channel: draw from the channel of the positive.
    channel_feature: the feature, or slot, whose id is the channel; default slot 3.
    item_features: features, or slots, that describe the item.
    start_num: a channel is drawn from once it has more items.
    max_item_num: most items of a channel.
    positive_label: the label of positives, when no positive actions are given.
    negative_label: the label of generated negatives.
    negative_action: their action; -99999 keeps the actions of the positive.
    positive_actions: a sample is positive if its best action is one of them.
    label_index: the label that counts.
    action_priority: `"2,7,..."`, the best action first.
    index_feature: the feature, or slot, whose id is the item id; default `LineId.item_id`.
    throw_origin: drop all original samples.
    throw_origin_neg: drop original negatives.
    cache_only_pos: cache the items of positives only.
    cache_negative_actions: cache the items of negatives with such an action too.
    real_neg_instance_weight: weight of original negatives.
    sampled_neg_instance_weight: weight of generated ones, if positive.
    unbias_sampled_neg: otherwise weigh them by how rarely they were drawn.
    origin_neg_in_pool_proba: share of the cacheable negatives that are cached.
    neg_sample_declay_factor: how the age of an item counts in that weight.
    easy_hard_ratio: share of negatives drawn from any channel.
    variant_type: `"example"` or `"instance"`.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    neg_num: int,
    per_channel: bool = False,
    channel_feature: str | int = "",
    item_features: Sequence[str | int] = (),
    start_num: int = 500,
    max_item_num: int = 100000,
    positive_label: int = 1,
    negative_label: int = -1,
    negative_action: int = -99999,
    positive_actions: Sequence[int] = (),
    label_index: int = 0,
    action_priority: str = "",
    index_feature: str | int = "",
    throw_origin: bool = False,
    throw_origin_neg: bool = False,
    cache_only_pos: bool = True,
    cache_negative_actions: Sequence[int] = (),
    real_neg_instance_weight: float = 1.0,
    sampled_neg_instance_weight: float = -1.0,
    unbias_sampled_neg: bool = True,
    origin_neg_in_pool_proba: float = 1.0,
    neg_sample_declay_factor: float = 1.0,
    easy_hard_ratio: float = 0.0,
    variant_type: str = "example",
  ):
    self.pool = item_pools.create_item_pool(start_num, max_item_num)
    tf.compat.v1.add_to_collection(POOL_KEY, self.pool)
    variant = pb_datasource_ops.instance_negative_gen_dataset(
      input_dataset._variant_tensor,
      self.pool,
      neg_num=neg_num,
      per_channel=per_channel,
      channel_feature=str(channel_feature),
      item_features=[str(feature) for feature in item_features],
      positive_label=positive_label,
      negative_label=negative_label,
      negative_action=negative_action,
      positive_actions=list(positive_actions),
      label_index=label_index,
      action_priority=action_priority,
      index_feature=str(index_feature),
      throw_origin=throw_origin,
      throw_origin_neg=throw_origin_neg,
      cache_only_pos=cache_only_pos,
      cache_negative_actions=list(cache_negative_actions),
      real_neg_instance_weight=real_neg_instance_weight,
      sampled_neg_instance_weight=sampled_neg_instance_weight,
      unbias_sampled_neg=unbias_sampled_neg,
      origin_neg_in_pool_proba=origin_neg_in_pool_proba,
      neg_sample_declay_factor=neg_sample_declay_factor,
      easy_hard_ratio=easy_hard_ratio,
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)


class TransformDataset(_SampleDataset):
  """Filters and changes samples as a `data.transform.transforms.Transform` says."""

  def __init__(self, input_dataset: tf.data.Dataset, transform: Any, variant_type: str):
    variant = pb_datasource_ops.transform_dataset(
      input_dataset._variant_tensor,
      config=transform.as_proto().SerializeToString(),
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)
