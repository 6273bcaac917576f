"""Counts the rows that a table admits and expires, for curves."""

from __future__ import annotations

import numpy as np

_MEGABYTE = 1 << 20


class TableCount:
  """Counts from `start` on, given the statistics that a table reports."""

  def __init__(self) -> None:
    self._rows = self._bytes = self._expired_before = self._admitted = self._expired = 0

  def start(self, stats: np.ndarray) -> None:
    """Sets the starting point; rows that were restored do not count as admitted."""
    self._rows, self._bytes, self._expired_before = (int(value) for value in stats[:3])

  def update(self, stats: np.ndarray) -> None:
    """Adds the changes since the last call."""
    rows, self._bytes, expired_before = (int(value) for value in stats[:3])
    expired = max(0, expired_before - self._expired_before)
    admitted = rows - self._rows + expired
    if admitted < 0:
      # The table was read again from a checkpoint, which leaves expired rows out.
      expired, admitted = expired - admitted, 0
    self._admitted += admitted
    self._expired += expired
    self._rows, self._expired_before = rows, expired_before

  def values(self) -> dict[str, float]:
    """Returns the value of each curve by its name."""
    return {
      "rows": float(self._rows),
      "admitted": float(self._admitted),
      "expired": float(self._expired),
      "memory_mb": self._bytes / _MEGABYTE,
    }
