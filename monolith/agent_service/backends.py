"""Where training learns which processes serve a model, and serving says what it serves."""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Union

from absl import logging

from monolith.agent_service import session_watch, zk_nodes
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers

_LOCAL_SERVER = "127.0.0.1:2181"
# Watches can be lost with a session, so everything is also written and read this often.
_REFRESH_INTERVAL_SECS = 30

SyncTargets = Union[Sequence[str], Mapping[str, parameter_sync_pb2.ClientConfig.TargetExtraInfo]]


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
class ContainerServiceInfo:
  """How to reach a container.

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

  def serialize(self) -> bytes:
    return json.dumps(dataclasses.asdict(self)).encode("utf-8")

  @classmethod
  def deserialize(cls, data: bytes) -> ContainerServiceInfo:
    known = {field.name for field in dataclasses.fields(cls)}
    values = json.loads(data.decode("utf-8"))
    return cls(**{name: value for name, value in values.items() if name in known})


class SyncBackend(abc.ABC):
  """Tells which processes serve the tables of a parameter server."""

  @abc.abstractmethod
  def subscribe_model(self, model_name: str) -> None:
    """Says which model is trained."""

  @abc.abstractmethod
  def get_sync_targets(self, sub_graph: str) -> tuple[str, SyncTargets]:
    """Returns the served model's name and its addresses, possibly with further information.

    Args:
      sub_graph: `ps_<index>`.
    """

  @abc.abstractmethod
  def start(self) -> None:
    """Starts to watch."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Ends it."""


