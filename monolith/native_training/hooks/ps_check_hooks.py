"""Watches the memory of parameter servers and stops training before one runs out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from monolith.native_training import barrier_ops, logging_ops, utils
from monolith.native_training.runtime.ops import logging_ops_pb2

_CHECK_INTERVAL_SECONDS = 30

Results = dict[int, logging_ops_pb2.MachineHealthResult]


def get_ps_machine_info_shared_name(index: int) -> str:
  """Returns the shared name of the machine info of parameter server `index`."""
  return f"ps_machine_info_{index}"


def _default_report(results: Results) -> None:
  """Logs one error per unhealthy parameter server."""
  for index, result in sorted(results.items()):
    status = logging_ops_pb2.MachineHealthResult.MachineHealthStatus.Name(result.status)
    logging.error("PS %d is not healthy: %s %s", index, status, result.message)


class Config(NamedTuple):
  """Configuration of `PsHealthCheckerHook`."""

  # Placed when a server is unhealthy.
  barrier_op: barrier_ops.BarrierOp
  num_ps: int
  # Index -> device of a parameter server, None for no device.
  ps_device_fn: Callable[[int], str | None] = utils.ps_device
  # Called with the results of the unhealthy servers.
  report_fn: Callable[[Results], None] = _default_report


class PsHealthCheckerHook(tf.compat.v1.train.SessionRunHook):
  """Checks the servers every 30 s; the first bad result is reported and places the barrier."""

  def __init__(self, config: Config):
    self._config = config
    self._status: list[tf.Tensor] = []
    self._thread: threading.Thread | None = None

  def begin(self) -> None:
    self._status = []
    for i in range(self._config.num_ps):
      with tf.device(self._config.ps_device_fn(i)):
        info = logging_ops.machine_info(shared_name=get_ps_machine_info_shared_name(i))
        self._status.append(logging_ops.check_machine_health(info))

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._thread = threading.Thread(
      target=self._watch, args=(session, coord), name="PsHealthChecker", daemon=True
    )
    coord.register_thread(self._thread)
    self._thread.start()

  def _watch(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
    # Tells the coordinator of a broken or closed session, which would go unnoticed otherwise.
    with coord.stop_on_exception():
      while not coord.should_stop():
        results = self._get_bad_results(session)
        if results:
          self._config.report_fn(results)
          self._place_barrier(session)
          coord.wait_for_stop()
          return
        coord.wait_for_stop(_CHECK_INTERVAL_SECONDS)

  def _get_bad_results(self, session: tf.compat.v1.Session) -> Results:
    results = {}
    for i, status in enumerate(session.run(self._status)):
      if status:
        results[i] = logging_ops_pb2.MachineHealthResult.FromString(status)
    return results

  def _place_barrier(self, session: tf.compat.v1.Session) -> None:
    try:
      self._config.barrier_op.place_barrier(session)
    except barrier_ops.BarrierAlreadyPlacedError:
      logging.info("The barrier is placed already; the workers wait anyway.")
