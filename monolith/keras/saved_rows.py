"""Lets `get_weights` and `set_weights` of a Keras model take the rows of tables along.

A table is among a model's weights as an empty variable `[0, dim]`. As an array it is empty, too,
but knows a copy of the rows in a temporary folder. So `EarlyStopping(restore_best_weights=True)`
and `clone.set_weights(model.get_weights())` do what they do for all weights.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from typing import Any, Protocol

import numpy as np


class Saveable(Protocol):
  """A table, as far as it is needed here."""

  def save(self, path: Any) -> None: ...
  def load(self, path: Any) -> None: ...


class SavedRows(np.ndarray):
  """An empty array `[0, dim]` that knows a copy of a table's rows and their optimizers' state.

  Views and copies of the array know it as well; it goes with the last of them.
  """

  _folder: _Folder | None = None

  @classmethod
  def of(cls, table: Saveable, dim: int) -> SavedRows:
    """Returns the rows that a table has now.

    Raises:
      tf.errors.OpError: writing failed.
    """
    # Not a view: plain arrays made of one would have its base.
    array = cls.__new__(cls, (0, dim), np.float32)
    folder = _Folder()
    table.save(os.path.join(folder.path, "table"))
    array._folder = folder
    return array

  def __array_finalize__(self, other: Any) -> None:
    self._folder = getattr(other, "_folder", None)


class _Folder:
  """A temporary folder that is deleted with this object."""

  def __init__(self) -> None:
    self.path = tempfile.mkdtemp(prefix="monolith_rows_")
    weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def restore(table: Saveable, name: str | None, value: Any) -> None:
  """Gives a table the rows that an array knows.

  Args:
    table: the table.
    name: its name, for the error.
    value: what `SavedRows.of` returned, or an array that NumPy has made of it.

  Raises:
    NotImplementedError: it knows no rows.
    tf.errors.OpError: the rows have another dimension, or their files are gone.
  """
  # Keras calls `np.asarray`, which returns a plain array that has the other as its base.
  for array in (value, getattr(value, "base", None)):
    folder = getattr(array, "_folder", None)
    if isinstance(folder, _Folder):
      table.load(os.path.join(folder.path, "table"))
      return
  raise NotImplementedError(
    f"table {name!r} cannot be set to an array: its rows are in what get_weights of this process "
    "returns, and in files: save_weights, load_weights, ModelCheckpoint"
  )
