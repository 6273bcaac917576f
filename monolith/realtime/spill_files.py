"""Impressions that memory has no room for: a file per minute, indexed by 16-byte hashes of keys.

A file has no name after it was opened: it goes away when its minute has passed or the process ends,
however it ends. Nothing reads it after a restart: the joiner rebuilds its window from Kafka.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# The parts of an impression that a window keeps: offset, event time, channel, item, example.
Record = tuple[int, int, int, int, bytes]
_CHUNK_RECORDS = 1000


def hash_keys(keys: Sequence[str]) -> np.ndarray:
  """Returns hashes of keys, uint64 of shape [len(keys), 2]."""
  digests = b"".join(hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys)
  return np.frombuffer(digests, np.uint64).reshape(-1, 2)


class _Segment:
  """The index of what one call of `SpilledMinute.append` wrote, sorted by hash."""

  def __init__(self, hashes: np.ndarray, offsets: np.ndarray, starts: np.ndarray, end: int):
    order = np.argsort(hashes[:, 0], kind="stable")
    self.high, self.low = hashes[order, 0], hashes[order, 1]
    self.offsets = offsets[order]
    self.starts = starts[order]
    # Where the record that begins at a position ends.
    ends = np.append(starts[1:], end)
    self.sizes = (ends - starts)[order].astype(np.uint32)
    self.closed = np.zeros(len(order), bool)
    self.num_open = len(order)


class SpilledMinute:
  """The impressions of one minute in a file.

  Args:
    folder: where the file is; it must exist.

  Raises:
    OSError: it cannot be made.
  """

  def __init__(self, folder: str):
    # One record may be read for every action, so a buffer would be of no use.
    self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
    self._end = 0
    self._segments: list[_Segment] = []

  @property
  def num_open(self) -> int:
    """The number of impressions that nothing has closed."""
    return sum(segment.num_open for segment in self._segments)

  @property
  def size(self) -> int:
    """The file's size in bytes."""
    return self._end

  def append(self, records: dict[str, Record]) -> int:
    """Writes impressions by key and returns the number of bytes.

    Raises:
      OSError: the disk is full, or the file cannot be written; nothing was added.
    """
    parts = [pickle.dumps((key, record), protocol=4) for key, record in records.items()]
    content = b"".join(parts)
    written = 0
    while written < len(content):
      written += os.pwrite(self._file.fileno(), content[written:], self._end + written)
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    starts = self._end + np.cumsum(sizes) - sizes
    offsets = np.fromiter((record[0] for record in records.values()), np.int64, len(parts))
    self._end += len(content)
    self._segments.append(_Segment(hash_keys(list(records)), offsets, starts, self._end))
    return len(content)

  def take(self, hashes: np.ndarray) -> dict[int, Record]:
    """Closes the open impressions among keys and returns them by the key's place in `hashes`.

    Raises:
      OSError: the file cannot be read.
    """
    found: dict[int, Record] = {}
    for segment in self._segments:
      if not segment.num_open:
        continue
      first = np.searchsorted(segment.high, hashes[:, 0])
      inside = np.minimum(first, len(segment.high) - 1)
      for i in np.flatnonzero(segment.high[inside] == hashes[:, 0]):
        record = self._take_one(segment, int(first[i]), hashes[i])
        if record is not None:
          found[int(i)] = record
    return found

  def oldest_offset(self) -> int | None:
    """Returns the smallest offset that is open, or None."""
    return min(
      (int(s.offsets[~s.closed].min()) for s in self._segments if s.num_open), default=None
    )

  def drain(self) -> Iterator[tuple[str, Record]]:
    """Yields the impressions that are open, in the order in which they were written."""
    for segment in self._segments:
      order = np.argsort(segment.starts, kind="stable")
      for i in order[~segment.closed[order]]:
        yield self._read(int(segment.starts[i]), int(segment.sizes[i]))

  def close(self) -> None:
    """Deletes the file."""
    self._segments = []
    self._file.close()

  def _take_one(self, segment: _Segment, i: int, key_hash: np.ndarray) -> Record | None:
    while i < len(segment.high) and segment.high[i] == key_hash[0]:
      if segment.low[i] == key_hash[1] and not segment.closed[i]:
        _, record = self._read(int(segment.starts[i]), int(segment.sizes[i]))
        segment.closed[i] = True
        segment.num_open -= 1
        return record
      i += 1
    return None

  def _read(self, start: int, size: int) -> Any:
    # The file is ours, unnamed and not reachable by others, which is what makes pickle safe.
    content = os.pread(self._file.fileno(), size, start)
    if len(content) != size:
      raise OSError(f"a spill file has {len(content)} bytes at {start}, want {size}")
    return pickle.loads(content)
