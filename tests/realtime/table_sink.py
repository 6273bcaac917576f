"""The tables of a session, which take a row log as a replica does: what tests compare with."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from monolith.native_training import hash_table_ops, multi_hash_table_ops
from monolith.row_log.sync_state import SyncState
from tests.realtime.table_follower import TableFollower


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
    with graph.as_default(), tf.device("/device:CPU:0"):
      self._follower = TableFollower(handles, state.topic).bind(session)
    self._follower.seek(state.epoch, state.seq)

  def apply(self, message: bytes) -> None:
    """Takes a message, and applies its batch if that is newer and complete with it.

    Raises:
      DataLossError, InvalidArgumentError: it is no batch of rows, or does not fit the tables.
    """
    self._follower.apply([message])

  def digests(self) -> Mapping[str, tuple[int, int]]:
    """Returns digest and number of rows of each table by name."""
    return self._follower.digests()
