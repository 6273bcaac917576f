"""Lets the processes of a job find one another: Consul, TF_CONFIG, ZooKeeper, MLP, or files.

Each discovery maps a role ("ps", "worker") to `{index: "host:port"}`.

Differences from ByteDance's Monolith: registering an index again stops the first registration's
thread, a ZooKeeper node that vanishes under its owner is written again at once, `deregister` of
something unknown does nothing, and `query` returns a copy.

Longer than 600 lines: scripts and tests replace `MonolithKazooClient`, `consul` and `MLPEnv` in
this module, so the discoveries that look these names up stay in it.
"""

import abc
import collections
import enum
import os
import random
import threading
import time
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from absl import logging
from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from monolith.native_training import consul, net_utils
from monolith.native_training.mlp_utils import MLPEnv, check_port
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers

_RETRY_MAX_BACKOFF_SECS = 5
_NUM_TRIES = 5
_CONSUL_VISIBLE_SECS = 180
_ZK_REGISTRATION_PERIOD = 1800
_ZK_REMOVED_PAUSE_SECS = 0.2
_PS_PORT_TIMEOUT_SECS = 3600

_T = TypeVar("_T")


class ServiceDiscoveryType(enum.Enum):
  """Names a place where processes register themselves."""

  PRIMUS = 1
  CONSUL = 2
  ZK = 3
  MLP = 4


class ServiceDiscovery(abc.ABC):
  """Registers processes by role and index, and finds them."""

  @abc.abstractmethod
  def register(self, name: str, index: int, addr: str) -> None:
    """Announces that task `index` of role `name` listens at `addr`."""

  @abc.abstractmethod
  def deregister(self, name: str, index: int, addr: str) -> None:
    """Takes an announcement back."""

  def query(self, name: str) -> dict[int, str]:  # noqa: B027, optional to override
    """Returns all known tasks of a role, index → address."""

  def close(self) -> None:  # noqa: B027, optional to override
    """Releases connections and threads."""


class HostServiceDiscovery(ServiceDiscovery):
  """Discovery through files `<base>/<name>/<index>` that hold addresses.

  Args:
    base_path: a folder that all processes see.
  """

  def __init__(self, base_path: str):
    self._base_path = base_path

  def register(self, name: str, index: int, addr: str) -> None:
    folder = os.path.join(self._base_path, name)
    os.makedirs(folder, exist_ok=True)
    # Readers must never see half an address.
    temporary = os.path.join(self._base_path, f"{name}_{index}_{os.getpid()}")
    with open(temporary, "w") as f:
      f.write(addr)
    os.replace(temporary, os.path.join(folder, str(index)))
    logging.info("%s %d is at %s", name, index, addr)

  def deregister(self, name: str, index: int, addr: str) -> None:
    os.remove(os.path.join(self._base_path, name, str(index)))

  def query(self, name: str) -> dict[int, str]:
    folder = os.path.join(self._base_path, name)
    addrs = {}
    if os.path.isdir(folder):
      for index in os.listdir(folder):
        with open(os.path.join(folder, index)) as f:
          addrs[int(index)] = f.read()
    return addrs


def retry_with_socket_error(http_call: Callable[[], _T]) -> _T:
  """Calls up to five times while `socket.error` is raised; the last error propagates."""
  for attempt in range(_NUM_TRIES):
    try:
      return http_call()
    except OSError as e:
      if attempt == _NUM_TRIES - 1:
        raise
      logging.warning("attempt %d of %d failed: %r", attempt + 1, _NUM_TRIES, e)
      time.sleep(random.random() * _RETRY_MAX_BACKOFF_SECS)


_HostAndPort = collections.namedtuple("_HostAndPort", ["host", "port"])


