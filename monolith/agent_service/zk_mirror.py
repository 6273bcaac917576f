"""A copy of the nodes below a business in memory, and what can be asked of it.

Differences from ByteDance's Monolith: scheduling and publishing of agents v2 (portal, publish,
resource) has no user in the open. The mirror reads what clients write there, and nothing more.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from absl import logging

from monolith.agent_service import agent_service_pb2, zk_nodes
from monolith.agent_service.data_def import (
  Event,
  EventType,
  ModelMeta,
  PublishMeta,
  ReplicaMeta,
  ResourceSpec,
)
from monolith.agent_service.json_node import JsonNode
from monolith.agent_service.utils import ModelState, ZKPath

_EVENT_TYPES = {
  "portal": EventType.PORTAL,
  "publish": EventType.PUBLISH,
  "service": EventType.SERVICE,
  "resource": EventType.RESOURCE,
}


class ZKMirror:
  """Follows portal, publish, resource and service nodes of a business.

  Args:
    zk: a started client.
    bzid: the business.
    events: gets an `Event` for every change, if given.
  """

  def __init__(self, zk: Any, bzid: str, events: queue.Queue[Event] | None = None):
    self._zk = zk
    self._bzid = bzid
    self._events = events
    self._lock = threading.RLock()
    self._data: dict[str, bytes] = {}
    self._watched: set[str] = set()

  def start(self) -> None:
    """Watches everything below the four folders."""
    for folder in _EVENT_TYPES:
      self._zk.ensure_path(f"/{self._bzid}/{folder}")
      self._watch(f"/{self._bzid}/{folder}")

  @property
  def models(self) -> dict[str, ModelMeta]:
    """Returns the requests of clients by model."""
    found = self._parse("portal", ModelMeta)
    return {path.rpartition("/")[2]: meta for path, meta in found.items()}

  @property
  def publishes(self) -> list[PublishMeta]:
    """Returns the orders to load or unload that processes were given."""
    return list(self._parse("publish", PublishMeta).values())

  @property
  def resources(self) -> list[ResourceSpec]:
    """Returns the free resources of processes."""
    return list(self._parse("resource", ResourceSpec).values())

  def get_all_replicas(self, server_type: int) -> dict[str, list[str]]:
    """Returns `<model>:<type>:<task>` -> addresses of its available replicas.

    Args:
      server_type: a `ServerType`.
    """
    type_name = agent_service_pb2.ServerType.Name(server_type).lower()
    replicas: dict[str, list[str]] = {}
    for text, meta in sorted(self._parse("service", ReplicaMeta).items()):
      path, address = ZKPath(text), meta.get_address()
      if path.server_type == type_name and path.replica_id is not None:
        if meta.stat == ModelState.AVAILABLE and address is not None:
          replicas.setdefault(f"{path.base_name}:{path.task}", []).append(address)
    return replicas

  def _parse(self, folder: str, cls: type[JsonNode]) -> dict[str, Any]:
    prefix = f"/{self._bzid}/{folder}/"
    with self._lock:
      nodes = {path: data for path, data in self._data.items() if path.startswith(prefix) and data}
    found = {}
    for path, data in sorted(nodes.items()):
      try:
        found[path] = cls.deserialize(data)
      except (ValueError, TypeError) as error:
        logging.warning("Ignoring what %s says: %r", path, error)
    return found

  def _watch(self, path: str) -> None:
    with self._lock:
      if path in self._watched:
        return
      self._watched.add(path)
    self._zk.DataWatch(path, lambda data, stat, event=None: self._set(path, data))
    if zk_nodes.read_node(self._zk, path) is not None:
      self._zk.ChildrenWatch(path, lambda children: self._set_children(path, children))

  def _set_children(self, path: str, children: list[str]) -> None:
    wanted = {f"{path}/{child}" for child in children}
    with self._lock:
      # The watch of a node ends with the node: one that comes back needs a new one.
      for child in [p for p in self._watched if p.rpartition("/")[0] == path and p not in wanted]:
        self._watched.discard(child)
    for child in sorted(wanted):
      self._watch(child)

  def _set(self, path: str, data: bytes | None) -> bool | None:
    with self._lock:
      before = self._data.get(path)
      if data is None:
        self._data.pop(path, None)
        self._watched.discard(path)
      else:
        self._data[path] = data
    if self._events is not None and data != before:
      folder = path.split("/")[2]
      self._events.put(Event(path, data or b"", _EVENT_TYPES[folder]))
    # The watch goes with the node.
    return False if data is None and before is not None else None
