"""Follows in ZooKeeper which replicas serve which task of a model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from absl import logging

from monolith.agent_service import agent_service_pb2, backends, session_watch, zk_nodes
from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.replica_updater import ReplicaUpdater
from monolith.agent_service.tfs_monitor import TFSMonitor
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
    # Watches of an earlier session, which a new one replaces, end when they are called.
    self._generation = 0
    self._poller: session_watch.SessionWatch | None = None

  @property
  def config(self) -> AgentConfig:
    """Returns the argument of the constructor."""
    return self._config

  @property
  def path_prefix(self) -> str:
    return f"/{self._config.bzid}/service/{self._config.base_name}"

  def watch_data(self) -> None:
    """Starts to follow, with watches and with a thread that reads everything now and then."""
    self._watch_all()
    self._poller = session_watch.SessionWatch(
      self._zk, self._refresh, "replica-watcher", interval_secs=_POLL_INTERVAL_SECS
    )
    self._poller.start()

  def stop(self) -> None:
    """Ends the polling thread."""
    if self._poller is not None:
      self._poller.stop()
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
      replicas.setdefault(str(path.task), []).append(address)
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
      if path.replica == replica:
        return address
    return None

  def get_replicas_with_extra_info(
    self, server_type: int, task: int, idc: str | None = None, cluster: str | None = None
  ) -> dict[str, TargetExtraInfo]:
    """Returns address -> where it is, for the replicas that `get_replicas` returns."""
    return {
      address: TargetExtraInfo(idc=path.idc, cluster=path.cluster, replica_id=path.replica)
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
      if path.server_type != type_name or path.index is None:
        continue
      if task is not None and int(path.index) != task:
        continue
      if meta.stat != ModelState.AVAILABLE or not path.ship_in(idc, cluster):
        continue
      address = meta.get_address(self._use_archon, self._address_family)
      if address is not None:
        found.append((path, meta, address))
    found.sort(key=lambda i: (int(i[0].index or 0), i[0].location or "", i[0].replica))
    return found

  def _watch_all(self) -> None:
    with self._lock:
      self._generation += 1
      self._watched.clear()
    self._zk.ensure_path(self.path_prefix)
    watch_tasks = self._make_children_watcher(self._watch_task)
    if self._config.dc_aware:
      watch = functools.partial(self._watch_children, on_children=watch_tasks)
      self._watch_children(self.path_prefix, self._make_children_watcher(watch))
    else:
      self._watch_children(self.path_prefix, watch_tasks)

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
      generation = self._generation

    def on_event(children: list[str]) -> bool | None:
      if generation != self._generation:
        return False
      on_children(path, children)
      return None

    self._zk.ChildrenWatch(path, on_event)

  def _watch_replica(self, path: str) -> None:
    with self._lock:
      if path in self._watched:
        return
      self._watched.add(path)
      generation = self._generation

    def on_event(data: bytes | None, stat: object, event: object = None) -> bool | None:
      if generation != self._generation:
        return False
      self._set_replica(path, data)
      return None

    self._zk.DataWatch(path, on_event)

  def _set_replica(self, path: str, data: bytes | None) -> None:
    if ZKPath(path).replica_id is None:
      return
    with self._lock:
      if data is None:
        self._replicas.pop(path, None)
        return
      try:
        self._replicas[path] = ReplicaMeta.deserialize(data)
      except (ValueError, TypeError, AttributeError) as error:
        logging.warning("Ignoring what %s says: %r", path, error)
        self._replicas.pop(path, None)

  def _refresh(self, lost: bool) -> None:
    if lost:
      # Watches of nodes that were gone when the session came back have ended.
      self._watch_all()
    self._read_all()

  def _read_all(self) -> None:
    """Reads every replica; nodes that are gone are forgotten."""
    folders = [self.path_prefix]
    if self._config.dc_aware:
      folders = self._children(self.path_prefix)
    seen = set()
    for folder in folders:
      for task in self._children(folder):
        for path in self._children(task):
          data = zk_nodes.read_node(self._zk, path)
          if data is not None:
            seen.add(path)
            self._set_replica(path, data)
    with self._lock:
      for path in set(self._replicas) - seen:
        del self._replicas[path]

  def _children(self, path: str) -> list[str]:
    return [f"{path}/{child}" for child in zk_nodes.read_children(self._zk, path)]


class ReplicaManager:
  """Both halves of an agent v1: says what this process has, and follows what others have.

  Args:
    zk_client: a started client.
    config: the agent's settings.
    monitor: asks the servers of this process.
    host: the address under which others reach them.
    use_archon, zk_watch_address_family: as for `ReplicaWatcher`.
  """

  def __init__(
    self,
    zk_client: Any,
    config: AgentConfig,
    monitor: TFSMonitor,
    host: str,
    use_archon: bool = False,
    zk_watch_address_family: str = "ipv4",
  ):
    self.updater = ReplicaUpdater(zk_client, config, monitor, host)
    self.watcher = ReplicaWatcher(zk_client, config, use_archon, zk_watch_address_family)

  def start(self) -> None:
    """Registers with state UNKNOWN, then follows and updates.

    Raises:
      KazooException: ZooKeeper does not answer, or another process has this replica id.
    """
    self.updater.register()
    self.watcher.watch_data()
    self.updater.start()

  def stop(self) -> None:
    self.updater.stop()
    self.watcher.stop()

  def is_available(self, server_type: int, num_tasks: int) -> bool:
    """Tells whether every task of a role has an available replica.

    Args:
      server_type: a `ServerType`.
      num_tasks: how many tasks it has.
    """
    config = self.watcher.config
    place = (config.idc, config.cluster) if config.dc_aware else (None, None)
    return all(self.watcher.get_replicas(server_type, i, *place) for i in range(num_tasks))


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
