"""Reads a partition from a position to the end that it had, then follows it for as long as it runs.

    start -> behind -> caught up -> ... -> closed

A thread of its own does it. Nothing that a broker or a message does ends it: it says why it cannot
go on, and tries again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from monolith.row_log.partition_reader import OffsetGoneError, PartitionReader
from monolith.row_log.sync_state import SyncState

_RETRY_SECS = 1.0
_READ_SECS = 0.1
# Reading waits until it has so many. Behind, that saves calls; while requests are answered, each
# message is taken as it comes: a hundred of them would be copied in one go, and applied in another.
_MESSAGES_BEHIND, _MESSAGES_FOLLOWING = 100, 1
_SHORT_OF_MEMORY = (MemoryError, tf.errors.ResourceExhaustedError)


class PoisonedError(ValueError):
  """A message that cannot be what it should be."""


class LogFollower:
  """Follows one partition.

  Args:
    servers: comma-separated `host:port` of brokers.
    state: where to begin.
    interval_secs: once it has caught up, how long it lets messages wait; 0 takes them as they come.

  Attributes:
    next_offset: where the message is that is handled next.
    lag: messages behind the end of the partition, as last heard.
    skipped: messages that were poisoned.
    lost: how often messages were gone before they were read.
  """

  def __init__(self, servers: str, state: SyncState, interval_secs: float = 0):
    self._servers = servers
    self._interval_secs = interval_secs
    self._state = state
    self.name = f"{state.topic}[{state.partition}]"
    self.next_offset = state.next_offset
    self.lag = 0
    self.skipped = 0
    self.lost = 0
    # The end as it was at the start: what is behind it comes while we serve.
    self._target: int | None = None
    self._is_caught_up = False
    self._reason = "it has not begun to read the log"
    self._on_change: Callable[[], None] = lambda: None
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

  @property
  def is_caught_up(self) -> bool:
    """Whether everything that was in the log at the start is applied."""
    return self._is_caught_up

  @property
  def reason(self) -> str:
    """Why it does not go on, or how far it is; empty while it follows."""
    return self._reason

  def start(self, on_change: Callable[[], None]) -> None:
    """Begins to read.

    Args:
      on_change: called from the thread when `is_caught_up` or `reason` has changed.
    """
    self._on_change = on_change
    self._thread.start()

  def close(self) -> None:
    """Stops reading; when it returns, nothing is applied any more."""
    self._stopping.set()
    if self._thread.ident is not None and self._thread is not threading.current_thread():
      self._thread.join()

  def handle(self, offset: int, value: bytes) -> None:
    """Applies a message.

    Raises:
      PoisonedError: the message is not what it should be. Every other error counts as one, too,
        except that memory is short.
    """
    raise NotImplementedError

  def begin_after_gap(self, low: int, high: int) -> bool:
    """Whether to read from the oldest message on although the position is gone.

    Args:
      low: offset of the oldest message.
      high: offset of the end.
    """
    del low, high
    return self._is_caught_up

  def _run(self) -> None:
    while not self._stopping.is_set():
      reader = None
      try:
        reader = PartitionReader(self._servers, self._state.topic, self._state.partition)
        self._follow(reader)
      except Exception as error:  # A broker that is away comes back.
        self._say(f"cannot read {self.name} at {self._servers}: {error}")
      finally:
        if reader is not None:
          reader.close()
      self._stopping.wait(_RETRY_SECS)

  def _follow(self, reader: PartitionReader) -> None:
    try:
      low, high = reader.bounds()
    except LookupError:
      if self.next_offset:
        raise
      # Nobody has written yet: there is nothing to catch up with.
      self._set_caught_up()
      return
    if self._target is None:
      self._target = high
    if not low <= self.next_offset <= high:
      gap = f"offset {self.next_offset} of {self.name} is gone: the log holds {low} to {high}"
      if not self.begin_after_gap(low, high):
        self._say(f"{gap}; a newer export is needed")
        return
      self.lost += 1
      logging.error("%s; going on at %d", gap, low)
      self.next_offset = low
    reader.seek(self.next_offset)
    self._note_progress(high)
    is_idle = True
    while not self._stopping.is_set():
      if self._interval_secs and self._is_caught_up and is_idle:
        self._stopping.wait(self._interval_secs)
      try:
        count = _MESSAGES_FOLLOWING if self._is_caught_up else _MESSAGES_BEHIND
        messages, end = reader.read(count, _READ_SECS)
      except OffsetGoneError as error:
        # The bounds say what to do.
        logging.warning("%s", error)
        return
      for offset, value in messages:
        if self._stopping.is_set():
          return
        self._handle(offset, value)
        self.next_offset = offset + 1
      self.next_offset = max(self.next_offset, end)
      high = max(high, reader.known_end(), self.next_offset)
      self._note_progress(high)
      is_idle = end >= 0 or not messages

  def _handle(self, offset: int, value: bytes) -> None:
    try:
      self.handle(offset, value)
    except _SHORT_OF_MEMORY:
      raise  # tried again
    except Exception as error:  # Whatever a message can do, the next one may be all right.
      self.skipped += 1
      logging.error("Skipped the message at offset %d of %s: %s", offset, self.name, error)

  def _note_progress(self, high: int) -> None:
    self.lag = max(0, high - self.next_offset)
    if self._target is not None and self.next_offset >= self._target:
      self._set_caught_up()
    elif not self._is_caught_up:
      self._say(f"at offset {self.next_offset} of {self._target} of {self.name}", quietly=True)

  def _set_caught_up(self) -> None:
    if not self._is_caught_up:
      logging.info("Caught up with %s at offset %d", self.name, self.next_offset)
    if not self._is_caught_up or self._reason:
      self._is_caught_up, self._reason = True, ""
      self._on_change()

  def _say(self, reason: str, quietly: bool = False) -> None:
    if reason == self._reason:
      return
    if not quietly:
      logging.warning("%s", reason)
    self._reason = reason
    self._on_change()
