"""Set-up of a job on an MLP platform: roles from environment variables, tf.data service, MPI.

The platform starts every process of a job with variables `MLP_<ROLE>_…` that name all hosts and
ports. `mlp_pass` turns a dispatcher or data worker process into a tf.data service server that ends
with the trainer, and points the trainer to it. Outside such a platform it does nothing.

Importing this module patches nothing; `mlp_pass` patches Estimator's dataset hook, once, when
`--dataset_use_dataservice` is set.

Differences from ByteDance's Monolith: `get_port` returns an int, `begin` clears the collection of
the default graph, `check_port` keeps its deadline and does not spin, and `TENSORBOARD_LOG_PATH` is
honoured.
"""

import os
import socket
import sys
import time
import traceback
from typing import Any, Optional

import tensorflow as tf
from absl import flags, logging
from tensorflow.python.data.experimental import service as dsvc

from monolith import _tensorflow
from monolith.native_training import env_utils, graph_estimator, net_utils, yarn_runtime
from monolith.native_training.settings import (
  dataservice_flags,  # noqa: F401, defines flags read below
)
from monolith.native_training.settings.rank_environment import (
  enable_sync_training,
  find_initialized_backend,
  get_mpi_local_size,
  get_mpi_rank,
  get_mpi_size,
  is_under_mpi,
)

FLAGS = flags.FLAGS

_DEFAULT_PORT = 2222
_GRPC_SCHEME = "grpc://"
_CHECK_PORT_PAUSE_SECS = 0.1
_WAIT_PERIOD_SECS = 5
_JOIN_PERIOD_SECS = 10
_JOIN_CHECK_TIMEOUT_SECS = 60
_DATASET_ID_COLLECTION = "registed_dataset_id"

# Servers that this process runs beside its training; kept here so that they live as long.
EXTRA_DSWORKERS = []


def check_port(host: str, port: int, timeout: float = 1) -> bool:
  """Tells whether something listens at `host:port`; tries again until the deadline.

  Args:
    host: name, IPv4 or IPv6 address, the latter with or without brackets.
    port: the port.
    timeout: seconds for all attempts together.
  """
  host = host.strip("[]")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  deadline = time.monotonic() + timeout
  while True:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
      connection.settimeout(max(deadline - time.monotonic(), 0.001))
      try:
        connection.connect((host, int(port)))
        return True
      except socket.timeout:
        return False
      except OSError:
        pass
    remaining = deadline - time.monotonic()
    if remaining <= 0:
      return False
    time.sleep(min(_CHECK_PORT_PAUSE_SECS, remaining))


