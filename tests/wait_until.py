"""Waiting for something to become true, instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from typing import Callable


def wait_until(predicate: Callable[[], object], timeout_secs: float = 60) -> None:
  """Returns once `predicate()` is true; an AssertionError says what was not when time is up."""
  deadline = time.monotonic() + timeout_secs
  while not predicate():
    if time.monotonic() > deadline:
      raise AssertionError(f"not true after {timeout_secs} s: {predicate}")
    time.sleep(0.02)
