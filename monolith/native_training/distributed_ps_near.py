"""The tables of one parameter server that shares memory with this worker.

To send ids and rows there costs little more than a copy of them, less than to make ids distinct
here, to give each the row of its distinct one, and to sum gradients for these. So this server gets
what tables in this process would get, and does what they would do; nothing else of a group on
servers is different, nor are the results.

    server elsewhere    distinct ids ->     <- their rows       distinct ids, sums of gradients ->
    server near by      all ids ->          <- all rows         all ids, all gradients ->
                        ids, row splits ->  <- pooled rows      ids, row splits, their gradients ->
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from monolith.native_training import distributed_ps, hash_table_utils
from monolith.native_training.tables import id_pairs, local, pooling, protocols, ps_transfer


class NearServerHashTable(distributed_ps.DistributedMultiTypeHashTable):
  """Tables of many slots on one server of this machine, as native groups in its process.

  Args:
    slot_to_config: slot name -> configuration.
    table_factory: `(0, slot_to_config) -> local.LocalMultiHashTable`.
    max_rpc_deadline_millis: as for servers elsewhere; nothing here has a deadline.
  """

  def __init__(
    self,
    slot_to_config: Mapping[str, Any],
    table_factory: distributed_ps.TableFactory,
    max_rpc_deadline_millis: int = 30,
  ):
    super().__init__(
      1, slot_to_config, table_factory, max_rpc_deadline_millis=max_rpc_deadline_millis
    )

  def lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]`, zeros for absent ids; slots without a table are ignored.

    Each tensor is a part of one that the server has written.
    """
    slot_to_id = {slot: tf.convert_to_tensor(ids, tf.int64) for slot, ids in slot_to_id.items()}
    with tf.name_scope("dmtht_lu"):
      table = self._group.raw_table(0)
      ragged_id = table.get_ragged_id(slot_to_id)
      flat, timers = self._group.raw_lookup(0, ragged_id, op="dmtht_lu")
      with tf.control_dependencies(timers):
        flat = tf.identity(flat)
      return self._select(slot_to_id, table.get_embeddings(ragged_id, flat))

  def apply_gradients(
    self,
    slot_to_id_and_grad: Mapping[str, Any],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> distributed_ps.DistributedMultiTypeHashTable:
    """Runs the optimizers once per slot and id, on the sum of the id's gradients.

    Args:
      slot_to_id_and_grad: slot -> (ids, gradients).
      global_step: int64 scalar.
      req_time: int64, seconds; 0 by default.

    Returns:
      The tables after the write.
    """
    pairs = {
      slot: id_pairs.split_pair(pair)
      for slot, pair in self._known_slots(slot_to_id_and_grad).items()
    }
    if not pairs:
      return super().apply_gradients(slot_to_id_and_grad, global_step, req_time)
    names = list(pairs)

    def update(
      table: local.LocalMultiHashTable,
      tensors: list[tf.Tensor],
      global_step: tf.Tensor,
      req_time: tf.Tensor,
      condition: tf.Tensor | None,
    ) -> Any:
      if condition is not None:
        tensors = [ps_transfer.keep_if(condition, tensor) for tensor in tensors]
      ids, gradients = tensors[: len(names)], tensors[len(names) :]
      return table.apply_gradients(dict(zip(names, zip(ids, gradients))), global_step, req_time)

    return self._near_update(
      [
        *(tf.reshape(ids, [-1]) for ids, _ in pairs.values()),
        *(self._rows(slot, gradient) for slot, (_, gradient) in pairs.items()),
      ],
      global_step,
      req_time,
      update,
    )

  def lookup_pooled(
    self,
    slot_to_ids: Mapping[str, tf.RaggedTensor],
    widths: Sequence[int],
    parts: Sequence[pooling.PooledPart],
  ) -> list[tf.Tensor]:
    """Returns sums of the rows of each example's ids, as `LocalMultiHashTable` does."""
    slots = list(dict.fromkeys(part.feature for part in parts))
    transfer = self._group.transfer
    table = cast(local.LocalMultiHashTable, self._group.raw_table(0))

    def look_up(*tensors: tf.Tensor) -> list[tf.Tensor]:
      received = transfer.send(tensors, to=0)
      with transfer.device(0):
        pooled = table.lookup_pooled(_to_ragged(slots, received), widths, parts)
      return transfer.fetch(pooled, source=0)

    with tf.name_scope("dmtht_lu"):
      pooled, timer = self._group.measure_lookup(0, _to_tensors(slots, slot_to_ids), look_up)
      with tf.control_dependencies([timer]):
        return [tf.identity(tensor) for tensor in pooled]

  def apply_pooled_gradients(
    self,
    slot_to_ids: Mapping[str, tf.RaggedTensor],
    gradients: Sequence[tf.Tensor],
    parts: Sequence[pooling.PooledPart],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> distributed_ps.DistributedMultiTypeHashTable:
    """Runs the optimizers on gradients of pooled rows, as `LocalMultiHashTable` does."""
    slots = list(dict.fromkeys(part.feature for part in parts))
    num_ids = 2 * len(slots)

    def update(
      table: local.LocalMultiHashTable,
      tensors: list[tf.Tensor],
      global_step: tf.Tensor,
      req_time: tf.Tensor,
      condition: tf.Tensor | None,
    ) -> Any:
      ids, gradients = tensors[:num_ids], tensors[num_ids:]
      if condition is not None:
        # Examples without ids: there are as many as gradients have rows.
        values, splits = ids[: len(slots)], ids[len(slots) :]
        values = [ps_transfer.keep_if(condition, tensor) for tensor in values]
        ids = [*values, *(tensor * tf.cast(condition, tf.int64) for tensor in splits)]
      return table.apply_pooled_gradients(
        _to_ragged(slots, ids), gradients, parts, global_step, req_time
      )

    return self._near_update(
      [*_to_tensors(slots, slot_to_ids), *gradients], global_step, req_time, update
    )

  def get_id_split(self, slot_to_id: Mapping[str, tf.Tensor]) -> protocols.IdSplit | None:
    """Returns `None`: nothing was found out here."""
    return None

  def _near_update(
    self, tensors: Sequence[tf.Tensor], global_step: tf.Tensor, req_time: Any, update: Any
  ) -> distributed_ps.DistributedMultiTypeHashTable:
    with tf.name_scope("dmtht_ag"):
      req_time = hash_table_utils.as_req_time(req_time)
      table = self._group.near_update(0, tensors, global_step, req_time, update)
      return self._with_tables([table])


def _to_tensors(
  slots: Sequence[str], slot_to_ids: Mapping[str, tf.RaggedTensor]
) -> list[tf.Tensor]:
  """Returns the ids of slots, and then their row splits."""
  ids = [slot_to_ids[slot] for slot in slots]
  return [
    *(ragged.values for ragged in ids),
    *(tf.cast(ragged.row_splits, tf.int64) for ragged in ids),
  ]


def _to_ragged(slots: Sequence[str], tensors: Sequence[tf.Tensor]) -> dict[str, tf.RaggedTensor]:
  """Returns by slot what `_to_tensors` took apart."""
  return {
    slot: tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    for slot, values, splits in zip(slots, tensors, tensors[len(slots) :])
  }
