"""Trains a task in this process, with parameter servers inside it if they are asked for.

`cpu_training` publishes its names.
"""

from __future__ import annotations

import contextlib
import copy
import getpass
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import device_utils, graph_estimator, native_task, save_utils
from monolith.native_training.driver import dry_run
from monolith.native_training.driver.graph import CpuTraining
from monolith.native_training.hooks import data_position, feature_engineering_hooks, interrupt
from monolith.native_training.metric import metric_hook
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from monolith.native_training.settings.training_config import CpuTrainingConfig

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]

_TF_CONFIG = "TF_CONFIG"
_GRPC_SCHEME = "grpc://"
_PROFILED_STEPS = 10
_NEVER_AGAIN_STEPS = 1 << 62
_RESUME = {
  None: data_position.Resume.UNFINISHED,
  True: data_position.Resume.ALWAYS,
  False: data_position.Resume.NEVER,
}


def local_train(
  params: Any,
  num_ps: int = 0,
  model_dir: str | None = None,
  steps: int | None = 100,
  save_checkpoints_steps: int = 50,
  profiling: bool = False,
  enable_embedding_prefetch: bool = True,
  enable_embedding_postpush: bool = True,
  remove_model_dir_if_exists: bool | None = None,
  only_feature_engineering: bool = False,
) -> graph_estimator.Estimator | None:
  """Trains a task in this process.

  Args:
    params: the task's params, with an `instantiate` method.
    num_ps: parameter servers to start inside this process; 0 keeps tables in the session.
    model_dir: where checkpoints go, `/tmp/<user>/<params.name>` by default.
    steps: how many to train.
    save_checkpoints_steps: steps between checkpoints.
    profiling: profile the first ten steps, into `<model_dir>/plugins/profile`.
    enable_embedding_prefetch: look up embeddings of the next batch during a step.
    enable_embedding_postpush: push gradients of a step during the next one.
    remove_model_dir_if_exists: delete what is there and start from nothing. By default a run goes
      on with the `model_dir` that it is given; one that is given none starts from nothing, and what
      is in the default folder gets another name.
    only_feature_engineering: write the parsed features to files instead of training.

  Returns:
    The Estimator; `None` for feature engineering.

  Raises:
    EnvironmentError: eager execution is enabled.
  """
  is_default_dir = not model_dir
  model_dir = model_dir or os.path.join("/tmp", getpass.getuser(), str(params.name))
  conf = CpuTrainingConfig(
    model_name=params.name or "",
    num_ps=num_ps,
    embedding_prefetch_capacity=1 if enable_embedding_prefetch else 0,
    enable_embedding_postpush=enable_embedding_postpush,
    save_checkpoints_steps=save_checkpoints_steps,
    only_feature_engineering=only_feature_engineering,
  )
  if tf.io.gfile.exists(model_dir):
    if remove_model_dir_if_exists:
      tf.io.gfile.rmtree(model_dir)
    elif remove_model_dir_if_exists is None and is_default_dir:
      kept = f"{model_dir}.{int(time.time() * 1000)}"
      tf.io.gfile.rename(model_dir, kept)
      logging.warning("%s is now %s; give a model_dir to go on with a model.", model_dir, kept)
  make_config_backward_compatible(model_dir, conf)
  if only_feature_engineering:
    local_feature_engineering_internal(params, conf, model_dir, profiling)
    return None
  return local_train_internal(params, conf, model_dir, steps, profiling)


