"""The distinct ids of a batch by server, worked out once and shared by lookup and update.

A group remembers the split of the ids that it looked up under the tensors of these ids. Behind a
queue ids are other tensors: there the split travels along and is remembered under the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from monolith.native_training import distribution_ops
from monolith.native_training.runtime.ops import gen_monolith_ops

_Built = TypeVar("_Built")


class Memo(Generic[_Built]):
  """Remembers what was built from the tensors of some slots, so that lookup and update share it.

  Graph tensors are compared by identity, so a hit is the very same value in the same step. What was
  built inside a loop or a branch is not used outside of it.
  """

  def __init__(self) -> None:
    self._built: dict[Any, _Built] = {}

  def get(self, slot_to_tensor: Mapping[str, Any], build: Callable[[], _Built]) -> _Built:
    """Returns what was built from these tensors before, or builds it."""
    built = self.find(slot_to_tensor)
    if built is None:
      built = build()
      self.set(slot_to_tensor, built)
    return built

  def find(self, slot_to_tensor: Mapping[str, Any]) -> _Built | None:
    """Returns what was built from these tensors before, or `None`."""
    key = self._key(slot_to_tensor)
    return None if key is None else self._built.get(key)

  def set(self, slot_to_tensor: Mapping[str, Any], built: _Built) -> None:
    """Remembers what was built from these tensors; arrays and lists have no identity to go by."""
    key = self._key(slot_to_tensor)
    if key is not None:
      self._built[key] = built

  def _key(self, slot_to_tensor: Mapping[str, Any]) -> tuple[Any, ...] | None:
    if not all(isinstance(tensor, tf.Tensor) for tensor in slot_to_tensor.values()):
      return None
    graph = tf.compat.v1.get_default_graph()
    # The key keeps the tensors alive, so that their identity cannot be taken over.
    tensors = [(slot, slot_to_tensor[slot].ref()) for slot in sorted(slot_to_tensor)]
    return (id(graph), graph._get_control_flow_context(), *tensors)


class RawSplit(NamedTuple):
  """The distinct ids of all tables of a native group, by server.

      ids of a batch  a: [7, 8, 7]  b: [7]        distinct  7 8 | 7
      two servers     ids        [[8], []]  [[7], [7]]       one row per table
                      positions  [1]        [0, 2]           among the distinct ids
                      offsets    [[0, 2 * dim], [dim], [3 * dim]]

  Attributes:
    ids: for each server its ids, one row per table.
    positions: for each server the places of its ids among the distinct ones.
    offsets: for each distinct id where its values lie in the flat value of all ids.
  """

  ids: Sequence[tf.RaggedTensor]
  positions: Sequence[tf.Tensor]
  offsets: tf.RaggedTensor

  def positions_on(self, i: int) -> tf.RaggedTensor:
    """Returns the positions of server `i`'s ids, one row per table."""
    return self.ids[i].with_values(self.positions[i])

  def spread(
    self, rows: Sequence[tf.Tensor], key_splits: tf.Tensor, dims: Sequence[int]
  ) -> list[tf.Tensor]:
    """Gives every id of the batch the row of its distinct one.

    Args:
      rows: for each server the rows of its ids, a float32 vector.
      key_splits: row splits of all ids of the batch, a row for each table.
      dims: length of each table's rows.

    Returns:
      For each table `[ids, dim]`.
    """
    return gen_monolith_ops.monolith_spread_rows(
      list(rows),
      self.positions,
      [ids.row_splits for ids in self.ids],
      self.offsets.values,
      self.offsets.row_splits,
      key_splits,
      num_tables=len(dims),
      dims=list(dims),
    )

  def sum(self, gradients: Sequence[tf.Tensor], dims: Sequence[int]) -> list[tf.Tensor]:
    """Adds up the gradients of equal ids.

    Args:
      gradients: for each table as many float32 values as all its ids have.
      dims: length of each table's rows.

    Returns:
      For each server the sums of its ids, a float32 vector.
    """
    return gen_monolith_ops.monolith_sum_rows(
      list(gradients),
      self.positions,
      [ids.row_splits for ids in self.ids],
      self.offsets.values,
      self.offsets.row_splits,
      dims=list(dims),
    )


@tf.RegisterGradient("MonolithSpreadRows")
def _spread_rows_gradient(op: tf.Operation, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
  num_shards = op.get_attr("num_shards")
  places = list(op.inputs)[num_shards:-1]
  sums = gen_monolith_ops.monolith_sum_rows(
    list(gradients),
    places[:num_shards],
    places[num_shards : 2 * num_shards],
    *places[2 * num_shards :],
    dims=op.get_attr("dims"),
  )
  return [*sums, *([None] * (len(places) + 1))]


def split_ragged(
  ragged_id: tf.RaggedTensor, dims: Sequence[int], num_ps: int, generate_buffer: bool
) -> tuple[RawSplit, tf.Tensor]:
  """Makes the ids of each table distinct and splits them by server.

  Args:
    ragged_id: int64, one row per table.
    dims: length of each table's rows.
    num_ps: number of servers.
    generate_buffer: whether to make the buffer that a lookup fills.

  Returns:
    The split, and the buffer, which serves one lookup.
  """
  unique = distribution_ops.unique_key_with_value_and_offset(
    ragged_id, dims, generate_buffer=generate_buffer
  )
  distinct = unique.unique_key
  if num_ps == 1:  # There is nothing to split.
    ids, positions = [distinct], [tf.range(tf.size(distinct.values, out_type=tf.int64))]
  else:
    shards = distribution_ops.shard_of_ids(distinct.values, num_ps)
    ids, ragged = distribution_ops.ragged_split_by_indices(shards, distinct, num_ps)
    positions = [part.values for part in ragged]
  return RawSplit(ids, positions, unique.value_offset.values), unique.value_buffer


def unique_parts(ids: tf.Tensor, num_ps: int) -> list[tf.Tensor]:
  """Returns the distinct ids of each server."""
  unique_ids, _ = tf.unique(ids)
  shards = distribution_ops.shard_of_ids(unique_ids, num_ps)
  return distribution_ops.split_by_indices(shards, unique_ids, num_ps)