class ConsulServiceDiscovery(ServiceDiscovery):
  """All tasks of a job are instances of one Consul service, told apart by tags.

  Args:
    consul_id: the service's name.
    retry_time_secs: pause after the removal of an older registration.
  """

  def __init__(self, consul_id: str, retry_time_secs: float = 3.0):
    self._consul_id = consul_id
    self._retry_time_secs = retry_time_secs
    self._client = consul.Client()

  def register(self, name: str, index: int, addr: str) -> None:
    """Registers and waits until the registration is visible.

    Raises:
      ValueError: if `addr` is not `host:port`.
      OSError: if the agent cannot be reached, or the registration does not show up.
    """
    host_and_port = self._parse_addr(addr)
    while True:
      registered = self.query(name).get(index)
      if registered is None:
        break
      logging.info("%s:%d is registered at %s already, deregister that", name, index, registered)
      self.deregister(name, index, registered)
      time.sleep(self._retry_time_secs)
    retry_with_socket_error(
      lambda: self._client.register(
        self._consul_id,
        host_and_port.port,
        tags={"index": index, "name": name, "ip": host_and_port.host},
      )
    )
    self._wait_until_visible(name, index)

  def _wait_until_visible(self, name: str, index: int) -> None:
    if index in self.query(name):
      return
    for _ in range(int(max(2, _CONSUL_VISIBLE_SECS / max(1, _RETRY_MAX_BACKOFF_SECS)))):
      time.sleep(_RETRY_MAX_BACKOFF_SECS)
      if index in self.query(name):
        return
    raise OSError("This machine is blacklisted by consul.")

  def deregister(self, name: str, index: int, addr: str) -> None:
    port = self._parse_addr(addr).port
    retry_with_socket_error(lambda: self._client.deregister(self._consul_id, port))

  def query_all(self) -> dict[str, dict[int, str]]:
    """Returns all tasks of the job, role → index → address."""
    elements = retry_with_socket_error(lambda: self._client.lookup(self._consul_id, timeout=15))
    addrs = collections.defaultdict(dict)
    for element in elements:
      tags = element["Tags"]
      addrs[tags["name"]][int(tags["index"])] = f"{tags['ip']}:{element['Port']}"
    return dict(addrs)

  def query(self, name: str) -> dict[int, str]:
    return self.query_all().get(name, {})

  def close(self) -> None:
    """Stops the heartbeats of what was registered."""
    # Stand-ins for the client need not have heartbeats.
    getattr(self._client, "close", lambda: None)()

  @staticmethod
  def _parse_addr(addr: str) -> _HostAndPort:
    parts = addr.split(":")
    if len(parts) != 2:
      raise ValueError(f"Invalid addr: {addr}")
    return _HostAndPort(parts[0], net_utils.check_port_number(parts[1], f"port of {addr!r}"))


class TfConfigServiceDiscovery(ServiceDiscovery):
  """The fixed cluster of a TF_CONFIG; worker 0 is the chief where there is one.

  Args:
    tf_config: the decoded TF_CONFIG, `{"cluster": {job: [addr, …]}, "task": {"type", "index"}}`.

  Raises:
    ValueError: if it is not of that form.
  """

  def __init__(self, tf_config: dict[str, Any]):
    cluster = tf_config.get("cluster") if isinstance(tf_config, dict) else None
    if not isinstance(cluster, dict) or not cluster:
      raise ValueError(f"TF_CONFIG has no cluster: {tf_config!r}")
    for job, addrs in cluster.items():
      if not isinstance(addrs, (list, tuple)) or not all(isinstance(a, str) for a in addrs):
        raise ValueError(f"job {job!r} of TF_CONFIG is {addrs!r}, want a list of addresses")
    self._tf_config = tf_config

  def register(self, name: str, index: int, addr: str) -> None:
    """Does nothing: the cluster is fixed."""

  def deregister(self, name: str, index: int, addr: str) -> None:
    """Does nothing: the cluster is fixed."""

  def query(self, name: str) -> dict[int, str]:
    cluster = self._tf_config["cluster"]
    if name == "ps":
      addrs = cluster.get("ps", [])
    elif name == "worker":
      addrs = [*cluster.get("chief", []), *cluster.get("worker", [])]
    else:
      raise ValueError("name must be ps/worker")
    return dict(enumerate(addrs))

  @property
  def server_type(self) -> str:
    task_type, _ = self._task
    return "worker" if task_type == "chief" else task_type

  @property
  def addr(self) -> str:
    """This task's own address."""
    task_type, index = self._task
    addrs = self._tf_config["cluster"].get(task_type, ())
    if not 0 <= index < len(addrs):
      raise ValueError(f"task {task_type}:{index} is not in the cluster of TF_CONFIG: {addrs!r}")
    return addrs[index]

  @property
  def index(self) -> int:
    """This task's index among all workers (the chief is 0), or among the servers."""
    task_type, index = self._task
    return index + 1 if task_type == "worker" and self._tf_config["cluster"].get("chief") else index

  @property
  def _task(self) -> tuple[str, int]:
    task = self._tf_config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
      raise ValueError(f"task of TF_CONFIG is {task!r}, want a type and an index")
    try:
      return task["type"], int(task["index"])
    except (TypeError, ValueError):
      raise ValueError(f"task index of TF_CONFIG is {task['index']!r}, want an integer") from None