def local_train_internal(
  params: Any,
  conf: CpuTrainingConfig,
  model_dir: str,
  steps: int | None = 100,
  profiling: bool = False,
  user_hooks: Hooks | None = None,
  max_steps: int | None = None,
  saving_listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None = None,
  resume_data: bool | None = None,
  collected: dict[str, dry_run.CollectedFeatures] | None = None,
) -> graph_estimator.Estimator:
  """Trains a task in this process as a configuration says.

  Args:
    params: the task's params, with an `instantiate` method.
    conf: how to train.
    model_dir: where checkpoints go.
    steps: how many to train.
    profiling: profile the first ten steps.
    user_hooks: hooks that run in the training session.
    max_steps: the global step to stop at, instead of `steps`.
    saving_listeners: called around every full checkpoint.
    resume_data: whether to go on in the data where the last run in `model_dir` has stopped; by
      default if it was the same data, not yet read to its end. Batches that were looked up ahead
      when it stopped, two at most, are not read again.
    collected: remembers the dry run for the next run of the same task.

  Returns:
    The Estimator.

  Raises:
    EnvironmentError: eager execution is enabled.
    KeyboardInterrupt: Ctrl-C was pressed; a checkpoint is written first.
    ValueError: an option cannot be met, the checkpoint to start from is missing, or both limits
      are given.
  """
  if tf.executing_eagerly():
    raise OSError("Training builds graphs: call tf.compat.v1.disable_eager_execution() before it.")
  conf.check_restore(model_dir)
  with _local_cluster(conf.num_ps) as (session_config, _), contextlib.ExitStack() as run:
    run.enter_context(_gpu_placement(conf, session_config))
    _publish_rows(conf, session_config, run)
    collected = {} if collected is None else collected
    training = CpuTraining(
      conf,
      params.instantiate(),
      collected=collected.get("features"),
      resume=_RESUME[resume_data],
      num_steps=steps,
      last_step=max_steps,
    )
    collected["features"] = training.collected
    _report_limit(model_dir, max_steps)
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(
        model_dir=model_dir,
        session_config=session_config,
        save_summary_steps=conf.save_summary_steps,
        log_step_count_steps=conf.log_step_count_steps,
        device_fn=device_utils.host_scalars_device_fn
        if conf.enable_gpu_training and not conf.num_ps
        else None,
      ),
    )
    with interrupt.save_on_interrupt(model_dir) as interrupt_hook:
      return estimator.train(
        training.create_input_fn(graph_estimator.ModeKeys.TRAIN),
        hooks=[*(user_hooks or []), *_profiler_hooks(profiling, model_dir), interrupt_hook],
        steps=steps,
        max_steps=max_steps,
        saving_listeners=list(saving_listeners or []) or None,
      )


@contextlib.contextmanager
def _gpu_placement(
  conf: CpuTrainingConfig, session_config: tf.compat.v1.ConfigProto
) -> Iterator[None]:
  """Allows placement on GPUs meanwhile if the configuration does."""
  if not conf.enable_gpu_training:
    yield
    return
  # Ops without a GPU kernel stay on the CPU, and other processes find memory on the card.
  session_config.allow_soft_placement = True
  session_config.gpu_options.allow_growth = True
  was_allowed = device_utils.is_gpu_training()
  device_utils.enable_gpu_training()
  try:
    yield
  finally:
    if not was_allowed:
      device_utils.disable_gpu_training()


def _publish_rows(
  conf: CpuTrainingConfig,
  session_config: tf.compat.v1.ConfigProto,
  publishers: contextlib.ExitStack,
) -> None:
  """Publishes the rows of the servers in this process, if there are any and a row log is wanted.

  Tables without servers are published by a hook of the session that they live in.
  """
  if not conf.realtime_kafka_servers or conf.num_ps <= 0:
    return
  # Needs a client of Kafka.
  from monolith.row_log import row_log_hooks

  servers = {job.name: job.tasks for job in session_config.cluster_def.job}["ps"]
  for shard in range(conf.num_ps):
    publishers.enter_context(
      row_log_hooks.publish_from_server(conf, _GRPC_SCHEME + servers[shard], shard)
    )


def _report_limit(model_dir: str, max_steps: int | None) -> None:
  """Says so if there is nothing to train: Estimator would return as if it had."""
  newest = tf.train.latest_checkpoint(model_dir)
  if newest is None or max_steps is None:
    return
  step = int(tf.train.load_variable(newest, tf.compat.v1.GraphKeys.GLOBAL_STEP))
  if step >= max_steps:
    logging.warning(
      "No step is trained: the checkpoint %s is at step %d and max_steps is %d. Give a larger "
      "max_steps, or say with steps how many more to train.",
      newest, step, max_steps,
    )  # fmt: skip


