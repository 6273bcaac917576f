"""Ranks that are threads of one process, each with a graph and a session of its own.

What Horovod does between processes is done here between threads, so that several ranks can be
tested where it is not installed, and share one GPU. Collectives are matched by name.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import hvd_lib

_TIMEOUT_SECS = 120


def session_config(**settings: Any) -> tf.compat.v1.ConfigProto:
  """Returns a configuration with threads enough for collectives that wait for one another."""
  return tf.compat.v1.ConfigProto(
    inter_op_parallelism_threads=8, use_per_session_threads=True, **settings
  )


class Ranks:
  """A number of ranks.

  Args:
    size: how many.
  """

  def __init__(self, size: int):
    self.size = size
    self._changed = threading.Condition()
    self._sent: dict[tuple[str, int], dict[int, Any]] = {}
    self._failed = False

  def run(self, function: Callable[[int], Any], graphs: list[tf.Graph]) -> list[Any]:
    """Calls `function(rank)` in a thread of each rank, under its graph; returns their results."""

    def call(rank: int) -> Any:
      try:
        with graphs[rank].as_default():
          return function(rank)
      except BaseException:
        with self._changed:
          self._failed = True
          self._changed.notify_all()
        raise

    with concurrent.futures.ThreadPoolExecutor(self.size) as pool:
      futures = [pool.submit(call, rank) for rank in range(self.size)]
      return [future.result() for future in futures]

  def build(self, function: Callable[[int], Any]) -> tuple[list[tf.Graph], list[Any]]:
    """Calls `function(rank)` for one rank after the other; returns their graphs and its results."""
    graphs, results = [], []
    for rank in range(self.size):
      graphs.append(tf.Graph())
      with graphs[-1].as_default(), mock.patch.object(hvd_lib._backend, "_lib", _Rank(self, rank)):
        results.append(function(rank))
    return graphs, results

  def exchange(self, name: str, count: int, rank: int, value: Any) -> list[Any]:
    """Returns what all ranks send under a name in their `count`-th call."""
    key = (name, count)
    with self._changed:
      sent = self._sent.setdefault(key, {})
      sent[rank] = value
      self._changed.notify_all()
      done = self._changed.wait_for(
        lambda: self._failed or len(sent) == self.size, timeout=_TIMEOUT_SECS
      )
      if self._failed or not done:
        raise RuntimeError(f"{name}: rank {rank} waits for others; {sorted(sent)} came")
      return [sent[i] for i in range(self.size)]


class _Rank:
  """Stands in for the part of Horovod that `hvd_lib` uses, for one rank."""

  def __init__(self, ranks: Ranks, rank: int):
    self._ranks = ranks
    self._rank = rank

  def is_initialized(self) -> bool:
    return True

  def rank(self) -> int:
    return self._rank

  def size(self) -> int:
    return self._ranks.size

  def alltoall(self, tensor: Any, splits: Any, name: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    call = self._counted(name)

    def exchange(rows: np.ndarray, splits: np.ndarray) -> np.ndarray:
      if splits.sum() != len(rows):
        raise ValueError(f"{name}: splits are {splits}, want {len(rows)} in all")
      received = call(np.split(rows, np.cumsum(splits)[:-1]))
      return np.concatenate([parts[self._rank] for parts in received])

    result = tf.numpy_function(
      exchange, [tensor, tf.convert_to_tensor(splits, tf.int32)], tensor.dtype, name=name
    )
    result.set_shape([None, *tensor.shape[1:]])
    return result

  def allgather(self, tensor: Any, name: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    call = self._counted(name)
    result = tf.numpy_function(
      lambda rows: np.concatenate(call(rows)), [tensor], tensor.dtype, name=name
    )
    result.set_shape([None, *tensor.shape[1:]])
    return result

  def _counted(self, name: str) -> Callable[[Any], list[Any]]:
    counts = iter(range(10**9))
    return lambda value: self._ranks.exchange(name, next(counts), self._rank, value)
