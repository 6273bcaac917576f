"""Datasets that read Kafka.

A consumer is made when an iterator is asked for its first element, in the process that iterates: in
a tf.data service that is a worker. It leaves its group when the iterator ends or is destroyed.
Consumers of one group share the partitions, which is how workers share a topic. The client commits
offsets by itself; an iterator that is restored from a checkpoint resumes at its own positions.
Saving one whose dataset reads ahead (`prefetch`, parallel maps) waits until a message comes.
With `offsets="checkpoint"` none of this holds: batches carry the positions after them, and a
training step saves them with what it has learnt (`stream_positions` says how).

Differences from ByteDance's Monolith: a stream timeout of -1 never ends, the time to join the
consumer group does not count as silence, and a stream that falls silent because no broker can be
reached fails instead of ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training import native_task_context
from monolith.native_training.data import kafka_settings, stream_positions
from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints
from monolith.native_training.data.kafka_resource import KafkaMessages, MessageFormat
from monolith.native_training.data.pb_types import (
  FeaturePruningType,
  PbType,
  default_pb_types,
  parse_pb_type,
  record_output_type,
)
from monolith.native_training.runtime.ops import gen_monolith_ops

_OFFSETS = ("group", "checkpoint")
_SAMPLES = "samples"
# Hooks that save and stop are called this often while a stream is silent.
_IDLE_MILLIS = 1000


class KafkaDataset(dataset_ops.UnaryUnchangedStructureDataset):
  """The samples in the messages of topics: scalar variants, or strings for PLAINTEXT.

  Args:
    topics: names, in a list or comma-separated.
    group_id: the consumer group.
    servers: `host:port` of brokers, in a list or comma-separated.
    has_header: a message is a sequence of framed records; otherwise it is one serialized record.
    variant_type: what records are, by name: `instance`, `example`, `example_batch`, `plaintext`;
      the same as `input_pb_type`, which is one of `**kwargs`.
    output_pb_type: what elements are, by default INSTANCE for Instances, else EXAMPLE.
    stream_timeout: the dataset ends when no message came for this many milliseconds; at least
      `message_poll_timeout`; -1: never.
    message_poll_timeout: milliseconds to wait for a message before those that came are handed on.
    poll_batch_size: most messages to read at once, by default 16 for ExampleBatches, else 128.
    filter_empty: leave out samples that have no content.
    configuration: `key=value` settings of the consumer; `conf.topic.<k>` is the setting `<k>` of
      every topic.
    container: part of the consumer's name.
    shared_name: iterators with the same name share one consumer; their positions cannot be saved.
    kafka_other_metadata: more settings, comma-separated, that win over all others; by default the
      flag of that name.
    offsets: where positions are kept. `"group"`: by the consumer group, elements are samples.
      `"checkpoint"`: by the training run, in its checkpoints. Elements are then batches of at most
      `poll_batch_size` messages, to be parsed with `map_batches`; partition p of every topic is
      read by worker `p % num_workers`; messages that cannot be decoded are left out, counted and
      named in the log; when no message comes there is an empty batch every second, which the
      training loop leaves out. `container`, `shared_name`, `message_poll_timeout` and
      `disable_iterator_save_restore` have no meaning there and are refused.
    linger_millis: with `offsets="checkpoint"`, how long a batch may wait for more messages after
      its first.
    dedup_messages: with `offsets="checkpoint"`, a sample whose `LineId.req_id` is among those of
      this many messages before it in its partition is left out: producers without transactions
      repeat messages. The messages are read again at a start, so nothing has to be saved. 0: keep
      all.
    **kwargs: `input_pb_type` (default: the flag `data_type`, else INSTANCE);
      `feature_pruning_type`; the headers of records `has_sort_id` (default: the flag `sort_id`,
      else True), `kafka_dump`, `kafka_dump_prefix`, `lagrangex_header` (default: the flags, else
      False); `disable_iterator_save_restore` (default True): in graph mode, do not checkpoint where
      reading stands, since saving waits until a message comes; `chnids`, `datasources` and
      `default_datasource` (default: the flags), as in `feature_utils.string_to_variant`. Others
      are ignored.

  Raises:
    ValueError: an argument is empty, malformed or contradicts another.
  """

  def __init__(
    self,
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    *,
    has_header: bool = True,
    variant_type: str | None = None,
    output_pb_type: PbType | None = None,
    stream_timeout: int = -1,
    message_poll_timeout: int = 10000,
    poll_batch_size: int | None = None,
    filter_empty: bool = False,
    configuration: Sequence[str] | None = None,
    container: str = "",
    shared_name: str = "",
    kafka_other_metadata: str | Sequence[str] | None = None,
    offsets: str = "group",
    linger_millis: int = 20,
    dedup_messages: int = 131072,
    **kwargs: Any,
  ):
    if offsets not in _OFFSETS:
      raise ValueError(f"offsets is {offsets!r}, want one of {_OFFSETS}")
    self._is_stream = offsets == "checkpoint"
    input_pb_type = _input_pb_type(variant_type, kwargs.get("input_pb_type"))
    input_pb_type, output_pb_type = default_pb_types(input_pb_type, output_pb_type)
    message_format = MessageFormat(
      input_pb_type,
      output_pb_type,
      kwargs.get("feature_pruning_type", FeaturePruningType.PRUNING_RAW_FEATURE),
      filter_empty,
      has_header,
      **_header_options(kwargs),
    )
    if poll_batch_size is None:
      poll_batch_size = 16 if input_pb_type == PbType.EXAMPLEBATCH else 128
    self.output_pb_type = output_pb_type
    record_output_type(output_pb_type)
    if self._is_stream:
      for name, value, default in (
        ("container", container, ""),
        ("shared_name", shared_name, ""),
        ("message_poll_timeout", message_poll_timeout, 10000),
        ("disable_iterator_save_restore", kwargs.get("disable_iterator_save_restore", True), True),
      ):
        if value != default:
          raise ValueError(f'{name} is {value!r}, which has no meaning with offsets="checkpoint"')
      stream = _StreamDataset(
        topics,
        group_id,
        servers,
        stream_timeout,
        poll_batch_size,
        configuration,
        kafka_other_metadata,
        message_format,
        linger_millis,
        dedup_messages,
      )
      super().__init__(stream, stream._variant_tensor)
      return
    batches = _messages(
      topics,
      group_id,
      servers,
      stream_timeout,
      message_poll_timeout,
      poll_batch_size,
      configuration,
      container,
      shared_name,
      kafka_other_metadata,
      kwargs.get("disable_iterator_save_restore", True),
    )
    # One message after the other: a bad one spoils no other.
    messages = batches.map(lambda message, key, origin, _: (message, origin)).unbatch()
    samples = messages.map(message_format.decode).unbatch()
    super().__init__(samples, samples._variant_tensor)

  def map_batches(
    self, parse: Callable[[tf.Tensor], dict[str, Any]], num_parallel_calls: int | None = None
  ) -> tf.data.Dataset:
    """Parses the batches of a dataset with `offsets="checkpoint"`, and keeps their positions.

    Args:
      parse: takes the samples of a batch, a vector that may be empty, and returns features.
      num_parallel_calls: as in `tf.data.Dataset.map`; the order is kept.

    Returns:
      A dataset of features, with those of `stream_positions` among them, to be trained on.

    Raises:
      ValueError: the dataset has single samples.
    """
    if not self._is_stream:
      raise ValueError('map_batches is for offsets="checkpoint"; use batch and map')

    def keep_positions(batch: dict[str, tf.Tensor]) -> dict[str, Any]:
      features = dict(parse(batch[_SAMPLES]))
      features.update({key: value for key, value in batch.items() if key != _SAMPLES})
      return features

    if num_parallel_calls is None:
      return self.map(keep_positions)
    return self.map(keep_positions, num_parallel_calls=num_parallel_calls, deterministic=True)


class PyKafkaDataset(KafkaDataset):
  """A `KafkaDataset` that converts nothing: elements are what records are.

  Args:
    topics: names, in a list or comma-separated.
    group_id: the consumer group.
    servers: `host:port` of brokers, in a list or comma-separated.
    has_header: a message is a sequence of framed records; otherwise it is one serialized record.
    variant_type: what records are, by name.
    stream_timeout: the dataset ends when no message came for this many milliseconds; -1: never.
    message_poll_timeout: milliseconds to wait for a message before those that came are handed on.
    poll_batch_size: most messages to read at once.
    filter_empty: leave out samples that have no content.
    **kwargs: other arguments of `KafkaDataset`.
  """

  def __init__(
    self,
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    *,
    has_header: bool = True,
    variant_type: str | None = None,
    stream_timeout: int = -1,
    message_poll_timeout: int = 10000,
    poll_batch_size: int = kafka_settings.DEFAULT_POLL_BATCH_SIZE,
    filter_empty: bool = False,
    **kwargs: Any,
  ):
    if kwargs.get("output_pb_type") is None:
      given = _input_pb_type(variant_type, kwargs.get("input_pb_type"))
      kwargs["output_pb_type"] = default_pb_types(given, None)[0]
    super().__init__(
      topics,
      group_id,
      servers,
      has_header=has_header,
      variant_type=variant_type,
      stream_timeout=stream_timeout,
      message_poll_timeout=message_poll_timeout,
      poll_batch_size=poll_batch_size,
      filter_empty=filter_empty,
      **kwargs,
    )


class KafkaGen:
  """Batches of messages for Python: call or iterate it to get an iterator.

  Every iterator is a consumer of its own and yields lists of `bytes`, none of them empty. The
  arguments mean what they mean for `KafkaDataset`.
  """

  def __init__(
    self,
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    stream_timeout: int = -1,
    message_poll_timeout: int = 10000,
    poll_batch_size: int = kafka_settings.DEFAULT_POLL_BATCH_SIZE,
  ):
    self._graph = tf.Graph()  # works whether the program is eager or not
    with self._graph.as_default():
      dataset = create_plain_kafka_dataset(
        topics, group_id, servers, stream_timeout, message_poll_timeout, poll_batch_size
      )
      iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
      self._initializer = iterator.initializer
      self._messages = iterator.get_next().message

  def __call__(self) -> Iterator[list[bytes]]:
    with tf.compat.v1.Session(graph=self._graph) as session:
      session.run(self._initializer)
      while True:
        try:
          messages = session.run(self._messages).tolist()
        except tf.errors.OutOfRangeError:
          return
        yield messages

  def __iter__(self) -> Iterator[list[bytes]]:
    return self()


def create_plain_kafka_dataset(
  topics: str | Sequence[str],
  group_id: str,
  servers: str | Sequence[str],
  stream_timeout: int = -1,
  message_poll_timeout: int = 10000,
  poll_batch_size: int = kafka_settings.DEFAULT_POLL_BATCH_SIZE,
  configuration: Sequence[str] | None = None,
  container: str = "",
  shared_name: str = "",
  kafka_other_metadata: str | Sequence[str] | None = None,
) -> tf.data.Dataset:
  """Reads messages as they are, in batches as they come.

  The arguments mean what they mean for `KafkaDataset`.

  Returns:
    Elements are `KafkaMessages` of at least one message and at most `poll_batch_size`. A message or
    key that is null is empty.
  """
  batches = _messages(
    topics,
    group_id,
    servers,
    stream_timeout,
    message_poll_timeout,
    poll_batch_size,
    configuration,
    container,
    shared_name,
    kafka_other_metadata,
  )
  return batches.map(
    lambda message, key, _, continue_fetch: KafkaMessages(message, key, continue_fetch)
  )


def _messages(*args: Any) -> tf.data.Dataset:
  """Returns a `_MessageDataset` whose elements are read when they are asked for.

  TensorFlow makes plain maps parallel and puts a prefetch at the end, and those read ahead: saving
  an iterator would wait until the next message comes, which may be never.
  """
  options = tf.data.Options()
  options.experimental_optimization.map_parallelization = False
  options.experimental_optimization.inject_prefetch = False
  return _MessageDataset(*args).with_options(options)


class _MessageDataset(dataset_ops.DatasetSource):
  """Elements (messages, keys, origins: string [k], continue_fetch: int64) with k > 0."""

  def __init__(
    self,
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    stream_timeout: int,
    message_poll_timeout: int,
    poll_batch_size: int,
    configuration: Sequence[str] | None,
    container: str,
    shared_name: str,
    kafka_other_metadata: str | Sequence[str] | None,
    disable_iterator_save_restore: bool = True,
  ):
    if kafka_other_metadata is None:
      kafka_other_metadata = get_flag("kafka_other_metadata")
    metadata = kafka_settings.make_metadata(
      group_id, servers, poll_batch_size, configuration, kafka_other_metadata
    )
    topics = kafka_settings.split_list(topics)
    if not topics:
      raise ValueError("topics is empty, want at least one topic")
    if disable_iterator_save_restore or shared_name:
      leave_out_of_checkpoints()
    variant = gen_monolith_ops.monolith_kafka_dataset(
      topics=topics,
      metadata=metadata,
      message_poll_timeout=message_poll_timeout,
      stream_timeout=kafka_settings.check_timeouts(message_poll_timeout, stream_timeout),
      container=container,
      shared_name=shared_name,
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> Any:
    strings = tf.TensorSpec([None], tf.string)
    return strings, strings, strings, tf.TensorSpec([], tf.int64)


class _StreamDataset(dataset_ops.DatasetSource):
  """Elements: samples [k] with k >= 0, and the features that `stream_positions` takes."""

  def __init__(
    self,
    topics: str | Sequence[str],
    group_id: str,
    servers: str | Sequence[str],
    stream_timeout: int,
    batch_size: int,
    configuration: Sequence[str] | None,
    kafka_other_metadata: str | Sequence[str] | None,
    message_format: MessageFormat,
    linger_millis: int,
    dedup_messages: int,
  ):
    if kafka_other_metadata is None:
      kafka_other_metadata = get_flag("kafka_other_metadata")
    metadata = kafka_settings.make_metadata(
      group_id, servers, batch_size, configuration, kafka_other_metadata
    )
    topics = kafka_settings.split_list(topics)
    if not topics:
      raise ValueError("topics is empty, want at least one topic")
    if linger_millis < 0 or dedup_messages < 0:
      raise ValueError(
        f"linger_millis is {linger_millis} and dedup_messages {dedup_messages}, want at least 0"
      )
    leave_out_of_checkpoints()
    context = native_task_context.get()
    self._element_type = message_format.element_type
    variant = gen_monolith_ops.monolith_kafka_stream_dataset(
      topics=topics,
      metadata=metadata,
      positions=stream_positions.create(topics, metadata).start,
      batch_size=batch_size,
      linger_millis=linger_millis,
      idle_millis=_IDLE_MILLIS,
      stream_timeout=kafka_settings.check_timeouts(_IDLE_MILLIS, stream_timeout),
      num_workers=context.num_workers,
      worker_index=context.worker_index,
      history=dedup_messages,
      out_type=message_format.element_type,
      **message_format.attributes(),
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> Any:
    # In alphabetical order, in which tf.data flattens a dict.
    return {
      stream_positions.COUNTS_FEATURE: tf.TensorSpec([4], tf.int64),
      stream_positions.POSITIONS_FEATURE: tf.TensorSpec([None, 2], tf.int64),
      _SAMPLES: tf.TensorSpec([None], self._element_type),
    }


def _input_pb_type(variant_type: str | None, input_pb_type: PbType | None) -> PbType | None:
  """Returns what records are, which can be said in two ways."""
  if variant_type is None:
    return input_pb_type
  named = parse_pb_type(variant_type)
  if input_pb_type is not None and input_pb_type != named:
    raise ValueError(f"variant_type is {variant_type}, but input_pb_type {input_pb_type.to_name()}")
  return named


def _header_options(kwargs: dict[str, Any]) -> dict[str, Any]:
  """Returns the headers and data sources, from keywords or else from flags."""

  def option(name: str, flag: str, default: Any) -> Any:
    value = kwargs.get(name)
    return get_flag(flag, default) if value is None else value

  chnids = option("chnids", "chnids", ())
  if isinstance(chnids, str):
    chnids = kafka_settings.split_list(chnids)
  return {
    "has_sort_id": option("has_sort_id", "sort_id", True),
    "kafka_dump": option("kafka_dump", "kafka_dump", False),
    "kafka_dump_prefix": option("kafka_dump_prefix", "kafka_dump_prefix", False),
    "lagrangex_header": option("lagrangex_header", "lagrangex_header", False),
    "chnids": [int(chnid) for chnid in chnids],
    "datasources": kafka_settings.split_list(option("datasources", "datasources", ())),
    "default_datasource": option("default_datasource", "default_datasource", ""),
  }