class ZKListener:
  """Registers everything again once a lost ZooKeeper session has been replaced."""

  def __init__(self, zkds: "ZKServiceDiscovery"):
    self._zkds = zkds
    self._has_lost = False

  def __call__(self, state: str) -> None:
    if state == KazooState.LOST:
      logging.warning("the zookeeper session is lost")
      self._has_lost = True
    elif state != KazooState.SUSPENDED and self._has_lost:
      self._has_lost = False
      logging.info("zookeeper is back, register again")
      self._zkds.do_all_registrations()


class ZKServiceDiscovery(ServiceDiscovery):
  """Tasks are ephemeral nodes `/monolith/<job>/<role>.<index>` whose data is the address.

  Watches keep a copy of the job's nodes, so queries cost nothing. Each own node has a daemon thread
  that writes it again: every `_ZK_REGISTRATION_PERIOD` seconds, when the session was lost, and
  when another process removed the node.

  Args:
    job_name: the job.
    zk_server: comma-joined addresses, by default `zk_utils.default_zk_servers()`.
    max_tries: attempts of each write.
    delay: first pause between them, in seconds.
  """

  class ThreadSet(NamedTuple):
    """A registration thread and the events that steer it."""

    stop: threading.Event
    wakeup: threading.Event
    thread: threading.Thread

    def signal_stop(self) -> None:
      self.stop.set()
      self.wakeup.set()

    def stop_and_join(self) -> None:
      self.signal_stop()
      if self.thread is not threading.current_thread():
        self.thread.join()

  def __init__(
    self,
    job_name: str,
    zk_server: Optional[str] = None,
    max_tries: int = 3,
    delay: float = 5,
  ):
    self._path_prefix = f"/monolith/{job_name}"
    self._max_tries = max_tries
    self._delay = delay
    # Guards what follows. Callbacks can arrive inside a call of the client: never call it with
    # this lock held.
    self._lock = threading.Lock()
    self._cluster: dict[str, dict[int, str]] = {}
    self._children_token: Optional[object] = None
    self._watched: dict[str, object] = {}
    self._threads: dict[tuple[str, int], ZKServiceDiscovery.ThreadSet] = {}
    self._removed: set[tuple[str, int]] = set()
    self._must_watch_again = False
    # Serializes register, deregister and close, so that each index has one thread.
    self._registration_lock = threading.Lock()
    self._client = None
    try:
      self._client = MonolithKazooClient(zk_server or default_zk_servers())
      self._client.add_listener(ZKListener(self))
      self._client.start()
      self._client.ensure_path(self._path_prefix)
      self._watch_children()
    except Exception as e:
      logging.error("cannot create zk client, %s", e)
      try:
        self.close()
      except Exception as close_error:  # The first error is the one to see.
        logging.warning("cannot close the zk client: %r", close_error)
      raise

  def register(self, name: str, index: int, addr: str) -> None:
    """Writes the node, and keeps it written until `deregister` or `close`.

    Raises:
      ValueError: if `addr` is empty.
      kazoo.retry.RetryFailedError: if the server could not be reached.
    """
    if not addr:
      raise ValueError(f"addr of {name}:{index} is {addr!r}, want host:port")
    with self._registration_lock:
      self._stop_thread(name, index)
      self._write_node(name, index, addr)
      stop, wakeup = threading.Event(), threading.Event()
      thread = threading.Thread(
        target=self._keep_registered,
        args=(name, index, addr, stop, wakeup),
        name=f"ZKRegistration-{name}-{index}",
        daemon=True,
      )
      with self._lock:
        self._threads[name, index] = self.ThreadSet(stop, wakeup, thread)
      thread.start()

  def deregister(self, name: str, index: int, addr: str) -> None:
    with self._registration_lock:
      self._stop_thread(name, index)
      self._retry(self._delete_node, self._node_path(name, index))

  def query(self, name: str) -> dict[int, str]:
    with self._lock:
      return dict(self._cluster.get(name, {}))

  def do_all_registrations(self) -> None:
    """Has every own node written again, without waiting for it."""
    with self._lock:
      self._must_watch_again = True
      threads = list(self._threads.values())
    for thread in threads:
      thread.wakeup.set()

  def close(self) -> None:
    """Ends the session, and with it the own nodes. May be called twice."""
    with self._lock:
      threads, self._threads = list(self._threads.values()), {}
    for thread in threads:
      thread.signal_stop()
    client, self._client = self._client, None
    if client is not None:
      client.stop()  # Before the joins, for it ends calls that wait for a lost server.
      client.close()
    for thread in threads:
      thread.stop_and_join()

  def __del__(self):
    try:
      self.close()
    # The interpreter may be half gone, or the constructor may have failed early.
    except Exception:
      pass

  def _node_path(self, name: str, index: int) -> str:
    return f"{self._path_prefix}/{name}.{index}"

  def _retry(
    self, func: Callable[..., None], *args, interrupt: Optional[Callable[[], bool]] = None
  ) -> None:
    retry = KazooRetry(max_tries=self._max_tries, delay=self._delay, interrupt=interrupt)
    retry(func, *args)

  def _get_client(self) -> MonolithKazooClient:
    client = self._client
    if client is None:
      raise RuntimeError(f"the discovery of {self._path_prefix} is closed")
    return client

  def _write_node(
    self,
    name: str,
    index: int,
    addr: str,
    interrupt: Optional[Callable[[], bool]] = None,
  ) -> None:
    path = self._node_path(name, index)
    self._retry(self._create_or_set_node, path, addr.encode(), interrupt=interrupt)

  def _create_or_set_node(self, path: str, value: bytes) -> None:
    client = self._get_client()
    try:
      client.create(path, value=value, makepath=True, ephemeral=True)
    except NodeExistsError:
      client.set(path, value)

  def _delete_node(self, path: str) -> None:
    try:
      self._get_client().delete(path=path, recursive=True)
    except NoNodeError:
      pass

  def _stop_thread(self, name: str, index: int) -> None:
    with self._lock:
      thread = self._threads.pop((name, index), None)
    if thread is not None:
      thread.stop_and_join()

  def _keep_registered(
    self, name: str, index: int, addr: str, stop: threading.Event, wakeup: threading.Event
  ) -> None:
    failed = False
    while True:
      # A failed write is tried again soon: a whole period would be too long to be missing.
      period = _ZK_REGISTRATION_PERIOD
      wakeup.wait(min(self._delay, period) if failed else period)
      wakeup.clear()
      with self._lock:
        was_removed = (name, index) in self._removed
        self._removed.discard((name, index))
      if was_removed:
        stop.wait(_ZK_REMOVED_PAUSE_SECS)  # Lets a removal of the whole job finish.
      if stop.is_set() or self._client is None:
        return
      try:
        self._write_node(name, index, addr, interrupt=stop.is_set)
        self._watch_children_if_lost()
        failed = False
      except Exception as e:
        failed = True
        if not stop.is_set():
          logging.warning("cannot register %s:%d again: %r", name, index, e)

  def _watch_children_if_lost(self) -> None:
    # A watch ends for good when it finds its folder gone; by now the folder is there again.
    with self._lock:
      must_watch, self._must_watch_again = self._must_watch_again, False
    if must_watch:
      self._watch_children()

  def _watch_children(self) -> None:
    token = object()
    with self._lock:
      self._children_token = token

    def on_children(children: list[str]) -> Optional[bool]:
      with self._lock:
        superseded = self._children_token is not token
      if superseded:
        return False  # Ends this watch.
      self._on_children(children)
      return None

    self._get_client().ChildrenWatch(self._path_prefix, on_children)

  def _on_children(self, children: list[str]) -> None:
    """Follows the job's nodes: watches new ones, forgets vanished ones."""
    with self._lock:
      gone = self._watched.keys() - set(children)
      new = {child: object() for child in children if child not in self._watched}
      for child in gone:
        del self._watched[child]
      self._watched.update(new)
    for child in gone:
      self._set_addr(child, None)
    client = self._client
    for child, token in new.items():
      if client is not None:
        client.DataWatch(f"{self._path_prefix}/{child}", func=self._make_data_watch(child, token))

  def _make_data_watch(self, child: str, token: object) -> Callable[..., Optional[bool]]:
    def on_data(data: Optional[bytes], stat: object, event: object = None) -> Optional[bool]:
      del stat, event
      with self._lock:
        superseded = self._watched.get(child, token) is not token
      if superseded:
        return False  # The node came back and has a newer watch; ends this one.
      self._set_addr(child, data.decode(errors="replace") if data else None)
      return None

    return on_data

  def _set_addr(self, child: str, addr: Optional[str]) -> None:
    name, dot, index = child.rpartition(".")
    if not dot or not index.isdigit():
      logging.warning("ignore the node %s/%s, not <role>.<index>", self._path_prefix, child)
      return
    with self._lock:
      addrs = self._cluster.setdefault(name, {})
      if addr:
        addrs[int(index)] = addr
        return
      addrs.pop(int(index), None)
      own = self._threads.get((name, int(index)))
      if own is None:
        return
      # Another session removed our node: an older one that ended, or a clean-up of the job.
      self._removed.add((name, int(index)))
      self._must_watch_again = True
    own.wakeup.set()


