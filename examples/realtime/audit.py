"""Compares the topics of a joiner: are samples as an undisturbed run would have written them?

Everything is read from the first message on, and decided again: an action within the window makes a
positive, none makes a negative, which a hash of the request id keeps or not. Only impressions whose
window has passed are looked at.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import time

from idl.matrix.proto.example_pb2 import Example
from monolith.realtime import events
from monolith.row_log import kafka_client, topics
from monolith.row_log.kafka_lib import KafkaError, KafkaException, TopicPartition, confluent_kafka

_MESSAGES = 2000
_READ_SECS = 1.0
_ANSWER_SECS = 30.0
_FAR_MS = 1 << 62


@dataclasses.dataclass
class Audit:
  """Holds the findings in all partitions.

  Attributes:
    impressions: impressions whose window has passed, each counted once.
    expected: samples that they must have become.
    missing: ids of samples that are not there.
    unexpected: ids of samples that should not be there.
    late: request ids of events that were written when their window was over or about to be: the
      joiner may have dropped the action, which is what a window is.
    samples: samples in the topic, each counted once.
    repeated: messages that hold a sample again.
    unreadable: messages of the three topics that are no events and no samples.
  """

  impressions: int = 0
  expected: int = 0
  missing: list[str] = dataclasses.field(default_factory=list)
  unexpected: list[str] = dataclasses.field(default_factory=list)
  late: set[str] = dataclasses.field(default_factory=set)
  samples: int = 0
  repeated: int = 0
  unreadable: int = 0

  def describe(self) -> str:
    """Returns it in words."""
    return (
      f"{self.expected} of {self.impressions} impressions, {len(self.missing)} missing, "
      f"{len(self.unexpected)} too many, {len(self.late)} late"
    )


def audit_samples(
  servers: str, partitions: int, window_secs: float, lateness_secs: float, sample_rate: float
) -> Audit:
  """Reads impressions, actions and samples, and compares them.

  Args:
    servers: comma-separated `host:port` of brokers.
    partitions: how many each topic has.
    window_secs: the joiner's.
    lateness_secs: the joiner's.
    sample_rate: the joiner's, the same for all negatives.

  Raises:
    ConnectionError: no broker answers, or a topic cannot be read.
  """
  result = Audit()
  for partition in range(partitions):
    _audit_partition(
      result,
      servers,
      partition,
      round(window_secs * 1000),
      round(lateness_secs * 1000),
      sample_rate,
    )
  return result


def _audit_partition(
  result: Audit,
  servers: str,
  partition: int,
  window_ms: int,
  lateness_ms: int,
  sample_rate: float,
) -> None:
  # Samples last: what they were made of has been read by then.
  # Request id -> offset, event time, and how much newer a message before it was.
  impressions: dict[str, tuple[int, int, int]] = {}
  newest = 0
  again: set[str] = set()
  for offset, value in _read_all(servers, topics.IMPRESSIONS, partition):
    try:
      impression = events.parse_impression(value, _FAR_MS)
    except events.PoisonedMessageError:
      result.unreadable += 1
      continue
    newest = max(newest, impression.event_time_ms)
    if impression.request_id in impressions:
      # A producer that had no answer sends again; each copy is an impression of its own.
      again.add(impression.request_id)
    else:
      time_ms = impression.event_time_ms
      impressions[impression.request_id] = (offset, time_ms, newest - time_ms)
  # Request id -> event time of its first action, and how much newer one before it was.
  actions: dict[str, tuple[int, int]] = {}
  newest_action = 0
  for _, value in _read_all(servers, topics.ACTIONS, partition):
    try:
      action = events.parse_action(value, _FAR_MS)
    except events.PoisonedMessageError:
      result.unreadable += 1
      continue
    newest_action = max(newest_action, action.event_time_ms)
    actions.setdefault(
      action.request_id, (action.event_time_ms, newest_action - action.event_time_ms)
    )
  samples: collections.Counter[str] = collections.Counter()
  for _, value in _read_all(servers, topics.SAMPLES, partition):
    try:
      identity = Example.FromString(value).line_id.req_id
      events.parse_sample_id(identity)
    except Exception:  # Implementations of protobuf raise different errors.
      result.unreadable += 1
      continue
    samples[identity] += 1
  result.samples += len(samples)
  result.repeated += sum(samples.values()) - len(samples)
  # Windows end with a twentieth of themselves, and the watermark may wait for the slower topic.
  end = min(newest, newest_action or newest) - window_ms - lateness_ms - window_ms // 10
  for request_id, (offset, time_ms, disorder_ms) in impressions.items():
    if time_ms >= end or request_id in again:
      continue
    result.impressions += 1
    positive = events.sample_id(partition, offset, events.POSITIVE)
    negative = events.sample_id(partition, offset, events.NEGATIVE)
    found = {identity for identity in (positive, negative) if identity in samples}
    action_ms, action_disorder_ms = actions.get(request_id, (0, 0))
    expected = {negative} if events.is_kept(request_id, sample_rate) else set()
    if action_ms and action_ms <= time_ms + window_ms:
      # It cannot be told which of two topics is further ahead, so lateness is not added here.
      if max(disorder_ms, action_disorder_ms) >= window_ms and found != {positive}:
        result.late.add(request_id)
        continue
      expected = {positive}
    result.expected += len(expected)
    result.missing += sorted(expected - found)
    result.unexpected += sorted(found - expected)


def _read_all(servers: str, topic: str, partition: int) -> Iterator[tuple[int, bytes]]:
  """Yields offsets and messages of a partition, to the end that it has now.

  Raises:
    ConnectionError: it cannot be read.
  """
  consumer = kafka_client.make_consumer(servers, "monolith-audit", {"enable.partition.eof": True})
  with contextlib.closing(consumer):
    position, end = _read_bounds(consumer, servers, TopicPartition(topic, partition))
    consumer.assign([TopicPartition(topic, partition, position)])
    deadline = time.monotonic() + _ANSWER_SECS
    while position < end:
      if time.monotonic() > deadline:
        raise ConnectionError(f"{topic}[{partition}] at {servers} ends at {position}, want {end}")
      for message in consumer.consume(_MESSAGES, _READ_SECS):
        deadline = time.monotonic() + _ANSWER_SECS
        reason, offset = message.error(), message.offset()
        if offset is None or (reason and reason.code() != KafkaError._PARTITION_EOF):
          continue  # a broker that is away comes back
        if reason is None and offset < end:
          yield offset, message.value() or b""
        position = max(position, offset + (reason is None))


def _read_bounds(
  consumer: confluent_kafka.Consumer, servers: str, where: TopicPartition
) -> tuple[int, int]:
  """Returns the first offset and the end of a partition; a broker that starts is waited for."""
  deadline = time.monotonic() + _ANSWER_SECS
  while True:
    try:
      return consumer.get_watermark_offsets(where, timeout=_ANSWER_SECS)
    except KafkaException as error:
      if time.monotonic() > deadline:
        name = f"{where.topic}[{where.partition}]"
        raise ConnectionError(f"cannot read {name} at {servers}: {error}") from error
    time.sleep(_READ_SECS)