class MLPEnv:
  """The job as this process' `MLP_` and `MPI_` environment variables describe it."""

  def __init__(self):
    self._mlp_env = {
      name: value for name, value in os.environ.items() if name.startswith(("MLP_", "MPI_"))
    }
    self.framework = self._get("MLP_FRAMEWORK")
    self.ssh_port = self._get("MLP_SSH_PORT")
    self.log_path = self._get("MLP_LOG_PATH")
    self.debug_port = self._get("MLP_DEBUG_PORT")
    self.entrypoint_dir = self._get("MLP_ENTRYPOINT_DIR")
    self.task_cmd = self._get("MLP_TASK_CMD")
    self.role = self._get("MLP_ROLE", "").upper()
    self.all_roles = {}
    for name in self._mlp_env:
      parts = name.split("_")
      if len(parts) == 3 and parts[2] == "NUM":
        self.all_roles[parts[1].upper()] = self._get_int(name, 0)
    port = self._get_int("MLP_PORT", _DEFAULT_PORT)
    if self.enable_mpi:
      self.index = get_mpi_rank()
      self.all_roles["WORKER"] = get_mpi_size()
      self.port = port + self.index
    else:
      self.index = self._get_int("MLP_ROLE_INDEX", 0)
      self.port = port
    self.avaiable = bool(self._mlp_env and self.all_roles)  # (sic) the name is public
    self.cpu = self._get_int("MLP_CPU", 0)
    self.gpu = self._get_int("MLP_GPU", 0)
    self.gpu_type = self._get("MLP_GPU_TYPE", "")
    self.mem = self._get_int("MLP_MEM", 0)
    self.host = yarn_runtime.get_local_host()
    self._has_started_profiler = False

  @property
  def enable_mpi(self) -> bool:
    return is_under_mpi() and self.role == "WORKER"

  def _get(self, name: str, default: Optional[str] = None) -> Optional[str]:
    value = self._mlp_env.get(name)
    return default if value is None else value.strip("\"'")

  def _get_int(self, name: str, default: Optional[int]) -> Optional[int]:
    text = self._get(name)
    if not text:
      return default
    try:
      return int(text)
    except ValueError:
      raise ValueError(f"{name} is {text!r}, want an integer") from None

  def _role(self, role: Optional[str]) -> str:
    return (role or self.role).upper()

  def _is_mpi_worker(self, role: str) -> bool:
    return self.enable_mpi and role == "WORKER"

  def _index(self, role: str, index: Optional[int]) -> int:
    if index is not None:
      return index
    return self.index if role == self.role else 0

  def num_replicas(self, role: Optional[str] = None) -> int:
    role = self._role(role)
    if self._is_mpi_worker(role):
      return get_mpi_size()
    return self._get_int(f"MLP_{role}_NUM", 0)

  def get_all_host(self, role: Optional[str] = None, is_primary: bool = True) -> Optional[str]:
    """Returns the comma-joined hosts of a role."""
    return self._get(f"MLP_{self._role(role)}_ALL_{'PRIMARY_' if is_primary else ''}HOSTS")

  def get_all_addrs(self, role: Optional[str] = None, is_primary: bool = True) -> list[str]:
    addrs = self._get(f"MLP_{self._role(role)}_ALL_{'PRIMARY_' if is_primary else ''}ADDRS")
    return addrs.split(",") if addrs else []

  def get_host(
    self, role: Optional[str] = None, index: Optional[int] = None, is_primary: bool = True
  ) -> Optional[str]:
    """Returns the host of a task, by default this one, or task 0 of another role."""
    role = self._role(role)
    index = self._index(role, index)
    if self._is_mpi_worker(role):
      index //= get_mpi_local_size()  # The platform knows hosts, MPI runs several ranks on each.
    return self._get(f"MLP_{role}_{index}_{'PRIMARY_' if is_primary else ''}HOST")

  def get_addr(
    self, role: Optional[str] = None, index: Optional[int] = None, is_primary: bool = True
  ) -> Optional[str]:
    """Returns `host:port` of a task, or None where the environment does not have both."""
    host = self.get_host(role, index, is_primary)
    port = self._get_port(role, index, None)
    if not host or port is None:
      return None
    return net_utils.concat_ip_and_port(host, port)

  def get_port(self, role: Optional[str] = None, index: Optional[int] = None) -> int:
    """Returns the port of a task; 2222 (plus the rank under MPI) where the environment has none."""
    return self._get_port(role, index, _DEFAULT_PORT)

  def _get_port(
    self, role: Optional[str], index: Optional[int], default: Optional[int]
  ) -> Optional[int]:
    role = self._role(role)
    index = self._index(role, index)
    if not self._is_mpi_worker(role):
      return self._get_int(f"MLP_{role}_{index}_PORT", default)
    port = self._get_int(f"MLP_{role}_0_PORT", default)
    return None if port is None else port + index

  def dispatcher_target(self, role: Optional[str] = None) -> str:
    """Returns the URL of a role's tf.data service, `dispatcher` by default; else a local one."""
    return f"{_GRPC_SCHEME}{self.dispatcher_addr(role) or 'localhost:5050'}"

  def dispatcher_addr(self, role: Optional[str] = None) -> Optional[str]:
    """Returns `host:port` of a role's first task, `dispatcher` by default, or None."""
    return self.get_addr(role or "dispatcher")

  def wait(
    self, role: Optional[str] = None, index: int = 0, timeout: float = -1, use_ssh: bool = True
  ) -> None:
    """Waits until a task listens.

    Args:
      role: its role, by default this process' own.
      index: its index.
      timeout: seconds, counted in steps of 5; not positive waits forever.
      use_ssh: whether to look for its ssh port, which is there as soon as the container is.
    """
    host = self.get_host(role, index)
    if host is None:
      logging.error("host is None")
      return
    port = int(self.ssh_port) if use_ssh and self.ssh_port else self.get_port(role, index)
    waited = 0
    while not check_port(host, port):
      if 0 < timeout <= waited:
        logging.warning("%s:%s did not come up in %s s", host, port, timeout)
        return
      logging.log_every_n_seconds(logging.INFO, "waiting for %s:%s", 60, host, port)
      time.sleep(_WAIT_PERIOD_SECS)
      waited += _WAIT_PERIOD_SECS

  def join(self, role: str = "worker", index: int = 0, use_ssh: bool = True) -> None:
    """Waits until a task has come and gone, then ends this process. Never returns.

    Raises:
      ValueError: if the environment has no such task.
    """
    host = self.get_host(role, index)
    if host is None:
      raise ValueError(f"no host of {role} {index} in the environment, nothing to wait for")
    self.wait(role, index, use_ssh=use_ssh)
    port = int(self.ssh_port) if use_ssh and self.ssh_port else self.get_port(role, index)
    while check_port(host, port, timeout=_JOIN_CHECK_TIMEOUT_SECS):
      time.sleep(_JOIN_PERIOD_SECS)
    if self._has_started_profiler:
      try:
        tf.profiler.experimental.stop()
      except tf.errors.UnavailableError:
        pass  # Nothing was traced.
    logging.info("%s:%d is gone, exit", role, index)
    logging.flush()
    # tf.data service servers do not end with the main thread.
    os._exit(0)

  @property
  def queue_device(self) -> str:
    """The device of a queue that all workers share."""
    if self.all_roles.get("PS"):
      return "/job:ps/task:0/device:CPU:0"
    if self.all_roles.get("WORKER"):
      return "/job:worker/task:0/device:CPU:0"
    return "/device:CPU:0"

  def start_profiler(self, port: int = 6666) -> None:
    """Starts a profiler server, on `port` plus the rank under MPI, once."""
    if self._has_started_profiler:
      return
    tf.profiler.experimental.server.start(port + self.index if self.enable_mpi else port)
    self._has_started_profiler = True

  def profiler_trace(
    self,
    role: str = "dsworker",
    index: int = -1,
    host_tracer_level: int = 2,
    python_tracer_level: int = 0,
    device_tracer_level: int = 1,
    delay_ms: int = 10000,
  ) -> None:
    """Traces tasks into `TENSORBOARD_LOG_PATH` (default `/tensorboard_logs/`).

    Args:
      role: whom to trace.
      index: which of them, all if negative.
      host_tracer_level: TensorFlow's level for the CPU, 1 to 3; 0: off.
      python_tracer_level: TensorFlow's level for Python calls; 0: off.
      device_tracer_level: TensorFlow's level for devices; 0: off.
      delay_ms: when all start, from now; also how long they trace.

    Raises:
      ValueError: if the environment knows no such task.
    """
    addrs = self.get_all_addrs(role) if index < 0 else [self.get_addr(role, index)]
    if not addrs or None in addrs:
      raise ValueError(f"no address of {role} {index} in the environment")
    tf.profiler.experimental.client.trace(
      ",".join(f"grpc://{addr}" for addr in addrs),
      os.environ.get("TENSORBOARD_LOG_PATH", "/tensorboard_logs/"),
      delay_ms,
      options=tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=host_tracer_level,
        python_tracer_level=python_tracer_level,
        device_tracer_level=device_tracer_level,
        delay_ms=delay_ms,
      ),
    )


