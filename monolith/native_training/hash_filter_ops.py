"""Occurrence filters: ids enter a table only when they have been seen often enough.

A filter is a resource that counts ids approximately in bounded memory. Tables ask it for every id
they do not hold; `intercept_gradient` puts it into the gradient path of any other tensor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from monolith.native_training import basic_restore_hook, save_utils, utils
from monolith.native_training.model_export import export_context
from monolith.native_training.runtime.ops import gen_monolith_ops

filter_ops = gen_monolith_ops
filter_save_op = gen_monolith_ops
filter_restore_op = gen_monolith_ops

HASH_FILTER_CAPACITY = 300000000
HASH_FILTER_SPLIT_NUM = 7
_TIMEOUT_IN_MS = 1800000


class FilterType:
  """The kinds of filter."""

  SLIDING_HASH_FILTER = "sliding_hash_filter"
  PROBABILISTIC_FILTER = "probabilistic_filter"
  NO_FILTER = "no_filter"


def create_hash_filter(
  capacity: int, split_num: int, config: bytes = b"", name_suffix: str = ""
) -> tf.Tensor:
  """Returns the handle of a sliding filter.

  Args:
    capacity: how many ids it remembers.
    split_num: number of sub-filters in the ring; the oldest is forgotten when one is full.
    config: serialized `SlotOccurrenceThresholdConfig`.
    name_suffix: filters of the same suffix are one.
  """
  return filter_ops.MonolithHashFilter(
    capacity=capacity,
    split_num=split_num,
    config=config,
    shared_name="MonolithHashFilter" + name_suffix,
  )


def create_probabilistic_filter(
  equal_probability: bool, config: bytes = b"", name_suffix: str = ""
) -> tf.Tensor:
  """Returns the handle of a filter without memory, which admits an id with a probability.

  Args:
    equal_probability: the same probability at every occurrence, 95 % after as many occurrences as
      the threshold; otherwise `count / threshold`.
    config: serialized `SlotOccurrenceThresholdConfig`.
    name_suffix: filters of the same suffix are one.
  """
  return filter_ops.MonolithProbabilisticFilter(
    equal_probability=equal_probability,
    config=config,
    shared_name="MonolithProbabilisticFilter" + name_suffix,
  )


def create_dummy_hash_filter(name_suffix: str = "0") -> tf.Tensor:
  """Returns the handle of a filter that lets everything pass."""
  return filter_ops.MonolithDummyHashFilter(shared_name="DummyHashFilter" + name_suffix)


def _create_hash_filter(
  enable_hash_filter: bool,
  config: bytes = b"",
  name_suffix: str = "",
  filter_capacity: int = HASH_FILTER_CAPACITY,
  filter_split_num: int = HASH_FILTER_SPLIT_NUM,
  filter_equal_probability: bool = False,
  filter_type: str = FilterType.SLIDING_HASH_FILTER,
) -> tf.Tensor:
  if enable_hash_filter is not True or filter_type == FilterType.NO_FILTER:
    return create_dummy_hash_filter(name_suffix=name_suffix)
  if filter_type == FilterType.SLIDING_HASH_FILTER:
    return create_hash_filter(filter_capacity, filter_split_num, config, name_suffix)
  if filter_type == FilterType.PROBABILISTIC_FILTER:
    return create_probabilistic_filter(filter_equal_probability, config, name_suffix)
  raise ValueError("Invalid filter type, please investigate and retry!")


def create_hash_filters(
  ps_num: int,
  enable_hash_filter: bool,
  config: bytes = b"",
  filter_capacity: int = HASH_FILTER_CAPACITY,
  filter_split_num: int = HASH_FILTER_SPLIT_NUM,
  filter_equal_probability: bool = False,
  filter_type: str = FilterType.SLIDING_HASH_FILTER,
) -> list[tf.Tensor]:
  """Returns one filter per parameter server, on its device; a single one for `ps_num` 0.

  Args:
    ps_num: number of parameter servers.
    enable_hash_filter: anything but `True` gives filters that let everything pass.
    config: serialized `SlotOccurrenceThresholdConfig`.
    filter_capacity: of a sliding filter.
    filter_split_num: of a sliding filter.
    filter_equal_probability: of a probabilistic filter.
    filter_type: a constant of `FilterType`.

  Raises:
    ValueError: unknown `filter_type`.
  """

  def create(name_suffix: str) -> tf.Tensor:
    return _create_hash_filter(
      enable_hash_filter,
      config,
      name_suffix,
      filter_capacity,
      filter_split_num,
      filter_equal_probability,
      filter_type,
    )

  if ps_num == 0:
    return [create("")]
  filters = []
  for i in range(ps_num):
    with contextlib.ExitStack() as stack:
      if not export_context.is_exporting_standalone():
        stack.enter_context(tf.device(utils.ps_device(i)))
      filters.append(create(f"_{i}"))
  return filters


def save_hash_filter(
  hash_filter: tf.Tensor, hash_filter_basename: tf.Tensor | str, enable_hash_filter: bool = False
) -> tf.Tensor | tf.Operation:
  """Returns what, when run, writes the filter; a no-op unless `enable_hash_filter` is `True`."""
  if enable_hash_filter is not True:
    return tf.no_op()
  return filter_save_op.monolith_hash_filter_save(hash_filter, hash_filter_basename)


def restore_hash_filter(
  hash_filter: tf.Tensor, hash_filter_base_name: tf.Tensor | str, enable_hash_filter: bool = False
) -> tf.Tensor | tf.Operation:
  """Returns what, when run, reads the filter; a no-op unless `enable_hash_filter` is `True`."""
  if enable_hash_filter is not True:
    return tf.no_op()
  return filter_restore_op.monolith_hash_filter_restore(hash_filter, hash_filter_base_name)


def intercept_gradient(
  filter_tensor: tf.Tensor, ids: tf.Tensor, embeddings: tf.Tensor
) -> tf.Tensor:
  """Returns `embeddings`; going back, gradients of ids that are still filtered become zero.

  Args:
    filter_tensor: handle of a filter.
    ids: int64 `[n]`.
    embeddings: float `[n, ...]`.
  """
  return filter_ops.monolith_hash_filter_intercept_gradient(filter_tensor, ids, embeddings)


@tf.RegisterGradient("MonolithHashFilterInterceptGradient")
def _intercept_gradient_gradient(op: tf.Operation, grad: tf.Tensor) -> tuple:
  return (
    None,
    None,
    filter_ops.monolith_hash_filter_intercept_gradient_gradient(op.inputs[0], op.inputs[1], grad),
  )


class HashFilterCheckpointSaverListener(tf.estimator.CheckpointSaverListener):
  """Saves filters beside the checkpoint: filter i to `<prefix>.assets/hash_filter_<i>`.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    hash_filters: handles.
    enable_hash_filter: whether the filters are real.
    enable_save_restore: whether to save at all.
  """

  def __init__(
    self,
    basename: str,
    hash_filters: Sequence[tf.Tensor],
    enable_hash_filter: bool = False,
    enable_save_restore: bool = True,
  ):
    super().__init__()
    self._helper = save_utils.SaveHelper(basename)
    self._enabled = enable_hash_filter is True and enable_save_restore
    self._placeholders: list[tf.Tensor] = []
    if not self._enabled:
      return
    # One after another: filters are large, and writing several at once gains nothing on one disk.
    save_ops: list[tf.Tensor] = []
    for hash_filter in hash_filters:
      placeholder = tf.compat.v1.placeholder(tf.string, shape=[])
      self._placeholders.append(placeholder)
      with tf.control_dependencies(save_ops[-1:]):
        save_ops.append(save_hash_filter(hash_filter, placeholder, True))
    self._save_op = tf.group(save_ops)

  def before_save(self, sess: tf.compat.v1.Session, global_step_value: int) -> None:
    """Saves every filter."""
    if not self._enabled:
      return
    prefix = self._helper.get_ckpt_prefix(global_step_value)
    folder = self._helper.get_ckpt_asset_dir(prefix)
    logging.info("Saving hash filters to %s", folder)
    tf.io.gfile.makedirs(folder)
    sess.run(
      self._save_op,
      feed_dict=_filter_paths(self._placeholders, folder),
      options=tf.compat.v1.RunOptions(timeout_in_ms=_TIMEOUT_IN_MS),
    )


class HashFilterCheckpointRestorerListener(basic_restore_hook.CheckpointRestorerListener):
  """Restores what `HashFilterCheckpointSaverListener` saved; takes the same arguments."""

  def __init__(
    self,
    basename: str,
    hash_filters: Sequence[tf.Tensor],
    enable_hash_filter: bool = False,
    enable_save_restore: bool = True,
  ):
    super().__init__()
    self._basename = basename
    self._helper = save_utils.SaveHelper(basename)
    self._enabled = enable_hash_filter is True and enable_save_restore
    self._placeholders = []
    if not self._enabled:
      return
    self._placeholders = [tf.compat.v1.placeholder(tf.string, shape=[]) for _ in hash_filters]
    self._restore_op = tf.group(
      [
        restore_hash_filter(hash_filter, placeholder, True)
        for hash_filter, placeholder in zip(hash_filters, self._placeholders)
      ]
    )

  def before_restore(self, session: tf.compat.v1.Session) -> None:
    """Restores every filter from the newest checkpoint, if there is one.

    Raises:
      tf.errors.OpError: the checkpoint lacks a filter, or it cannot be read.
    """
    if not self._enabled:
      return
    prefix = tf.train.latest_checkpoint(os.path.dirname(self._basename))
    if not prefix:
      logging.info("No checkpoint found in %s", os.path.dirname(self._basename))
      return
    folder = self._helper.get_ckpt_asset_dir(prefix)
    self._restore_from_path_prefix(session, folder if tf.io.gfile.exists(folder) else prefix)

  def _restore_from_path_prefix(self, sess: tf.compat.v1.Session, path_prefix: str) -> None:
    if not self._enabled:
      return
    logging.info("Restoring hash filters from %s", path_prefix)
    sess.run(
      self._restore_op,
      feed_dict=_filter_paths(self._placeholders, path_prefix),
      options=tf.compat.v1.RunOptions(timeout_in_ms=_TIMEOUT_IN_MS),
    )


def _filter_paths(placeholders: Sequence[tf.Tensor], path_prefix: str) -> dict[tf.Tensor, str]:
  return {
    placeholder: f"{path_prefix}hash_filter_{i}" for i, placeholder in enumerate(placeholders)
  }
