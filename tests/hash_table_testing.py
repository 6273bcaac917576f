"""Helps the tests of tables: tables of any layout, reading and writing record files."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry, hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1


class GraphTest(tf.test.TestCase, parameterized.TestCase):
  """Runs each test in a graph of its own."""

  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)


def temp_dir(*parts: str) -> str:
  """Returns a path in the folder of the running test."""
  return os.path.join(os.environ["TEST_TMPDIR"], *parts)


def at_step(value: int = 0) -> tf.Tensor:
  """Returns a global step."""
  return tf.constant(value, tf.int64)


def segment(
  dim: int, optimizer: Any = None, initializer: Any = None, compressor: Any = None
) -> pb.EntryConfig.Segment:
  """Returns a segment; SGD, zeros and full precision unless said otherwise."""
  return entry.CombineAsSegment(
    dim,
    initializer or entry.ZerosInitializer(),
    optimizer or entry.SgdOptimizer(),
    compressor or entry.Fp32Compressor(),
  )


def config_of(
  *segments: pb.EntryConfig.Segment,
  learning_rates: Sequence[Any] | None = None,
  serving: bool = False,
  skip_zero_embedding: bool = False,
  default_expire_time: int | None = None,
  slot_expire_times: dict[int, int] | None = None,
) -> entry.HashTableConfigInstance:
  """Returns a table of these segments; learning rate 1.0 each by default."""
  config = pb.EmbeddingHashTableConfig()
  config.cuckoo.SetInParent()
  config.entry_config.segments.extend(segments)
  if serving:
    config.entry_config.entry_type = pb.EntryConfig.SERVING
  if skip_zero_embedding:
    config.skip_zero_embedding = True
  if default_expire_time is not None:
    config.slot_expire_time_config.default_expire_time = default_expire_time
  for slot, days in (slot_expire_times or {}).items():
    config.slot_expire_time_config.slot_expire_times.add(slot=slot, expire_time=days)
  return entry.HashTableConfigInstance(config, list(learning_rates or [1.0] * len(segments)))


def make_table(
  *segments: pb.EntryConfig.Segment,
  name: str | None = None,
  hash_filter: tf.Tensor | None = None,
  saver_parallel: int = -1,
  **kwargs: Any,
) -> hash_table_ops.HashTable:
  """Creates a table of these segments; `kwargs` go to `config_of`."""
  return hash_table_ops.hash_table_from_config(
    config_of(*segments, **kwargs),
    hash_filter=hash_filter,
    name_suffix=name or tf.compat.v1.get_default_graph().unique_name("table"),
    saver_parallel=saver_parallel,
  )


def read_entries(*filenames: str) -> dict[int, pb.EntryDump]:
  """Returns the entries of plain record files, by id; an id that is there twice is an error."""
  entries: dict[int, pb.EntryDump] = {}
  for filename in filenames:
    for record in tf.compat.v1.io.tf_record_iterator(filename):
      dump = pb.EntryDump.FromString(record)
      assert dump.id not in entries, f"id {dump.id} is there twice"
      entries[dump.id] = dump
  return entries


def write_records(filename: str, records: Sequence[bytes]) -> None:
  """Writes plain TFRecords."""
  with tf.io.TFRecordWriter(filename) as writer:
    for record in records:
      writer.write(record)


def remove_manifest(basename: str) -> None:
  """Lets the files of a save be read as they are, as if another program had written them."""
  folder, name = os.path.split(basename)
  os.remove(os.path.join(folder, f".{name}.manifest"))


def list_data(folder: str) -> list[str]:
  """Returns the names in a folder, but for manifests."""
  return sorted(name for name in os.listdir(folder) if not name.endswith(".manifest"))


def frame(data: bytes, header_crc: str, data_crc: str) -> bytes:
  """Returns a TFRecord with the given checksums, as hex in file order."""
  return struct.pack("<Q", len(data)) + bytes.fromhex(header_crc) + data + bytes.fromhex(data_crc)
