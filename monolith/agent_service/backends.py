"""Where training learns which processes serve a model, and serving says what it serves."""

from __future__ import annotations

import abc
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Union

from absl import logging
from kazoo.exceptions import NodeExistsError, NoNodeError

from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers

_LOCAL_SERVER = "127.0.0.1:2181"

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

  Constructing it does not connect.

  Args:
    bzid: business the models belong to.
    zk_servers: comma-joined addresses.
  """

  def __init__(self, bzid: str, zk_servers: str | None):
    self._bzid = bzid
    self._zk = MonolithKazooClient(hosts=zk_servers or default_zk_servers() or _LOCAL_SERVER)
    # Watches run in a thread of the client, which may be calling from under the lock.
    self._lock = threading.RLock()
    self._available_saved_models: dict[Container, set[SavedModel]] = {}
    self._subscribed: str | None = None
    self._watching = False
    self._bindings: list[str] = []

  def start(self) -> None:
    self._zk.start()
    self._zk.ensure_path(f"/{self._bzid}/container_service")
    self._zk.ensure_path(f"/{self._bzid}/binding")
    with self._lock:
      self._watch_bindings()

  def stop(self) -> None:
    self._zk.stop()
    self._zk.close()

  def report_service_info(self, container: Container, info: ContainerServiceInfo) -> None:
    """Writes how to reach a container, for as long as this session lives."""
    self._write(f"/{self._bzid}/container_service/{container}", info.serialize())

  def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
    """Returns how to reach a container, `None` if it does not say."""
    try:
      data, _ = self._zk.get(f"/{self._bzid}/container_service/{container}")
    except NoNodeError:
      return None
    return ContainerServiceInfo.deserialize(data)

  def sync_available_saved_models(
    self, container: Container, saved_models: set[SavedModel]
  ) -> None:
    """Writes what a container serves now; what it no longer serves is removed."""
    with self._lock:
      before = self._available_saved_models.get(container, set())
      for saved_model in sorted(before - saved_models, key=str):
        try:
          self._zk.delete(self._binding_path(saved_model, container))
        except NoNodeError:
          logging.info("%s on %s is gone already", saved_model, container)
      for saved_model in sorted(saved_models - before, key=str):
        self._write(self._binding_path(saved_model, container), b"")
      self._available_saved_models[container] = set(saved_models)

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

    Raises:
      AssertionError: no model is subscribed.
    """
    assert self._subscribed is not None, "call subscribe_model first"
    with self._lock:
      bindings = list(self._bindings)
    targets = []
    for binding in bindings:
      bound_sub_graph, _, container = binding.partition(":")
      if bound_sub_graph != sub_graph:
        continue
      cluster, _, container_id = container.partition(":")
      info = self.get_service_info(Container(cluster, container_id))
      if info is not None and info.grpc:
        targets.append(info.grpc)
    return f"{self._subscribed}:{sub_graph}", targets

  def _watch_bindings(self) -> None:
    if self._subscribed is None or self._watching:
      return
    self._watching = True
    path = f"/{self._bzid}/binding/{self._subscribed}"
    self._zk.ensure_path(path)
    self._zk.ChildrenWatch(path, self._set_bindings)

  def _set_bindings(self, bindings: list[str]) -> None:
    with self._lock:
      self._bindings = sorted(bindings)

  def _binding_path(self, saved_model: SavedModel, container: Container) -> str:
    return f"/{self._bzid}/binding/{saved_model.model_name}/{saved_model.sub_graph}:{container}"

  def _write(self, path: str, value: bytes) -> None:
    try:
      self._zk.create(path, value, ephemeral=True, makepath=True)
    except NodeExistsError:
      self._zk.set(path, value)
