"""Declares the operations of a driver on tables: three kinds of groups, by who has split the ids.

    group           ids are split          lookup takes       apply_gradients takes
    TableGroup      by the group           ids of each slot   ids and gradients of each slot
    ReorderedGroup  by rank, on input      reordered ids      gradients, what the lookup left
    LayoutGroup     by server, on input    features           layout gradients, what it left

Writing returns a new object, and what is built from it runs after the write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

import tensorflow as tf

from monolith.native_training import prefetch_queue

if TYPE_CHECKING:
  from monolith.native_training.tables.queue_hooks import QueueHook

SlotToIds = Mapping[str, tf.Tensor]
SlotToIdsAndValues = Mapping[str, tuple[tf.Tensor, tf.Tensor]]

# Tensors that stay with a batch on its way through queues; dicts and tuples of them may be nested.
Bundle = dict[str, Any]

# The findings of a group about the ids of a batch: distinct ids by server, and where each occurs.
# Dicts, lists and tuples of tensors, so that it may travel through the same queues as the batch.
IdSplit = dict[str, Any]


class HasQueueHooks(Protocol):
  """A group whose queues the session must fill and drain."""

  def add_queue_hook(self, hook: QueueHook) -> None:
    """Adds a hook that the session must run."""

  def get_queue_hooks(self) -> list[QueueHook]:
    """Returns the hooks of this group and of what is inside it."""
    ...


class TableGroup(HasQueueHooks, Protocol):
  """A group of tables that takes the ids of each slot as they are."""

  def lookup(self, slot_to_id: SlotToIds, /) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]` of the slots asked for."""
    ...

  def assign(self, slot_to_id_and_value: SlotToIdsAndValues, /) -> TableGroup:
    """Overwrites vectors; returns the group after the write."""
    ...

  def assign_add(self, slot_to_id_and_value: SlotToIdsAndValues, /) -> TableGroup:
    """Adds to vectors; returns the group after the write."""
    ...

  def reinitialize(self, slot: str, ids: tf.Tensor, /) -> tuple[TableGroup, tf.Tensor]:
    """Resets rows; returns the group after the write and an int32 status per id."""
    ...

  def apply_gradients(
    self,
    slot_to_id_and_grad: SlotToIdsAndValues,
    /,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> TableGroup:
    """Runs the optimizers; returns the group after the write."""
    ...

  def get_id_split(self, slot_to_id: SlotToIds, /) -> IdSplit | None:
    """Returns what a lookup found out about its ids; `None` if there is nothing to share."""
    ...

  def set_id_split(self, slot_to_id: SlotToIds, id_split: IdSplit | None, /) -> None:
    """Tells what `get_id_split` returned for equal ids, so that an update need not do it again."""

  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns an op that runs after all writes so far."""
    ...


class FusedGroup(Protocol):
  """The tables of one rank, which work on the ids of all ranks in one op.

  `hash_table_ops.fused_lookup` says what the arguments are.
  """

  def fused_lookup(
    self,
    ids: tf.Tensor,
    fused_slot_size: tf.Tensor,
    num_of_shards: int,
    req_time: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns `(embeddings, floats per shard, id offsets, embedding offsets, indices)`."""
    ...

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
  ) -> FusedGroup:
    """Runs the optimizers; returns the group after the write."""
    ...

  def get_table_dim_sizes(self) -> list[int]:
    """Returns the tables' dimensions, by sorted name."""
    ...

  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns an op that runs after all writes so far."""
    ...


class ReorderedGroup(HasQueueHooks, Protocol):
  """A group of tables over ranks, whose ids the input pipeline has reordered by rank."""

  def lookup(
    self,
    slot_to_id: Mapping[str, Any],
    auxiliary_bundle: Bundle,
    early_reorder_indicies_res_pack: tuple[Any, ...] | None = None,
    /,
  ) -> tuple[dict[str, tf.Tensor], Bundle]:
    """Returns slot -> float32 `[n, dim]`, and the bundle as it leaves the group's queues."""
    ...

  def apply_gradients(
    self,
    slot_to_grad: Mapping[str, tf.Tensor],
    /,
    *,
    auxiliary_bundle: Bundle,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
    scale: tf.Tensor | float = 1,
  ) -> ReorderedGroup:
    """Runs the optimizers on the ids of a lookup; returns the group after the write."""
    ...

  def as_op(self, name: str | None = None) -> tf.Operation:
    """Returns an op that runs after all writes so far."""
    ...


class LayoutGroup(HasQueueHooks, Protocol):
  """A group of tables whose embeddings come out as the layouts of a fused-layout run."""

  def lookup(
    self,
    features: dict[str, Any],
    auxiliary_bundle: Bundle | None = None,
    ret_fused_layout_callable_fn: bool = False,
    ret_lookup_callable_fn: bool = False,
    embedding_prefetch_capacity: int = 0,
  ) -> Any:
    """Returns layout name -> tensor or list of tensors, or a function that makes them."""

  def apply_gradients(
    self,
    layout_grads_and_vars: Iterable[tuple[tf.Tensor, tf.Tensor]],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
    auxiliary_bundle: Bundle | None = None,
    async_function_mgr: prefetch_queue.AsyncFunctionMgr | None = None,
    async_push: bool = False,
    grad_scale: tf.Tensor | None = None,
  ) -> tf.Operation:
    """Returns the op that updates the tables from gradients of all layouts."""
    ...

  def flatten_layout(self, nested: Mapping[str, Any]) -> list[tf.Tensor]:
    """Returns the layouts' tensors in the order that `apply_gradients` wants them."""
    ...


AnyGroup = Union[TableGroup, ReorderedGroup, LayoutGroup]
