"""Keeps in memory who serves the sub graphs of models.

/<bzid>/container_service/<container>               how to reach a container
/<bzid>/binding/<model>/<sub graph>:<container>     a container serves a sub graph
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from absl import logging

from monolith.agent_service import zk_nodes
from monolith.agent_service.json_node import JsonNode


@dataclasses.dataclass(frozen=True)
class SavedModel:
  """A sub graph of an exported model.

  Attributes:
    model_name: the model.
    sub_graph: `entry`, `ps_0`, ...
  """

  model_name: str
  sub_graph: str

  def __str__(self) -> str:
    return f"{self.model_name}:{self.sub_graph}"


@dataclasses.dataclass(frozen=True)
class Container:
  """A process that serves.

  Attributes:
    ctx_cluster: the cluster it runs in.
    ctx_id: its name there.
  """

  ctx_cluster: str
  ctx_id: str

  def __str__(self) -> str:
    return f"{self.ctx_cluster}:{self.ctx_id}"


@dataclasses.dataclass
class ContainerServiceInfo(JsonNode):
  """Says how to reach a container.

  Attributes:
    grpc: address of the prediction service.
    http: address of its REST interface.
    archon: address behind a load balancer.
    agent: address of the agent.
    idc: data centre.
    debug_info: free text.
  """

  grpc: str | None = None
  http: str | None = None
  archon: str | None = None
  agent: str | None = None
  idc: str | None = None
  debug_info: str | None = None


def service_path(bzid: str, container: Container) -> str:
  return f"/{bzid}/container_service/{container}"


def binding_path(bzid: str, saved_model: SavedModel, container: Container) -> str:
  return f"/{bzid}/binding/{saved_model.model_name}/{saved_model.sub_graph}:{container}"


def parse_service_info(container: Container, data: bytes) -> ContainerServiceInfo | None:
  """Returns what a node says, `None` and a warning if that is nonsense."""
  try:
    return ContainerServiceInfo.deserialize(data)
  except (ValueError, TypeError) as error:
    logging.warning("Ignoring what container %s says: %r", container, error)
    return None


class BindingMap:
  """The addresses of the models it watches; answers from memory, also while ZooKeeper is away.

  Args:
    zk: a client.
    bzid: business the models belong to.
  """

  def __init__(self, zk: Any, bzid: str):
    self._zk = zk
    self._bzid = bzid
    # Never held during a call to ZooKeeper, which may take as long as ZooKeeper is away.
    self._lock = threading.RLock()
    self._bindings: dict[str, list[str]] = {}
    self._watched_models: set[str] = set()
    self._services: dict[Container, ContainerServiceInfo] = {}
    self._watched_containers: set[Container] = set()

  def watch(self, model_name: str) -> None:
    """Starts to follow who serves a model; does nothing when it does already."""
    with self._lock:
      if model_name in self._watched_models:
        return
      self._watched_models.add(model_name)

    def on_children(children: list[str]) -> bool | None:
      with self._lock:
        if model_name not in self._watched_models:
          return False
      self._set_bindings(model_name, children)
      return None

    try:
      self._zk.ensure_path(f"/{self._bzid}/binding/{model_name}")
      self._zk.ChildrenWatch(f"/{self._bzid}/binding/{model_name}", on_children)
    except Exception:
      with self._lock:
        self._watched_models.discard(model_name)
      raise

  def unwatch(self, model_name: str) -> None:
    """Forgets a model."""
    with self._lock:
      self._watched_models.discard(model_name)
      self._bindings.pop(model_name, None)

  def get_services(self, saved_model: SavedModel) -> dict[Container, ContainerServiceInfo]:
    """Returns the containers that serve a sub graph, and how to reach them."""
    with self._lock:
      found = {}
      for binding in self._bindings.get(saved_model.model_name, ()):
        sub_graph, container = _parse_binding(binding)
        info = self._services.get(container)
        if sub_graph == saved_model.sub_graph and info is not None:
          found[container] = info
      return found

  def get_addresses(self, saved_model: SavedModel) -> list[str]:
    """Returns the gRPC addresses of the containers that serve a sub graph."""
    return [info.grpc for info in self.get_services(saved_model).values() if info.grpc]

  def get_service_map(self) -> dict[str, list[str]]:
    """Returns `<model>:<sub graph>` -> addresses, of all models that are watched."""
    with self._lock:
      served = {
        SavedModel(model_name, _parse_binding(binding)[0])
        for model_name, bindings in self._bindings.items()
        for binding in bindings
      }
      return {str(saved_model): self.get_addresses(saved_model) for saved_model in served}

  def refresh(self, lost: bool) -> None:
    """Reads everything again; after a lost session watches again too.

    Raises:
      KazooException: ZooKeeper does not answer; what is known stays.
    """
    with self._lock:
      models = sorted(self._watched_models)
      if lost:
        # The watch of a node that was gone when the session came back has ended.
        self._watched_models.clear()
        self._watched_containers.clear()
    for model_name in models:
      if lost:
        self.watch(model_name)
      else:
        path = f"/{self._bzid}/binding/{model_name}"
        self._set_bindings(model_name, zk_nodes.read_children(self._zk, path))
    for container in sorted(self._wanted_containers(), key=str):
      self._set_service(
        container, zk_nodes.read_node(self._zk, service_path(self._bzid, container))
      )

  def _set_bindings(self, model_name: str, children: list[str]) -> None:
    with self._lock:
      self._bindings[model_name] = sorted(children)
      new = self._wanted_containers() - self._watched_containers
      self._watched_containers |= new
    for container in sorted(new, key=str):
      self._watch_container(container)

  def _watch_container(self, container: Container) -> None:
    def on_data(data: bytes | None, stat: object, event: object = None) -> bool | None:
      self._set_service(container, data)
      with self._lock:
        if data is None and container not in self._wanted_containers():
          # It is gone for good, and its watch with it.
          self._watched_containers.discard(container)
          return False
      return None

    try:
      self._zk.DataWatch(service_path(self._bzid, container), on_data)
    except Exception:
      with self._lock:
        self._watched_containers.discard(container)
      raise

  def _set_service(self, container: Container, data: bytes | None) -> None:
    info = None if data is None else parse_service_info(container, data)
    with self._lock:
      if info is None:
        self._services.pop(container, None)
      else:
        self._services[container] = info

  def _wanted_containers(self) -> set[Container]:
    with self._lock:
      return {
        _parse_binding(binding)[1] for bindings in self._bindings.values() for binding in bindings
      }


def _parse_binding(binding: str) -> tuple[str, Container]:
  sub_graph, _, container = binding.partition(":")
  cluster, _, container_id = container.partition(":")
  return sub_graph, Container(cluster, container_id)
