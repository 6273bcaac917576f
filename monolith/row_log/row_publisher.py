"""Publishes the changed rows of one shard's tables: a thread on a parameter server.

A writer takes an epoch when it starts, one more than those in its partition, and numbers its
batches. A batch is in the log when all its messages are; until then nothing else is written. No
error ends the thread: serving would grow stale while training goes on, and nobody would see it.
Only another writer with a higher epoch does, which has taken its place, and the end of its session.

Tables whose content was replaced are published as a whole, except when they come from a checkpoint
whose position in the log is known: then only ids that the log has behind that position can differ
from what replicas have, provided that rows which the checkpoint has and the log had not at that
moment were published later. That shows in a batch made after the checkpoint was complete
(`saved_step`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from monolith.native_training import utils
from monolith.native_training.metric import cli
from monolith.realtime.row_log_pb2 import RowBatch
from monolith.row_log import row_log, topics
from monolith.row_log.log_partition import LogPartition

# More rows are not kept back for the interval's sake.
MAX_WAITING_BYTES = 64 * 1024 * 1024
DIGEST_SECS = 30.0
_POLL_SECS = 0.1
_RETRY_SECS = 1.0
# A writer that was replaced may have written a last batch behind its successor's first.
_LAST_MESSAGES = 64
_CRC_BYTES = 4
# Ids of this many bytes of messages are touched at once.
_LOT_BYTES = 64 * 1024 * 1024


class FencedError(Exception):
  """Another writer has taken over this partition."""


class _SharedEpochError(Exception):
  """Another writer has taken the same epoch at the same time."""


class RowPublisher:
  """Publishes the rows of one shard until it is stopped.

  Args:
    writer: the client of the shard's tables, bound to a session.
    servers: comma-separated `host:port` of brokers.
    model: the model's name in the log; the topic is `rows.<model>`.
    shard: index of the parameter server, which is the partition.
    num_shards: how many there are.
    interval_secs: time between two batches.
    digest_secs: time between two digests; 0 for none.
    sample_positions: returns partition -> next offset of the samples that the rows have learnt
      from; `None` if that is not known.
  """

  def __init__(
    self,
    writer: row_log.RowLogWriter,
    servers: str,
    model: str,
    shard: int = 0,
    num_shards: int = 1,
    interval_secs: float = 10.0,
    digest_secs: float = DIGEST_SECS,
    sample_positions: Callable[[], Mapping[int, int]] | None = None,
  ):
    if not 0 <= shard < num_shards:
      raise ValueError(f"shard is {shard}, want one of {num_shards}")
    self._writer = writer
    self._servers = servers
    self._model = model
    self._shard = shard
    self._num_shards = num_shards
    self._interval_secs = interval_secs
    self._digest_secs = digest_secs if writer.keeps_hashes else 0
    self._sample_positions = sample_positions
    self._topic = topics.rows_topic(model)
    self._log: LogPartition | None = None
    self._epoch = 0
    self._seq = 0  # the newest batch that is in the log
    self._last_seq = 0  # the newest one that was begun: numbers of torn ones are not used again
    self._send_time = 0.0
    self._saved_step = 0
    self._scan = False
    self._next_offset = 0
    self._ready_seen = 0
    self._next_batch = 0.0
    self._next_digest = 0.0
    self._stopped = threading.Event()
    self._flush = threading.Event()
    self._published = threading.Condition()
    self._num_rounds = 0
    self._is_ending = False
    self._has_tables = True  # as far as is known
    self._metrics = cli.get_cli(utils.get_metric_prefix())
    self._tags = {"model": model, "shard": str(shard)}
    self._thread = threading.Thread(target=self._run, name=f"row_publisher_{shard}", daemon=True)
    self.rows_published = 0
    self.failures = 0
    self.fenced = False

  def start(self) -> RowPublisher:
    """Starts the thread, and returns this publisher."""
    self._thread.start()
    return self

  def position(self) -> dict[str, Any]:
    """Returns the newest batch that is in the log, and the offset behind it."""
    return {
      "epoch": self._epoch,
      "seq": self._seq,
      "topic": self._topic,
      "partition": self._shard,
      "next_offset": self._next_offset,
    }

  def flush(self, timeout_secs: float) -> bool:
    """Publishes what has changed up to now; returns whether it is in the log in time."""
    with self._published:
      # The round that is under way may have taken its rows already.
      wanted = self._num_rounds + 2
      deadline = time.monotonic() + timeout_secs
      while self._num_rounds < wanted and self._thread.is_alive():
        if self._is_ending and not self._has_tables:
          return True  # there never was anything to publish
        self._flush.set()
        if not self._published.wait(max(0.0, min(_POLL_SECS, deadline - time.monotonic()))):
          if time.monotonic() >= deadline:
            return False
      return self._num_rounds >= wanted

  def stop(self, flush_secs: float = 10.0) -> None:
    """Publishes what is left, if the broker takes it in time, and ends the thread."""
    self._is_ending = True
    if self._thread.is_alive() and not self._stopped.is_set() and flush_secs > 0:
      if not self.flush(flush_secs):
        logging.warning(
          "Shard %d of the row log %s ends with rows that are not published.",
          self._shard, self._topic,
        )  # fmt: skip
    self._stopped.set()
    if self._thread.ident is not None:
      self._thread.join()

  # The methods below run in the thread.

  def _run(self) -> None:
    while not self._stopped.is_set():
      try:
        self._step()
      except FencedError as error:
        self.fenced = True
        logging.error("%s: shard %d of %s is published no more.", error, self._shard, self._topic)
        break
      except InterruptedError:
        break
      except _SharedEpochError:
        # The later one goes on with a number of its own; the other one will see it and end.
        self._epoch = self._seq = self._last_seq = 0
        self._scan = True
      except Exception:
        if self._writer.is_closed:
          logging.warning("The session of shard %d of %s is closed.", self._shard, self._topic)
          break
        self.failures += 1
        self._metrics.emit_counter("row_log_failures", 1, self._tags)
        logging.exception(
          "Shard %d of %s could not be published; the next attempt is in %.0f s.",
          self._shard, self._topic, _RETRY_SECS,
        )  # fmt: skip
        self._stopped.wait(_RETRY_SECS)
    if self._log is not None:
      self._log.close()

  def _step(self) -> None:
    """Does the next thing: waits, connects, recovers or publishes."""
    info = self._writer.info()
    self._has_tables = info.ready_count > 0 and info.num_tables > 0
    if not self._has_tables:
      # Tables that were not restored yet would be published as empty.
      self._stopped.wait(_POLL_SECS)
      return
    if self._epoch == 0:
      self._take_epoch(info)
    if info.ready_count != self._ready_seen:
      self._recover(info)
      self._ready_seen = info.ready_count
      self._next_batch = 0.0
    flush = self._flush.is_set()
    now = time.monotonic()
    due = now >= self._next_batch or info.waiting_bytes >= MAX_WAITING_BYTES
    if not due and not flush:
      self._stopped.wait(min(_POLL_SECS, self._next_batch - now))
      return
    self._flush.clear()
    self._next_batch = now + self._interval_secs
    digest = self._digest_secs > 0 and now >= self._next_digest
    if (
      info.waiting_ids
      or info.scan_reasons
      or self._scan
      or digest
      or info.chunks_left
      # A process that restores that checkpoint finds a batch from after it.
      or info.saved_step != self._saved_step
    ):
      self._publish(info, digest)
      if digest:
        self._next_digest = now + self._digest_secs
    with self._published:
      self._num_rounds += 1
      self._published.notify_all()

  def _take_epoch(self, info: row_log.WriterInfo) -> None:
    if self._log is None:
      topics.create_topics(self._servers, {self._topic: self._num_shards})
      self._log = LogPartition(self._servers, self._topic, self._shard)
    low, high = self._log.ends()
    newest = info.restored_epoch
    for offset, value in self._log.read(max(low, high - _LAST_MESSAGES), high, self._stopped):
      header = _parse(value)
      if header is None:
        logging.error("%s[%d] holds no batch at offset %d.", self._topic, self._shard, offset)
      else:
        newest = max(newest, header.epoch)
    if self._stopped.is_set():
      raise InterruptedError
    self._epoch = newest + 1
    self._next_offset = high
    logging.info(
      "Shard %d publishes to %s[%d] from offset %d on in epoch %d.",
      self._shard, self._topic, self._shard, high, self._epoch,
    )  # fmt: skip

  def _recover(self, info: row_log.WriterInfo) -> None:
    """Touches what the log has behind the checkpoint, if that is all that can differ."""
    assert self._log is not None
    if not info.scan_reasons & row_log.SCAN_REPLACED:
      return
    if info.restored_step < 0:
      logging.info("Shard %d publishes all rows: its tables have no place in the log.", self._shard)
      return
    low, high = self._log.ends()
    if not low <= info.restored_offset <= high:
      logging.warning(
        "Shard %d publishes all rows: its checkpoint is at offset %d of %s[%d], which holds %d to "
        "%d.",
        self._shard, info.restored_offset, self._topic, self._shard, low, high,
      )  # fmt: skip
      return
    covered = self._touch_since(info.restored_offset, high, info.restored_step)
    if self._stopped.is_set():
      raise InterruptedError
    if covered:
      self._writer.forget_replaced(info.scan_generation)
    else:
      logging.info(
        "Shard %d publishes all rows: the log has no batch from after checkpoint %d.",
        self._shard, info.restored_step,
      )  # fmt: skip

  def _touch_since(self, begin: int, end: int, step: int) -> bool:
    """Touches the ids in `[begin, end)`; returns whether these are all that can differ."""
    assert self._log is not None
    covered = False
    chunks: dict[tuple[int, int], set[int]] = {}
    lot: list[bytes] = []
    for offset, value in self._log.read(begin, end, self._stopped):
      header = _parse(value)
      if header is None:
        logging.error("%s[%d] holds no batch at offset %d.", self._topic, self._shard, offset)
        return False
      if header.saved_step >= step:
        there = chunks.setdefault((header.epoch, header.seq), set())
        there.add(header.chunk)
        covered |= len(there) == header.num_chunks
      lot.append(value)
      if sum(map(len, lot)) >= _LOT_BYTES:
        self._writer.touch(lot)
        lot = []
    if lot:
      self._writer.touch(lot)
    return covered

  def _publish(self, info: row_log.WriterInfo, digest: bool) -> None:
    assert self._log is not None
    if info.chunks_left:
      # An earlier attempt failed half way.
      self._writer.abandon()
    self._last_seq += 1
    self._send_time = time.time()
    header = RowBatch(
      model=self._model,
      shard=self._shard,
      num_shards=self._num_shards,
      epoch=self._epoch,
      seq=self._last_seq,
      prev_seq=self._seq,
      send_time=self._send_time,
      saved_step=info.saved_step,
    )
    if self._sample_positions is not None:
      header.sample_positions.update(self._sample_positions())
    scan, self._scan = self._scan, True  # rows of a batch that fails half way are not kept
    self._writer.begin(header, full_scan=scan, digest=digest)
    while True:
      messages, num_rows, num_deleted = self._writer.take()
      if not messages:
        break
      offsets = self._log.append(messages, self._stopped)
      self._check_alone(sorted(offsets))
      self.rows_published += num_rows
      self._metrics.emit_counter("row_log_rows", num_rows, self._tags)
      self._metrics.emit_counter("row_log_deleted", num_deleted, self._tags)
    self._scan = False
    self._saved_step = info.saved_step
    self._seq = self._last_seq
    self._writer.mark("position", [self._epoch, self._seq, self._next_offset])

  def _check_alone(self, offsets: list[int]) -> None:
    """Looks at offsets that this writer did not write.

    Raises:
      FencedError: they are those of a writer with a higher epoch.
      _SharedEpochError: they are those of a writer with the same epoch.
    """
    assert self._log is not None
    others = []
    expected = self._next_offset
    for offset in offsets:
      if offset > expected:
        others.append((expected, offset))
      expected = max(expected, offset + 1)
    for begin, end in others:
      for offset, value in self._log.read(begin, end, self._stopped):
        header = _parse(value)
        if header is None or header.epoch < self._epoch:
          continue
        if header.epoch > self._epoch:
          raise FencedError(
            f"{self._topic}[{self._shard}] has epoch {header.epoch} at offset {offset}, and this "
            f"writer has epoch {self._epoch}"
          )
        # Our own messages may be there twice.
        if header.send_time != self._send_time:
          raise _SharedEpochError
    self._next_offset = expected


def _parse(value: bytes) -> RowBatch | None:
  """Returns a message, `None` if it is none. The engine checks checksums where rows are read."""
  try:
    return RowBatch.FromString(value[_CRC_BYTES:])
  except Exception:  # Implementations of protobuf raise different errors.
    return None
