"""One rank of synchronous training. `cpu_training` publishes its name.

Differences from ByteDance's Monolith: ranks whose data ends at different steps stop together
(`MONOLITH_SYNC_EOF=0` turns the agreement off); a rank that is gone ends the others with a message
instead of leaving them waiting; a checkpoint of another number of ranks is resharded; what training
changes in TensorFlow is put back afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.training import monitored_session
from tensorflow.python.training.summary_io import SummaryWriterCache

from monolith.native_training import (
  device_utils,
  distribution_utils,
  env_utils,
  gpu_table,
  graph_estimator,
  hvd_lib,
  native_task,
  sync_training_hooks,
)
from monolith.native_training.checkpoints import ranks as sync_checkpoint
from monolith.native_training.driver import connections, evaluation, local
from monolith.native_training.driver.graph import CpuTraining
from monolith.native_training.ranks import watchdog as sync_watchdog
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]

_EOF_ENV = "MONOLITH_SYNC_EOF"
# After a failure, threads may wait inside an exchange that the other ranks never join.
_STOP_GRACE_SECS = 5
_NOTICE_SECS = 5


class LostRankError(RuntimeError):
  """Another rank is gone, and this one cannot go on without it."""


def distributed_sync_train(
  config: DistributedCpuTrainingConfig,
  params: Any,
  sync_backend: Any = None,
  user_hooks: Hooks | None = None,
) -> graph_estimator.Estimator:
  """Plays one rank of synchronous training.

  Args:
    config: this rank's configuration.
    params: the task's params, with an `instantiate` method.
    sync_backend: knows which serving replicas want the updated rows.
    user_hooks: hooks that run in the training session.

  Raises:
    AssertionError: `config.index` is not the rank.
    ValueError: not a native task, or the checkpoint cannot be restored by these ranks.
    LostRankError: another rank is gone.
  """
  if not hvd_lib.is_initialized():
    hvd_lib.init()
  assert (
    distribution_utils.get_mpi_rank() == config.index
  ), "Given RunConfig.index should be consistent with hvd.rank()."
  hvd_lib.check_size(config.num_workers, "num_workers")
  if config.enable_gpu_training:
    device_utils.enable_gpu_training()
    # Elsewhere tables are on the CPU, and the embeddings they return move to the GPU.
    params.train.use_gpu_emb_table = _can_hold_tables(config)
  params.mode = config.mode
  native = params.instantiate()
  if not isinstance(native, native_task.NativeTask):
    raise ValueError(f"distributed train only support NativeTask. Got {native}")
  # Every rank is the chief of its own sessions, also where TF_CONFIG has told them of one another.
  with connections.watched(), evaluation.without_tf_config(), _watched(config.model_dir):
    config.check_restore(config.model_dir)
    local.make_config_backward_compatible(config.model_dir, config)
    cpu_training = CpuTraining(config, native, sync_backend, last_step=params.train.max_steps)
    if config.model_dir and config.enable_full_sync_training:
      sync_checkpoint.prepare(
        config.model_dir,
        config.num_workers,
        config.index,
        config.merge_sync_training_ckpt,
        check=cpu_training.check_checkpoint,
      )
    training = sync_training_hooks.EofAwareTask(
      cpu_training,
      bool(config.use_dataservice),
      agree_on_eof=_agrees_on_eof(config),
    )
    hooks = list(distribution_utils.get_sync_run_hooks(True))
    if sync_backend is not None:
      hooks.append(sync_training_hooks.ParameterSyncHook(sync_backend, config.index))
    hooks.append(sync_training_hooks.SyncTrainingInfoHook())
    estimator = graph_estimator.Estimator(training.create_model_fn(), config=_run_config(config))
    with _adapted_tensorflow(is_root=config.index == 0):
      return estimator.train(
        training.create_input_fn(config.mode),
        hooks=[*hooks, *(user_hooks or [])],
        max_steps=params.train.max_steps,
      )


def _can_hold_tables(config: DistributedCpuTrainingConfig) -> bool:
  """Tells whether the GPU of this rank is to hold its tables."""
  return (
    config.enable_full_sync_training
    and not config.enable_realtime_training
    and gpu_table.is_available()
  )


def _agrees_on_eof(config: DistributedCpuTrainingConfig) -> bool:
  # A stream does not end, and to look for its end would hold every batch back until the next one.
  return env_utils.get_bool(
    _EOF_ENV, default=config.num_workers > 1 and not config.enable_realtime_training
  )


def _run_config(config: DistributedCpuTrainingConfig) -> graph_estimator.RunConfig:
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
  save_summary_steps = log_step_count_steps = None
  if config.index == 0:
    # Events are written by one rank only.
    save_summary_steps = env_utils.get_int(
      "MONOLITH_SAVE_SUMMARY_INTERVAL", config.save_summary_steps
    )
    log_step_count_steps = env_utils.get_int(
      "MONOLITH_ROOT_LOG_INTERVAL", config.log_step_count_steps
    )
  return graph_estimator.RunConfig(
    model_dir=config.model_dir,
    session_config=session_config,
    device_fn=device_utils.default_device_fn,
    save_summary_steps=save_summary_steps,
    log_step_count_steps=log_step_count_steps,
    stop_grace_period_secs=_STOP_GRACE_SECS,
  )


@contextlib.contextmanager
def _watched(model_dir: str) -> Iterator[None]:
  """Ends this process if another rank ends too soon, and the others if this one does."""

  def describe() -> str:
    latest = tf.train.latest_checkpoint(model_dir) if model_dir else None
    newest = f"they go on from {latest}" if latest else "there is no checkpoint to go on from"
    return f"Start all ranks again: {newest}."

  watchdog = sync_watchdog.Watchdog(describe)
  watchdog.start()
  try:
    yield
  except BaseException as e:
    if isinstance(e, Exception) and hvd_lib.is_exchange_error(e):
      # The exchange may know before the watchdog does.
      watchdog.wait_until_lost(_NOTICE_SECS)
    watchdog.stop(has_failed=True)
    if watchdog.lost_rank is not None and isinstance(e, tf.errors.OpError):
      raise LostRankError(watchdog.message()) from e
    raise
  watchdog.stop()


class _NullWriter:
  """A summary writer whose every method does nothing."""

  def __getattr__(self, name: str) -> Any:
    return lambda *args, **kwargs: None


@contextlib.contextmanager
def _adapted_tensorflow(is_root: bool) -> Iterator[None]:
  """Changes what sessions have no argument for, for the length of a training run."""
  changes: list[tuple[Any, str, Any]] = [
    # A rank that makes its session anew is not where the others are.
    (monitored_session, "_PREEMPTION_ERRORS", ()),
  ]
  if not is_root:
    writer = _NullWriter()
    changes.append((SummaryWriterCache, "get", lambda logdir: writer))
  originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
  try:
    for owner, name, value in changes:
      setattr(owner, name, value)
    yield
  finally:
    for owner, name, value in originals:
      setattr(owner, name, value)
