"""Follows marked users through the stages, and the row log for what it says about tables.

    action -join-> sample in its topic -queue-> step -train-> row in the table -publish-> row log
      -apply-> answer of every replica

What is in Kafka is read here as it comes; when a sample was trained, the trainer's metrics say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import http.client
import threading
import time
from typing import Protocol
import urllib.request

from monolith.realtime.row_log_pb2 import RowBatch
from monolith.row_log import kafka_client, topics
from monolith.row_log.kafka_lib import TopicPartition, confluent_kafka
import numpy as np

from examples.realtime.generator import USER_SLOT, make_fid

STAGES = ("join", "queue", "train", "publish", "apply")
_CRC_BYTES = 4
_BATCH = 1000
_READ_SECS = 0.1
_ASK_SECS = 0.1
_ANSWER_SECS = 2.0


@dataclasses.dataclass
class Trace:
  """When a marked user passed which stage, in seconds since 1970; 0 where it has not.

  Attributes:
    joined: its sample was in the topic.
    partition: where its sample is.
    offset: the sample's place in that partition.
    trained: its sample was trained.
    step_secs: how long that step took.
    published: its row was in the log.
  """

  joined: float = 0.0
  partition: int = -1
  offset: int = -1
  trained: float = 0.0
  step_secs: float = 0.0
  published: float = 0.0

  def split(self, event_time: float, seen: float) -> dict[str, float] | None:
    """Returns stage -> seconds, `None` where a stage was not observed.

    Args:
      event_time: when the user acted.
      seen: when all replicas showed it.
    """
    if not (self.joined and self.trained and self.published):
      return None
    # The trainer is asked ten times a second, and the log may be faster than that.
    trained = min(self.trained, self.published)
    begin = max(self.joined, trained - self.step_secs)
    times = (event_time, self.joined, begin, trained, self.published, seen)
    return {
      stage: max(0.0, end - start) for stage, start, end in zip(STAGES, times[:-1], times[1:])
    }


class Traced(Protocol):
  """A marked user."""

  user: int
  request_id: str
  trace: Trace


@dataclasses.dataclass
class TableFigures:
  """Holds the figures of one table in the row log.

  Attributes:
    rows: how many there are, by the newest digests of all servers.
    set: rows that were written to the log.
    deleted: rows that were deleted, because they expired or were evicted.
  """

  rows: int = 0
  set: int = 0
  deleted: int = 0


@dataclasses.dataclass(frozen=True)
class DigestMark:
  """A digest that came with the row log.

  Attributes:
    when: when it was read here, `time.monotonic()`.
    epoch: the writer.
    seq: the batch after which tables were so.
  """

  when: float
  epoch: int
  seq: int


def summarize(splits: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
  """Returns stage -> median and 99th percentile of its seconds; nothing without a split."""
  rows = list(splits)
  if not rows:
    return {}
  return {
    stage: (
      float(np.percentile([row[stage] for row in rows], 50)),
      float(np.percentile([row[stage] for row in rows], 99)),
    )
    for stage in STAGES
  }


class StageTracer:
  """Fills the traces of marked users, and counts what the row log says.

  Args:
    servers: comma-separated `host:port` of brokers.
    model: the model's name in the row log.
    partitions: topic -> how many partitions, of samples and the row log.
    trainer_port: port of the trainer's metrics on loopback.
    open_users: returns the marked users on their way.
  """

  def __init__(
    self,
    servers: str,
    model: str,
    partitions: Mapping[str, int],
    trainer_port: int,
    open_users: Callable[[], Sequence[Traced]],
  ):
    self._rows_topic = topics.rows_topic(model)
    self._trainer_url = f"http://127.0.0.1:{trainer_port}/metrics"
    self._open_users = open_users
    self._consumer = kafka_client.make_consumer(servers, "monolith-tracer")
    self._consumer.assign(
      [
        TopicPartition(topic, i, confluent_kafka.OFFSET_END)
        for topic, count in partitions.items()
        for i in range(count)
      ]
    )
    self._lock = threading.Lock()
    self._tables: dict[str, TableFigures] = {}
    self._row_counts: dict[int, dict[str, int]] = {}
    self._digests: dict[int, DigestMark] = {}
    self._stopping = threading.Event()
    self._threads = [
      threading.Thread(target=self._follow_topics, name="stages", daemon=True),
      threading.Thread(target=self._follow_trainer, name="trained", daemon=True),
    ]

  def start(self) -> None:
    """Begins to follow."""
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    """Ends it."""
    self._stopping.set()
    for thread in self._threads:
      if thread.is_alive():
        thread.join()

  def tables(self) -> dict[str, TableFigures]:
    """Returns figures by table, of all servers together."""
    with self._lock:
      found = {name: dataclasses.replace(figures) for name, figures in self._tables.items()}
      for counts in self._row_counts.values():
        for name, count in counts.items():
          found.setdefault(name, TableFigures()).rows += count
    return found

  def digests(self) -> dict[int, DigestMark]:
    """Returns the newest digest by shard."""
    with self._lock:
      return dict(self._digests)

  def _follow_topics(self) -> None:
    while not self._stopping.is_set():
      samples: dict[str, confluent_kafka.Message] = {}
      for message in self._consumer.consume(_BATCH, _READ_SECS):
        if message.error() is not None:
          continue  # a broker that is away comes back
        if message.topic() == self._rows_topic:
          self._add_batch(message.value() or b"", time.time())
        else:
          samples[(message.key() or b"").decode(errors="replace")] = message
      now = time.time()
      for user in self._open_users() if samples else ():
        found = samples.get(user.request_id)
        if found is not None and not user.trace.joined:
          user.trace.partition, user.trace.offset = found.partition() or 0, found.offset() or 0
          user.trace.joined = now
    self._consumer.close()

  def _add_batch(self, value: bytes, now: float) -> None:
    try:
      batch = RowBatch.FromString(value[_CRC_BYTES:])
    except Exception:  # Implementations of protobuf raise different errors.
      return  # replicas count messages that cannot be read
    waiting = {
      make_fid(USER_SLOT, user.user): user
      for user in self._open_users()
      if not user.trace.published
    }
    wanted = np.fromiter(waiting, np.uint64, len(waiting))
    with self._lock:
      for rows in batch.tables:
        figures = self._tables.setdefault(rows.name, TableFigures())
        figures.set += len(rows.ids) // 8
        figures.deleted += len(rows.deleted_ids) // 8
        ids = np.frombuffer(rows.ids, "<u8", len(rows.ids) // 8)
        for fid in np.intersect1d(wanted, ids):
          waiting[int(fid)].trace.published = now
      if batch.HasField("digest"):
        self._row_counts[batch.shard] = dict(batch.digest.row_counts)
        self._digests[batch.shard] = DigestMark(time.monotonic(), batch.epoch, batch.digest.seq)

  def _follow_trainer(self) -> None:
    while not self._stopping.wait(_ASK_SECS):
      waiting = [u for u in self._open_users() if u.trace.joined and not u.trace.trained]
      if not waiting:
        continue
      try:
        with urllib.request.urlopen(self._trainer_url, timeout=_ANSWER_SECS) as answer:
          metrics = parse_metrics(answer.read().decode())
      except (OSError, http.client.HTTPException):  # as where it dies while it answers
        continue
      now = time.time()
      step_secs = metrics.get("monolith_trainer_step_seconds", 0.0)
      for user in waiting:
        labels = f'partition="{user.trace.partition}",topic="{topics.SAMPLES}"'
        if metrics.get(f"monolith_trainer_next_offset{{{labels}}}", -1) > user.trace.offset:
          user.trace.step_secs, user.trace.trained = step_secs, now


def parse_metrics(text: str) -> dict[str, float]:
  """Returns `name{labels} -> value` of a page of Prometheus."""
  found = {}
  for line in text.splitlines():
    name, space, value = line.rpartition(" ")
    if space and not line.startswith("#"):
      try:
        found[name] = float(value)
      except ValueError:
        continue
  return found
