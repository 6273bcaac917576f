"""Tables spread over parameter servers.

A worker's graph holds, for every server, ops that are pinned to it; TensorFlow moves the tensors.
On the way to the tables ids are de-duplicated, split by server and packed; embeddings come back the
same way. The server of an id is `distribution_ops.shard_of_ids`, signed floor modulo, everywhere.

Objects are handles of graph-building time: writing returns a new one, and what is built from it
runs after the write. Without servers (`num_ps` 0) tables live in this process.

Differences from ByteDance's Monolith: lookup and update of the same ids share one de-duplication,
whose result can travel through queues along with the ids; learning rates are computed once, on the
worker; 16-bit transfer does not give up native groups; `reinitialize` returns statuses in the order
of the ids.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from monolith.native_training import (
  distributed_serving_ops,
  distribution_ops,
  entry,
  hash_table_ops,
  hash_table_utils,
  multi_type_hash_table,
)
from monolith.native_training.graph import export_context
from monolith.native_training.tables import (
  id_pairs,
  id_sharding,
  id_splits,
  layout_config,
  layout_table,
  merging,
  protocols,
  ps_group,
  ps_transfer,
)

if TYPE_CHECKING:
  from typing_extensions import TypeAlias

remote_predict = distributed_serving_ops.remote_predict
ps_device = ps_transfer.ps_device
get_sub_table_name = layout_config.get_sub_table_name

Partition = int
TableName = str
Fids: TypeAlias = tf.Tensor
Emb: TypeAlias = tf.Tensor
EmbGrad: TypeAlias = tf.Tensor
FidEmbPair = tuple[Fids, Emb]
FidEmbGradPair = tuple[Fids, EmbGrad]
LookupData = dict[Partition, dict[TableName, Fids]]
UpdateData = dict[Partition, dict[TableName, FidEmbGradPair]]
AssignData = dict[Partition, dict[TableName, FidEmbPair]]
TableFactory = ps_group.TableFactory

# Widths of a feature's slices, how its ids are pooled, and its table.
FeatureInfo = collections.namedtuple("FeatureInfo", "slice_dims combiner sub_table")


def _remote_predict(*args: Any, **kwargs: Any) -> Sequence[tf.Tensor]:
  # Looked up with every call: this module is where tests replace it.
  return remote_predict(*args, **kwargs)


class DistributedHashTable(hash_table_ops.BaseHashTable):
  """One table over all servers.

  Args:
    ps_num: number of servers.
    config: the table's configuration.
    hash_table_factory: `(index of the server, config) -> table`.
  """

  def __init__(
    self,
    ps_num: int,
    config: entry.HashTableConfigInstance,
    hash_table_factory: Callable[[int, entry.HashTableConfigInstance], hash_table_ops.HashTable],
  ):
    self._ps_num = ps_num
    self._transfer = ps_transfer.PsTransfer(pinned=True, dims={})
    self._memo: id_splits.Memo[list[tf.Tensor]] = id_splits.Memo()
    self._hash_tables: list[hash_table_ops.HashTable] = []
    with ps_group.learning_rates({"": config}, {"": config.call_learning_rate_fns()}):
      for i in range(ps_num):
        with self._transfer.device(i):
          self._hash_tables.append(hash_table_factory(i, config))

  @property
  def dim_size(self) -> int:
    return self._hash_tables[0].dim_size

  def lookup(self, ids: tf.Tensor, use_multi_threads: bool = False) -> tf.Tensor:
    """Returns float32 `[n, dim]`, zeros for absent ids; `use_multi_threads` has no effect."""
    del use_multi_threads
    ids = tf.convert_to_tensor(ids, tf.int64)
    with tf.name_scope("dht_lu"):
      parts = self._unique_parts(ids)
      embeddings = []
      for i in range(self._ps_num):
        with tf.name_scope(f"ps_{i}"), self._transfer.device(i):
          embeddings.append(self._hash_tables[i].lookup(parts[i]))
      return distribution_ops.map_id_to_embedding(parts, embeddings, ids)

  def assign(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> DistributedHashTable:
    """Overwrites rows; of equal ids the last one wins. Returns the table after the write."""
    with tf.name_scope("dht_a"):
      return self._write("assign", ids, values, req_time)

  def assign_add(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> DistributedHashTable:
    """Adds to rows; the values of equal ids add up. Returns the table after the write."""
    with tf.name_scope("dht_aa"):
      return self._write("assign_add", ids, values, req_time)

  def apply_gradients(
    self,
    ids: tf.Tensor,
    grads: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> DistributedHashTable:
    """Runs the optimizers once per id, on the sum of its gradients.

    Args:
      ids: int64 `[n]`; need not be those that were looked up.
      grads: n * dim floats.
      global_step: int64 scalar.
      req_time: int64, seconds; 0 by default.

    Returns:
      The table after the write.
    """
    ids = tf.convert_to_tensor(ids, tf.int64)
    with tf.name_scope("dht_ag"):
      grads = tf.reshape(tf.convert_to_tensor(grads, tf.float32), [-1, self.dim_size])
      req_time = hash_table_utils.as_req_time(req_time)
      parts = self._unique_parts(ids)
      part_grads = distribution_ops.map_id_to_embedding_gradient_back_prop(parts, ids, grads)
      tables = []
      for i in range(self._ps_num):
        with tf.name_scope(f"ps_{i}"), self._transfer.device(i):
          tables.append(
            self._hash_tables[i].apply_gradients(
              parts[i],
              part_grads[i],
              global_step=global_step,
              enable_dedup=False,
              req_time=req_time,
            )
          )
      return self._with_tables(tables)

  def as_op(self, name: str | None = None) -> tf.Operation:
    name = name or "dht_ao"
    with tf.control_dependencies([table.as_op() for table in self._hash_tables]):
      return tf.no_op(name=f"{name}/done")

  def _unique_parts(self, ids: tf.Tensor) -> list[tf.Tensor]:
    return self._memo.get({"": ids}, lambda: id_splits.unique_parts(ids, self._ps_num))

  def _write(
    self, method: str, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None
  ) -> DistributedHashTable:
    ids = tf.convert_to_tensor(ids, tf.int64)
    values = tf.reshape(tf.convert_to_tensor(values, tf.float32), [-1, self.dim_size])
    req_time = hash_table_utils.as_req_time(req_time)
    shards = distribution_ops.shard_of_ids(ids, self._ps_num)
    id_parts = distribution_ops.split_by_indices(shards, ids, self._ps_num)
    value_parts = distribution_ops.split_by_indices(shards, values, self._ps_num)
    tables = []
    for i in range(self._ps_num):
      with self._transfer.device(i):
        write = getattr(self._hash_tables[i], method)
        tables.append(write(id_parts[i], value_parts[i], req_time=req_time))
    return self._with_tables(tables)

  def _with_tables(self, tables: list[hash_table_ops.HashTable]) -> DistributedHashTable:
    updated = copy.copy(self)
    updated._hash_tables = tables
    return updated


class DistributedMultiTypeHashTable(multi_type_hash_table.BaseMultiTypeHashTable):
  """Tables of many slots; every server holds its part of all of them.

  If every server's group is a `RawMultiTypeHashTable`, ids of all slots travel as one vector and
  embeddings as another; otherwise as packed dicts.

  Args:
    num_ps: number of servers.
    slot_to_config: slot name -> configuration.
    table_factory: `(index of the server, slot_to_config) -> group of tables`.
    transfer_float16: send embeddings and gradients with 16 bits.
    max_rpc_deadline_millis: deadline of remote lookups in an export.
  """

  def __init__(
    self,
    num_ps: int,
    slot_to_config: Mapping[str, entry.HashTableConfigInstance],
    table_factory: TableFactory,
    transfer_float16: bool = False,
    max_rpc_deadline_millis: int = 30,
  ):
    self._num_ps = num_ps
    self._slot_to_config = slot_to_config
    # For all slots of a lookup with native tables, else for each slot.
    self._raw_memo: id_splits.Memo[id_splits.RawSplit] = id_splits.Memo()
    self._memo: id_splits.Memo[list[tf.Tensor]] = id_splits.Memo()
    self._set_group(
      ps_group.PsGroup(
        num_ps,
        slot_to_config,
        table_factory,
        ps_transfer.PsTransfer(
          pinned=True,
          dims={
            slot: hash_table_utils.infer_dim_size(config.table_config)
            for slot, config in slot_to_config.items()
          },
          float16=transfer_float16,
        ),
        _remote_predict,
        max_rpc_deadline_millis,
      )
    )

  def _set_group(self, group: ps_group.PsGroup) -> None:
    self._group = group
    # Where `get_queue_hooks` looks.
    self._tables = group.tables

  def lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]`, zeros for absent ids.

    Slots without a table are ignored by native tables; others raise a `KeyError`.
    """
    slot_to_id = {slot: tf.convert_to_tensor(ids, tf.int64) for slot, ids in slot_to_id.items()}
    with tf.name_scope("dmtht_lu"):
      if self._group.is_raw:
        return self._raw_lookup(slot_to_id)
      return self._packed_lookup(slot_to_id)

  def assign(self, slot_to_id_and_value: Mapping[str, Any]) -> DistributedMultiTypeHashTable:
    """Overwrites rows; of equal ids the last one wins. Returns the tables after the write."""
    with tf.name_scope("dmtht_a"):
      return self._write(
        slot_to_id_and_value, lambda table, pairs: table.assign(pairs), op="assign"
      )

  def assign_add(self, slot_to_id_and_value: Mapping[str, Any]) -> DistributedMultiTypeHashTable:
    """Adds to rows; the values of equal ids add up. Returns the tables after the write."""
    with tf.name_scope("dmtht_aa"):
      return self._write(
        slot_to_id_and_value, lambda table, pairs: table.assign_add(pairs), op="assign_add"
      )

  def reinitialize(
    self, slot: str, ids: tf.Tensor
  ) -> tuple[DistributedMultiTypeHashTable, tf.Tensor]:
    """Resets the rows of `ids`, creating absent ones.

    Returns:
      The tables after the write and an int32 status per id, in the order of the ids: 1 existed,
      0 was inserted, -1 the slot is unknown and nothing was done.

    Raises:
      NotImplementedError: the tables are not native ones.
    """
    if not self._group.is_raw:
      raise NotImplementedError("DistributedMultiTypeHashTable dost not support reinitialize!")
    ids = tf.convert_to_tensor(ids, tf.int64)
    with tf.name_scope("dmtht_reinit"):
      shards = distribution_ops.shard_of_ids(ids, self._num_ps)
      id_parts = distribution_ops.split_by_indices(shards, ids, self._num_ps)
      positions = distribution_ops.split_by_indices(
        shards, tf.range(tf.size(ids, out_type=tf.int64)), self._num_ps
      )
      tables, statuses = [], []
      for i in range(self._num_ps):
        with self._group.transfer.device(i):
          table, status = self._group.tables[i].reinitialize(slot, id_parts[i])
        tables.append(table)
        statuses.append(status)
      status = tf.dynamic_stitch([tf.cast(p, tf.int32) for p in positions], statuses)
      return self._with_tables(tables), status

  def apply_gradients(
    self,
    slot_to_id_and_grad: Mapping[str, Any],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> DistributedMultiTypeHashTable:
    """Runs the optimizers once per slot and id, on the sum of the id's gradients.

    Args:
      slot_to_id_and_grad: slot -> (ids, gradients).
      global_step: int64 scalar.
      req_time: int64, seconds; 0 by default.

    Returns:
      The tables after the write.
    """
    slot_to_pair = {slot: id_pairs.split_pair(pair) for slot, pair in slot_to_id_and_grad.items()}
    req_time = hash_table_utils.as_req_time(req_time)
    with tf.name_scope("dmtht_ag"):
      if self._group.is_raw:
        return self._raw_apply_gradients(slot_to_pair, global_step, req_time)
      return self._packed_apply_gradients(slot_to_pair, global_step, req_time)

  def as_op(self, name: str | None = None) -> tf.Operation:
    return self._group.as_op(name or "dmtht_ao")

  def get_id_split(self, slot_to_id: Mapping[str, tf.Tensor]) -> protocols.IdSplit | None:
    """Returns the distinct ids of each server, as the lookup of these tensors worked them out."""
    if self._group.is_raw:
      split = self._raw_memo.find(slot_to_id)
      return None if split is None else {"raw": split}
    slot_to_parts = {slot: self._memo.find({slot: ids}) for slot, ids in slot_to_id.items()}
    known = {slot: parts for slot, parts in slot_to_parts.items() if parts is not None}
    return {"parts": known} if known else None

  def set_id_split(
    self, slot_to_id: Mapping[str, tf.Tensor], id_split: protocols.IdSplit | None
  ) -> None:
    """Tells what `get_id_split` returned for ids that have left a queue since."""
    if id_split is None:
      return
    if "raw" in id_split:
      self._raw_memo.set(slot_to_id, id_splits.RawSplit(*id_split["raw"]))
    for slot, parts in id_split.get("parts", {}).items():
      self._memo.set({slot: slot_to_id[slot]}, parts)

  def get_table_dim_sizes(self) -> list[int]:
    """Returns the tables' dimensions, by sorted name."""
    return self._group.get_table_dim_sizes()

  def _split_raw(
    self, slot_to_id: Mapping[str, tf.Tensor], generate_buffer: bool
  ) -> tuple[tf.RaggedTensor, id_splits.RawSplit, tf.Tensor]:
    ragged_id = self._group.raw_table(0).get_ragged_id(slot_to_id)
    split, buffer = id_splits.split_ragged(
      ragged_id, self.get_table_dim_sizes(), self._num_ps, generate_buffer
    )
    return ragged_id, split, buffer

  def _raw_lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    if not export_context.is_exporting():
      return self._spread_lookup(slot_to_id)
    dims = self.get_table_dim_sizes()
    # A buffer serves one lookup; a later update of the same ids uses the rest.
    ragged_id, split, buffer = self._split_raw(slot_to_id, generate_buffer=True)
    self._raw_memo.set(slot_to_id, split)
    filled, timers = [], []
    for i in range(self._num_ps):
      flat, timer = self._group.raw_lookup(i, split.ids[i], op="dmtht_lu")
      timers += timer
      filled.append(
        distribution_ops.fill_with_offset_map(
          split.positions_on(i), flat, split.offsets, buffer, dims
        )
      )
    with tf.control_dependencies(timers):
      flat = distribution_ops.finalize_shared_tensor(filled, dtype=tf.float32, shape=[None])
    return self._select(slot_to_id, self._group.raw_table(0).get_embeddings(ragged_id, flat))

  def _spread_lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    ragged_id, split, _ = self._split_raw(slot_to_id, generate_buffer=False)
    self._raw_memo.set(slot_to_id, split)
    rows, timers = [], []
    for i in range(self._num_ps):
      flat, timer = self._group.raw_lookup(i, split.ids[i], op="dmtht_lu")
      timers += timer
      rows.append(flat)
    with tf.control_dependencies(timers):
      embeddings = split.spread(rows, ragged_id.row_splits, self.get_table_dim_sizes())
    return self._select(slot_to_id, dict(zip(sorted(self._dims), embeddings)))

  def _select(
    self, slot_to_id: Mapping[str, tf.Tensor], slot_to_embedding: Mapping[str, tf.Tensor]
  ) -> dict[str, tf.Tensor]:
    """Returns the embeddings of the slots that were asked for, as far as they have a table."""
    result = {}
    for slot, ids in slot_to_id.items():
      if slot not in slot_to_embedding:
        continue
      result[slot] = slot_to_embedding[slot]
      # As a list: with v1 behaviour `shape[i]` is never `None`, nor an int.
      length = ids.shape.as_list() if ids.shape.rank == 1 else [None]
      if length != [None]:
        result[slot] = tf.reshape(result[slot], [*length, self._dims[slot]])
    return result

  def _unique_parts(self, slot: str, ids: tf.Tensor) -> list[tf.Tensor]:
    return self._memo.get({slot: ids}, lambda: id_splits.unique_parts(ids, self._num_ps))

  def _packed_lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    slot_to_id = self._known_slots(slot_to_id)
    slot_to_parts = {slot: self._unique_parts(slot, ids) for slot, ids in slot_to_id.items()}
    answers = [
      self._group.lookup(
        i, {slot: parts[i] for slot, parts in slot_to_parts.items()}, op="dmtht_lu"
      )
      for i in range(self._num_ps)
    ]
    return {
      slot: distribution_ops.map_id_to_embedding(
        slot_to_parts[slot], [answer[slot] for answer in answers], ids
      )
      for slot, ids in slot_to_id.items()
    }

  def _write(
    self,
    slot_to_pair: Mapping[str, Any],
    update_fn: Callable[[Any, dict[str, Any]], Any],
    op: str,
  ) -> DistributedMultiTypeHashTable:
    """Splits ids and values, which keep their order, and updates every server."""
    parts: list[dict[str, FidEmbPair]] = [{} for _ in range(self._num_ps)]
    for slot, pair in self._known_slots(slot_to_pair).items():
      ids, values = id_pairs.split_pair(pair)
      values = self._rows(slot, values)
      shards = distribution_ops.shard_of_ids(ids, self._num_ps)
      id_parts = distribution_ops.split_by_indices(shards, ids, self._num_ps)
      value_parts = distribution_ops.split_by_indices(shards, values, self._num_ps)
      for i in range(self._num_ps):
        parts[i][slot] = (id_parts[i], value_parts[i])
    return self._with_tables(
      [self._group.update(i, parts[i], update_fn, op) for i in range(self._num_ps)]
    )

  def _raw_apply_gradients(
    self, slot_to_pair: Mapping[str, FidEmbGradPair], global_step: tf.Tensor, req_time: tf.Tensor
  ) -> DistributedMultiTypeHashTable:
    slot_to_id = {slot: pair[0] for slot, pair in slot_to_pair.items()}
    split = self._raw_memo.get(
      slot_to_id, lambda: self._split_raw(slot_to_id, generate_buffer=False)[1]
    )
    nothing = tf.zeros([0], tf.float32)
    sums = split.sum(
      [
        tf.convert_to_tensor(slot_to_pair[name][1], tf.float32) if name in slot_to_pair else nothing
        for name in sorted(self._dims)
      ],
      self.get_table_dim_sizes(),
    )
    return self._with_tables(
      [
        self._group.raw_update(i, split.ids[i], sums[i], global_step, req_time, op="dmtht_ag")
        for i in range(self._num_ps)
      ]
    )

  def _packed_apply_gradients(
    self, slot_to_pair: Mapping[str, FidEmbGradPair], global_step: tf.Tensor, req_time: tf.Tensor
  ) -> DistributedMultiTypeHashTable:
    parts: list[dict[str, FidEmbGradPair]] = [{} for _ in range(self._num_ps)]
    for slot, (ids, grads) in self._known_slots(slot_to_pair).items():
      id_parts = self._unique_parts(slot, ids)
      grad_parts = distribution_ops.map_id_to_embedding_gradient_back_prop(
        id_parts, ids, self._rows(slot, grads)
      )
      for i in range(self._num_ps):
        parts[i][slot] = (id_parts[i], grad_parts[i])
    return self._with_tables(
      [
        self._group.update(
          i,
          parts[i],
          lambda table, pairs: table.apply_gradients(pairs, global_step, req_time=req_time),
          op="dmtht_ag",
          float16=self._group.transfer.float16,
        )
        for i in range(self._num_ps)
      ]
    )

  @property
  def _dims(self) -> Mapping[str, int]:
    return self._group.transfer.dims

  def _rows(self, slot: str, values: Any) -> tf.Tensor:
    return tf.reshape(tf.convert_to_tensor(values, tf.float32), [-1, self._dims[slot]])

  def _known_slots(self, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the slots that have a table; native tables ignore the others."""
    known = merging.known_slots(slots, self._dims)
    if not self._group.is_raw and len(known) < len(slots):
      unknown = next(slot for slot in slots if slot not in known)
      raise KeyError(f"there is no table for slot {unknown}, only {sorted(self._dims)}")
    return known

  def _with_tables(self, tables: Sequence[Any]) -> DistributedMultiTypeHashTable:
    updated = copy.copy(self)
    updated._set_group(self._group.with_tables(tables))
    return updated


class PartitionedHashTable(layout_table.LayoutHashTable):
  """The tables of a fused-layout run, on servers or in this process.

  Args:
    num_ps: number of servers; 0 for tables in this process.
    table_factory: `(index of the server, table name -> configuration) -> group of tables`.
    use_native_multi_hash_table: as in `gen_feature_configs`, whose result wins.
    max_rpc_deadline_millis: deadline of remote lookups in an export.
    queue_configs: capacities of the queues between ranks; servers have none.
    parser_ctx: holds `sharding_sparse_fids_op_params`; the innermost context by default.
    enable_grad_accumulation: of ranks: add the gradients of an id up over all of them, instead of
      one step per rank.

  Raises:
    AssertionError: the parameters have `enable_gpu_emb`, and there are not `num_ps` ranks.
    ValueError: the parser context has no parameters, or those of another number of servers.
  """

  def __init__(
    self,
    num_ps: int,
    table_factory: TableFactory,
    use_native_multi_hash_table: bool,
    max_rpc_deadline_millis: int = 30,
    queue_configs: dict[str, int] | None = None,
    parser_ctx: id_sharding.ParserCtx | None = None,
    *,
    enable_grad_accumulation: bool = False,
  ):
    super().__init__(
      num_ps,
      table_factory,
      use_native_multi_hash_table,
      max_rpc_deadline_millis,
      queue_configs,
      parser_ctx,
      enable_grad_accumulation=enable_grad_accumulation,
      remote_predict=_remote_predict,
    )
