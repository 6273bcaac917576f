"""Follows in ZooKeeper which replicas serve which task of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from absl import logging
from kazoo.exceptions import NoNodeError

from monolith.agent_service import agent_service_pb2, backends
from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.utils import AgentConfig, ModelState, ZKPath
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2

TargetExtraInfo = parameter_sync_pb2.ClientConfig.TargetExtraInfo

# Watches can be lost with a session, so everything is also read this often.
_POLL_INTERVAL_SECS = 60


class ReplicaWatcher:
  """Knows the replicas of every task of one model.

    /<bzid>/service/<base_name>[/<idc>:<cluster>]/<server_type>:<index>/<replica_id>

  Args:
    zk_client: a started client.
    config: whose `bzid`, `base_name` and `dc_aware` say what to watch.
    use_archon: take addresses behind a load balancer.
    zk_watch_address_family: `ipv4` or `ipv6`.
  """

  def __init__(
    self,
    zk_client: Any,
    config: AgentConfig,
    use_archon: bool = False,
    zk_watch_address_family: str = "ipv4",
  ):
    self._zk = zk_client
    self._config = config
    self._use_archon = use_archon
    self._address_family = zk_watch_address_family
    self._lock = threading.RLock()
    # Path of a replica's node -> what it says.
    self._replicas: dict[str, ReplicaMeta] = {}
    self._watched: set[str] = set()
    self._stopped = threading.Event()
    self._poller: threading.Thread | None = None

  @property
  def path_prefix(self) -> str:
    return f"/{self._config.bzid}/service/{self._config.base_name}"

  def watch_data(self) -> None:
    """Starts to follow, with watches and with a thread that reads everything now and then."""
    self._zk.ensure_path(self.path_prefix)
    watch_tasks = self._make_children_watcher(self._watch_task)
    if self._config.dc_aware:
      self._watch_children(
        self.path_prefix,
        self._make_children_watcher(lambda path: self._watch_children(path, watch_tasks)),
      )
    else:
      self._watch_children(self.path_prefix, watch_tasks)
    self._stopped.clear()
    self._poller = threading.Thread(target=self._poll, name="replica-watcher", daemon=True)
    self._poller.start()

  def stop(self) -> None:
    """Ends the polling thread."""
    self._stopped.set()
    if self._poller is not None:
      self._poller.join()
      self._poller = None

  def to_sync_wrapper(self) -> backends.SyncBackend:
    """Returns the same as a `SyncBackend` for parameter servers."""
    return _ReplicaSyncBackend(self)

  def get_replicas(
    self, server_type: int, task: int, idc: str | None = None, cluster: str | None = None
  ) -> list[str]:
    """Returns the addresses of a task's available replicas, ordered by replica.

    Args:
      server_type: a `ServerType`.
      task: index of the task.
      idc: only replicas of this data centre and `cluster`, if both are given.
      cluster: only replicas of this cluster and `idc`, if both are given.
    """
    return list(self.get_replicas_with_extra_info(server_type, task, idc, cluster))

  def get_all_replicas(
    self, server_type: int, idc: str | None = None, cluster: str | None = None
  ) -> dict[str, list[str]]:
    """Returns `<server_type>:<index>` -> addresses of its available replicas, for all tasks."""
    replicas: dict[str, list[str]] = {}
    for path, _, address in self._available(server_type, None, idc, cluster):
      replicas.setdefault(path.task, []).append(address)
    return replicas

  def get_replica(
    self,
    server_type: int,
    task: int,
    replica: int,
    idc: str | None = None,
    cluster: str | None = None,
  ) -> str | None:
    """Returns the address of one replica, `None` if it is not available."""
    for path, _, address in self._available(server_type, task, idc, cluster):
      if int(path.replica_id) == replica:
        return address
    return None

  def get_replicas_with_extra_info(
    self, server_type: int, task: int, idc: str | None = None, cluster: str | None = None
  ) -> dict[str, TargetExtraInfo]:
    """Returns address -> where it is, for the replicas that `get_replicas` returns."""
    return {
      address: TargetExtraInfo(idc=path.idc, cluster=path.cluster, replica_id=int(path.replica_id))
      for path, _, address in self._available(server_type, task, idc, cluster)
    }

  def _available(
    self, server_type: int, task: int | None, idc: str | None, cluster: str | None
  ) -> list[tuple[ZKPath, ReplicaMeta, str]]:
    type_name = agent_service_pb2.ServerType.Name(server_type).lower()
    with self._lock:
      replicas = [(ZKPath(path), meta) for path, meta in self._replicas.items()]
    found = []
    for path, meta in replicas:
      if path.server_type != type_name or (task is not None and int(path.index) != task):
        continue
      if meta.stat != ModelState.AVAILABLE or not path.ship_in(idc, cluster):
        continue
      address = meta.get_address(self._use_archon, self._address_family)
      if address is not None:
        found.append((path, meta, address))
    found.sort(key=lambda i: (int(i[0].index), i[0].location or "", int(i[0].replica_id)))
    return found

  def _watch_task(self, task_path: str) -> None:
    self._watch_children(task_path, self._make_children_watcher(self._watch_replica))

  def _make_children_watcher(
    self, watch_child: Callable[[str], None]
  ) -> Callable[[str, list[str]], None]:
    def on_children(path: str, children: list[str]) -> None:
      wanted = {f"{path}/{child}" for child in children}
      with self._lock:
        # The watch of a node ends with the node: one that comes back needs a new one.
        for child_path in [p for p in self._watched if p.rpartition("/")[0] == path]:
          if child_path not in wanted:
            self._watched.discard(child_path)
      for child_path in sorted(wanted):
        watch_child(child_path)

    return on_children

  def _watch_children(self, path: str, on_children: Callable[[str, list[str]], None]) -> None:
    with self._lock:
      if path in self._watched:
        return
      self._watched.add(path)

    self._zk.ChildrenWatch(path, lambda children: on_children(path, children))

  def _watch_replica(self, path: str) -> None:
    with self._lock:
      if path in self._watched:
        return
      self._watched.add(path)
    self._zk.DataWatch(path, lambda data, stat, event=None: self._set_replica(path, data))

  def _set_replica(self, path: str, data: bytes | None) -> None:
    if ZKPath(path).replica_id is None:
      return
    with self._lock:
      if data is None:
        self._replicas.pop(path, None)
        return
      try:
        self._replicas[path] = ReplicaMeta.deserialize(data)
      except (ValueError, TypeError) as error:
        logging.warning("Ignoring what %s says: %r", path, error)
        self._replicas.pop(path, None)

  def _poll(self) -> None:
    while not self._stopped.wait(_POLL_INTERVAL_SECS):
      try:
        self._read_all()
      except Exception:  # ZooKeeper may be away for a while: the next round tries again.
        logging.exception("Cannot read the replicas below %s", self.path_prefix)

  def _read_all(self) -> None:
    """Reads every replica; nodes that are gone are forgotten."""
    folders = [self.path_prefix]
    if self._config.dc_aware:
      folders = [f"{self.path_prefix}/{child}" for child in self._children(self.path_prefix)]
    seen = set()
    for folder in folders:
      for task in self._children(folder):
        for replica in self._children(f"{folder}/{task}"):
          path = f"{folder}/{task}/{replica}"
          try:
            data, _ = self._zk.get(path)
          except NoNodeError:
            continue
          seen.add(path)
          self._set_replica(path, data)
    with self._lock:
      for path in set(self._replicas) - seen:
        del self._replicas[path]

  def _children(self, path: str) -> list[str]:
    try:
      return self._zk.get_children(path)
    except NoNodeError:
      return []


class _ReplicaSyncBackend(backends.SyncBackend):
  """The parameter servers that a `ReplicaWatcher` knows."""

  def __init__(self, watcher: ReplicaWatcher):
    self._watcher = watcher

  def subscribe_model(self, model_name: str) -> None:
    """Does nothing: the watcher's configuration says which model it follows."""

  def get_sync_targets(self, sub_graph: str) -> tuple[str, dict[str, TargetExtraInfo]]:
    task = int(sub_graph.rsplit("_", 1)[-1])
    return sub_graph, self._watcher.get_replicas_with_extra_info(agent_service_pb2.PS, task)

  def start(self) -> None:
    self._watcher.watch_data()

  def stop(self) -> None:
    self._watcher.stop()
