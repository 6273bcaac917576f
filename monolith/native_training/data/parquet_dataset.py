"""Samples from Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training.data import feature_utils, parquet_batches
from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints
from monolith.native_training.data.pb_types import PbType, record_output_type


class ParquetDataset(dataset_ops.UnaryUnchangedStructureDataset):
  """The rows of a Parquet file, read in this process with pyarrow.

  Columns hold integers, floats or byte arrays, or lists of them. A column becomes the feature of
  its name, with id 10000 + its position in `select_columns`; `__LABEL__` becomes the label,
  `instance_weight` the weight, and another `__XXX__` field `xxx` of LineId. Positions are not
  saved in checkpoints.

  Args:
    file_name: a name or a string scalar.
    output_pb_type: EXAMPLEBATCH for elements of `batch_size` rows, EXAMPLE or INSTANCE for
      elements of one row.
    select_columns: names of columns.
    select_columns_type: what each becomes: `int`, `fid_v1`, `fid_v2`, `float`, or for byte arrays
      `bytes`.
    batch_size: rows of an ExampleBatch; of other types, rows that are read at once.
    drop_remainder: leave out a last ExampleBatch of fewer rows.
    **kwargs: keywords of other sources, ignored.

  Raises:
    ValueError: an argument is not one of the above.
    ImportError: pyarrow, the extra `parquet`, is not installed.
    NotFoundError: when read, there is no such file.
    InvalidArgumentError: when read, it is no Parquet file, lacks a column, or a column has another
      type or a null.
  """

  def __init__(
    self,
    file_name: str | tf.Tensor,
    output_pb_type: PbType,
    select_columns: Sequence[str],
    select_columns_type: Sequence[str],
    batch_size: int = 512,
    drop_remainder: bool = True,
    **kwargs: Any,
  ):
    if output_pb_type not in (PbType.EXAMPLEBATCH, PbType.EXAMPLE, PbType.INSTANCE):
      raise ValueError(
        f"output_pb_type is {output_pb_type}, want EXAMPLEBATCH, EXAMPLE or INSTANCE"
      )
    if batch_size < 1:
      raise ValueError(f"batch_size is {batch_size}, want at least 1")
    columns = parquet_batches.make_columns(list(select_columns), list(select_columns_type))
    parquet_batches.import_pyarrow()
    is_batch = output_pb_type == PbType.EXAMPLEBATCH

    def generate(name: bytes) -> Iterator[bytes]:
      batches = parquet_batches.read_batches(
        name.decode(), columns, batch_size, drop_remainder and is_batch
      )
      for batch in batches:
        yield batch.SerializeToString()

    # A generator cannot say NotFound or PermissionDenied, opening the file in TensorFlow does.
    opened = tf.data.FixedLengthRecordDataset(file_name, record_bytes=1).take(1)
    opened = opened.concatenate(tf.data.Dataset.from_tensors(b"")).take(1)
    strings = opened.flat_map(
      lambda _: tf.data.Dataset.from_generator(
        generate, output_signature=tf.TensorSpec([], tf.string), args=(file_name,)
      )
    )
    if is_batch:
      samples = strings.map(
        lambda batch: feature_utils.string_to_variant(batch, variant_type="example_batch")
      )
    else:
      samples = strings.map(
        lambda batch: feature_utils.string_to_variant_with_transform(
          batch, input_type="example_batch", output_type=output_pb_type.to_name()
        )
      ).unbatch()
    self.output_pb_type = output_pb_type
    record_output_type(output_pb_type)
    leave_out_of_checkpoints()
    super().__init__(samples, samples._variant_tensor)
