"""One partition of a log, for its writer, which appends messages and reads them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from absl import logging

from monolith.row_log import kafka_client
from monolith.row_log.kafka_lib import KafkaError, KafkaException, Message, TopicPartition

_POLL_SECS = 0.1
_RETRY_SECS = 1.0
_ANSWER_SECS = 10.0
# A broker that does not answer for this long while there are messages has a problem.
_SILENCE_SECS = 30.0
_LOG_SECS = 10.0


class LogPartition:
  """Writes to and reads from one partition. Not thread-safe.

  Args:
    servers: comma-separated `host:port` of brokers.
    topic: the log.
    partition: which part of it.

  Raises:
    ConnectionError: no broker answers.
  """

  def __init__(self, servers: str, topic: str, partition: int):
    self.topic = topic
    self.partition = partition
    self._producer = kafka_client.make_producer(servers)
    # Calls give positions; the group exists because a consumer must have one.
    self._consumer = kafka_client.make_consumer(servers, f"monolith.{topic}.{partition}")

  def close(self) -> None:
    """Closes the connections."""
    self._consumer.close()

  def ends(self) -> tuple[int, int]:
    """Returns the oldest offset, and the next one to be written.

    Raises:
      confluent_kafka.KafkaException: the brokers do not answer, or know no such partition.
    """
    low, high = self._consumer.get_watermark_offsets(
      TopicPartition(self.topic, self.partition), timeout=_ANSWER_SECS
    )
    return low, high

  def read(
    self, begin: int, end: int, stopped: threading.Event | None = None
  ) -> Iterator[tuple[int, bytes]]:
    """Yields offset and value of messages in `[begin, end)`.

    Args:
      begin: the first offset.
      end: the offset to stop at, at most the end of the log.
      stopped: ends the iteration early.

    Raises:
      confluent_kafka.KafkaException: the messages cannot be read.
      TimeoutError: the broker does not answer.
    """
    if begin >= end:
      return
    self._consumer.assign([TopicPartition(self.topic, self.partition, begin)])
    try:
      heard = time.monotonic()
      while stopped is None or not stopped.is_set():
        message = self._consumer.poll(_POLL_SECS)
        if message is None:
          # The last offsets may hold no message.
          position = self._consumer.position([TopicPartition(self.topic, self.partition)])[0]
          if position.offset >= end:
            return
          if time.monotonic() - heard > _SILENCE_SECS:
            raise TimeoutError(
              f"no message of {self.topic}[{self.partition}] in {_SILENCE_SECS:.0f} s, although it "
              f"ends at {end} and was read from {begin} on"
            )
          continue
        heard = time.monotonic()
        error = message.error()
        if error is not None:
          if error.code() == KafkaError._PARTITION_EOF:
            continue
          if error.retriable() or error.code() == KafkaError._ALL_BROKERS_DOWN:
            continue
          raise KafkaException(error)
        _, offset = kafka_client.place_of(message)
        if offset >= end:
          return
        yield offset, message.value() or b""
        if offset + 1 >= end:
          return
    finally:
      self._consumer.unassign()

  def append(self, messages: Sequence[bytes], stopped: threading.Event | None = None) -> list[int]:
    """Appends messages, however long that takes, and returns their offsets.

    Sends a refused message again, and waits while brokers are away.

    Args:
      messages: the messages to append.
      stopped: ends the waiting.

    Raises:
      InterruptedError: stopped before all messages were there.
    """
    next_log = 0.0
    offsets: dict[int, int] = {}
    refused: list[tuple[int, KafkaError]] = []

    def check_stopped() -> None:
      if stopped is not None and stopped.is_set():
        raise InterruptedError(
          f"{len(messages) - len(offsets)} of {len(messages)} messages did not reach "
          f"{self.topic}[{self.partition}]"
        )

    def send(number: int) -> None:
      def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
          refused.append((number, error))
        else:
          _, offsets[number] = kafka_client.place_of(message)

      while True:
        try:
          self._producer.produce(
            self.topic, messages[number], partition=self.partition, on_delivery=delivered
          )
          return
        except BufferError:
          # The queue stays full while brokers are away.
          check_stopped()
          self._producer.poll(_POLL_SECS)

    for number in range(len(messages)):
      send(number)
    while len(offsets) < len(messages):
      check_stopped()
      self._producer.poll(_POLL_SECS)
      if refused:
        again, refused[:] = list(refused), []
        if time.monotonic() >= next_log:
          next_log = time.monotonic() + _LOG_SECS
          logging.warning(
            "%s[%d]: brokers refuse %d of %d messages, which are sent again: %s",
            *(self.topic, self.partition, len(again), len(messages), again[0][1]),
          )
        time.sleep(_RETRY_SECS)
        for number, _ in again:
          send(number)
    return [offsets[number] for number in range(len(messages))]
