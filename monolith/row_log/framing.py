"""The checksum in front of every message of the row log and of dense sets.

| masked CRC-32C of the rest, 4 bytes little-endian, as in a TFRecord | serialized message |
"""

from __future__ import annotations

import functools
import struct

import numpy as np

CRC_BYTES = 4
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
# As many parts of a message are summed side by side.
_LANES = 1024


def frame(message: bytes) -> bytes:
  """Returns a message behind its checksum."""
  return struct.pack("<I", _mask(crc32c(message))) + message


def unframe(value: bytes) -> bytes:
  """Returns the message of what `frame` returned.

  Raises:
    ValueError: it is too short, or its checksum is wrong.
  """
  if len(value) < CRC_BYTES:
    raise ValueError(f"{len(value)} bytes, want a checksum of {CRC_BYTES} and a message")
  (wanted,) = struct.unpack_from("<I", value)
  found = _mask(crc32c(value[CRC_BYTES:]))
  if found != wanted:
    raise ValueError(f"the checksum is {wanted:#010x}, that of the bytes is {found:#010x}")
  return value[CRC_BYTES:]


def crc32c(data: bytes) -> int:
  """Returns the CRC-32C of bytes (iSCSI's, Castagnoli polynomial)."""
  if not data:
    return 0
  # The sum of what is as long as a register begins with all ones: the same as inverted first bytes.
  padded = np.frombuffer(data.ljust(4, b"\0"), np.uint8)
  words = -(-len(padded) // (4 * _LANES))
  lanes = np.zeros(_LANES * words * 4, np.uint8)
  lanes[-len(padded) :] = padded
  if len(data) < 4:
    return _crc_of_few(data)
  lanes[-len(padded) : len(lanes) - len(padded) + 4] ^= 0xFF
  columns = lanes.view("<u4").reshape(_LANES, words).T
  tables = _word_tables()
  state = np.zeros(_LANES, np.uint32)
  for column in columns:
    state = _apply(tables, state ^ column)
  shift = _shift_tables(4 * words)
  while len(state) > 1:
    state = _apply(shift, state[0::2]) ^ state[1::2]
    shift = tuple(_apply(shift, table) for table in shift)
  return int(state[0]) ^ 0xFFFFFFFF


def _crc_of_few(data: bytes) -> int:
  state = 0xFFFFFFFF
  table = _byte_table()
  for byte in data:
    state = int(table[(state ^ byte) & 0xFF]) ^ (state >> 8)
  return state ^ 0xFFFFFFFF


def _mask(crc: int) -> int:
  return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


@functools.lru_cache(maxsize=1)
def _byte_table() -> np.ndarray:
  """Returns the state after each byte on a state of 0."""
  table: np.ndarray = np.arange(256, dtype=np.uint32)
  for _ in range(8):
    table = (table >> 1) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
  return table


# Four tables, one for each byte of a state: their sum is a linear function of the state.
_Tables = tuple[np.ndarray, ...]


@functools.lru_cache(maxsize=1)
def _word_tables() -> _Tables:
  return _shift_tables(4)


@functools.lru_cache(maxsize=64)
def _shift_tables(num_bytes: int) -> _Tables:
  """Returns what a state becomes after this many zeros."""
  if num_bytes == 1:
    bytes_of = [np.arange(256, dtype=np.uint32) << np.uint32(8 * i) for i in range(4)]
    return tuple(_byte_table()[value & 0xFF] ^ (value >> 8) for value in bytes_of)
  half = _shift_tables(num_bytes // 2)
  doubled = tuple(_apply(half, table) for table in half)
  if num_bytes % 2 == 0:
    return doubled
  return tuple(_apply(_shift_tables(1), table) for table in doubled)


def _apply(tables: _Tables, state: np.ndarray) -> np.ndarray:
  return (
    tables[0][state & 0xFF]
    ^ tables[1][(state >> 8) & 0xFF]
    ^ tables[2][(state >> 16) & 0xFF]
    ^ tables[3][state >> 24]
  )
