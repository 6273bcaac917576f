"""Prepares a rank of synchronous training before it builds its graph.

Which rank it is (`settings.rank_environment` finds out), which devices it uses, how it meets the
other ranks, and the hooks and session options that follow. BytePS, an alternative to Horovod
that was never published in the form this package would need, is known by name only.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from monolith.native_training import device_utils, env_utils, gflags_utils, hvd_lib
from monolith.native_training.settings.rank_environment import (
  enable_sync_training,
  get_mpi_local_rank,
  get_mpi_local_size,
  get_mpi_rank,
  get_mpi_size,
  is_under_mpi,
)

__all__ = [
  "bps_comm_benchmark",
  "bps_init",
  "byteps_benchmark_a2a",
  "byteps_benchmark_ar",
  "enable_sync_training",
  "get_device_str",
  "get_mpi_local_rank",
  "get_mpi_local_size",
  "get_mpi_rank",
  "get_mpi_size",
  "get_sync_run_hooks",
  "init_sync_train_and_update_conf",
  "is_under_mpi",
  "try_init_cuda",
  "update_session_config_for_gpu",
]

_init_lock = threading.Lock()


def _init_backend() -> None:
  """Meets the other ranks, once per process."""
  with _init_lock:
    if not hvd_lib.is_initialized():
      hvd_lib.init()


def init_sync_train_and_update_conf(dct_config: Any) -> None:
  """Meets the other ranks and tells a config its place among them.

  Every rank owns its share of the tables, so there are no parameter servers, variables are not
  partitioned, and ids are sharded in the input pipeline. Unless ranks merge their checkpoints
  (`merge_sync_training_ckpt`), each gets a folder of its own, `<model_dir>/<uuid>/index-<rank>`.
  Where the backend cannot be loaded this is logged and the config stays as it is.

  Args:
    dct_config: a `DistributedCpuTrainingConfig`, changed in place. A second call changes nothing.
  """
  try:
    _init_backend()
    rank, size = hvd_lib.rank(), hvd_lib.size()
  except (ImportError, tf.errors.NotFoundError) as error:
    logging.error("cannot meet the other ranks of synchronous training: %s", error)
    return
  if not dct_config.merge_sync_training_ckpt:
    folder = os.path.join(dct_config.uuid or "", _rank_folder(rank))
    if not dct_config.model_dir.endswith(os.sep + folder):
      dct_config.model_dir = os.path.join(dct_config.model_dir, folder)
  dct_config.num_ps = 0
  dct_config.reorder_fids_in_data_pipeline = True
  dct_config.index = rank
  dct_config.num_workers = size
  dct_config.enable_variable_partition = False


def get_shared_dir(model_dir: str, rank: int) -> str:
  """Returns the folder that all ranks share: the one above, where each has a folder of its own."""
  above, name = os.path.split(model_dir)
  return above if name == _rank_folder(rank) else model_dir


def _rank_folder(rank: int) -> str:
  return f"index-{rank:04d}"


def try_init_cuda() -> None:
  """Gives each rank of a host its own GPU, unless `CUDA_VISIBLE_DEVICES` says otherwise.

  Also meets the other ranks in synchronous training. Failures are logged: a host without GPUs, or
  without a backend, may still train.
  """
  try:
    if "CUDA_VISIBLE_DEVICES" not in os.environ and is_under_mpi():
      os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
      os.environ["CUDA_VISIBLE_DEVICES"] = str(get_mpi_local_rank())
    if gflags_utils.read_flag("enable_sync_training", False):
      _init_backend()
  except Exception:
    logging.exception("cannot prepare GPUs for synchronous training")


def get_device_str(force_on_cpu: bool = False) -> str:
  """Returns the device of this process' variables.

  Args:
    force_on_cpu: even where GPUs are used.

  Returns:
    In synchronous training with parameter servers the job and task of this process are part of it;
    without them the text is empty, for wherever the variables are.
  """
  use_gpu = (
    gflags_utils.read_flag("enable_gpu_training", False) or device_utils.is_gpu_training()
  ) and not force_on_cpu
  device = "/device:GPU:0" if use_gpu else "/device:CPU:0"
  if not enable_sync_training():
    return device
  if gflags_utils.read_flag("num_ps", 0) > 0:
    return device_utils.get_sync_worker_device() + device
  return ""


def get_sync_run_hooks(is_full_sync: bool = False) -> list[tf.compat.v1.train.SessionRunHook]:
  """Returns the hooks that give all ranks the initial values of rank 0's variables.

  Args:
    is_full_sync: whether dense variables are replicated and tables sharded over the ranks. Then
      several initialised ranks need the hooks even without the flag `enable_sync_training`.
  """
  is_one_of_many = is_full_sync and hvd_lib.is_initialized() and hvd_lib.size() > 1
  if not enable_sync_training() and not is_one_of_many:
    return []
  if hvd_lib.enable_bps and os.environ.get("MONOLITH_WITH_BYTEPS_BCAST", "1") == "-1":
    return []
  # Horovod is often built without kernels for GPUs, and sessions of ranks place nothing elsewhere.
  device = get_device_str(force_on_cpu=not hvd_lib.has_gpu_kernels())
  return [hvd_lib.BroadcastGlobalVariablesHook(0, device=device)]


def update_session_config_for_gpu(session_config: tf.compat.v1.ConfigProto) -> None:
  """Lets a session use the GPU of its rank only, and memory only as it is needed."""
  options = session_config.gpu_options
  options.allow_growth = True
  if enable_sync_training():
    options.visible_device_list = str(get_mpi_local_rank())
    if env_utils.get_bool("MONOLITH_FORCE_GPU_COMPATIBLE", default=True):
      options.force_gpu_compatible = True


def bps_init(uuid: str) -> NoReturn:
  """Raises `NotImplementedError`: BytePS is not supported."""
  _no_byteps("bps_init")


def byteps_benchmark_ar(
  total_len: int, total_niter: int = 10000, use_cpu: bool = False, op: str = "pushpull"
) -> NoReturn:
  """Raises `NotImplementedError`: BytePS is not supported."""
  _no_byteps("byteps_benchmark_ar")


def byteps_benchmark_a2a(
  total_len: int, total_niter: int = 10000, dst_gpu: bool = True, src_gpu: bool = True
) -> NoReturn:
  """Raises `NotImplementedError`: BytePS is not supported."""
  _no_byteps("byteps_benchmark_a2a")


def bps_comm_benchmark() -> NoReturn:
  """Raises `NotImplementedError`: BytePS is not supported."""
  _no_byteps("bps_comm_benchmark")


def _no_byteps(function: str) -> NoReturn:
  raise NotImplementedError(
    f"{function}: BytePS is not supported. Unset MONOLITH_WITH_BYTEPS to use Horovod."
  )
