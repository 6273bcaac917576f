"""One rank of synchronous training. Its name is published by `cpu_training`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training import device_utils, mpi_utils, native_task
from monolith.native_training.training_config import DistributedCpuTrainingConfig
from monolith.native_training.training_graph import CpuTraining

Hooks = Sequence[tf.estimator.SessionRunHook]


def distributed_sync_train(
  config: DistributedCpuTrainingConfig,
  params: Any,
  sync_backend: Any = None,
  user_hooks: Hooks | None = None,
) -> tf.estimator.Estimator:
  """Plays one rank of synchronous training with Horovod.

  Args:
    config: of this rank.
    params: of the task, with an `instantiate` method.
    sync_backend: tells which serving replicas want the updated rows.
    user_hooks: run in the training.

  Raises:
    AssertionError: `config.index` is not the rank.
    ValueError: not a native task.
  """
  from monolith.native_training import distribution_utils, sync_training_hooks

  assert mpi_utils.get_mpi_rank() == config.index, (
    "Given RunConfig.index should be consistent with hvd.rank()."
  )
  if config.enable_gpu_training:
    device_utils.enable_gpu_training()
    params.train.use_gpu_emb_table = True
  params.mode = config.mode
  native = params.instantiate()
  if not isinstance(native, native_task.NativeTask):
    raise ValueError(f"distributed train only support NativeTask. Got {native}")
  training = sync_training_hooks.EofAwareTask(
    CpuTraining(config, native, sync_backend), config.use_dataservice
  )
  session_config = tf.compat.v1.ConfigProto(
    allow_soft_placement=False,
    intra_op_parallelism_threads=config.intra_op_parallelism_threads,
    inter_op_parallelism_threads=config.inter_op_parallelism_threads,
  )
  rewrite_options = session_config.graph_options.rewrite_options
  rewrite_options.memory_optimization = rewrite_options.NO_MEM_OPT
  if os.environ.get("TF_XLA_FLAGS"):
    session_config.graph_options.optimizer_options.global_jit_level = (
      tf.compat.v1.OptimizerOptions.ON_1
    )
  distribution_utils.update_session_config_for_gpu(session_config)
  is_root = config.index == 0
  run_config = tf.estimator.RunConfig(
    model_dir=config.model_dir,
    session_config=session_config,
    device_fn=device_utils.default_device_fn,
    # Events are written by one rank only.
    save_summary_steps=_root_interval("SAVE_SUMMARY", config.save_summary_steps)
    if is_root
    else None,
    log_step_count_steps=_root_interval("ROOT_LOG", config.log_step_count_steps)
    if is_root
    else None,
  )
  hooks = list(distribution_utils.get_sync_run_hooks(True))
  if sync_backend is not None:
    hooks.append(sync_training_hooks.ParameterSyncHook(sync_backend, config.index))
  hooks.append(sync_training_hooks.SyncTrainingInfoHook())
  estimator = tf.estimator.Estimator(training.create_model_fn(), config=run_config)
  return estimator.train(
    training.create_input_fn(config.mode),
    hooks=[*hooks, *(user_hooks or [])],
    max_steps=params.train.max_steps,
  )


def _root_interval(name: str, default: int) -> int:
  """Returns an interval in steps, which the environment may override."""
  text = os.environ.get(f"MONOLITH_{name}_INTERVAL")
  if not text:
    return default
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"MONOLITH_{name}_INTERVAL is {text!r}, want a number of steps") from None
