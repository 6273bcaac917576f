"""Kafka messages as tensors, and the samples in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training.data import kafka_settings, pb_types
from monolith.native_training.runtime.ops import gen_monolith_ops


class KafkaMessages(NamedTuple):
  """A batch of messages: `message` and `key` are string [k], `continue_fetch` an int64 scalar."""

  message: tf.Tensor
  key: tf.Tensor
  continue_fetch: tf.Tensor


class KafkaSamples(NamedTuple):
  """The samples of a batch of messages: `message` is [n], `continue_fetch` an int64 scalar."""

  message: tf.Tensor
  continue_fetch: tf.Tensor


@dataclasses.dataclass(frozen=True)
class MessageFormat:
  """Says what is in a message: a sequence of framed records, or one record without header."""

  input_pb_type: pb_types.PbType
  output_pb_type: pb_types.PbType
  feature_pruning_type: int = pb_types.FeaturePruningType.PRUNING_RAW_FEATURE
  filter_empty: bool = False
  has_header: bool = True
  has_sort_id: bool = False
  lagrangex_header: bool = False
  kafka_dump_prefix: bool = False
  kafka_dump: bool = False
  chnids: Sequence[int] = ()
  datasources: Sequence[str] = ()
  default_datasource: str = ""

  def __post_init__(self) -> None:
    types = pb_types.PbType
    if self.output_pb_type in (self.input_pb_type, types.PLAINTEXT):
      return
    if self.input_pb_type == types.PLAINTEXT or self.output_pb_type == types.EXAMPLEBATCH:
      raise ValueError(
        f"{self.input_pb_type.to_name()} cannot become {self.output_pb_type.to_name()}"
      )

  @property
  def element_type(self) -> tf.DType:
    return pb_types.element_type(self.output_pb_type)

  def decode(self, message: tf.Tensor, origin: tf.Tensor) -> tf.Tensor:
    """Returns the samples of messages, in a vector; `origin` says where each comes from."""
    return gen_monolith_ops.monolith_decode_messages(
      message, origin, out_type=self.element_type, **self.attributes()
    )

  def attributes(self) -> dict[str, Any]:
    """Returns the attributes of an op that decodes such messages."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    fields["input_pb_type"] = self.input_pb_type.to_name()
    fields["output_pb_type"] = self.output_pb_type.to_name()
    return fields


def kafka_resource_init(
  topics: Any,
  metadata: Any,
  input_pb_type: str = "",
  output_pb_type: str = "",
  has_sort_id: bool = False,
  lagrangex_header: bool = False,
  kafka_dump_prefix: bool = False,
  kafka_dump: bool = False,
  container: str = "",
  shared_name: str = "",
) -> tf.Tensor:
  """Makes a consumer of topics; it connects when first read.

  Args:
    topics: names of topics.
    metadata: `key=value` settings of the consumer, `group.id` and `bootstrap.servers` among them;
      `conf.topic.<k>` is the setting `<k>` of every topic, `batch.num.messages` how many messages
      are read at once.
    input_pb_type: what records are, by default the flag `data_type` or `instance`.
    output_pb_type: what samples are, by default `instance` for Instances, else `example`.
    has_sort_id: whether the header of a record has a sort id.
    lagrangex_header: whether it has a Lagrangex header.
    kafka_dump_prefix: whether it has the prefix of a dump.
    kafka_dump: whether it has the header of a dump.
    container: part of the consumer's name.
    shared_name: resources of the same name share the consumer.

  Returns:
    A handle. The consumer leaves its group when the handle is given up, or in graph mode when
    the session is closed.

  Raises:
    ValueError: topics or metadata are empty or malformed.
  """
  input_type, output_type = pb_types.default_pb_types(
    pb_types.parse_pb_type(input_pb_type) if input_pb_type else None,
    pb_types.parse_pb_type(output_pb_type) if output_pb_type else None,
  )
  MessageFormat(input_type, output_type)  # checks that one can become the other
  if not tf.is_tensor(topics):
    topics = kafka_settings.split_list(topics)
    if not topics:
      raise ValueError("topics is empty, want at least one topic")
  if not tf.is_tensor(metadata):
    metadata = kafka_settings.check_metadata(kafka_settings.split_list(metadata))
  return gen_monolith_ops.kafka_group_readable_init(
    topics=topics,
    metadata=metadata,
    input_pb_type=input_type.to_name(),
    output_pb_type=output_type.to_name(),
    has_sort_id=has_sort_id,
    lagrangex_header=lagrangex_header,
    kafka_dump_prefix=kafka_dump_prefix,
    kafka_dump=kafka_dump,
    anonymous=tf.executing_eagerly() and not shared_name,
    container=container,
    shared_name=shared_name,
  )


def kafka_read_next(
  input: tf.Tensor, index: Any, message_poll_timeout: Any, stream_timeout: Any
) -> KafkaMessages:
  """Reads messages as they are.

  Args:
    input: what `kafka_resource_init` returned.
    index: the number of the read; makes reads differ, and has no other use.
    message_poll_timeout: milliseconds to wait for a message; the fetch ends when none came.
    stream_timeout: `continue_fetch` is 0 once no message came for this many milliseconds, in one
      fetch or several; at least `message_poll_timeout`; -1: it is always 1.
  """
  numbers = _int64(index, message_poll_timeout, stream_timeout)
  return KafkaMessages(*gen_monolith_ops.kafka_group_readable_next(input, *numbers))


def kafka_read_next_v2(
  input: tf.Tensor, index: Any, message_poll_timeout: Any, stream_timeout: Any
) -> KafkaSamples:
  """Reads samples in the form that `kafka_resource_init` was told; arguments as `kafka_read_next`.

  Raises:
    InvalidArgumentError: when run, samples of the resource are plaintext.
  """
  numbers = _int64(index, message_poll_timeout, stream_timeout)
  return KafkaSamples(*gen_monolith_ops.kafka_group_readable_next_v2(input, *numbers))


def _int64(*values: Any) -> list[tf.Tensor]:
  return [tf.cast(value, tf.int64) for value in values]
