"""How tensors get to tables on parameter servers and back.

Every tensor that crosses from one machine to another is a message of its own, so the tensors of
all tables of a server are packed into one before they are sent, and unpacked over there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from monolith.native_training import tensor_utils, utils
from monolith.native_training.model_export import export_context


@contextlib.contextmanager
def ps_device(i: int) -> Iterator[None]:
  """Places ops on the CPU of parameter server `i`, whatever they would be colocated with."""
  graph = tf.compat.v1.get_default_graph()
  with graph.colocate_with(None, ignore_existing=True), tf.device(utils.ps_device(i)):
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

  def device(self, i: int) -> contextlib.AbstractContextManager:
    """Where server `i` lives; everything is in one place in a standalone export."""
    if not self.pinned or export_context.is_exporting_standalone():
      return contextlib.nullcontext()
    return ps_device(i)

  def lookup(self, i: int, table: Any, name_to_ids: Mapping[str, tf.Tensor], op: str) -> dict:
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
    packed_ids = tensor_utils.pack_tensors(dict(name_to_ids))
    with self.device(i):
      ids = tensor_utils.unpack_tensors({name: [None] for name in name_to_ids}, packed_ids)
      packed, sizes = tensor_utils.pack_tensors(table.lookup(ids))
      if self.float16:
        packed = tf.cast(packed, tf.float16, name=f"{op}_send_{i}_CastToFloat16")
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
    with self.device(i):
      if float16:
        values = tf.cast(values, tf.float32, name=f"{op}_recv_{i}_CastToFloat32")
      shapes = [
        {name: [None] for name in name_to_pair},
        {name: [None, self.dims[name]] for name in name_to_pair},
      ]
      name_to_ids, name_to_values = tensor_utils.unpack_packed_tensors(
        shapes, [ids, values, sizes]
      )
      return update_fn(
        table, {name: (name_to_ids[name], name_to_values[name]) for name in name_to_pair}
      )


def group_as_op(tables: Any, name: str) -> tf.Operation:
  """Returns the no-op `<name>/done` that runs after all writes to `tables`, `<name>/sub_<i>`."""
  sub_ops = []
  for i, table in enumerate(tables):
    with tf.control_dependencies([table.as_op()]):
      sub_ops.append(tf.no_op(name=f"{name}/sub_{i}"))
  with tf.control_dependencies(sub_ops):
    return tf.no_op(name=f"{name}/done")
