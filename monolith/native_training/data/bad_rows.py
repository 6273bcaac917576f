"""Handles rows that cannot be read: the first one ends the reading, or all of them are counted.

Messages name the file and line of a row. `report` chooses between an error and a count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

ON_BAD_ROW = ("error", "skip")


class BadRows:
  """Counts the rows that a reader skips, and keeps the messages of the first ones.

  Safe to read while a dataset is running.

  Args:
    limit: how many messages are logged and kept.
  """

  def __init__(self, limit: int = 20):
    self._limit = limit
    self._lock = threading.Lock()
    self._count = 0
    self._first: list[str] = []

  @property
  def count(self) -> int:
    """The number of rows that were skipped."""
    with self._lock:
      return self._count

  @property
  def first(self) -> list[str]:
    """Returns the messages of the first rows, with file and line."""
    with self._lock:
      return list(self._first)

  def add(self, problems: Sequence[str]) -> None:
    """Counts one row for each problem."""
    with self._lock:
      self._count += len(problems)
      new = list(problems)[: self._limit - len(self._first)]
      self._first += new
    for problem in new:
      logging.warning("skipped a bad row: %s", problem)

  def __repr__(self) -> str:
    return f"BadRows(count={self.count}, first={self.first})"


def check_arguments(on_bad_row: str, bad_rows: BadRows | None) -> BadRows | None:
  """Returns the counter of skipped rows, or `None` if a bad row is an error.

  Raises:
    ValueError: `on_bad_row` is neither, or a counter is given that would stay unused.
  """
  if on_bad_row not in ON_BAD_ROW:
    raise ValueError(f"on_bad_row is {on_bad_row!r}, want one of {ON_BAD_ROW}")
  if on_bad_row == "error":
    if bad_rows is not None:
      raise ValueError("bad_rows counts skipped rows: give on_bad_row='skip' as well")
    return None
  return BadRows() if bad_rows is None else bad_rows


def report(problems: tf.Tensor, counter: BadRows | None) -> None:
  """Fails with the first problem, if there is one, or counts all of them.

  Args:
    problems: strings `[rows]`.
    counter: the counter; without one, the first problem is raised as `InvalidArgumentError`.
  """
  if counter is None:
    # Sliced, as there may be no first one. Python cannot read a message that is not UTF-8, as bad
    # bytes are, and a character that was cut.
    first = tf.strings.unicode_transcode(problems[:1], "UTF-8", "UTF-8")
    tf.debugging.Assert(tf.equal(tf.size(problems), 0), [first], summarize=1)
    return

  def count(rows: np.ndarray) -> np.int64:
    counter.add([row.decode("utf-8", "replace") for row in rows])
    return np.int64(0)

  # Stateful, so that it runs although its result is not used.
  tf.numpy_function(count, [problems], tf.int64, stateful=True)


def make_savable(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a dataset whose iterators can be saved although it reports bad rows.

  TensorFlow treats a check or a counter as state that would be lost.
  """
  options = tf.data.Options()
  options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
  return dataset.with_options(options)
