"""Counts the rows that come to a table and go from it, for curves."""

from __future__ import annotations

import numpy as np

_MEGABYTE = 1 << 20


class TableCount:
  """Counts, from what a table tells of itself, from `start` on."""

  def __init__(self) -> None:
    self._rows = self._bytes = self._expired_before = self._admitted = self._expired = 0

  def start(self, stats: np.ndarray) -> None:
    """Takes a table as it is: rows that were restored were not admitted now."""
    self._rows, self._bytes, self._expired_before = (int(value) for value in stats[:3])

  def update(self, stats: np.ndarray) -> None:
    """Counts what has happened since."""
    rows, self._bytes, expired_before = (int(value) for value in stats[:3])
    expired = max(0, expired_before - self._expired_before)
    admitted = rows - self._rows + expired
    if admitted < 0:
      # They were left out of a checkpoint that the table was read from again.
      expired, admitted = expired - admitted, 0
    self._admitted += admitted
    self._expired += expired
    self._rows, self._expired_before = rows, expired_before

  def values(self) -> dict[str, float]:
    """Returns the name of a curve -> its value."""
    return {
      "rows": float(self._rows),
      "admitted": float(self._admitted),
      "expired": float(self._expired),
      "memory_mb": self._bytes / _MEGABYTE,
    }
