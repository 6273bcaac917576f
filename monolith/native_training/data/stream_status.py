"""Tells how far behind its stream a training run is."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from monolith.native_training.data import stream_positions

_ANSWER_SECS = 1.0


class StreamStatus(NamedTuple):
  """Holds the figures of a stream for its operator.

  Attributes:
    state: where the training run stands.
    lag: messages that are in the topics and not yet trained; `None` if no broker answered.
  """

  state: stream_positions.StreamState
  lag: int | None

  def describe(self, now: float | None = None) -> str:
    """Returns a part of a progress line."""
    parts = [f"lag {'unknown' if self.lag is None else format(self.lag, ',')}"]
    if self.state.newest_event_time:
      age = (time.time() if now is None else now) - self.state.newest_event_time
      parts.append(f"newest event {max(0.0, age):,.0f} s ago")
    for count, text in (
      (self.state.bad_messages, "unreadable"),
      (self.state.repeated_samples, "repeated"),
    ):
      if count:
        parts.append(f"{count:,} {text}")
    return "   ".join(parts)


class StreamMonitor:
  """Asks brokers how many messages there are.

  Args:
    positions: the graph's.
  """

  def __init__(self, positions: stream_positions.StreamPositions):
    self._positions = positions
    self._client: Any = None

  def read(self, session: tf.compat.v1.Session) -> StreamStatus:
    """Returns the status now; brokers have a second to answer."""
    state = self._positions.read(session)
    return StreamStatus(state, self._get_lag(state))

  def _get_lag(self, state: stream_positions.StreamState) -> int | None:
    if not state.positions:
      return None
    deadline = time.monotonic() + _ANSWER_SECS
    try:
      if self._client is None:
        self._client = stream_positions.make_client(self._positions)
      lag = 0
      for partition, offset in state.positions.items():
        left = max(0.001, deadline - time.monotonic())
        lag += max(0, self._client.get_end(partition, left) - offset)
      return lag
    except Exception as e:  # Whatever a Kafka client says, training goes on.
      logging.log_every_n_seconds(logging.WARNING, "Cannot ask for the lag: %s", 60, e)
      return None

  def close(self) -> None:
    """Lets go of the brokers."""
    if self._client is not None:
      self._client.close()
      self._client = None
