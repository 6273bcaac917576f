"""Ids and floats as arrays that the engine can read where they lie.

Anything that NumPy takes without a copy is taken so: arrays, memory views, tensors of PyTorch and
JAX in main memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import numbers
import operator
import sys
from typing import Any

import numpy as np

# The one object of each type in a process.
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


def _as_array(values: Any) -> np.ndarray:
  if isinstance(values, np.ndarray):
    return values
  if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
    return np.from_dlpack(values)
  return np.asarray(values)


def as_ids(ids: Any) -> np.ndarray:
  """Returns ids as int64, contiguous, in their shape.

  Raises:
    TypeError: they are not integers, or uint64.
    ValueError: a Python integer does not fit into int64.
  """
  if type(ids) is np.ndarray and ids.dtype is _INT64 and ids.flags.c_contiguous:
    return ids
  array = _as_array(ids)
  if array.dtype == np.int64:
    return np.ascontiguousarray(array).reshape(array.shape)
  if not isinstance(ids, np.ndarray):
    if array.size == 0:
      return np.zeros(array.shape, np.int64)
    # Numbers beyond int64 become uint64, float64 or objects, depending on their company.
    if array.dtype.kind in "ufO":
      for value in np.ravel(np.asarray(ids, dtype=object)):
        if isinstance(value, numbers.Integral) and not -(2**63) <= int(value) < 2**63:
          raise ValueError(f"id {value} does not fit into int64, want -2**63 <= id < 2**63")
  if array.dtype == np.uint64:
    raise TypeError(
      "ids have dtype uint64, of which half does not fit into int64: give ids.view(np.int64), "
      "which keeps every id apart"
    )
  if array.dtype.kind not in "iu":
    remedy = ": hash strings first" if array.dtype.kind in "SUO" else ""
    raise TypeError(f"ids have dtype {array.dtype}, want integers{remedy}")
  return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def as_floats(values: Any, what: str, ids: np.ndarray, dim: int) -> np.ndarray:
  """Returns floats as float32 `[n, dim]`, contiguous.

  Args:
    values: `dim` for each id.
    what: what messages call them.
    ids: int64, of any shape, n in all.
    dim: the length of a vector.

  Raises:
    TypeError: they are not numbers.
    ValueError: there are not `dim` for each id.
  """
  array = _as_array(values)
  # Half precision of other libraries has kind V.
  if array.dtype.kind not in "fiuV" or (array.dtype.kind == "V" and array.dtype.names):
    raise TypeError(f"{what} have dtype {array.dtype}, want float32")
  if not fits(array.shape, ids.size, dim):
    raise ValueError(
      f"{what} has shape {array.shape}, want {dim} floats for each of {ids.size} ids"
    )
  return np.ascontiguousarray(array, dtype=np.float32).reshape(ids.size, dim)


def fits(shape: tuple[int, ...], n: int, dim: int) -> bool:
  """Returns whether an array has `dim` floats for each of n ids, id after id.

  An array with all of them in one dimension has, and one whose first dimensions are the ids; one
  that is transposed has not.
  """
  if math.prod(shape) != n * dim:
    return False
  return len(shape) < 2 or n in itertools.accumulate(shape, operator.mul, initial=1)


def _find_address_at() -> int | None:
  """Returns how far behind an array's object it holds the address of its elements, if it does so.

  Every extension module that was compiled for NumPy reads it there, behind the object's header.
  """
  array, at = np.zeros(1), object.__basicsize__
  if sys.implementation.name != "cpython":
    return None
  found = ctypes.c_void_p.from_address(id(array) + at).value
  return at if found == array.__array_interface__["data"][0] else None


_ADDRESS_AT = _find_address_at()


def address(array: np.ndarray) -> int:
  """Returns where an array begins.

  After a lookup, caches of the processor hold rows and nothing of Python, so that the interface of
  an array, which is made anew each time, takes tens of microseconds.
  """
  if _ADDRESS_AT is None:
    return array.__array_interface__["data"][0]
  return ctypes.c_void_p.from_address(id(array) + _ADDRESS_AT).value or 0


def check_out(out: Any, n: int, dim: int) -> np.ndarray:
  """Returns the array that a lookup shall write, as it is.

  Raises:
    TypeError: it is no float32 array of NumPy.
    ValueError: it does not hold n vectors, has gaps, or must not be written.
  """
  if type(out) is np.ndarray and out.dtype is _FLOAT32 and out.shape == (n, dim):
    flags = out.flags
    if flags.c_contiguous and flags.writeable:
      return out
  if not isinstance(out, np.ndarray) or out.dtype != np.float32:
    raise TypeError(f"out is {getattr(out, 'dtype', type(out).__name__)}, want a float32 array")
  if not fits(out.shape, n, dim):
    raise ValueError(f"out has shape {out.shape}, want {dim} floats for each of {n} ids")
  if not (out.flags.c_contiguous and out.flags.writeable):
    raise ValueError("out has gaps or must not be written, want a contiguous, writable array")
  return out
