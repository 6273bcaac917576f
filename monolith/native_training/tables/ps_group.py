"""A group of tables on every parameter server: making it, and looking up in one server's group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import (
  entry,
  logging_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task_context,
  tensor_utils,
)
from monolith.native_training.model_export import export_context
from monolith.native_training.tables import ps_transfer


class Memo:
  """Remembers what was built for some tensors, so that lookup and update share it.

  Graph tensors are compared by identity, so a hit is the very same value in the same step. What was
  built inside a loop or a branch is not used outside of it.
  """

  def __init__(self):
    self._built: dict[Any, Any] = {}

  def get(self, tensors: Sequence[Any], build: Callable[[], Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    if not all(isinstance(tensor, tf.Tensor) for tensor in tensors):
      return build()
    # The key keeps the tensors alive, so that their identity cannot be taken over.
    key = (id(graph), graph._get_control_flow_context(), *[tensor.ref() for tensor in tensors])
    if key not in self._built:
      self._built[key] = build()
    return self._built[key]


def split_pair(pair: Any) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns (ids, values) of a pair; a set has no order, but ids are integers."""
  first, second = pair
  if not tf.convert_to_tensor(first).dtype.is_integer and isinstance(pair, (set, frozenset)):
    first, second = second, first
  return tf.convert_to_tensor(first, tf.int64), second


@contextlib.contextmanager
def learning_rates(
  configs: Mapping[str, entry.HashTableConfigInstance], rates: Mapping[str, tf.Tensor]
) -> Iterator[None]:
  """Lets tables that are made of `configs` use learning rates that are computed already."""
  before = {name: config.learning_rate_tensor for name, config in configs.items()}
  for name, config in configs.items():
    config.set_learning_rate_tensor(rates[name])
  try:
    yield
  finally:
    for name, config in configs.items():
      config.set_learning_rate_tensor(before[name])


