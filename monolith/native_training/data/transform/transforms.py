"""Filters and label rules for `Dataset.transform`, as data.

dataset.transform(Compose([FilterByFid(has_fids=[...]), FilterByAction([2])]))
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from monolith.native_training.data import parsers
from monolith.native_training.data.feature_utils import _line_id_field, _operand_attrs
from monolith.native_training.data.transform import transform_config_pb2

TransformConfig = transform_config_pb2.TransformConfig
_Basic = transform_config_pb2.BasicTransformConfig


class Transform(abc.ABC):
  """A filter or a change of samples."""

  @abc.abstractmethod
  def as_proto(self) -> TransformConfig:
    """Returns the configuration of the op."""


class _Leaf(Transform):
  """A transform that is not made of others."""

  @abc.abstractmethod
  def basic_config(self) -> _Basic:
    """Returns the configuration of this transform alone."""

  def as_proto(self) -> TransformConfig:
    proto = TransformConfig()
    proto.configs.add().basic_config.CopyFrom(self.basic_config())
    return proto


class Compose(Transform):
  """Applies transforms in order; a sample is kept if all keep it."""

  def __init__(self, transforms: Sequence[Transform]):
    self.transforms = list(transforms)

  def as_proto(self) -> TransformConfig:
    proto = TransformConfig()
    for transform in self.transforms:
      proto.MergeFrom(transform.as_proto())
    return proto


class FilterByFid(_Leaf):
  """Keeps samples by ids, as `feature_utils.filter_by_fids` does."""

  def __init__(
    self,
    has_fids: Sequence[int] | None = None,
    filter_fids: Sequence[int] | None = None,
    select_fids: Sequence[int] | None = None,
  ):
    self.has_fids = has_fids or []
    self.filter_fids = filter_fids or []
    self.select_fids = select_fids or []

  def basic_config(self) -> _Basic:
    proto = _Basic()
    # Set the message also when all lists are empty.
    proto.filter_by_fid.SetInParent()
    proto.filter_by_fid.has_fids.extend(self.has_fids)
    proto.filter_by_fid.filter_fids.extend(self.filter_fids)
    proto.filter_by_fid.select_fids.extend(self.select_fids)
    return proto


class FilterByAction(_Leaf):
  """Keeps samples with at least one of the actions."""

  def __init__(self, has_actions: Sequence[int] | None = None):
    self.has_actions = has_actions or []

  def basic_config(self) -> _Basic:
    proto = _Basic()
    proto.filter_by_action.SetInParent()
    proto.filter_by_action.has_actions.extend(self.has_actions)
    return proto


class FilterByLabel(_Leaf):
  """Keeps samples by labels, as `feature_utils.filter_by_label` does."""

  def __init__(self, thresholds: Sequence[float]):
    self.thresholds = thresholds

  def basic_config(self) -> _Basic:
    proto = _Basic()
    proto.filter_by_label.SetInParent()
    proto.filter_by_label.thresholds.extend(self.thresholds)
    return proto


class FilterByValue(_Leaf):
  """Keeps samples by a field of `LineId`, as `feature_utils.filter_by_value` does."""

  def __init__(self, field_name: str, op: str, operand: Any, keep_empty: bool = False):
    self.field_name = field_name
    self.op = op
    self.operand = operand
    self.keep_empty = keep_empty

  def basic_config(self) -> _Basic:
    proto = _Basic()
    config = proto.filter_by_value
    config.field_name = self.field_name
    config.op = self.op
    config.keep_empty = self.keep_empty
    dtype, _ = _line_id_field(self.field_name)
    for name, values in _operand_attrs(dtype, self.operand).items():
      getattr(config, name).extend(values)
    return proto


class AddLabel(_Leaf):
  """Appends a label per task, as `feature_utils.add_label` does."""

  def __init__(self, config: str, negative_value: float, new_sample_rate: float):
    self.config = config
    self.negative_value = negative_value
    self.new_sample_rate = new_sample_rate

  def basic_config(self) -> _Basic:
    proto = _Basic()
    proto.add_label.negative_value = self.negative_value
    proto.add_label.new_sample_rate = self.new_sample_rate
    for task in parsers.parse_label_config(self.config).conf:
      proto.add_label.task_label_configs.add(
        pos_actions=task.pos_actions, neg_actions=task.neg_actions, sample_rate=task.sample_rate
      )
    return proto


class LogicalOr(Transform):
  """Keeps a sample if either transform keeps it.

  Raises:
    AssertionError: one of them is made of others.
  """

  def __init__(self, x: Transform, y: Transform):
    assert isinstance(x, _Leaf) and isinstance(y, _Leaf), "LogicalOr needs two leaf transforms"
    self.x = x
    self.y = y

  def as_proto(self) -> TransformConfig:
    proto = TransformConfig()
    config = proto.configs.add().logical_or_config
    config.x.CopyFrom(self.x.basic_config())
    config.y.CopyFrom(self.y.basic_config())
    return proto
