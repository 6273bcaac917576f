"""Occurrence filters: ids enter a table only when they have been seen often enough.

A filter is a resource that counts ids approximately in bounded memory. Tables ask it for every id
they do not hold; `intercept_gradient` puts it into the gradient path of any other tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from monolith.native_training import hash_table_utils, utils
from monolith.native_training.checkpoints import listeners
from monolith.native_training.graph import export_context
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
  if not enable_hash_filter or filter_type == FilterType.NO_FILTER:
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
    filter_capacity: `capacity` of a sliding filter.
    filter_split_num: `split_num` of a sliding filter.
    filter_equal_probability: `equal_probability` of a probabilistic filter.
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
  hash_filter_basename = tf.convert_to_tensor(hash_filter_basename, tf.string)
  with hash_table_utils.on_device_of(hash_filter):
    return filter_save_op.monolith_hash_filter_save(hash_filter, hash_filter_basename)


def restore_hash_filter(
  hash_filter: tf.Tensor, hash_filter_base_name: tf.Tensor | str, enable_hash_filter: bool = False
) -> tf.Tensor | tf.Operation:
  """Returns what, when run, reads the filter; a no-op unless `enable_hash_filter` is `True`."""
  if enable_hash_filter is not True:
    return tf.no_op()
  hash_filter_base_name = tf.convert_to_tensor(hash_filter_base_name, tf.string)
  with hash_table_utils.on_device_of(hash_filter):
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


class HashFilterCheckpointSaverListener(listeners.AssetSaverListener[tuple[int, tf.Tensor]]):
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
    save_ops: list[tf.Tensor] = []

    def save(item: tuple[int, tf.Tensor], path: tf.Tensor) -> tf.Tensor:
      # One after another: filters are large, and writing several at once gains nothing on one disk.
      with tf.control_dependencies(save_ops[-1:]):
        save_ops.append(save_hash_filter(item[1], path, True))
      return save_ops[-1]

    enabled = enable_hash_filter is True and enable_save_restore
    super().__init__(
      basename, "hash filters", _build_assets(hash_filters if enabled else [], save), _TIMEOUT_IN_MS
    )

  def _name_of(self, item: tuple[int, tf.Tensor]) -> str:
    return f"hash_filter_{item[0]}"


class HashFilterCheckpointRestorerListener(listeners.AssetRestorerListener[tuple[int, tf.Tensor]]):
  """Restores what `HashFilterCheckpointSaverListener` saved; takes the same arguments."""

  def __init__(
    self,
    basename: str,
    hash_filters: Sequence[tf.Tensor],
    enable_hash_filter: bool = False,
    enable_save_restore: bool = True,
  ):
    enabled = enable_hash_filter is True and enable_save_restore
    assets = _build_assets(
      hash_filters if enabled else [], lambda item, path: restore_hash_filter(item[1], path, True)
    )
    super().__init__(basename, "hash filters", assets, _TIMEOUT_IN_MS)

  def _path_prefix_of(self, ckpt_prefix: str) -> str:
    # Old checkpoints have their filters beside the variables.
    folder = super()._path_prefix_of(ckpt_prefix)
    return folder if tf.io.gfile.exists(folder) else ckpt_prefix

  def _find_paths(self, path_prefix: str, items: Sequence[tuple[int, tf.Tensor]]) -> list[str]:
    return [f"{path_prefix}hash_filter_{i}" for i, _ in items]


def _build_assets(
  hash_filters: Sequence[tf.Tensor],
  make_op: Callable[[tuple[int, tf.Tensor], tf.Tensor], tf.Tensor],
) -> list[listeners.Asset[tuple[int, tf.Tensor]]]:
  """Returns an asset for each filter with its number, which names its files."""
  return listeners.build_assets(enumerate(hash_filters), lambda item: item[1].device, make_op)
