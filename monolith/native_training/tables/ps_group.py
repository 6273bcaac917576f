"""A group of tables on every parameter server: making it, and looking up in one server's group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from monolith.native_training import (
  entry,
  logging_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task_context,
  tensor_utils,
)
from monolith.native_training.graph import export_context
from monolith.native_training.tables import ps_transfer

Configs = Mapping[str, entry.HashTableConfigInstance]
TableFactory = Callable[[int, Configs], multi_type_hash_table.BaseMultiTypeHashTable]

# `distributed_serving_ops.remote_predict`, or what stands in for it.
RemotePredict = Callable[..., Sequence[tf.Tensor]]


@contextlib.contextmanager
def learning_rates(configs: Configs, rates: Mapping[str, tf.Tensor]) -> Iterator[None]:
  """Lets tables that are made of `configs` use learning rates that are computed already."""
  before = {name: config.learning_rate_tensor for name, config in configs.items()}
  for name, config in configs.items():
    config.set_learning_rate_tensor(rates[name])
  try:
    yield
  finally:
    for name, config in configs.items():
      config.set_learning_rate_tensor(before[name])


class PsGroup:
  """The tables of all servers, and the way to each of them.

  Args:
    num_ps: number of servers.
    configs: table name -> configuration.
    table_factory: `(index of the server, configs) -> group of tables`.
    transfer: how tensors get to the servers.
    remote_predict: calls a server of an exported model.
    max_rpc_deadline_millis: deadline of these calls.

  Attributes:
    tables: each server's group.
    transfer: how tensors get to the servers.
  """

  def __init__(
    self,
    num_ps: int,
    configs: Configs,
    table_factory: TableFactory,
    transfer: ps_transfer.PsTransfer,
    remote_predict: RemotePredict,
    max_rpc_deadline_millis: int,
  ):
    self.transfer = transfer
    self._remote_predict = remote_predict
    self._max_rpc_deadline_millis = max_rpc_deadline_millis
    # Learning rates of native groups, if they change from step to step.
    self._learning_rates: tf.Tensor | None = None
    self.tables = self._make_tables(num_ps, configs, table_factory)
    exports = export_context.is_exporting_distributed()
    if not exports and self.is_raw and transfer.sends and _any_rate_changes(configs.values()):
      # Computed once, here, and sent with the gradients.
      self._learning_rates = tf.concat(
        [configs[name].call_learning_rate_fns() for name in sorted(configs)], axis=0
      )

  def _make_tables(
    self, num_ps: int, configs: Configs, table_factory: TableFactory
  ) -> list[multi_type_hash_table.BaseMultiTypeHashTable]:
    tables = []
    if export_context.is_exporting_distributed():
      export_ctx = _current_export()
      for i in range(num_ps):
        with export_ctx.sub_graph(f"ps_{i}").as_default() as graph:
          tables.append(table_factory(i, configs))
          _add_lookup_signatures(graph, tables[i], sorted(configs))
      return tables
    if getattr(table_factory, "computes_learning_rates", False) or not configs:
      for i in range(num_ps):
        with self.transfer.device(i):
          tables.append(table_factory(i, configs))
      return tables
    # One message with the rates of all tables, instead of every server asking for the step.
    rates = {name: configs[name].call_learning_rate_fns() for name in sorted(configs)}
    shapes = tensor_utils.get_keyed_shape(rates)
    packed_rates = tensor_utils.pack_tensors(rates)
    for i in range(num_ps):
      with self.transfer.device(i):
        with learning_rates(configs, tensor_utils.unpack_tensors(shapes, packed_rates)):
          tables.append(table_factory(i, configs))
    return tables

  @property
  def is_raw(self) -> bool:
    """Whether every server's group works on one ragged id tensor and one flat value."""
    return all(
      isinstance(table, multi_hash_table_ops.RawMultiTypeHashTable) for table in self.tables
    )

  def raw_table(self, i: int) -> multi_hash_table_ops.RawMultiTypeHashTable:
    """Returns the group of server `i`; only if `is_raw`."""
    return cast(multi_hash_table_ops.RawMultiTypeHashTable, self.tables[i])

  def get_table_dim_sizes(self) -> list[int]:
    """Returns the tables' dimensions, by sorted name."""
    return self.tables[0].get_table_dim_sizes()

  def with_tables(self, tables: Iterable[Any]) -> PsGroup:
    """Returns the group after a write to its tables."""
    updated = copy.copy(self)
    updated.tables = list(tables)
    return updated

  def as_op(self, name: str) -> tf.Operation:
    """Returns the no-op `<name>/done` that runs after all writes so far."""
    return ps_transfer.group_as_op(self.tables, name)

  def raw_lookup(
    self, i: int, ids: tf.RaggedTensor, op: str
  ) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Returns the flat embeddings from server `i`, and what measures how long that took.

    Args:
      i: index of the server.
      ids: one row per table.
      op: prefix of the names of casts.
    """
    if export_context.is_exporting_distributed():
      flat = self._predict(
        i, "raw_lookup", ["id", "id_split"], [ids.values, ids.row_splits], ["flat_emb"]
      )[0]
      return tf.reshape(flat, [-1]), []
    table = self.raw_table(i)
    if export_context.is_exporting():
      return table.raw_lookup(ids), []
    [flat], timer = self.measure_lookup(
      i,
      [ids.values, ids.row_splits],
      lambda values, row_splits: [
        self.transfer.raw_lookup(
          i, table, tf.RaggedTensor.from_row_splits(values, row_splits, validate=False), op
        )
      ],
    )
    return flat, [timer]

  def measure_lookup(
    self,
    i: int,
    tensors: Sequence[tf.Tensor],
    look_up: Callable[..., Sequence[tf.Tensor]],
  ) -> tuple[list[tf.Tensor], tf.Operation]:
    """Looks server `i` up; returns what came, and what measures how long that took.

    Args:
      i: index of the server.
      tensors: what it is asked.
      look_up: `(*tensors) -> answer`, at least one tensor.
    """
    tensors, start = logging_ops.tensors_timestamp(tensors)
    answer, end = logging_ops.tensors_timestamp(look_up(*tensors))
    timer = logging_ops.emit_timer(
      "embedding_lookup",
      tf.cast(end - start, tf.float32),
      tags={"model_name": native_task_context.get().model_name, "ps": str(i)},
    )
    return answer, timer

  def raw_update(
    self,
    i: int,
    ids: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor,
    op: str,
  ) -> multi_hash_table_ops.RawMultiTypeHashTable:
    """Runs the optimizers of server `i`; returns its group after the write.

    Args:
      i: index of the server.
      ids: one row per table.
      flat_grad: flat float32 gradients of `ids`.
      global_step: int64 scalar.
      req_time: int64 scalar.
      op: prefix of the names of casts.
    """
    return self.transfer.raw_update(
      i, self.raw_table(i), ids, flat_grad, global_step, req_time, self._learning_rates, op=op
    )

  def near_update(
    self,
    i: int,
    tensors: Sequence[tf.Tensor],
    global_step: tf.Tensor,
    req_time: tf.Tensor,
    update: Callable[..., Any],
  ) -> multi_hash_table_ops.RawMultiTypeHashTable:
    """Updates the group of server `i` as `PsTransfer.near_update` does; returns it after that."""
    return self.transfer.near_update(
      i, self.raw_table(i), tensors, global_step, req_time, self._learning_rates, update
    )

  def lookup(self, i: int, name_to_ids: Mapping[str, tf.Tensor], op: str) -> dict[str, tf.Tensor]:
    """Looks tables of server `i` up by name.

    Args:
      i: index of the server.
      name_to_ids: table name -> int64 ids.
      op: prefix of the names of casts.

    Returns:
      Table name -> `[ids, dim]`.
    """
    if not export_context.is_exporting_distributed() or not name_to_ids:
      return self.transfer.lookup(i, self.tables[i], name_to_ids, op)
    names = sorted(name_to_ids)
    results = self._predict(i, "lookup", names, [name_to_ids[n] for n in names], names)
    return {
      name: tf.reshape(result, [-1, self.transfer.dims[name]])
      for name, result in zip(names, results)
    }

  def update(
    self,
    i: int,
    name_to_pair: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    update_fn: Callable[[Any, dict[str, tuple[tf.Tensor, tf.Tensor]]], Any],
    op: str,
    float16: bool = False,
  ) -> Any:
    """Updates tables of server `i` by name; returns its group after the write.

    Args:
      i: index of the server.
      name_to_pair: table name -> (ids, values).
      update_fn: `(group, name_to_pair) -> updated group`, called on the server.
      op: prefix of the names of casts.
      float16: send the values with 16 bits.
    """
    return self.transfer.update(i, self.tables[i], name_to_pair, update_fn, op, float16)

  def _predict(
    self,
    i: int,
    signature_name: str,
    input_names: list[str],
    inputs: list[tf.Tensor],
    output_names: list[str],
  ) -> Sequence[tf.Tensor]:
    return self._remote_predict(
      input_names,
      inputs,
      output_names,
      task=i,
      old_model_name=f"ps_{i}",
      model_name=f"{native_task_context.get().model_name or ''}:ps_{i}",
      model_version=-1,
      max_rpc_deadline_millis=self._max_rpc_deadline_millis,
      output_types=[tf.float32] * len(output_names),
      signature_name=signature_name,
    )


def _current_export() -> export_context.ExportContext:
  export_ctx = export_context.get_current_export_ctx()
  if export_ctx is None:
    raise RuntimeError("no export is under way")
  return export_ctx


def _any_rate_changes(configs: Iterable[entry.HashTableConfigInstance]) -> bool:
  return any(callable(rate) for config in configs for rate in config.learning_rate_fns)


def _add_lookup_signatures(
  graph: tf.Graph, table: multi_type_hash_table.BaseMultiTypeHashTable, names: Sequence[str]
) -> None:
  """Adds what a worker calls remotely to the graph of a server."""
  export_ctx = _current_export()

  def placeholder(name: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.int64, shape=[None], name=name)

  inputs = {name: placeholder("lookup_ids") for name in names}
  export_ctx.add_signature(graph, "lookup", inputs, table.lookup(inputs))
  if isinstance(table, multi_hash_table_ops.RawMultiTypeHashTable):
    inputs = {"id": placeholder("raw_lookup_id"), "id_split": placeholder("raw_lookup_id_split")}
    ragged_id = tf.RaggedTensor.from_row_splits(inputs["id"], inputs["id_split"], validate=False)
    export_ctx.add_signature(graph, "raw_lookup", inputs, {"flat_emb": table.raw_lookup(ragged_id)})
