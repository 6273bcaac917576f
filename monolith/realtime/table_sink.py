"""Writes batches of rows into the tables of a loaded model."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from monolith.native_training import hash_table_ops, multi_hash_table_ops
from monolith.realtime.framing import unframe
from monolith.realtime.log_follower import PoisonedError
from monolith.realtime.row_follower import SinkState
from monolith.realtime.row_log_pb2 import RowBatch
from monolith.realtime.sync_state import SyncState


class TableSink:
  """The tables of a session's graph.

  Args:
    session: holds the tables, created and restored.
    state: what they hold.
  """

  def __init__(self, session: tf.compat.v1.Session, state: SyncState):
    self._state = SinkState(state.epoch, state.seq)
    self._shard = state.partition
    self._number = None
    self._chunks = {}
    graph = session.graph
    self._assigns = {}
    with graph.as_default():
      for group in graph.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
        for name, dim in zip(group.table_names, group.get_table_dim_sizes()):
          ids = tf.compat.v1.placeholder(tf.int64, [None])
          values = tf.compat.v1.placeholder(tf.float32, [None, dim])
          op = group.assign({name: (ids, values)}).as_op()
          self._assigns[name] = dim, session.make_callable(op, [ids, values])
      for table in graph.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY):
        ids = tf.compat.v1.placeholder(tf.int64, [None])
        values = tf.compat.v1.placeholder(tf.float32, [None, table.dim_size])
        op = table.assign(ids, values).as_op()
        self._assigns[table.name] = table.dim_size, session.make_callable(op, [ids, values])

  @property
  def has_tables(self) -> bool:
    """Whether the graph has tables."""
    return bool(self._assigns)

  def apply(self, message: bytes) -> SinkState:
    try:
      header = RowBatch.FromString(unframe(message))
    except Exception as error:
      raise PoisonedError(str(error)) from error
    if header.shard != self._shard or not 0 <= header.chunk < header.num_chunks:
      raise PoisonedError(f"shard {header.shard}, chunk {header.chunk} of {header.num_chunks}")
    state = self._state
    number = (header.epoch, header.seq, header.num_chunks)
    if (header.epoch, header.seq) <= (state.epoch, state.seq):
      return state
    if number != self._number:
      self._number, self._chunks = number, {}
    self._chunks[header.chunk] = header
    if len(self._chunks) < header.num_chunks:
      return state
    total = 0
    for chunk in self._chunks.values():
      for table in chunk.tables:
        if table.name not in self._assigns:
          raise PoisonedError(f"there is no table {table.name!r}")
        dim, call = self._assigns[table.name]
        ids = np.frombuffer(table.ids, "<i8")
        rows = np.frombuffer(table.rows, "<f2" if table.half else "<f4").astype(np.float32)
        call(ids, rows.reshape(-1, dim))
        total += len(ids)
    gap = header.epoch == state.epoch and header.prev_seq != state.seq
    self._state = dataclasses.replace(
      state,
      epoch=header.epoch,
      seq=header.seq,
      newest_event_time=header.newest_event_time,
      batches=state.batches + 1,
      rows=state.rows + total,
      gaps=state.gaps + gap,
    )
    return self._state

  def explain_digests(self) -> str:
    return ""
