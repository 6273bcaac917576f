"""A worker of training on parameter servers: one attempt, and the loop that retries.

`cpu_training` publishes its names.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.training import device_setter, monitored_session

from monolith.native_training import (
  cluster_manager,
  device_utils,
  distribution_utils,
  graph_estimator,
  native_task,
  net_utils,
  ps_benchmark,
  service_discovery,
  sync_training_hooks,
  utils,
  yarn_runtime,
)
from monolith.native_training.driver import dry_run, run_record
from monolith.native_training.driver.graph import CpuTraining
from monolith.native_training.driver.local import _write_features
from monolith.native_training.driver.roles import is_chief
from monolith.native_training.driver.server import (
  NodeAliveCheckerError,
  PatientDiscovery,
  _get_blocked_addrs,
  _MetricsHeartBeatThread,
  _save_debugging_info,
  _shutdown_ps,
  prescribes_addrs,
)
from monolith.native_training.hooks import interrupt
from monolith.native_training.metric import cli
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig
from monolith.native_training.tables import ps_transfer

_TF_CONFIG = "TF_CONFIG"
_GRPC_SCHEME = "grpc://"
# Read at call time, because tests shorten it.
_EXTRA_PS_BENCHMARK_SECS = 120
_BENCHMARK_EXTRA_TIMEOUT_MS = 30000
_DEFAULT_RETRIES = 6
_RETRYABLE_ERRORS = (
  # TensorFlow makes a new session after it in a step, but not at the end of training.
  tf.errors.AbortedError,
  tf.errors.DeadlineExceededError,
  tf.errors.UnavailableError,
  NodeAliveCheckerError,
)
_SESSION_POLL_SECS = 1

Cluster = dict[str, list[str]]
Hooks = Sequence[tf.compat.v1.train.SessionRunHook]


def _run_worker(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  params: Any,
  target: str,
  addr: str,
  user_hooks: Hooks | None,
) -> graph_estimator.Estimator | None:
  # The chief alone reports, and ends training for all.
  heart_beat = _MetricsHeartBeatThread() if is_chief(config) else None
  if heart_beat is not None:
    heart_beat.start()
  loop = _WorkerLoop(config, discovery, params, addr, user_hooks)
  error: BaseException | None = None
  try:
    return loop.run()
  except BaseException as e:
    error = e
    raise
  finally:
    if heart_beat is not None:
      _end_training(config, discovery, loop, target, addr, error)
      heart_beat.stop()


def _end_training(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  loop: _WorkerLoop,
  target: str,
  addr: str,
  error: BaseException | None,
) -> None:
  """Stops the parameter servers, and tells workers and the platform how training ended."""
  try:
    if (
      loop.cluster
      and not loop.is_over
      and (config.force_shutdown_ps or not config.enable_realtime_training)
    ):
      loop.run_watch.write_end(error)
      num_ps = config.num_ps + config.num_extra_ps + config.num_redundant_ps
      cluster, task = loop.cluster, loop.task
      if config.num_extra_ps or config.num_redundant_ps:
        patient = PatientDiscovery(discovery, config.session_creation_timeout_secs)
        cluster, task = _get_cluster(config, patient, addr, 0, num_ps)
      _shutdown_ps(target, cluster, task, num_ps)
  except Exception as e:
    if error is None:
      yarn_runtime.maybe_kill_application(str(e))
      raise
    logging.exception("Parameter servers could not be stopped after a failed training.")
  if error is None:
    yarn_runtime.maybe_finish_application()
  else:
    yarn_runtime.maybe_kill_application(str(error))


def _get_cluster(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  addr: str,
  num_redundant_ps: int,
  num_required_ps: int,
  deep_insight_name: str | None = None,
) -> tuple[Cluster, dict[str, Any]]:
  return cluster_manager.get_training_cluster(
    discovery,
    addr,
    config.index,
    num_redundant_ps,
    num_required_ps,
    config.num_workers,
    config.model_dir,
    config.uuid,
    deep_insight_name,
    config.cluster_type,
  )


class _WorkerLoop:
  """Trains on the cluster as it is, and again on the cluster as it has become after a failure.

  Attributes:
    cluster: job -> addresses of the newest cluster, empty before there was one.
    task: this process in it.
    is_over: whether training was finished before this process could join it.
    run_watch: knows whether the servers of this training run have ended.
  """

  def __init__(
    self,
    config: DistributedCpuTrainingConfig,
    discovery: service_discovery.ServiceDiscovery,
    params: Any,
    addr: str,
    user_hooks: Hooks | None,
  ):
    self._config = config
    self._discovery = discovery
    self._params = params
    self._addr = addr
    self._user_hooks = user_hooks
    self._metrics = cli.get_cli(utils.get_metric_prefix())
    self._found: tuple[Cluster, dict[str, Any]] = ({}, {})
    self._collected: dict[str, dry_run.CollectedFeatures] = {}
    # Both are about the newest cluster.
    self._has_met_servers = False
    self._is_benchmarked = False
    self.run_watch = run_record.RunWatch(config, params.train.max_steps, discovery)
    self.cluster: Cluster = {}
    self.task: dict[str, Any] = {}
    self.is_over = False

  def run(self) -> graph_estimator.Estimator | None:
    """Trains until it succeeds, fails permanently, or may not retry any more.

    An error while a server is lost is an interruption, whatever its type.

    Returns:
      The Estimator; `None` where training was over before, or only features were written.
    """
    try:
      return self._run()
    except run_record.TrainingIsOver:
      self.is_over = True
      logging.warning(
        "The training run in %s is finished and its servers have ended: nothing is left to do.",
        self._config.model_dir,
      )
      return None

  def _run(self) -> graph_estimator.Estimator | None:
    config = self._config
    self._find_cluster()
    self._report_ready()
    max_retries = config.max_retry_times
    if not max_retries and config.partial_recovery and not config.enable_sync_training:
      max_retries = _DEFAULT_RETRIES
    num_retries = 0
    unreachable_since: float | None = None
    while True:
      attempt_start = time.monotonic()
      try:
        return self._train_once()
      except (tf.errors.OpError, NodeAliveCheckerError) as e:
        # Servers that the chief has told to stop may be gone before this worker knows.
        self.run_watch.check_not_over()
        if not isinstance(e, _RETRYABLE_ERRORS) and not self._has_lost_server():
          raise
        self._metrics.emit_counter("worker_failover_cnt", 1)
        if isinstance(e, NodeAliveCheckerError):
          # Processes of a job start in any order: nothing is interrupted before it began.
          event = "Training was interrupted" if self._has_met_servers else "Waiting for others"
          logging.warning("%s: %s", event, e)
          if unreachable_since is None:
            unreachable_since = attempt_start
          self.run_watch.wait_for_servers(e, time.monotonic() - unreachable_since)
        else:
          logging.exception("Training was interrupted.")
          unreachable_since = None
          threading.Event().wait(config.retry_wait_in_secs)
        had_met_servers = self._has_met_servers
        if self._find_cluster():
          unreachable_since = None
          # Addresses that another job left behind were no failure of this one.
          num_retries += had_met_servers
          if num_retries > max_retries:
            logging.error(
              "The cluster changed, and none of %d retries is left: start this %s %d again, and "
              "allow more with max_retry_times or partial_recovery.",
              max_retries, config.server_type, config.index,
            )  # fmt: skip
            raise
        logging.info("Trying again on %s", self.cluster)

  def _has_lost_server(self) -> bool:
    """Returns whether the cluster is no longer what the last attempt found.

    A process that talks to a dying server may get another error than the server's absence: that of
    an op that was cancelled, or that missed what the server held.
    """
    cluster = self._found[0]
    if _get_blocked_addrs(cluster):
      return True
    if prescribes_addrs(self._discovery):
      return False
    known = self._discovery.query(utils.PS_JOB_NAME).values()
    return not set(cluster[utils.PS_JOB_NAME]).issubset(known)

  def _find_cluster(self) -> bool:
    """Looks for the cluster, and returns whether it differs from the one before."""
    config = self._config
    found = _get_cluster(
      config,
      PatientDiscovery(
        self._discovery, config.session_creation_timeout_secs, self.run_watch.check_waiting
      ),
      self._addr,
      config.num_redundant_ps,
      config.num_ps + config.num_extra_ps,
      self._params.metrics.deep_insight_name,
    )
    if found == self._found:
      return False
    self._found = found
    self.cluster, self.task = found
    self.run_watch.set_servers(found[0][utils.PS_JOB_NAME])
    self._has_met_servers = self._is_benchmarked = False
    return True

  def _report_ready(self) -> None:
    config = self._config
    name = self._params.metrics.deep_insight_name
    if is_chief(config) and config.submit_time_secs and name:
      now = int(time.time())
      self._metrics.emit_timer(
        "container_ready_elapsed_time.all",
        now - config.submit_time_secs,
        {"model_name": name, "cluster_type": config.cluster_type},
      )
      config.containers_ready_time_secs = now

  def _train_once(self) -> graph_estimator.Estimator | None:
    config = self._config
    _check_reachable(self._found[0])
    self._has_met_servers = True
    self.run_watch.on_servers_answer(write=is_chief(config))
    if config.num_extra_ps > 0 and not self._is_benchmarked:
      self.cluster = _run_ps_benchmark(config, *self._found)
      self._is_benchmarked = True
    if config.enable_gpu_training:
      device_utils.enable_gpu_training()
      self._params.train.use_gpu_emb_table = False
    if config.only_feature_engineering:
      _do_worker_feature_engineering(config, self._params, self.cluster, self.task)
      return None
    return _do_worker_train(
      config, self._params, self.cluster, self.task, self._user_hooks, self._collected
    )


def _do_worker_train(
  config: DistributedCpuTrainingConfig,
  params: Any,
  cluster: Cluster,
  task: dict[str, Any],
  user_hooks: Hooks | None = None,
  collected: dict[str, dry_run.CollectedFeatures] | None = None,
) -> graph_estimator.Estimator:
  """Trains once.

  Args:
    config: this worker's configuration.
    params: the task's params.
    cluster: job -> addresses.
    task: this process in it.
    user_hooks: hooks that run in the training session.
    collected: remembers the dry run for the next attempt.

  Raises:
    NodeAliveCheckerError: the chief or a parameter server does not answer.
    ValueError: the task cannot be trained.
    interrupt.StoppedBySignal: SIGINT or SIGTERM ended it; the chief has saved.
  """
  params.mode = config.mode
  native = params.instantiate()
  if not isinstance(native, native_task.NativeTask):
    raise ValueError(f"distributed train only support NativeTask. Got {native}")
  session_config = cluster_manager.generate_session_config((cluster, task))
  session_config.operation_timeout_in_ms = config.operation_timeout_in_ms
  _check_reachable(cluster)
  with _tf_config(cluster, task), _frequent_session_polls(), _near_servers(cluster, task):
    run_config = graph_estimator.RunConfig(
      model_dir=config.model_dir,
      session_config=session_config,
      save_summary_steps=config.save_summary_steps * config.num_workers,
      log_step_count_steps=config.log_step_count_steps * config.num_workers,
      session_creation_timeout_secs=config.session_creation_timeout_secs,
      device_fn=config.device_fn,
    )
    collected = {} if collected is None else collected
    training: Any = CpuTraining(
      config, native, collected=collected.get("features"), last_step=params.train.max_steps
    )
    collected["features"] = training.collected
    if is_chief(config):
      _save_debugging_info(config, cluster, training)
    if config.enable_partial_sync_training or config.use_dataservice:
      training = sync_training_hooks.EofAwareTask(training, bool(config.use_dataservice))
    hooks: list[tf.compat.v1.train.SessionRunHook] = []
    if config.enable_sync_training:
      hooks += distribution_utils.get_sync_run_hooks(False)
    estimator = graph_estimator.Estimator(training.create_model_fn(), config=run_config)
    with interrupt.save_on_interrupt(
      config.model_dir, (signal.SIGINT, signal.SIGTERM), saves=is_chief(config)
    ) as interrupt_hook:
      return estimator.train(
        training.create_input_fn(config.mode),
        hooks=[*hooks, *(user_hooks or []), interrupt_hook],
        max_steps=params.train.max_steps,
      )


def _near_servers(
  cluster: Cluster, task: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
  """Tells graphs whether all parameter servers have the address of this process's machine."""
  own, _ = net_utils.split_host_and_port(cluster[task["type"]][task["index"]])
  hosts = {net_utils.split_host_and_port(addr)[0] for addr in cluster.get(utils.PS_JOB_NAME, [])}
  return ps_transfer.servers_on_this_machine(hosts == {own})


