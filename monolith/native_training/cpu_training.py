"""The training driver: runs a `NativeTask` in this process, or as one role of a cluster.

| module | what it does |
|---|---|
| `training_graph` | `CpuTraining`: the task as model function of an Estimator |
| `feature_collection` | the dry run that finds out which tables a task wants |
| `cpu_feature_factories` | embeddings that were looked up, and the way of their gradients |
| `training_hooks` | restore, save, export, barrier, health checks, metrics |
| `training_server` | servers, their discovery and their end |

Unlike the original: variables are partitioned only over two or more servers; a scaffold of the user
is kept; evaluation through Estimator restores tables; user hooks do not run in the server
benchmark, whose result survives retries; the dry run is done once per job; Ctrl-C counts as a
failure, and an error while servers are shut down does not hide the error of the training; workers
look for the chief's variables every second, not every thirty.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import getpass
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import flags, logging
from tensorflow.python.training import device_setter, monitored_session

from monolith import utils as monolith_utils
from monolith.native_training import (
  cluster_manager,
  device_utils,
  feature_collection,
  mpi_utils,
  native_task,
  native_task_context,
  ps_benchmark,
  save_utils,
  service_discovery,
  utils,
  yarn_runtime,
)
from monolith.native_training.alert import alert_manager  # noqa: F401, defines a flag
from monolith.native_training.cpu_feature_factories import (
  _CpuFeatureFactory,
  _FusedCpuFeatureFactory,
  get_req_time,
)
from monolith.native_training.feature_collection import _combine_slices_as_table
from monolith.native_training.hooks import feature_engineering_hooks
from monolith.native_training.metric import cli, exit_hook
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from monolith.native_training.training_config import (
  CpuTrainingConfig,
  DistributedCpuTrainingConfig,
)
from monolith.native_training.training_graph import (
  CpuTraining,
  create_exporter,
  is_chief,
  make_native_task_context,
)
from monolith.native_training.training_server import (
  NodeAliveCheckerError,
  _get_blocked_addrs,
  _join_ps,
  _MetricsHeartBeatThread,
  _prepare_server,
  _save_debugging_info,
  _shutdown_ps,
  start_server,
)

__all__ = [
  "CpuTraining",
  "CpuTrainingConfig",
  "DistributedCpuTrainingConfig",
  "NodeAliveCheckerError",
  "_CpuFeatureFactory",
  "_FusedCpuFeatureFactory",
  "_combine_slices_as_table",
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

_TF_CONFIG = "TF_CONFIG"
_GRPC_SCHEME = "grpc://"
# Tests shorten it: read at call time.
_EXTRA_PS_BENCHMARK_SECS = 120
_BENCHMARK_EXTRA_TIMEOUT_MS = 30000
_DEFAULT_RETRIES = 6
_RETRYABLE_ERRORS = (
  tf.errors.DeadlineExceededError,
  tf.errors.UnavailableError,
  NodeAliveCheckerError,
)
_SESSION_POLL_SECS = 1

Cluster = dict[str, list[str]]
Hooks = Sequence[tf.estimator.SessionRunHook]


# ---- one process ----


def local_train(
  params: Any,
  num_ps: int = 0,
  model_dir: str | None = None,
  steps: int | None = 100,
  save_checkpoints_steps: int = 50,
  profiling: bool = False,
  enable_embedding_prefetch: bool = True,
  enable_embedding_postpush: bool = True,
  remove_model_dir_if_exists: bool = True,
  only_feature_engineering: bool = False,
) -> tf.estimator.Estimator | None:
  """Trains a task in this process.

  Args:
    params: of the task, with an `instantiate` method.
    num_ps: parameter servers to start inside this process; 0 keeps tables in the session.
    model_dir: where checkpoints go, `/tmp/<user>/<params.name>` by default.
    steps: how many to train.
    save_checkpoints_steps: steps between checkpoints.
    profiling: accepted for compatibility.
    enable_embedding_prefetch: look up embeddings of the next batch during a step.
    enable_embedding_postpush: push gradients of a step during the next one.
    remove_model_dir_if_exists: start from nothing.
    only_feature_engineering: write the parsed features to files instead of training.

  Returns:
    The Estimator; `None` for feature engineering.

  Raises:
    EnvironmentError: eager execution is enabled.
  """
  model_dir = model_dir or os.path.join("/tmp", getpass.getuser(), str(params.name))
  conf = CpuTrainingConfig(
    model_name=params.name or "",
    num_ps=num_ps,
    embedding_prefetch_capacity=1 if enable_embedding_prefetch else 0,
    enable_embedding_postpush=enable_embedding_postpush,
    save_checkpoints_steps=save_checkpoints_steps,
    only_feature_engineering=only_feature_engineering,
  )
  if remove_model_dir_if_exists and tf.io.gfile.exists(model_dir):
    tf.io.gfile.rmtree(model_dir)
  make_config_backward_compatible(model_dir, conf)
  if only_feature_engineering:
    return local_feature_engineering_internal(params, conf, model_dir, profiling)
  return local_train_internal(params, conf, model_dir, steps, profiling)


def local_train_internal(
  params: Any,
  conf: CpuTrainingConfig,
  model_dir: str,
  steps: int | None = 100,
  profiling: bool = False,
  user_hooks: Hooks | None = None,
) -> tf.estimator.Estimator:
  """Trains a task in this process with a configuration; see `local_train`."""
  del profiling
  if tf.executing_eagerly():
    raise EnvironmentError(
      "Training builds graphs: call tf.compat.v1.disable_eager_execution() before it."
    )
  with _local_cluster(conf.num_ps) as (session_config, _):
    training = CpuTraining(conf, params.instantiate())
    estimator = tf.estimator.Estimator(
      training.create_model_fn(),
      config=tf.estimator.RunConfig(
        model_dir=model_dir,
        session_config=session_config,
        save_summary_steps=conf.save_summary_steps,
        log_step_count_steps=conf.log_step_count_steps,
      ),
    )
    return estimator.train(
      training.create_input_fn(tf.estimator.ModeKeys.TRAIN), hooks=user_hooks, steps=steps
    )


def local_feature_engineering_internal(
  params: Any, conf: CpuTrainingConfig, model_dir: str, profiling: bool = False
) -> None:
  """Writes the parsed features of a task to `<model_dir>/features`, until its data ends."""
  del profiling
  task = params.instantiate()
  with _local_cluster(conf.num_ps) as (session_config, target), tf.Graph().as_default():
    _write_features(
      task, conf, model_dir, is_chief=True, target=target, session_config=session_config
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
) -> None:
  dataset = task.create_input_fn(conf.mode)()
  iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
  next_element = iterator.get_next()
  hook_config = copy.copy(conf)
  hook_config.model_dir = model_dir
  hook = feature_engineering_hooks.FeatureEngineeringSaveHook(hook_config, next_element)
  tf.compat.v1.train.get_or_create_global_step()
  with tf.compat.v1.train.MonitoredTrainingSession(
    target, is_chief=is_chief, hooks=[hook], config=session_config
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


# ---- one role of a cluster ----


def distributed_train(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  params: Any,
  sync_backend: Any = None,
  user_hooks: Hooks | None = None,
) -> tf.estimator.Estimator | None:
  """Plays one role of a training on parameter servers until it is over.

  Args:
    config: says which role.
    discovery: where the processes find one another.
    params: of the task, with an `instantiate` method.
    sync_backend: tells which serving replicas want the updated rows.
    user_hooks: run in the training.

  Returns:
    The Estimator on a worker, `None` on a parameter server.

  Raises:
    ValueError: the configuration or the task cannot be used.
    tf.errors.OpError: the training failed, more often than retries are allowed.
  """
  _check_config(config)
  monolith_utils.enable_monkey_patch()
  exit_hook.install()
  make_config_backward_compatible(config.model_dir, config)
  server, addr = start_server(config, discovery)
  with native_task_context.with_ctx(make_native_task_context(config, sync_backend)):
    _prepare_server(server, config)
    discovery.register(config.server_type, config.index, addr)
    if config.server_type == "ps":
      _join_ps(server.target, config.index, sync_backend)
      return None
  if config.enable_partial_sync_training:
    config.enable_sync_training = True
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


def _run_worker(
  config: DistributedCpuTrainingConfig,
  discovery: service_discovery.ServiceDiscovery,
  params: Any,
  target: str,
  addr: str,
  user_hooks: Hooks | None,
) -> tf.estimator.Estimator:
  heart_beat = None
  chief = is_chief(config)
  if chief:
    FLAGS["monolith_alert_proto"].value = FLAGS["monolith_chief_alert_proto"].value
    heart_beat = _MetricsHeartBeatThread()
    heart_beat.start()
  loop = _WorkerLoop(config, discovery, params, addr, user_hooks)
  error: BaseException | None = None
  try:
    return loop.run()
  except BaseException as e:
    error = e
    raise
  finally:
    if chief:
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
  """Stops the parameter servers, and tells the platform how training ended."""
  try:
    if loop.cluster is not None and (
      config.force_shutdown_ps or not config.enable_realtime_training
    ):
      num_ps = config.num_ps + config.num_extra_ps + config.num_redundant_ps
      cluster, task = loop.cluster, loop.task
      if config.num_extra_ps or config.num_redundant_ps:
        cluster, task = _get_cluster(config, discovery, addr, 0, num_ps)
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
    config.model_name,
    config.cluster_type,
  )


class _WorkerLoop:
  """Trains on the cluster as it is, and again on the cluster as it has become after a failure.

  Attributes:
    cluster: the newest cluster, `None` before there was one.
    task: this process in it.
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
    self._found: tuple[Cluster, dict[str, Any]] | None = None
    self._collected: dict[str, feature_collection.CollectedFeatures] = {}
    self.cluster: Cluster | None = None
    self.task: dict[str, Any] | None = None

  def run(self) -> tf.estimator.Estimator:
    """Trains until it succeeds, fails for good, or may not retry any more."""
    config = self._config
    self._find_cluster()
    self._report_ready()
    max_retries = config.max_retry_times
    if not max_retries and config.partial_recovery and not config.enable_sync_training:
      max_retries = _DEFAULT_RETRIES
    num_retries = 0
    while True:
      try:
        return self._train_once()
      except _RETRYABLE_ERRORS as e:
        logging.exception("Training was interrupted.")
        self._metrics.emit_counter("worker_failover_cnt", 1)
        threading.Event().wait(config.retry_wait_in_secs)
        if self._find_cluster():
          num_retries += 1
          if num_retries > max_retries:
            logging.error("The cluster changed, and none of %d retries is left.", max_retries)
            raise e
        logging.info("Trying again on %s", self.cluster)

  def _find_cluster(self) -> bool:
    """Returns whether the cluster is another one than before."""
    config = self._config
    found = _get_cluster(
      config,
      self._discovery,
      self._addr,
      config.num_redundant_ps,
      config.num_ps + config.num_extra_ps,
    )
    if found == self._found:
      return False
    self._found = found
    self.cluster, self.task = found
    if config.num_extra_ps > 0:
      self.cluster = _run_ps_benchmark(config, self.cluster, self.task)
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

  def _train_once(self) -> tf.estimator.Estimator | None:
    config = self._config
    if config.enable_gpu_training:
      device_utils.enable_gpu_training()
      self._params.train.use_gpu_emb_table = False
    if config.only_feature_engineering:
      return _do_worker_feature_engineering(config, self._params, self.cluster, self.task)
    return _do_worker_train(
      config, self._params, self.cluster, self.task, self._user_hooks, self._collected
    )