class ZKBackend(SyncBackend):
  """Containers and what they serve, in ZooKeeper.

    /<bzid>/container_service/<container>               how to reach a container
    /<bzid>/binding/<model>/<sub graph>:<container>     a container serves a sub graph

  What it was told to report is written again after a lost session. What it subscribed to is kept in
  memory: `get_sync_targets` answers from there, also while ZooKeeper is away. Constructing it does
  not connect.

  Args:
    bzid: business the models belong to.
    zk_servers: comma-joined addresses.
  """

  def __init__(self, bzid: str, zk_servers: str | None):
    self._bzid = bzid
    self._zk = MonolithKazooClient(hosts=zk_servers or default_zk_servers() or _LOCAL_SERVER)
    # Never held during a call to ZooKeeper, which may take as long as ZooKeeper is away.
    self._lock = threading.RLock()
    # One report at a time.
    self._report_lock = threading.RLock()
    self._service_infos: dict[Container, ContainerServiceInfo] = {}
    self._available_saved_models: dict[Container, set[SavedModel]] = {}
    self._subscribed: str | None = None
    self._watching = False
    self._bindings: list[str] = []
    self._known_services: dict[Container, ContainerServiceInfo] = {}
    self._watched_containers: set[Container] = set()
    self._session_watch: session_watch.SessionWatch | None = None

  def start(self) -> None:
    """Connects and watches.

    Raises:
      kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
    """
    self._zk.start()
    self._ensure_folders()
    self._session_watch = session_watch.SessionWatch(
      self._zk, self._refresh, "zk-backend", interval_secs=_REFRESH_INTERVAL_SECS
    )
    self._session_watch.start()
    self._watch_bindings()

  def stop(self) -> None:
    if self._session_watch is not None:
      self._session_watch.stop()
      self._session_watch = None
    self._zk.stop()
    self._zk.close()

  def report_service_info(self, container: Container, info: ContainerServiceInfo) -> None:
    """Writes how to reach a container, and writes it again after every lost session."""
    with self._report_lock:
      self._service_infos[container] = info
      zk_nodes.write_ephemeral(self._zk, self._service_path(container), info.serialize())

  def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
    """Returns how to reach a container, `None` if it does not say."""
    data = zk_nodes.read_node(self._zk, self._service_path(container))
    return None if data is None else _parse_service_info(container, data)

  def sync_available_saved_models(
    self, container: Container, saved_models: set[SavedModel]
  ) -> None:
    """Writes what a container serves now; what it no longer serves is removed.

    Bindings that are missing although they were written, or that belong to an earlier session, are
    made again.
    """
    with self._report_lock:
      before = self._available_saved_models.get(container, set())
      # Remembered first: if ZooKeeper is away, the round after it tries again.
      self._available_saved_models[container] = set(saved_models)
      try:
        for saved_model in sorted(before - saved_models, key=str):
          if not zk_nodes.delete_node(self._zk, self._binding_path(saved_model, container)):
            logging.info("%s on %s is gone already", saved_model, container)
      except Exception:
        # What could not be removed must be found again by the next call.
        self._available_saved_models[container] |= before
        raise
      for saved_model in sorted(saved_models, key=str):
        zk_nodes.write_ephemeral(self._zk, self._binding_path(saved_model, container), b"")

  def subscribe_model(self, model_name: str) -> None:
    """Watches who serves `model_name`.

    Raises:
      AssertionError: another model is watched already.
    """
    with self._lock:
      assert self._subscribed in (
        None,
        model_name,
      ), f"already subscribed to model {self._subscribed}, cannot subscribe to {model_name} too"
      self._subscribed = model_name
    if self._zk.connected:
      self._watch_bindings()

  def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
    """Returns `("<model>:<sub graph>", grpc addresses of the containers that serve it)`.

    Answers from memory, with what ZooKeeper said last.

    Raises:
      AssertionError: no model is subscribed.
    """
    assert self._subscribed is not None, "call subscribe_model first"
    targets = []
    with self._lock:
      for binding in self._bindings:
        bound_sub_graph, container = _parse_binding(binding)
        if bound_sub_graph != sub_graph:
          continue
        info = self._known_services.get(container)
        if info is not None and info.grpc:
          targets.append(info.grpc)
    return f"{self._subscribed}:{sub_graph}", targets

  def _ensure_folders(self) -> None:
    self._zk.ensure_path(f"/{self._bzid}/container_service")
    self._zk.ensure_path(f"/{self._bzid}/binding")

  def _refresh(self, lost: bool) -> None:
    """Writes again what was reported, and reads again what is subscribed to."""
    with self._report_lock:
      for container, info in list(self._service_infos.items()):
        self.report_service_info(container, info)
      for container, saved_models in list(self._available_saved_models.items()):
        self.sync_available_saved_models(container, saved_models)
    if self._subscribed is None:
      return
    if lost or not self._watching:
      # The watch of a node that was gone when the session came back has ended.
      self._ensure_folders()
      self._watching = False
      self._watch_bindings()
    else:
      self._set_bindings(zk_nodes.read_children(self._zk, self._bindings_path()))
      for container in self._wanted_containers():
        self._set_service_info(
          container, zk_nodes.read_node(self._zk, self._service_path(container))
        )

  def _watch_bindings(self) -> None:
    with self._lock:
      if self._subscribed is None or self._watching:
        return
      self._watching = True
    try:
      self._zk.ensure_path(self._bindings_path())
      self._zk.ChildrenWatch(self._bindings_path(), self._set_bindings)
    except Exception:
      self._watching = False
      raise

  def _set_bindings(self, bindings: list[str]) -> None:
    with self._lock:
      self._bindings = sorted(bindings)
      new = self._wanted_containers() - self._watched_containers
      self._watched_containers |= new
    for container in sorted(new, key=str):
      self._watch_container(container)

  def _watch_container(self, container: Container) -> None:
    def on_data(data: bytes | None, stat: object, event: object = None) -> bool | None:
      self._set_service_info(container, data)
      with self._lock:
        if data is None and container not in self._wanted_containers():
          # It is gone for good, and its watch with it.
          self._watched_containers.discard(container)
          return False
      return None

    try:
      self._zk.DataWatch(self._service_path(container), on_data)
    except Exception:
      with self._lock:
        self._watched_containers.discard(container)
      raise

  def _set_service_info(self, container: Container, data: bytes | None) -> None:
    info = None if data is None else _parse_service_info(container, data)
    with self._lock:
      if info is None:
        self._known_services.pop(container, None)
      else:
        self._known_services[container] = info

  def _wanted_containers(self) -> set[Container]:
    with self._lock:
      return {_parse_binding(binding)[1] for binding in self._bindings}

  def _bindings_path(self) -> str:
    return f"/{self._bzid}/binding/{self._subscribed}"

  def _binding_path(self, saved_model: SavedModel, container: Container) -> str:
    return f"/{self._bzid}/binding/{saved_model.model_name}/{saved_model.sub_graph}:{container}"

  def _service_path(self, container: Container) -> str:
    return f"/{self._bzid}/container_service/{container}"


def _parse_binding(binding: str) -> tuple[str, Container]:
  sub_graph, _, container = binding.partition(":")
  cluster, _, container_id = container.partition(":")
  return sub_graph, Container(cluster, container_id)


def _parse_service_info(container: Container, data: bytes) -> ContainerServiceInfo | None:
  try:
    return ContainerServiceInfo.deserialize(data)
  except (ValueError, TypeError, AttributeError) as error:
    logging.warning("Ignoring what container %s says: %r", container, error)
    return None
