"""A thread-safe set of the ids touched since they were last taken out.

Differences from ByteDance's Monolith: `TouchedKeySet` honours `name_suffix`: sets of different
suffixes are different sets.
"""

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as touched_key_set_ops

TOUCHED_KEY_SET_CAPACITY = 64 * 1024 * 1024 // (8 * 4)
TOUCHED_KEY_SET_CONCURRENCY_LEVEL = 1024


def create_touched_key_set(
  capacity: int, concurrency_level: int, name_suffix: str = ""
) -> tf.Tensor:
  """Makes a set, or finds the one of the same name.

  Args:
    capacity: an insert into a set of more than this many ids first drops them all; at least 0.
    concurrency_level: how many threads may usefully insert at once; at least 1.
    name_suffix: tells the sets of one process apart.

  Returns:
    A scalar resource handle.
  """
  return touched_key_set_ops.MonolithTouchedKeySet(
    capacity=capacity,
    concurrency_level=concurrency_level,
    shared_name="MonolithTouchedKeySet" + name_suffix,
  )


class TouchedKeySet:
  """A set of int64 ids. Memory is allocated by inserts only."""

  def __init__(
    self,
    capacity: int = TOUCHED_KEY_SET_CAPACITY,
    concurrency_level: int = TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
    name_suffix: str = "",
  ):
    self._capacity = capacity
    self._concurrency_level = concurrency_level
    self._set = create_touched_key_set(capacity, concurrency_level, name_suffix)

  @property
  def capacity(self) -> int:
    """An insert into a set of more than this many ids first drops them all."""
    return self._capacity

  @property
  def concurrency_level(self) -> int:
    """The number of threads that may usefully insert at once."""
    return self._concurrency_level

  @property
  def handle(self) -> tf.Tensor:
    """The set itself, a scalar resource."""
    return self._set

  def insert(self, ids: tf.Tensor) -> tf.Tensor:
    """Inserts ids in order; thread-safe.

    Args:
      ids: int64 of any shape. Duplicates count once.

    Returns:
      int64 `[1]`, how many ids this call dropped because the set held more than its capacity.
    """
    return touched_key_set_ops.monolith_touched_key_set_insert(self._set, ids)

  def steal(self) -> tf.Tensor:
    """Takes all ids out. Each insert is wholly before or wholly after.

    Returns:
      int64 `[n]`, in unspecified order.
    """
    return touched_key_set_ops.monolith_touched_key_set_steal(self._set)
