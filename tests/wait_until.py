"""Waiting for something to become true, instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from typing import Callable


def wait_until(
  predicate: Callable[[], object], timeout_secs: float = 120, poll_secs: float = 0.02
) -> None:
  """Returns once `predicate()` is true; an AssertionError says what was not when time is up."""
  deadline = time.monotonic() + timeout_secs
  while not predicate():
    if time.monotonic() > deadline:
      raise AssertionError(f"not true after {timeout_secs} s: {predicate}")
    time.sleep(poll_secs)
