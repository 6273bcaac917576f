"""A checkpoint whose table files a test writes itself, without tables: files, ids and counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.lib.io import _pywrap_record_io

from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb

_SNAPPY = "SNAPPY"


def entry(row_id: int) -> bytes:
  return pb.EntryDump(id=row_id, num=[float(row_id % 7)]).SerializeToString()


def write_records(path: str, records: Sequence[bytes], compression: str = "") -> None:
  os.makedirs(os.path.dirname(path), exist_ok=True)
  options = _pywrap_record_io.RecordWriterOptions(compression)
  writer = _pywrap_record_io.RecordWriter(path, options)
  for record in records:
    writer.write(record)
  writer.close()


def write_checkpoint(
  folder: str,
  tables: Mapping[str, Sequence[int]] | None = None,
  groups: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
  filters: Mapping[str, bytes] | None = None,
  step: int = 5,
) -> str:
  """Writes a checkpoint with one file per table, and names it in the state file.

  Args:
    folder: where to.
    tables: file name without shard -> ids.
    groups: file name without shard -> table name -> ids.
    filters: file name without shard -> content of its only record.
    step: part of the name.

  Returns:
    The prefix.
  """
  prefix = os.path.join(folder, f"model.ckpt-{step}")
  os.makedirs(prefix + ".assets", exist_ok=True)
  for suffix in (".index", ".meta", ".data-00000-of-00001"):
    with open(prefix + suffix, "w") as f:
      f.write(f"variables{suffix}")

  def path(name: str) -> str:
    return os.path.join(prefix + ".assets", f"{name}-00000-of-00001")

  for name, ids in (tables or {}).items():
    write_records(path(name), [entry(i) for i in ids])
  for name, parts in (groups or {}).items():
    rows = [entry(i) for part in sorted(parts) for i in parts[part]]
    write_records(path(name), rows, _SNAPPY)
    counts = [
      pb.MultiHashTableMetadata(table_name=part, num_entries=len(parts[part]))
      for part in sorted(parts)
    ]
    write_records(path(f"{name}.meta"), [count.SerializeToString() for count in counts])
  for name, content in (filters or {}).items():
    write_records(path(name), [content])
  checkpoint_management.update_checkpoint_state_internal(
    save_dir=folder, model_checkpoint_path=prefix, all_model_checkpoint_paths=[prefix]
  )
  return prefix


def read_ids(prefix: str) -> dict[str, list[int]]:
  """Returns file name without shard -> ids in file order, for all tables and groups."""
  found = {}
  for name in sorted(tf.io.gfile.listdir(prefix + ".assets")):
    stem = name.split("-")[0]
    if stem.endswith(".meta") or stem.startswith(("hash_filter", ".")):
      continue
    path = os.path.join(prefix + ".assets", name)
    compression = _SNAPPY if stem.startswith("MonolithMultiHashTable") else ""
    records = _pywrap_record_io.RecordIterator(path, compression)
    found.setdefault(stem, []).extend(pb.EntryDump.FromString(r).id for r in records)
  return found


def read_counts(prefix: str, group: str) -> dict[str, int]:
  """Returns table name -> number of rows, as the metadata of a group's file says."""
  path = os.path.join(prefix + ".assets", f"{group}.meta-00000-of-00001")
  metadata = map(pb.MultiHashTableMetadata.FromString, _pywrap_record_io.RecordIterator(path, ""))
  return {m.table_name: m.num_entries for m in metadata}