class PsTables(multi_type_hash_table.BaseMultiTypeHashTable):
  """A group of tables on every server; what the two ways to use them have in common."""

  _transfer: ps_transfer.PsTransfer
  _max_rpc_deadline_millis: int
  # Learning rates of native groups, if they change from step to step.
  _learning_rates: tf.Tensor | None = None

  def _make_tables(
    self,
    num_ps: int,
    configs: Mapping[str, entry.HashTableConfigInstance],
    table_factory: Callable[
      [int, Mapping[str, entry.HashTableConfigInstance]],
      multi_type_hash_table.BaseMultiTypeHashTable,
    ],
  ) -> None:
    self._tables = []
    if export_context.is_exporting_distributed():
      for i in range(num_ps):
        with export_context.get_current_export_ctx().sub_graph(f"ps_{i}").as_default() as graph:
          self._tables.append(table_factory(i, configs))
          _add_lookup_signatures(graph, self._tables[i], sorted(configs))
      return
    if getattr(table_factory, "computes_learning_rates", False) or not configs:
      for i in range(num_ps):
        with self._transfer.device(i):
          self._tables.append(table_factory(i, configs))
    else:
      self._make_tables_with_rates(num_ps, configs, table_factory)
    if self._is_raw and self._transfer.sends and _any_rate_changes(configs.values()):
      # Computed once, here, and sent with the gradients.
      self._learning_rates = tf.concat(
        [configs[name].call_learning_rate_fns() for name in sorted(configs)], axis=0
      )

  def _make_tables_with_rates(
    self,
    num_ps: int,
    configs: Mapping[str, entry.HashTableConfigInstance],
    table_factory: Callable[
      [int, Mapping[str, entry.HashTableConfigInstance]],
      multi_type_hash_table.BaseMultiTypeHashTable,
    ],
  ) -> None:
    """One message with the rates of all tables, instead of every server asking for the step."""
    rates = {name: configs[name].call_learning_rate_fns() for name in sorted(configs)}
    shapes = tensor_utils.get_keyed_shape(rates)
    packed_rates = tensor_utils.pack_tensors(rates)
    for i in range(num_ps):
      with self._transfer.device(i):
        with learning_rates(configs, tensor_utils.unpack_tensors(shapes, packed_rates)):
          self._tables.append(table_factory(i, configs))

  @property
  def _is_raw(self) -> bool:
    return all(
      isinstance(table, multi_hash_table_ops.RawMultiTypeHashTable) for table in self._tables
    )

  def _raw_lookup_on_ps(
    self, i: int, ids: tf.RaggedTensor, op: str
  ) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Returns the flat embeddings from server `i`, and what measures how long that took.

    Args:
      i: index of the server.
      ids: one row per table.
      op: prefix of the names of casts.
    """
    if export_context.is_exporting_distributed():
      flat = self._remote_predict(
        i, "raw_lookup", ["id", "id_split"], [ids.values, ids.row_splits], ["flat_emb"]
      )[0]
      return tf.reshape(flat, [-1]), []
    if export_context.is_exporting():
      return self._tables[i].raw_lookup(ids), []
    if self._transfer.sends:
      (packed,), start = logging_ops.tensors_timestamp([ps_transfer.pack_ragged(ids)])
      flat = self._transfer.raw_lookup(i, self._tables[i], packed, op)
    else:
      (values, row_splits), start = logging_ops.tensors_timestamp([ids.values, ids.row_splits])
      flat = self._tables[i].raw_lookup(
        tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)
      )
    (flat,), end = logging_ops.tensors_timestamp([flat])
    timer = logging_ops.emit_timer(
      "embedding_lookup",
      tf.cast(end - start, tf.float32),
      tags={"model_name": native_task_context.get().model_name, "ps": str(i)},
    )
    return flat, [timer]

  def _lookup_on_ps(
    self, i: int, name_to_ids: Mapping[str, tf.Tensor], op: str
  ) -> dict[str, tf.Tensor]:
    """Looks tables of server `i` up by name."""
    if not export_context.is_exporting_distributed() or not name_to_ids:
      return self._transfer.lookup(i, self._tables[i], name_to_ids, op)
    names = sorted(name_to_ids)
    results = self._remote_predict(i, "lookup", names, [name_to_ids[n] for n in names], names)
    return {
      name: tf.reshape(result, [-1, self._transfer.dims[name]])
      for name, result in zip(names, results)
    }

  def _remote_predict(
    self,
    i: int,
    signature_name: str,
    input_names: list[str],
    inputs: list[tf.Tensor],
    output_names: list[str],
  ) -> list[tf.Tensor]:
    # Through the module that publishes it, where tests replace it.
    from monolith.native_training import distributed_ps

    return distributed_ps.remote_predict(
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

  def _with_tables(self, tables: list[Any]) -> Any:
    updated = copy.copy(self)
    updated._tables = tables
    return updated

  def get_table_dim_sizes(self) -> list[int]:
    return self._tables[0].get_table_dim_sizes()


def _any_rate_changes(configs: Iterable[entry.HashTableConfigInstance]) -> bool:
  return any(callable(rate) for config in configs for rate in config.learning_rate_fns)


def _add_lookup_signatures(
  graph: tf.Graph, table: multi_type_hash_table.BaseMultiTypeHashTable, names: Sequence[str]
) -> None:
  """Adds what a worker calls remotely to the graph of a server."""
  export_ctx = export_context.get_current_export_ctx()

  def placeholder(name: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.int64, shape=[None], name=name)

  inputs = {name: placeholder("lookup_ids") for name in names}
  export_ctx.add_signature(graph, "lookup", inputs, table.lookup(inputs))
  if isinstance(table, multi_hash_table_ops.RawMultiTypeHashTable):
    inputs = {"id": placeholder("raw_lookup_id"), "id_split": placeholder("raw_lookup_id_split")}
    ragged_id = tf.RaggedTensor.from_row_splits(inputs["id"], inputs["id_split"], validate=False)
    export_ctx.add_signature(graph, "raw_lookup", inputs, {"flat_emb": table.raw_lookup(ragged_id)})
