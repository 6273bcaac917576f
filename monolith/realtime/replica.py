"""A served model that catches up with training and then follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from absl import logging

from monolith.realtime.dense_follower import DenseAssigner, DenseFollower
from monolith.realtime.row_follower import RowFollower
from monolith.realtime.table_sink import TableSink
from monolith.row_log import sync_state
from monolith.serving.errors import ServingError
from monolith.serving.servable import Follower, FollowerSample, Servable


class Replica:
  """The logs that one model follows.

  Args:
    rows: keeps its tables; None for a model without.
    dense: keeps its dense variables; None where they stay.
  """

  def __init__(self, rows: RowFollower | None, dense: DenseFollower | None):
    self._rows = rows
    self._dense = dense
    self._followers = [follower for follower in (rows, dense) if follower is not None]

  @property
  def is_caught_up(self) -> bool:
    """Whether the model is as new as training was when it was loaded."""
    return all(follower.is_caught_up for follower in self._followers)

  @property
  def reason(self) -> str:
    """Why it is not, or why it cannot go on."""
    return "; ".join(follower.reason for follower in self._followers if follower.reason)

  def start(self, on_change: Callable[[], None]) -> None:
    """Begins to read all logs."""
    for follower in self._followers:
      follower.start(on_change)

  def close(self) -> None:
    """Stops reading."""
    for follower in self._followers:
      follower.close()

  def samples(self) -> Sequence[FollowerSample]:
    """Returns the metrics of both logs."""
    found: list[FollowerSample] = []

    def add(
      name: str, meaning: str, value: float, shard: int = 0, is_counter: bool = False
    ) -> None:
      found.append(FollowerSample(f"monolith_sync_{name}", meaning, shard, value, is_counter))

    rows, dense = self._rows, self._dense
    if rows is not None:
      shard, applied = rows.shard, rows.applied
      if rows.digest_ok is not None:
        meaning = "1 where all tables equal those of training bit by bit, at the last comparison."
        add("digest_ok", meaning, rows.digest_ok, shard)
      add("epoch", "Writer of the newest batch of rows that is applied.", applied.epoch, shard)
      add("seq", "Number of the newest batch of rows that is applied.", applied.seq, shard)
      meaning = "Time of the newest event that the rows have learnt from."
      add("newest_event_time_seconds", meaning, applied.newest_event_time, shard)
      add("rows", "Rows that were set or deleted.", applied.rows, shard, is_counter=True)
      add("lag_messages", "Messages of the row log that are not applied yet.", rows.lag, shard)
      meaning = "Messages of the row log that could not be read, and were left out."
      add("skipped_messages", meaning, rows.skipped, shard, is_counter=True)
      meaning = "Times at which batches of rows were missing."
      add("gaps", meaning, rows.lost + applied.gaps, shard, is_counter=True)
    if dense is not None:
      add("dense_version", "Step of the dense variables.", dense.version)
      add("dense_sets", "Sets of dense variables assigned.", dense.sets, is_counter=True)
      meaning = "Messages with dense variables that could not be read, and were left out."
      add("dense_skipped_messages", meaning, dense.skipped, is_counter=True)
    return found


def make_follower(servable: Servable, servers: str, interval_secs: float = 0) -> Follower | None:
  """Returns what keeps a loaded model new, not yet started; None if its export names no log.

  Args:
    servable: the model.
    servers: comma-separated `host:port` of brokers.
    interval_secs: how long changes may wait once it has caught up; 0 takes them as they come.

  Raises:
    ServingError: the export says something impossible about its log.
  """
  try:
    state = sync_state.load_export(servable.path)
    dense_state = sync_state.load_export(servable.path, sync_state.DENSE_STATE)
  except ValueError as error:
    raise ServingError(grpc.StatusCode.DATA_LOSS, str(error)) from error
  rows = dense = None
  if state is not None:
    sink = TableSink(servable.session, state)
    if not sink.has_tables:
      raise ServingError(
        grpc.StatusCode.DATA_LOSS,
        f"{servable.path} follows {state.topic}[{state.partition}], but has no tables",
      )
    rows = RowFollower(servers, state, sink, interval_secs)
  if dense_state is not None:
    assigner = DenseAssigner(servable)
    if assigner.has_variables:
      dense = DenseFollower(servers, dense_state, assigner, interval_secs)
  if rows is None and dense is None:
    logging.info("%s names no log: it stays as it was exported", servable.path)
    return None
  return Replica(rows, dense)
