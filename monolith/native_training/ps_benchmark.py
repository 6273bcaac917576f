"""Measures parameter servers and keeps the fastest.

Every worker lets all servers compute for a while at the same time. The mean throughput that the
workers see decides. Servers on one machine share it, so what the slower ones did is added to a
faster one: the best server of each machine stands for the whole machine, and comes before the
second of any other that is not faster.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.core import hyperparams
from monolith.native_training import graph_estimator, native_task, utils

_SCOPE_NAME = "machine_benchmark_I_AM_PECULIAR"

_MATRIX_SIZE = 256
_NUM_SPLITS = 4
_READY_SHARE = 0.9
_SETTLE_SECS = 1
_POLL_SECS = 0.5
_DONE_TIMEOUT_SECS = 10
_WAIT_TIMEOUT_SECS = 3600


@dataclasses.dataclass
class BenchmarkConfig:
  """Chooses the measurement.

  Attributes:
    ps_list: addresses of all servers; replaced, in place, by the chosen ones.
    num_ps_required: how many to choose.
    num_workers: how many workers measure.
    index: this worker's index.
    benchmark_secs: how long to measure.
    ps_str_overridden: comma-separated servers to choose without measuring; only the first
      `num_ps_required` are used.
  """

  ps_list: list
  num_ps_required: int
  num_workers: int
  index: int
  benchmark_secs: float = 60.0
  ps_str_overridden: str = ""


class _BenchmarkWorkerHook(tf.compat.v1.train.SessionRunHook):
  """Starts all workers at the same time, and lets worker 0 choose at the end.

  Args:
    bm_config: what to measure; its `ps_list` is rewritten.
    throughput_tensor: float `[servers]`, the mean over all workers.

  Raises:
    ValueError: the overriding list has fewer servers than are required.
  """

  def __init__(self, bm_config: BenchmarkConfig, throughput_tensor: tf.Tensor):
    overridden = bm_config.ps_str_overridden
    if overridden and len(overridden.split(",")) < bm_config.num_ps_required:
      raise ValueError(
        f"ps_str_overridden is {overridden!r}, want {bm_config.num_ps_required} servers"
      )
    self._bm_config = bm_config
    self._throughput_tensor = throughput_tensor
    self._start_time = 0.0
    num_workers = bm_config.num_workers
    with tf.compat.v1.variable_scope(_SCOPE_NAME, reuse=tf.compat.v1.AUTO_REUSE):
      result = _create_variable("result", tf.constant("", tf.string))
      ready = [_create_variable(f"ready_{i}", tf.constant(False)) for i in range(num_workers)]
      done = [_create_variable(f"done_{i}", tf.constant(False)) for i in range(num_workers)]
      self._result = result.read_value()
      self._ready = [variable.read_value() for variable in ready]
      self._done = [variable.read_value() for variable in done]
      self._make_ready = ready[bm_config.index].assign(True).op
      self._make_done = done[bm_config.index].assign(True).op
      self._result_placeholder = tf.compat.v1.placeholder(tf.string, [], name="result_ph")
      self._result_assign = result.assign(self._result_placeholder).op

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    session.run(self._make_ready)
    want = int(self._bm_config.num_workers * _READY_SHARE)
    self._wait(lambda: sum(session.run(self._ready)) >= want)
    time.sleep(_SETTLE_SECS)
    self._start_time = time.monotonic()

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    session = run_context.session
    if self._bm_config.ps_str_overridden:
      self._set_result(session, self._bm_config.ps_str_overridden)
    if session.run(self._result):
      raise tf.errors.OutOfRangeError(None, None, "The servers have been chosen already.")

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    logging.info("The benchmark took %.1f s.", time.monotonic() - self._start_time)
    run_context.request_stop()

  def end(self, session: tf.compat.v1.Session) -> None:
    session.run(self._make_done)
    self._wait(lambda: all(session.run(self._done)), timeout=_DONE_TIMEOUT_SECS)
    if self._bm_config.index == 0 and not self._bm_config.ps_str_overridden:
      chosen = _choose(
        self._bm_config.ps_list,
        session.run(self._throughput_tensor),
        self._bm_config.num_ps_required,
      )
      self._set_result(session, ",".join(chosen))
    self._wait(lambda: session.run(self._result))
    result = tf.compat.as_str(session.run(self._result))
    self._bm_config.ps_list[:] = result.split(",")[: self._bm_config.num_ps_required]

  def _set_result(self, session: tf.compat.v1.Session, result: str) -> None:
    session.run(self._result_assign, {self._result_placeholder: result})

  def _wait(self, cond: Callable[[], Any], timeout: float = _WAIT_TIMEOUT_SECS) -> bool:
    """Polls until `cond()` holds; returns whether it did in time."""
    deadline = time.monotonic() + timeout
    while not cond():
      if time.monotonic() >= deadline:
        return False
      time.sleep(_POLL_SECS)
    return True


def _create_variable(name: str, initial_value: tf.Tensor) -> tf.Variable:
  return tf.compat.v1.get_variable(
    name, initializer=initial_value, trainable=False, use_resource=True
  )


def _choose(ps_list: Sequence[str], throughputs: Sequence[float], num_required: int) -> list[str]:
  """Returns the fastest servers, best first; a server counts with the slower ones of its IP."""
  by_ip: dict[str, float] = collections.defaultdict(float)
  scores: list[tuple[float, str]] = []
  for addr, throughput in sorted(zip(ps_list, throughputs), key=lambda pair: float(pair[1])):
    ip = addr.split(":")[0]
    by_ip[ip] += float(throughput)
    scores.append((by_ip[ip], addr))
    logging.info("Throughput of %s: %.2f, with slower ones there %.2f", addr, throughput, by_ip[ip])
  ranked = sorted(scores, key=lambda pair: -pair[0])
  return [addr for _, addr in ranked[:num_required]]


class _DummyCheckpointSaverHook(tf.compat.v1.train.CheckpointSaverHook):
  """Keeps Estimator from adding a hook that really saves.

  Args:
    checkpoint_dir: `$HOME/tmp` by default; nothing is written there.
  """

  def __init__(self, checkpoint_dir: str | None = None):
    checkpoint_dir = checkpoint_dir or os.path.join(os.path.expanduser("~"), "tmp")
    super().__init__(checkpoint_dir, save_steps=1)

  def begin(self) -> None:
    pass

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    pass

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    pass

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    pass

  def end(self, session: tf.compat.v1.Session) -> None:
    pass

  def _save(self, session: tf.compat.v1.Session, step: int) -> bool:
    return False


class PsBenchMarkTask(native_task.NativeTask):
  """Chooses servers by their speed; trains nothing."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("bm_config", None, "A BenchmarkConfig.")
    return p

  def __init__(self, params: hyperparams.Params):
    super().__init__(params)
    self._bm_config: BenchmarkConfig = params.bm_config

  def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
    def input_fn() -> tf.data.Dataset:
      dataset = tf.data.Dataset.from_tensors(tf.constant([0.12, 0.23, 0.34, 0.45]))
      return dataset.repeat().prefetch(tf.data.AUTOTUNE)

    return input_fn

  def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
    def model_fn(
      features: tf.Tensor, mode: str, config: Any = None
    ) -> graph_estimator.EstimatorSpec:
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=tf.constant(0.0))
      throughputs = []
      for i in range(len(self._bm_config.ps_list)):
        with tf.device(utils.ps_device(i)):
          matrix = tf.compat.v1.get_variable(
            f"{_SCOPE_NAME}_matrix_{i}", shape=[_MATRIX_SIZE, _MATRIX_SIZE], trainable=False
          )
          throughputs.append(self._measure(matrix, features))
      mean, update_mean = tf.compat.v1.metrics.mean_tensor(tf.stack(throughputs))
      global_step = tf.compat.v1.train.get_or_create_global_step()
      return graph_estimator.EstimatorSpec(
        mode,
        loss=tf.constant(0.0),
        train_op=tf.group(update_mean, tf.compat.v1.assign_add(global_step, 1)),
        training_hooks=[_BenchmarkWorkerHook(self._bm_config, mean)],
        training_chief_hooks=[_DummyCheckpointSaverHook()],
      )

    return model_fn

  def _measure(self, matrix: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
    """Returns how many rounds of arithmetic per second the server of `matrix` does."""
    start = tf.timestamp()
    end = start + self._bm_config.benchmark_secs

    def work(rounds: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      parts = tf.split(value, _NUM_SPLITS, axis=0)
      parts = [tf.sqrt(tf.abs(part) + features[i]) for i, part in enumerate(parts)]
      return rounds + 1.0, tf.concat(parts[::-1], axis=0)

    rounds, value = tf.while_loop(
      lambda rounds, value: tf.timestamp() < end,
      work,
      (tf.constant(0.0), tf.convert_to_tensor(matrix)),
      parallel_iterations=1,
    )
    with tf.control_dependencies([value]):
      elapsed = tf.maximum(tf.timestamp() - start, 1e-6)
    return rounds / tf.cast(elapsed, tf.float32)
