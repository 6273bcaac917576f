"""Turns the fields of a row into ids, numbers, buckets or text.

A column turns the texts of a batch into a feature, and says which texts it cannot read:

  Ids()                 "alice"     -> one id, the hash of the text
  Ids(separator="|")    "Drama|War" -> two ids
  Ids(hashed=False)     "42"        -> the id 42
  Number()              "3.5"       -> 3.5
  Number(dtype="int64") "16777217"  -> 16777217
  Buckets([0, 10])      "3.5"       -> the id 1: one boundary is not above it
  LogBuckets()          "1000"      -> the id 47, from the squared logarithm
  Text()                "alice"     -> "alice"

Ids and buckets are ragged `[batch, None]`, one row per example, as tables want them; an empty field
has none.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from monolith.native_training.data import string_hash

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def _int64_pattern() -> str:
  """Returns a pattern of the decimal numbers that fit into an int64."""
  largest = str(2**63 - 1)
  choices = [r"\d{1,18}", largest]
  for i, digit in enumerate(largest):
    # The same digits so far, then a smaller one.
    if digit != "0":
      choices.append(rf"{largest[:i]}[0-{int(digit) - 1}]\d{{{len(largest) - i - 1}}}")
  return rf"-?0*(?:{'|'.join(choices)})|-{2**63}"


_INT64 = _int64_pattern()


class Column(abc.ABC):
  """One field of a row."""

  @property
  def rounds(self) -> bool:
    """Whether whole numbers that a float32 would round are bad."""
    return False

  @property
  @abc.abstractmethod
  def want(self) -> str:
    """The kind of text that is wanted, in words for messages."""

  @abc.abstractmethod
  def find_bad(self, text: tf.Tensor) -> tf.Tensor:
    """Returns bool `[batch]`: the texts `[batch]` that this column cannot read."""

  @abc.abstractmethod
  def read(self, text: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    """Returns the feature of texts `[batch]`, none of which is bad."""

  @property
  @abc.abstractmethod
  def proto_feature(self) -> tf.io.RaggedFeature | tf.io.FixedLenFeature:
    """The way in which `tf.io.parse_example` reads the feature of a `tf.train.Example`."""

  @abc.abstractmethod
  def from_proto(self, value: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
    """Returns the feature of what `proto_feature` has read."""

  def find_bad_proto(self, value: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | None:
    """Returns bool `[batch]`: where no feature can be made; `None` if that cannot happen."""
    return None


@dataclasses.dataclass(frozen=True)
class Ids(Column):
  """Ids of an embedding table, int64 `[batch, None]`.

  Attributes:
    separator: between the ids of one field, or of one value in a TFRecord's list of bytes; without
      it a field, or value, is one id.
    hashed: whether the field is any text, whose hash is the id, or else the id itself in decimal
      digits. In a TFRecord, a list of bytes or a list of int64.
  """

  separator: str | None = None
  hashed: bool = True

  def __post_init__(self) -> None:
    if self.separator == "":
      raise ValueError("separator is empty, want a character, or None for one id per field")

  @property
  def want(self) -> str:
    return "text" if self.hashed else "an id of 64 bits in decimal digits"

  def find_bad(self, text: tf.Tensor) -> tf.Tensor:
    if self.hashed:
      return tf.zeros_like(text, tf.bool)
    return tf.reduce_any(
      tf.logical_not(_ragged_match(self._split(text), _INT64)), axis=1, keepdims=False
    )

  def read(self, text: tf.Tensor) -> tf.RaggedTensor:
    pieces = self._split(text)
    return (
      string_hash.hash_strings(pieces) if self.hashed else _map_flat(tf.strings.to_number, pieces)
    )

  @property
  def proto_feature(self) -> tf.io.RaggedFeature:
    dtype = tf.string if self.hashed else tf.int64
    return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)

  def from_proto(self, value: tf.RaggedTensor) -> tf.RaggedTensor:
    if self.separator is not None:
      pieces = self._split(value.values)
      splits = tf.gather(pieces.row_splits, value.row_splits)
      value = tf.RaggedTensor.from_row_splits(pieces.values, splits, validate=False)
    return string_hash.hash_strings(value) if self.hashed else value

  def _split(self, text: tf.Tensor) -> tf.RaggedTensor:
    """Returns the pieces of each text that are not empty."""
    pieces = text if self.separator is None else tf.strings.split(text, self.separator)
    values = tf.strings.strip(text if self.separator is None else pieces.values)
    is_piece = tf.not_equal(values, "")
    # As `tf.ragged.boolean_mask` does it with five times as many ops, which a small batch feels.
    splits = tf.pad(tf.cumsum(tf.cast(is_piece, tf.int64)), [[1, 0]])
    if self.separator is not None:
      splits = tf.gather(splits, pieces.row_splits)
    return tf.RaggedTensor.from_row_splits(
      tf.gather_nd(values, tf.where(is_piece)), splits, validate=False
    )


@dataclasses.dataclass(frozen=True)
class Number(Column):
  """Numbers `[batch]`, float32 or int64.

  Attributes:
    default: the number of an empty field; without it an empty field is bad.
    dtype: `tf.float32`; or `tf.int64`, which keeps every digit of a timestamp or a count. A whole
      number above 2^24 that a float32 would round is bad. In a TFRecord, a list of floats, as they
      are, or a list of int64.

  Raises:
    ValueError: `dtype` is another one, or `default` is none of its numbers.
  """

  default: float | None = None
  dtype: tf.DType = tf.float32

  def __post_init__(self) -> None:
    dtype = tf.as_dtype(self.dtype)
    if dtype not in (tf.float32, tf.int64):
      raise ValueError(f"dtype is {dtype.name}, want float32 or int64")
    object.__setattr__(self, "dtype", dtype)
    if dtype == tf.int64 and self.default is not None:
      whole = math.isfinite(self.default) and self.default == int(self.default)
      if not whole or not tf.int64.min <= self.default <= tf.int64.max:
        raise ValueError(f"default is {self.default}, want a whole number of 64 bits")
      object.__setattr__(self, "default", int(self.default))

  @property
  def rounds(self) -> bool:
    return self.dtype == tf.float32

  @property
  def want(self) -> str:
    want = "a number" if self.dtype == tf.float32 else "a whole number of 64 bits"
    return want if self.default is None else f"{want} or nothing"

  def find_bad(self, text: tf.Tensor) -> tf.Tensor:
    text = tf.strings.strip(text)
    if not self.rounds:
      bad = tf.logical_not(tf.strings.regex_full_match(text, _INT64))
    else:
      bad = tf.logical_or(_find_bad_numbers(text), find_rounded(text))
    return bad if self.default is None else tf.logical_and(tf.not_equal(text, ""), bad)

  def read(self, text: tf.Tensor) -> tf.Tensor:
    text = tf.strings.strip(text)
    if self.default is not None:
      default = self.default if self.dtype == tf.int64 else float(self.default)
      text = tf.where(tf.equal(text, ""), repr(default), text)
    return tf.strings.to_number(text, self.dtype)

  @property
  def proto_feature(self) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature([], self.dtype, self.default)

  def from_proto(self, value: tf.Tensor) -> tf.Tensor:
    return value


class _BucketColumn(Column):
  """A number that becomes the id of its bucket; no number, no id."""

  want = "a number or nothing"

  @abc.abstractmethod
  def ids_of(self, values: tf.Tensor) -> tf.Tensor:
    """Returns int64 ids of numbers of the same shape."""

  def find_bad(self, text: tf.Tensor) -> tf.Tensor:
    text = tf.strings.strip(text)
    return tf.logical_and(tf.not_equal(text, ""), _find_bad_numbers(text))

  def read(self, text: tf.Tensor) -> tf.RaggedTensor:
    text = Ids()._split(text)
    return self.from_proto(_map_flat(tf.strings.to_number, text, tf.float32))

  @property
  def proto_feature(self) -> tf.io.RaggedFeature:
    return tf.io.RaggedFeature(tf.float32, row_splits_dtype=tf.int64)

  def from_proto(self, value: tf.RaggedTensor) -> tf.RaggedTensor:
    return value.with_flat_values(self.ids_of(value.flat_values))

  def find_bad_proto(self, value: tf.RaggedTensor) -> tf.Tensor:
    # As in text, where neither is a number.
    is_bad = tf.logical_not(tf.math.is_finite(value.flat_values))
    return tf.reduce_any(value.with_flat_values(is_bad), axis=1)


@dataclasses.dataclass(frozen=True)
class Buckets(_BucketColumn):
  """A number as the id of its bucket, int64 `[batch, None]`.

  Attributes:
    boundaries: ascending; n of them make n + 1 buckets, and a number that equals a boundary is in
      the bucket above it.

  Raises:
    ValueError: there are no boundaries, or they do not ascend.
  """

  boundaries: Sequence[float]

  def __post_init__(self) -> None:
    _check_boundaries(self.boundaries)
    # Hashable, whatever it was.
    object.__setattr__(self, "boundaries", tuple(float(b) for b in self.boundaries))

  def ids_of(self, values: tf.Tensor) -> tf.Tensor:
    return bucketize(values, self.boundaries)


@dataclasses.dataclass(frozen=True)
class LogBuckets(_BucketColumn):
  """A count as the id of its bucket: buckets grow with the count, so that few ids cover all.

  The id is `floor(ln(x)^2)` for x above 2, and `floor(x)` below: 1 -> 1, 100 -> 21, 10,000 -> 84.
  """

  def ids_of(self, values: tf.Tensor) -> tf.Tensor:
    large = tf.floor(tf.math.square(tf.math.log(tf.maximum(values, 2.0))))
    return tf.cast(tf.where(values > 2, large, tf.floor(values)), tf.int64)


@dataclasses.dataclass(frozen=True)
class Text(Column):
  """The text of a field as it is, string `[batch]`."""

  want = "text"

  def find_bad(self, text: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(text, tf.bool)

  def read(self, text: tf.Tensor) -> tf.Tensor:
    return text

  @property
  def proto_feature(self) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature([], tf.string, "")

  def from_proto(self, value: tf.Tensor) -> tf.Tensor:
    return value


def bucketize(values: tf.Tensor, boundaries: Sequence[float]) -> tf.Tensor:
  """Returns the number of boundaries that are not above each value: its bucket.

  Args:
    values: numbers of any shape.
    boundaries: ascending.

  Returns:
    int64 of the same shape.

  Raises:
    ValueError: there are no boundaries, or they do not ascend.
  """
  _check_boundaries(boundaries)
  values = tf.cast(values, tf.float32)
  flat = tf.searchsorted(
    tf.constant(boundaries, tf.float32), tf.reshape(values, [-1]), "right", tf.int64
  )
  return tf.reshape(flat, tf.shape(values))


def check_columns(columns: Mapping[str, Column]) -> None:
  """Checks that columns are columns.

  Raises:
    ValueError: there are none.
    TypeError: one is none, or they have no names.
  """
  if not isinstance(columns, Mapping):
    raise TypeError(f"columns is a {type(columns).__name__}, want a mapping of fields to columns")
  if not columns:
    raise ValueError("columns is empty, want a column for each field to read")
  for name, column in columns.items():
    if not isinstance(column, Column):
      raise TypeError(f"column {name!r} is {column!r}, want Ids(), Number(), Buckets() or Text()")


def _check_boundaries(boundaries: Sequence[float]) -> None:
  ascend = all(a < b for a, b in zip(boundaries, boundaries[1:]))
  # NaN alone is in no comparison.
  if len(boundaries) == 0 or not ascend or boundaries[0] != boundaries[0]:
    raise ValueError(f"boundaries are {list(boundaries)}, want numbers that ascend")


def _find_bad_numbers(text: tf.Tensor) -> tf.Tensor:
  is_number = tf.strings.regex_full_match(text, _NUMBER)
  # A number that float32 cannot hold would become infinite.
  is_finite = tf.math.is_finite(tf.strings.to_number(tf.where(is_number, text, "0")))
  return tf.logical_not(tf.logical_and(is_number, is_finite))


def find_rounded(text: tf.Tensor) -> tf.Tensor:
  """Returns which texts are whole numbers of which a float32 would lose digits."""
  text = tf.strings.strip(text)
  is_long = tf.strings.regex_full_match(text, r"-?\d{8,}")
  digits = tf.strings.regex_replace(tf.where(is_long, text, "0"), r"^(-?)0+(\d)", r"\1\2")
  kept = tf.cast(tf.strings.to_number(digits, tf.float32), tf.float64)
  return tf.not_equal(tf.strings.as_string(kept, precision=0), digits)


def _ragged_match(text: tf.RaggedTensor, pattern: str) -> tf.RaggedTensor:
  return text.with_flat_values(tf.strings.regex_full_match(text.flat_values, pattern))


def _map_flat(
  function: Callable[[tf.Tensor, tf.DType], tf.Tensor],
  text: tf.RaggedTensor,
  dtype: tf.DType = tf.int64,
) -> tf.RaggedTensor:
  return text.with_flat_values(function(text.flat_values, dtype))
