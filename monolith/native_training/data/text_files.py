"""Rows of text as datasets: CSV files, and the files of Criteo's display advertising challenge.

Reading, hashing and checking are TensorFlow ops over whole batches, so a dataset works in eager
code, in Keras and in the graph of a model alike.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from monolith.native_training.data import bad_rows as bad_rows_lib
from monolith.native_training.data.bad_rows import BadRows
from monolith.native_training.data.columns import (
  Column,
  Ids,
  LogBuckets,
  Number,
  check_columns,
  find_rounded,
)
from monolith.native_training.data.file_rows import FileRowsDataset

CRITEO_NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

_SHOWN_CHARACTERS = 80
_GZIP = r"(?i).*\.gz"
_ROWS_PER_FILE = 2**40  # what the place of a row leaves room for
_BLOCK_ROWS = 1024  # numbered together
_MAX_TRACED = 16
_HEADER_BYTES = 16 << 10  # read at a time, until there is a line


def csv(
  files: str | Sequence[str],
  columns: Mapping[str, Column],
  batch_size: int,
  *,
  label: str | None = None,
  field_names: Sequence[str] | None = None,
  separator: str = ",",
  quotes: bool = True,
  shuffle: int = 0,
  seed: int | None = None,
  epochs: int | None = 1,
  shard: tuple[int, int] | None = None,
  on_bad_row: str = "error",
  bad_rows: BadRows | None = None,
) -> tf.data.Dataset:
  """Reads CSV files.

  A row is a line: a quoted field may hold separators and doubled quotes, but no line break. Empty
  lines are no rows, and a byte order mark at the beginning of a file is no text. Files whose names
  end in `.gz` are decompressed; one of 0 bytes is torn, while a plain file of 0 bytes has no rows,
  or no header.

  Args:
    files: paths or patterns such as `"ratings/*.csv"`, read in the order of their names.
    columns: field -> what it becomes; fields without a column are not read.
    batch_size: rows per element. An element with skipped rows is smaller, and may be empty.
    label: the column that becomes the second part of `(features, label)`, which Keras's `fit`
      wants; by default an element is one dict, which a model's `input_fn` wants.
    field_names: the fields of a row, in order, for files without a header. By default the first
      line of every file says them, and all files must say the same.
    separator: the character between two fields.
    quotes: whether fields may be in quotation marks.
    shuffle: from how many rows the next one is drawn; 0 keeps the order.
    seed: what the draws depend on.
    epochs: how often the files are read; `None` for again and again.
    shard: `(i, n)` reads every n-th row, beginning with row i, for n workers of one training run.
    on_bad_row: `"error"` ends the reading with the file, the line and what is wrong there, `"skip"`
      leaves such rows out.
    bad_rows: counts the rows that are left out.

  Returns:
    Elements are dicts of features, as `columns` says.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an argument makes no sense, a file has no field of a column's name, or its header
      differs from the first one's or is not UTF-8.
    InvalidArgumentError: when read, a file begins with another header than when this was called.
    DataLossError: at once or when read, a compressed file is torn or corrupt; it names the file and
      the line. A cut in a file that is not compressed can be told only by a row that misses fields.
  """
  check_columns(columns)
  counter = bad_rows_lib.check_arguments(on_bad_row, bad_rows)
  if len(separator.encode()) != 1 or separator in '"\r\n':
    raise ValueError(f"separator is {separator!r}, want one character of ASCII")
  paths = find_files(files)
  headers = None
  if field_names is None:
    field_names, headers = _read_header(paths, separator, quotes)
    first_line = 2
  else:
    first_line = 1
  twice = [name for name in columns if list(field_names).count(name) > 1]
  if twice:
    raise ValueError(f"field_names has {twice[0]!r} more than once: {list(field_names)}")
  missing = [name for name in columns if name not in field_names]
  if missing:
    raise ValueError(f"{paths[0]} has no field {missing[0]!r}, its fields are {list(field_names)}")
  if label is not None and label not in columns:
    raise ValueError(f"label is {label!r}, want one of the columns {list(columns)}")

  layout = (tuple(columns.items()), tuple(field_names), separator, quotes, label)
  parse_lines = _make_parse(*layout, counter) if counter is not None else _trace_parse(*layout)

  @tf.autograph.experimental.do_not_convert
  def parse(places: tf.Tensor, lines: tf.Tensor) -> Any:
    if first_line == 1:
      lines = _without_mark(places, lines)
    with _called_as_traced():
      return parse_lines(places, lines, tf.constant(paths))

  batches = read_batches(
    paths, "lines", first_line, batch_size, shuffle, seed, epochs, shard, headers
  )
  dataset = batches.map(parse, tf.data.AUTOTUNE)
  return bad_rows_lib.make_savable(dataset).prefetch(tf.data.AUTOTUNE)


def criteo(
  files: str | Sequence[str], batch_size: int, *, numbers: str = "buckets", **options: Any
) -> tf.data.Dataset:
  """Reads files of Criteo's display advertising challenge, or of its terabyte dataset.

  A row is a label, 13 counts and 26 categories, separated by tabs; any of the latter may be empty.

  Args:
    files: paths or patterns.
    batch_size: rows per element.
    numbers: `"buckets"` makes `I1` to `I13` ids of `LogBuckets`; `"floats"` makes them one feature
      `numbers`, float32 `[batch, 13]`, of `ln(1 + count)` with 0 for none, as DLRM takes it.
    **options: as of `csv`, except `columns`, `field_names`, `separator` and `quotes`.

  Returns:
    Elements are dicts with ids `C1` to `C26`, the numbers, and `label`, float32 `[batch]`; with
    `label="label"`, pairs of such a dict and the label.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an argument makes no sense.
  """
  if numbers not in ("buckets", "floats"):
    raise ValueError(f"numbers is {numbers!r}, want 'buckets' or 'floats'")
  number: Column = LogBuckets() if numbers == "buckets" else Number(default=0.0)
  columns: dict[str, Column] = {
    "label": Number(),
    **{name: number for name in CRITEO_NUMBERS},
    **{name: Ids() for name in CRITEO_CATEGORIES},
  }
  dataset = csv(
    files, columns, batch_size, field_names=list(columns), separator="\t", quotes=False, **options
  )
  if numbers == "buckets":
    return dataset

  @tf.autograph.experimental.do_not_convert
  def join_numbers(features: dict[str, Any], *label: tf.Tensor) -> Any:
    columns = tf.stack([features.pop(name) for name in CRITEO_NUMBERS], axis=1)
    # Some counts are -1 or -2, which stand for "unknown".
    features["numbers"] = tf.math.log1p(tf.maximum(columns, 0.0))
    return (features, *label) if label else features

  return dataset.map(join_numbers, tf.data.AUTOTUNE)


def _make_parse(
  columns: tuple[tuple[str, Column], ...],
  field_names: tuple[str, ...],
  separator: str,
  quotes: bool,
  label: str | None,
  counter: BadRows | None = None,
) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Any]:
  """Returns the function from places, lines and all paths to an element of the dataset."""
  parser = _RowParser(dict(columns), list(field_names), separator, quotes, counter)

  def parse(places: tf.Tensor, lines: tf.Tensor, paths: tf.Tensor) -> Any:
    features = parser(lambda: describe_places(places, paths), lines)
    return features if label is None else (features, features.pop(label))

  return parse


@functools.lru_cache(maxsize=_MAX_TRACED)
def _trace_parse(*layout: Any) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Any]:
  """Returns `_make_parse` as a graph, made once.

  A program reads files of one kind several times, for the dry run of its model, for training and
  for evaluation, and the graph takes longer to make than many a dataset to read.
  """
  signature = [tf.TensorSpec([None], dtype) for dtype in (tf.int64, tf.string, tf.string)]
  function = tf.function(_make_parse(*layout), signature, autograph=False)
  # It is for other graphs, too: nothing of this one's may be in it.
  with tf.device(None), tf.control_dependencies(None):
    return function.get_concrete_function()


@contextlib.contextmanager
def _called_as_traced() -> Iterator[None]:
  """Lets TensorFlow not rewrite the functions that are called meanwhile.

  It would do so anew for each dataset. That takes as long as reading thousands of rows, and they
  are read no faster.
  """
  eager_context = context.context()
  options = eager_context.function_call_options
  config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  eager_context.function_call_options = context.FunctionCallOptions(options.executor_type, config)
  try:
    yield
  finally:
    eager_context.function_call_options = options


def find_files(files: str | Sequence[str]) -> list[str]:
  """Returns the files that paths or patterns name, each pattern's in order.

  Raises:
    FileNotFoundError: a path or pattern names none.
    ValueError: nothing is asked for.
  """
  patterns = [files] if isinstance(files, (str, bytes)) or hasattr(files, "__fspath__") else files
  paths = []
  for pattern in patterns:
    found = sorted(tf.io.gfile.glob(str(pattern)))
    if not found and tf.io.gfile.exists(str(pattern)):
      found = [str(pattern)]  # a name with a bracket, which is no pattern of itself
    if not found:
      raise FileNotFoundError(f"there is no file {str(pattern)!r}")
    paths += found
  if not paths:
    raise ValueError("files is empty, want a path or a pattern")
  return paths


def read_batches(
  paths: list[str],
  row_format: str,
  first: int,
  batch_size: int,
  shuffle: int,
  seed: int | None,
  epochs: int | None,
  shard: tuple[int, int] | None,
  headers: list[str] | None = None,
) -> tf.data.Dataset:
  """Returns batches of this worker's rows, after the places where they are.

  A place is one number, of file and row, as numbers are cheaper to carry along than names.

  Args:
    paths: the files.
    row_format: what a row is, as `FileRowsDataset` says.
    first: the number of each file's first row to read, from 1.
    batch_size: rows per batch.
    shuffle: from how many rows the next one is drawn; 0 keeps the order.
    seed: what the draws depend on.
    epochs: how often the files are read; `None` for again and again.
    shard: `(i, n)` reads every n-th row, beginning with row i.
    headers: the first line that each file must have still, without a byte order mark.

  Raises:
    ValueError: a number is out of its range.
  """
  _check_arrangement(batch_size, shuffle, epochs, shard)
  if not shuffle and shard is None:
    # Nothing is done with single rows, each of which would cost a step more.
    blocks = _number(paths, row_format, first, _BLOCK_ROWS, headers)
    return blocks.map(_place_rows).repeat(epochs).rebatch(batch_size)
  rows = _number(paths, row_format, first, 0, headers)
  if shard is not None:
    index, count = shard
    rows = rows.shard(count, index)
  if shuffle:
    rows = rows.shuffle(shuffle, seed=seed)
  return rows.repeat(epochs).batch(batch_size)


def _number(
  paths: list[str], row_format: str, first: int, block_rows: int, headers: list[str] | None
) -> tf.data.Dataset:
  """Returns rows, or blocks of them, of one file after another, each after its place."""

  @tf.autograph.experimental.do_not_convert
  def rows_of(index: tf.Tensor | int, path: tf.Tensor | str, *header: Any) -> tf.data.Dataset:
    kind = tf.where(tf.strings.regex_full_match(path, _GZIP), "GZIP", "")
    rows = FileRowsDataset(path, row_format, kind, skip_rows=first - 1, block_rows=block_rows)
    # Not `counter`, which calls a function for every number.
    numbers = tf.data.Dataset.range(
      index * _ROWS_PER_FILE + first, (index + 1) * _ROWS_PER_FILE, max(block_rows, 1)
    )
    numbered = tf.data.Dataset.zip((numbers, rows))
    if not header:
      return numbered
    return _check_header(path, kind, header[0], block_rows).concatenate(numbered)

  headers_of = () if headers is None else (headers,)
  if len(paths) == 1:
    return rows_of(0, paths[0], *(each[0] for each in headers_of))  # A step less for every row.
  files = tf.data.Dataset.from_tensor_slices(
    (tf.range(len(paths), dtype=tf.int64), paths, *headers_of)
  )
  return files.flat_map(rows_of)


def _check_header(
  path: tf.Tensor | str, kind: tf.Tensor, header: tf.Tensor | str, block_rows: int
) -> tf.data.Dataset:
  """Returns a dataset without elements, which fails if a file begins with another header.

  Rows are cut by the header that was read first, and a file may be replaced before it is read, or
  between two epochs.
  """

  @tf.autograph.experimental.do_not_convert
  def check(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    line = tf.strings.regex_replace(line, "^\ufeff|\r+$", "")
    problem = tf.strings.join(
      [path, ":1: the header is `", line, "`, but was `", header, "` when the dataset was made"]
    )
    bad_rows_lib.report(tf.boolean_mask([problem], [tf.not_equal(line, header)]), None)
    return tf.constant(0, tf.int64), tf.constant([], tf.string) if block_rows else line

  # A file that is empty now has an empty header.
  first = FileRowsDataset(path, "lines", kind).concatenate(tf.data.Dataset.from_tensors("")).take(1)
  return first.map(check).filter(lambda *unused: False)


@tf.autograph.experimental.do_not_convert
def _place_rows(start: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the place of each row of a block that starts at a place, and the rows."""
  return start + tf.range(tf.size(rows, tf.int64)), rows