def _check_reachable(cluster: Cluster) -> None:
  dead = _get_blocked_addrs(cluster)
  if dead:
    raise NodeAliveCheckerError(f"{','.join(dead)} is unreachable", dead)


def _get_replica_device_setter(
  config: DistributedCpuTrainingConfig, cluster: Cluster, task: dict[str, Any]
) -> Any:
  """Returns the device function that puts variables on parameter servers, all else on `task`."""
  return tf.compat.v1.train.replica_device_setter(
    ps_tasks=config.num_ps,
    worker_device=f"/job:{task['type']}/task:{task['index']}",
    merge_devices=True,
    ps_ops=list(device_setter.STANDARD_PS_OPS),
    cluster=tf.train.ClusterSpec(cluster),
  )


def _do_worker_feature_engineering(
  config: DistributedCpuTrainingConfig, params: Any, cluster: Cluster, task: dict[str, Any]
) -> None:
  """Writes this worker's parsed features to `<model_dir>/features`."""
  params.mode = config.mode
  native = params.instantiate()
  target = _GRPC_SCHEME + cluster[task["type"]][task["index"]]
  device_fn = _get_replica_device_setter(config, cluster, task)
  # Not `tf.device`, which takes no functions.
  with _frequent_session_polls(), tf.Graph().as_default(), tf.compat.v1.device(device_fn):
    _write_features(
      native,
      config,
      config.model_dir,
      is_chief=is_chief(config),
      target=target,
      session_config=cluster_manager.generate_session_config((cluster, task)),
    )


