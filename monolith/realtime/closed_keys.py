"""Remembers impressions that have left a window before its end: they may be sent again."""

from __future__ import annotations

# A number in a dictionary and in a list.
_KEY_BYTES = 120


class ClosedKeys:
  """Holds keys by minute of event time, as hashes: those of the oldest minutes go first.

  Args:
    memory_bytes: about how much memory keys may take.

  Attributes:
    forgotten: the number of keys that went because memory was full.
  """

  def __init__(self, memory_bytes: int):
    self._most = memory_bytes // _KEY_BYTES
    # Hashes of Python have 64 bits and are kept by the string itself: among ten million keys, one
    # of a million others is taken for a closed one with a probability of 1e-6.
    self._minute_of: dict[int, int] = {}
    self._minutes: dict[int, list[int]] = {}
    self._first_offsets: dict[int, int] = {}
    self.forgotten = 0

  def __contains__(self, key: str) -> bool:
    return hash(key) in self._minute_of

  @property
  def memory_bytes(self) -> int:
    """About how much memory the keys take."""
    return len(self._minute_of) * _KEY_BYTES

  def add(self, key: str, minute: int, offset: int) -> None:
    """Remembers a key.

    Args:
      key: the impression's request id.
      minute: its minute, with which it is forgotten.
      offset: its place in the topic.
    """
    number = hash(key)
    if number in self._minute_of:
      return
    self._minute_of[number] = minute
    self._minutes.setdefault(minute, []).append(number)
    self._first_offsets[minute] = min(offset, self._first_offsets.get(minute, offset))
    while len(self._minute_of) > self._most:
      oldest = min(self._minutes)
      self.forgotten += len(self._minutes[oldest])
      self.forget_minute(oldest)

  def forget_minute(self, minute: int) -> None:
    """Forgets the keys of a minute."""
    for number in self._minutes.pop(minute, ()):
      del self._minute_of[number]
    self._first_offsets.pop(minute, None)

  def forget_before(self, minute: int) -> None:
    """Forgets the keys of all minutes before one."""
    for passed in [each for each in self._minutes if each < minute]:
      self.forget_minute(passed)

  def oldest_offset(self) -> int | None:
    """Returns the smallest offset of a key that is remembered, or None."""
    return min(self._first_offsets.values(), default=None)