def describe_places(places: tf.Tensor, paths: tf.Tensor | list[str]) -> tf.Tensor:
  """Returns `file:row` of each place."""
  files = tf.gather(paths, places // _ROWS_PER_FILE)
  return tf.strings.join([files, ":", tf.strings.as_string(places % _ROWS_PER_FILE)])


def _without_mark(places: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
  """Returns lines without the mark that some programs put before the first one of UTF-8 files."""
  is_first = tf.equal(places % _ROWS_PER_FILE, 1)
  return tf.cond(
    tf.reduce_any(is_first),
    lambda: tf.where(is_first, tf.strings.regex_replace(lines, "^\ufeff", ""), lines),
    lambda: lines,
  )


def _check_arrangement(
  batch_size: int, shuffle: int, epochs: int | None, shard: tuple[int, int] | None
) -> None:
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}, want at least 1")
  if shuffle < 0:
    raise ValueError(f"shuffle is {shuffle}, want a number of rows, or 0")
  if epochs is not None and epochs < 1:
    raise ValueError(f"epochs is {epochs}, want at least 1, or None for again and again")
  if shard is not None:
    is_pair = isinstance(shard, (tuple, list)) and len(shard) == 2
    if not is_pair or not 0 <= shard[0] < shard[1]:
      raise ValueError(f"shard is {shard}, want (i, n) with 0 <= i < n")


class _RowParser:
  """Turns lines into features."""

  def __init__(
    self,
    columns: Mapping[str, Column],
    field_names: list[str],
    separator: str,
    quotes: bool,
    counter: BadRows | None,
  ):
    self._columns = columns
    self._groups = collections.Counter(columns.values())
    order = list(self._groups)
    self._names = sorted(columns, key=lambda name: order.index(columns[name]))
    self._indices = [field_names.index(name) for name in self._names]
    self._size = len(field_names)
    self._separator = separator
    self._quotes = quotes
    self._counter = counter
    other = re.escape(separator)
    plain = rf'[^"{other}]*' if quotes else f"[^{other}]*"
    field = rf'(?:"(?:[^"]|"")*"|{plain})' if quotes else plain
    self._pattern = field + (other + field) * (self._size - 1)
    # A separator is a field, or two, even where it is a tab or a space.
    space = " \t\n\v\f\r".replace(separator, "")
    self._blank = f"[{space}]*"

  def __call__(self, places: Callable[[], tf.Tensor], lines: tf.Tensor) -> dict[str, Any]:
    blank = tf.strings.regex_full_match(lines, self._blank)
    torn = tf.logical_not(tf.strings.regex_full_match(lines, self._pattern))
    # Decoding stops at a row that it cannot cut into fields.
    lines_to_cut = tf.where(tf.logical_or(torn, blank), self._separator * (self._size - 1), lines)
    fields = sorted(self._indices)
    cut = tf.io.decode_csv(
      lines_to_cut,
      [[""]] * len(fields),
      field_delim=self._separator,
      use_quote_delim=self._quotes,
      select_cols=fields,
    )
    texts = [cut[fields.index(i)] for i in self._indices]
    texts = tf.stack(texts)
    bad = tf.concat([column.find_bad(flat) for column, flat in self._groups_of(texts)], axis=0)
    bad = tf.reshape(bad, tf.shape(texts))
    is_bad = tf.logical_and(tf.logical_or(torn, tf.reduce_any(bad, 0)), tf.logical_not(blank))
    is_good = tf.logical_not(tf.logical_or(is_bad, blank))

    def leave_bad_out() -> tf.Tensor:
      problems = self._describe(places(), lines, torn, texts, bad)
      bad_rows_lib.report(tf.gather_nd(problems, tf.where(is_bad)), self._counter)
      return tf.gather(texts, tf.where(is_good)[:, 0], axis=1)

    texts = tf.cond(tf.reduce_all(is_good), lambda: texts, leave_bad_out)
    features: list[Any] = []
    for column, flat in self._groups_of(texts):
      features += _cut(column.read(flat), self._groups[column])
    return dict(zip(self._names, features))

  def _groups_of(self, texts: tf.Tensor) -> Iterator[tuple[Column, tf.Tensor]]:
    """Yields equal columns together, with all their texts: a graph per group, not per column."""
    parts = tf.split(texts, list(self._groups.values()))
    for column, part in zip(self._groups, parts):
      yield column, tf.reshape(part, [-1])

  def _describe(
    self,
    places: tf.Tensor,
    lines: tf.Tensor,
    torn: tf.Tensor,
    texts: tf.Tensor,
    bad: tf.Tensor,
  ) -> tf.Tensor:
    """Returns what is wrong with each row, for those where something is."""
    no_row = tf.strings.join(
      [
        f"is not UTF-8 text of {self._size} fields separated by {_name(self._separator)}: `",
        tf.strings.substr(lines, 0, _SHOWN_CHARACTERS),
        "`",
      ]
    )
    # The first bad column of each row; a row that could not be cut has no columns.
    first = tf.argmax(tf.cast(bad, tf.int32), axis=0)
    text = tf.gather(tf.transpose(texts), first, batch_dims=1)
    rounds = tf.gather([self._columns[name].rounds for name in self._names], first)
    is_rounded = tf.logical_and(rounds, find_rounded(text))
    bad_column = tf.strings.join(
      [
        "column `",
        tf.gather(self._names, first),
        "` is `",
        tf.strings.substr(text, 0, _SHOWN_CHARACTERS),
        "`, want ",
        tf.gather([self._columns[name].want for name in self._names], first),
        tf.where(is_rounded, '; float32 rounds it, dtype="int64" keeps every digit', ""),
      ]
    )
    problems = tf.where(torn, no_row, bad_column)
    return tf.strings.join([places, ": ", problems])


def _cut(joined: Any, count: int) -> list[Any]:
  """Returns as many equal parts of the rows of a dense or ragged tensor."""
  if count == 1:
    return [joined]
  if not isinstance(joined, tf.RaggedTensor):
    return tf.unstack(tf.reshape(joined, [count, -1]))
  # One op for all parts: a small batch feels the number of ops.
  lengths = tf.reshape(joined.row_lengths(), [count, -1])
  values = tf.split(joined.values, tf.reduce_sum(lengths, axis=1), num=count)
  splits = tf.unstack(tf.pad(tf.cumsum(lengths, axis=1), [[0, 0], [1, 0]]))
  return [
    tf.RaggedTensor.from_row_splits(part, part_splits, validate=False)
    for part, part_splits in zip(values, splits)
  ]


def _name(separator: str) -> str:
  """Returns how to call a character in a message that TensorFlow prints, which escapes quotes."""
  return {"\t": "tabs", ",": "commas", ";": "semicolons"}.get(separator, f"`{separator}`")


def _read_header(paths: list[str], separator: str, quotes: bool) -> tuple[list[str], list[str]]:
  """Returns the fields that the first lines name, and these lines.

  Raises:
    ValueError: a file is empty, names a field twice, or other fields than the first one.
  """
  import csv as csv_module

  fields: list[str] | None = None
  lines = []
  for path in paths:
    line = _header_of(path)
    lines.append(line)
    (cut,) = csv_module.reader(
      [line],
      delimiter=separator,
      quoting=csv_module.QUOTE_MINIMAL if quotes else csv_module.QUOTE_NONE,
    )
    found = [field.strip() for field in cut]
    if len(set(found)) != len(found):
      raise ValueError(f"{path} names a field twice: {found}")
    if fields is not None and found != fields:
      raise ValueError(f"{path} has the fields {found}, but {paths[0]} has {fields}")
    fields = found
  assert fields is not None
  return fields, lines


def _first_line_of(file: tf.io.gfile.GFile) -> bytes:
  """Returns the first line with its carriage returns, which TensorFlow's `readline` leaves out."""
  content = b""
  while b"\n" not in content:
    part = file.read(_HEADER_BYTES)
    if not part:
      break
    content += part
  return content.partition(b"\n")[0]


def _header_of(path: str) -> str:
  import gzip
  import zlib

  if tf.io.gfile.isdir(path):
    raise ValueError(f"{path} is a folder, want files: {os.path.join(path, '*.csv')!r}")
  with tf.io.gfile.GFile(path, "rb") as file:
    try:
      first = gzip.open(file).readline() if re.fullmatch(_GZIP, path) else _first_line_of(file)
      line = first.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
      raise ValueError(f"{path}:1: the header is not UTF-8 text: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
      raise tf.errors.DataLossError(
        None, None, f"{path}:1: torn or corrupt gzip data: {error}"
      ) from error
  if "\r" in line:
    raise ValueError(
      f"{path}:1: a carriage return is inside of the header: lines must end in a line feed, with a "
      "carriage return before it or none"
    )
  if not line:
    raise ValueError(f"{path} has no header: its first line is empty")
  return line
