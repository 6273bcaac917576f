"""`libmonolith_cuda.so` by ctypes, with its errors as exceptions."""

from __future__ import annotations

import ctypes
import os
import pathlib

_VERSION = 3
_INVALID_ARGUMENT = 1
_OUT_OF_MEMORY = 3
_REFUSED = 6


class GpuTableError(RuntimeError):
  """The device failed, or a file is not what it should be."""


class OutOfGpuMemoryError(MemoryError):
  """Rows do not fit: the card, or what tables may have of it, is full. The table is as before."""


_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
  """Returns the library.

  Raises:
    GpuTableError: it is missing, or of another version.
  """
  global _library
  if _library is not None:
    return _library
  beside = pathlib.Path(__file__).parents[1] / "runtime" / "ops" / "libmonolith_cuda.so"
  path = os.environ.get("MONOLITH_CUDA_LIBRARY") or str(beside)
  try:
    library = ctypes.CDLL(path)
  except OSError as error:
    raise GpuTableError(
      f"GPU tables need libmonolith_cuda.so, which is built where nvcc is found (make gpu): {error}"
    ) from error
  version = library.mono_gpu_version()
  if version != _VERSION:
    raise GpuTableError(f"{path} has version {version}, want {_VERSION}: run `make gpu` again")
  library.mono_gpu_last_error.restype = ctypes.c_char_p
  library.mono_gpu_table_destroy.restype = None
  library.mono_gpu_table_destroy.argtypes = [ctypes.c_void_p]
  for name in ("mono_gpu_table_lookup_many", "mono_gpu_table_optimize_many"):
    getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
  _library = library
  return library


def check(library: ctypes.CDLL, code: int) -> None:
  """Raises what a call of the library returned.

  Raises:
    ValueError: an argument was wrong, or an earlier call had what is not finite.
    OutOfGpuMemoryError: rows do not fit.
    GpuTableError: the device failed.
  """
  if code == 0:
    return
  message = library.mono_gpu_last_error().decode("utf-8", "replace")
  if code in (_INVALID_ARGUMENT, _REFUSED):
    raise ValueError(message)
  if code == _OUT_OF_MEMORY:
    raise OutOfGpuMemoryError(message)
  raise GpuTableError(message)


def is_available() -> bool:
  """Tells whether this process has a CUDA device, and the library of tables on it."""
  try:
    library = load()
  except GpuTableError:
    return False
  count = ctypes.c_int32()
  return library.mono_gpu_device_count(ctypes.byref(count)) == 0 and count.value > 0
