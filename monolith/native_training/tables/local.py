"""Tables in this process, for a run without parameter servers.

Every update sums the gradients of equal ids first, as it does with servers, and asks a filter once
for each of them, so that results do not depend on the number of servers. (A table's own
`enable_dedup` tells the filter how often the id has come.) The environment variable
`MONOLITH_UPDATE_PER_OCCURRENCE=1` brings back one optimizer step per occurrence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import (
  distribution_ops,
  hash_table_utils,
  multi_hash_table_ops,
  multi_type_hash_table,
)
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.tables import merging, pooling

_PER_OCCURRENCE_ENV = "MONOLITH_UPDATE_PER_OCCURRENCE"


def sums_duplicates() -> bool:
  """Returns whether updates sum the gradients of equal ids, as they do unless told otherwise."""
  return os.environ.get(_PER_OCCURRENCE_ENV, "0") != "1"


def _as_ids(ids: Any) -> tf.Tensor:
  # Also of a vector: values of a ragged tensor are reshaped to a computed shape, and TensorFlow
  # leaves that out, with the ops that compute the shape, before a reshape to this one.
  return tf.reshape(tf.convert_to_tensor(ids, tf.int64), [-1])


class LocalMultiTypeHashTable(multi_type_hash_table.MultiTypeHashTable):
  """Tables in this process; equal ids of an update make one step on the sum of their gradients."""

  def apply_gradients(
    self, slot_to_id_and_grad: Mapping[str, Any], *args: Any, **kwargs: Any
  ) -> multi_type_hash_table.MultiTypeHashTable:
    """Runs the optimizers; returns the group after the write."""
    if sums_duplicates() and "enable_dedup" not in kwargs:
      slot_to_id_and_grad = {
        slot: self._sum_by_id(slot, ids, grads)
        for slot, (ids, grads) in slot_to_id_and_grad.items()
      }
    return super().apply_gradients(slot_to_id_and_grad, *args, **kwargs)

  def _sum_by_id(self, slot: str, ids: Any, grads: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the distinct ids and the sum of each one's gradients."""
    ids = _as_ids(ids)
    dim = self._hash_tables[slot].dim_size
    grads = tf.reshape(tf.convert_to_tensor(grads, tf.float32), [-1, dim])
    distinct, _ = tf.unique(ids)
    [sums] = distribution_ops.map_id_to_embedding_gradient_back_prop([distinct], ids, grads)
    return distinct, sums


class LocalMultiHashTable(multi_hash_table_ops.MultiHashTable):
  """A group in this process; equal ids of an update make one step on the sum of their gradients.

  What belongs to one table stays in one tensor: nothing is packed, as it never travels.
  """

  def lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]`; names without a table are ignored, as in updates."""
    slot_to_id = merging.known_slots(slot_to_id, self._table_names)
    if not slot_to_id:
      return super().lookup(slot_to_id)
    tables = [self._table_names.index(slot) for slot in slot_to_id]
    embeddings = self._run(
      gen_monolith_ops.monolith_multi_hash_table_lookup_list,
      [_as_ids(ids) for ids in slot_to_id.values()],
      tables=tables,
      dims=[self._dims[table] for table in tables],
    )
    return dict(zip(slot_to_id, embeddings))

  def apply_gradients(
    self,
    slot_to_id_and_grad: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> multi_hash_table_ops.MultiHashTable:
    """Runs the optimizers; returns the group after the write."""
    slot_to_id_and_grad = merging.known_slots(slot_to_id_and_grad, self._table_names)
    if not sums_duplicates() or not slot_to_id_and_grad:
      return super().apply_gradients(slot_to_id_and_grad, global_step, req_time)
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_optimize_list,
        [_as_ids(ids) for ids, _ in slot_to_id_and_grad.values()],
        [tf.convert_to_tensor(grad, tf.float32) for _, grad in slot_to_id_and_grad.values()],
        self._learning_rate_tensor,
        hash_table_utils.as_req_time(req_time),
        tf.cast(global_step, tf.int64),
        tables=[self._table_names.index(slot) for slot in slot_to_id_and_grad],
      )
    )

  def lookup_pooled(
    self,
    slot_to_ids: Mapping[str, tf.RaggedTensor],
    widths: Sequence[int],
    parts: Sequence[pooling.PooledPart],
  ) -> list[tf.Tensor]:
    """Returns sums of the rows of each example's ids, side by side.

    Args:
      slot_to_ids: ids `[examples, None]`; features without a part are not looked up.
      widths: how many columns each result has.
      parts: what they are.

    Returns:
      float32 `[examples, width]` for each width.
    """
    slots = list(dict.fromkeys(part.feature for part in parts))
    return self._run(
      gen_monolith_ops.monolith_multi_hash_table_lookup_pooled,
      [_as_ids(slot_to_ids[slot].values) for slot in slots],
      [tf.cast(slot_to_ids[slot].row_splits, tf.int64) for slot in slots],
      tables=[self._table_names.index(slot) for slot in slots],
      widths=list(widths),
      parts=pooling.to_numbers(parts, slots),
      num_outputs=len(widths),
    )

  def apply_pooled_gradients(
    self,
    slot_to_ids: Mapping[str, tf.RaggedTensor],
    gradients: Sequence[tf.Tensor],
    parts: Sequence[pooling.PooledPart],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> multi_hash_table_ops.MultiHashTable:
    """Runs the optimizers as `apply_gradients` does; returns the group after the write.

    Args:
      slot_to_ids: ids `[examples, None]`.
      gradients: float32 `[examples, columns]`, of sums of rows.
      parts: what the columns are; others are ignored. Columns of rows that have none have the
        gradient 0.
      global_step: int64 scalar.
      req_time: int64, seconds; becomes the rows' time of last update.
    """
    slots = list(dict.fromkeys(part.feature for part in parts))
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_optimize_pooled,
        [_as_ids(slot_to_ids[slot].values) for slot in slots],
        [tf.cast(slot_to_ids[slot].row_splits, tf.int64) for slot in slots],
        list(gradients),
        self._learning_rate_tensor,
        hash_table_utils.as_req_time(req_time),
        tf.cast(global_step, tf.int64),
        tables=[self._table_names.index(slot) for slot in slots],
        parts=pooling.to_numbers(parts, slots),
      )
    )

  def raw_apply_gradients(
    self,
    ragged_id: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> multi_hash_table_ops.MultiHashTable:
    """Runs the optimizers; returns the group after the write."""
    if sums_duplicates():
      dims = self.get_table_dim_sizes()
      unique = distribution_ops.unique_key_with_value_and_offset(
        ragged_id, dims, generate_buffer=False
      )
      ragged_id = unique.unique_key
      positions = ragged_id.with_values(tf.range(tf.size(ragged_id.values, out_type=tf.int64)))
      flat_grad = distribution_ops.fill_with_offset_map_gradient(
        positions, flat_grad, unique.value_offset, dims
      )
    return super().raw_apply_gradients(ragged_id, flat_grad, global_step, req_time)
