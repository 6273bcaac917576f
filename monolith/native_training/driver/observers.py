"""The hooks that only watch a training run: what they show, profile or report changes no step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from monolith.native_training import graph_estimator, hash_table_ops, multi_hash_table_ops
from monolith.native_training.data import stream_positions, stream_status
from monolith.native_training.hooks import progress
from monolith.native_training.metric import metric_hook
from monolith.native_training.metric.heads import HEADS_COLLECTION
from monolith.native_training.models import shown_loss
from monolith.native_training.settings.training_config import CpuTrainingConfig

_PROFILED_STEPS = 10
# Where steps are slow, 500 of them take longer than a reader waits for the first profile.
_FIRST_PROFILE_SECS = 20


def get_progress_hooks(
  spec: graph_estimator.EstimatorSpec,
  config: CpuTrainingConfig,
  model_dir: str,
  batch_size: tf.Tensor | None = None,
  num_steps: int | None = None,
  last_step: int | None = None,
  stream: stream_positions.StreamPositions | None = None,
) -> list[tf.compat.v1.train.SessionRunHook]:
  """Returns what shows how the run goes, unless the task does so itself.

  Args:
    spec: what the task's model function returned.
    config: the process's configuration.
    model_dir: where curves are written.
    batch_size: the examples of a step, scalar; `None` if not known.
    num_steps: how many steps this run has; `None` if not known.
    last_step: the step at which it ends; `None` if not known.
    stream: the positions in the stream that the run reads, if it reads one.
  """
  own = (*spec.training_hooks, *spec.training_chief_hooks)
  if any(getattr(hook, "shows_progress", False) for hook in own):
    return []
  loss = shown_loss.per_example(spec.loss, batch_size)
  # Estimator writes a curve of this name unless there is one.
  tf.compat.v1.summary.scalar("loss", loss)
  return [
    progress.ProgressHook(
      loss,
      batch_size,
      heads=tf.compat.v1.get_collection(HEADS_COLLECTION),
      table_stats=_get_table_stats(),
      model_dir=model_dir,
      curve_steps=config.save_summary_steps,
      last_step=last_step,
      num_steps=num_steps,
      num_ranks=config.num_workers if config.enable_full_sync_training else 1,
      describe=None if stream is None else _describe_stream(stream),
    )
  ]


def _get_table_stats() -> dict[str, tf.Tensor]:
  """Returns table name -> its numbers, on all servers together, in the default graph."""
  stats: dict[str, list[tf.Tensor]] = {}
  for group in tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
    with tf.device(group.handle.device):
      of_tables = group.stats()
      for i, name in enumerate(group.table_names):
        stats.setdefault(name, []).append(of_tables[i])
  for table in tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY):
    with tf.device(table.table.device):
      # The tables of two servers differ in the last part of their names.
      stats.setdefault(re.sub(r"_\d+$", "", table.name), []).append(table.stats())
  return {name: tf.add_n(parts) for name, parts in stats.items()}


def _describe_stream(
  positions: stream_positions.StreamPositions,
) -> Callable[[tf.compat.v1.Session], str]:
  monitor = stream_status.StreamMonitor(positions)
  return lambda session: monitor.read(session).describe()


def get_metric_hooks(
  config: CpuTrainingConfig, metrics: Any, model_dir: str
) -> list[tf.compat.v1.train.SessionRunHook]:
  """Returns what profiles steps and reports throughput.

  Args:
    config: the process's configuration; says which steps to profile.
    metrics: the task's `metrics` params; say which hooks there are.
    model_dir: where profiles are written.
  """
  hooks: list[tf.compat.v1.train.SessionRunHook] = []
  if metrics.enable_tf2_profiler_hook:
    start = config.profile_some_steps_from
    step_range = [None, None] if start is None else [start, start + _PROFILED_STEPS]
    hooks.append(
      metric_hook.Tf2ProfilerHook(
        logdir=model_dir,
        init_step_range=step_range,
        save_steps=config.profile_save_steps_interval,
        # Every op: `monolith_report` tells from them where a step's time goes.
        options=tf.profiler.experimental.ProfilerOptions(host_tracer_level=3),
        first_within_secs=_FIRST_PROFILE_SECS,
      )
    )
  if config.profile_with_nvprof_from_to:
    start, end = (int(step) for step in config.profile_with_nvprof_from_to.split(","))
    hooks.append(metric_hook.NVProfilerHook([start, end]))
  if metrics.enable_throughput_hook:
    hooks.append(
      metric_hook.ThroughputMetricHook(
        model_name=config.model_name,
        start_time_secs=config.containers_ready_time_secs,
        cluster_type=config.cluster_type,
      )
    )
  return hooks
