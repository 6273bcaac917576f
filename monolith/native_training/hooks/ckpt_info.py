"""Writes beside each checkpoint how many ids of each slot its tables hold."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.lib.io import file_io

from monolith.native_training import hash_table_ops, hash_table_utils, multi_hash_table_ops
from monolith.native_training.proto import ckpt_info_pb2

_MAX_SLOT = 102400
_ENTRIES_PER_PAGE = 10000


class FidSlotCountSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Counts the entries of all tables by slot and writes `<model_dir>/ckpt.info-<step>`.

  Groups of tables are left to `multi_hash_table_ops.MultiHashTableCheckpointSaverListener`, which
  writes that file itself.
  """

  def __init__(self, model_dir: str):
    """Builds the counting ops, so the tables must be there.

    Args:
      model_dir: created if missing.

    Raises:
      ValueError: the default graph has no table.
    """
    self._model_dir = model_dir
    tables = tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY)
    self._has_multi_tables = bool(
      tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
    )
    if not tables and not self._has_multi_tables:
      raise ValueError("There is no hash table in the graph. Create the listener after the tables.")
    self._init_ops: list[tf.Operation] = []
    self._count_ops: list[tf.Tensor] = []
    self._counts: list[tf.Tensor] = []
    if not self._has_multi_tables:
      tables_of_device = defaultdict(list)
      for table in tables:
        tables_of_device[table.table.device].append(table)
      for device, device_tables in tables_of_device.items():
        self._build_counter(device, device_tables)

  def _build_counter(self, device: str, tables: list[hash_table_ops.HashTable]) -> None:
    with tf.device(device):
      counts = tf.compat.v1.Variable(
        np.zeros([_MAX_SLOT], np.int64), trainable=False, collections=[], use_resource=True
      )

      def count_slots(entries: tf.Tensor) -> None:
        slots = hash_table_ops.extract_slot_from_entry(entries)
        slots = tf.clip_by_value(slots, 0, _MAX_SLOT - 1)
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(slots, tf.int64), slots))

      self._init_ops.append(counts.initializer)
      self._count_ops += [
        hash_table_utils.iterate_table_and_apply(table, count_slots, limit=_ENTRIES_PER_PAGE)
        for table in tables
      ]
      self._counts.append(counts.read_value())

  def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._has_multi_tables:
      return
    session.run(self._init_ops)
    session.run(self._count_ops)
    counts = np.sum(session.run(self._counts), axis=0)
    info = ckpt_info_pb2.CkptInfo()
    for slot in np.flatnonzero(counts):
      info.slot_counts[int(slot)] = int(counts[slot])
    tf.io.gfile.makedirs(self._model_dir)
    file_io.atomic_write_string_to_file(
      os.path.join(self._model_dir, f"ckpt.info-{global_step_value}"),
      text_format.MessageToString(info),
    )
