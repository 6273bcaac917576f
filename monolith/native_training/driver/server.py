"""The life of one process of a parameter-server cluster: its server, its end, what it leaves.

A server is started as a one-task cluster of its own. It learns of the whole cluster later, from the
session configuration of chief and workers, so it needs to know no other process when it starts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.lib.io import file_io

from monolith.native_training import (
  distributed_serving_ops,
  logging_ops,
  mlp_utils,
  net_utils,
  service_discovery,
  utils,
  yarn_runtime,
)
from monolith.native_training.hooks import ps_check_hooks
from monolith.native_training.metric import cli
from monolith.native_training.proto import debugging_info_pb2
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig

_PRESCRIBING = (service_discovery.MLPServiceDiscovery, service_discovery.TfConfigServiceDiscovery)
_GRPC_SCHEME = "grpc://"
_HEART_BEAT_SECS = 30
_NODE_ALIVE_TIMEOUT_SECS = 60
_REACHABLE_POLL_SECS = 1
_DISCOVERY_POLL_SECS = 5
_SHUTDOWN_TIMEOUT_SECS = 10
_SHUTDOWN_THREADS = 32
_LINGER_SECS = 1
_SYNC_INTERVAL_SECS = 10
_SYNC_TIMEOUT_MS = 60000
_SIGNAL_POLL_SECS = 1


class NodeAliveCheckerError(Exception):
  """A parameter server or the chief does not answer.

  Args:
    msg: what the error says.
    addrs: the addresses that do not answer.
  """

  def __init__(self, msg: str, addrs: Sequence[str] = ()):
    super().__init__(msg)
    self.msg = msg
    self.addrs = tuple(addrs)

  def __str__(self) -> str:
    return self.msg


class PatientDiscovery(service_discovery.ServiceDiscovery):
  """Queries another discovery, but not forever.

  Args:
    discovery: the other one.
    timeout_secs: the time after which a query fails.
    check: called after each query with the seconds since the first; may raise what ends the wait.
  """

  def __init__(
    self,
    discovery: service_discovery.ServiceDiscovery,
    timeout_secs: float,
    check: Callable[[float], None] | None = None,
  ):
    self._discovery = discovery
    self._timeout_secs = timeout_secs
    self._check = check
    self._start = time.monotonic()

  def register(self, name: str, index: int, addr: str) -> None:
    self._discovery.register(name, index, addr)

  def deregister(self, name: str, index: int, addr: str) -> None:
    self._discovery.deregister(name, index, addr)

  def query(self, name: str) -> dict[int, str]:
    """Returns address by index, as the other discovery does.

    Raises:
      TimeoutError: the cluster is still not complete.
    """
    if isinstance(self._discovery, service_discovery.MLPServiceDiscovery):
      # It would wait for each server in turn, and not say for which.
      addrs = self._discovery.query(name, skip_port_check=True)
    else:
      addrs = self._discovery.query(name)
    waited = time.monotonic() - self._start
    if self._check is not None:
      self._check(waited)
    if waited > self._timeout_secs:
      raise TimeoutError(
        f"the cluster is not complete after {self._timeout_secs} s, the discovery "
        f"{type(self._discovery).__name__} knows of {name} only {addrs}: are all processes "
        "running, with the same settings?"
      )
    return addrs


def prescribes_addrs(discovery: service_discovery.ServiceDiscovery) -> bool:
  """Returns whether addresses are known before any process listens there."""
  return isinstance(discovery, _PRESCRIBING)


def start_server(
  config: DistributedCpuTrainingConfig, discovery: service_discovery.ServiceDiscovery
) -> tuple[tf.distribute.Server, str]:
  """Starts this process's server.

  Args:
    config: the process's configuration; `index` is overwritten where the discovery knows it.
    discovery: may prescribe the address.

  Returns:
    The server and the address under which others reach it.

  Raises:
    ValueError: the discovery is closed.
    tf.errors.OpError: the address is taken.
  """
  if isinstance(discovery, _PRESCRIBING):
    index = discovery.index
    if index is None:
      raise ValueError(f"{type(discovery).__name__} is closed and knows no index")
    config.index = index
    addr = discovery.addr
  else:
    addr = net_utils.concat_ip_and_port(yarn_runtime.get_local_host(), 0)
  session_config = tf.compat.v1.ConfigProto(
    intra_op_parallelism_threads=config.intra_op_parallelism_threads,
    inter_op_parallelism_threads=config.inter_op_parallelism_threads,
  )
  # Idle threads that spin would take the cores of other processes, which they wait for.
  session_config.experimental.disable_thread_spinning = True
  server = tf.distribute.Server({"local": [addr]}, config=session_config)
  if addr.endswith(":0"):
    addr = server.target[len(_GRPC_SCHEME) :]
  logging.info("%s %d listens on %s", config.server_type, config.index, addr)
  net_utils.warn_if_public(addr, f"{config.server_type} {config.index}")
  return server, addr


def _prepare_server(server: tf.distribute.Server, config: DistributedCpuTrainingConfig) -> None:
  """Creates, on a parameter server, what health checks will look for."""
  if config.server_type != utils.PS_JOB_NAME:
    return
  with tf.Graph().as_default():
    info = logging_ops.machine_info(
      shared_name=ps_check_hooks.get_ps_machine_info_shared_name(config.index)
    )
    with tf.compat.v1.Session(server.target) as sess:
      sess.run(info.op)


def _create_shutdown_queue(ps_index: int) -> tf.queue.FIFOQueue:
  return tf.queue.FIFOQueue(1, tf.int32, shapes=[()], shared_name=f"ps_queue_{ps_index}")


def _join_ps(
  target: str,
  ps_index: int,
  sync_backend: Any = None,
  config: DistributedCpuTrainingConfig | None = None,
) -> None:
  """Serves until the chief says that training is over.

  Args:
    target: the address of this process's own server.
    ps_index: the index of this parameter server.
    sync_backend: knows which serving replicas want the updated rows; `None` for none.
    config: the process's configuration. With brokers in it updated rows go to the row log instead.
  """
  with contextlib.ExitStack() as stack:
    if config is not None and config.realtime_kafka_servers:
      # Needs a client of Kafka.
      from monolith.row_log import row_log_hooks

      stack.enter_context(row_log_hooks.publish_from_server(config, target, ps_index))
      sync_backend = None
    _serve(target, ps_index, sync_backend)


def _serve(target: str, ps_index: int, sync_backend: Any) -> None:
  with tf.Graph().as_default():
    dequeue = _create_shutdown_queue(ps_index).dequeue()
    sync = None
    if sync_backend is not None:
      config_str = tf.compat.v1.placeholder(tf.string, shape=[], name="sync_config_str")
      client = distributed_serving_ops.ParameterSyncClient(
        distributed_serving_ops.parameter_sync_client_from_config(name_suffix=str(ps_index))
      )
      sync = (config_str, client.create_sync_op(config_str))
    with tf.compat.v1.Session(target) as sess:
      if sync is None:
        _wait_until_told(sess, dequeue)
      else:
        _join_ps_while_syncing(sess, dequeue, sync, sync_backend, ps_index)
  logging.info("Parameter server %d is told to stop.", ps_index)
  # The chief gets its answer.
  threading.Event().wait(_LINGER_SECS)


def _wait_until_told(sess: tf.compat.v1.Session, dequeue: tf.Tensor) -> None:
  """Waits for the chief in a thread, so that Ctrl-C and handlers of signals reach the process.

  Python looks for signals between two of its own instructions, and a call of TensorFlow is one.
  """
  done = threading.Event()
  errors: list[BaseException] = []

  def wait() -> None:
    try:
      sess.run(dequeue)
    except BaseException as error:
      errors.append(error)
    finally:
      done.set()

  threading.Thread(target=wait, name="wait_for_chief", daemon=True).start()
  # A signal that comes right before this thread sleeps, or to another one, does not wake it.
  while not done.wait(_SIGNAL_POLL_SECS):
    pass
  if errors:
    raise errors[0]


def _join_ps_while_syncing(
  sess: tf.compat.v1.Session,
  dequeue: tf.Tensor,
  sync: tuple[tf.Tensor, tf.Tensor],
  sync_backend: Any,
  ps_index: int,
) -> None:
  """Pushes touched rows every few seconds until the chief says that training is over.

  No error ends the pushes: serving would grow stale while training goes on, and nobody would see
  it. Every failure is logged and counted in the metric `parameter_sync_failures`, and rows that
  were not pushed are part of the next push.
  """
  config_str, sync_op = sync
  stopped = threading.Event()
  options = tf.compat.v1.RunOptions(timeout_in_ms=_SYNC_TIMEOUT_MS)
  metrics = cli.get_cli(utils.get_metric_prefix())
  tags = {"ps": str(ps_index)}
  last_targets: bytes | None = None

  def failed(what: str) -> None:
    logging.exception("%s; the next push tries again.", what)
    metrics.emit_counter("parameter_sync_failures", 1, tags)

  def push_once() -> None:
    nonlocal last_targets
    try:
      last_targets = distributed_serving_ops.refresh_sync_config(sync_backend, ps_index)
    except Exception:
      # Replicas that were there are most likely still there.
      failed("Serving replicas could not be asked for")
    if last_targets is not None:
      sess.run(sync_op, {config_str: last_targets}, options=options)

  def push_updates() -> None:
    while not stopped.wait(_SYNC_INTERVAL_SECS):
      try:
        push_once()
      except Exception:
        failed("Rows could not be pushed to serving")

  thread = threading.Thread(target=push_updates, name="parameter_sync", daemon=True)
  thread.start()
  try:
    _wait_until_told(sess, dequeue)
  finally:
    stopped.set()
    thread.join()


def _shutdown_ps(
  target: str, cluster: dict[str, list[str]], task: dict[str, Any], num_ps: int
) -> None:
  """Tells all parameter servers that can be reached to stop.

  Each one is told through its own master: a session over the whole cluster would wait forever for a
  server that is gone.

  Args:
    target: the address of the chief's own server.
    cluster: job -> addresses by index, of all parameter servers.
    task: the chief's task.
    num_ps: how many parameter servers there are.
  """
  del target, task
  addrs = cluster[utils.PS_JOB_NAME][:num_ps]
  dead = net_utils.NodeAliveChecker(addrs, timeout=_SHUTDOWN_TIMEOUT_SECS).get_dead_nodes()
  if dead:
    logging.warning("These parameter servers are gone already: %s", sorted(dead))
  alive = [(i, addr) for i, addr in enumerate(addrs) if addr not in dead]
  if alive:
    with futures.ThreadPoolExecutor(min(len(alive), _SHUTDOWN_THREADS)) as pool:
      list(pool.map(lambda server: _tell_to_stop(*server), alive))
  logging.info("Told %d parameter servers to stop.", len(alive))


def _tell_to_stop(index: int, addr: str) -> None:
  # Without a timeout, a call waits forever for the answer of a server that ended too fast.
  timeout_ms = _SHUTDOWN_TIMEOUT_SECS * 1000
  config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=timeout_ms)
  with tf.Graph().as_default():
    enqueue = _create_shutdown_queue(index).enqueue(1)
    try:
      with tf.compat.v1.Session(_GRPC_SCHEME + addr, config=config) as sess:
        sess.run(enqueue, options=tf.compat.v1.RunOptions(timeout_in_ms=timeout_ms))
    except tf.errors.OpError as e:
      if net_utils.NodeAliveChecker([addr], timeout=_SHUTDOWN_TIMEOUT_SECS).all_nodes_alive():
        raise
      logging.info("Parameter server %d is gone: %s", index, e.message)


def _get_blocked_addrs(cluster: dict[str, list[str]]) -> list[str]:
  """Returns the addresses of chief and parameter servers that do not answer, sorted."""
  addrs = [*cluster.get("chief", []), *cluster.get(utils.PS_JOB_NAME, [])]
  checker = net_utils.NodeAliveChecker(addrs, timeout=_NODE_ALIVE_TIMEOUT_SECS)
  return sorted(checker.get_dead_nodes())


def wait_until_reachable(
  addrs: Sequence[str], timeout_secs: float, discovery: service_discovery.ServiceDiscovery
) -> None:
  """Returns when all `addrs` answer, when the discovery has replaced one, or when time is up.

  Args:
    addrs: the addresses of chief and parameter servers.
    timeout_secs: how long to wait.
    discovery: where others may have registered instead.
  """
  deadline = time.monotonic() + timeout_secs
  next_query = time.monotonic()
  silent = list(addrs)
  while silent and time.monotonic() < deadline:
    if not prescribes_addrs(discovery) and time.monotonic() >= next_query:
      known = {*discovery.query("worker").values(), *discovery.query(utils.PS_JOB_NAME).values()}
      if not known.issuperset(silent):
        return
      next_query = time.monotonic() + _DISCOVERY_POLL_SECS
    host, port = net_utils.split_host_and_port(silent[0])
    # Asks again and again until its time is up.
    if mlp_utils.check_port(host, port, min(_REACHABLE_POLL_SECS, deadline - time.monotonic())):
      silent.pop(0)


def _save_debugging_info(
  config: DistributedCpuTrainingConfig, cluster: dict[str, list[str]], training: Any
) -> None:
  """Writes what a debugging server needs to join the cluster to `<model_dir>/debugging_info.pb`."""
  info = debugging_info_pb2.DebuggingInfo()
  info.cluster.chief_addr = cluster["chief"][0]
  info.cluster.ps_addrs.extend(cluster.get(utils.PS_JOB_NAME, []))
  info.num_workers = config.num_workers
  for name, table_config in sorted(training.feature_configs[0].items()):
    info.feature_name_configs.add(feature_name=name, config_str=str(table_config))
  tf.io.gfile.makedirs(config.model_dir)
  file_io.atomic_write_string_to_file(
    utils.get_debugging_info_file_name(config.model_dir), info.SerializeToString()
  )


class _MetricsHeartBeatThread(threading.Thread):
  """Emits a metric while training runs, and another one when it stops."""

  def __init__(self, interval_secs: float = _HEART_BEAT_SECS):
    super().__init__(name="metrics_heart_beat", daemon=True)
    self._interval_secs = interval_secs
    self._stopped = threading.Event()
    self._client = cli.get_cli(utils.get_metric_prefix())

  def run(self) -> None:
    while True:
      self._client.emit_counter("training_heart_beat", 1, {"type": "running"})
      if self._stopped.wait(self._interval_secs):
        break
    self._client.emit_counter("training_heart_beat", 1, {"type": "stopped"})

  def stop(self) -> None:
    """Ends the thread at once."""
    self._stopped.set()
    self.join()
