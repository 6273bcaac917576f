"""Joins impressions and actions to samples: `python -m monolith.realtime.joiner`.

Nothing on disk is needed to restart. With the offset of the oldest impression that is still open,
the joiner commits from where on actions matter to it and where the topic of samples ended when that
impression was read. A new joiner reads all three from there: what is in the topic of samples is not
written again, so that samples are the same as if nothing had happened.

Brokers from 0.11 on get samples and offsets in one transaction. Where one is not possible, a joiner
that was stopped and took itself for alive may write a sample twice, with the same id.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monolith.realtime import events, joiner_recovery
from monolith.realtime.join_window import Counters, Sample
from monolith.realtime.joiner_metrics import serve_metrics
from monolith.realtime.joiner_options import (
  JoinerOptions,
  make_options,
  parse_arguments,
  parse_rates,
)
from monolith.realtime.joiner_recovery import (
  BATCH,
  POLL_SECS,
  REQUEST_SECS,
  JoinerError,
  Mark,
  Partition,
)
from monolith.row_log import kafka_client
from monolith.row_log.kafka_lib import KafkaError, KafkaException, TopicPartition, confluent_kafka

_LOGGED_POISON = 100
# Between two questions whether a silent topic has ended, and how long one may take: what a window
# may close too late by.
_ASK_SECS = 0.5
_log = logging.getLogger("monolith.joiner")

__all__ = ["Joiner", "JoinerError", "JoinerOptions", "main", "parse_rates"]


class Joiner:
  """Reads events and writes samples until it is stopped.

  Args:
    options: what it reads and writes.

  Raises:
    ConnectionError: no broker answers.
    ValueError: the topics do not have equal numbers of partitions, or not those that are asked for.

  Attributes:
    is_transactional: samples and offsets are written as one.
    poisoned: the number of messages that were skipped.
  """

  def __init__(self, options: JoinerOptions):
    self._options = options
    self._partitions: dict[int, Partition] = {}
    self._done = Counters()
    self.poisoned = 0
    self._stopping = False
    self._failure: str | None = None
    self._consumer = kafka_client.make_consumer(
      options.servers,
      options.group,
      {
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        # Both topics' partitions of one number come to one joiner.
        "partition.assignment.strategy": "range",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 1500,
        # The most that waits in the client, of all partitions.
        "queued.max.messages.kbytes": 32_768,
      },
    )
    self._num_partitions = self._count_partitions()
    for number in options.partitions or ():
      if not 0 <= number < self._num_partitions:
        self._consumer.close()
        raise ValueError(
          f"partition {number} is asked for, but {options.impressions} has {self._num_partitions}"
        )
    features = kafka_client.probe(options.servers)
    self.is_transactional = options.transactions and features.has_transactions
    settings: dict[str, Any] = {
      "delivery.report.only.error": True,
      "on_delivery": self._on_failed_delivery,
      "queue.buffering.max.messages": 200_000,
    }
    if self.is_transactional:
      # A restarted joiner fences the one it replaces.
      settings["transactional.id"] = f"{options.group}.{_instance(options.partitions)}"
      settings["message.timeout.ms"] = 60_000
    self._producer = kafka_client.make_producer(options.servers, settings)
    if self.is_transactional:
      self._producer.init_transactions(REQUEST_SECS * 3)
      self._producer.begin_transaction()
    self._next_commit = time.monotonic()
    if options.partitions is None:
      self._consumer.subscribe(
        [options.impressions, options.actions], on_assign=self._on_assign, on_revoke=self._on_revoke
      )
    else:
      self._assign(sorted(options.partitions or range(self._num_partitions)))

  def run(self) -> None:
    """Works until `stop`.

    Raises:
      JoinerError: a disk is full, or a broker refused for good; the message says what.
    """
    try:
      while not self._stopping:
        self.step()
      self._commit()
    finally:
      self.close()

  def stop(self) -> None:
    """Lets `run` return; may be called from a signal handler."""
    self._stopping = True

  def step(self) -> int:
    """Reads a batch of events and returns how many there were.

    Raises:
      JoinerError: it cannot go on.
    """
    try:
      messages = self._consumer.consume(num_messages=BATCH, timeout=POLL_SECS)
      self._take(messages)
      self._producer.poll(0)
      if time.monotonic() >= self._next_commit:
        self._commit()
    except OSError as error:
      raise JoinerError(
        f"cannot keep open impressions in {self._options.window.spill_folder}: {error}. Nothing is "
        "lost: started again with more room, the joiner reads them from Kafka."
      ) from error
    if self._failure:
      raise JoinerError(self._failure)
    return len(messages)

  def counters(self) -> Counters:
    """Returns what was done, over all partitions that were ever read."""
    return _sum([self._done, *(p.window.counters for p in list(self._partitions.values()))])

  def num_open(self) -> int:
    """Returns the number of impressions that wait."""
    return sum(p.window.num_open for p in list(self._partitions.values()))

  def lag(self) -> dict[tuple[str, int], int]:
    """Returns the number of messages that were not read, by topic and partition."""
    result = {}
    for number, partition in list(self._partitions.items()):
      for topic, position in (
        (self._options.impressions, partition.impressions_next),
        (self._options.actions, partition.actions_next),
      ):
        _, high = self._consumer.get_watermark_offsets(TopicPartition(topic, number), cached=True)
        result[topic, number] = max(0, high - position)
    return result

  def close(self) -> None:
    """Leaves the group, and deletes spill files."""
    self._consumer.close()
    self._let_go()

  # Reading.

  def _take(self, messages: list[confluent_kafka.Message]) -> None:
    newest_ms = int((time.time() + self._options.max_future_secs) * 1000)
    impressions_topic = self._options.impressions
    impressions: dict[int, list[tuple[int, events.Impression]]] = {}
    actions: dict[int, list[tuple[int, events.Action]]] = {}
    for message in messages:
      number, offset = kafka_client.place_of(message)
      partition = self._partitions.get(number)
      error = message.error()
      if error is not None:
        self._on_error(message, error, partition)
        continue
      if partition is None:  # read before it was taken away
        continue
      try:
        if message.topic() == impressions_topic:
          partition.impressions_next = offset + 1
          event = events.parse_impression(message.value() or b"", newest_ms)
          impressions.setdefault(number, []).append((offset, event))
        else:
          partition.actions_next = offset + 1
          action = events.parse_action(message.value() or b"", newest_ms)
          actions.setdefault(number, []).append((offset, action))
      except events.PoisonedMessageError as reason:
        self._on_poison(message, reason)
    for number, partition in self._partitions.items():
      window = partition.window
      if number in impressions or number in actions:
        self._write(number, window.add(impressions.get(number, ()), actions.get(number, ())))
      if partition.is_held_back() and time.monotonic() - partition.asked_at > _ASK_SECS:
        self._ask_for_ends(number, partition)
      self._write(number, window.advance(partition.watermark()))

  def _ask_for_ends(self, number: int, partition: Partition) -> None:
    """Asks brokers whether all of a partition has been read: clients tell of an end only once."""
    window = partition.window
    # Read before the broker is asked: messages that come meanwhile may have company.
    impressions_ms, actions_ms = window.newest_impression_ms, window.newest_action_ms
    try:
      impressions_end = self._end_of(self._options.impressions, number, _ASK_SECS)
      if impressions_end <= partition.impressions_next:
        partition.impressions_until = max(partition.impressions_until, actions_ms)
      if self._end_of(self._options.actions, number, _ASK_SECS) <= partition.actions_next:
        partition.actions_until = max(partition.actions_until, impressions_ms)
      partition.asked_at = time.monotonic()
    except KafkaException as error:
      _log.debug("windows stay open while the ends of topics are not known: %s", error)
      for each in self._partitions.values():  # the others would wait as long
        each.asked_at = time.monotonic()

  def _on_error(
    self, message: confluent_kafka.Message, error: KafkaError, partition: Partition | None
  ) -> None:
    if error.code() == KafkaError._PARTITION_EOF:
      # Counts for what was read before this batch: it is told after a fetch that found no more.
      if partition is not None and message.topic() == self._options.impressions:
        newest = partition.window.newest_action_ms
        partition.impressions_until = max(partition.impressions_until, newest)
      elif partition is not None:
        newest = partition.window.newest_impression_ms
        partition.actions_until = max(partition.actions_until, newest)
    elif error.fatal():
      self._failure = f"Kafka refuses: {error}"
    else:
      _log.warning("reading is delayed: %s", error)

  def _on_poison(self, message: confluent_kafka.Message, reason: Exception) -> None:
    self.poisoned += 1
    if self.poisoned <= _LOGGED_POISON or self.poisoned % _LOGGED_POISON == 0:
      _log.warning(
        "message %d of %s, partition %d, is skipped: %s (%d so far)",
        *(message.offset(), message.topic(), message.partition(), reason, self.poisoned),
      )

  # Writing.

  def _write(self, number: int, samples: Iterable[Sample]) -> None:
    for sample in samples:
      while True:
        try:
          self._producer.produce(
            self._options.samples, sample.value, sample.request_id, partition=number
          )
          break
        except BufferError:
          self._producer.poll(POLL_SECS)
          if self._failure or self._stopping:
            raise JoinerError(self._failure or "stopped while brokers take no samples") from None

  def _on_failed_delivery(self, error: KafkaError, message: confluent_kafka.Message) -> None:
    if error is not None:
      self._failure = f"a sample cannot be written to {self._options.samples}: {error}"

  def _commit(self) -> None:
    """Commits from where a restart has to read; samples reach the broker first."""
    self._next_commit = time.monotonic() + self._options.commit_secs
    if not self._partitions:
      return
    try:
      if self._producer.flush(REQUEST_SECS) or self._failure:
        return
      offsets = []
      for number, partition in self._partitions.items():
        offsets += self._offsets_of(number, partition)
      if self.is_transactional:
        self._producer.send_offsets_to_transaction(
          offsets, self._consumer.consumer_group_metadata(), REQUEST_SECS
        )
        self._producer.commit_transaction(REQUEST_SECS * 3)
        self._producer.begin_transaction()
      else:
        self._consumer.commit(offsets=offsets, asynchronous=False)
    except KafkaException as error:
      reason = error.args[0]
      if self.is_transactional or reason.fatal():
        # Whether it was committed is not known here, but the topics know.
        self._failure = f"cannot commit: {reason}"
      else:
        _log.warning("offsets are not committed yet: %s", reason)
      return
    try:
      for number, partition in self._partitions.items():
        partition.mark(self._end_of(self._options.samples, number))
    except KafkaException as error:
      # The committed offsets stand; a restart reads the samples from an older mark on.
      _log.warning("the ends of samples are not known yet: %s", error.args[0])

  def _offsets_of(self, number: int, partition: Partition) -> list[TopicPartition]:
    point = partition.resume_point()
    metadata = json.dumps({"samples": point.samples})
    return [
      TopicPartition(self._options.impressions, number, point.impressions, metadata),
      TopicPartition(self._options.actions, number, point.actions),
    ]

  def _end_of(self, topic: str, number: int, timeout_secs: float = REQUEST_SECS) -> int:
    where = TopicPartition(topic, number)
    return self._consumer.get_watermark_offsets(where, timeout=timeout_secs, cached=False)[1]

  # Partitions.

  def _count_partitions(self) -> int:
    names = (self._options.impressions, self._options.actions, self._options.samples)

    def count() -> dict[str, int]:
      known = self._consumer.list_topics(timeout=REQUEST_SECS).topics
      return {name: len(known[name].partitions) if name in known else 0 for name in names}

    counts = joiner_recovery.retry(count, is_good=lambda counts: all(counts.values()))
    if len(set(counts.values())) != 1 or not counts[names[0]]:
      raise ValueError(f"numbers of partitions are {counts}, want equal ones, and at least 1")
    return counts[names[0]]

  def _on_assign(self, unused_consumer: Any, assigned: list[TopicPartition]) -> None:
    self._assign(sorted({p.partition for p in assigned}))

  def _on_revoke(self, unused_consumer: Any, unused_revoked: list[TopicPartition]) -> None:
    self._commit()
    self._let_go()

  def _let_go(self) -> None:
    for partition in self._partitions.values():
      self._done = _sum([self._done, partition.window.counters])
      partition.window.close()
    self._partitions = {}

  def _assign(self, numbers: list[int]) -> None:
    """Begins to read partitions where the last joiner of the group could not let go."""
    if not numbers:
      self._consumer.assign([])
      return
    options = dataclasses.replace(
      self._options.window, memory_bytes=self._options.window.memory_bytes // len(numbers)
    )
    topic, actions_topic = self._options.impressions, self._options.actions
    pairs = [TopicPartition(t, n) for n in numbers for t in (topic, actions_topic)]
    committed = {
      (p.topic, p.partition): p
      for p in joiner_recovery.retry(
        lambda: self._consumer.committed(pairs, REQUEST_SECS),
        is_good=lambda found: not any(p.error for p in found),
      )
    }
    starts = []
    for number in numbers:
      impressions = committed[topic, number]
      actions = committed[actions_topic, number]
      partition = self._partitions[number] = Partition(number, options)
      is_new = impressions.offset < 0
      partition.impressions_next = self._first(impressions)
      partition.actions_next = self._first(actions)
      end = joiner_recovery.retry(functools.partial(self._end_of, self._options.samples, number))
      first_sample = end if is_new else joiner_recovery.samples_start(impressions.metadata)
      partition.marks = [Mark(partition.impressions_next, partition.actions_next, first_sample)]
      if not is_new:
        partition.window.know(
          partition.impressions_next,
          joiner_recovery.read_sample_offsets(self._options, number, first_sample, end),
        )
      starts += [
        TopicPartition(topic, number, partition.impressions_next),
        TopicPartition(actions_topic, number, partition.actions_next),
      ]
    self._consumer.assign(starts)
    # At once: a joiner that dies in its first second has said where samples began.
    self._commit()

  def _first(self, committed: TopicPartition) -> int:
    """Returns the committed offset, or the oldest one where there is none or it is gone."""
    where = TopicPartition(committed.topic, committed.partition)
    low, high = joiner_recovery.retry(
      lambda: self._consumer.get_watermark_offsets(where, timeout=REQUEST_SECS)
    )
    if committed.offset > high or 0 <= committed.offset < low:
      _log.error(
        "offset %d of %s, partition %d, is not in the log any more (%d to %d): events are lost, "
        "because its retention is shorter than the window and the time without a joiner",
        *(committed.offset, committed.topic, committed.partition, low, high),
      )
    return min(max(committed.offset, low), high) if committed.offset >= 0 else low


def _instance(partitions: Sequence[int] | None) -> str:
  """Returns a name that a restarted joiner has again, and no other has."""
  if partitions is None:
    return f"{os.uname().nodename}.{os.getpid()}"
  return "-".join(map(str, partitions)) or "all"


def _sum(counters: Sequence[Counters]) -> Counters:
  names = [field.name for field in dataclasses.fields(Counters)]
  return Counters(**{name: sum(getattr(c, name) for c in counters) for name in names})


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a joiner and returns the exit status: 1 if it could not go on."""
  logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
  flags = parse_arguments(arguments)
  try:
    joiner = Joiner(make_options(flags))
    if flags.metrics_port >= 0:
      try:
        port = serve_metrics(joiner, flags.metrics_port)
      except OSError as error:
        joiner.close()
        raise ValueError(f"--metrics_port={flags.metrics_port}: {error}") from error
      _log.info("metrics at http://127.0.0.1:%d/metrics", port)
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, lambda *unused: joiner.stop())
    _log.info("joiner ready")
    joiner.run()
  except (JoinerError, ConnectionError, ValueError, KafkaException) as error:
    _log.error("%s", error)
    return 1
  _log.info("stopped: %s", joiner.counters())
  return 0


if __name__ == "__main__":
  sys.exit(main())
