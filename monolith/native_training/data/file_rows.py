"""Lines and TFRecords of files, as datasets that end only where the file does.

TensorFlow's own readers take the end of a torn gzip or zlib file for the end of the data, and their
errors do not name the file.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training.runtime.ops import gen_monolith_ops

_DEFAULT_BUFFER_SIZE = 256 * 1024


class FileRowsDataset(dataset_ops.DatasetSource):
  """The rows of one file.

  Args:
    file_name: a name or a string scalar, on any file system TensorFlow knows.
    row_format: `"lines"` without their ends, or `"tfrecord"` for the payloads of TFRecords.
    compression_type: `""`, `"GZIP"` or `"ZLIB"`, also as a string scalar.
    skip_rows: rows at the beginning to leave out.
    block_rows: 0 for elements of one row, otherwise vectors of this many; the last may be shorter.
    buffer_size: bytes to read ahead.

  Raises:
    NotFoundError: when read, there is no such file.
    DataLossError: when read, the file is torn or corrupt; it names the file and the row. All rows
      before that one come first.
  """

  def __init__(
    self,
    file_name: str | tf.Tensor,
    row_format: str,
    compression_type: str | tf.Tensor = "",
    *,
    skip_rows: int = 0,
    block_rows: int = 0,
    buffer_size: int | tf.Tensor | None = None,
  ):
    self._element_spec = tf.TensorSpec([None] if block_rows else [], tf.string)
    variant = gen_monolith_ops.file_rows_dataset(
      file_name=file_name,
      compression_type=compression_type,
      skip_rows=skip_rows,
      buffer_size=_DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size,
      format=row_format,
      block_rows=block_rows,
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> tf.TensorSpec:
    return self._element_spec


def tfrecord_dataset(
  file_names: Any,
  compression_type: str | tf.Tensor | None = None,
  buffer_size: int | tf.Tensor | None = None,
  num_parallel_reads: int | None = None,
) -> tf.data.Dataset:
  """Reads the records of TFRecord files, as `tf.data.TFRecordDataset` does.

  Args:
    file_names: one name, several, or a dataset of them.
    compression_type: `""` or None, `"GZIP"` or `"ZLIB"`.
    buffer_size: bytes to read ahead in each file.
    num_parallel_reads: files that are read at once, one record of each in turn; by default they are
      read one after another.

  Returns:
    Elements are string scalars.

  Raises:
    DataLossError: when read, a file is torn or corrupt.
  """
  kind = "" if compression_type is None else compression_type

  def read(file_name: tf.Tensor) -> tf.data.Dataset:
    return FileRowsDataset(file_name, "tfrecord", kind, buffer_size=buffer_size)

  if isinstance(file_names, (tf.data.Dataset, tf.compat.v1.data.Dataset)):
    names = file_names
  else:
    tensor = tf.convert_to_tensor(file_names, tf.string)
    if tensor.shape.rank == 0 and num_parallel_reads is None:
      return read(tensor)
    names = tf.data.Dataset.from_tensor_slices(tf.reshape(tensor, [-1]))
  if num_parallel_reads is None:
    return names.flat_map(read)
  return names.interleave(
    read, cycle_length=num_parallel_reads, block_length=1, num_parallel_calls=num_parallel_reads
  )
