"""Messages of Kafka as tensors, and the samples in them.

The client is a Python package, so the reader is a Python object and not a resource of the
TensorFlow runtime: what reads it runs in the process that made it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from monolith.native_training.data import kafka_reader, kafka_settings, pb_types
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
  """What is in a message: a sequence of framed records, or one record without header."""

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

  def __post_init__(self):
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
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    fields["input_pb_type"] = self.input_pb_type.to_name()
    fields["output_pb_type"] = self.output_pb_type.to_name()
    return gen_monolith_ops.monolith_decode_messages(
      message, origin, out_type=self.element_type, **fields
    )


class KafkaResource:
  """A reader and what its messages are; the reader is closed when nobody holds the resource."""

  def __init__(self, lease: kafka_reader.ReaderLease, message_format: MessageFormat):
    self.reader = lease.reader
    self.message_format = message_format
    weakref.finalize(self, lease.release)

  def read(
    self, index: Any, message_poll_timeout: Any, stream_timeout: Any
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns messages, keys and origins [k] of one fetch, and whether to go on."""

    def fetch(unused_index: int, poll_timeout: int, timeout: int) -> tuple:
      timeout = kafka_settings.check_timeouts(int(poll_timeout), int(timeout))
      result = self.reader.fetch(int(poll_timeout), timeout)
      if result is None:
        result = kafka_reader.Fetch([], [], [], False)
      elif not result.messages and not result.continue_fetch:
        self.reader.check(int(poll_timeout))
      columns = (result.messages, result.keys, [origin.encode() for origin in result.origins])
      return (
        *(np.array(column, dtype=object) for column in columns),
        np.int64(result.continue_fetch),
      )

    outputs = tf.numpy_function(
      fetch,
      [tf.cast(index, tf.int64), tf.cast(message_poll_timeout, tf.int64),
       tf.cast(stream_timeout, tf.int64)],
      [tf.string, tf.string, tf.string, tf.int64],
      name="kafka_read_next",
    )
    for output in outputs[:3]:
      output.set_shape([None])
    outputs[3].set_shape([])
    return tuple(outputs)


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
) -> KafkaResource:
  """Makes a reader of topics; it connects when first read.

  Args:
    topics: their names.
    metadata: `key=value` settings of the consumer, `group.id` and `bootstrap.servers` among them;
      `conf.topic.<k>` is the setting `<k>` of every topic, `batch.num.messages` how many messages
      are read at once.
    input_pb_type: what records are, by default the flag `data_type` or `instance`.
    output_pb_type: what samples are, by default `instance` for Instances, else `example`.
    has_sort_id: the headers of records, as those below.
    lagrangex_header: see `has_sort_id`.
    kafka_dump_prefix: see `has_sort_id`.
    kafka_dump: see `has_sort_id`.
    container: part of the name of the reader.
    shared_name: resources of the same name share the reader.

  Raises:
    ValueError: topics or metadata are unknown, empty or malformed.
  """
  input_type, output_type = pb_types.default_pb_types(
    pb_types.parse_pb_type(input_pb_type) if input_pb_type else None,
    pb_types.parse_pb_type(output_pb_type) if output_pb_type else None,
  )
  message_format = MessageFormat(
    input_type,
    output_type,
    has_sort_id=has_sort_id,
    lagrangex_header=lagrangex_header,
    kafka_dump_prefix=kafka_dump_prefix,
    kafka_dump=kafka_dump,
  )
  lease = kafka_reader.ReaderLease(
    _static_strings("topics", topics), _static_strings("metadata", metadata), container, shared_name
  )
  return KafkaResource(lease, message_format)


def kafka_read_next(
  input: KafkaResource, index: Any, message_poll_timeout: Any, stream_timeout: Any
) -> KafkaMessages:
  """Reads messages as they are.

  Args:
    input: what `kafka_resource_init` returned.
    index: the number of the read; makes reads differ, and has no other use.
    message_poll_timeout: milliseconds to wait for a message; the fetch ends when none came.
    stream_timeout: `continue_fetch` is 0 once no message came for so many milliseconds, in one
      fetch or several; at least `message_poll_timeout`; -1: it is always 1.
  """
  message, key, _, continue_fetch = input.read(index, message_poll_timeout, stream_timeout)
  return KafkaMessages(message, key, continue_fetch)


def kafka_read_next_v2(
  input: KafkaResource, index: Any, message_poll_timeout: Any, stream_timeout: Any
) -> KafkaSamples:
  """Reads samples, as `kafka_resource_init` says; for the arguments see `kafka_read_next`."""
  message, _, origin, continue_fetch = input.read(index, message_poll_timeout, stream_timeout)
  return KafkaSamples(input.message_format.decode(message, origin), continue_fetch)


def _static_strings(name: str, value: Any) -> list[str]:
  if tf.is_tensor(value):
    static = tf.get_static_value(value)
    if static is None:
      raise ValueError(f"{name} is known only when the graph runs, want strings")
    value = np.atleast_1d(static).tolist()
  elif isinstance(value, (str, bytes)):
    value = [value]
  return [tf.compat.as_str(item) for item in value]
