"""Several requests in one run of the session.

The first request of a batch leads it: it waits until the batch is full, or its time is up, and for
a place among the runs; then it runs the batch and wakes the others. There are no threads beside
those of the requests.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping

import grpc
import numpy as np
import tensorflow as tf

from monolith.serving import text_config
from monolith.serving.errors import ServingError, invalid
from monolith.serving.servable import Servable, Signature

_DEFAULT_BATCH_SIZE = 1000
_DEFAULT_TIMEOUT_MICROS = 0
_DEFAULT_ENQUEUED = 10
_DEFAULT_THREADS = 4


@dataclasses.dataclass(frozen=True)
class BatchingParameters:
  """When a batch runs.

  Attributes:
    max_batch_size: most rows in a batch; a larger request runs alone.
    batch_timeout_micros: how long a request waits for others.
    max_enqueued_batches: further ones are refused with UNAVAILABLE.
    num_batch_threads: how many batches run at a time.
    allowed_batch_sizes: if given, batches are filled up to the next of these.
  """

  max_batch_size: int = _DEFAULT_BATCH_SIZE
  batch_timeout_micros: int = _DEFAULT_TIMEOUT_MICROS
  max_enqueued_batches: int = _DEFAULT_ENQUEUED
  num_batch_threads: int = _DEFAULT_THREADS
  allowed_batch_sizes: tuple[int, ...] = ()

  @classmethod
  def from_file(cls, path: str) -> BatchingParameters:
    """Reads a `BatchingParameters` message in text format.

    Raises:
      ServingError: INVALID_ARGUMENT, it cannot be read or says what cannot be.
    """
    message = text_config.read("BatchingParameters", path)
    given = {
      field.name: getattr(message, field.name).value
      for field, _ in message.ListFields()
      if field.name != "allowed_batch_sizes"
    }
    result = cls(**given, allowed_batch_sizes=tuple(message.allowed_batch_sizes))
    for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads"):
      if getattr(result, name) < 1:
        raise invalid(f"{path}: {name} is {getattr(result, name)}, want at least 1")
    if result.batch_timeout_micros < 0:
      raise invalid(f"{path}: batch_timeout_micros is {result.batch_timeout_micros}")
    sizes = result.allowed_batch_sizes
    if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != result.max_batch_size):
      raise invalid(
        f"{path}: allowed_batch_sizes is {list(sizes)}, want growing numbers up to max_batch_size "
        f"{result.max_batch_size}"
      )
    return result


class _Batch:
  """Requests that run together; `closed` and what grows change under the batcher's lock."""

  def __init__(self) -> None:
    self.requests: list[Mapping[str, np.ndarray]] = []
    self.rows = 0
    self.closed = False
    self.done = threading.Event()
    self.answers: list[dict[str, np.ndarray]] | None = None


class Batcher:
  """A `prediction.Runner` that batches. Thread-safe.

  Args:
    parameters: when a batch runs.
  """

  def __init__(self, parameters: BatchingParameters):
    self._parameters = parameters
    self._changed = threading.Condition()
    self._open: dict[tuple, _Batch] = {}
    self._waiting = 0
    self._running = 0

  def __call__(
    self,
    servable: Servable,
    signature: Signature,
    inputs: Mapping[str, np.ndarray],
    outputs: tuple[str, ...],
  ) -> dict[str, np.ndarray]:
    """Runs a signature, together with other requests where that is possible.

    Raises:
      ServingError: UNAVAILABLE, too many batches wait.
      tf.errors.OpError: the graph failed.
    """
    rows = _count_rows(signature, inputs, outputs)
    if rows is None or rows > self._parameters.max_batch_size:
      return servable.run(signature, inputs, outputs)
    shapes = tuple((key, inputs[key].shape[1:]) for key in signature.inputs)
    batch, place, leads = self._join((id(servable), signature.name, outputs, shapes), inputs, rows)
    if leads:
      self._lead(batch, servable, signature, outputs)
    else:
      batch.done.wait()
    if batch.answers is None:
      # One request of the batch may have failed it for all: each has a second chance of its own.
      return servable.run(signature, inputs, outputs)
    return batch.answers[place]

  def _join(
    self, key: tuple, inputs: Mapping[str, np.ndarray], rows: int
  ) -> tuple[_Batch, int, bool]:
    with self._changed:
      batch = self._open.get(key)
      leads = batch is None or batch.closed
      if batch is not None and not leads:
        if batch.rows + rows > self._parameters.max_batch_size:
          batch.closed, leads = True, True
          self._changed.notify_all()
      if leads:
        if self._waiting >= self._parameters.max_enqueued_batches:
          raise ServingError(
            grpc.StatusCode.UNAVAILABLE, f"{self._waiting} batches wait already to be run"
          )
        self._waiting += 1
        batch = self._open[key] = _Batch()
      assert batch is not None
      batch.requests.append(inputs)
      batch.rows += rows
      if batch.rows == self._parameters.max_batch_size:
        batch.closed = True
        self._changed.notify_all()
      return batch, len(batch.requests) - 1, leads

  def _lead(
    self, batch: _Batch, servable: Servable, signature: Signature, outputs: tuple[str, ...]
  ) -> None:
    deadline = time.monotonic() + self._parameters.batch_timeout_micros / 1e6
    with self._changed:
      self._changed.wait_for(lambda: batch.closed, max(0.0, deadline - time.monotonic()))
      self._changed.wait_for(lambda: self._running < self._parameters.num_batch_threads)
      batch.closed = True
      self._waiting -= 1
      self._running += 1
      for key in [key for key, open_batch in self._open.items() if open_batch is batch]:
        del self._open[key]
    try:
      batch.answers = self._run(batch, servable, signature, outputs)
    except tf.errors.OpError:
      if len(batch.requests) == 1:
        raise
    finally:
      with self._changed:
        self._running -= 1
        self._changed.notify_all()
      batch.done.set()

  def _run(
    self, batch: _Batch, servable: Servable, signature: Signature, outputs: tuple[str, ...]
  ) -> list[dict[str, np.ndarray]] | None:
    sizes = [len(next(iter(request.values()))) for request in batch.requests]
    target = next((n for n in self._parameters.allowed_batch_sizes if n >= batch.rows), batch.rows)
    joined = {}
    for key in signature.inputs:
      parts = [request[key] for request in batch.requests]
      if target > batch.rows:
        filler = next(part for part in parts if len(part))[:1]
        parts.append(np.repeat(filler, target - batch.rows, axis=0))
      joined[key] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    answer = servable.run(signature, joined, outputs)
    if any(array.ndim == 0 or len(array) != target for array in answer.values()):
      return None  # not one row of output per row of input: cannot be divided
    ends = np.cumsum(sizes)
    return [
      {key: array[end - size : end] for key, array in answer.items()}
      for size, end in zip(sizes, ends)
    ]


def _count_rows(
  signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]
) -> int | None:
  """Returns how many rows a request has; None if it cannot be joined with others."""
  for key in outputs:
    shape = signature.outputs[key].tensor_shape
    if not shape.unknown_rank and (not shape.dim or shape.dim[0].size != -1):
      return None
  sizes = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
  return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None
