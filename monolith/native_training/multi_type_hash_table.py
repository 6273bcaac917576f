"""Groups many tables behind one interface: a dict of slot names instead of one vector of ids.

`MultiTypeHashTable` holds one table per slot; `MergedMultiTypeHashTable` puts slots of equal
configuration into one table of an inner group, which makes the graph smaller.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping
from typing import Any, Union, overload

import tensorflow as tf

from monolith.native_training import (
  device_utils,
  entry,
  hash_table_ops,
  hash_table_utils,
)
from monolith.native_training.tables import id_pairs, id_splits, merging, protocols, queue_hooks

QueueHook = queue_hooks.QueueHook
SlotToConfig = merging.SlotToConfig
SlotToIds = protocols.SlotToIds
SlotToIdsAndValues = protocols.SlotToIdsAndValues

merged_name = merging.merged_name
merge_slots = merging.merge_slots


class BaseMultiTypeHashTable(queue_hooks.QueueHooks, abc.ABC):
  """A `TableGroup`. Writing returns a new object, as in `HashTable`.

  A group over ranks is a virtual subclass only: it takes other arguments, as a `ReorderedGroup`.
  """

  @abc.abstractmethod
  def lookup(self, slot_to_id: SlotToIds) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]` of the slots asked for."""

  @abc.abstractmethod
  def assign(self, slot_to_id_and_value: SlotToIdsAndValues) -> BaseMultiTypeHashTable:
    """Overwrites vectors; returns the group after the write."""

  @abc.abstractmethod
  def assign_add(self, slot_to_id_and_value: SlotToIdsAndValues) -> BaseMultiTypeHashTable:
    """Adds to vectors; returns the group after the write."""

  @abc.abstractmethod
  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[BaseMultiTypeHashTable, tf.Tensor]:
    """Resets rows; returns the group after the write and an int32 status per id."""

  @abc.abstractmethod
  def apply_gradients(
    self,
    slot_to_id_and_grad: SlotToIdsAndValues,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> BaseMultiTypeHashTable:
    """Runs the optimizers; returns the group after the write."""

  @abc.abstractmethod
  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns an op that runs after all writes so far."""

  @abc.abstractmethod
  def get_table_dim_sizes(self) -> list[int]:
    """Returns the tables' dimensions, by sorted name."""

  def get_id_split(self, slot_to_id: SlotToIds) -> protocols.IdSplit | None:
    """Returns what a lookup found out about its ids, for `set_id_split` behind a queue.

    Args:
      slot_to_id: the very tensors of the lookup.

    Returns:
      Tensors that may travel through a queue; `None` if there is nothing to share.
    """
    del slot_to_id
    return None

  def set_id_split(self, slot_to_id: SlotToIds, id_split: protocols.IdSplit | None) -> None:
    """Tells what is known about ids, so that an update need not work it out again.

    Args:
      slot_to_id: the ids as they left the queue.
      id_split: what `get_id_split` returned for them, as it left the same queue.
    """


class MultiTypeHashTable(BaseMultiTypeHashTable):
  """One table per slot.

  Args:
    slot_to_config: slot name -> configuration.
    hash_table_factory: makes the table of a slot: `(slot name, configuration)`, positionally;
      called in sorted order of the names.
  """

  def __init__(
    self,
    slot_to_config: SlotToConfig,
    hash_table_factory: Callable[
      [str, entry.HashTableConfigInstance], hash_table_ops.BaseHashTable
    ],
  ):
    self._slot_to_config = dict(slot_to_config)
    self._hash_tables: dict[str, hash_table_ops.BaseHashTable] = {}
    learning_rates = []
    for slot in sorted(slot_to_config):
      config = slot_to_config[slot]
      self._hash_tables[slot] = hash_table_factory(slot, config)
      learning_rates.append(config.call_learning_rate_fns())
    self._learning_rate_tensors = tf.concat(learning_rates, axis=0) if learning_rates else None

  def lookup(self, slot_to_id: SlotToIds) -> dict[str, tf.Tensor]:
    return {slot: self._hash_tables[slot].lookup(ids) for slot, ids in slot_to_id.items()}

  def assign(self, slot_to_id_and_value: SlotToIdsAndValues) -> MultiTypeHashTable:
    return self._with_tables(
      {
        slot: self._hash_tables[slot].assign(ids, values)
        for slot, (ids, values) in slot_to_id_and_value.items()
      }
    )

  def assign_add(self, slot_to_id_and_value: SlotToIdsAndValues) -> MultiTypeHashTable:
    return self._with_tables(
      {
        slot: self._hash_tables[slot].assign_add(ids, values)
        for slot, (ids, values) in slot_to_id_and_value.items()
      }
    )

  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[MultiTypeHashTable, tf.Tensor]:
    raise NotImplementedError("MultiTypeHashTable dost not support reinitialize!")

  def apply_gradients(
    self, slot_to_id_and_grad: SlotToIdsAndValues, *args: Any, **kwargs: Any
  ) -> MultiTypeHashTable:
    """Runs the optimizers; further arguments go to each table, the first is the global step."""
    return self._with_tables(
      {
        slot: self._hash_tables[slot].apply_gradients(ids, grads, *args, **kwargs)
        for slot, (ids, grads) in slot_to_id_and_grad.items()
      }
    )

  def as_op(self, name: str | None = None) -> tf.Operation:
    name = name or "mtht_ao"
    with tf.control_dependencies([table.as_op() for table in self._hash_tables.values()]):
      return tf.no_op(name=f"{name}/done")

  def get_table_dim_sizes(self) -> list[int]:
    return [table.dim_size for _, table in sorted(self._hash_tables.items())]

  def fused_lookup(
    self,
    ids: tf.Tensor,
    fused_slot_size: tf.Tensor,
    num_of_shards: int,
    req_time: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks all tables up in one op, as `hash_table_ops.fused_lookup` does; sorted by slot name."""
    return hash_table_ops.fused_lookup(
      [table.table for table in self._fused_tables().values()],
      ids,
      fused_slot_size,
      num_of_shards,
      req_time,
    )

  def fused_apply_gradient(
    self,
    ids: tf.Tensor,
    indices: tf.Tensor,
    fused_slot_size: tf.Tensor,
    id_grads: tf.Tensor,
    id_offsets: tf.Tensor,
    grad_offsets: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None,
    num_of_shards: int,
    enable_grad_accumulation: bool = False,
  ) -> MultiTypeHashTable:
    """Updates all tables in one op, as `hash_table_ops.fused_apply_gradient` does."""
    tables = self._fused_tables()
    handles = hash_table_ops.fused_apply_gradient(
      [table.table for table in tables.values()],
      ids,
      indices,
      fused_slot_size,
      id_grads,
      id_offsets,
      grad_offsets,
      self._learning_rate_tensors,
      req_time,
      global_step,
      num_of_shards,
      enable_grad_accumulation,
    )
    update_op = tf.group(handles)
    return self._with_tables(
      {slot: table.table_update(update_op) for slot, table in tables.items()}
    )

  def _fused_tables(self) -> dict[str, hash_table_ops.HashTable]:
    """Returns slot -> table, sorted; a fused op takes the tables of this process."""
    tables: dict[str, hash_table_ops.HashTable] = {}
    for slot, table in sorted(self._hash_tables.items()):
      if not isinstance(table, hash_table_ops.HashTable):
        raise TypeError(f"the table of slot {slot} is a {type(table).__name__}, want a HashTable")
      tables[slot] = table
    return tables

  def _with_tables(self, changed: Mapping[str, hash_table_ops.BaseHashTable]) -> MultiTypeHashTable:
    updated = copy.copy(self)
    updated._hash_tables = {**self._hash_tables, **changed}
    return updated


# Makes the inner group of merged tables, of either kind, from merged name -> configuration.
GroupFactory = Callable[
  [dict[str, entry.HashTableConfigInstance]],
  Union[protocols.TableGroup, protocols.ReorderedGroup],
]


class MergedMultiTypeHashTable(BaseMultiTypeHashTable):
  """Puts slots of equal configuration into one table of an inner group.

  The ids of slots that share a table must differ, as ids with slot bits do, or be meant to share.

  Args:
    slot_to_config: slot name -> configuration.
    factory: makes the inner group from merged name -> configuration.
  """

  def __init__(
    self,
    slot_to_config: SlotToConfig,
    factory: GroupFactory,
  ):
    self._set_merging(merging.SlotMerging.by_config(slot_to_config), factory)

  def _set_merging(
    self,
    slot_merging: merging.SlotMerging,
    factory: GroupFactory,
  ) -> None:
    self._merging = slot_merging
    # Merged ids by the ids of the slots, so that the inner group sees the same tensors again.
    self._memo: id_splits.Memo[dict[str, tf.Tensor]] = id_splits.Memo()
    self._table = factory(slot_merging.merged_to_config)

  @property
  def slot_mapping(self) -> dict[str, str]:
    """Slot -> merged name."""
    return self._merging.slot_to_merged

  @overload
  def lookup(self, slot_to_id: SlotToIds) -> dict[str, tf.Tensor]: ...

  @overload
  def lookup(
    self,
    slot_to_id: Mapping[str, Any],
    auxiliary_bundle: protocols.Bundle | None,
    early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
  ) -> Any: ...

  def lookup(
    self,
    slot_to_id: Mapping[str, Any],
    auxiliary_bundle: protocols.Bundle | None = None,
    early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
  ) -> Any:
    """Looks up, each merged table once.

    Args:
      slot_to_id: slot -> int64 ids; only the names count if ids are reordered already.
      auxiliary_bundle: tensors that travel through the queues of the inner table.
      early_reorder_indicies_res_pack: `(merged name -> sizes of its slots, reordered ids)` when the
        input pipeline has reordered the ids already.

    Returns:
      Slot -> embeddings; `(that dict, bundle)` if a bundle with something else in it was given.
    """
    if auxiliary_bundle is None and early_reorder_indicies_res_pack is None:
      merged_embeddings = self._table.lookup(self._merge_ids(slot_to_id))
      return self._split_embeddings(slot_to_id, merged_embeddings, self._merging.sizes(slot_to_id))
    bundle = dict(auxiliary_bundle or {})
    if early_reorder_indicies_res_pack is not None:
      sizes, pack = early_reorder_indicies_res_pack
      bundle["merged_slot_to_sizes"] = sizes
      merged_slots = {self._merging.slot_to_merged[slot]: None for slot in slot_to_id}
      merged_embeddings, bundle = self._table.lookup(merged_slots, bundle, pack)
    else:
      bundle["merged_slot_to_sizes"] = sizes = self._merging.sizes(slot_to_id)
      merged_embeddings, bundle = self._table.lookup(self._merge_ids(slot_to_id), bundle)
    # Where ids were reordered beforehand, the sizes are known without what the table passes on.
    sizes = bundle.pop("merged_slot_to_sizes", sizes)
    embeddings = self._split_embeddings(slot_to_id, merged_embeddings, sizes)
    return (embeddings, bundle) if bundle else embeddings

  def get_id_split(self, slot_to_id: SlotToIds) -> protocols.IdSplit | None:
    """Returns the merged ids, and what the inner group knows about them."""
    merged_ids = self._memo.find(slot_to_id)
    inner = None if merged_ids is None else self._table.get_id_split(merged_ids)
    return None if inner is None else {"merged_ids": merged_ids, "inner": inner}

  def set_id_split(self, slot_to_id: SlotToIds, id_split: protocols.IdSplit | None) -> None:
    """Tells what `get_id_split` returned for ids that have left a queue since."""
    if id_split is not None:
      self._memo.set(slot_to_id, id_split["merged_ids"])
      self._table.set_id_split(id_split["merged_ids"], id_split["inner"])

  def assign(self, slot_to_id_and_value: SlotToIdsAndValues) -> MergedMultiTypeHashTable:
    return self._with_table(self._table.assign(self._merge_pairs(slot_to_id_and_value)))

  def assign_add(self, slot_to_id_and_value: SlotToIdsAndValues) -> MergedMultiTypeHashTable:
    return self._with_table(self._table.assign_add(self._merge_pairs(slot_to_id_and_value)))

  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[MergedMultiTypeHashTable, tf.Tensor]:
    raise NotImplementedError("MergedMultiTypeHashTable dost not support reinitialize!")

  def apply_gradients(
    self,
    slot_to_id_and_grad: SlotToIdsAndValues | Mapping[str, tf.Tensor],
    *args: Any,
    **kwargs: Any,
  ) -> MergedMultiTypeHashTable:
    """Runs the optimizers; further arguments go to the inner group.

    Args:
      slot_to_id_and_grad: slot -> (ids, gradients); only gradients with `skip_merge_id=True`, for
        an inner group that knows the ids.
    """
    if kwargs.pop("skip_merge_id", False):
      merged, _ = self._merge_tensors(slot_to_id_and_grad)
    else:
      merged = self._merge_pairs(slot_to_id_and_grad)
    return self._with_table(self._table.apply_gradients(merged, *args, **kwargs))

  def as_op(self, name: str | None = None) -> tf.Operation:
    return self._table.as_op(name)

  def get_table_dim_sizes(self) -> list[int]:
    return [
      hash_table_utils.infer_dim_size(config.table_config)
      for _, config in sorted(self._merging.merged_to_config.items())
    ]

  def _merge_tensors(
    self, slot_to_tensor: Mapping[str, tf.Tensor], dtype: tf.DType | None = None
  ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Merges values or gradients where they are computed, on a GPU if there is one."""
    with device_utils.maybe_device_if_allowed("/device:GPU:0"):
      return self._merging.merge(slot_to_tensor, dtype)

  def _merge_ids(self, slot_to_id: SlotToIds) -> dict[str, tf.Tensor]:
    return self._memo.get(slot_to_id, lambda: self._merging.merge(slot_to_id, tf.int64)[0])

  def _merge_pairs(
    self, slot_to_pair: SlotToIdsAndValues
  ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    split = {slot: id_pairs.split_pair(pair) for slot, pair in slot_to_pair.items()}
    ids = self._merge_ids({slot: ids for slot, (ids, _) in split.items()})
    values, _ = self._merge_tensors(
      {slot: values for slot, (_, values) in split.items()}, tf.float32
    )
    return {name: (ids[name], values[name]) for name in ids}

  def _split_embeddings(
    self,
    requested: Mapping[str, Any],
    merged_embeddings: Mapping[str, tf.Tensor],
    merged_slot_to_sizes: Mapping[str, tf.Tensor],
  ) -> dict[str, tf.Tensor]:
    with device_utils.maybe_device_if_allowed("/device:GPU:0"):
      return self._merging.split(requested, merged_embeddings, merged_slot_to_sizes)

  def _with_table(self, table: BaseMultiTypeHashTable) -> MergedMultiTypeHashTable:
    updated = copy.copy(self)
    updated._table = table
    return updated


class SharedSlotHashTable(MergedMultiTypeHashTable):
  """Lets the features of a slot share the slot's table of an inner group.

  Args:
    slot_to_config: feature name -> configuration, equal for features that share a table.
    shared_tables: feature name -> table; the others have a table of their own name.
    factory: makes the inner group from table name -> configuration.
  """

  def __init__(
    self,
    slot_to_config: SlotToConfig,
    shared_tables: Mapping[str, str],
    factory: GroupFactory,
  ):
    self._set_merging(merging.SlotMerging.by_name(slot_to_config, shared_tables), factory)

  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[MergedMultiTypeHashTable, tf.Tensor]:
    table, status = self._table.reinitialize(self._merging.slot_to_merged.get(slot, slot), ids)
    return self._with_table(table), status
