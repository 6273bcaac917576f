"""One collisionless embedding table: a map from int64 ids to rows of floats.

A table is a resource in the graph. Writing returns a *new* Python object whose handle depends on
the write, so that order is expressed by data flow:

  table = hash_table_from_config(config, name_suffix="user")
  table = table.assign_add(ids, values)
  rows = table.lookup(ids)                       # sees the write; absent ids give zeros

Differences from ByteDance's Monolith: reading ops are stateful, so TensorFlow never merges two of
them around a write; restoring replaces a table only when all of the checkpoint was read.

Longer than 600 lines: a table, its factories and its checkpoint listeners are public names of this
module that share its private ones.
"""

from __future__ import annotations

import abc
import concurrent.futures
import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.framework import auto_control_deps_utils, ops

from monolith.native_training import (
  distributed_serving_ops,
  entry,
  graph_meta,
  hash_filter_ops,
  hash_table_ops_pb2,
  hash_table_utils,
  save_utils,
)
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import listeners
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops

# Part of the API, as are such names in other modules: callers reach the ops through it.
hash_table_ops = gen_monolith_ops

# Functions may run these side by side; only writes must be ordered.
for _op_type in (
  "MonolithHashTableLookup",
  "MonolithHashTableLookupEntry",
  "MonolithHashTableSize",
  "MonolithHashTableSaveAsTensor",
  "MonolithHashTableFusedLookup",
):
  auto_control_deps_utils.register_read_only_resource_op(_op_type)

_HASH_TABLE_GRAPH_KEY = "monolith_hash_tables"
_TIMEOUT_IN_MS = 3600000

# Looking for a table's files is a round trip each on a remote file system.
_NUM_PROBE_THREADS = 50

# The most that the op takes: so long a save may wait to spread the load.
_MAX_SAVE_DELAY_MS = 20000


