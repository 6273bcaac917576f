"""Hooks that report on a training run: speed, losses, profiles, messages about predictions.

Kafka is an optional dependency and imported when first used.

Differences from ByteDance's Monolith: the singletons keep their state when they are constructed
again, their queues are bounded and drained at the end, and speed is not reported for runs that do
not move the global step.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags, logging
from tensorflow.python.training import training_util

from monolith.native_training import utils
from monolith.native_training.metric import cli, kafka_utils
from monolith.native_training.metric.file_metric_hook import (
  FileMetricHook,
  WriteOnlyFileAndStat,
  default_layout_fn,
  default_parse_fn,
  vepfs_key_fn,
  vepfs_layout_fn,
)

__all__ = [
  "CustomMetricHook",
  "FileMetricHook",
  "KafkaMetricHook",
  "NVProfilerHook",
  "StepLossMetricHook",
  "Tf2ProfilerHook",
  "ThroughputMetricHook",
  "WriteOnlyFileAndStat",
  "default_layout_fn",
  "default_parse_fn",
  "vepfs_key_fn",
  "vepfs_layout_fn",
]

_PROFILER_PORT = 6666
# Without a start step, begin this many steps after the first one, and profile that many.
_DEFAULT_PROFILE_DELAY = 500
_DEFAULT_PROFILE_STEPS = 10
_DEEP_INSIGHT_OP = "deep_insight_op"


class ThroughputMetricHook(tf.compat.v1.train.SessionRunHook):
  """Reports steps and seconds per step.

  Args:
    model_name: tag of the metrics.
    start_time_secs: when the cluster was ready, in unix seconds; `None` if unknown.
    cluster_type: tag of the metrics.
    run_every_n_secs: how often to report.
  """

  def __init__(
    self,
    model_name: str,
    start_time_secs: float | None,
    cluster_type: str = "stable",
    run_every_n_secs: float = 30,
  ):
    self._tagkv = {"model_name": model_name or "", "cluster_type": cluster_type}
    self._start_time_secs = start_time_secs
    self._run_every_n_secs = run_every_n_secs
    self._client = cli.get_cli(utils.get_metric_prefix())
    self._global_step_tensor: tf.Tensor | None = None
    self._last_step: int | None = None
    self._last_time = 0.0

  def begin(self) -> None:
    self._global_step_tensor = training_util._get_or_create_global_step_read()

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    is_due = time.time() - self._last_time >= self._run_every_n_secs
    # A fetch costs every step more than this whole hook.
    return tf.compat.v1.train.SessionRunArgs(self._global_step_tensor) if is_due else None

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if run_values.results is None:
      return
    step, now = int(run_values.results), time.time()
    if self._last_step is None:
      if self._start_time_secs is not None:
        self._client.emit_timer(
          "run_start_elapsed_time.all", now - self._start_time_secs, self._tagkv
        )
      self._last_step, self._last_time = step, now
      return
    elapsed = now - self._last_time
    steps = step - self._last_step
    if steps > 0:
      self._client.emit_counter("run_steps.all", steps, self._tagkv)
      self._client.emit_timer("run_steps_elapsed_time.all", elapsed / steps, self._tagkv)
    self._last_step, self._last_time = step, now


class StepLossMetricHook(tf.compat.v1.train.SessionRunHook):
  """Reports the loss of every step.

  Args:
    loss_tensor: a scalar.
  """

  def __init__(self, loss_tensor: tf.Tensor):
    self._loss_tensor = loss_tensor
    self._client = cli.get_cli(utils.get_metric_prefix())

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._loss_tensor)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    self._client.emit_store("step_loss", float(run_values.results))


class CustomMetricHook(tf.compat.v1.train.SessionRunHook):
  """Reports scalars of every step.

  Args:
    metric_tensors: metric name -> scalar of float32 or int32.

  Raises:
    ValueError: there are none, or one is not such a scalar.
  """

  def __init__(self, metric_tensors: Mapping[str, tf.Tensor]):
    if not metric_tensors:
      raise ValueError("metric_tensors is empty")
    for name, tensor in metric_tensors.items():
      if tensor.shape.rank != 0:
        raise ValueError(f"metric {name} has shape {tensor.shape}, want a scalar")
      if tensor.dtype not in (tf.float32, tf.int32):
        raise ValueError(f"metric {name} is {tensor.dtype.name}, want float32 or int32")
    self._metric_tensors = dict(metric_tensors)
    self._client = cli.get_cli(utils.get_metric_prefix())

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._metric_tensors)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    for name, value in run_values.results.items():
      self._client.emit_store(name, value.item())


class _ProfilerHook(tf.compat.v1.train.SessionRunHook):
  """The schedule of a profiler: a window of steps, again and again. Counts its own steps from 1."""

  def __init__(
    self,
    init_step_range: Sequence[int | None],
    save_steps: int | None = None,
    save_secs: float | None = None,
    first_within_secs: float | None = None,
  ):
    start, end = init_step_range
    if start is not None and (end is None or end <= start):
      raise ValueError(f"End step invalid, the window is {init_step_range}")
    self._start_step = start
    self._length = _DEFAULT_PROFILE_STEPS if start is None else end - start
    if save_steps is not None and save_steps <= self._length:
      raise ValueError(
        f"save_steps is {save_steps}, want more than the {self._length} steps of a profile"
      )
    self._first_within_secs = first_within_secs if start is None else None
    self._first_step_time = 0.0
    self._end_step: int | None = None
    self._count = 0
    self._profiling = False
    self._timer = tf.compat.v1.train.SecondOrStepTimer(every_steps=save_steps, every_secs=save_secs)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    self._count += 1
    if self._start_step is None:
      self._start_step = self._count + _DEFAULT_PROFILE_DELAY
      self._first_step_time = time.monotonic()
    if self._first_within_secs is not None:
      if time.monotonic() - self._first_step_time >= self._first_within_secs:
        self._start_step = min(self._start_step, self._count)
        self._first_within_secs = None
    if self._count < self._start_step:
      return
    if self._profiling and self._count >= self._end_step:
      self._profiling = False
      self._stop()
    if not self._profiling and self._timer.should_trigger_for_step(self._count):
      self._timer.update_last_triggered_step(self._count)
      self._end_step = self._count + self._length
      self._profiling = self._start()

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._profiling:
      self._profiling = False
      self._stop()

  def _start(self) -> bool:
    raise NotImplementedError

  def _stop(self) -> None:
    raise NotImplementedError


class Tf2ProfilerHook(_ProfilerHook):
  """Writes TensorFlow profiles to `<logdir>/plugins/profile/<time>/`.

  Args:
    logdir: where profiles go.
    init_step_range: `[start, end)` of the first profile; with `[None, None]` ten steps from 500
      steps after the first one.
    save_steps: steps between the starts of profiles.
    save_secs: seconds between them; exactly one of both is needed.
    options: a `tf.profiler.experimental.ProfilerOptions`.
    first_within_secs: with `[None, None]` the first profile starts no later than this many seconds
      after the first step.

  Raises:
    ValueError: the window is empty, or profiles would overlap.
  """

  def __init__(
    self,
    logdir: str,
    init_step_range: Sequence[int | None],
    save_steps: int | None = None,
    save_secs: float | None = None,
    options: Any = None,
    first_within_secs: float | None = None,
  ):
    super().__init__(init_step_range, save_steps, save_secs, first_within_secs)
    self._logdir = logdir
    self._options = options

  def begin(self) -> None:
    if not _is_sync_training():
      return
    try:
      tf.profiler.experimental.server.start(_PROFILER_PORT)
    except Exception:  # A profiler must never stop training.
      logging.exception("The profiler server did not start.")

  def _start(self) -> bool:
    try:
      tf.profiler.experimental.start(self._logdir, options=self._options)
    except tf.errors.AlreadyExistsError:
      logging.warning("Another profiler is running already.")
      return False
    return True

  def _stop(self) -> None:
    try:
      tf.profiler.experimental.stop()
    except tf.errors.UnavailableError:
      logging.warning("The profiler was stopped elsewhere.")


def _is_sync_training() -> bool:
  flag = flags.FLAGS
  return "enable_sync_training" in flag and flag.is_parsed() and bool(flag.enable_sync_training)


class NVProfilerHook(_ProfilerHook):
  """Starts and stops NVIDIA's profiler, under which the process must have been started.

  Args:
    init_step_range: `[start, end)` of the first profile.
    save_steps: steps between the starts of profiles; by default there is only one.
    save_secs: seconds between them.
  """

  def __init__(
    self,
    init_step_range: Sequence[int | None],
    save_steps: int | None = None,
    save_secs: float | None = None,
  ):
    if save_steps is None and save_secs is None:
      save_steps = 1 << 62
    super().__init__(init_step_range, save_steps, save_secs)
    self._cudart: ctypes.CDLL | None = None
    try:
      self._cudart = ctypes.CDLL("libcudart.so")
    except OSError:
      logging.warning("libcudart.so cannot be loaded: there will be no CUDA profile.")

  def _start(self) -> bool:
    return self._call("cudaProfilerStart")

  def _stop(self) -> None:
    self._call("cudaProfilerStop")

  def _call(self, name: str) -> bool:
    if self._cudart is None:
      return False
    code = getattr(self._cudart, name)()
    if code != 0:
      logging.warning("%s returned %d", name, code)
    return code == 0


class KafkaMetricHook(tf.compat.v1.train.SessionRunHook):
  """Sends the messages of deep insight to Kafka; one per process.

  Needs `KAFKA_BROKER_LIST` and `KAFKA_TOPIC_NAME` in the environment, and does nothing without.

  Args:
    deep_insight_op: string messages; what `run_values` brings under that name if `None`.
  """

  _instance: KafkaMetricHook | None = None
  _lock = threading.Lock()

  def __new__(cls, *args: Any, **kwargs: Any) -> KafkaMetricHook:
    with cls._lock:
      if cls._instance is None:
        cls._instance = super().__new__(cls)
        cls._instance._producer = None
      return cls._instance

  def __init__(self, deep_insight_op: tf.Tensor | None = None):
    self._deep_insight_op = deep_insight_op
    brokers = os.environ.get("KAFKA_BROKER_LIST")
    topic = os.environ.get("KAFKA_TOPIC_NAME")
    if self._producer is None and brokers and topic:
      self._producer = kafka_utils.KProducer(brokers, topic)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    if self._producer is None or self._deep_insight_op is None:
      return None
    return tf.compat.v1.train.SessionRunArgs({_DEEP_INSIGHT_OP: self._deep_insight_op})

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if self._producer is None or not run_values.results:
      return
    msgs = run_values.results.get(_DEEP_INSIGHT_OP)
    if msgs is not None:
      self._producer.send(msgs if isinstance(msgs, (str, bytes)) else list(msgs))

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._producer is not None:
      producer, self._producer = self._producer, None
      producer.close()
      logging.info(
        "Kafka messages: %d sent, %d confirmed, %d lost.",
        producer.total(),
        producer.success(),
        producer.failed(),
      )
