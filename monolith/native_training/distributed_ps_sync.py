"""Tables whose rows are spread over the ranks of synchronous training.

Rank n owns the ids that `distribution_ops.fused_reorder_by_indices` gives to shard n. A step moves
the ids of a batch to their owners, the rows back, and the gradients to the owners again:

    S0  input pipeline   ids of all tables, distinct, by shard and table
    S1  all-to-all       ids and their numbers, to the owners
    S2  fused lookup     rows, by asking rank and table
        [Q1]
    S3  all-to-all       rows, to who asked
        [Q2]
    S4  gather           rows of each slot's ids, in the order of the batch
         model           forward and backward
    S5  gradient of S4   gradients of equal ids added up
        [Q3]
    S6  all-to-all       gradients, to the owners
        [Q4]
    S7  fused update     one optimizer step per id and rank that sent it

A queue is there if its capacity in `queue_configs` is not 0. What is before Q1 and Q2 runs ahead of
the step, on rows that lack the updates of the steps in between; what is behind Q3 or Q4 runs during
the next step. Everything else of a batch travels through the same queues.

No rank has to be asked for a size: the floats a rank receives in S3 follow from what it asked for,
and those of S6 from what it was asked.

A fused layout takes the same way with another S0, S4 and S5: what is between them is in
`lookup_flat` and `apply_flat`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags, logging

from monolith.native_training import (
  device_utils,
  distribution_ops,
  env_utils,
  gflags_utils,
  hash_table_utils,
  hvd_lib,
  multi_type_hash_table,
  prefetch_queue,
)
from monolith.native_training.ranks import agreement as sync_agreement
from monolith.native_training.ranks import pipeline_hooks as sync_pipeline_hooks
from monolith.native_training.tables import protocols, queue_hooks, step_order

flags.DEFINE_bool(
  "enable_alltoall_metrics", False, "Whether to write summaries of what the ranks exchange."
)
flags.DEFINE_string(
  "enable_alltoall_metrics_for_slot", None, "A slot whose number of ids is in those summaries."
)

# Tensors of a batch that S7 needs beside the gradients.
_UPDATE_KEYS = (
  "id_flat_t",
  "indices",
  "id_size_flat_t",
  "id_offsets",
  "emb_offsets",
)
_CONSUMED_KEYS = (
  *_UPDATE_KEYS,
  "shard_sizes",
  "fused_embedding_offsets",
  "embedding_splits",
  "recv_emb_splits",
  "recv_embeddings_size",
)

_GPU = "/device:GPU:0"

Bundle = protocols.Bundle


class DistributedMultiTypeHashTableMpi(queue_hooks.QueueHooks):
  """One shard of tables, and the way to the others.

  Args:
    shard_num: number of ranks; 0 for a process alone, which is no rank and exchanges nothing.
    table_factory: makes the tables of a rank; called with this one's.
    queue_configs: capacities of the queues, 0 by default: `enable_pipelined_fwda2a` (Q1),
      `embedding_prefetch_capacity` (Q2), `enable_async_optimize` (Q3), `enable_pipelined_bwda2a`
      (Q4).
    enable_grad_accumulation: add up the gradients of an id over all ranks before the optimizer
      step, instead of one step per rank in the order of the ranks.
    transfer_float16: exchange rows (S3) and gradients (S6) with 16 bits. A process alone rounds
      them, too, so that it trains as ranks do.

  Raises:
    AssertionError: `shard_num` is not the number of ranks.
  """

  def __init__(
    self,
    shard_num: int,
    table_factory: Callable[[int], protocols.FusedGroup],
    queue_configs: dict[str, int] | None = None,
    *,
    enable_grad_accumulation: bool = False,
    transfer_float16: bool = False,
  ):
    self._is_alone = shard_num == 0
    if not self._is_alone:
      hvd_lib.check_size(shard_num, "shard_num")
    self._shard_num = max(shard_num, 1)
    self._rank = 0 if self._is_alone else hvd_lib.rank()
    self._table = table_factory(self._rank)
    self._output_dims = list(self._table.get_table_dim_sizes())
    self._queue_configs = dict(queue_configs or {})
    self._enable_grad_accumulation = enable_grad_accumulation
    self._transfer_float16 = transfer_float16
    self._slots: list[str] | None = None
    self._dependency_ops: list[tf.Operation] = []
    # Shared by the copies that updates return, so that all see the hooks.
    self._local_queue_hooks: list[queue_hooks.QueueHook] = []

  def lookup(
    self,
    slot_to_id: Mapping[str, Any],
    auxiliary_bundle: Bundle,
    early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
  ) -> tuple[dict[str, tf.Tensor], Bundle]:
    """Looks up the ids that the input pipeline has reordered.

    Args:
      slot_to_id: only the names count, one per table.
      auxiliary_bundle: what else belongs to the batch and has to stay with it.
      early_reorder_indicies_res_pack: what `fused_reorder_by_indices` returned, and the time of the
        request (int64 scalar, or `None` for 0).

    Returns:
      Slot -> float32 `[ids, dim]` of all ids including equal ones, and the bundle as it leaves the
      queues, with what `apply_gradients` needs. Use this one from here on.

    Raises:
      AssertionError: the ids were not reordered.
      ValueError: not as many slots as tables.
    """
    assert (
      early_reorder_indicies_res_pack is not None
    ), "Support for reorder_fids_in_data_pipeline=False is dropped. Please set it to True"
    slots = sorted(slot_to_id)
    if len(slots) != len(self._output_dims):
      raise ValueError(f"slot_to_id has {len(slots)} slots, want {len(self._output_dims)}: {slots}")
    self._slots = slots
    fids, shard_sizes, slot_sizes, emb_offset_sz, fused_offsets, req_time = (
      early_reorder_indicies_res_pack
    )
    with tf.device("/device:CPU:0"):
      offsets = tf.split(fused_offsets, emb_offset_sz, num=len(slots))
    bundle = self.lookup_flat(
      {**auxiliary_bundle, "fused_embedding_offsets": offsets, "emb_offset_sz": emb_offset_sz},
      fids,
      shard_sizes,
      slot_sizes,
      req_time,
      int(self._queue_configs.get("embedding_prefetch_capacity", 0)),
    )
    recv_embeddings = bundle.pop("recv_embeddings")
    self.add_summaries(slots, bundle)
    with device_utils.maybe_device_if_allowed(_GPU):
      embeddings = distribution_ops.fused_gather_embeddings_by_input(
        recv_embeddings, bundle["fused_embedding_offsets"], self._output_dims
      )
    return dict(zip(slots, embeddings)), bundle

  def lookup_flat(
    self,
    auxiliary_bundle: Bundle,
    fids: tf.Tensor,
    shard_sizes: tf.Tensor,
    slot_sizes: tf.Tensor,
    req_time: tf.Tensor | None,
    prefetch_capacity: int,
  ) -> Bundle:
    """Does S1 to S3, with the queues among them.

    Args:
      auxiliary_bundle: what else belongs to the batch; left alone.
      fids: int64, the ids of all tables, by rank and then by table.
      shard_sizes: int32 `[ranks]`, how many of them are for each rank.
      slot_sizes: int32 `[ranks * tables]`, how many of these are for each table.
      req_time: int64 scalar, or `None` for 0.
      prefetch_capacity: of Q2.

    Returns:
      The bundle as it leaves the queues, with what `apply_flat` needs, and `recv_embeddings`:
      float32, the rows of `fids` in their order.
    """
    bundle = self._lookup_shard(dict(auxiliary_bundle), fids, shard_sizes, slot_sizes, req_time)
    fwd_capacity = int(self._queue_configs.get("enable_pipelined_fwda2a", 0))
    is_last = None
    if sync_agreement.EOF_KEY in bundle and (fwd_capacity or prefetch_capacity):
      # The ranks must agree to stop before one waits in vain for another that has no data.
      is_last = self._any_rank(bundle[sync_agreement.EOF_KEY])
    queues = []
    bundle, queue = prefetch_queue.enqueue_dicts_with_queue_return(
      bundle, capacity=fwd_capacity, queue_name="queue_lookup_to_fusedEmbA2A"
    )
    if queue is not None:
      queues.append((queue, fwd_capacity))
    with self._exchange_device("FWD"):
      recv_embeddings = self._exchange_floats(
        bundle.pop("fused_embeddings"), bundle["embedding_splits"], "fused_embedding_alltoall"
      )
    # Moved before the queue, which then keeps batches on the GPU until the gather reads them.
    with device_utils.maybe_device_if_allowed(_GPU):
      bundle["recv_embeddings"] = tf.identity(recv_embeddings)
    bundle, queue = prefetch_queue.enqueue_dicts_with_queue_return(
      bundle, capacity=prefetch_capacity, queue_name="queue_fusedEmbA2A_to_fusedGather"
    )
    if queue is not None:
      queues.append((queue, prefetch_capacity))
    self._add_enqueue_hooks(queues, bundle["shard_sizes"].op, is_last)
    return bundle

  def apply_gradients(
    self,
    slot_to_grad: Mapping[str, tf.Tensor],
    auxiliary_bundle: Bundle,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
    scale: tf.Tensor | float = 1,
  ) -> DistributedMultiTypeHashTableMpi:
    """Updates the rows of a lookup.

    Args:
      slot_to_grad: slot -> gradient of what `lookup` returned; zeros for slots that are missing.
      auxiliary_bundle: what `lookup` returned; what the update needs is taken out of it.
      global_step: int64 scalar, the step of the batch.
      req_time: int64 scalar, 0 by default.
      scale: multiplies all gradients.

    Returns:
      The table after the update; with Q3 or Q4 this one, whose `as_op` then hands the update over.

    Raises:
      ValueError: a slot was not looked up.
    """
    bundle = {key: auxiliary_bundle.pop(key) for key in _CONSUMED_KEYS}
    grads = self._sort_gradients(slot_to_grad, bundle["fused_embedding_offsets"])
    # The dense all-reduce is issued before the next exchange, in the same order on all ranks.
    gpu = device_utils.maybe_device_if_allowed(_GPU)
    with tf.control_dependencies(step_order.control_ops()), gpu:
      grad_flat = distribution_ops.fused_gather_embeddings_by_input_gradient(
        bundle["recv_embeddings_size"],
        grads,
        bundle["fused_embedding_offsets"],
        self._output_dims,
        scale,
      )
    return self.apply_flat(grad_flat, bundle, global_step, req_time)

  def apply_flat(
    self,
    grad_flat: tf.Tensor,
    auxiliary_bundle: Bundle,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> DistributedMultiTypeHashTableMpi:
    """Does S6 and S7, with the queues around them.

    Args:
      grad_flat: float32, the gradient of `recv_embeddings`.
      auxiliary_bundle: what `lookup_flat` returned; left alone.
      global_step: int64 scalar, the step of the batch.
      req_time: int64 scalar, 0 by default.

    Returns:
      What `apply_gradients` returns.
    """
    update = {key: auxiliary_bundle[key] for key in (*_UPDATE_KEYS, "recv_emb_splits")}
    update["global_step"] = tf.identity(tf.cast(global_step, tf.int64))
    update["req_time"] = tf.identity(hash_table_utils.as_req_time(req_time))
    update["grad_flat"] = grad_flat

    update, push_queue = prefetch_queue.enqueue_dicts_with_queue_return(
      update,
      capacity=int(self._queue_configs.get("enable_async_optimize", 0)),
      queue_name="queue_fusedGatherGrad_to_fusedEmbGradA2A",
    )
    with _detached(push_queue is not None), self._exchange_device("BWD"):
      update["grad_flat_t"] = self._exchange_floats(
        update.pop("grad_flat"), update.pop("recv_emb_splits"), "fused_embedding_gradient_alltoall"
      )
    with _detached(push_queue is not None):
      update, update_queue = prefetch_queue.enqueue_dicts_with_queue_return(
        update,
        capacity=int(self._queue_configs.get("enable_pipelined_bwda2a", 0)),
        queue_name="queue_fusedEmbGradA2A_to_sparseOptimize",
      )
    first_queue = push_queue or update_queue
    if first_queue is None:
      with tf.control_dependencies(step_order.dense_opt_ops()):
        return self._update_shard(update)
    # In a run of its own the update would make the dense update, and all before it, run again.
    with _detached(True):
      update_op = self._update_shard(update).as_op()
    self._add_push_hooks(push_queue, update_queue, update_op, first_queue.enqueue_op)
    self._dependency_ops.append(first_queue.enqueue_op)
    return self

  def write_shards(
    self,
    names: Sequence[str],
    shards: Sequence[Mapping[str, tuple[tf.Tensor, tf.Tensor]]],
    write_fn: Callable[[Any, dict[str, tuple[tf.Tensor, tf.Tensor]]], Any],
    op: str,
  ) -> DistributedMultiTypeHashTableMpi:
    """Sends rows to the ranks that own them, where those of all ranks are written.

    All ranks have to run it together. Those of rank 0 come first, so that of rows that several
    ranks assign the one of the last rank stays.

    Args:
      names: the tables, sorted.
      shards: for each rank, table -> (int64 ids, float32 `[ids, dim]`); tables may be missing.
      write_fn: `(group, table -> (ids, values)) -> group after the write`.
      op: prefix of the names of exchanges.

    Returns:
      The table after the write.
    """
    received = shards[0] if self._is_alone else self._exchange_rows(names, shards, op)
    updated = copy.copy(self)
    with tf.device("/device:CPU:0"):
      updated._table = write_fn(self._table, dict(received))
    updated._dependency_ops = []
    return updated

  def assign(self, slot_to_id_and_value: Any) -> DistributedMultiTypeHashTableMpi:
    raise NotImplementedError("DistributedMultiTypeHashTableMpi does not support assign!")

  def assign_add(self, slot_to_id_and_value: Any) -> DistributedMultiTypeHashTableMpi:
    raise NotImplementedError("DistributedMultiTypeHashTableMpi does not support assign_add!")

  def reinitialize(self, slot: str, ids: tf.Tensor) -> Any:
    raise NotImplementedError("DistributedMultiTypeHashTableMpi dost not support reinitialize!")

  def _update(self, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("DistributedMultiTypeHashTableMpi does not support _update!")

  def as_op(self, name: str | None = None) -> tf.Operation:
    name = name or "mpi_mtht_ao"
    with tf.control_dependencies([*self._dependency_ops, self._table.as_op()]):
      return tf.no_op(name=f"{name}/done")

  def get_table_dim_sizes(self) -> list[int]:
    return self._output_dims

  def _all_to_all(self, tensor: tf.Tensor, splits: Any, name: str) -> tf.Tensor:
    return tensor if self._is_alone else hvd_lib.alltoall(tensor, splits, name=name)

  def _exchange_floats(self, tensor: tf.Tensor, splits: Any, name: str) -> tf.Tensor:
    """Exchanges rows or gradients, with 16 bits if they are to travel so."""
    if not self._transfer_float16:
      return self._all_to_all(tensor, splits, name)
    halves = tf.cast(tensor, tf.float16, name=f"{name}_send_CastToFloat16")
    halves = self._all_to_all(halves, splits, name)
    return tf.cast(halves, tf.float32, name=f"{name}_recv_CastToFloat32")

  def _exchange_rows(
    self,
    names: Sequence[str],
    shards: Sequence[Mapping[str, tuple[tf.Tensor, tf.Tensor]]],
    op: str,
  ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Returns what all ranks send to this one: table -> (ids, values), by sender."""
    # Exchanges are matched by name, and a graph may write more than once.
    op = tf.compat.v1.get_default_graph().unique_name(op).replace("/", "_")
    num_tables = len(names)
    with tf.device("/device:CPU:0"):
      ids, values = [], []
      for shard in shards:
        for name, dim in zip(names, self._output_dims):
          nothing = (tf.zeros([0], tf.int64), tf.zeros([0, dim]))
          own_ids, own_values = shard.get(name, nothing)
          ids.append(own_ids)
          values.append(tf.reshape(own_values, [-1]))
      dims = tf.constant(self._output_dims, tf.int32)
      sizes = tf.stack([tf.size(own_ids) for own_ids in ids])
      by_rank = tf.reshape(sizes, [self._shard_num, num_tables])
      tables = [num_tables] * self._shard_num
      sizes = hvd_lib.alltoall(sizes, tables, name=f"{op}_size_alltoall")
      all_ids = hvd_lib.alltoall(
        tf.concat(ids, axis=0), tf.reduce_sum(by_rank, axis=1), name=f"{op}_id_alltoall"
      )
      all_values = hvd_lib.alltoall(
        tf.concat(values, axis=0),
        tf.reduce_sum(by_rank * dims, axis=1),
        name=f"{op}_value_alltoall",
      )
      num_parts = self._shard_num * num_tables
      ids = tf.split(all_ids, sizes, num=num_parts)
      values = tf.split(all_values, sizes * tf.tile(dims, [self._shard_num]), num=num_parts)
      return {
        name: (
          tf.concat(ids[i::num_tables], axis=0),
          tf.reshape(tf.concat(values[i::num_tables], axis=0), [-1, dim]),
        )
        for i, (name, dim) in enumerate(zip(names, self._output_dims))
      }

  def _exchange_device(self, stage: str) -> contextlib.AbstractContextManager:
    """Returns the scope of the all-to-all of `stage` (`FID`, `FWD`, `BWD`): the GPU if allowed.

    A Horovod that was built without GPU support has no kernels there, so it exchanges on the CPU.
    """
    use_gpu = env_utils.get_bool(f"MONOLITH_WITH_HOROVOD_{stage}_G2G", default=True)
    use_gpu = use_gpu and (self._is_alone or hvd_lib.has_gpu_kernels())
    return device_utils.maybe_device_if_allowed(_GPU if use_gpu else "/device:CPU:0")

  def _any_rank(self, flag: tf.Tensor) -> tf.Tensor:
    """Returns an int32 scalar that is not 0 if the flag of some rank is not."""
    flag = tf.reduce_max(tf.cast(tf.reshape(flag, [-1]), tf.int32), keepdims=True)
    if not self._is_alone:
      flag = hvd_lib.allgather(flag, name="lookup_eof_allgather")
    return tf.reduce_max(flag)

  def _lookup_shard(
    self,
    bundle: Bundle,
    fids: tf.Tensor,
    shard_sizes: tf.Tensor,
    slot_sizes: tf.Tensor,
    req_time: tf.Tensor | None,
  ) -> Bundle:
    """Does S1 and S2; returns the bundle with their results."""
    num_tables = len(self._output_dims)
    with self._exchange_device("FID"):
      id_flat_t = self._all_to_all(fids, shard_sizes, "fid_alltoall")
      id_size_flat_t = self._all_to_all(
        slot_sizes, [num_tables] * self._shard_num, "fid_size_alltoall"
      )
    id_size_flat_t.set_shape([self._shard_num * num_tables])
    with tf.device("/device:CPU:0"):
      fused_embeddings, embedding_splits, id_offsets, emb_offsets, indices = (
        self._table.fused_lookup(
          id_flat_t, id_size_flat_t, self._shard_num, hash_table_utils.as_req_time(req_time)
        )
      )
      sizes = tf.reshape(slot_sizes, [self._shard_num, num_tables])
      recv_emb_splits = tf.reduce_sum(sizes * tf.constant(self._output_dims, tf.int32), axis=1)
      bundle.update(
        shard_sizes=shard_sizes,
        id_flat_t=id_flat_t,
        id_size_flat_t=id_size_flat_t,
        fused_embeddings=fused_embeddings,
        embedding_splits=embedding_splits,
        id_offsets=id_offsets,
        emb_offsets=emb_offsets,
        indices=indices,
        recv_emb_splits=recv_emb_splits,
        recv_embeddings_size=tf.reduce_sum(recv_emb_splits),
      )
    if gflags_utils.read_flag("enable_alltoall_metrics", False):
      bundle["sharded_slot_sizes"] = slot_sizes
    return bundle

  def _add_enqueue_hooks(
    self,
    queues: list[tuple[Any, int]],
    consumer: tf.Operation,
    is_last: tf.Tensor | None,
  ) -> None:
    """Adds the hooks of Q1 and Q2, of which the first reads the data."""
    ahead = sum(capacity for _, capacity in queues)
    for queue, capacity in queues:
      self.add_queue_hook(sync_pipeline_hooks.LockstepEnqueueHook(queue, ahead, consumer, is_last))
      # The source of Q2 ends when Q1 is closed.
      ahead, is_last = ahead - capacity, None

  def _add_push_hooks(
    self,
    push_queue: prefetch_queue._MultiFIFOQueue | None,
    update_queue: prefetch_queue._MultiFIFOQueue | None,
    update_op: tf.Operation,
    filler: tf.Operation,
  ) -> None:
    """Adds the hooks that work on Q3 and Q4 during the next step; `filler` fills the first."""
    update_hook = None
    if update_queue is not None:
      update_hook = sync_pipeline_hooks.LockstepPushHook(update_queue, update_op, filler)
    if push_queue is None:
      self.add_queue_hook(update_hook)
      return
    ops = update_op if update_queue is None else update_queue.enqueue_op
    self.add_queue_hook(
      sync_pipeline_hooks.LockstepPushHook(push_queue, ops, filler, next_hook=update_hook)
    )
    if update_hook is not None:
      self.add_queue_hook(update_hook)

  def _sort_gradients(
    self, slot_to_grad: Mapping[str, tf.Tensor], offsets: list[tf.Tensor]
  ) -> list[tf.Tensor]:
    """Returns one gradient per table, in their order."""
    slots = sorted(slot_to_grad) if self._slots is None else self._slots
    unknown = sorted(set(slot_to_grad) - set(slots))
    if unknown or len(slots) != len(offsets):
      raise ValueError(f"slot_to_grad has the slots {sorted(slot_to_grad)}, want {slots}")
    return [
      tf.convert_to_tensor(slot_to_grad[slot])
      if slot in slot_to_grad
      else tf.zeros([tf.size(offset), dim])
      for slot, offset, dim in zip(slots, offsets, self._output_dims)
    ]

  def _update_shard(self, update: Bundle) -> DistributedMultiTypeHashTableMpi:
    """Does S7; returns the table after it."""
    updated = copy.copy(self)
    with tf.device("/device:CPU:0"):
      updated._table = self._table.fused_apply_gradient(
        update["id_flat_t"],
        update["indices"],
        update["id_size_flat_t"],
        update["grad_flat_t"],
        update["id_offsets"],
        update["emb_offsets"],
        update["global_step"],
        update["req_time"],
        self._shard_num,
        enable_grad_accumulation=self._enable_grad_accumulation,
      )
    updated._dependency_ops = []
    return updated

  def add_summaries(self, slots: list[str], bundle: Bundle) -> None:
    """Adds summaries of what was exchanged for the batch that the step works on.

    They come from behind the queues: in front of them they would fetch a batch of their own, and
    only on the rank that writes them.
    """
    if "sharded_slot_sizes" not in bundle:
      return
    with tf.device("/device:CPU:0"):
      summary = tf.compat.v1.summary
      summary.scalar("all_fids_size", tf.reduce_sum(bundle["shard_sizes"]))
      summary.histogram("shard_sizes", bundle["shard_sizes"])
      summary.histogram("sharded_slot_sizes", bundle.pop("sharded_slot_sizes"))
      summary.histogram("fused_embedding_splits", bundle["embedding_splits"])
      slot = gflags_utils.read_flag("enable_alltoall_metrics_for_slot", None)
      if slot in slots:
        summary.scalar(f"{slot}_size", bundle["emb_offset_sz"][slots.index(slot)])
      elif slot:
        logging.warning("enable_alltoall_metrics_for_slot is %r, want one of %s", slot, slots)


# Its arguments are those of a `ReorderedGroup`; callers may still ask whether it is a group.
multi_type_hash_table.BaseMultiTypeHashTable.register(DistributedMultiTypeHashTableMpi)


@contextlib.contextmanager
def _detached(is_detached: bool) -> Iterator[None]:
  """Opens a scope for ops that run by themselves, without the step's control dependencies."""
  if not is_detached:
    yield
    return
  with tf.control_dependencies(None):
    yield
