"""Keeps the tables of a serving process equal to those of a parameter server.

Messages are applied in the order of the log; what is repeated, torn or older changes nothing. Where
the writer says what its tables are after a batch, the replica's are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from absl import logging

from monolith.realtime.log_follower import LogFollower
from monolith.realtime.row_log_pb2 import Digest, RowBatch
from monolith.row_log.framing import CRC_BYTES
from monolith.row_log.sync_state import SyncState

# Rows that were saved while a batch was on its way are newer than that batch. One can be under way
# when a replica starts, so from the next one on both tables must be equal.
_BATCHES_UNTIL_EQUAL = 2


@dataclasses.dataclass(frozen=True)
class SinkState:
  """What the tables hold.

  Attributes:
    epoch: writer of the newest batch that was applied.
    seq: number of that batch.
    newest_event_time: seconds since 1970 of the newest sample that the rows have learnt from.
    batches: how many were applied.
    rows: how many rows were set or deleted.
    gaps: batches whose predecessor was not applied.
    digest_seq: the batch after which tables were last compared with the writer's.
    digest_ok: whether they were equal; None if they were not compared.
  """

  epoch: int = 0
  seq: int = 0
  newest_event_time: int = 0
  batches: int = 0
  rows: int = 0
  gaps: int = 0
  digest_seq: int = 0
  digest_ok: bool | None = None


class RowSink(Protocol):
  """Tables that can be written to."""

  def apply(self, message: bytes) -> SinkState:
    """Takes a message, and applies its batch if that is newer and complete with it.

    Raises:
      PoisonedError: the message is no batch of rows, or does not fit the tables.
    """

  def digests(self) -> Mapping[str, tuple[int, int]]:
    """Returns digest and number of rows of each table by name."""


class RowFollower(LogFollower):
  """Applies a row log to tables.

  Args:
    servers: comma-separated `host:port` of brokers.
    state: what the tables hold.
    sink: the tables.
    interval_secs: how long messages may wait; 0 takes them as they come.

  Attributes:
    shard: index of the parameter server.
    applied: what the tables hold now.
    digest_ok: whether they equal the writer's; None before the first comparison.
  """

  def __init__(self, servers: str, state: SyncState, sink: RowSink, interval_secs: float = 0):
    super().__init__(servers, state, interval_secs)
    self.shard = state.partition
    self.applied = SinkState(state.epoch, state.seq)
    self.digest_ok: bool | None = None
    self._sink = sink
    # How many batches were applied when the end of the log at the start was met.
    self._batches_at_start: int | None = None

  def handle(self, offset: int, value: bytes) -> None:
    if self._batches_at_start is None and self._target is not None and offset >= self._target:
      self._batches_at_start = self.applied.batches
    before, self.applied = self.applied, self._sink.apply(value)
    if self.applied.gaps > before.gaps:
      logging.error(
        "Batch %d of epoch %d of %s does not follow batch %d of epoch %d, the newest one here: "
        "rows are missing until they are sent again",
        self.applied.seq, self.applied.epoch, self.name, before.seq, before.epoch,
      )  # fmt: skip
    if self.applied.batches > before.batches and self.applied.digest_seq == self.applied.seq:
      self._note_digest(value)

  def _note_digest(self, value: bytes) -> None:
    start = self._batches_at_start
    if start is None or self.applied.batches - start < _BATCHES_UNTIL_EQUAL:
      return
    self.digest_ok = self.applied.digest_ok
    if not self.digest_ok:
      self._log_difference(RowBatch.FromString(value[CRC_BYTES:]).digest)

  def _log_difference(self, wanted: Digest) -> None:
    found = self._sink.digests()
    for table in sorted(set(found) | set(wanted.tables)):
      have = found.get(table, (0, 0))
      want = (wanted.tables.get(table, 0), wanted.row_counts.get(table, 0))
      if have != want:
        logging.error(
          "Table %s differs from the writer's of %s after batch %d of epoch %d: digest %016x of %d "
          "rows, want %016x of %d rows",
          table, self.name, self.applied.seq, self.applied.epoch, *have, *want,
        )  # fmt: skip
