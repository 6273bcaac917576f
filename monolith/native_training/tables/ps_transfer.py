"""Sends tensors to tables on parameter servers and back.

Every tensor that crosses from one machine to another is a message of its own, so what goes to a
server at one time is packed into one, a parcel, and unpacked over there:

    lookup   row splits, ids                                              back: rows
    update   row splits, ids, gradients, global step, request time, learning rates

Where a server is on the worker's own machine, parcels go through memory, and to make ids distinct
costs more than to send all of them: such a server takes what tables in this process would.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from monolith.native_training import tensor_utils, utils
from monolith.native_training.graph import export_context
from monolith.native_training.tables import parcels

if TYPE_CHECKING:
  from monolith.native_training.multi_hash_table_ops import RawMultiTypeHashTable
  from monolith.native_training.tables.protocols import TableGroup


@contextlib.contextmanager
def ps_device(i: int) -> Iterator[None]:
  """Places ops on the CPU of parameter server `i`, whatever they would be colocated with."""
  graph = tf.compat.v1.get_default_graph()
  with graph.colocate_with(None, ignore_existing=True), tf.device(utils.ps_device(i)):
    yield


# Bool scalars, one for each server, while a write is built that not all of them are to do.
_conditions: contextvars.ContextVar[Sequence[tf.Tensor]] = contextvars.ContextVar(
  "conditions", default=()
)


@contextlib.contextmanager
def write_only_if(conditions: Sequence[tf.Tensor]) -> Iterator[None]:
  """Lets the updates that are built inside write nothing on servers whose condition is false.

  Args:
    conditions: a bool scalar for each server, on its device; empty: all write.
  """
  token = _conditions.set(conditions)
  try:
    yield
  finally:
    _conditions.reset(token)


# Whether servers read the memory of this process, as far as that can be told.
_are_near: contextvars.ContextVar[bool] = contextvars.ContextVar("are_near", default=False)


@contextlib.contextmanager
def servers_on_this_machine(are_near: bool) -> Iterator[None]:
  """Tells graphs that are built inside whether all servers are on this machine."""
  token = _are_near.set(are_near and parcels.may_share_memory())
  try:
    yield
  finally:
    _are_near.reset(token)


def are_servers_near() -> bool:
  """Returns whether all servers are on this machine, and share memory with its processes."""
  return _are_near.get()


def keep_if(condition: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  """Returns `tensor`, without copying it, or nothing of it."""
  size = tf.cast(condition, tf.int64) * tf.shape(tensor, out_type=tf.int64)[0]
  begin = tf.zeros([tensor.shape.rank], tf.int64)
  rest = tf.fill([tensor.shape.rank - 1], tf.constant(-1, tf.int64))
  return tf.slice(tensor, begin, tf.concat([size[tf.newaxis], rest], axis=0))


@contextlib.contextmanager
def _after(tensor: tf.Tensor) -> Iterator[None]:
  """Lets ops wait for a tensor in place of what they would wait for, and what it waits for, too.

  Each op of another process that waits for one in this process costs a message.
  """
  graph = tf.compat.v1.get_default_graph()
  if graph._get_control_flow_context() is not None:
    yield  # Ops of a branch or loop need what tells whether it is taken.
    return
  with graph.control_dependencies(None), graph.control_dependencies([tensor]):
    yield


@dataclasses.dataclass(frozen=True)
class PsTransfer:
  """The way to the servers' tables.

  Attributes:
    pinned: whether the tables are on parameter servers; otherwise they are in this process.
    dims: table name -> length of its rows.
    float16: send embeddings and gradients with 16 bits.
  """

  pinned: bool
  dims: Mapping[str, int]
  float16: bool = False

  @property
  def sends(self) -> bool:
    """Whether tensors travel; everything is in one place in a standalone export."""
    return self.pinned and not export_context.is_exporting_standalone()

  def device(self, i: int) -> contextlib.AbstractContextManager[None]:
    """Returns a scope that places ops where server `i` lives, if it is elsewhere."""
    return ps_device(i) if self.sends else contextlib.nullcontext()

  def lookup(
    self, i: int, table: Any, name_to_ids: Mapping[str, tf.Tensor], op: str
  ) -> dict[str, tf.Tensor]:
    """Looks tables of server `i` up.

    Args:
      i: index of the server.
      table: its group of tables.
      name_to_ids: table name -> int64 ids.
      op: prefix of the names of casts.

    Returns:
      Table name -> `[ids, dim]`.
    """
    if not name_to_ids:
      return {}
    packed, sizes = self.send(tensor_utils.pack_tensors(dict(name_to_ids)), to=i)
    with self.device(i):
      ids = tensor_utils.unpack_tensors({name: [None] for name in name_to_ids}, (packed, sizes))
      packed, sizes = tensor_utils.pack_tensors(table.lookup(ids))
      if self.float16:
        packed = tf.cast(packed, tf.float16, name=f"{op}_send_{i}_CastToFloat16")
    packed, sizes = self.fetch([packed, sizes], source=i)
    if self.float16:
      packed = tf.cast(packed, tf.float32, name=f"{op}_recv_{i}_CastToFloat32")
    return tensor_utils.unpack_tensors(
      {name: [None, self.dims[name]] for name in name_to_ids}, (packed, sizes)
    )

  def update(
    self,
    i: int,
    table: Any,
    name_to_pair: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    update_fn: Callable[[Any, dict[str, tuple[tf.Tensor, tf.Tensor]]], Any],
    op: str,
    float16: bool = False,
  ) -> Any:
    """Sends ids and values to server `i` and updates its tables there.

    Args:
      i: index of the server.
      table: its group of tables.
      name_to_pair: table name -> (ids, values).
      update_fn: `(table, name_to_pair) -> updated table`, called on the server.
      op: prefix of the names of casts.
      float16: send the values with 16 bits.

    Returns:
      The updated table.
    """
    if not name_to_pair:
      return table
    name_to_ids = {name: pair[0] for name, pair in name_to_pair.items()}
    name_to_values = {name: pair[1] for name, pair in name_to_pair.items()}
    ids, values, sizes = tensor_utils.pack_typed_keyed_tensors([name_to_ids, name_to_values])
    if float16:
      values = tf.cast(values, tf.float16, name=f"{op}_send_{i}_CastToFloat16")
    ids, values, sizes = self.send([ids, values, sizes], to=i)
    with self.device(i):
      if float16:
        values = tf.cast(values, tf.float32, name=f"{op}_recv_{i}_CastToFloat32")
      shapes: list[tensor_utils.KeyedShape] = [
        {name: [None] for name in name_to_pair},
        {name: [None, self.dims[name]] for name in name_to_pair},
      ]
      name_to_ids, name_to_values = tensor_utils.unpack_packed_tensors(shapes, [ids, values, sizes])
      if _conditions.get():
        condition = _conditions.get()[i]
        name_to_ids = {name: keep_if(condition, ids) for name, ids in name_to_ids.items()}
        name_to_values = {name: keep_if(condition, v) for name, v in name_to_values.items()}
      return update_fn(
        table, {name: (name_to_ids[name], name_to_values[name]) for name in name_to_pair}
      )

  def raw_lookup(
    self, i: int, table: RawMultiTypeHashTable, ids: tf.RaggedTensor, op: str
  ) -> tf.Tensor:
    """Looks the native group of server `i` up.

    Args:
      i: index of the server.
      table: its group.
      ids: one row per table.
      op: prefix of the names of casts.

    Returns:
      Flat float32 embeddings.
    """
    row_splits, values = self.send([ids.row_splits, ids.values], to=i)
    with self.device(i):
      flat = table.raw_lookup(tf.RaggedTensor.from_row_splits(values, row_splits, validate=False))
      if self.float16:
        flat = tf.cast(flat, tf.float16, name=f"{op}_send_{i}_CastToFloat16")
    [flat] = self.fetch([flat], source=i)
    if self.float16:
      flat = tf.cast(flat, tf.float32, name=f"{op}_recv_{i}_CastToFloat32")
    return flat

  def raw_update(
    self,
    i: int,
    table: RawMultiTypeHashTable,
    ids: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor,
    learning_rates: tf.Tensor | None,
    op: str,
  ) -> RawMultiTypeHashTable:
    """Sends gradients to server `i` and runs the optimizers of its native group there.

    Args:
      i: index of the server.
      table: its group.
      ids: one row per table.
      flat_grad: flat float32 gradients of `ids`.
      global_step: int64 scalar.
      req_time: int64 scalar.
      learning_rates: float32, for all segments of all tables; `None` if the group has its own.
      op: prefix of the names of casts.

    Returns:
      The group after the write.
    """
    if not self.sends:
      return table.raw_apply_gradients(ids, flat_grad, global_step, req_time)
    if self.float16:
      flat_grad = tf.cast(flat_grad, tf.float16, name=f"{op}_send_{i}_CastToFloat16")
    tensors = [ids.row_splits, ids.values, flat_grad, tf.cast(global_step, tf.int64), req_time]
    if learning_rates is not None:
      tensors.append(learning_rates)
    row_splits, values, flat_grad, global_step, req_time, *rates = self.send(tensors, to=i)
    with self.device(i), _after(row_splits):
      if self.float16:
        flat_grad = tf.cast(flat_grad, tf.float32, name=f"{op}_recv_{i}_CastToFloat32")
      if _conditions.get():
        condition = _conditions.get()[i]
        values = keep_if(condition, values)
        row_splits = row_splits * tf.cast(condition, tf.int64)
        flat_grad = keep_if(condition, flat_grad)
      if rates:
        table = table.with_learning_rates(rates[0])
      ids = tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)
      return table.raw_apply_gradients(ids, flat_grad, global_step, req_time)

  def near_update(
    self,
    i: int,
    table: RawMultiTypeHashTable,
    tensors: Sequence[tf.Tensor],
    global_step: tf.Tensor,
    req_time: tf.Tensor,
    learning_rates: tf.Tensor | None,
    update: Callable[..., RawMultiTypeHashTable],
  ) -> RawMultiTypeHashTable:
    """Sends what an update takes to server `i`, and updates its native group there.

    Args:
      i: index of the server.
      table: its group.
      tensors: ids and gradients.
      global_step: int64 scalar.
      req_time: int64 scalar.
      learning_rates: float32, for all segments of all tables; `None` if the group has its own.
      update: `(group, tensors, global_step, req_time, condition) -> group after the write`, called
        on the server. Without the condition, a bool scalar or `None`, nothing may be written.

    Returns:
      The group after the write.
    """
    sent = [*tensors, tf.cast(global_step, tf.int64), req_time]
    if learning_rates is not None:
      sent.append(learning_rates)
    received = self.send(sent, to=i)
    with self.device(i), _after(received[0]):
      if learning_rates is not None:
        table = table.with_learning_rates(received.pop())
      *tensors, global_step, req_time = received
      condition = _conditions.get()[i] if _conditions.get() else None
      return update(table, tensors, global_step, req_time, condition)

  def send(self, tensors: Sequence[tf.Tensor], to: int) -> list[tf.Tensor]:
    """Returns tensors as server `to` has them."""
    if not self.sends:
      return list(tensors)
    parcel = parcels.pack(tensors, name=f"parcel_to_{to}")
    with self.device(to), _after(parcel):
      return parcels.unpack(parcel, tensors, name=f"parcel_on_{to}")

  def fetch(self, tensors: Sequence[tf.Tensor], source: int) -> list[tf.Tensor]:
    """Returns tensors of server `source` as this process has them."""
    if not self.sends:
      return list(tensors)
    with self.device(source):
      parcel = parcels.pack(tensors, name=f"parcel_of_{source}")
    return parcels.unpack(parcel, tensors, name=f"parcel_from_{source}")


def group_as_op(tables: Sequence[TableGroup], name: str) -> tf.Operation:
  """Returns the no-op `<name>/done` that runs after all writes to `tables`, `<name>/sub_<i>`."""
  sub_ops = []
  for i, table in enumerate(tables):
    with tf.control_dependencies([table.as_op()]):
      sub_ops.append(tf.no_op(name=f"{name}/sub_{i}"))
  with tf.control_dependencies(sub_ops):
    return tf.no_op(name=f"{name}/done")