class BaseHashTable(abc.ABC):
  """Declares the operations on a table, wherever it lives."""

  @abc.abstractmethod
  def assign(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> BaseHashTable:
    """Overwrites the vectors of `ids`; returns the table after the write."""

  @abc.abstractmethod
  def assign_add(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> BaseHashTable:
    """Adds to the vectors of `ids`; returns the table after the write."""

  @abc.abstractmethod
  def lookup(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns the vectors of `ids`, float32 `[n, dim]`; zeros for absent ids."""

  @abc.abstractmethod
  def apply_gradients(
    self,
    ids: tf.Tensor,
    grads: tf.Tensor,
    global_step: tf.Tensor,
    req_time: tf.Tensor | None = None,
  ) -> BaseHashTable:
    """Runs the optimizers; returns the table after the write."""

  @abc.abstractmethod
  def as_op(self, name: str | None = None) -> tf.Operation | tf.Tensor:
    """Returns what to run, or to depend on, for all writes so far."""

  @property
  @abc.abstractmethod
  def dim_size(self) -> int:
    """The length of a vector."""


@dataclasses.dataclass
class HashTableMetadata:
  """The tables of one graph.

  Attributes:
    name_set: the shared names in use.
    tensor_table_to_obj_dict: `handle.ref()` of a created table -> its object.
  """

  name_set: set[str] = dataclasses.field(default_factory=set)
  tensor_table_to_obj_dict: dict[Any, HashTable] = dataclasses.field(default_factory=dict)


class HashTable(BaseHashTable):
  """A table that is a single resource; made by `hash_table_from_config`.

  Args:
    table: the handle.
    shared_name: the resource's name, once per graph.
    dim_size: the length of a vector.
    slot_expire_time_config: serialized `SlotExpireTimeConfig` that `save` applies.
    learning_rate_tensor: float32 `[segments]`.
    saver_parallel: number of files of a checkpoint; -1 lets the size decide.
    extra_restore_names: further names under which a checkpoint may hold the table.
    table_proto: rebuild the object from this `HashTableProto` instead.
    import_scope: name scope under which the graph was imported.

  Raises:
    ValueError: `shared_name` is taken.
  """

  def __init__(
    self,
    table: tf.Tensor | None = None,
    shared_name: str | None = None,
    dim_size: int | None = None,
    slot_expire_time_config: bytes | None = None,
    learning_rate_tensor: tf.Tensor | None = None,
    saver_parallel: int = -1,
    extra_restore_names: Sequence[str] | None = None,
    table_proto: hash_table_ops_pb2.HashTableProto | None = None,
    import_scope: str | None = None,
  ):
    self.export_share_embedding: bool | None = None
    if table_proto is not None:
      self._init_from_proto(table_proto, import_scope)
      return
    metadata = self.get_metadata()
    if shared_name in metadata.name_set:
      raise ValueError(f"shared_name {shared_name} has already been used.")
    metadata.name_set.add(shared_name)
    self._table = table
    self._shared_name = shared_name
    self._dim_size = dim_size
    self._slot_expire_time_config = slot_expire_time_config or b""
    self._learning_rate_tensor = learning_rate_tensor
    self._saver_parallel = saver_parallel
    self._extra_restore_names = list(extra_restore_names or [])
    metadata.tensor_table_to_obj_dict[table.ref()] = self
    tf.compat.v1.add_to_collection(_HASH_TABLE_GRAPH_KEY, self)

  def _init_from_proto(
    self, proto: hash_table_ops_pb2.HashTableProto, import_scope: str | None
  ) -> None:
    graph = tf.compat.v1.get_default_graph()

    def tensor(name: str) -> tf.Tensor:
      return graph.as_graph_element(ops.prepend_name_scope(name, import_scope))

    self._table = tensor(proto.table_tensor)
    self._shared_name = proto.shared_name
    self._dim_size = proto.dim_size
    self._slot_expire_time_config = proto.slot_expire_time_config
    self._learning_rate_tensor = tensor(proto.learning_rate_tensor)
    self._saver_parallel = proto.saver_parallel
    self._extra_restore_names = list(proto.extra_restore_names)
    if proto.export_share_embedding != hash_table_ops_pb2.HashTableProto.kBoolNone:
      self.export_share_embedding = bool(proto.export_share_embedding)

  @classmethod
  def get_metadata(cls) -> HashTableMetadata:
    """Returns what is known of the default graph's tables."""
    return graph_meta.get_meta("hash_table_metadata", HashTableMetadata)

  @property
  def table(self) -> tf.Tensor:
    """The handle."""
    return self._table

  @property
  def name(self) -> str:
    """The shared name."""
    return self._shared_name

  @property
  def dim_size(self) -> int:
    return self._dim_size

  @property
  def extra_restore_names(self) -> list[str]:
    return self._extra_restore_names

  def assign(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> HashTable:
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_hash_table_assign,
        _as_ids(ids),
        _as_floats(values),
        hash_table_utils.as_req_time(req_time),
      )
    )

  def assign_add(
    self, ids: tf.Tensor, values: tf.Tensor, req_time: tf.Tensor | None = None
  ) -> HashTable:
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_hash_table_assign_add,
        _as_ids(ids),
        _as_floats(values),
        hash_table_utils.as_req_time(req_time),
      )
    )

  def lookup(
    self, ids: tf.Tensor, use_multi_threads: bool = False, enable_dedup: bool = False
  ) -> tf.Tensor:
    """Returns float32 `[n, dim]`, zeros for absent ids; a lookup never creates a row.

    Args:
      ids: int64 `[n]`.
      use_multi_threads: use all threads of the device for this batch.
      enable_dedup: accepted for compatibility; duplicates cost little.
    """
    del enable_dedup
    return self._run(
      gen_monolith_ops.monolith_hash_table_lookup, _as_ids(ids), self._dim_size, use_multi_threads
    )

  def lookup_entry(self, ids: tf.Tensor) -> tf.Tensor:
    """Returns serialized `EntryDump`s without ids, string `[n]`; empty for absent ids."""
    return self._run(gen_monolith_ops.monolith_hash_table_lookup_entry, _as_ids(ids))

  def apply_gradients(
    self,
    ids: tf.Tensor,
    grads: tf.Tensor,
    global_step: tf.Tensor,
    use_multi_threads: bool = False,
    enable_dedup: bool = False,
    req_time: tf.Tensor | None = None,
  ) -> HashTable:
    """Runs each segment's optimizer on the rows of `ids`, creating absent ones.

    Args:
      ids: int64 `[n]`.
      grads: n * dim floats of any shape.
      global_step: int64 scalar.
      use_multi_threads: use all threads of the device for this batch.
      enable_dedup: sum the gradients of equal ids and make one step; otherwise one step for each
        occurrence, in order.
      req_time: int64, seconds; becomes the rows' time of last update. 0 by default.

    Returns:
      The table after the write.
    """
    updated = self._run(
      gen_monolith_ops.monolith_hash_table_optimize,
      _as_ids(ids),
      _as_floats(grads),
      self._learning_rate_tensor,
      hash_table_utils.as_req_time(req_time),
      tf.cast(global_step, tf.int64),
      use_multi_threads=use_multi_threads,
      enable_dedup=enable_dedup,
    )
    return self.table_update(updated)

  def table_update(self, update_op: tf.Operation | tf.Tensor) -> HashTable:
    """Returns the table as it is after `update_op`."""
    with tf.control_dependencies([update_op]):
      return self._with_handle(self._run(tf.identity))

  def save(self, basename: tf.Tensor | str, random_sleep_ms: int = 0) -> HashTable:
    """Writes all rows that have not expired to `<basename>-ddddd-of-ddddd`.

    Args:
      basename: path without the shard suffix; the folder is created.
      random_sleep_ms: each file waits a random time below this, to spread the load.

    Returns:
      The table after the save. Saving fails without touching an older checkpoint of that name.
    """
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_hash_table_save,
        tf.convert_to_tensor(basename, tf.string),
        nshards=self._saver_parallel,
        random_sleep_ms=random_sleep_ms,
        slot_expire_time_config=self._slot_expire_time_config,
      )
    )

  def restore(self, basename: tf.Tensor | str) -> HashTable:
    """Replaces the content by what was saved under `basename`; returns the table after that."""
    return self._with_handle(
      self._run(
        gen_monolith_ops.monolith_hash_table_restore, tf.convert_to_tensor(basename, tf.string)
      )
    )

  def size(self) -> tf.Tensor:
    """Returns the number of rows, int64 scalar."""
    return self._run(gen_monolith_ops.monolith_hash_table_size)

  def stats(self) -> tf.Tensor:
    """Returns what the table holds and has done, int64 `[5]`.

    Rows; bytes; rows that have expired; ids that got no row because they were seen too seldom; rows
    of updates that were not finite.
    """
    return self._run(gen_monolith_ops.monolith_hash_table_stats)

  def save_as_tensor(
    self, shard_idx: tf.Tensor, num_shards: tf.Tensor, limit: tf.Tensor, offset: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a page of entries.

    Args:
      shard_idx: which partition, int32.
      num_shards: the number of shards, int32.
      limit: at most this many entries, int64.
      offset: 0, or what the previous page returned, int64.

    Returns:
      `(offset of the next page, serialized EntryDumps)`. Fewer than `limit` entries: the partition
      is finished.
    """
    return self._run(
      gen_monolith_ops.monolith_hash_table_save_as_tensor,
      tf.cast(shard_idx, tf.int32),
      tf.cast(num_shards, tf.int32),
      tf.cast(limit, tf.int64),
      tf.cast(offset, tf.int64),
    )

  def as_op(self, name: str | None = None) -> tf.Tensor:
    """Returns the handle; fetching it runs the writes it depends on."""
    del name
    return self._table

  def to_proto(self, export_scope: str | None = None) -> hash_table_ops_pb2.HashTableProto | None:
    """Returns the table's `HashTableProto`; `None` when it lies outside of `export_scope`."""
    if export_scope is not None and not self._table.name.startswith(export_scope):
      return None
    proto = hash_table_ops_pb2.HashTableProto(
      table_tensor=ops.strip_name_scope(self._table.name, export_scope),
      dim_size=self._dim_size,
      shared_name=self._shared_name,
      slot_expire_time_config=self._slot_expire_time_config,
      learning_rate_tensor=ops.strip_name_scope(self._learning_rate_tensor.name, export_scope),
      saver_parallel=self._saver_parallel,
      extra_restore_names=self._extra_restore_names,
    )
    if self.export_share_embedding is not None:
      proto.export_share_embedding = int(self.export_share_embedding)
    return proto

  @staticmethod
  def from_proto(
    table_proto: hash_table_ops_pb2.HashTableProto, import_scope: str | None = None
  ) -> HashTable:
    """Returns the table of an imported graph."""
    return HashTable(table_proto=table_proto, import_scope=import_scope)

  def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls an op on this table, where the table is."""
    with hash_table_utils.on_device_of(self._table):
      return function(self._table, *args, **kwargs)

  def _with_handle(self, table: tf.Tensor) -> HashTable:
    updated = copy.copy(self)
    updated._table = table
    return updated


ops.register_proto_function(
  _HASH_TABLE_GRAPH_KEY,
  proto_type=hash_table_ops_pb2.HashTableProto,
  to_proto=HashTable.to_proto,
  from_proto=HashTable.from_proto,
)


def _as_ids(ids: Any) -> tf.Tensor:
  return tf.convert_to_tensor(ids, dtype=tf.int64)


def _as_floats(values: Any) -> tf.Tensor:
  return tf.convert_to_tensor(values, dtype=tf.float32)


def _handle(table: HashTable | tf.Tensor) -> tf.Tensor:
  return table.table if isinstance(table, HashTable) else table


def fused_lookup(
  tables: Sequence[HashTable | tf.Tensor],
  ids: tf.Tensor,
  fused_slot_size: tf.Tensor,
  num_of_shards: int,
  req_time: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
  """Looks up K tables for N shards in one op; the ids lie shard by shard, table by table.

  Args:
    tables: K tables or handles.
    ids: int64 `[M]`.
    fused_slot_size: int32 `[K * N]`, ids of shard s and table k at `s * K + k`.
    num_of_shards: N.
    req_time: unused.

  Returns:
    `(embeddings [L], floats per shard [N], id offsets [K*N+1], embedding offsets [K*N+1], ids)`.
  """
  handles = [_handle(table) for table in tables]
  ids = _as_ids(ids)
  # A list would cost an eager call its fast path, more than a lookup of thousands of ids.
  fused_slot_size = tf.convert_to_tensor(fused_slot_size, tf.int32)
  req_time = hash_table_utils.as_req_time(req_time)
  with hash_table_utils.on_device_of(handles[0]):
    return gen_monolith_ops.monolith_hash_table_fused_lookup(
      table_handles=handles,
      ids=ids,
      fused_slot_size=fused_slot_size,
      req_time=req_time,
      num_of_shards=num_of_shards,
    )


def fused_apply_gradient(
  tables: Sequence[HashTable | tf.Tensor],
  ids: tf.Tensor,
  indices: tf.Tensor,
  fused_slot_size: tf.Tensor,
  id_grads: tf.Tensor,
  id_offsets: tf.Tensor,
  grad_offsets: tf.Tensor,
  learning_rate_tensors: tf.Tensor,
  req_time: tf.Tensor | None,
  global_step: tf.Tensor,
  num_of_shards: int,
  enable_grad_accumulation: bool = False,
) -> list[tf.Tensor]:
  """Updates K tables in one op; takes what `fused_lookup` returned, and gradients in its layout.

  Args:
    learning_rate_tensors: float `[segments of all tables]`.
    enable_grad_accumulation: sum the gradients of equal ids of a table first.
    (the others as in `fused_lookup`)

  Returns:
    The handles after the update.
  """
  handles = [_handle(table) for table in tables]
  ids = _as_ids(ids)
  fused_slot_size = tf.convert_to_tensor(fused_slot_size, tf.int32)
  req_time = hash_table_utils.as_req_time(req_time)
  global_step = tf.cast(global_step, tf.int64)
  with hash_table_utils.on_device_of(handles[0]):
    return gen_monolith_ops.monolith_hash_table_fused_optimize(
      table_handles=handles,
      ids=ids,
      indices=indices,
      fused_slot_size=fused_slot_size,
      id_grads=id_grads,
      id_offsets=id_offsets,
      grad_offsets=grad_offsets,
      learning_rate_tensors=learning_rate_tensors,
      req_time=req_time,
      global_step=global_step,
      num_of_shards=num_of_shards,
      enable_grad_accumulation=enable_grad_accumulation,
    )


def hash_table_from_config(
  config: entry.HashTableConfigInstance,
  hash_filter: tf.Tensor | None = None,
  name_suffix: str = "",
  sync_client: tf.Tensor | None = None,
  saver_parallel: int = -1,
) -> HashTable:
  """Creates a table, on the first GPU if its type is `gpucuco`, else on the CPU.

  Args:
    config: the rows' layout and optimizers, one learning rate per segment.
    hash_filter: handle of an occurrence filter; everything passes by default. That of a table on a
      GPU has to be created under that device.
    name_suffix: the shared name is `MonolithHashTable_<suffix>`.
    sync_client: handle of a client that is told of updated ids; a table on a GPU tells none.
    saver_parallel: number of files of a checkpoint; -1 lets the size decide.

  Raises:
    ValueError: the name is taken, or not as many learning rates as segments.
  """
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  table_config.CopyFrom(config.table_config)
  assert table_config.WhichOneof("type") is not None, "The table's type is not set."
  if len(config.learning_rate_fns) != len(table_config.entry_config.segments):
    raise ValueError("Size of learning_rate_fns and size of segments must be equal.")
  if export_context.is_exporting():
    hash_table_utils.for_serving(table_config)
  shared_name = "MonolithHashTable_" + name_suffix
  with tf.device(hash_table_utils.device_of_type(table_config)):
    if hash_filter is None:
      hash_filter = hash_filter_ops.create_dummy_hash_filter(name_suffix=name_suffix)
    if sync_client is None or table_config.WhichOneof("type") == "gpucuco":
      sync_client = distributed_serving_ops.create_dummy_sync_client()
    table = gen_monolith_ops.monolith_hash_table(
      hash_filter,
      sync_client,
      config=table_config.SerializeToString(),
      shared_name=shared_name,
      name=shared_name,
    )
  return HashTable(
    table,
    shared_name,
    dim_size=hash_table_utils.infer_dim_size(table_config),
    slot_expire_time_config=table_config.slot_expire_time_config.SerializeToString(),
    learning_rate_tensor=_learning_rates(config),
    saver_parallel=saver_parallel,
    extra_restore_names=config.extra_restore_names,
  )


def _learning_rates(config: entry.HashTableConfigInstance) -> tf.Tensor:
  """Returns the rates that were computed for this graph already, or new ones."""
  rates = config.learning_rate_tensor
  if rates is not None and rates.graph is tf.compat.v1.get_default_graph():
    return rates
  return config.call_learning_rate_fns()


def create_hash_table(
  dim: int,
  optimizer: entry.Optimizer | None = None,
  initializer: entry.Initializer | None = None,
  compressor: entry.Compressor | None = None,
  learning_rate: entry.LearningRate | None = None,
  admit_after: int = 0,
  expire_after_days: int = 36500,
  name: str | None = None,
) -> HashTable:
  """Creates a table of one kind of rows in the default graph.

  Args:
    dim: floats per row.
    optimizer: how gradients change a row, Adagrad by default.
    initializer: what a new row holds, uniform random numbers by default;
      `hash_table_utils.set_table_seed` seeds them.
    compressor: how rows are stored in serving, full precision by default.
    learning_rate: the optimizer's own by default.
    admit_after: this many occurrences of an id are only counted, the next one makes its row.
    expire_after_days: rows that were not updated for so long are left out of checkpoints.
    name: tables of one name are one; unique by default.

  Raises:
    ValueError: `dim` is not positive.
  """
  if dim <= 0:
    raise ValueError(f"dim is {dim}, want the number of floats per row, 1 at least")
  name = name or tf.compat.v1.get_default_graph().unique_name("table")
  optimizer = entry.AdagradOptimizer() if optimizer is None else optimizer
  segment = entry.CombineAsSegment(
    dim,
    entry.RandomUniformInitializer() if initializer is None else initializer,
    optimizer,
    entry.Fp32Compressor() if compressor is None else compressor,
  )
  if learning_rate is None:
    config = getattr(segment.opt_config, segment.opt_config.WhichOneof("type"))
    learning_rate = config.learning_rate
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  table_config.entry_config.segments.append(segment)
  table_config.slot_expire_time_config.default_expire_time = expire_after_days
  entry.CuckooHashTableConfig().mutate_table(table_config)
  thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(
    default_occurrence_threshold=admit_after
  )
  return hash_table_from_config(
    entry.HashTableConfigInstance(table_config, [learning_rate]),
    hash_filter=hash_filter_ops._create_hash_filter(
      admit_after > 0, thresholds.SerializeToString(), name
    ),
    name_suffix=name,
  )


def test_hash_table(
  dim_size: int,
  enable_hash_filter: bool = False,
  name_suffix: str | None = None,
  learning_rate: entry.LearningRate = 1.0,
  occurrence_threshold: int = 0,
  use_adagrad: bool = False,
  expire_time: int = 36500,
  sync_client: tf.Tensor | None = None,
  extra_restore_names: Sequence[str] | None = None,
  use_gpu: bool = False,
) -> HashTable:
  """Creates a simple table: one segment, SGD or Adagrad, full precision.

  New rows hold zeros. With `use_gpu` the table is on the first GPU, new rows hold ones, and there
  is no filter.
  """
  name_suffix = name_suffix or tf.compat.v1.get_default_graph().unique_name("test")
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  optimizer = entry.AdagradOptimizer() if use_adagrad else entry.SgdOptimizer()
  initializer = entry.ConstantsInitializer(1.0) if use_gpu else entry.ZerosInitializer()
  table_config.entry_config.segments.append(
    entry.CombineAsSegment(dim_size, initializer, optimizer, entry.Fp32Compressor())
  )
  table_config.slot_expire_time_config.default_expire_time = expire_time
  kind = entry.GpucucoHashTableConfig() if use_gpu else entry.CuckooHashTableConfig()
  kind.mutate_table(table_config)
  hash_filter = None
  if not use_gpu:
    thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(
      default_occurrence_threshold=occurrence_threshold
    )
    hash_filter = hash_filter_ops._create_hash_filter(
      enable_hash_filter, thresholds.SerializeToString(), name_suffix
    )
  return hash_table_from_config(
    entry.HashTableConfigInstance(table_config, [learning_rate], extra_restore_names),
    hash_filter=hash_filter,
    name_suffix=name_suffix,
    sync_client=sync_client,
  )


# Keeps pytest from collecting it where it is imported.
test_hash_table.__test__ = False


def vocab_hash_table(
  vocab_size: int,
  dim_size: int,
  enable_hash_filter: bool = False,
  learning_rate: entry.LearningRate = 1.0,
) -> HashTable:
  """Creates a table as `test_hash_table` does; tables grow, so `vocab_size` does not matter."""
  del vocab_size
  return test_hash_table(dim_size, enable_hash_filter, learning_rate=learning_rate)


def extract_slot_from_entry(entry: tf.Tensor, fid_v2: bool = True) -> tf.Tensor:
  """Returns the slots of serialized `EntryDump`s, int32 of the same length."""
  return gen_monolith_ops.monolith_extract_slot_from_entry(entry, fid_v2)


def _all_table_tensor_prefix(table: HashTable) -> list[str]:
  """Returns the file names under which a checkpoint may hold the table, its own first."""
  names = [table.name, *table.extra_restore_names]
  return [name.replace(":", "-").replace("/", "-") for name in names]


def _table_tensor_prefix(table: HashTable) -> str:
  """Returns the file name under which a checkpoint holds the table."""
  return _all_table_tensor_prefix(table)[0]


class HashTableCheckpointSaverListener(listeners.AssetSaverListener[HashTable]):
  """Saves the graph's tables to `<basename>-<step>.assets/`, before the variables are saved.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
  """

  def __init__(self, basename: str):
    tables: list[HashTable] = tf.compat.v1.get_collection(_HASH_TABLE_GRAPH_KEY)
    delay = min(15 * len(tables), _MAX_SAVE_DELAY_MS)
    assets = listeners.build_assets(
      tables, _device_of, lambda table, path: table.save(path, random_sleep_ms=delay).as_op()
    )
    super().__init__(basename, "hash tables", assets, _TIMEOUT_IN_MS)

  def _name_of(self, item: HashTable) -> str:
    return _table_tensor_prefix(item)


class HashTableCheckpointRestorerListener(listeners.AssetRestorerListener[HashTable]):
  """Restores what `HashTableCheckpointSaverListener` saved.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    ps_monitor: if given, only tables on servers that it calls uninitialized are restored.
  """

  def __init__(self, basename: str, ps_monitor: save_utils.PsMonitor | None = None):
    assets = listeners.build_assets(
      tf.compat.v1.get_collection(_HASH_TABLE_GRAPH_KEY),
      _device_of,
      lambda table, path: table.restore(path).as_op(),
    )
    super().__init__(basename, "hash tables", assets, _TIMEOUT_IN_MS, ps_monitor)

  def _find_without_checkpoint(self, folder: str) -> str | None:
    # A folder may hold nothing but the tables of one checkpoint, to start a model from.
    assets = tf.io.gfile.glob(os.path.join(folder, "*.assets"))
    # Another process may be saving its first checkpoint.
    assets = [
      path
      for path in assets
      if not checkpoint_files.is_marked_unfinished(path.removesuffix(".assets"))
    ]
    if len(assets) == 1:
      return os.path.join(assets[0], "")
    logging.info("No checkpoint found in %s, and %d asset folders", folder, len(assets))
    return None

  def _find_paths(self, path_prefix: str, items: Sequence[HashTable]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(_NUM_PROBE_THREADS) as pool:
      return list(pool.map(lambda table: _find_basename(path_prefix, table), items))


def _device_of(table: HashTable) -> str:
  return table.table.device


def _find_basename(path_prefix: str, table: HashTable) -> str:
  """Returns the first of the table's base names that has files."""
  prefixes = _all_table_tensor_prefix(table)
  for prefix in prefixes:
    if tf.io.gfile.glob(f"{path_prefix}{prefix}-?????-of-?????"):
      return path_prefix + prefix
  raise ValueError(
    f"Unable to find table checkpoint in '{path_prefix}' for table: {prefixes!r}. "
    "Maybe the model structure has been changed."
  )


class HashTableRestorerSaverListener(listeners.AssetRestorerSaverListener):
  """Restores the tables right after each save: expired rows go, and what was written since."""

  def __init__(self, ckpt_prefix: str):
    super().__init__(ckpt_prefix, HashTableCheckpointRestorerListener(ckpt_prefix))