def _profiler_hooks(profiling: bool, model_dir: str) -> list[tf.compat.v1.train.SessionRunHook]:
  if not profiling:
    return []
  return [
    metric_hook.Tf2ProfilerHook(model_dir, [0, _PROFILED_STEPS], save_steps=_NEVER_AGAIN_STEPS)
  ]


def local_feature_engineering_internal(
  params: Any, conf: CpuTrainingConfig, model_dir: str, profiling: bool = False
) -> None:
  """Writes the parsed features of a task to `<model_dir>/features`, until its data ends.

  Args:
    params: the task's params, with an `instantiate` method.
    conf: how to read.
    model_dir: the model's folder.
    profiling: profile the first ten batches, into `<model_dir>/plugins/profile`.
  """
  task = params.instantiate()
  with _local_cluster(conf.num_ps) as (session_config, target), tf.Graph().as_default():
    _write_features(
      task,
      conf,
      model_dir,
      is_chief=True,
      target=target,
      session_config=session_config,
      hooks=_profiler_hooks(profiling, model_dir),
    )


@contextlib.contextmanager
def _local_cluster(num_ps: int) -> Iterator[tuple[tf.compat.v1.ConfigProto, str]]:
  """Starts servers inside this process, and describes them in TF_CONFIG meanwhile.

  Yields:
    The session configuration, and the target of sessions.
  """
  config = tf.compat.v1.ConfigProto()
  # Grappler breaks on ragged inputs.
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  if num_ps <= 0:
    os.environ.pop(_TF_CONFIG, None)
    yield config, ""
    return
  servers = [tf.distribute.Server.create_local_server() for _ in range(num_ps)]
  master = tf.distribute.Server.create_local_server()
  cluster = {
    "chief": [master.target[len(_GRPC_SCHEME) :]],
    "ps": [server.target[len(_GRPC_SCHEME) :] for server in servers],
  }
  config.cluster_def.CopyFrom(tf.train.ClusterSpec(cluster).as_cluster_def())
  config.allow_soft_placement = True
  config.share_cluster_devices_in_session = True
  config.experimental.share_session_state_in_clusterspec_propagation = True
  task = {"type": "chief", "index": 0}
  os.environ[_TF_CONFIG] = json.dumps({"cluster": cluster, "task": task})
  try:
    yield config, master.target
  finally:
    os.environ.pop(_TF_CONFIG, None)


def _write_features(
  task: native_task.NativeTask,
  conf: CpuTrainingConfig,
  model_dir: str,
  is_chief: bool,
  target: str,
  session_config: tf.compat.v1.ConfigProto,
  hooks: Hooks = (),
) -> None:
  dataset = task.create_input_fn(conf.mode)()
  iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
  next_element = iterator.get_next()
  hook_config: Any = copy.copy(conf)  # only some configurations have a `model_dir`
  hook_config.model_dir = model_dir
  hook = feature_engineering_hooks.FeatureEngineeringSaveHook(hook_config, next_element)
  tf.compat.v1.train.get_or_create_global_step()
  with tf.compat.v1.train.MonitoredTrainingSession(
    target, is_chief=is_chief, hooks=[hook, *hooks], config=session_config
  ) as sess:
    sess.run(iterator.initializer)
    while not sess.should_stop():
      sess.run(next_element)


def make_config_backward_compatible(model_dir: str, config: CpuTrainingConfig) -> None:
  """Keeps the kind of tables that the checkpoints in `model_dir` have, if it was left open."""
  if config.use_native_multi_hash_table is not None:
    return
  state = save_utils.get_monolith_checkpoint_state(model_dir)
  if state is not None and state.builtin_hash_table_type in (
    MonolithCheckpointState.UNKNOWN,
    MonolithCheckpointState.CUCKOO_HASH_MAP,
  ):
    config.use_native_multi_hash_table = False