def _run_ps_benchmark(
  config: DistributedCpuTrainingConfig, cluster: Cluster, task: dict[str, Any]
) -> Cluster:
  """Measures all parameter servers, and returns the cluster with the fastest ones."""
  config, cluster = copy.deepcopy(config), copy.deepcopy(cluster)
  params = ps_benchmark.PsBenchMarkTask.params()
  params.bm_config = ps_benchmark.BenchmarkConfig(
    ps_list=list(cluster["ps"]),
    num_ps_required=config.num_ps,
    num_workers=config.num_workers,
    index=config.index,
    benchmark_secs=_EXTRA_PS_BENCHMARK_SECS,
  )
  config.num_ps += config.num_extra_ps
  config.mode = graph_estimator.ModeKeys.TRAIN
  config.model_dir = os.path.join(config.model_dir, "benchmark_dir")
  config.operation_timeout_in_ms = (
    int(_EXTRA_PS_BENCHMARK_SECS * 1000) + _BENCHMARK_EXTRA_TIMEOUT_MS
  )
  _do_worker_train(config, params, cluster, task)
  cluster["ps"] = list(params.bm_config.ps_list)
  logging.info("The benchmark chose the parameter servers %s", cluster["ps"])
  return cluster


@contextlib.contextmanager
def _tf_config(cluster: Cluster, task: dict[str, Any]) -> Iterator[None]:
  """Describes the cluster to Estimator."""
  os.environ[_TF_CONFIG] = json.dumps({"cluster": cluster, "task": task})
  try:
    yield
  finally:
    os.environ.pop(_TF_CONFIG, None)


@contextlib.contextmanager
def _frequent_session_polls() -> Iterator[None]:
  """Lets workers look for the chief's variables often; TensorFlow has no argument for it."""
  original = monitored_session.sm.SessionManager
  monitored_session.sm.SessionManager = functools.partial(
    original, recovery_wait_secs=_SESSION_POLL_SECS
  )
  try:
    yield
  finally:
    monitored_session.sm.SessionManager = original
