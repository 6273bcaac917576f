"""The files of a group of tables, which the TensorFlow driver writes for all tables of a model.

  <model_dir>/model.ckpt-<step>.assets/MonolithMultiHashTable_-00000-of-00001          rows
  <model_dir>/model.ckpt-<step>.assets/MonolithMultiHashTable_.meta-00000-of-00001     their tables

Rows are TFRecords in blocks of Snappy, table after table. No TensorFlow is loaded; pyarrow, where
it is installed, unpacks them faster.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from monolith.table import library

_META = ".meta"
_FRAME = 16  # length, its checksum, and that of the payload
_BLOCK = 1 << 15  # of what is saved; TensorFlow reads blocks of up to 256 kB


def load_group(tables: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, int]:
  """Replaces the rows of tables by those that a group has under their names.

  Args:
    tables: name in the group -> table: anything that has `load` of `HashTable`, of any framework.
      The tables are replaced one after another.
    path: what the driver calls the group, such as
      `<model_dir>/model.ckpt-500.assets/MonolithMultiHashTable_`.

  Returns:
    How many rows each table has read.

  Raises:
    ValueError: there is no table, one has two names, the group has no table of a name, or rows of
      another dimension.
    TypeError: `tables` has no names, or what is no table.
    OSError, TableError: the files cannot be read, or are damaged.
  """
  _check(tables)
  shards = _find(path)
  metadata = [_read_metadata(meta) for _, meta in shards]
  saved = sorted({name for shard in metadata for name, _ in shard})
  if missing := sorted(set(tables) - set(saved)):
    raise ValueError(
      f"{os.fspath(path)} has no table {', '.join(missing)}; it has: {' '.join(saved)}"
    )
  with tempfile.TemporaryDirectory() as folder:
    for i, ((data, _), sizes) in enumerate(zip(shards, metadata)):
      with contextlib.ExitStack() as stack:
        outputs = {
          name: stack.enter_context(open(f"{folder}/{n}-{i:05d}-of-{len(shards):05d}", "wb"))
          for n, name in enumerate(tables)
        }
        _split(data, sizes, outputs)
    return {
      name: int(table.load(f"{folder}/{n}")) for n, (name, table) in enumerate(tables.items())
    }


def save_group(tables: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, int]:
  """Writes the rows of tables, with the state of their optimizers, to the files of one group.

  While the new files take the place of earlier ones there is neither, for a moment. In a checkpoint
  of the driver, `<model_dir>/model.ckpt-500.manifest` has the sizes of the earlier files: remove it
  for the driver to go on from the new ones.

  Args:
    tables: name in the group -> table: anything that has `save` of `HashTable`, of any framework.
    path: the files are `<path>-00000-of-00001` and `<path>.meta-00000-of-00001`.

  Returns:
    How many rows of each table were written.

  Raises:
    ValueError: there is no table, one has two names, or the rows of one are on several ranks.
    OSError, TableError: writing failed.
  """
  _check(tables)
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent, prefix=".group-") as folder:
    rows = {}
    with open(f"{folder}/data", "wb") as data, open(f"{folder}/meta", "wb") as meta:
      for n, name in enumerate(sorted(tables)):
        rows[name] = int(tables[name].save(f"{folder}/{n}"))
        files = sorted(glob.glob(f"{glob.escape(folder)}/{n}-?????-of-?????"))
        if not files:
          raise ValueError(
            f"table {name!r} has its rows on several ranks: a group is of one process"
          )
        for file in files:
          _pack(file, data)
          os.unlink(file)
        meta.write(_record(_encode_metadata(name, rows[name])))
      for one in (data, meta):
        one.flush()
        os.fsync(one.fileno())
    # A set without all of its files is refused: at no moment there is a mixture.
    target.with_name(f".{target.name}.manifest").unlink(missing_ok=True)
    escaped = glob.escape(str(target))
    for kind in (_META, ""):
      for old in glob.glob(f"{escaped}{kind}-?????-of-?????*"):
        os.unlink(old)
    os.replace(f"{folder}/data", f"{target}-00000-of-00001")
    os.replace(f"{folder}/meta", f"{target}{_META}-00000-of-00001")
  return rows


def _check(tables: Mapping[str, Any]) -> None:
  if not isinstance(tables, Mapping) or not all(hasattr(t, "load") for t in tables.values()):
    raise TypeError(f"tables is {tables!r}, want a mapping of names to tables")
  if not tables:
    raise ValueError("tables is empty, want name -> table")
  if len({id(table) for table in tables.values()}) < len(tables):
    raise ValueError(f"Of {', '.join(tables)} two are one table, want every table once")


def _find(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
  """Returns the files of a group, rows and tables, in order.

  Raises:
    FileNotFoundError: there are none.
    TableError: they are not complete, or not as long as they were written.
  """
  target = pathlib.Path(path)
  escaped = glob.escape(str(target))
  metas = sorted(glob.glob(f"{escaped}{_META}-?????-of-?????"))
  if not metas and glob.glob(f"{escaped}-?????-of-?????"):
    raise FileNotFoundError(
      f"{target} has the files of one table, which its load reads, and none of a group: "
      f"{target}{_META}-00000-of-?????"
    )
  if not metas:
    raise FileNotFoundError(f"There are no files {target}{_META}-00000-of-?????")
  if glob.glob(f"{escaped}*-?????-of-?????-tmp-*"):
    raise library.TableError(
      f"{target} was being saved when its process ended: load it in TensorFlow, and save it again"
    )
  count = int(metas[0][-5:])
  kinds = [f"-{i:05d}-of-{count:05d}" for i in range(count)]
  shards = [(f"{target}{kind}", f"{target}{_META}{kind}") for kind in kinds]
  for file in (file for shard in shards for file in shard):
    if not os.path.exists(file):
      raise library.TableError(f"{file} is missing")
  manifest = target.with_name(f".{target.name}.manifest")
  if manifest.exists():
    listed = re.findall(r"^file (\S+) (\d+) ", manifest.read_text(), re.MULTILINE)
    for suffix, size in listed:
      found = os.path.getsize(f"{target}{suffix}")
      if found != int(size):
        raise library.TableError(f"{target}{suffix} has {found} bytes, its manifest says {size}")
  return shards


def _split(data: str, sizes: list[tuple[str, int]], outputs: Mapping[str, BinaryIO]) -> None:
  """Writes each table's records of one file to a file of its own; their checksums stay."""
  blocks = _unpack(data)
  buffer, position = b"", 0
  for name, count in sizes:
    output = outputs.get(name)
    while True:
      begin = position
      while count and position + _FRAME <= len(buffer):
        end = position + _FRAME + struct.unpack_from("<Q", buffer, position)[0]
        if end > len(buffer):
          break
        position, count = end, count - 1
      if output is not None:
        output.write(buffer[begin:position])
      if not count:
        break
      block = next(blocks, None)
      if block is None:
        raise library.TableError(f"{data} is damaged: table {name} lacks {count} rows")
      buffer, position = buffer[position:] + block, 0
  if position < len(buffer) or next(blocks, None) is not None:
    raise library.TableError(f"{data} is damaged: there is more than its tables have")


