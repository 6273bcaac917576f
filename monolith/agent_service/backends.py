"""Tells training which processes serve a model, and publishes what serving processes serve."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Union

from absl import logging
from kazoo.exceptions import NodeExistsError

from monolith.agent_service import bindings, layouts, session_watch, zk_nodes
from monolith.agent_service.bindings import Container as Container
from monolith.agent_service.bindings import ContainerServiceInfo as ContainerServiceInfo
from monolith.agent_service.bindings import SavedModel as SavedModel
from monolith.agent_service.layouts import Layout
from monolith.agent_service.layouts import SavedModelDeployConfig as SavedModelDeployConfig
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers

_LOCAL_SERVER = "127.0.0.1:2181"
# Watches can be lost with a session, so everything is also written and read this often.
_REFRESH_INTERVAL_SECS = 30

SyncTargets = Union[Sequence[str], Mapping[str, parameter_sync_pb2.ClientConfig.TargetExtraInfo]]


class SyncBackend(abc.ABC):
  """Knows which processes serve the tables of a parameter server."""

  @abc.abstractmethod
  def subscribe_model(self, model_name: str) -> None:
    """Follows the serving processes of the model that is trained."""

  @abc.abstractmethod
  def get_sync_targets(self, sub_graph: str) -> tuple[str, SyncTargets]:
    """Returns the served model's name and its addresses, possibly with further information.

    Args:
      sub_graph: `ps_<index>`.
    """

  @abc.abstractmethod
  def start(self) -> None:
    """Starts to watch the serving processes."""

  @abc.abstractmethod
  def stop(self) -> None:
    """Ends it."""


class ZKBackend(SyncBackend):
  """Declared models, layouts, containers and their bindings, in ZooKeeper.

  The docstrings of `bindings` and `layouts` draw the nodes. Reports are written again after a lost
  session. Followed nodes are kept in memory: `get_sync_targets` and `get_service_map` answer from
  there, even while ZooKeeper is away. Constructing a backend does not connect.

  Args:
    bzid: business the models belong to.
    zk_servers: comma-joined addresses.
  """

  def __init__(self, bzid: str, zk_servers: str | None):
    self._bzid = bzid
    self._zk = MonolithKazooClient(hosts=zk_servers or default_zk_servers() or _LOCAL_SERVER)
    self._lock = threading.RLock()
    # One report at a time; held during calls to ZooKeeper, so readers must not take it.
    self._report_lock = threading.RLock()
    self._service_infos: dict[Container, ContainerServiceInfo] = {}
    self._available_saved_models: dict[Container, set[SavedModel]] = {}
    self._subscribed: str | None = None
    self._bindings: bindings.BindingMap | None = None
    self._layouts: dict[str, tuple[layouts.LayoutWatch, set[str]]] = {}
    self._session_watch: session_watch.SessionWatch | None = None

  @property
  def zk(self) -> Any:
    """The client."""
    return self._zk

  def start(self) -> None:
    """Connects to ZooKeeper and starts to watch.

    Raises:
      kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
    """
    self._zk.start()
    self._ensure_folders()
    self._bindings = bindings.BindingMap(self._zk, self._bzid)
    self._session_watch = session_watch.SessionWatch(
      self._zk, self._refresh, "zk-backend", interval_secs=_REFRESH_INTERVAL_SECS
    )
    self._session_watch.start()
    if self._subscribed is not None:
      self._bindings.watch(self._subscribed)

  def stop(self) -> None:
    if self._session_watch is not None:
      self._session_watch.stop()
      self._session_watch = None
    self._zk.stop()
    self._zk.close()

  # ---- reports of containers ----

  def report_service_info(self, container: Container, info: ContainerServiceInfo) -> None:
    """Writes the addresses of a container, and writes them again after every lost session."""
    with self._report_lock:
      self._service_infos[container] = info
      path = bindings.service_path(self._bzid, container)
      zk_nodes.write_ephemeral(self._zk, path, info.serialize())

  def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
    """Returns the addresses of a container, `None` if it has not reported them."""
    data = zk_nodes.read_node(self._zk, bindings.service_path(self._bzid, container))
    return None if data is None else bindings.parse_service_info(container, data)

  def sync_available_saved_models(
    self, container: Container, saved_models: set[SavedModel]
  ) -> None:
    """Writes the bindings of a container, and removes those that no longer hold.

    Bindings that are missing although they were written, or that belong to an earlier session, are
    made again.
    """
    with self._report_lock:
      before = self._available_saved_models.get(container, set())
      # Remembered first: if ZooKeeper is away, the next round writes it.
      self._available_saved_models[container] = set(saved_models)
      try:
        for saved_model in sorted(before - saved_models, key=str):
          path = bindings.binding_path(self._bzid, saved_model, container)
          if not zk_nodes.delete_node(self._zk, path):
            logging.info("%s on %s is gone already", saved_model, container)
      except Exception:
        # The next call must find those that could not be removed.
        self._available_saved_models[container] |= before
        raise
      for saved_model in sorted(saved_models, key=str):
        path = bindings.binding_path(self._bzid, saved_model, container)
        zk_nodes.write_ephemeral(self._zk, path, b"")

  # ---- bindings ----

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
    if self._bindings is not None:
      self._bindings.watch(model_name)

  def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
    """Returns `("<model>:<sub graph>", grpc addresses of the containers that serve it)`.

    Answers from memory, with the last state that ZooKeeper reported.

    Raises:
      AssertionError: no model is subscribed.
    """
    assert self._subscribed is not None, "call subscribe_model first"
    saved_model = SavedModel(self._subscribed, sub_graph)
    targets = [] if self._bindings is None else self._bindings.get_addresses(saved_model)
    return str(saved_model), targets

  def get_services(self, saved_model: SavedModel) -> dict[Container, ContainerServiceInfo]:
    """Returns the containers that serve a sub graph of a followed model, and their addresses."""
    return {} if self._bindings is None else self._bindings.get_services(saved_model)

  def get_service_map(self) -> dict[str, list[str]]:
    """Returns `<model>:<sub graph>` -> addresses of every followed model, from memory."""
    return {} if self._bindings is None else self._bindings.get_service_map()

  # ---- layouts ----

  def register_layout_callback(self, layout_path: str, callback: Callable[[Layout], None]) -> None:
    """Calls `callback` with the whole layout, at once and whenever it changes.

    The bindings of its models are followed from then on. Models that nobody declared are left out,
    with an error in the log.

    Raises:
      AssertionError: the backend is not started, or the layout has a callback already.
    """
    assert self._bindings is not None, "call start first"
    assert layout_path not in self._layouts, f"{layout_path} has a callback already"

    def on_layout(layout: Layout) -> None:
      self._follow_models(layout_path, {saved_model.model_name for saved_model, _ in layout})
      callback(layout)

    watch = layouts.LayoutWatch(self._zk, self._bzid, layout_path, on_layout)
    self._layouts[layout_path] = (watch, set())
    watch.watch()

  def list_saved_models(self, model_name: str) -> list[SavedModel]:
    """Returns the declared sub graphs of a model, sorted."""
    path = f"/{self._bzid}/saved_models/{model_name}"
    return [SavedModel(model_name, child) for child in zk_nodes.read_children(self._zk, path)]

  def decl_saved_model(
    self, saved_model: SavedModel, config: SavedModelDeployConfig, overwrite: bool = False
  ) -> None:
    """Declares how to serve a sub graph.

    Raises:
      ValueError: it is declared already, and `overwrite` is false.
    """
    path = layouts.saved_model_path(self._bzid, saved_model)
    try:
      self._zk.create(path, config.serialize(), makepath=True)
    except NodeExistsError:
      if not overwrite:
        raise ValueError(f"{saved_model} is declared already, say overwrite to replace") from None
      self._zk.set(path, config.serialize())

  def add_to_layout(self, layout_path: str, saved_model: SavedModel) -> None:
    """Publishes a sub graph; does nothing if it is published already."""
    self._zk.ensure_path(f"{layout_path}/{saved_model}")

  def list_layout(self, layout_path: str) -> list[str]:
    """Returns `<model>:<sub graph>` of the sub graphs published to a layout, sorted."""
    return zk_nodes.read_children(self._zk, layout_path)

  def remove_from_layout(self, layout_path: str, saved_model: SavedModel) -> None:
    """Undoes `add_to_layout`; does nothing if the sub graph is not published."""
    zk_nodes.delete_node(self._zk, f"{layout_path}/{saved_model}")

  def bzid_info(self) -> dict[str, Any]:
    """Returns `{model_info, container_info, layout_info}`: declared, running and published."""
    root = f"/{self._bzid}"
    models: dict[str, Any] = {}
    for model_name in zk_nodes.read_children(self._zk, f"{root}/saved_models"):
      models[model_name] = {}
      for saved_model in self.list_saved_models(model_name):
        config = layouts.read_deploy_config(self._zk, self._bzid, saved_model)
        models[model_name][saved_model.sub_graph] = {
          "model_base_path": None if config is None else config.model_base_path,
          "version_policy": None if config is None else config.version_policy,
          "bindings": [],
        }
    containers: dict[str, Any] = {}
    for name in zk_nodes.read_children(self._zk, f"{root}/container_service"):
      info = self.get_service_info(Container(*name.partition(":")[::2]))
      containers[name] = {
        "service_info": None if info is None else vars(info).copy(),
        "saved_models": [],
      }
    for model_name in zk_nodes.read_children(self._zk, f"{root}/binding"):
      for binding in zk_nodes.read_children(self._zk, f"{root}/binding/{model_name}"):
        sub_graph, _, name = binding.partition(":")
        if sub_graph in models.get(model_name, {}):
          models[model_name][sub_graph]["bindings"].append(name)
        if name in containers:
          containers[name]["saved_models"].append(f"{model_name}:{sub_graph}")
    return {
      "model_info": models,
      "container_info": containers,
      "layout_info": {
        name: zk_nodes.read_children(self._zk, f"{root}/layouts/{name}")
        for name in zk_nodes.read_children(self._zk, f"{root}/layouts")
      },
    }

  # ---- after a lost session ----

  def _ensure_folders(self) -> None:
    for folder in ("container_service", "binding", "saved_models", "layouts"):
      self._zk.ensure_path(f"/{self._bzid}/{folder}")

  def _refresh(self, lost: bool) -> None:
    """Writes all reports again, and reads all followed nodes again."""
    if lost:
      self._ensure_folders()
    with self._report_lock:
      for container, info in list(self._service_infos.items()):
        self.report_service_info(container, info)
      for container, saved_models in list(self._available_saved_models.items()):
        self.sync_available_saved_models(container, saved_models)
    for watch, _ in list(self._layouts.values()):
      watch.refresh(lost)
    if self._bindings is not None:
      self._bindings.refresh(lost)

  def _follow_models(self, layout_path: str, model_names: set[str]) -> None:
    assert self._bindings is not None
    watch, _ = self._layouts[layout_path]
    before = {self._subscribed}.union(*(models for _, models in self._layouts.values()))
    self._layouts[layout_path] = (watch, model_names)
    wanted = {self._subscribed}.union(*(models for _, models in self._layouts.values()))
    for model_name in before - wanted:
      self._bindings.unwatch(str(model_name))
    for model_name in sorted(model_names):
      self._bindings.watch(model_name)


@contextlib.contextmanager
def connect(bzid: str, zk_servers: str | None) -> Iterator[ZKBackend]:
  """Yields a started backend, and stops it afterwards.

  Raises:
    kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
  """
  backend = ZKBackend(bzid, zk_servers)
  try:
    backend.start()
    yield backend
  finally:
    backend.stop()
