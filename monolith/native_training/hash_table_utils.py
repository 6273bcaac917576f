"""Helpers around one table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

_SEED_ENV = "MONOLITH_TABLE_SEED"
_CPU = "/device:CPU:0"
_GPU = "/device:GPU:0"


class Pageable(Protocol):
  """A table whose entries can be read a page at a time: a `hash_table_ops.BaseHashTable`."""

  def save_as_tensor(
    self, shard_idx: Any, num_shards: int, limit: int, offset: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where the next page of a shard begins, and the serialized entries of this one."""
    ...


def infer_dim_size(config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> int:
  """Returns the length of a row's vector: the sum of its segments'."""
  return sum(segment.dim_size for segment in config.entry_config.segments)


def device_of_type(config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> str:
  """Returns the device of a table of that type, without job and task."""
  return _GPU if config.WhichOneof("type") == "gpucuco" else _CPU


def for_serving(config: embedding_hash_table_pb2.EmbeddingHashTableConfig) -> None:
  """Turns a configuration into that of a serving table, whose rows are in main memory."""
  config.entry_config.entry_type = embedding_hash_table_pb2.EntryConfig.SERVING
  if config.WhichOneof("type") == "gpucuco":
    config.cuckoo.SetInParent()


def on_device_of(handle: tf.Tensor) -> contextlib.AbstractContextManager:
  """Returns a scope for ops on a table or a filter: that of its GPU, if it is on one.

  Ops on a resource must be where it is; the scopes around a caller may say something else.
  """
  device = handle.device
  if device and tf.DeviceSpec.from_string(device).device_type == "GPU":
    return tf.device(device)
  return contextlib.nullcontext()


def as_req_time(req_time: Any) -> tf.Tensor:
  """Returns the time of an update in seconds as int64; 0 for `None`."""
  return tf.constant(0, tf.int64) if req_time is None else tf.cast(req_time, tf.int64)


def iterate_table_and_apply(
  table: Pageable,
  apply_fn: Callable[[tf.Tensor], None],
  limit: int = 1000,
  nshards: int = 4,
  name: str = "IterateTable",
) -> tf.Tensor:
  """Calls `apply_fn` with all entries of a table, a page at a time.

  Args:
    table: the table.
    apply_fn: takes serialized `EntryDump`s, a string vector of at most `limit`.
    limit: entries per page.
    nshards: partitions, visited one after another.
    name: name scope.

  Returns:
    How many entries were visited, int64; running it does the work.
  """

  @tf.function
  def iterate() -> tf.Tensor:
    visited = tf.constant(0, tf.int64)
    for shard in tf.range(nshards):
      offset = tf.constant(0, tf.int64)
      more = tf.constant(True)
      while more:
        offset, entries = table.save_as_tensor(shard, nshards, limit, offset)
        apply_fn(entries)
        count = tf.size(entries, out_type=tf.int64)
        visited += count
        more = count >= limit
    return visited

  with tf.name_scope(name):
    return iterate()


def set_table_seed(seed: int | None) -> None:
  """Lets tables that this process creates from now on have the same initial values in every run.

  Each row's depend on the seed and its id. Parameter servers are processes of their own: give them
  the environment variable that this sets, `MONOLITH_TABLE_SEED`.

  Args:
    seed: more than 0, less than 2^64; `None` for other values in every run, the default.

  Raises:
    ValueError: the seed is out of range.
  """
  if seed is None:
    os.environ.pop(_SEED_ENV, None)
    return
  if not 0 < seed < 1 << 64:
    raise ValueError(f"seed is {seed}, want more than 0 and less than 2^64")
  os.environ[_SEED_ENV] = str(seed)
