"""The checksum in front of every message of the row log and of dense sets.

| masked CRC-32C of the rest, 4 bytes little-endian, as in a TFRecord | serialized message |
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

from monolith.table import library

CRC_BYTES = 4
_MASK_DELTA = 0xA282EAD8


def frame(message: bytes) -> bytes:
  """Returns a message preceded by its checksum."""
  return struct.pack("<I", _mask(_crc32c()(message))) + message


def unframe(value: bytes) -> bytes:
  """Undoes `frame`.

  Raises:
    ValueError: the value is too short, or its checksum is wrong.
  """
  if len(value) < CRC_BYTES:
    raise ValueError(f"{len(value)} bytes, want a checksum of {CRC_BYTES} and a message")
  (wanted,) = struct.unpack_from("<I", value)
  found = _mask(_crc32c()(value[CRC_BYTES:]))
  if found != wanted:
    raise ValueError(f"the checksum is {wanted:#010x}, that of the bytes is {found:#010x}")
  return value[CRC_BYTES:]


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
  """Returns the engine's function for the CRC-32C of bytes."""
  function = library.load().mono_crc32c
  function.argtypes = (ctypes.c_char_p, ctypes.c_int64)
  function.restype = ctypes.c_uint32
  return lambda data: int(function(data, len(data)))


def _mask(crc: int) -> int:
  return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
