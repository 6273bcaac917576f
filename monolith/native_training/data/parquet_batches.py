"""Columns of a Parquet file as ExampleBatch protos."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import descriptor

from idl.matrix.proto import example_pb2, line_id_pb2

_ID_BASE = 10000
_LABEL = "__LABEL__"
_LINE_ID = "__LINE_ID__"
_WEIGHT = "instance_weight"
_RESERVED = re.compile(r"__(\w+?)__")
_UINT64 = (1 << 64) - 1

# What a type of select_columns_type is in a Feature, and which columns can become it.
_LISTS = {
  "int": ("int64_list", ("int",)),
  "fid_v1": ("fid_v1_list", ("int",)),
  "fid_v2": ("fid_v2_list", ("int",)),
  "float": ("float_list", ("float", "int")),
  "bytes": ("bytes_list", ("bytes",)),
  "string": ("bytes_list", ("bytes",)),
}


def import_pyarrow() -> Any:
  """Returns the module `pyarrow`, an optional dependency, with `pyarrow.parquet` loaded."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as error:
    raise ImportError(
      "reading Parquet files needs pyarrow: pip install 'monolith[parquet]'"
    ) from error
  return pyarrow


@dataclasses.dataclass(frozen=True)
class Column:
  """A column to read.

  Attributes:
    name: in the file.
    type: a key of `_LISTS`.
    position: among the columns to read.
    line_id_field: the field of LineId that the column is, or None.
  """

  name: str
  type: str
  position: int
  line_id_field: descriptor.FieldDescriptor | None = None

  @property
  def accepted_kinds(self) -> tuple[str, ...]:
    """What values in the file may be."""
    field = self.line_id_field
    if field is None:
      is_number = self.name in (_LABEL, _WEIGHT)
      return ("float", "int") if is_number else _LISTS[self.type][1]
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
      return ("float", "int")
    return ("bytes",) if field.cpp_type == field.CPPTYPE_STRING else ("int",)


def make_columns(names: Sequence[str], types: Sequence[str]) -> list[Column]:
  """Checks what to read, before any file is opened.

  Args:
    names: columns. `__LABEL__` is the label, another `__XXX__` field `xxx` of LineId.
    types: `int`, `fid_v1`, `fid_v2`, `float`, or for byte arrays `bytes`; one per name.

  Raises:
    ValueError: the lists do not fit, a name comes twice or is no field, or a type is unknown.
  """
  if not names:
    raise ValueError("select_columns is empty, want the names of columns")
  if len(names) != len(types):
    raise ValueError(
      f"select_columns has {len(names)} names, select_columns_type has {len(types)} types"
    )
  columns = []
  for position, (name, type_name) in enumerate(zip(names, types)):
    if type_name not in _LISTS:
      raise ValueError(
        f"select_columns_type[{position}] is {type_name!r}, want one of {', '.join(_LISTS)}"
      )
    if name in names[:position]:
      raise ValueError(f"select_columns has {name!r} twice")
    field = None
    reserved = _RESERVED.fullmatch(name)
    if reserved and name != _LABEL:
      field = line_id_pb2.LineId.DESCRIPTOR.fields_by_name.get(reserved[1].lower())
      if field is None or field.message_type is not None:
        raise ValueError(
          f"select_columns[{position}] is {name!r}, but LineId has no value "
          f"{reserved[1].lower()!r}"
        )
    columns.append(Column(name, type_name, position, field))
  return columns


def read_batches(
  file_name: str, columns: Sequence[Column], batch_size: int, drop_remainder: bool
) -> Iterator[example_pb2.ExampleBatch]:
  """Reads a file from its first row to its last.

  Args:
    file_name: a file of this machine, or of any file system TensorFlow knows.
    columns: see `make_columns`.
    batch_size: rows of a batch, also across row groups.
    drop_remainder: leave out a last batch of fewer rows.

  Raises:
    ValueError: the file cannot be read, or columns are missing, of another type or have nulls.
  """
  pyarrow = import_pyarrow()
  try:
    with _open(pyarrow, file_name) as parquet_file:
      _check_schema(pyarrow, file_name, parquet_file.schema_arrow, columns)
      names = [column.name for column in columns]
      first_row = 0
      for table in _tables(pyarrow, parquet_file, names, batch_size):
        if table.num_rows < batch_size and drop_remainder:
          return
        yield _make_batch(file_name, table, columns, first_row)
        first_row += table.num_rows
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{file_name} cannot be read as a Parquet file: {error}") from error


class _GFileReader(io.RawIOBase):
  """A file of a TensorFlow file system for pyarrow."""

  def __init__(self, file_name: str):
    super().__init__()
    self._file = tf.io.gfile.GFile(file_name, "rb")

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    content = self._file.read(len(buffer))
    buffer[: len(content)] = content
    return len(content)

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._file.seek(offset, whence)
    return self._file.tell()

  def tell(self) -> int:
    return self._file.tell()

  def close(self) -> None:
    self._file.close()
    super().close()


def _open(pyarrow: Any, file_name: str) -> Any:
  source = _GFileReader(file_name) if "://" in file_name else file_name
  return pyarrow.parquet.ParquetFile(source)