def _unpack(path: str) -> Iterator[bytes]:
  """Yields what the blocks of a file hold."""
  inflate = _inflater()
  with open(path, "rb") as file:
    while header := file.read(4):
      size = int.from_bytes(header, "big")
      block = file.read(size)
      try:
        if len(header) < 4 or len(block) < size:
          raise ValueError("the file ends in a block")
        yield inflate(block)
      except (ValueError, IndexError, OSError) as error:
        raise library.TableError(f"{path} is damaged: {error}") from error


def _inflater() -> Callable[[bytes], bytes]:
  try:
    import pyarrow
  except ImportError:
    return _inflate
  codec = pyarrow.Codec("snappy")
  return lambda block: codec.decompress(block, _varint(block, 0)[0], asbytes=True)


def _inflate(block: bytes) -> bytes:
  """Returns what a block of Snappy holds.

  Raises:
    ValueError, IndexError: it is none.
  """
  size, at = _varint(block, 0)
  out = bytearray()
  while at < len(block):
    tag = block[at]
    kind, length = tag & 3, (tag >> 2) + 1
    at += 1
    if kind == 0:
      if length > 60:
        more = length - 60
        length = int.from_bytes(block[at : at + more], "little") + 1
        at += more
      out += block[at : at + length]
      at += length
      continue
    if kind == 1:
      length, offset = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | block[at]
      at += 1
    else:
      width = 2 if kind == 2 else 4
      offset = int.from_bytes(block[at : at + width], "little")
      at += width
    if not 0 < offset <= len(out):
      raise ValueError("a block refers to what is not there")
    # A copy that reaches into itself repeats.
    piece = out[-offset:][:length]
    out += (piece * (length // len(piece) + 1))[:length]
  if len(out) != size:
    raise ValueError(f"a block has {len(out)} bytes instead of {size}")
  return bytes(out)


def _pack(path: str, output: BinaryIO) -> None:
  """Appends a file as blocks of Snappy, which it does not make smaller: floats hardly shrink."""
  with open(path, "rb") as file:
    while piece := file.read(_BLOCK):
      # A literal whose length has two bytes.
      block = _encode_varint(len(piece)) + b"\xf4" + struct.pack("<H", len(piece) - 1) + piece
      output.write(struct.pack(">I", len(block)) + block)


def _read_metadata(path: str) -> list[tuple[str, int]]:
  """Returns the tables of one file, and how many rows each has there."""
  data = pathlib.Path(path).read_bytes()
  found, at = [], 0
  try:
    while at < len(data):
      (size,) = struct.unpack_from("<Q", data, at)
      payload = data[at + 12 : at + 12 + size]
      if data[at : at + _FRAME + size] != _record(payload):
        raise ValueError("a checksum is wrong")
      found.append(_decode_metadata(payload))
      at += _FRAME + size
  except (ValueError, IndexError, struct.error) as error:
    raise library.TableError(f"{path} is damaged: {error}") from error
  return found


def _decode_metadata(payload: bytes) -> tuple[str, int]:
  """Returns name and number of rows of a `MultiHashTableMetadata`."""
  name, rows, at = "", 0, 0
  while at < len(payload):
    tag, at = _varint(payload, at)
    value, at = _varint(payload, at)
    if tag == 0x0A:
      name, at = payload[at : at + value].decode("utf-8"), at + value
    elif tag == 0x10:
      rows = value
    else:
      raise ValueError(f"there is a field with tag {tag}")
  return name, rows


def _encode_metadata(name: str, rows: int) -> bytes:
  text = name.encode("utf-8")
  return b"\x0a" + _encode_varint(len(text)) + text + b"\x10" + _encode_varint(rows)


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = data[at]
    at += 1
    value |= (byte & 127) << shift
    shift += 7
    if byte < 128:
      return value, at


def _encode_varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


def _record(payload: bytes) -> bytes:
  """Returns a TFRecord."""
  length = struct.pack("<Q", len(payload))
  return length + _checksum(length) + payload + _checksum(payload)


def _checksum(data: bytes) -> bytes:
  """Returns the masked CRC-32C; bit by bit, for the names of tables."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
