"""The training driver: runs a `NativeTask` in this process, or as one role of a cluster.

The code is in `driver/`; this module publishes it, and holds `distributed_train`.

| module of `driver/` | what it does |
|---|---|
| `config` | the configuration of a process |
| `local` | `local_train`: everything in this process |
| `sync` | `distributed_sync_train`: one rank of Horovod |
| `worker` | a worker of training on parameter servers, and its retries |
| `graph` | `CpuTraining`: the task as model function of an Estimator |
| `tables` | its tables and filters |
| `dry_run` | finds out which tables a task wants |
| `feature_factories` | embeddings that were looked up, and the way of their gradients |
| `hooks` | restore, save, export, barrier, health checks, metrics |
| `server` | servers, their discovery and their end |

A name that is replaced here, say `_shutdown_ps`, is replaced for the worker too.

Differences from ByteDance's Monolith: variables are partitioned only over two or more servers; the
user's scaffold is kept; evaluation through Estimator restores tables; user hooks do not run in the
server benchmark, whose result survives retries; the dry run is done once per job; Ctrl-C counts as
a failure, and an error while servers are shut down does not hide the error of the training run;
workers look for the chief's variables every second, not every thirty; a process that waits for
servers goes on as soon as they answer, and one that comes when they are gone says so and ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import flags

from monolith import _facades
from monolith import utils as monolith_utils
from monolith.native_training import graph_estimator, native_task_context, service_discovery
from monolith.native_training.alert import alert_manager  # noqa: F401, defines a flag
from monolith.native_training.driver import connections, run_record, worker
from monolith.native_training.driver.dry_run import _combine_slices_as_table
from monolith.native_training.driver.export import create_exporter
from monolith.native_training.driver.feature_factories import (
  _CpuFeatureFactory,
  _FusedCpuFeatureFactory,
  get_req_time,
)
from monolith.native_training.driver.graph import CpuTraining
from monolith.native_training.driver.local import (
  _local_cluster,
  local_feature_engineering_internal,
  local_train,
  local_train_internal,
  make_config_backward_compatible,
)
from monolith.native_training.driver.roles import (
  check_options,
  is_chief,
  make_native_task_context,
)
from monolith.native_training.driver.server import (
  NodeAliveCheckerError,
  _get_blocked_addrs,
  _join_ps,
  _MetricsHeartBeatThread,
  _prepare_server,
  _save_debugging_info,
  _shutdown_ps,
  start_server,
)
from monolith.native_training.driver.sync import distributed_sync_train
from monolith.native_training.driver.worker import (
  _EXTRA_PS_BENCHMARK_SECS,
  _do_worker_feature_engineering,
  _do_worker_train,
  _get_replica_device_setter,
  _run_ps_benchmark,
  _run_worker,
  _WorkerLoop,
)
from monolith.native_training.metric import exit_hook
from monolith.native_training.settings.training_config import (
  CpuTrainingConfig,
  DistributedCpuTrainingConfig,
)

__all__ = [
  "CpuTraining",
  "CpuTrainingConfig",
  "DistributedCpuTrainingConfig",
  "NodeAliveCheckerError",
  "_CpuFeatureFactory",
  "_EXTRA_PS_BENCHMARK_SECS",
  "_FusedCpuFeatureFactory",
  "_MetricsHeartBeatThread",
  "_WorkerLoop",
  "_combine_slices_as_table",
  "_do_worker_feature_engineering",
  "_do_worker_train",
  "_get_blocked_addrs",
  "_get_replica_device_setter",
  "_join_ps",
  "_local_cluster",
  "_prepare_server",
  "_run_ps_benchmark",
  "_save_debugging_info",
  "_shutdown_ps",
  "create_exporter",
  "distributed_sync_train",
  "distributed_train",
  "get_req_time",
  "is_chief",
  "local_feature_engineering_internal",
  "local_train",
  "local_train_internal",
  "make_config_backward_compatible",
  "make_native_task_context",
]

FLAGS = flags.FLAGS

flags.DEFINE_string(
  "monolith_chief_alert_proto", "", "becomes the value of monolith_alert_proto on the chief"
)

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]


def distributed_train(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  params: Any,
  sync_backend: Any = None,
  user_hooks: Hooks | None = None,
) -> graph_estimator.Estimator | None:
  """Plays one role of training on parameter servers until it is over.

  Args:
    config: says which role.
    discovery: where the processes find one another.
    params: the task's params, with an `instantiate` method.
    sync_backend: knows which serving replicas want the updated rows.
    user_hooks: hooks that run in the training session.

  Returns:
    The Estimator on a worker; `None` on a parameter server, and on a worker that comes when
    training is finished and the servers have ended.

  Raises:
    ValueError: the configuration or the task cannot be used.
    tf.errors.OpError: training failed, more often than retries are allowed.
    run_record.TrainingFailed: the same, on a parameter server.
    NodeAliveCheckerError: servers are gone; says which.
  """
  _check_config(config)
  config.check_restore(config.model_dir)
  monolith_utils.enable_monkey_patch()
  # Otherwise a call to a server that is gone waits forever, instead of failing and being retried.
  os.environ.setdefault("GRPC_FAIL_FAST", "true")
  exit_hook.install()
  make_config_backward_compatible(config.model_dir, config)
  with connections.watched():
    server, addr = start_server(config, discovery)
    with native_task_context.with_ctx(make_native_task_context(config, sync_backend)):
      _prepare_server(server, config)
      discovery.register(config.server_type, config.index, addr)
      if config.server_type == "ps":
        _join_ps(server.target, config.index, sync_backend, config)
        run_record.check_not_failed(config, addr)
        return None
    if config.enable_partial_sync_training:
      config.enable_sync_training = True
    if is_chief(config):
      FLAGS["monolith_alert_proto"].value = FLAGS["monolith_chief_alert_proto"].value
    return _run_worker(config, discovery, params, server.target, addr, user_hooks)


def _check_config(config: DistributedCpuTrainingConfig) -> None:
  if config.index is None:
    raise ValueError("Index can't be none.")
  if config.num_ps is None:
    raise ValueError("Num ps can't be none.")
  if config.num_workers is None:
    raise ValueError("Num workers can't be none.")
  if config.server_type not in ("ps", "worker"):
    raise ValueError(f"Unknown server type. type: {config.server_type}")
  if not config.model_dir:
    raise ValueError("model dir can't be empty.")
  check_options(config)


_facades.forward_assignments(__name__, worker)
