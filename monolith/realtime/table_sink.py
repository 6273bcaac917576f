"""Writes a row log into the tables of a loaded model; the op library does the work."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from monolith.native_training import hash_table_ops, multi_hash_table_ops
from monolith.realtime.log_follower import PoisonedError
from monolith.realtime.row_follower import SinkState
from monolith.row_log import row_log
from monolith.row_log.sync_state import SyncState


class TableSink:
  """The tables of a session's graph.

  Args:
    session: holds the tables, created and restored.
    state: what they hold.
  """

  def __init__(self, session: tf.compat.v1.Session, state: SyncState):
    graph = session.graph
    groups = graph.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
    tables = graph.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY)
    handles = [group.handle for group in groups] + [table.table for table in tables]
    self.has_tables = bool(handles)
    self._unknown_tables = 0
    if handles:
      with graph.as_default(), tf.device("/device:CPU:0"):
        self._follower = row_log.TableFollower(handles, state.topic).bind(session)
      self._follower.seek(state.epoch, state.seq)

  def apply(self, message: bytes) -> SinkState:
    """Takes a message, and applies its batch if that is newer and complete with it.

    Raises:
      PoisonedError: the message is no batch of rows, or does not fit the tables.
    """
    try:
      state = self._follower.apply([message])
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
      raise PoisonedError(error.message.splitlines()[0]) from error
    if state.unknown_tables and not self._unknown_tables:
      logging.error(
        "The row log has tables that the model does not have: batch %d of epoch %d and others",
        state.seq, state.epoch,
      )  # fmt: skip
    self._unknown_tables = state.unknown_tables
    return SinkState(
      epoch=state.epoch,
      seq=state.seq,
      newest_event_time=state.newest_event_time,
      batches=state.batches,
      rows=state.rows + state.deleted,
      gaps=state.gaps,
      digest_seq=state.digest_seq,
      digest_ok=None if state.digest_ok < 0 else bool(state.digest_ok),
    )

  def digests(self) -> Mapping[str, tuple[int, int]]:
    """Returns digest and number of rows of each table by name."""
    return self._follower.digests()
