"""Tables of a session that apply a row log by the ops that the model server uses.

follower = TableFollower([table.table], "model:ps_0")
state = follower.bind(session).apply(messages)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops


@dataclasses.dataclass(frozen=True)
class FollowerState:
  """Says where a follower stands.

  Attributes:
    epoch, seq: the newest batch that was applied.
    newest_event_time: seconds since 1970 of the newest sample that its rows have learnt from.
    batches, rows, deleted: how many were applied.
    skipped: messages that were not newer.
    torn: batches that were never complete.
    gaps: batches whose predecessor is missing.
    unknown_tables: parts of batches for tables that are not here.
    waiting_chunks: chunks of a batch that is not complete yet.
    digest_seq: the batch at which digests were compared last.
    digest_ok: whether they were equal; -1 if none has come.
    send_time: when the newest batch was sent, in seconds since 1970.
  """

  epoch: int
  seq: int
  newest_event_time: int
  batches: int
  rows: int
  deleted: int
  skipped: int
  torn: int
  gaps: int
  unknown_tables: int
  waiting_chunks: int
  digest_seq: int
  digest_ok: int
  send_time: float


class TableFollower:
  """Tables that follow a row log. Build it while their graph is open, then bind a session.

  Args:
    tables: handles of single tables and of groups. A single table goes by its handle's name.
    name: followers of the same name are one.
  """

  def __init__(self, tables: Sequence[tf.Tensor], name: str = ""):
    tables = list(tables)
    handle = gen_monolith_ops.monolith_row_log_follower(
      shared_name=f"MonolithRowLogFollower_{name}"
    )
    self._session: tf.compat.v1.Session | None = None
    self._messages = tf.compat.v1.placeholder(tf.string, [None], name="row_log_messages")
    self._apply = gen_monolith_ops.monolith_row_log_apply(handle, tables, self._messages)
    self._epoch = tf.compat.v1.placeholder(tf.int64, [], name="row_log_epoch")
    self._seq = tf.compat.v1.placeholder(tf.int64, [], name="row_log_seq")
    self._seek = gen_monolith_ops.monolith_row_log_seek(handle, tables, self._epoch, self._seq)
    self._kept = gen_monolith_ops.monolith_row_log_follower_digests(handle)
    self._scanned = gen_monolith_ops.monolith_row_log_digests(tables)

  def bind(self, session: tf.compat.v1.Session) -> TableFollower:
    """Uses a session from now on, and returns this follower."""
    self._session = session
    return self

  def _run(self, fetches: Any, feeds: dict[Any, Any] | None = None) -> Any:
    assert self._session is not None, "call bind first"
    return self._session.run(fetches, feeds)

  def seek(self, epoch: int, seq: int) -> None:
    """Goes on behind a batch whose rows the tables have. Reads all rows, for their digests."""
    self._run(self._seek, {self._epoch: epoch, self._seq: seq})

  def apply(self, messages: Sequence[bytes]) -> FollowerState:
    """Applies messages, each batch when all its chunks have come.

    Raises:
      tf.errors.DataLossError: a message is damaged; those before it count.
      tf.errors.InvalidArgumentError: a message does not fit the tables; those before it count.
    """
    state, send_time = self._run(self._apply, {self._messages: list(messages)})
    names = [field.name for field in dataclasses.fields(FollowerState)]
    values: dict[str, Any] = dict(zip(names, map(int, state)))
    return FollowerState(**{**values, "send_time": float(send_time)})

  def digests(self, scan: bool = False) -> dict[str, tuple[int, int]]:
    """Returns table -> digest and number of rows that are not zeros.

    Args:
      scan: whether to read all rows, instead of what was kept with each batch.
    """
    names, digests, rows = self._run(self._scanned if scan else self._kept)
    return {
      name.decode(): (int(digest), int(count)) for name, digest, count in zip(names, digests, rows)
    }
