"""Reads the records of a data file: headers, an 8-byte length, and a message."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_MAX_RECORD_BYTES = 1 << 30


def read_records(
  file: BinaryIO,
  lagrangex_header: bool = False,
  has_sort_id: bool = False,
  kafka_dump: bool = False,
  kafka_dump_prefix: bool = False,
) -> Iterator[bytes]:
  """Yields the messages of a file.

  Args:
    file: the file to read.
    lagrangex_header: records begin with 8 bytes of type and source; wins over the others.
    has_sort_id: records have a sort id, preceded by its length.
    kafka_dump: records have 8 meaningless bytes.
    kafka_dump_prefix: records begin with the prefix of a dump, 8 or 16 bytes.

  Raises:
    ValueError: a record is truncated, or its length is impossible.
  """
  while True:
    first = file.read(8)
    if not first:
      return
    if len(first) < 8:
      raise ValueError(f"a record ends after {len(first)} bytes of its first field")
    # The first eight bytes are read already, whatever they are.
    pending: list[bytes] = [first]

    def number(pending: list[bytes] = pending) -> int:
      data = pending.pop() if pending else _read(file, 8)
      return struct.unpack("<Q", data)[0]

    if lagrangex_header:
      number()
    else:
      sort_id_size = None
      if kafka_dump_prefix:
        prefix = number()
        if prefix == 0:
          number()
        else:
          sort_id_size = prefix
      if has_sort_id:
        _read(file, number() if sort_id_size is None else sort_id_size)
      if kafka_dump:
        number()
    yield _read(file, number())


def _read(file: BinaryIO, size: int) -> bytes:
  if size > _MAX_RECORD_BYTES:
    raise ValueError(f"a length is {size}, want at most {_MAX_RECORD_BYTES}: wrong headers?")
  data = file.read(size)
  if len(data) < size:
    raise ValueError(f"the file ends {size - len(data)} bytes before its last record does")
  return data