def add_mpi_exception_hook() -> None:
  """Lets an uncaught exception in a launched rank end all: the others would wait forever."""
  if not is_under_mpi():
    return

  def abort_all_ranks(exception_type: type, value: BaseException, trace: Any) -> None:
    print(f"uncaught exception on rank {get_mpi_rank()}, abort all ranks", file=sys.stderr)
    traceback.print_exception(exception_type, value, trace)
    sys.stderr.flush()
    try:
      from mpi4py import MPI
    except ImportError:
      # Without MPI the launcher ends the other ranks as soon as this process is gone, for which
      # it must not wait for threads that wait for them.
      os._exit(1)
    MPI.COMM_WORLD.Abort(1)

  sys.excepthook = abort_all_ranks


def mlp_pass(
  dispatcher_role: Optional[str] = "dispatcher",
  dsworker_role: Optional[str] = "dsworker",
  worker_role: Optional[str] = "worker",
  ps_role: Optional[str] = "ps",
) -> None:
  """Plays this process' part in tf.data service.

  A dispatcher or data worker serves until worker 0 is gone and never returns. A worker waits for
  them, sets `--data_service_dispatcher` and returns; so does every other process at once.

  A role that is None is not in the job: no process plays it or waits for it. Servers then
  end with the platform's `worker`, and workers look for the service where
  `MLPEnv.dispatcher_target()` says.

  Args:
    dispatcher_role: the platform's name of the dispatcher role.
    dsworker_role: the platform's name of the data worker role.
    worker_role: the platform's name of the trainer role.
    ps_role: the platform's name of the parameter server role.
  """
  dispatcher_role, dsworker_role, worker_role, ps_role = (
    None if role is None else role.upper()
    for role in (dispatcher_role, dsworker_role, worker_role, ps_role)
  )
  if FLAGS.dataset_use_dataservice:
    hooks: tuple[Any, ...] = _tensorflow.original_initializer_hooks()
    for hook in (graph_estimator.DatasetInitializerHook, *hooks):
      hook.begin = begin
      hook.after_create_session = after_create_session
  mlp_env = MLPEnv()
  if not mlp_env.avaiable:
    return
  if mlp_env.role == dispatcher_role:
    _run_dispatcher(mlp_env, worker_role)
  elif mlp_env.role == dsworker_role:
    _run_dsworker(mlp_env, dispatcher_role, worker_role)
  elif mlp_env.role == worker_role:
    if FLAGS.dataset_use_dataservice:
      _use_dataservice(mlp_env, dispatcher_role, dsworker_role)
    logging.info(
      "start %s %d of %s with %d parameter servers, roles: %s",
      worker_role, mlp_env.index, mlp_env.num_replicas(worker_role),
      mlp_env.num_replicas(ps_role) if ps_role else 0, mlp_env.all_roles,
    )  # fmt: skip


