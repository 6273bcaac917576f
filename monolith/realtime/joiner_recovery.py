"""Finds out where a joiner that starts again was, from Kafka alone.

With each commit goes a mark: where the impressions, the actions and the samples stood when the
oldest impression was read that is still open, or that must be known when it comes again.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from idl.matrix.proto.example_pb2 import Example
from monolith.realtime import events
from monolith.realtime.join_window import JoinWindow, WindowOptions
from monolith.realtime.joiner_options import JoinerOptions
from monolith.row_log import kafka_client
from monolith.row_log.kafka_lib import KafkaError, KafkaException, TopicPartition

BATCH = 10_000
POLL_SECS = 0.05
REQUEST_SECS = 10
# Event time that one stream may be behind the other before brokers are asked whether it has ended.
_HELD_BACK_MS = 500
# How long a starting joiner waits for a broker that has no answer yet.
_PATIENCE_SECS = 60
_RETRY_SECS = 0.2


class JoinerError(RuntimeError):
  """The joiner cannot go on; nothing is lost, a restart reads it again."""


@dataclasses.dataclass(frozen=True)
class Mark:
  """Holds the positions of the three streams at one moment."""

  impressions: int
  actions: int
  samples: int


class Partition:
  """Holds the facts that the joiner has about one partition."""

  def __init__(self, number: int, options: WindowOptions):
    self.window = JoinWindow(number, options)
    self.impressions_next = 0
    self.actions_next = 0
    # How far each stream is known to hold nothing back: the newest event of the other one when all
    # of it had been read. An end that was seen before a broker went away says nothing about what
    # came later, so it is a time, not a flag.
    self.impressions_until = 0
    self.actions_until = 0
    self.asked_at = 0.0  # when brokers were last asked for the ends
    self.marks: list[Mark] = []

  def watermark(self) -> int:
    """Returns the event time, in ms, before which nothing more is expected."""
    return self.window.watermark(
      impressions_until=self.impressions_until, actions_until=self.actions_until
    )

  def is_held_back(self) -> bool:
    """Returns whether one stream waits for the other, which may have nothing more to say."""
    impressions, actions = self.window.newest_impression_ms, self.window.newest_action_ms
    behind = max(impressions, self.impressions_until) - max(actions, self.actions_until)
    return abs(behind) > _HELD_BACK_MS

  def mark(self, samples_end: int) -> None:
    """Notes where the streams stand, given the end of the samples."""
    waiting = self.window.oldest_waiting_offset()
    actions = self.actions_next if waiting is None else min(waiting, self.actions_next)
    self.marks.append(Mark(self.impressions_next, actions, samples_end))

  def resume_point(self) -> Mark:
    """Returns where a restarted joiner must begin, and forgets older marks."""
    oldest = self.window.oldest_needed_offset()
    first = self.impressions_next if oldest is None else oldest
    i = bisect.bisect_right([mark.impressions for mark in self.marks], first) - 1
    del self.marks[: max(i, 0)]
    return Mark(first, self.marks[0].actions, self.marks[0].samples)


def read_sample_offsets(options: JoinerOptions, number: int, first: int, end: int) -> Iterator[int]:
  """Yields offsets of the impressions whose samples are in a partition from `first` on.

  Raises:
    JoinerError: the samples cannot be read.
  """
  if first >= end:
    return
  reader = kafka_client.make_consumer(
    options.servers,
    f"{options.group}.recovery",
    {"enable.partition.eof": True, "isolation.level": "read_committed"},
  )
  reason = ""
  try:
    reader.assign([TopicPartition(options.samples, number, first)])
    deadline = time.monotonic() + REQUEST_SECS * 6
    while time.monotonic() < deadline:
      for message in reader.consume(num_messages=BATCH, timeout=POLL_SECS):
        error = message.error()
        if error is None:
          # Not for an error: brokers that refuse may say so again and again.
          deadline = time.monotonic() + REQUEST_SECS * 6
          offset = _impression_offset(message.value(), number)
          if offset is not None:
            yield offset
        elif error.code() == KafkaError._PARTITION_EOF:
          return
        else:
          reason = f": {error.str()}"
  finally:
    reader.close()
  raise JoinerError(
    f"{options.samples}, partition {number}, cannot be read from {first} to {end}{reason}"
  )


def retry(call: Callable[[], Any], is_good: Callable[[Any], bool] = lambda _: True) -> Any:
  """Returns what a request to a broker returns, asked again while the broker is away or starts.

  Raises:
    confluent_kafka.KafkaException: it failed to the end.
  """
  deadline = time.monotonic() + _PATIENCE_SECS
  while True:
    late = time.monotonic() > deadline
    try:
      result = call()
      if late or is_good(result):
        return result
    except KafkaException as error:
      if late or error.args[0].fatal():
        raise
    time.sleep(_RETRY_SECS)


def samples_start(metadata: str | None) -> int:
  """Returns where samples began, by what was committed with an offset."""
  try:
    return int(json.loads(metadata or "")["samples"])
  except (ValueError, KeyError, TypeError):
    # Committed by something else: everything in the topic may be ours.
    return 0


def _impression_offset(value: bytes | None, number: int) -> int | None:
  try:
    partition, offset, _ = events.parse_sample_id(Example.FromString(value or b"").line_id.req_id)
  except Exception:  # somebody else's message
    return None
  return offset if partition == number else None
