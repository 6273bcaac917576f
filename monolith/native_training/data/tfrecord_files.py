"""TFRecord files of `tf.train.Example` as datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.native_training.data import bad_rows as bad_rows_lib
from monolith.native_training.data import text_files
from monolith.native_training.data.bad_rows import BadRows
from monolith.native_training.data.columns import Column, Ids, check_columns

_LISTS = {tf.string: "bytes_list", tf.int64: "int64_list", tf.float32: "float_list"}
_NO_EXAMPLE = "is no serialized tf.train.Example"


def tfrecord(
  files: str | Sequence[str],
  columns: Mapping[str, Column],
  batch_size: int,
  *,
  label: str | None = None,
  shuffle: int = 0,
  seed: int | None = None,
  epochs: int | None = 1,
  shard: tuple[int, int] | None = None,
  on_bad_row: str = "error",
  bad_rows: BadRows | None = None,
) -> tf.data.Dataset:
  """Reads TFRecord files whose records are serialized `tf.train.Example`.

  Args:
    files: paths or patterns, read in the order of their names; `.gz` files are decompressed.
    columns: feature -> what it becomes. `Ids()` and `Text()` read lists of bytes,
      `Ids(hashed=False)` and `Number(dtype=tf.int64)` lists of int64, `Number()` and buckets lists
      of floats, of which NaN and infinity are in no bucket: such records are bad. An example
      without the feature has no ids, or the default number.
    batch_size: records per element. An element with skipped records is smaller, and may be empty.
    label: the column that becomes the second part of `(features, label)`; by default an element is
      one dict.
    shuffle: from how many records the next one is drawn; 0 keeps the order.
    seed: what the draws depend on.
    epochs: how often the files are read; `None` for again and again.
    shard: `(i, n)` reads every n-th record, beginning with record i.
    on_bad_row: what a record that is no such example does: `"error"` ends the reading with its file
      and number, `"skip"` leaves it out. A file that is torn is always an error: where its next
      record begins cannot be known.
    bad_rows: counts the records that are left out.

  Returns:
    Elements are dicts of features, as `columns` says.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an argument makes no sense.
    DataLossError: when read, a file is torn or corrupt; it names the file and the record's number.
      A cut between two records of a file that is not compressed cannot be told. A plain file of 0
      bytes has no records, a compressed one is torn.
  """
  check_columns(columns)
  counter = bad_rows_lib.check_arguments(on_bad_row, bad_rows)
  if label is not None and label not in columns:
    raise ValueError(f"label is {label!r}, want one of the columns {list(columns)}")
  for name, column in columns.items():
    if isinstance(column, Ids) and not column.hashed and column.separator is not None:
      raise ValueError(
        f"column {name!r} has the separator {column.separator!r}, want None: Ids(hashed=False) "
        "reads a list of int64, each of which is an id"
      )
  paths = text_files.find_files(files)
  spec = {name: column.proto_feature for name, column in columns.items()}

  @tf.autograph.experimental.do_not_convert
  def parse(places: tf.Tensor, records: tf.Tensor) -> Any:
    names = text_files.describe_places(places, paths)
    if counter is not None:
      problems = tf.numpy_function(_find_problems(spec), [records], tf.string, stateful=False)
      problems.set_shape(records.shape)
      is_bad = tf.not_equal(problems, "")
      tf.cond(
        tf.reduce_any(is_bad),
        lambda: _report(tf.strings.join([names, ": ", problems]), is_bad, counter),
        lambda: tf.constant(0),
      )
      records = tf.boolean_mask(records, tf.logical_not(is_bad))
      names = tf.boolean_mask(names, tf.logical_not(is_bad))
    else:
      is_torn = tf.logical_not(_is_framed(records))
      checked = tf.cond(
        tf.reduce_any(is_torn),
        lambda: _report(tf.strings.join([names, f": {_NO_EXAMPLE}"]), is_torn, None),
        lambda: tf.constant(0),
      )
      with tf.control_dependencies([checked]):
        records = tf.identity(records)
    parsed = tf.io.parse_example(records, spec, example_names=names)
    parsed = _leave_bad_out(parsed, names)
    features = {name: column.from_proto(parsed[name]) for name, column in columns.items()}
    return features if label is None else (features, features.pop(label))

  def _leave_bad_out(parsed: dict[str, Any], names: tf.Tensor) -> dict[str, Any]:
    """Returns the records of which each column can use what was read."""
    found = {name: column.find_bad_proto(parsed[name]) for name, column in columns.items()}
    found = {name: is_bad for name, is_bad in found.items() if is_bad is not None}
    if not found:
      return parsed
    is_bad = tf.reduce_any(tf.stack(list(found.values())), axis=0)
    first = tf.argmax(tf.cast(tf.stack(list(found.values())), tf.int32), axis=0)
    wants = [f": feature `{name}` has NaN or infinity, want numbers" for name in found]
    problems = tf.strings.join([names, tf.gather(wants, first)])

    def without_bad() -> dict[str, Any]:
      _report(problems, is_bad, counter)
      is_good = tf.logical_not(is_bad)
      return {
        name: tf.ragged.boolean_mask(value, is_good)
        if isinstance(value, tf.RaggedTensor)
        else tf.boolean_mask(value, is_good)
        for name, value in parsed.items()
      }

    return tf.cond(tf.reduce_any(is_bad), without_bad, lambda: parsed)

  dataset = text_files.read_batches(paths, "tfrecord", 1, batch_size, shuffle, seed, epochs, shard)
  dataset = dataset.map(parse, tf.data.AUTOTUNE)
  return bad_rows_lib.make_savable(dataset).prefetch(tf.data.AUTOTUNE)


def _report(problems: tf.Tensor, is_bad: tf.Tensor, counter: BadRows | None) -> tf.Tensor:
  bad_rows_lib.report(tf.boolean_mask(problems, is_bad), counter)
  return tf.constant(0)  # what both branches of a condition return


def _is_framed(records: tf.Tensor) -> tf.Tensor:
  """Returns whether each record is empty or one field `features` of the length that it says.

  TensorFlow's parser puts what it cannot parse into its message as it is, which Python then cannot
  read.
  """
  size = tf.cast(tf.strings.length(records), tf.int64)
  # The field's tag, then its length in groups of seven bits, the last without the eighth.
  head = tf.strings.substr(tf.strings.join([records, "\0" * 6]), 0, 6)
  head = tf.cast(tf.io.decode_raw(head, tf.uint8), tf.int64)
  length, header_bytes = tf.zeros_like(size), tf.ones_like(size)
  goes_on = tf.ones_like(size)
  for i in range(1, 6):
    length += goes_on * (head[:, i] % 128) * 128 ** (i - 1)
    header_bytes += goes_on
    goes_on *= head[:, i] // 128
  is_whole = tf.logical_and(tf.equal(head[:, 0], 0x0A), tf.equal(header_bytes + length, size))
  return tf.logical_or(tf.equal(size, 0), is_whole)


def _find_problems(spec: Mapping[str, Any]) -> Any:
  """Returns a function that says what is wrong with each record, and nothing for good ones.

  TensorFlow's parser stops at the first bad record of a batch and cannot go on without it.
  """

  def problem_of(record: bytes) -> str:
    try:
      features = tf.train.Example.FromString(record).features.feature
    except Exception:  # protobuf's implementations raise errors of different types
      return _NO_EXAMPLE
    for name, feature in spec.items():
      kind = features[name].WhichOneof("kind") if name in features else None
      is_scalar = isinstance(feature, tf.io.FixedLenFeature)
      if kind is None:
        if is_scalar and feature.default_value is None:
          return f"has no feature {name!r}"
        continue
      if kind != _LISTS[feature.dtype]:
        return f"feature {name!r} is a {kind}, want a {_LISTS[feature.dtype]}"
      size = len(getattr(features[name], kind).value)
      if is_scalar and size != 1:
        return f"feature {name!r} has {size} values, want one"
    return ""

  def find(records: np.ndarray) -> np.ndarray:
    return np.array([problem_of(record).encode() for record in records], dtype=object)

  return find
