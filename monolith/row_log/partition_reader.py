"""Reads one partition of a topic by offsets, without a consumer group."""

from __future__ import annotations

from collections.abc import Sequence

from monolith.realtime.row_log_pb2 import DenseSet, RowBatch
from monolith.row_log import kafka_client, topics
from monolith.row_log.kafka_lib import KafkaError, KafkaException, confluent_kafka
from monolith.row_log.sync_state import LogEnd

# A group is required although nothing is committed.
_GROUP = "monolith-reader"
_CRC_BYTES = 4
_GONE = (
  KafkaError._AUTO_OFFSET_RESET,
  KafkaError.OFFSET_OUT_OF_RANGE,
)


class OffsetGoneError(LookupError):
  """The log does not hold an offset, no longer or not yet."""


class PartitionReader:
  """A client of one partition, for one thread.

  Args:
    servers: comma-separated `host:port` of brokers.
    topic: where to read.
    partition: which part of it.
    timeout_secs: how long to wait for an answer.

  Raises:
    ConnectionError: no broker answers.
  """

  def __init__(self, servers: str, topic: str, partition: int, timeout_secs: float = 10):
    self._name = f"{topic}[{partition}]"
    self._partition = confluent_kafka.TopicPartition(topic, partition)
    self._timeout_secs = timeout_secs
    settings = {
      "group.id": _GROUP,
      "enable.auto.commit": False,
      "enable.auto.offset.store": False,
      # The caller decides about a position that is gone.
      "auto.offset.reset": "error",
      "enable.partition.eof": True,
      "fetch.wait.max.ms": 50,
      "fetch.error.backoff.ms": 50,
    }
    self._consumer = confluent_kafka.Consumer(
      kafka_client.client_settings(servers, settings, timeout_secs), logger=kafka_client.LOGGER
    )

  def bounds(self) -> tuple[int, int]:
    """Returns the oldest offset, and the one that the next message will have.

    Raises:
      LookupError: there is no such partition.
      KafkaException: no broker answers.
    """
    try:
      return self._consumer.get_watermark_offsets(self._partition, timeout=self._timeout_secs)
    except KafkaException as error:
      if error.args[0].code() in (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
      ):
        raise LookupError(f"the broker has no {self._name}") from error
      raise

  def seek(self, offset: int) -> None:
    """Makes `read` go on at an offset."""
    self._consumer.assign(
      [confluent_kafka.TopicPartition(self._partition.topic, self._partition.partition, offset)]
    )

  def read(self, max_messages: int, timeout_secs: float) -> tuple[list[tuple[int, bytes]], int]:
    """Returns messages as (offset, value), and the partition's end if it was met.

    Args:
      max_messages: the most messages.
      timeout_secs: how long to wait for the first one.

    Returns:
      The messages in order, and the offset of the partition's end, -1 where it was not met.

    Raises:
      OffsetGoneError: the log does not hold the position.
      KafkaException: the broker refuses for another reason.
    """
    found, end = [], -1
    for message in self._consumer.consume(max_messages, timeout_secs):
      error = message.error()
      if error is None:
        found.append((kafka_client.place_of(message)[1], message.value() or b""))
      elif error.code() == KafkaError._PARTITION_EOF:
        _, end = kafka_client.place_of(message)
      elif error.code() in _GONE:
        raise OffsetGoneError(f"{self._name}: {error.str()}")
      elif not error.retriable() and error.code() not in (
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
      ):
        raise KafkaException(error)
    return found, end

  def close(self) -> None:
    """Closes the connections."""
    self._consumer.close()


def read_log_ends(
  servers: str, topic: str, num_partitions: int, timeout_secs: float = 10
) -> Sequence[LogEnd]:
  """Returns the ends of a log's partitions, and the newest batch in each.

  Args:
    servers: comma-separated `host:port` of brokers.
    topic: the row log, or that of dense variables.
    num_partitions: how many of its partitions.
    timeout_secs: how long to wait for each answer.

  Returns:
    An end for each partition; one without messages, or that does not exist yet, ends at 0.

  Raises:
    ConnectionError: no broker answers.
    KafkaException: the broker refuses.
  """
  return [_read_end(servers, topic, i, timeout_secs) for i in range(num_partitions)]


def _read_end(servers: str, topic: str, partition: int, timeout_secs: float) -> LogEnd:
  reader = PartitionReader(servers, topic, partition, timeout_secs)
  try:
    try:
      low, high = reader.bounds()
    except LookupError:
      return LogEnd(0)
    if low >= high:
      return LogEnd(high)
    reader.seek(high - 1)
    found, end = reader.read(1, timeout_secs)
    if not found and end < 0:
      raise ConnectionError(f"{topic}[{partition}]: offset {high - 1} did not come")
    return _end_after(topic, found[0][1] if found else b"", high)
  finally:
    reader.close()


def _end_after(topic: str, value: bytes, next_offset: int) -> LogEnd:
  """Returns the end after a message, without a batch if the message cannot be read."""
  is_dense = topic.startswith(topics.dense_topic(""))
  message = DenseSet() if is_dense else RowBatch()
  try:
    message.ParseFromString(value[_CRC_BYTES:])
  except Exception:  # Implementations of protobuf raise different errors.
    return LogEnd(next_offset)
  if is_dense:
    return LogEnd(next_offset, max(message.epoch, 0), max(message.version, 0))
  is_complete = message.chunk + 1 >= message.num_chunks
  seq = message.seq if is_complete else message.prev_seq
  return LogEnd(next_offset, max(message.epoch, 0), max(seq, 0))
