"""Samples from Parquet files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from idl.matrix.proto import line_id_pb2
from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints
from monolith.native_training.data.pb_types import PbType, element_type, record_output_type
from monolith.native_training.runtime.ops import gen_monolith_ops

_LABEL = "__LABEL__"
_RESERVED = re.compile(r"__(\w+?)__", re.ASCII)
_TYPES = ("int", "fid_v1", "fid_v2", "float", "bytes", "string")


class ParquetDataset(dataset_ops.DatasetSource):
  """The rows of a Parquet file.

  Columns hold integers, floats or byte arrays, or lists of them. A column becomes the feature of
  its name, with id 10000 + its position in `select_columns`; `__LABEL__` becomes the label,
  `instance_weight` the weight, and another `__XXX__` field `xxx` of LineId.

  The file is read by `libmonolith_parquet.so` beside the op library, in the process that iterates:
  that may be a worker of a tf.data service.

  Args:
    file_name: a name or a string scalar, on any file system TensorFlow knows.
    output_pb_type: EXAMPLEBATCH for elements of `batch_size` rows, PLAINTEXT for the same as
      serialized ExampleBatches, EXAMPLE or INSTANCE for elements of one row.
    select_columns: names of columns.
    select_columns_type: what each becomes: `int`, `fid_v1`, `fid_v2`, `float`, or for byte arrays
      `bytes`.
    batch_size: rows of an ExampleBatch; of other types, rows that are read at once.
    drop_remainder: leave out a last ExampleBatch of fewer rows.
    **kwargs: `disable_iterator_save_restore` (default True): in graph mode, do not checkpoint where
      reading stands. Keywords of other sources are ignored.

  Raises:
    ValueError: an argument is not one of the above.
    FailedPreconditionError: when read, the library or its pyarrow, the extra `parquet`, is not
      installed.
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
    if not isinstance(output_pb_type, PbType):
      raise ValueError(f"output_pb_type is {output_pb_type!r}, want a PbType")
    if batch_size < 1:
      raise ValueError(f"batch_size is {batch_size}, want at least 1")
    _check_columns(list(select_columns), list(select_columns_type))
    self.output_pb_type = output_pb_type
    record_output_type(output_pb_type)
    if kwargs.get("disable_iterator_save_restore", True) and isinstance(file_name, str):
      leave_out_of_checkpoints()
    out_type = element_type(output_pb_type)
    self._element_spec = tf.TensorSpec([], out_type)
    variant = gen_monolith_ops.parquet_dataset(
      file_name=file_name,
      output_pb_type=output_pb_type.to_name(),
      batch_size=batch_size,
      select_columns=list(select_columns),
      select_columns_type=list(select_columns_type),
      drop_remainder=drop_remainder,
      out_type=out_type,
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> tf.TypeSpec:
    return self._element_spec


def _check_columns(names: Sequence[str], types: Sequence[str]) -> None:
  """Checks the columns to read, before the graph runs.

  Raises:
    ValueError: the lists do not fit, a name comes twice or is no field, or a type is unknown.
  """
  if not names:
    raise ValueError("select_columns is empty, want the names of columns")
  if len(names) != len(types):
    raise ValueError(
      f"select_columns has {len(names)} names, select_columns_type has {len(types)} types"
    )
  for position, (name, type_name) in enumerate(zip(names, types)):
    if type_name not in _TYPES:
      raise ValueError(
        f"select_columns_type[{position}] is {type_name!r}, want one of {', '.join(_TYPES)}"
      )
    if name in names[:position]:
      raise ValueError(f"select_columns has {name!r} twice")
    reserved = _RESERVED.fullmatch(name)
    if reserved and name != _LABEL:
      field = line_id_pb2.LineId.DESCRIPTOR.fields_by_name.get(reserved[1].lower())
      if field is None or field.message_type is not None:
        raise ValueError(
          f"select_columns[{position}] is {name!r}, but LineId has no value "
          f"{reserved[1].lower()!r}"
        )
