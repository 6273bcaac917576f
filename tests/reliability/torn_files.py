"""Damages files of every kind that is read, and checks what comes out of them.

A mutant is the content of a good file, cut, with bits flipped, with pieces copied, left out or
zeroed, or with another file's end. Its reader must give the rows of the good file, or an error that
names the file, or the rows that an independent strict decoder finds in the mutant: where a format
has no checksum, a changed byte may be a changed value, and a cut between two rows is a smaller
file.

  python -m tests.reliability.torn_files FOLDER MUTANTS [KIND [SEED]]
"""

from __future__ import annotations

import csv
import dataclasses
import faulthandler
import gzip
import io
import os
import random
import resource
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith import data
from monolith.native_training.data import datasets, parsers
from monolith.native_training.data.file_rows import FileRowsDataset
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  frame,
  make_example,
  proto_of,
)

_ROWS = 40
_SECONDS = 60  # more than any mutant takes, on a busy machine
_GROWTH = 1 << 30  # bytes of memory
_FIELDS = ("id", "user", "stars")
_CompressType = datasets.CompressType
_PbType = datasets.PbType


class TornError(Exception):
  """Raised by decoders of mutants."""


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of files.

  Attributes:
    name: its name, which is also the file's.
    content: a good file.
    boundaries: offsets where something begins.
    make: returns the dataset of a path.
    rows_of: returns the rows of an element of the dataset.
    decode: returns the rows of a mutant, or raises anything.
    has_header: the dataset reads the file when it is made, so it is made for every mutant.
    counts_only: rows are compared by their number: a changed byte of a message can mean much.
    is_slow: TensorFlow prepares functions for every iterator, so fewer mutants are of this kind.
  """

  name: str
  content: bytes
  boundaries: list[int]
  make: Callable[[str], tf.data.Dataset]
  rows_of: Callable[[Any], list]
  decode: Callable[[bytes], list] | None
  has_header: bool = False
  counts_only: bool = False
  is_slow: bool = False


def _offsets(pieces: list[bytes]) -> list[int]:
  offsets = [0]
  for piece in pieces:
    offsets.append(offsets[-1] + len(piece))
  return offsets


def _inflate(content: bytes) -> bytes:
  decoder = zlib.decompressobj()
  plain = decoder.decompress(content)
  if not decoder.eof or decoder.unused_data:
    raise TornError("zlib")
  return plain


def _gunzip(content: bytes) -> bytes:
  plain = b""
  while True:
    decoder = zlib.decompressobj(31)
    plain += decoder.decompress(content)
    if not decoder.eof:
      raise TornError("gzip")
    content = decoder.unused_data
    if not content:
      return plain


def _unzstd(content: bytes) -> bytes:
  if not content:
    raise TornError("zstd")
  with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
    return stream.read()


def _to_hadoop_snappy(content: bytes) -> bytes:
  """Returns blocks of two chunks each."""
  blocks = []
  for at in range(0, len(content), 700):
    block = content[at : at + 700]
    chunks = [pa.compress(c, "snappy", asbytes=True) for c in (block[:300], block[300:]) if c]
    blocks.append(struct.pack(">I", len(block)))
    blocks += [struct.pack(">I", len(chunk)) + chunk for chunk in chunks]
  return b"".join(blocks)


def _varint(content: bytes) -> int:
  value = 0
  for i, byte in enumerate(content[:5]):
    value |= (byte & 0x7F) << 7 * i
    if byte < 0x80:
      return value
  raise TornError("varint")


def _from_hadoop_snappy(content: bytes) -> bytes:
  plain, at = [], 0

  def take(size: int) -> bytes:
    nonlocal at
    if size > len(content) - at:
      raise TornError("snappy")
    at += size
    return content[at - size : at]

  while at < len(content) or not plain:
    left = struct.unpack(">I", take(4))[0]
    plain.append(b"")
    while left > 0:
      chunk = take(struct.unpack(">I", take(4))[0])
      size = _varint(chunk)
      if not 0 < size <= left:
        raise TornError("snappy")
      plain.append(pa.decompress(chunk, size, "snappy", asbytes=True))
      left -= size
  return b"".join(plain)


COMPRESSIONS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
  "no": (bytes, bytes),
  "gzip": (lambda content: gzip.compress(content, mtime=0), _gunzip),
  "zlib": (zlib.compress, _inflate),
  "zstd": (lambda content: pa.compress(content, "zstd", asbytes=True), _unzstd),
  "snappy": (_to_hadoop_snappy, _from_hadoop_snappy),
}


def _csv_row(i: int) -> tuple[int, bytes, int]:
  user = f'"u, {i}"' if i % 5 == 0 else f"user{'é' * (i % 3)}{i}"
  return (1 << 53) + i, user.encode(), -i


def _read_text(content: bytes) -> list:
  rows = []
  lines = content.replace(b"\r", b"").decode("utf-8").split("\n")
  for line in lines:
    if not line.strip(" \t\v\f\r\n"):
      continue
    [fields] = csv.reader([line], strict=True)
    if len(fields) != len(_FIELDS):
      raise TornError("fields")
    # An empty field has no id.
    rows.append((int(fields[0]) if fields[0] else None, fields[1].encode(), int(fields[2])))
  return rows


def _csv_kinds() -> Iterator[Kind]:
  columns = {
    "id": data.Ids(hashed=False),
    "user": data.Text(),
    "stars": data.Number(dtype=tf.int64),
  }
  lines = [b"%d,%s,%d\n" % _csv_row(i) for i in range(_ROWS)]
  header = (",".join(_FIELDS) + "\n").encode()

  def rows_of(element: dict[str, Any]) -> list:
    ids = [row[0] if row else None for row in element["id"].to_list()]
    return list(zip(ids, element["user"].numpy().tolist(), element["stars"].numpy().tolist()))

  def cut_lines(plain: bytes) -> list[bytes]:
    cut = plain.replace(b"\r", b"").split(b"\n")
    return cut if cut[-1] else cut[:-1]

  def decode_with_header(plain: bytes) -> list:
    first, _, rest = plain.partition(b"\n")
    if first.rstrip(b"\r") != header.strip():
      raise TornError("header")
    return _read_text(rest)

  for compression in ("no", "gzip"):
    suffix = ".csv" if compression == "no" else ".csv.gz"
    compress, decompress = COMPRESSIONS[compression]
    yield Kind(
      "text" + suffix,
      compress(b"".join(lines)),
      _offsets(lines) if compression == "no" else [],
      lambda path, kind=compression: FileRowsDataset(
        path, "lines", "GZIP" if kind == "gzip" else "", block_rows=16
      ),
      lambda element: element.numpy().tolist(),
      lambda content, plain=decompress: cut_lines(plain(content)),
    )
    yield Kind(
      "lines" + suffix,
      compress(b"".join(lines)),
      _offsets(lines) if compression == "no" else [],
      lambda path: data.csv(path, columns, 16, field_names=_FIELDS),
      rows_of,
      lambda content, plain=decompress: _read_text(plain(content)),
      is_slow=True,
    )
    yield Kind(
      "header" + suffix,
      compress(b"".join([header, *lines])),
      _offsets([header, *lines]) if compression == "no" else [],
      lambda path: data.csv(path, columns, 16),
      rows_of,
      lambda content, plain=decompress: decode_with_header(plain(content)),
      has_header=True,
      is_slow=True,
    )


def _crc_table() -> list[int]:
  table = []
  for i in range(256):
    crc = i
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    table.append(crc)
  return table


_CRC_TABLE = _crc_table()


def _masked_crc(content: bytes) -> bytes:
  crc = 0xFFFFFFFF
  for byte in content:
    crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _to_record(payload: bytes) -> bytes:
  size = struct.pack("<Q", len(payload))
  return size + _masked_crc(size) + payload + _masked_crc(payload)


def _from_records(content: bytes) -> list[bytes]:
  payloads, at = [], 0
  while at < len(content):
    head = content[at : at + 12]
    if len(head) < 12 or _masked_crc(head[:8]) != head[8:]:
      raise TornError("record")
    end = at + 12 + struct.unpack("<Q", head[:8])[0]
    if len(content) < end + 4 or _masked_crc(content[at + 12 : end]) != content[end : end + 4]:
      raise TornError("record")
    payloads.append(content[at + 12 : end])
    at = end + 4
  return payloads


def _tf_example(i: int) -> bytes:
  features = {
    "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
    "user": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"u%d" % i])),
  }
  example = tf.train.Example(features=tf.train.Features(feature=features))
  return example.SerializeToString(deterministic=True)


def _tfrecord_kinds() -> Iterator[Kind]:
  payloads = [_tf_example(i) for i in range(_ROWS)]
  records = [_to_record(payload) for payload in payloads]
  columns = {"id": data.Number(dtype=tf.int64), "user": data.Text()}

  def rows_of(element: dict[str, Any]) -> list:
    return list(zip(element["id"].numpy().tolist(), element["user"].numpy().tolist()))

  def parse(payload: bytes) -> tuple[int, bytes]:
    feature = tf.train.Example.FromString(payload).features.feature
    return feature["id"].int64_list.value[0], feature["user"].bytes_list.value[0]

  for compression in ("no", "gzip", "zlib"):
    compress, decompress = COMPRESSIONS[compression]
    compress_type = _CompressType[compression.upper()]
    content = compress(b"".join(records))
    boundaries = _offsets(records) if compression == "no" else []
    yield Kind(
      f"wrapper.{compression}.tfrecord",
      content,
      boundaries,
      lambda path, kind=compress_type: datasets.TFRecordDatasetWrapper(path, kind).batch(16),
      lambda element: element.numpy().tolist(),
      lambda content, plain=decompress: _from_records(plain(content)),
    )
    if compression != "zlib":
      yield Kind(
        "tfrecord" + ("" if compression == "no" else ".gz"),
        content,
        boundaries,
        lambda path: data.tfrecord(path, columns, 16),
        rows_of,
        lambda content, plain=decompress: [parse(p) for p in _from_records(plain(content))],
        is_slow=True,
      )


def _unframe(content: bytes) -> list[bytes]:
  """Returns the payloads of records that have a sort id."""
  payloads, at = [], 0
  while at < len(content):
    for is_payload in (False, True):
      if len(content) < at + 8:
        raise TornError("length")
      size = struct.unpack("<Q", content[at : at + 8])[0]
      at += 8 + size
      if at > len(content):
        raise TornError("content")
      if is_payload:
        payloads.append(content[at - size : at])
  return payloads


def _rows_of_samples(element: dict[str, tf.Tensor]) -> list:
  return list(
    zip(element["uid"].numpy().flatten().tolist(), (row.tolist() for row in _ragged(element["a"])))
  )


def _ragged(feature: tf.RaggedTensor) -> list:
  return [row.numpy() for row in feature]


def _parse_examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.batch(16).map(
    lambda samples: parsers.parse_examples(samples, ["a"], extra_features=["uid"])
  )


def _example(i: int) -> example_pb2.Example:
  return make_example({"a": [fid_v2(2, i * k) for k in range(i % 4)]}, uid=i + 1)


def _instance(i: int) -> proto_parser_pb2.Instance:
  instance = proto_parser_pb2.Instance(fid=[fid_v1(3, i * k) for k in range(i % 4)])
  instance.line_id.uid = i + 1
  return instance


def _example_batch(first: int, rows: int) -> example_pb2.ExampleBatch:
  batch = example_pb2.ExampleBatch(batch_size=rows)
  lines = batch.named_feature_list.add(name="__LINE_ID__")
  values = batch.named_feature_list.add(name="a")
  for i in range(first, first + rows):
    example = _example(i)
    lines.feature.add().bytes_list.value.append(example.line_id.SerializeToString())
    values.feature.add().fid_v2_list.value.extend(
      example.named_feature[0].feature.fid_v2_list.value
    )
  return batch


def _payloads_of(pb_type: datasets.PbType) -> list[bytes]:
  if pb_type == _PbType.EXAMPLEBATCH:
    batches = [_example_batch(first, 8) for first in range(0, _ROWS, 8)]
    return [batch.SerializeToString() for batch in batches]
  make = _example if pb_type == _PbType.EXAMPLE else _instance
  return [make(i).SerializeToString() for i in range(_ROWS)]


def _pb_kinds() -> Iterator[Kind]:
  for pb_type in (_PbType.EXAMPLE, _PbType.INSTANCE, _PbType.EXAMPLEBATCH):
    # With a sort id of some bytes.
    records = [frame(p, struct.pack("<Q", 3) + b"abc") for p in _payloads_of(pb_type)]
    for compression, (compress, decompress) in COMPRESSIONS.items():
      compress_type = _CompressType[compression.upper()]
      yield Kind(
        f"{pb_type.to_name()}.{compression}.pb",
        compress(b"".join(records)),
        _offsets(records) if compression == "no" else [],
        lambda path, kind=compress_type, pb=pb_type: (
          datasets.FilePBDataset(
            path, input_pb_type=pb, output_pb_type=_PbType.PLAINTEXT, compression_type=kind
          ).batch(16)
        ),
        lambda element: element.numpy().tolist(),
        lambda content, plain=decompress: _unframe(plain(content)),
      )
  yield from _converted_kinds()
  records = [frame(p, struct.pack("<Q", 3) + b"abc") for p in _payloads_of(_PbType.EXAMPLE)]
  yield Kind(
    "parsed.pb",
    b"".join(records),
    _offsets(records),
    lambda path: _parse_examples(datasets.FilePBDataset(path, input_pb_type=_PbType.EXAMPLE)),
    _rows_of_samples,
    _unframe,
    counts_only=True,
    is_slow=True,
  )


def _converted_kinds() -> Iterator[Kind]:
  """Yields kinds whose messages are parsed, and made into others."""
  protos = {
    _PbType.EXAMPLE: example_pb2.Example,
    _PbType.INSTANCE: proto_parser_pb2.Instance,
    _PbType.EXAMPLEBATCH: example_pb2.ExampleBatch,
  }

  def decode(content: bytes, pb_type: datasets.PbType) -> list:
    messages = [protos[pb_type].FromString(payload) for payload in _unframe(content)]
    if pb_type != _PbType.EXAMPLEBATCH:
      return messages
    return [i for batch in messages for i in range(batch.batch_size)]

  for source in protos:
    records = [frame(p, struct.pack("<Q", 3) + b"abc") for p in _payloads_of(source)]
    for target in (_PbType.EXAMPLE, _PbType.INSTANCE):
      yield Kind(
        f"{source.to_name()}.to.{target.to_name()}.pb",
        b"".join(records),
        _offsets(records),
        lambda path, types=(source, target): datasets.FilePBDataset(
          path, input_pb_type=types[0], output_pb_type=types[1]
        ),
        lambda element, proto=protos[target]: [proto_of(element, proto)],
        lambda content, pb_type=source: decode(content, pb_type),
        counts_only=True,
      )


def _parquet_kinds() -> Iterator[Kind]:
  numbers = range(4 * _ROWS)
  table = pa.table(
    {
      "__UID__": pa.array(numbers, pa.int64()),
      "a": pa.array([[fid_v2(2, i)] * (i % 3) for i in numbers], pa.list_(pa.int64())),
      "text": pa.array([f"t{i % 7}" for i in numbers]),
    }
  )
  for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
    for has_checksums in (False, True) if codec in ("none", "snappy") else (False,):
      sink = io.BytesIO()
      pq.write_table(
        table,
        sink,
        row_group_size=_ROWS,
        compression=codec,
        data_page_size=256,
        write_page_checksum=has_checksums,
        data_page_version="1.0" if has_checksums else "2.0",
      )
      yield Kind(
        f"{codec}{'.crc' if has_checksums else ''}.parquet",
        sink.getvalue(),
        [4, len(sink.getvalue()) - 8],
        lambda path: datasets.ParquetDataset(
          path,
          _PbType.PLAINTEXT,
          ["__UID__", "a", "text"],
          ["int", "fid_v2", "bytes"],
          16,
          drop_remainder=False,
        ),
        _rows_of_batch,
        None,
      )


def _rows_of_batch(element: tf.Tensor) -> list:
  batch = example_pb2.ExampleBatch.FromString(element.numpy())
  columns = [
    [feature.SerializeToString(deterministic=True) for feature in column.feature]
    for column in batch.named_feature_list
  ]
  assert all(len(column) == batch.batch_size for column in columns)
  return list(zip(*columns))


def kinds() -> list[Kind]:
  """Returns every kind of files."""
  return [*_csv_kinds(), *_tfrecord_kinds(), *_pb_kinds(), *_parquet_kinds()]


def mutate(kind: Kind, chance: random.Random) -> tuple[str, bytes]:
  """Returns what was done to the content, and the mutant."""
  content = kind.content
  size = len(content)

  def place() -> int:
    return chance.choice(
      [
        chance.randrange(size),
        chance.randrange(min(size, 24)),
        size - 1 - chance.randrange(min(size, 24)),
        min(size - 1, max(0, chance.choice(kind.boundaries or [0]) + chance.randrange(-2, 13))),
      ]
    )

  def stretch() -> tuple[int, int]:
    begin = place()
    return begin, min(size, begin + chance.choice([1, 4, 8, 16, 64, chance.randrange(1, size)]))

  how = chance.choice(["cut"] * 3 + ["flip"] * 3 + ["copy", "leave out", "zero", "append"])
  if how == "cut":
    return how, content[: place()]
  if how == "flip":
    damaged = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
      damaged[place()] ^= 1 << chance.randrange(8)
    return how, bytes(damaged)
  begin, end = stretch()
  if how == "copy":
    at = place()
    # Over what is there, or between.
    return how, content[:at] + content[begin:end] + content[chance.choice([at, at + end - begin]) :]
  if how == "leave out":
    return how, content[:begin] + content[end:]
  if how == "zero":
    end = chance.choice([end, size])
    return how, content[:begin] + bytes(end - begin) + content[end:]
  return how, content + content[begin:end]


def check(kind: Kind, dataset: tf.data.Dataset | None, path: str, good: list) -> str:
  """Reads a mutant. Returns how it ended.

  Raises:
    AssertionError: it is neither what it was, nor what is in it, nor a proper error.
  """
  with open(path, "rb") as file:
    content = file.read()
  try:
    if dataset is None:
      dataset = kind.make(path)
    rows = [row for element in dataset for row in kind.rows_of(element)]
  except (tf.errors.OpError, ValueError) as error:
    assert path in str(error), f"the error does not name the file: {error!r}"
    return "refused"
  if rows == good:
    return "same"
  if kind.decode is None:
    assert len(rows) == len(good), f"{len(rows)} of {len(good)} rows without an error"
    return "other values"
  try:
    wanted = kind.decode(content)
  except Exception as error:  # whatever a decoder says of garbage
    raise AssertionError(f"{len(rows)} of {len(good)} rows without an error: {error!r}") from error
  assert len(rows) == len(wanted) and (
    kind.counts_only or rows == wanted
  ), f"other rows than are there: {len(rows)}, want {len(wanted)}"
  return "other values" if len(rows) >= len(good) else "whole rows missing"


def run(folder: str, mutants: int, only: str | None = None, seed: int | None = None) -> dict:
  """Reads this number of mutants of all kinds. Returns how many ended in which way."""
  counts: dict[str, int] = {}
  chosen = [kind for kind in kinds() if only is None or kind.name == only]
  opened = {}
  for kind in chosen:
    path = os.path.join(folder, kind.name)
    with open(path, "wb") as file:
      file.write(kind.content)
    dataset = kind.make(path)
    good = [row for element in dataset for row in kind.rows_of(element)]
    assert good, kind.name
    if kind.decode is not None:
      assert len(good) == len(kind.decode(kind.content)), kind.name
      assert kind.counts_only or good == kind.decode(kind.content), kind.name
    opened[kind.name] = (None if kind.has_header else dataset, path, good)
  # Slow ones come once in a round.
  turns = chosen + [kind for kind in chosen if not kind.is_slow] * 3
  memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for i in range(mutants) if seed is None else [seed]:
    kind = turns[i % len(turns)]
    dataset, path, good = opened[kind.name]
    how, mutant = mutate(kind, random.Random(f"{kind.name} {i}"))
    # The last line says which one it was, should this be the end.
    print(f"{kind.name} {i}: {how}", flush=True)
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    with open(path, "wb") as file:
      file.write(mutant)
    end = check(kind, dataset, path, good)
    # Lines that have become one are found by the fields that a row must have.
    is_raw = kind.name.startswith("text")
    assert how != "flip" or is_raw or end != "whole rows missing", "a flip has hidden rows"
    counts[end] = counts.get(end, 0) + 1
    counts[f"{how}: {end}"] = counts.get(f"{how}: {end}", 0) + 1
  faulthandler.cancel_dump_traceback_later()
  growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
  assert growth < _GROWTH, f"memory grew by {growth} bytes"
  counts["MiB of growth"] = growth >> 20
  return counts


def main() -> None:
  """Reads mutants as the arguments say, and prints how they ended."""
  faulthandler.enable()
  folder, mutants, *rest = sys.argv[1:]
  only, seed = [*rest, None, None][:2]
  print(run(folder, int(mutants), only, None if seed is None else int(seed)))


if __name__ == "__main__":
  main()