def _kind(pyarrow: Any, arrow_type: Any) -> tuple[str | None, bool]:
  """Returns what values of a column are, and whether a row has a list of them."""
  types = pyarrow.types
  is_list = types.is_list(arrow_type) or types.is_large_list(arrow_type)
  if is_list or types.is_dictionary(arrow_type):
    arrow_type = arrow_type.value_type
  if types.is_integer(arrow_type):
    return "int", is_list
  if types.is_floating(arrow_type):
    return "float", is_list
  is_bytes = (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string)
  return ("bytes" if any(test(arrow_type) for test in is_bytes) else None), is_list


def _check_schema(pyarrow: Any, file_name: str, schema: Any, columns: Sequence[Column]) -> None:
  for column in columns:
    count = schema.names.count(column.name)
    if count != 1:
      raise ValueError(
        f"{file_name} has {count} columns {column.name!r}, want one; it has: "
        f"{', '.join(schema.names)}"
      )
    arrow_type = schema.field(column.name).type
    kind, is_list = _kind(pyarrow, arrow_type)
    if kind not in column.accepted_kinds:
      wanted = column.type
      if column.line_id_field is not None:
        wanted = f"LineId.{column.line_id_field.name}"
      raise ValueError(
        f"column {column.name!r} of {file_name} is {arrow_type}, which cannot become {wanted}"
      )
    field = column.line_id_field
    if is_list and field is not None and field.label != field.LABEL_REPEATED:
      raise ValueError(
        f"column {column.name!r} of {file_name} is {arrow_type}, but LineId.{field.name} is "
        "one value"
      )


def _tables(pyarrow: Any, parquet_file: Any, names: Sequence[str], size: int) -> Iterator[Any]:
  """Yields tables of `size` rows, the last one may have fewer."""
  parts, rows = [], 0
  for batch in parquet_file.iter_batches(size, columns=list(names), use_threads=False):
    start = 0
    while start < batch.num_rows:
      part = batch.slice(start, size - rows)
      parts.append(part)
      start += part.num_rows
      rows += part.num_rows
      if rows == size:
        yield pyarrow.Table.from_batches(parts)
        parts, rows = [], 0
  if rows:
    yield pyarrow.Table.from_batches(parts)


def _make_batch(
  file_name: str, table: Any, columns: Sequence[Column], first_row: int
) -> example_pb2.ExampleBatch:
  batch = example_pb2.ExampleBatch(batch_size=table.num_rows)
  line_ids: list[line_id_pb2.LineId] = []
  for column in columns:
    rows = _rows(file_name, table.column(column.name), column.name, first_row)
    if column.line_id_field is not None:
      line_ids = line_ids or [line_id_pb2.LineId() for _ in rows]
      _fill_line_ids(file_name, column, rows, first_row, line_ids)
      continue
    is_number = column.name in (_LABEL, _WEIGHT)
    list_name = "float_list" if is_number else _LISTS[column.type][0]
    convert = _converter(list_name)
    features = batch.named_feature_list.add(name=column.name, id=column.position + _ID_BASE)
    for row, values in enumerate(rows):
      value_list = getattr(features.feature.add(), list_name)
      value_list.SetInParent()  # an empty list is a value too
      try:
        value_list.value.extend(map(convert, values))
      except (TypeError, ValueError) as error:
        raise ValueError(_where(file_name, column.name, first_row + row) + str(error)) from error
  if line_ids:
    features = batch.named_feature_list.add(name=_LINE_ID)
    for line_id in line_ids:
      features.feature.add().bytes_list.value.append(line_id.SerializeToString())
  return batch


def _where(file_name: str, column: str, row: int) -> str:
  return f"row {row} of column {column!r} of {file_name}: "


def _rows(file_name: str, column: Any, name: str, first_row: int) -> list[list[Any]]:
  """Returns the values of each row.

  Raises:
    ValueError: a row, or a value in it, is null.
  """
  rows = column.to_pylist()
  rows = [row if isinstance(row, list) else [row] for row in rows]
  for i, row in enumerate(rows):
    if None in row:
      raise ValueError(_where(file_name, name, first_row + i) + "null is not a value")
  return rows


def _converter(list_name: str) -> Callable[[Any], Any]:
  """Returns what turns a value of the file into one of the list."""
  if list_name == "bytes_list":
    return lambda value: value.encode() if isinstance(value, str) else value
  if list_name.startswith("fid"):
    return lambda value: value & _UINT64  # files keep the bits of an id as a signed number
  return float if list_name == "float_list" else int


def _fill_line_ids(
  file_name: str,
  column: Column,
  rows: Sequence[Sequence[Any]],
  first_row: int,
  line_ids: Sequence[line_id_pb2.LineId],
) -> None:
  field = column.line_id_field
  for i, (line_id, row) in enumerate(zip(line_ids, rows)):
    try:
      values = [_line_id_value(field, value) for value in row]
      if field.label == field.LABEL_REPEATED:
        getattr(line_id, field.name).extend(values)
      else:
        setattr(line_id, field.name, values[0])
    except (TypeError, ValueError) as error:
      raise ValueError(_where(file_name, column.name, first_row + i) + str(error)) from error


def _line_id_value(field: descriptor.FieldDescriptor, value: Any) -> Any:
  if field.cpp_type == field.CPPTYPE_BOOL:
    return bool(value)
  if field.cpp_type == field.CPPTYPE_UINT64:
    return value & _UINT64
  if field.type == field.TYPE_BYTES and isinstance(value, str):
    return value.encode()
  if field.type == field.TYPE_STRING and isinstance(value, bytes):
    return value.decode()
  return value
