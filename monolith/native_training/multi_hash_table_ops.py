"""The native group of tables: one resource, one op for all tables.

The ids of all tables travel as one ragged tensor, row k for the k-th table in sorted order of the
names; values travel as one flat vector in the same order:

    ids    [[7, 9], [], [7]]           flat   [row of 7 | row of 9 | row of 7]
             a      b    c                      table a   table a    table c

Longer than 600 lines: most of it is one class, and its checkpoint listeners are public names of
this module that need its private ones.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging
from google.protobuf import text_format
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_serving_ops,
  entry,
  graph_meta,
  hash_filter_ops,
  hash_table_utils,
  multi_hash_table_ops_pb2,
  save_utils,
)
from monolith.native_training.checkpoints import listeners
from monolith.native_training.graph import export_context
from monolith.native_training.multi_type_hash_table import BaseMultiTypeHashTable
from monolith.native_training.proto import ckpt_info_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops

# Part of the API, as are such names in other modules: callers reach the ops through it.
hash_table_ops = gen_monolith_ops

# Functions may run these side by side; only writes must be ordered.
for _op_type in (
  "IsHashTableInitialized",
  "MonolithMultiHashTableLookup",
  "MonolithMultiHashTableLookupEntry",
  "MonolithMultiHashTableFusedLookup",
  "MonolithMultiHashTableLookupList",
):
  auto_control_deps_utils.register_read_only_resource_op(_op_type)

_HOST = "/device:CPU:0"
_MULTI_HASH_TABLE_GRAPH_KEY = "monolith_multi_hash_tables"
_TIMEOUT_IN_MS = 3600000
_SAVED_FILE = re.compile(r"(?P<name>.*?)(\.meta)?-\d{5}-of-\d{5}")
# Names of the only group of a run: without servers; with the fused layout, or with one server.
_LOCAL_NAMES = ("MonolithMultiHashTable_", "MonolithMultiHashTable_0")


class CachedConfig(NamedTuple):
  """Holds the parts of configurations that a `MultiHashTable` needs, computed once.

  Attributes:
    configs: table name -> configuration.
    table_names: sorted.
    mconfig: serialized `MultiEmbeddingHashTableConfig`.
    mconfig_tensor: the same as a string scalar.
    dims: dimension of each table.
    slot_expire_time_config: serialized `SlotExpireTimeConfig`, the first one that a table has.
    expires_apart: whether tables have different ones, so that each goes by its own.
  """

  configs: Mapping[str, entry.HashTableConfigInstance]
  table_names: tuple[str, ...]
  mconfig: bytes
  mconfig_tensor: tf.Tensor
  dims: tuple[int, ...]
  slot_expire_time_config: bytes
  expires_apart: bool = False


@dataclasses.dataclass
class MultiHashTableMetadata:
  """The groups of one graph.

  Attributes:
    name_set: the shared names in use.
  """

  name_set: set[str] = dataclasses.field(default_factory=set)


def infer_dims(configs: Mapping[str, entry.HashTableConfigInstance]) -> list[int]:
  """Returns the dimension of each table, by sorted name."""
  return [hash_table_utils.infer_dim_size(configs[name].table_config) for name in sorted(configs)]


def convert_to_cached_config(
  configs: Mapping[str, entry.HashTableConfigInstance],
) -> CachedConfig:
  """Returns the `CachedConfig` of table name -> configuration; serving tables when exporting."""
  table_names = tuple(sorted(configs))
  mconfig = embedding_hash_table_pb2.MultiEmbeddingHashTableConfig()
  expire_configs: list[bytes] = []
  for name in table_names:
    mconfig.names.append(name)
    table_config = mconfig.configs.add()
    table_config.CopyFrom(configs[name].table_config)
    if export_context.is_exporting():
      hash_table_utils.for_serving(table_config)
    expire_config = table_config.slot_expire_time_config.SerializeToString(deterministic=True)
    if expire_config and expire_config not in expire_configs:
      expire_configs.append(expire_config)
  serialized = mconfig.SerializeToString()
  return CachedConfig(
    configs=configs,
    table_names=table_names,
    mconfig=serialized,
    mconfig_tensor=_config_tensor(serialized),
    dims=tuple(infer_dims(configs)),
    slot_expire_time_config=expire_configs[0] if expire_configs else b"",
    expires_apart=len(expire_configs) > 1,
  )


def _config_tensor(mconfig: bytes) -> tf.Tensor:
  # Strings are on CPUs, also where the group is not.
  with tf.device("/device:CPU:0"):
    return tf.convert_to_tensor(mconfig)


def _device_of_group(mconfig: bytes) -> str:
  """Returns the device of a group: that of its tables' type.

  Raises:
    ValueError: some tables are for a GPU and some are not.
  """
  config = embedding_hash_table_pb2.MultiEmbeddingHashTableConfig.FromString(mconfig)
  names: dict[str, str] = {}
  for name, table in zip(config.names, config.configs):
    names.setdefault(hash_table_utils.device_of_type(table), name)
  if len(names) > 1:
    raise ValueError(
      "a group is in one place, but its tables are not of one type: "
      + ", ".join(f"{name!r} is for {device}" for device, name in sorted(names.items()))
    )
  return next(iter(names), "/device:CPU:0")


def concat_1d_tensors(*tensors: tf.Tensor) -> tf.RaggedTensor:
  """Returns a ragged tensor whose row i is the i-th vector, with int64 splits."""
  lengths = [tf.size(tensor, out_type=tf.int64) for tensor in tensors]
  return tf.RaggedTensor.from_row_lengths(
    tf.concat(tensors, axis=0), tf.stack(lengths), validate=False
  )


def get_list_from_flat_value(
  key: tf.RaggedTensor, dims: Sequence[int], flat_value: tf.Tensor
) -> list[tf.Tensor]:
  """Cuts a flat value into one `[ids, dim]` tensor per row of `key`."""
  sizes = key.row_lengths() * tf.constant(dims, dtype=tf.int64)
  parts = tf.split(flat_value, sizes, num=len(dims))
  return [tf.reshape(part, [-1, dim]) for part, dim in zip(parts, dims)]


def flatten_n_tensors(*tensors: tf.Tensor) -> tf.Tensor:
  """Returns the concatenation of the flattened tensors."""
  return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


class RawMultiTypeHashTable(abc.ABC):
  """A group that can work on one ragged id tensor and one flat value.

  The `get_*` methods touch no resource: a worker may call them for a group on a server.
  """

  @abc.abstractmethod
  def get_ragged_id(self, slot_to_id: Mapping[str, tf.Tensor]) -> tf.RaggedTensor:
    """Returns the ids as one ragged tensor; tables that are not mentioned get empty rows."""

  @abc.abstractmethod
  def get_flat_value(self, slot_to_value: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns the values as one vector."""

  @abc.abstractmethod
  def get_embeddings(self, ragged_id: tf.RaggedTensor, value: tf.Tensor) -> dict[str, tf.Tensor]:
    """Cuts a flat value into table name -> `[ids, dim]`."""

  @abc.abstractmethod
  def raw_lookup(self, ragged_id: tf.RaggedTensor) -> tf.Tensor:
    """Returns the flat value of `ragged_id`."""

  @abc.abstractmethod
  def raw_apply_gradients(
    self,
    ragged_id: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> RawMultiTypeHashTable:
    """Runs the optimizers; returns the group after the write."""

  @abc.abstractmethod
  def raw_assign(
    self,
    ragged_id: tf.RaggedTensor,
    flat_value: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> RawMultiTypeHashTable:
    """Overwrites vectors; returns the group after the write."""

  def with_learning_rates(self, learning_rates: tf.Tensor) -> RawMultiTypeHashTable:
    """Returns a group that may use rates computed elsewhere instead of its own, which are equal.

    Args:
      learning_rates: float32 vector, one per segment of all tables, in order of the names.
    """
    del learning_rates
    return self


class MultiHashTable(BaseMultiTypeHashTable, RawMultiTypeHashTable):
  """A group of tables in one resource; made by `from_configs`.

  Creation and use are separate ops: run `initializer` once (a `MonitoredSession` does), every other
  op finds the resource by its name.

  Args:
    cc: what `convert_to_cached_config` returned.
    hash_filter: handle of an occurrence filter.
    sync_client: handle of a client that is told of updated ids.
    learning_rate_list: learning rates of all segments, tables in sorted order.
    name_suffix: the shared name is `MonolithMultiHashTable_<suffix>`.
    saver_parallel: number of files of a checkpoint; -1 lets the size decide.
    table_proto: rebuild the object from this `MultiHashTableProto` instead.
    import_scope: name scope under which the graph was imported.
    device: where the resource lives.

  Raises:
    ValueError: the shared name is taken.
  """

  NAME_PREFIX = "MonolithMultiHashTable"

  def __init__(
    self,
    cc: CachedConfig | None = None,
    hash_filter: tf.Tensor | None = None,
    sync_client: tf.Tensor | None = None,
    learning_rate_list: Sequence[Any] | None = None,
    name_suffix: str = "",
    saver_parallel: int = -1,
    table_proto: multi_hash_table_ops_pb2.MultiHashTableProto | None = None,
    import_scope: str | None = None,
    device: str = "/device:CPU:0",
  ):
    if table_proto is not None:
      self._init_from_proto(table_proto, import_scope)
      return
    self._shared_name = f"{self.NAME_PREFIX}_{name_suffix}"
    metadata = graph_meta.get_meta("multi_hash_table_metadata", MultiHashTableMetadata)
    if self._shared_name in metadata.name_set:
      raise ValueError(f"shared_name {self._shared_name} has already been used.")
    metadata.name_set.add(self._shared_name)
    self._table_names = list(cc.table_names)
    self._dims = list(cc.dims)
    # With none, each table goes by its own configuration.
    self._slot_expire_time_config = b"" if cc.expires_apart else cc.slot_expire_time_config
    self._saver_parallel = saver_parallel
    with tf.device(_HOST):
      self._learning_rate_tensor = tf.stack(
        [tf.cast(rate, tf.float32) for rate in learning_rate_list], name="learning_rate"
      )
    with tf.device(device):
      created = gen_monolith_ops.create_monolith_multi_hash_table(
        cc.mconfig_tensor, hash_filter, sync_client, shared_name=self._shared_name
      )
      self._initializer = created.op
      self._handle = gen_monolith_ops.read_monolith_multi_hash_table(shared_name=self._shared_name)
      self._register_resource()
    tf.compat.v1.add_to_collection(_MULTI_HASH_TABLE_GRAPH_KEY, self)

  def _init_from_proto(
    self, proto: multi_hash_table_ops_pb2.MultiHashTableProto, import_scope: str | None
  ) -> None:
    graph = tf.compat.v1.get_default_graph()

    def element(name: str) -> Any:
      return graph.as_graph_element(ops.prepend_name_scope(name, import_scope))

    self._shared_name = proto.shared_name
    self._table_names = list(proto.table_names)
    self._dims = list(proto.dims)
    self._slot_expire_time_config = proto.slot_expire_time_config
    self._saver_parallel = proto.saver_parallel
    self._learning_rate_tensor = element(proto.learning_rate_tensor)
    self._initializer = element(proto.initializer_op)
    self._handle = element(proto.handle_tensor)
    with tf.device(self._initializer.device):
      self._register_resource()

  def _register_resource(self) -> None:
    created = self._initializer.outputs[0]
    resources.register_resource(
      created, self._initializer, gen_monolith_ops.is_hash_table_initialized(self._handle)
    )

  @classmethod
  def from_configs(
    cls, configs: Mapping[str, entry.HashTableConfigInstance], *args: Any, **kwargs: Any
  ) -> MultiHashTable:
    """Creates a group from table name -> configuration, the rest as in `from_cached_config`."""
    return cls.from_cached_config(convert_to_cached_config(configs), *args, **kwargs)

  @classmethod
  def from_cached_config(
    cls,
    cc: CachedConfig,
    hash_filter: tf.Tensor | None = None,
    sync_client: tf.Tensor | None = None,
    name_suffix: str = "",
    saver_parallel: int = -1,
  ) -> MultiHashTable:
    """Creates a group, on the first GPU if its tables are of type `gpucuco`, else on the CPU.

    Args:
      cc: what `convert_to_cached_config` returned.
      hash_filter: handle of an occurrence filter; everything passes by default.
      sync_client: handle of a client that is told of updated ids.
      name_suffix: the shared name is `MonolithMultiHashTable_<suffix>`.
      saver_parallel: number of files of a checkpoint; -1 lets the size decide.

    Raises:
      ValueError: the name is taken, not as many learning rates as segments, or tables of a GPU
        together with others.
    """
    learning_rates: list[Any] = []
    for name in cc.table_names:
      config = cc.configs[name]
      if len(config.learning_rate_fns) != len(config.table_config.entry_config.segments):
        raise ValueError("Size of learning_rate_fns and size of segments must be equal.")
      # Also of tables on a GPU, whose ops take them from the host.
      with tf.device(_HOST):
        learning_rates += config.call_learning_rate_fns_fewer_ops()
    device = _device_of_group(cc.mconfig)
    with tf.device(device):
      if hash_filter is None:
        hash_filter = hash_filter_ops.create_dummy_hash_filter(name_suffix=name_suffix)
      if sync_client is None:
        sync_client = distributed_serving_ops.create_dummy_sync_client()
    if cc.mconfig_tensor.graph is not tf.compat.v1.get_default_graph():
      cc = cc._replace(mconfig_tensor=_config_tensor(cc.mconfig))
    return cls(
      cc, hash_filter, sync_client, learning_rates, name_suffix, saver_parallel, device=device
    )

  @property
  def table_names(self) -> list[str]:
    return self._table_names

  @property
  def handle(self) -> tf.Tensor:
    return self._handle

  @property
  def shared_name(self) -> str:
    return self._shared_name

  @property
  def initializer(self) -> tf.Operation:
    """Creates the resource; running it again keeps the content."""
    return self._initializer

  def get_ragged_id(self, slot_to_id: Mapping[str, tf.Tensor]) -> tf.RaggedTensor:
    empty = tf.constant([], tf.int64)
    return concat_1d_tensors(
      *[
        tf.reshape(tf.convert_to_tensor(slot_to_id[name], tf.int64), [-1])
        if name in slot_to_id
        else empty
        for name in self._table_names
      ]
    )

  def get_flat_value(self, slot_to_value: Mapping[str, tf.Tensor]) -> tf.Tensor:
    values = [slot_to_value[name] for name in self._table_names if name in slot_to_value]
    if not values:
      return tf.constant([], tf.float32)
    return flatten_n_tensors(*[tf.convert_to_tensor(value, tf.float32) for value in values])

  def get_embeddings(self, ragged_id: tf.RaggedTensor, value: tf.Tensor) -> dict[str, tf.Tensor]:
    return dict(zip(self._table_names, get_list_from_flat_value(ragged_id, self._dims, value)))

  def lookup(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns slot -> float32 `[n, dim]`; names without a table are ignored, as in updates."""
    ragged_id = self.get_ragged_id(slot_to_id)
    embeddings = self.get_embeddings(ragged_id, self.raw_lookup(ragged_id))
    return {slot: embeddings[slot] for slot in slot_to_id if slot in embeddings}

  def assign(
    self,
    slot_to_id_and_value: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    req_time: tf.Tensor | None = None,
    enable_inter_table_parallelism: bool = False,
  ) -> MultiHashTable:
    """Overwrites vectors; returns the group after the write.

    Args:
      slot_to_id_and_value: table name -> (ids, values).
      req_time: int64, seconds; becomes the rows' time of last update. 0 by default.
      enable_inter_table_parallelism: accepted for compatibility; tables always run in parallel.
    """
    del enable_inter_table_parallelism
    ragged_id, flat_value = self._split_pairs(slot_to_id_and_value)
    return self.raw_assign(ragged_id, flat_value, req_time)

  def assign_add(
    self,
    slot_to_id_and_value: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    req_time: tf.Tensor | None = None,
  ) -> MultiHashTable:
    ragged_id, flat_value = self._split_pairs(slot_to_id_and_value)
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_assign_add,
        ragged_id.values,
        ragged_id.row_splits,
        flat_value,
        hash_table_utils.as_req_time(req_time),
      )
    )

  def reinitialize(self, slot: str, ids: tf.Tensor) -> tuple[MultiHashTable, tf.Tensor]:
    """Resets the rows of `ids`, creating absent ones.

    Returns:
      The group after the write and an int32 status per id: 1 existed, 0 was inserted, -1 the slot
      is unknown and nothing was done.
    """
    handle, status = self._run(
      gen_monolith_ops.monolith_multi_hash_table_reinitialize,
      tf.convert_to_tensor(slot, tf.string),
      tf.convert_to_tensor(ids, tf.int64),
    )
    return self._with_handle(handle), status

  def lookup_entry(self, slot_to_id: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    raise NotImplementedError("MultiHashTable does not support lookup_entry!")

  def apply_gradients(
    self,
    slot_to_id_and_grad: Mapping[str, tuple[tf.Tensor, tf.Tensor]],
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> MultiHashTable:
    ragged_id, flat_grad = self._split_pairs(slot_to_id_and_grad)
    return self.raw_apply_gradients(ragged_id, flat_grad, global_step, req_time)

  def raw_lookup(self, ragged_id: tf.RaggedTensor) -> tf.Tensor:
    return self._run(
      gen_monolith_ops.monolith_multi_hash_table_lookup, ragged_id.values, ragged_id.row_splits
    )

  def raw_apply_gradients(
    self,
    ragged_id: tf.RaggedTensor,
    flat_grad: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> MultiHashTable:
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_optimize,
        ragged_id.values,
        ragged_id.row_splits,
        flat_grad,
        self._learning_rate_tensor,
        hash_table_utils.as_req_time(req_time),
        tf.cast(global_step, tf.int64),
      )
    )

  def raw_assign(
    self,
    ragged_id: tf.RaggedTensor,
    flat_value: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> MultiHashTable:
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_assign,
        ragged_id.values,
        ragged_id.row_splits,
        flat_value,
        hash_table_utils.as_req_time(req_time),
      )
    )

  def with_learning_rates(self, learning_rates: tf.Tensor) -> MultiHashTable:
    updated = copy.copy(self)
    updated._learning_rate_tensor = learning_rates
    return updated

  def save(self, basename: tf.Tensor | str) -> MultiHashTable:
    """Writes all rows that have not expired; returns the group after the save."""
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_save,
        tf.convert_to_tensor(basename, tf.string),
        nshards=self._saver_parallel,
        slot_expire_time_config=self._slot_expire_time_config,
      )
    )

  def restore(self, basename: tf.Tensor | str) -> MultiHashTable:
    """Replaces the content of the tables that the checkpoint holds; returns the group after."""
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_restore,
        tf.convert_to_tensor(basename, tf.string),
      )
    )

  def feature_stat(self, basename: tf.Tensor | str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns `(table names, rows)` of what was saved under `basename`, string and uint64 `[k]`."""
    return gen_monolith_ops.monolith_multi_hash_table_feature_stat(basename)

  def sizes(self) -> tf.Tensor:
    """Returns the number of rows of each table, int64 `[tables]`, by sorted names."""
    return self._run(gen_monolith_ops.monolith_multi_hash_table_size)

  def stats(self) -> tf.Tensor:
    """Returns what each table holds and has done, int64 `[tables, 5]`, by sorted names.

    Rows; bytes; rows that have expired; ids that got no row because they were seen too seldom; rows
    of updates that were not finite.
    """
    return self._run(gen_monolith_ops.monolith_multi_hash_table_stats)

  def fused_lookup(
    self,
    ids: tf.Tensor,
    fused_slot_size: tf.Tensor,
    num_of_shards: int,
    req_time: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Looks all tables up for several shards, as `fused_lookup` of module `hash_table_ops` does."""
    return self._run(
      gen_monolith_ops.monolith_multi_hash_table_fused_lookup,
      ids,
      fused_slot_size,
      hash_table_utils.as_req_time(req_time),
      num_of_shards,
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
  ) -> MultiHashTable:
    """Updates all tables for several shards, as that function of module `hash_table_ops` does."""
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_multi_hash_table_fused_optimize,
        ids,
        indices,
        fused_slot_size,
        id_grads,
        id_offsets,
        grad_offsets,
        self._learning_rate_tensor,
        hash_table_utils.as_req_time(req_time),
        tf.cast(global_step, tf.int64),
        num_of_shards,
        enable_grad_accumulation,
      )
    )

  def get_table_dim_sizes(self) -> list[int]:
    return self._dims

  def as_op(self, *args: Any, **kwargs: Any) -> tf.Operation:
    return self._handle.op

  def to_proto(
    self, export_scope: str | None = None
  ) -> multi_hash_table_ops_pb2.MultiHashTableProto | None:
    """Returns the `MultiHashTableProto`; `None` when the group lies outside of `export_scope`."""
    if export_scope is not None and not self._handle.name.startswith(export_scope):
      return None
    return multi_hash_table_ops_pb2.MultiHashTableProto(
      dims=self._dims,
      slot_expire_time_config=self._slot_expire_time_config,
      table_names=self._table_names,
      learning_rate_tensor=ops.strip_name_scope(self._learning_rate_tensor.name, export_scope),
      shared_name=self._shared_name,
      saver_parallel=self._saver_parallel,
      initializer_op=ops.strip_name_scope(self._initializer.name, export_scope),
      handle_tensor=ops.strip_name_scope(self._handle.name, export_scope),
    )

  @staticmethod
  def from_proto(
    table_proto: multi_hash_table_ops_pb2.MultiHashTableProto, import_scope: str | None = None
  ) -> MultiHashTable:
    """Returns the group of an imported graph."""
    return MultiHashTable(table_proto=table_proto, import_scope=import_scope)

  def _split_pairs(
    self, slot_to_pair: Mapping[str, tuple[tf.Tensor, tf.Tensor]]
  ) -> tuple[tf.RaggedTensor, tf.Tensor]:
    ragged_id = self.get_ragged_id({slot: pair[0] for slot, pair in slot_to_pair.items()})
    return ragged_id, self.get_flat_value({slot: pair[1] for slot, pair in slot_to_pair.items()})

  def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an op on this group, where the group is."""
    with hash_table_utils.on_device_of(self._handle):
      return function(self._handle, *args, **kwargs)

  def _with_handle(self, handle: tf.Tensor) -> MultiHashTable:
    updated = copy.copy(self)
    updated._handle = handle
    return updated


ops.register_proto_function(
  _MULTI_HASH_TABLE_GRAPH_KEY,
  proto_type=multi_hash_table_ops_pb2.MultiHashTableProto,
  to_proto=MultiHashTable.to_proto,
  from_proto=MultiHashTable.from_proto,
)


def _build_assets(
  make_op: Callable[[MultiHashTable, tf.Tensor], Any],
) -> list[listeners.Asset[MultiHashTable]]:
  """Returns an asset for each of the graph's groups."""
  groups: list[MultiHashTable] = tf.compat.v1.get_collection(_MULTI_HASH_TABLE_GRAPH_KEY)
  return listeners.build_assets(groups, lambda group: group.initializer.device, make_op)


class MultiHashTableCheckpointSaverListener(listeners.AssetSaverListener[MultiHashTable]):
  """Saves the graph's groups to `<basename>-<step>.assets/`, before the variables are saved.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    write_ckpt_info: also write the number of rows per table to `<folder>/ckpt.info-<step>`.
  """

  def __init__(self, basename: str, write_ckpt_info: bool = True):
    assets = _build_assets(lambda group, path: group.save(path).as_op())
    super().__init__(
      basename, "multi hash tables", assets, _TIMEOUT_IN_MS, "multi_hashtable_save_all"
    )
    self._folder = os.path.dirname(basename)
    self._stats = (
      _build_assets(lambda group, path: group.feature_stat(path)) if write_ckpt_info else []
    )

  def before_save(self, sess: tf.compat.v1.Session, global_step_value: int) -> None:
    """Saves every group, and counts the rows that were saved."""
    super().before_save(sess, global_step_value)
    if self._stats:
      stats = sess.run(
        [asset.op for asset in self._stats],
        feed_dict=self._feed(self._stats, self._asset_dir(global_step_value)),
        options=self._options,
      )
      self._write_info(stats, global_step_value)

  def _name_of(self, item: MultiHashTable) -> str:
    return item.shared_name

  def _write_info(self, stats: Sequence[Any], global_step_value: int) -> None:
    info = ckpt_info_pb2.CkptInfo()
    for names, counts in stats:
      if len(names) != len(counts):
        raise ValueError(f"{len(names)} table names but {len(counts)} counts in a checkpoint")
      for name, count in zip(names, counts):
        info.feature_counts[tf.compat.as_str(name)] += int(count)
    path = os.path.join(self._folder, f"ckpt.info-{global_step_value}")
    with tf.io.gfile.GFile(path, "w") as file:
      file.write(text_format.MessageToString(info))


class MultiHashTableCheckpointRestorerListener(listeners.AssetRestorerListener[MultiHashTable]):
  """Restores what `MultiHashTableCheckpointSaverListener` saved.

  A group in the worker's process has another name with the fused layout than without; a
  checkpoint of the other kind of run is found under the other name.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    ps_monitor: if given, only groups on servers that it calls uninitialized are restored.
  """

  def __init__(self, basename: str, ps_monitor: save_utils.PsMonitor | None = None):
    assets = _build_assets(lambda group, path: group.restore(path).as_op())
    super().__init__(basename, "multi hash tables", assets, _TIMEOUT_IN_MS, ps_monitor)
    self._init_op = tf.group([asset.item.initializer for asset in assets])

  def _restore_from_path_prefix(self, sess: tf.compat.v1.Session, path_prefix: str) -> None:
    sess.run(self._init_op)
    super()._restore_from_path_prefix(sess, path_prefix)

  def _find_paths(self, path_prefix: str, items: Sequence[MultiHashTable]) -> list[str]:
    names = [group.shared_name for group in items]
    if len(self._assets) == 1:
      names = [_restored_name(name, _saved_names(path_prefix)) for name in names]
    return [path_prefix + name for name in names]


def _saved_names(path_prefix: str) -> set[str]:
  """Returns the names of the groups that were saved under `path_prefix`."""
  folder, prefix = os.path.split(path_prefix)
  if not tf.io.gfile.isdir(folder):
    return set()
  files = (_SAVED_FILE.fullmatch(name) for name in tf.io.gfile.listdir(folder))
  return {
    file["name"].removeprefix(prefix) for file in files if file and file["name"].startswith(prefix)
  }


def _restored_name(shared_name: str, saved: set[str]) -> str:
  """Returns the name under which the only group of a run finds its rows: all belong to it."""
  groups = {name for name in saved if name.startswith(MultiHashTable.NAME_PREFIX)}
  if shared_name in _LOCAL_NAMES and shared_name not in saved and len(groups) == 1:
    (name,) = groups
    if name in _LOCAL_NAMES:
      logging.info("The rows of %s were saved as %s", shared_name, name)
      return name
  return shared_name


class MultiHashTableRestorerSaverListener(listeners.AssetRestorerSaverListener):
  """Restores the groups right after each save: expired rows go, and what was written since."""

  def __init__(self, ckpt_prefix: str):
    super().__init__(ckpt_prefix, MultiHashTableCheckpointRestorerListener(ckpt_prefix))
