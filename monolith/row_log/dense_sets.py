"""Dense variables of a model in training, published as versioned sets.

A set holds every variable that a served model may have, at one step. It is cut into messages of at
most 900,000 bytes; a larger tensor is cut, too, and its parts have the same name. The topic has one
partition and keeps messages as the row log does, not compacted: variables of different versions do
not match.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.realtime.row_log_pb2 import DenseSet
from monolith.row_log import kafka_client, topics
from monolith.row_log.framing import frame
from monolith.row_log.partition_reader import read_log_ends

# The largest tensors of a message, without its checksum and other fields.
_TENSOR_BYTES = kafka_client.MAX_MESSAGE_BYTES - 4096
_RETRY_SECS = 1.0
_FLUSH_SECS = 10


def make_messages(
  model: str, epoch: int, version: int, variables: Mapping[str, np.ndarray]
) -> list[bytes]:
  """Returns the messages of a set.

  Args:
    model: name of the model.
    epoch: the writer's number.
    version: the step at which the variables were read.
    variables: array by name.
  """
  chunks: list[DenseSet] = [DenseSet()]
  room = _TENSOR_BYTES
  for name, piece in _pieces(variables):
    size = len(name) + len(piece) + 32
    if size > room:
      chunks.append(DenseSet())
      room = _TENSOR_BYTES
    chunks[-1].tensors.add(name=name, tensor=piece)
    room -= size
  now = time.time()
  for index, chunk in enumerate(chunks):
    chunk.model, chunk.epoch, chunk.version = model, epoch, version
    chunk.chunk, chunk.num_chunks, chunk.send_time = index, len(chunks), now
  return [frame(chunk.SerializeToString()) for chunk in chunks]


def _pieces(variables: Mapping[str, np.ndarray]) -> Iterator[tuple[str, bytes]]:
  for name, array in variables.items():
    serialized = tf.make_tensor_proto(array).SerializeToString()
    step = _TENSOR_BYTES - len(name) - 64
    for begin in range(0, len(serialized), step):
      yield name, serialized[begin : begin + step]


def select_variables(variables: Sequence[Any]) -> list[Any]:
  """Returns those of a training graph's variables that a served model may have: no optimizer's.

  What an optimizer keeps for a variable has its shape, a name below its name, and is not trained.
  """
  shapes = {variable.op.name: variable.shape.as_list() for variable in variables}

  def is_slot(variable: Any) -> bool:
    owner = variable.op.name.rpartition("/")[0]
    return not variable.trainable and shapes.get(owner) == variable.shape.as_list()

  return [variable for variable in variables if not is_slot(variable)]


def join_partitions(
  variables: Sequence[Any], values: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
  """Returns array by name, with the parts of partitioned variables put together."""
  found: dict[str, np.ndarray] = {}
  for variable, value in zip(variables, values):
    part = variable._get_save_slice_info()
    if part is None:
      found[variable.op.name] = value
      continue
    if part.full_name not in found:
      found[part.full_name] = np.empty(part.full_shape, value.dtype)
    found[part.full_name][slice_of(part)] = value
  return found


def slice_of(part: Any) -> tuple[slice, ...]:
  """Returns the place of a partition in its variable."""
  return tuple(slice(begin, begin + size) for begin, size in zip(part.var_offset, part.var_shape))


class DenseSetPublisher:
  """Sends sets from a thread of its own; a newer set replaces one that still waits.

  Args:
    servers: comma-separated `host:port` of brokers.
    model: name of the model in the topic.

  Attributes:
    published: the number of sets that brokers have acknowledged.
  """

  def __init__(self, servers: str, model: str):
    self._servers = servers
    self._model = model
    self._topic = topics.dense_topic(model)
    self.published = 0
    self._changed = threading.Condition()
    self._waiting: tuple[int, Mapping[str, np.ndarray]] | None = None
    self._closed = False
    self._thread = threading.Thread(target=self._run, name=self._topic, daemon=True)
    self._thread.start()

  def put(self, version: int, variables: Mapping[str, np.ndarray]) -> None:
    """Hands over a set to be sent; returns at once."""
    with self._changed:
      self._waiting = version, variables
      self._changed.notify_all()

  def close(self) -> None:
    """Sends the waiting set, up to a time limit for the broker, and ends the thread."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join(2 * _FLUSH_SECS)

  def _run(self) -> None:
    producer, epoch = None, 0
    failure = ""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting is not None or self._closed)
        if self._waiting is None:
          return
        version, variables = self._waiting
      try:
        if producer is None:
          epoch = read_log_ends(self._servers, self._topic, 1)[0].epoch + 1
          producer = kafka_client.make_producer(self._servers)
        self._send(producer, make_messages(self._model, epoch, version, variables))
        failure = ""
      except Exception as error:  # Training goes on, and so does this thread.
        if str(error) != failure:
          logging.warning("Cannot publish dense variables to %s: %s", self._topic, error)
        failure = str(error)
        with self._changed:
          if self._closed:
            return
          self._changed.wait(_RETRY_SECS)
        continue
      with self._changed:
        self.published += 1
        if self._waiting is not None and self._waiting[0] == version:
          self._waiting = None

  def _send(self, producer: Any, messages: Sequence[bytes]) -> None:
    errors: list[Any] = []

    def note(error: Any, _: Any) -> None:
      if error is not None:
        errors.append(error)

    for message in messages:
      producer.produce(self._topic, message, partition=0, on_delivery=note)
    if producer.flush(_FLUSH_SECS):
      producer.purge()
      raise ConnectionError(f"no broker took the set in {_FLUSH_SECS} s")
    if errors:
      raise ConnectionError(str(errors[0]))


class DenseSetHook(tf.compat.v1.train.SessionRunHook):
  """Publishes the dense variables of its session at intervals.

  Args:
    servers: comma-separated `host:port` of brokers.
    model: name of the model in the topic.
    interval_secs: time between two sets.
  """

  def __init__(self, servers: str, model: str, interval_secs: float):
    self._servers = servers
    self._model = model
    self._interval_secs = interval_secs
    self._variables: list[Any] = []
    self._reads: list[tf.Tensor] = []
    self._publisher: DenseSetPublisher | None = None
    self._next_secs = 0.0

  def begin(self) -> None:
    self._variables = select_variables(tf.compat.v1.global_variables())
    self._reads = [variable.read_value() for variable in self._variables]
    self._step = tf.compat.v1.train.get_or_create_global_step()

  def after_create_session(self, session: Any, coord: Any) -> None:
    del coord
    if self._publisher is None:
      self._publisher = DenseSetPublisher(self._servers, self._model)
    self._next_secs = time.monotonic() + self._interval_secs

  def after_run(self, run_context: Any, run_values: Any) -> None:
    del run_values
    if time.monotonic() >= self._next_secs:
      self._publish(run_context.session)

  def end(self, session: Any) -> None:
    """Publishes the last state, which the last checkpoint has."""
    self._publish(session)
    assert self._publisher is not None
    self._publisher.close()

  def _publish(self, session: Any) -> None:
    self._next_secs = time.monotonic() + self._interval_secs
    step, values = session.run([self._step, self._reads])
    assert self._publisher is not None
    self._publisher.put(int(step), join_partitions(self._variables, values))
