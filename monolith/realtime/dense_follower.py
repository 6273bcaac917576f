"""Keeps the dense variables of a served model as new as the sets that training publishes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.core.framework import tensor_pb2

from monolith.realtime.log_follower import LogFollower, PoisonedError
from monolith.realtime.row_log_pb2 import DenseSet
from monolith.row_log.dense_sets import slice_of
from monolith.row_log.framing import unframe
from monolith.row_log.sync_state import SyncState
from monolith.serving.servable import Servable


class DenseAssigner:
  """Sets all variables of a served model between two requests.

  Args:
    servable: the model; requests of it go through a gate from now on.
  """

  def __init__(self, servable: Servable):
    self._session = servable.session
    self._gate = servable.make_gate()
    graph = self._session.graph
    self._variables: list[Any] = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    with graph.as_default():
      self._feeds = [
        tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
        for variable in self._variables
      ]
      assigns = [
        variable.assign(feed, read_value=False)
        for variable, feed in zip(self._variables, self._feeds)
      ]
      self._assign = tf.group(*[getattr(assign, "op", assign) for assign in assigns])
      step = tf.compat.v1.train.get_global_step(graph)
    self.step = 0 if step is None else int(self._session.run(step))
    # What a session does at its first run of something is not for the first set to wait for.
    self._call = self._session.make_callable(self._assign, self._feeds)

  @property
  def has_variables(self) -> bool:
    """Whether there is something to set."""
    return bool(self._variables)

  def assign(self, tensors: dict[str, bytes]) -> None:
    """Sets every variable.

    Args:
      tensors: serialized `TensorProto` by name of the variable.

    Raises:
      PoisonedError: one is missing, cannot be read or does not fit; none is set.
    """
    values = []
    for variable in self._variables:
      part = variable._get_save_slice_info()
      name = variable.op.name if part is None else part.full_name
      if name not in tensors:
        raise PoisonedError(f"the set lacks {name!r} and has {sorted(tensors)[:16]}")
      shape = variable.shape.as_list() if part is None else list(part.full_shape)
      value = _read_tensor(name, tensors[name], variable.dtype.base_dtype, shape)
      values.append(value if part is None else value[slice_of(part)])
    with self._gate.closed():
      self._call(*values)


class DenseFollower(LogFollower):
  """Assigns each complete set that is newer than the variables.

  Args:
    servers: comma-separated `host:port` of brokers.
    state: where the export was in the log of sets.
    assigner: the variables.
    interval_secs: how long messages may wait; 0 takes them as they come.

  Attributes:
    epoch: writer of the newest set.
    version: step of the newest set.
    sets: how many were assigned.
  """

  def __init__(
    self, servers: str, state: SyncState, assigner: DenseAssigner, interval_secs: float = 0
  ):
    super().__init__(servers, state, interval_secs)
    self._assigner = assigner
    self.epoch = state.epoch
    self.version = assigner.step
    self.sets = 0
    self._number: tuple[int, int, int] | None = None
    self._chunks: dict[int, DenseSet] = {}

  def begin_after_gap(self, low: int, high: int) -> bool:
    """Any set is whole: one that is gone is made up for by the next."""
    del low, high
    return True

  def handle(self, offset: int, value: bytes) -> None:
    try:
      chunk = DenseSet.FromString(unframe(value))
    except Exception as error:  # What protobuf raises differs between its implementations.
      raise PoisonedError(f"{len(value)} bytes are no set of variables: {error}") from error
    if not 0 <= chunk.chunk < chunk.num_chunks:
      raise PoisonedError(f"it is chunk {chunk.chunk} of {chunk.num_chunks}")
    # An export that was made before the first set knows no epoch, only its own step.
    if (chunk.epoch if self.epoch else 0, chunk.version) <= (self.epoch, self.version):
      return
    number = (chunk.epoch, chunk.version, chunk.num_chunks)
    if number != self._number:
      if self._number is not None and number < self._number:
        return
      self._number, self._chunks = number, {}
    self._chunks[chunk.chunk] = chunk
    if len(self._chunks) < chunk.num_chunks:
      return
    chunks = [self._chunks[index] for index in range(chunk.num_chunks)]
    self._number, self._chunks = None, {}
    self._assigner.assign(_join_pieces(chunks))
    self.epoch, self.version = chunk.epoch, chunk.version
    self.sets += 1
    logging.info("Dense variables of %s are those of step %d", self.name, chunk.version)


def _join_pieces(chunks: list[DenseSet]) -> dict[str, bytes]:
  pieces: dict[str, list[bytes]] = {}
  for chunk in chunks:
    for tensor in chunk.tensors:
      pieces.setdefault(tensor.name, []).append(tensor.tensor)
  return {name: b"".join(parts) for name, parts in pieces.items()}


def _read_tensor(name: str, serialized: bytes, dtype: tf.DType, shape: list[int]) -> np.ndarray:
  try:
    proto = tensor_pb2.TensorProto.FromString(serialized)
    found = [dim.size for dim in proto.tensor_shape.dim]
    # Before the array is made: a few bytes can name any shape.
    if proto.dtype != dtype.as_datatype_enum or found != shape:
      have = tf.dtypes.as_dtype(proto.dtype).name
      raise PoisonedError(f"{name!r} is {have}{found}, want {dtype.name}{shape}")
    return tf.make_ndarray(proto)
  except PoisonedError:
    raise
  except Exception as error:  # What protobuf raises differs between its implementations.
    raise PoisonedError(f"tensor {name!r} cannot be read: {error}") from error
