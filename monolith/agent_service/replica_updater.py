"""Says in ZooKeeper which replicas this process has, and in which state they are."""

from __future__ import annotations

import threading
import time
from typing import Any

from absl import logging
from kazoo.exceptions import NodeExistsError

from monolith.agent_service import zk_nodes
from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.tfs_monitor import TFSMonitor
from monolith.agent_service.utils import AgentConfig, ModelState
from monolith.native_training.metric import cli

_METRICS_INTERVAL_SECS = 60


class ReplicaUpdater:
  """Registers the tasks of an agent v1, and keeps their state up to date.

    /<bzid>/service/<base_name>[/<idc>:<cluster>]/<server_type>:<task>/<replica>

  A node that is missing is made again, whatever the reason: a lost session, or somebody who deleted
  it.

  Args:
    zk_client: a started client.
    config: says what the process hosts.
    monitor: asks its servers.
    host: the address under which others reach them.
  """

  def __init__(self, zk_client: Any, config: AgentConfig, monitor: TFSMonitor, host: str):
    self._zk = zk_client
    self._config = config
    self._monitor = monitor
    self._host = host
    self._metas: dict[str, ReplicaMeta] = {}
    self._versions: dict[str, tuple[int, float]] = {}
    self._stopped = threading.Event()
    self._thread: threading.Thread | None = None
    self._metrics = cli.get_cli("monolith.agent")
    self._last_metrics = -float("inf")

  @property
  def replica_id(self) -> int:
    """The id of this process's replicas; made by ZooKeeper where the settings have none."""
    return -1 if self._config.replica_id is None else self._config.replica_id

  def register(self) -> None:
    """Writes every task with state UNKNOWN.

    Raises:
      KazooException: ZooKeeper does not answer.
      NodeExistsError: another process has this replica id.
    """
    for server_type in self._config.server_types():
      tasks = self._config.ps_tasks() if server_type == "ps" else [0]
      for task in tasks:
        name = f"{server_type}_{task}" if server_type != "entry" else "entry"
        if name not in self._metas:
          self._metas[name] = self._make_meta(server_type, task)
        self._write(self._metas[name])

  def start(self) -> None:
    """Starts to ask the servers, every `update_model_status_interval` seconds."""
    self._stopped.clear()
    self._thread = threading.Thread(target=self._run, name="replica-updater", daemon=True)
    self._thread.start()

  def stop(self) -> None:
    self._stopped.set()
    if self._thread is not None:
      # A call to a ZooKeeper that is away returns only when the client is stopped.
      self._thread.join(timeout=1)
      self._thread = None

  def update(self) -> None:
    """Asks the servers once, and writes what changed or is missing."""
    for name, meta in list(self._metas.items()):
      state, version = self._monitor.get_state(name)
      meta.stat = int(state)
      if state == ModelState.AVAILABLE and self._versions.get(name, (None,))[0] != version:
        self._versions[name] = (version, time.time())
      self._write(meta)

  def deregister(self) -> None:
    """Deletes the nodes of this process."""
    for meta in self._metas.values():
      zk_nodes.delete_node(self._zk, meta.get_path(self._config.path_prefix))

  def _make_meta(self, server_type: str, task: int) -> ReplicaMeta:
    port = self._config.get_server_port(server_type)
    archon_port = self._config.get_server_port(server_type, "archon")
    is_ipv6 = ":" in self._host
    host = f"[{self._host}]" if is_ipv6 else self._host
    addresses = {
      "address_ipv6" if is_ipv6 else "address": f"{host}:{port}",
      "archon_address_ipv6" if is_ipv6 else "archon_address": f"{host}:{archon_port}",
    }
    return ReplicaMeta(
      stat=int(ModelState.UNKNOWN),
      model_name=self._config.base_name,
      server_type=server_type,
      task=task,
      replica=self.replica_id,
      **addresses,
    )

  def _write(self, meta: ReplicaMeta) -> None:
    if self.replica_id == -1:
      self._take_replica_id(meta)
      return
    meta.replica = self.replica_id
    path = meta.get_path(self._config.path_prefix)
    data = zk_nodes.read_node(self._zk, path)
    if data is not None and not _is_same_process(data, meta):
      raise NodeExistsError(f"{path} belongs to another process: {data[:200]!r}, want a free id")
    zk_nodes.write_ephemeral(self._zk, path, meta.serialize())

  def _take_replica_id(self, meta: ReplicaMeta) -> None:
    """Lets ZooKeeper count: the number of the new node becomes the id of all replicas here."""
    folder = meta.get_path(self._config.path_prefix).rpartition("/")[0]
    self._zk.ensure_path(folder)
    # ZooKeeper appends ten digits, which makes eleven.
    path = self._zk.create(f"{folder}/0", b"", ephemeral=True, sequence=True)
    self._config.replica_id = int(path.rpartition("/")[2])
    meta.replica = self._config.replica_id
    if meta.get_path(self._config.path_prefix) != path:
      zk_nodes.delete_node(self._zk, path)
    zk_nodes.write_ephemeral(self._zk, meta.get_path(self._config.path_prefix), meta.serialize())

  def _run(self) -> None:
    while not self._stopped.wait(self._config.update_model_status_interval):
      try:
        self.update()
        self._emit_metrics()
      except Exception as error:  # ZooKeeper may be away for long: the next round tries again.
        if not self._stopped.is_set():
          logging.warning("Cannot say how the models are, trying again: %r", error)

  def _emit_metrics(self) -> None:
    now = time.time()
    if not self._config.use_metrics or now - self._last_metrics < _METRICS_INTERVAL_SECS:
      return
    self._last_metrics = now
    for name, (version, changed) in self._versions.items():
      tags = {"model_name": str(self._config.base_name), "sub_model": name}
      self._metrics.emit_store("latest_version", version, tags)
      self._metrics.emit_store("seconds_since_version_changed", now - changed, tags)


def _is_same_process(data: bytes, meta: ReplicaMeta) -> bool:
  """Tells whether a node is of this process, if of an earlier session."""
  try:
    return not data or ReplicaMeta.deserialize(data).get_address() == meta.get_address()
  except (ValueError, TypeError):
    return False
