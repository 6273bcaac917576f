"""The methods that all tables share: those on NumPy arrays, and those on tensors of TensorFlow.

This module loads no TensorFlow, although `monolith.HashTable` derives from its class, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monolith.table import optimizers


class TableMethods:
  """A map from int64 ids to rows of `dim` floats. A subclass reads and writes the rows."""

  _dim: int
  _expire_days: int | None
  _admit_after: int
  _admit_capacity: int
  _name: str | None

  def _describe(
    self,
    dim: Any,
    expire_after: optimizers.Duration | None,
    admit_after: Any,
    admit_capacity: Any,
    name: str | None,
  ) -> None:
    """Checks and keeps what describes a table beside its optimizer.

    Raises:
      ValueError, TypeError: an argument is not as described.
    """
    self._dim = optimizers.dimension(dim)
    self._expire_days = optimizers.days(expire_after)
    self._admit_after = optimizers.admission(admit_after)
    self._admit_capacity = optimizers.capacity(admit_capacity)
    self._name = name

  @property
  def dim(self) -> int:
    """The length of a vector."""
    return self._dim

  def contains(self, ids: Any) -> Any:
    """Returns which ids have a row, bool in the shape of `ids`."""
    raise NotImplementedError

  def erase(self, ids: Any) -> None:
    """Removes the rows of ids, with the state of their optimizers; ids without a row are ignored.

    An id that is written again gets a new row, as if it had never had one. With `admit_after` it is
    not counted anew.

    Raises:
      TypeError, ValueError: `ids` are not ids.
    """
    raise NotImplementedError

  def size(self) -> Any:
    """Returns the number of rows."""
    raise NotImplementedError

  def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids, int64 in ascending order, their times, uint32, and their vectors, float32."""
    raise NotImplementedError

  def _kind(self) -> str:
    """Returns the kind of the optimizer, for the table's text."""
    raise NotImplementedError

  def __contains__(self, key: Any) -> bool:
    """Returns whether an id has a row: `7 in table`.

    Raises:
      TypeError, ValueError: `key` is no id, or several; `contains` takes those.
    """
    has_row = self.contains(key)
    if len(has_row.shape) != 0:
      raise TypeError(f"{key!r} are several ids: `in` asks for one, contains(ids) for many")
    return bool(has_row)

  def __len__(self) -> int:
    """Returns the number of rows."""
    return int(self.size())

  def __bool__(self) -> bool:
    """Returns true: an empty table is a table."""
    return True

  def __repr__(self) -> str:
    name = "" if self._name is None else f", name={self._name!r}"
    return f"HashTable(dim={self._dim}, optimizer={self._kind()!r}{name}) {self._state()}"

  def _state(self) -> str:
    return f"with {len(self)} rows"

  def clear(self) -> None:
    """Removes all rows."""
    self.erase(self._rows()[0])

  def items(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns all ids, int64 `[n]` in ascending order, and their vectors, float32 `[n, dim]`."""
    ids, _, rows = self._rows()
    return ids, rows

  def to_arrow(self) -> Any:
    """Returns all rows as a `pyarrow.Table`: `id`, `last_update` in seconds, and `vector`.

    Raises:
      ImportError: pyarrow is not installed.
    """
    import pyarrow

    ids, times, rows = self._rows()
    vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), self._dim)
    columns = [pyarrow.array(ids), pyarrow.array(times), vectors]
    return pyarrow.table(columns, names=["id", "last_update", "vector"])

  def to_pandas(self) -> Any:
    """Returns all rows as a `pandas.DataFrame`: one column for each element, ids as its index.

    Raises:
      ImportError: pandas is not installed.
    """
    import pandas

    ids, rows = self.items()
    return pandas.DataFrame(rows, index=pandas.Index(ids, name="id"))