class MLPServiceDiscovery(ServiceDiscovery):
  """The cluster that MLP's environment variables describe."""

  def __init__(self):
    self._mlp_env = MLPEnv()
    self._filters = set()
    self._closed = False
    self.addr = net_utils.concat_ip_and_port(self._mlp_env.host, self._mlp_env.port)

  def register(self, name: str, index: int, addr: str) -> None:
    """Checks that the task is where the environment says, and makes it visible again.

    Raises:
      AssertionError: if role, index, host or port differ from the environment's.
    """
    self._check(name, index, addr)
    self._filters.discard(f"{name.lower()}:{index}")

  def deregister(self, name: str, index: int, addr: str) -> None:
    """Hides a task from queries; asserts like `register`."""
    self._check(name, index, addr)
    self._filters.add(f"{name.lower()}:{index}")

  def deregister_all(self) -> None:
    """Hides every task of every role."""
    for role, num in self._mlp_env.all_roles.items():
      self._filters.update(f"{role.lower()}:{index}" for index in range(num))

  def query(self, name: str, skip_port_check: bool = False) -> dict[int, str]:
    """Returns all tasks of a role that are not hidden.

    Args:
      name: the role.
      skip_port_check: whether to return parameter servers before they answer.

    Raises:
      AssertionError: if the environment has no address of a task, or if a parameter server does
        not answer within an hour.
    """
    if self._closed:
      return {}
    addrs = {}
    for index in range(self._mlp_env.num_replicas(name)):
      if f"{name.lower()}:{index}" in self._filters:
        continue
      addr = self._mlp_env.get_addr(name, index)
      assert addr is not None, f"no address of {name} {index} in the environment"
      if name.lower() == "ps" and not skip_port_check:
        host, port = net_utils.split_host_and_port(addr)
        assert check_port(host, port, timeout=_PS_PORT_TIMEOUT_SECS), f"{addr} connect error!"
      addrs[index] = addr
    return addrs

  def query_all(self) -> dict[str, dict[int, str]]:
    """Returns the tasks of the roles ps, worker and chief; none of a role that the job lacks.

    Ports are not checked: a server that does not answer must not keep one from looking.

    Raises:
      AssertionError: if the environment has no address of a task.
    """
    if self._closed:
      return {}
    return {name: self.query(name, skip_port_check=True) for name in ("ps", "worker", "chief")}

  @property
  def server_type(self) -> Optional[str]:
    return None if self._closed else self._mlp_env.role.lower()

  @property
  def index(self) -> Optional[int]:
    return None if self._closed else self._mlp_env.index

  def close(self) -> None:
    self._closed = True
    self._filters.clear()

  def _check(self, name: str, index: int, addr: str) -> None:
    env = self._mlp_env
    assert name.upper() in env.all_roles, f"{name} is not one of {sorted(env.all_roles)}"
    num = env.num_replicas(name)
    assert 0 <= index < num, f"index of {name} is {index}, want one below {num}"
    host, port = net_utils.split_host_and_port(addr)
    local_hosts = {"local", "localhost", "127.0.0.1", "0.0.0.0"}
    hosts = {env.get_host(name, index), env.host, env.get_host(is_primary=False)} | local_hosts
    assert host in hosts, f"host of {addr} is none of {sorted(h for h in hosts if h)}"
    want = env.get_port(name, index)
    assert port == want, f"port of {addr} is {port}, want {want}"


def deregister_all(consul_id: str) -> None:
  """Takes back every registration of a Consul service."""
  discovery = ConsulServiceDiscovery(consul_id)
  for name, addrs in discovery.query_all().items():
    for index, addr in addrs.items():
      discovery.deregister(name, index, addr)