def _do_worker_train(
  config: DistributedCpuTrainingConfig,
  params: Any,
  cluster: Cluster,
  task: dict[str, Any],
  user_hooks: Hooks | None = None,
  collected: dict[str, feature_collection.CollectedFeatures] | None = None,
) -> tf.estimator.Estimator:
  """Trains once.

  Args:
    config: of this worker.
    params: of the task.
    cluster: job -> addresses.
    task: this process in it.
    user_hooks: run in the training.
    collected: remembers the dry run for the next attempt.

  Raises:
    NodeAliveCheckerError: the chief or a parameter server does not answer.
    ValueError: the task cannot be trained.
  """
  params.mode = config.mode
  native = params.instantiate()
  if not isinstance(native, native_task.NativeTask):
    raise ValueError(f"distributed train only support NativeTask. Got {native}")
  if params.serving.with_remote_gpu and config.enable_model_dump:
    raise ValueError("with_remote_gpu and enable_model_dump exclude each other")
  session_config = cluster_manager.generate_session_config((cluster, task))
  session_config.operation_timeout_in_ms = config.operation_timeout_in_ms
  dead = _get_blocked_addrs(cluster)
  if dead:
    raise NodeAliveCheckerError(f"{','.join(dead)} is unreachable")
  with _tf_config(cluster, task), _frequent_session_polls():
    run_config = tf.estimator.RunConfig(
      model_dir=config.model_dir,
      session_config=session_config,
      save_summary_steps=config.save_summary_steps * config.num_workers,
      log_step_count_steps=config.log_step_count_steps * config.num_workers,
      session_creation_timeout_secs=config.session_creation_timeout_secs,
      device_fn=config.device_fn,
    )
    collected = {} if collected is None else collected
    training: Any = CpuTraining(config, native, collected=collected.get("features"))
    collected["features"] = training._collected
    if is_chief(config):
      _save_debugging_info(config, cluster, training)
    if config.enable_partial_sync_training or config.use_dataservice:
      from monolith.native_training import sync_training_hooks

      training = sync_training_hooks.EofAwareTask(training, config.use_dataservice)
    hooks: list[tf.estimator.SessionRunHook] = []
    if config.enable_sync_training:
      from monolith.native_training import distribution_utils

      hooks += distribution_utils.get_sync_run_hooks(False)
    estimator = tf.estimator.Estimator(training.create_model_fn(), config=run_config)
    return estimator.train(
      training.create_input_fn(config.mode),
      hooks=[*hooks, *(user_hooks or [])],
      max_steps=params.train.max_steps,
    )


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
  with _frequent_session_polls(), tf.Graph().as_default(), tf.device(device_fn):
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
  config.mode = tf.estimator.ModeKeys.TRAIN
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


# ---- one rank of synchronous training ----


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
