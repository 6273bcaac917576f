"""Reads files of samples as inputs of a model's signature.

csv            a line of names, then a line per example; several numbers in a cell are separated
               by blanks
tfrecord       a record per example, in a format that the model parses
instance, example, example_batch
               records as `PBDataset` reads them: header, length, message
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from monolith.agent_service import record_file
from monolith.serving.errors import invalid
from monolith.serving.servable import Signature

FORMATS = ("csv", "tfrecord", "instance", "example", "example_batch")
_TFRECORD_FRAME_BYTES = 16


class RecordHeader(NamedTuple):
  """Describes the bytes before the length of a record, all of which are skipped.

  Attributes:
    lagrangex_header: 8 bytes, and nothing else.
    kafka_dump_prefix: 8 or 16 bytes.
    has_sort_id: a length and as many bytes.
    kafka_dump: 8 bytes.
  """

  lagrangex_header: bool = False
  kafka_dump_prefix: bool = False
  has_sort_id: bool = False
  kafka_dump: bool = False


def read_batches(
  path: str, kind: str, signature: Signature, batch_size: int, header: RecordHeader
) -> Iterator[dict[str, np.ndarray]]:
  """Yields the inputs of a signature, at most `batch_size` examples at a time.

  Args:
    path: the file.
    kind: one of `FORMATS`.
    signature: the signature to read inputs for.
    batch_size: how many at a time; an ExampleBatch is always alone.
    header: the bytes before each record of Instances, Examples and ExampleBatches.

  Raises:
    ServingError: INVALID_ARGUMENT, the file is torn, or its examples do not fit the signature.
    tf.errors.OpError: the file cannot be read.
  """
  if kind == "csv":
    yield from _read_csv(path, signature, batch_size)
    return
  name = _only_string_input(signature)
  if kind == "tfrecord":
    records: Iterator[bytes] = read_tfrecords(path)
  else:
    records = read_records(path, header)
  batch: list[bytes] = []
  for record in records:
    batch.append(record)
    if len(batch) == batch_size or kind == "example_batch":
      yield {name: _to_strings(batch)}
      batch = []
  if batch:
    yield {name: _to_strings(batch)}


def read_tfrecords(path: str) -> Iterator[bytes]:
  """Yields the records of a TFRecord file that is not compressed.

  TensorFlow reads a file that ends within the first 11 bytes of a record as a smaller file, and its
  errors do not name the file.

  Raises:
    tf.errors.DataLossError: the file is torn or corrupt.
    tf.errors.OpError: it cannot be read.
  """
  number, end = 0, 0
  try:
    for record in tf.compat.v1.io.tf_record_iterator(path):
      yield record
      number += 1
      end += len(record) + _TFRECORD_FRAME_BYTES
  except tf.errors.DataLossError as error:
    raise tf.errors.DataLossError(
      None, None, f"{path}: record {number}: {error.message}"
    ) from error
  if end != tf.io.gfile.stat(path).length:
    raise tf.errors.DataLossError(None, None, f"{path} ends within record {number}")


def read_records(path: str, header: RecordHeader) -> Iterator[bytes]:
  """Yields the messages of a file.

  Raises:
    ServingError: INVALID_ARGUMENT, it ends within a record or is of another format.
    tf.errors.OpError: it cannot be read.
  """
  number = 0
  with tf.io.gfile.GFile(path, "rb") as stream:
    try:
      for record in record_file.read_records(stream, **header._asdict()):
        yield record
        number += 1
    except ValueError as error:
      raise invalid(f"record {number} of {path}, with {header}: {error}") from error


def _read_csv(path: str, signature: Signature, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
  with tf.io.gfile.GFile(path) as stream:
    lines = _csv_lines(path, stream)
    names = next(lines, [])
    signature.check_names(dict.fromkeys(names))
    rows: list[Sequence[str]] = []
    first = 2
    for number, row in enumerate(lines, first):
      if len(row) != len(names):
        raise invalid(f"line {number} of {path} has {len(row)} cells, want {len(names)}")
      rows.append(row)
      if len(rows) == batch_size:
        yield _to_columns(path, first, names, rows, signature)
        rows, first = [], number + 1
    if rows:
      yield _to_columns(path, first, names, rows, signature)


def _csv_lines(path: str, stream: tf.io.gfile.GFile) -> Iterator[list[str]]:
  """Yields the lines of a file; the error for an unreadable line names its position."""
  lines = csv.reader(iter(stream.readline, ""))
  number = 1
  while True:
    try:
      line = next(lines)
    except StopIteration:
      return
    except (csv.Error, UnicodeDecodeError) as error:
      raise invalid(f"line {number} of {path}: {error}") from error
    yield line
    number += 1


def _to_columns(
  path: str, first: int, names: Sequence[str], rows: list[Sequence[str]], signature: Signature
) -> dict[str, np.ndarray]:
  columns = {}
  for column, name in enumerate(names):
    cells = [row[column] for row in rows]
    dtype = signature.dtype(name)
    if dtype == tf.string:
      columns[name] = _to_strings([cell.encode() for cell in cells])
      continue
    shape = signature.inputs[name].tensor_shape
    parse = _parse_int if dtype.is_integer else float
    try:
      values = [[parse(text) for text in cell.split()] for cell in cells]
    except ValueError as error:
      raise invalid(
        f"lines {first} to {first + len(rows) - 1} of {path}, {name}: {error}"
      ) from error
    sizes = {len(value) for value in values}
    if len(sizes) != 1 or 0 in sizes:
      raise invalid(
        f"lines {first} to {first + len(rows) - 1} of {path}, {name}: cells of {sorted(sizes)} "
        "numbers, want as many in each"
      )
    array = np.array(values, object)
    if dtype.is_integer and not dtype.min <= array.min() <= array.max() <= dtype.max:
      raise invalid(f"{path}, {name}: a number is outside of {dtype.name}")
    array = array.astype(dtype.as_numpy_dtype)
    columns[name] = array[:, 0] if len(shape.dim) == 1 and sizes == {1} else array
  return columns


def _parse_int(text: str) -> int:
  return int(text, 10)


def _only_string_input(signature: Signature) -> str:
  if len(signature.inputs) == 1:
    (name,) = signature.inputs
    if signature.dtype(name) == tf.string:
      return name
  raise invalid(
    f"signature {signature.name!r} takes {sorted(signature.inputs)}, want one input of strings for "
    "serialized examples"
  )


def _to_strings(values: list[bytes]) -> np.ndarray:
  array = np.empty(len(values), object)
  array[:] = values
  return array
