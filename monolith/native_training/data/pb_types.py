"""Types of records and of elements, shared by every source of samples."""

from __future__ import annotations

import enum

import tensorflow as tf

from monolith.native_training.data.data_flags import get_flag

OUTPUT_PB_TYPE_GRAPH_KEY = "monolith_dataset_output_pb_type"


class PbType(enum.Enum):
  """The message type of a record or an element."""

  INSTANCE = 1
  EXAMPLEBATCH = 2
  EXAMPLE = 3
  PLAINTEXT = 4

  def to_name(self) -> str:
    return self.name.lower()


class FeaturePruningType:
  """Filters that a reader can apply."""

  AS_IS = 0
  PRUNING_FEATURE = 1
  PRUNING_RAW_FEATURE = 2


def parse_pb_type(name: str) -> PbType:
  """Returns the type with this name; `example_batch` and `examplebatch` are the same.

  Raises:
    ValueError: there is no such type.
  """
  try:
    return PbType[name.upper().replace("_", "")]
  except KeyError:
    known = ", ".join(pb_type.to_name() for pb_type in PbType)
    raise ValueError(f"the type of samples is {name!r}, want one of {known}") from None


def default_pb_types(
  input_pb_type: PbType | None, output_pb_type: PbType | None
) -> tuple[PbType, PbType]:
  """Replaces `None` by a default: the flag `data_type` or INSTANCE, and the output that fits it."""
  if input_pb_type is None:
    input_pb_type = parse_pb_type(get_flag("data_type") or "instance")
  if output_pb_type is None:
    output_pb_type = PbType.INSTANCE if input_pb_type == PbType.INSTANCE else PbType.EXAMPLE
  return input_pb_type, output_pb_type


def element_type(pb_type: PbType) -> tf.DType:
  """Returns the TensorFlow dtype of elements of this type."""
  return tf.string if pb_type == PbType.PLAINTEXT else tf.variant


def record_output_type(pb_type: PbType) -> None:
  """Records the type in the graph, for code that only sees the graph."""
  name = pb_type.to_name()
  if name not in tf.compat.v1.get_collection(OUTPUT_PB_TYPE_GRAPH_KEY):
    tf.compat.v1.add_to_collection(OUTPUT_PB_TYPE_GRAPH_KEY, name)
