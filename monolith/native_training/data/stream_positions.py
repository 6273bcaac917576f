"""Keeps the position of a training run in a Kafka stream in variables that each step moves.

    batch of KafkaDataset(offsets="checkpoint")   -> samples + next offset of each partition
    prefetch queue, post-push queue               -> carry both
    the run that applies the batch's gradients    -> on each server: apply, then move its positions
    checkpoint                                    -> tables and positions of the same moment

Every parameter server has positions of its own, which it moves right after its own write: no other
process is needed in between, so a worker that is killed leaves no server in doubt. A start reads
from the smallest of them on, and a server leaves out what it has applied already, which it decides
by itself from its positions and those of the batch:

    ps_0 has applied up to 120, ps_1 up to 100, where the worker was killed between their writes
    read again from 100:  [100, 120) -> ps_0 leaves it out, ps_1 applies it;  [120, ...) -> both

For this no batch has messages that a server has applied beside such as it has not; the dataset cuts
them there. So a worker that is killed alone goes on where the servers stand; a server that dies
comes back with the rows and the positions of the checkpoint, and gets again what came after, alone.

The consumer group is told the positions after each checkpoint, for monitoring; a training run reads
them when it has none of its own.

Partition p of each topic belongs to worker `p % num_workers`, so no group has to agree on anything,
and a worker that starts again reads at once instead of waiting for a dead member's session to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from monolith import _install
from monolith.native_training import graph_meta, native_task_context, utils

POSITIONS_FEATURE = "__stream_positions__"
COUNTS_FEATURE = "__stream_counts__"
# The most partitions of one topic: the variable has a place for each.
MAX_PARTITIONS = 4096
_COUNTS = ("samples", "bad_messages", "repeated_samples", "newest_event_time")
_META_KEY = "stream_positions"


class StreamBatch(NamedTuple):
  """Holds the place of a batch in its stream.

  Attributes:
    positions: int64 [m, 2], pairs of an index into the variable and the next offset.
    counts: int64 [4]: samples, bad messages, repeated samples, newest event time.
  """

  positions: tf.Tensor
  counts: tf.Tensor


class StreamState(NamedTuple):
  """Holds the position of a training run.

  Attributes:
    positions: (topic, partition) -> offset of the next message.
    samples: how many were trained.
    bad_messages: how many could not be read.
    repeated_samples: how many were left out because they had come before.
    newest_event_time: the newest `req_time` that was trained, in seconds; 0 before the first.
  """

  positions: dict[tuple[str, int], int]
  samples: int
  bad_messages: int
  repeated_samples: int
  newest_event_time: int


class StreamPositions:
  """The variables of one graph, on each parameter server if there are servers.

  Args:
    topics: names, in the order of the rows of `start`.
    settings: `key=value` entries of the consumer, for the one who commits to its group.

  Attributes:
    start: int64 [servers, topics, partitions], where each server stands.
  """

  def __init__(self, topics: Sequence[str], settings: Sequence[str]):
    self.topics = list(topics)
    self.settings = dict(entry.split("=", 1) for entry in settings)
    num_ps = native_task_context.get().num_ps
    # For each server, a variable for each topic: another run may name topics in another order, or
    # more of them.
    self._positions: list[list[tf.Variable]] = []
    with tf.control_dependencies(None):
      for i in range(max(1, num_ps)):
        with tf.device(utils.ps_device(i) if num_ps else None):
          self._positions.append([_make_positions(topic, i) for topic in self.topics])
      with tf.device(utils.ps_device(0) if num_ps else None):
        self._counts = tf.compat.v1.get_variable(
          "stream_counts", initializer=np.zeros([len(_COUNTS)], np.int64), trainable=False
        )
      stacked = tf.stack([_read_all(variables) for variables in self._positions])
      # A server that knows nothing yet lets all begin anew: -1 is the smallest.
      self._value = (tf.reduce_min(stacked, axis=0), self._counts.read_value())
    self.start = tf.reshape(stacked, [-1, len(self.topics), MAX_PARTITIONS])
    self._num_ps = num_ps

  def lacks(self, batch: StreamBatch) -> list[tf.Tensor]:
    """Returns for each server, on its device, a bool scalar: whether it has not applied a batch.

    Nothing is decided without servers: rows and positions of one process come and go together.
    """
    result = []
    for i, variables in enumerate(self._positions[: self._num_ps]):
      with tf.device(utils.ps_device(i)):
        mine = tf.gather(_read_all(variables), batch.positions[:, 0])
        result.append(tf.reduce_any(mine < batch.positions[:, 1]))
    return result

  def move_after(
    self,
    write: tf.Operation | None,
    batch: StreamBatch,
    lacks: Sequence[tf.Tensor] | None = None,
  ) -> tf.Operation:
    """Returns the op that says, after a write, that this batch has been applied.

    Args:
      write: the end of the write to all servers; `None` if there was nothing to write.
      batch: where the stream stands after it.
      lacks: what `lacks` said before the write; asked now by default.
    """
    lacks = self.lacks(batch) if lacks is None else lacks
    moves = []
    for i, variables in enumerate(self._positions):
      with tf.device(variables[0].device), tf.control_dependencies(_last_ops_on(i, write)):
        # A server that was ahead stays there.
        with tf.control_dependencies(lacks[i : i + 1]):
          moves += _move(variables, batch.positions)
        if i == 0:
          counted = batch.counts[:3]
          if lacks:
            counted *= tf.cast(lacks[0], tf.int64)
          moves += [
            tf.compat.v1.scatter_add(self._counts, [0, 1, 2], counted),
            tf.compat.v1.scatter_max(self._counts, [3], batch.counts[3:]),
          ]
    return tf.group(*moves, *([] if write is None else [write]))

  def read(self, session: tf.compat.v1.Session) -> StreamState:
    """Returns where the training run stands now."""
    offsets, counts = session.run(self._value)
    positions = {
      (self.topics[i // MAX_PARTITIONS], int(i % MAX_PARTITIONS)): int(offsets[i])
      for i in np.flatnonzero(offsets >= 0)
    }
    return StreamState(positions, *(int(count) for count in counts))


def _make_positions(topic: str, server: int) -> tf.Variable:
  return tf.compat.v1.get_variable(
    f"stream_positions/{topic}" + (f"/server_{server}" if server else ""),
    initializer=np.full([MAX_PARTITIONS], -1, np.int64),
    trainable=False,
  )


def _read_all(variables: Sequence[tf.Variable]) -> tf.Tensor:
  """Returns the positions of all topics as one vector, which pairs of a batch index."""
  return tf.concat([variable.read_value() for variable in variables], axis=0)


def _move(variables: Sequence[tf.Variable], positions: tf.Tensor) -> list[tf.Tensor]:
  """Returns the ops that move each topic's variable to a batch's positions."""
  if len(variables) == 1:
    return [tf.compat.v1.scatter_max(variables[0], positions[:, 0], positions[:, 1])]
  moves = []
  for i, variable in enumerate(variables):
    is_mine = tf.equal(positions[:, 0] // MAX_PARTITIONS, i)
    # -1 moves nothing.
    after = tf.where(is_mine, positions[:, 1], -1)
    moves.append(tf.compat.v1.scatter_max(variable, positions[:, 0] % MAX_PARTITIONS, after))
  return moves


def _last_ops_on(server: int, write: tf.Operation | None) -> list[tf.Operation]:
  """Returns what a write does last on one server; all of it, if that cannot be told.

  The ends of the writes on all servers meet in an op of the worker. Who waited for that one would
  wait for a message from the worker, which may be dead by then.
  """
  if write is None:
    return []
  found, pending, seen = [], [write], set()
  while pending:
    op = pending.pop()
    if op in seen:
      continue
    seen.add(op)
    device = tf.DeviceSpec.from_string(op.device)
    if device.job == utils.PS_JOB_NAME:
      if device.task == server:
        found.append(op)
    elif op.type in ("NoOp", "Identity"):
      pending += [*op.control_inputs, *(value.op for value in op.inputs)]
  return found or [write]


def create(topics: Sequence[str], settings: Sequence[str]) -> StreamPositions:
  """Makes the variables of the default graph.

  Args:
    topics: names of topics, each once.
    settings: `key=value` entries of the consumer.

  Raises:
    ValueError: the graph has a stream already, a topic is named twice, or there is no graph.
  """
  if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
    raise ValueError(
      'offsets="checkpoint" needs the graph of a training run, whose steps move the positions: '
      "call it in an input function, not eagerly and not inside tf.function"
    )
  if len(set(topics)) != len(topics):
    raise ValueError(f"topics is {list(topics)}, want each topic once")
  if get() is not None:
    raise ValueError(f"topics is {list(topics)}, but the graph reads {get().topics} already")
  _get_holder().append(StreamPositions(topics, settings))
  return get()


def _get_holder() -> list[StreamPositions]:
  return graph_meta.get_meta(_META_KEY, list)


def get() -> Any:
  """Returns the `StreamPositions` of the default graph; `None` if it reads no such stream."""
  holder = _get_holder()
  return holder[0] if holder else None


def take(features: dict[str, Any]) -> tuple[dict[str, Any], StreamBatch | None]:
  """Separates the positions of a batch from its features.

  Returns:
    The other features, and the positions; `None` if the graph reads no stream.

  Raises:
    ValueError: the graph reads a stream, and the input function lost the positions.
  """
  features = dict(features)
  batch = (features.pop(POSITIONS_FEATURE, None), features.pop(COUNTS_FEATURE, None))
  if get() is None:
    return features, None
  if None in batch:
    raise ValueError(
      f'the input reads Kafka topics {get().topics} with offsets="checkpoint", but its features '
      f"have no {POSITIONS_FEATURE}: use KafkaDataset.map_batches, or keep that key and "
      f"{COUNTS_FEATURE}; features are {sorted(features)}"
    )
  return features, StreamBatch(*batch)


class GroupClient:
  """A Kafka client that reads nothing: it commits for the group, and asks for ends of partitions.

  Args:
    settings: those of the consumer.

  Raises:
    ImportError: `confluent_kafka` is not installed. Reading needs librdkafka alone.
  """

  def __init__(self, settings: Mapping[str, str]):
    with _install.naming_extra("kafka"):
      import confluent_kafka

    self._kafka = confluent_kafka
    own = {key.removeprefix("conf.topic."): value for key, value in settings.items()}
    own.pop("batch.num.messages", None)
    own["enable.auto.commit"] = "false"
    # The reader beside it warns of the same brokers and settings.
    own.setdefault("log_level", "3")
    self._consumer = confluent_kafka.Consumer(own, logger=logging.get_absl_logger())

  def commit(self, positions: Mapping[tuple[str, int], int]) -> None:
    """Tells the group where it stands, without waiting for an answer."""
    self._consumer.commit(
      offsets=[
        self._kafka.TopicPartition(topic, partition, offset)
        for (topic, partition), offset in positions.items()
      ],
      asynchronous=True,
    )
    self._consumer.poll(0)

  def get_end(self, partition: tuple[str, int], timeout_secs: float) -> int:
    """Returns the offset that the next message of a partition will have."""
    _, end = self._consumer.get_watermark_offsets(
      self._kafka.TopicPartition(*partition), timeout=timeout_secs
    )
    return end

  def close(self) -> None:
    self._consumer.close()


def make_client(positions: StreamPositions) -> GroupClient:
  """Returns a client of the brokers and the group that a stream is read from."""
  return GroupClient(positions.settings)


class CommitListener(tf.compat.v1.train.CheckpointSaverListener):
  """Tells the consumer group the positions of each checkpoint, so that its lag can be watched.

  No failure ends training: a run does not need what is committed.

  Args:
    positions: the graph's.
  """

  def __init__(self, positions: StreamPositions):
    self._positions = positions
    self._client: GroupClient | None = None
    self._state: StreamState | None = None

  def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    self._state = self._positions.read(session)

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._state is None or not self._state.positions:
      return
    try:
      if self._client is None:
        self._client = make_client(self._positions)
      # The next checkpoint says it again, so there is nothing to wait for.
      self._client.commit(self._state.positions)
    except Exception as e:  # Whatever a Kafka client says, the checkpoint is good.
      logging.warning("Cannot tell the consumer group the positions of the checkpoint: %s", e)

  def end(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._client is not None:
      self._client.close()
      self._client = None