def _run_dispatcher(mlp_env: MLPEnv, worker_role: Optional[str]) -> None:
  server = dsvc.DispatchServer(dsvc.DispatcherConfig(port=mlp_env.port))
  logging.info("started the tf.data service dispatcher at %s", server.target)
  _join_worker(mlp_env, worker_role)


def _join_worker(mlp_env: MLPEnv, worker_role: Optional[str]) -> None:
  if worker_role is None:
    mlp_env.join()
  else:
    mlp_env.join(worker_role)


def _run_dsworker(
  mlp_env: MLPEnv, dispatcher_role: Optional[str], worker_role: Optional[str]
) -> None:
  if dispatcher_role is not None:
    mlp_env.wait(dispatcher_role, use_ssh=False)
  target = mlp_env.dispatcher_target(dispatcher_role)
  server = _start_dsworker(mlp_env, target[len(_GRPC_SCHEME) :], mlp_env.port)
  logging.info("started tf.data service worker %d: %s", mlp_env.index, server)
  mlp_env.start_profiler()
  _join_worker(mlp_env, worker_role)


def _use_dataservice(
  mlp_env: MLPEnv, dispatcher_role: Optional[str], dsworker_role: Optional[str]
) -> None:
  if dispatcher_role is not None:
    mlp_env.wait(dispatcher_role, use_ssh=False)
  for index in range(mlp_env.num_replicas(dsworker_role) if dsworker_role else 0):
    mlp_env.wait(dsworker_role, index, use_ssh=False)
  FLAGS.data_service_dispatcher = mlp_env.dispatcher_target(dispatcher_role)
  dispatcher_addr = FLAGS.data_service_dispatcher[len(_GRPC_SCHEME) :]
  # The flag belongs to a configuration that a plain data job may not import.
  num_extra = getattr(FLAGS, "num_extra_dsworker_on_gpu_worker", 0)
  first_port = mlp_env.port - mlp_env.index + get_mpi_size() + mlp_env.index * num_extra
  for i in range(num_extra):
    EXTRA_DSWORKERS.append(_start_dsworker(mlp_env, dispatcher_addr, first_port + i))


def _start_dsworker(mlp_env: MLPEnv, dispatcher_addr: str, port: int) -> dsvc.WorkerServer:
  host = mlp_env.get_host() or mlp_env.host
  return dsvc.WorkerServer(
    dsvc.WorkerConfig(
      dispatcher_address=dispatcher_addr,
      worker_address=net_utils.concat_ip_and_port(host, port),
      port=net_utils.check_port_number(port, "port of the tf.data service worker"),
    )
  )


def begin(self) -> None:
  """Replaces `DatasetInitializerHook.begin`: all ranks read rank 0's registered dataset."""
  self._initializer = self._iterator.initializer
  self._broadcast_dataset_id = None
  graph = tf.compat.v1.get_default_graph()
  dataset_ids = graph.get_collection(_DATASET_ID_COLLECTION)
  if dataset_ids and enable_sync_training():
    lib = find_initialized_backend()
    try:
      if lib is None and env_utils.get_bool("MONOLITH_WITH_BYTEPS"):
        import byteps.tensorflow as lib
      elif lib is None:
        import horovod.tensorflow as lib
    except ImportError as e:
      logging.warning("cannot broadcast the dataset id: %r", e)
    else:
      self._broadcast_dataset_id = [
        lib.broadcast(_to_number(dataset_id), 0, name=f"broadcast_dataset_id{f'_{i}' if i else ''}")
        for i, dataset_id in enumerate(dataset_ids)
      ]
  graph.clear_collection(_DATASET_ID_COLLECTION)


def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
  """Replaces `DatasetInitializerHook.after_create_session`."""
  del coord
  if self._broadcast_dataset_id is not None:
    logging.info("dataset ids: %s", session.run(self._broadcast_dataset_id))
    self._broadcast_dataset_id = None
  session.run(self._initializer)


def _to_number(dataset_id: tf.Tensor) -> tf.Tensor:
  """Returns what can be broadcast of an id, which is a text in newer versions of TensorFlow."""
  if dataset_id.dtype != tf.string:
    return dataset_id
  return tf.strings.to_hash_bucket_fast(dataset_id, 2**62)
