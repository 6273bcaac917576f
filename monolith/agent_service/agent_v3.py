"""The agent of unified serving: one server that serves what a layout in ZooKeeper says."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from typing import Any

import grpc
from absl import logging

from monolith.agent_service import backends, layouts, serving_protos
from monolith.agent_service.agent_base import AgentBase
from monolith.agent_service.agent_service import AgentDataProvider, AgentService
from monolith.agent_service.tfs_monitor import TFSMonitor
from monolith.agent_service.utils import AgentConfig, ModelState

_REPORT_SECS = 60
_BINDING_SECS = 30
# How long to wait while a server that starts does not answer, or does not serve everything yet.
_STARTING_SECS = 0.2
# Servers ask their agents every 15 seconds who serves a model: so long a model that was taken from
# the layout is still served after its binding is gone.
_DRAIN_SECS = 20
_UNIFIED = "unified"
_AVAILABLE = ModelState.AVAILABLE


class AgentV3(AgentBase):
  """Follows a layout, tells the server which models to serve, and says which ones it serves.

  The server starts with no model. A change of the layout is written to its configuration file and
  told to it by `HandleReloadConfigRequest`, again until it takes it. A model that leaves the layout
  loses its binding first, and is unloaded when nobody should ask for it any more.

  Args:
    config: the agent's settings, `agent_version` 3.
    tfs_log, host, agent_host, command: as for `AgentBase`.
    backend: one that is not started yet; ZooKeeper's at `config.zk_servers` by default.
    drain_secs: how long a model that left the layout is still served.
  """

  def __init__(
    self,
    config: AgentConfig,
    *args: Any,
    backend: backends.ZKBackend | None = None,
    drain_secs: float = _DRAIN_SECS,
    **kwargs: Any,
  ):
    if config.agent_version != 3:
      raise ValueError(f"agent_version is {config.agent_version}, want 3")
    if config.bzid is None:
      raise ValueError("bzid is not set")
    super().__init__(config, *args, **kwargs)
    self._backend = backend or backends.ZKBackend(config.bzid, config.zk_servers)
    self._drain_secs = drain_secs
    self._filter = layouts.LayoutFilter(
      config.layout_filters, config.shard_id, config.num_shard or 1
    )
    self._layout_path = config.layout_path
    self._container = backends.Container(config.container_cluster, config.container_id)
    monitor_host = self._host if self._host != "0.0.0.0" else "127.0.0.1"
    self._monitor = TFSMonitor(config, monitor_host)
    self._service: AgentService | None = None
    self._threads: list[threading.Thread] = []
    self._lock = threading.Lock()
    self._wanted: dict[backends.SavedModel, Any] = {}
    # Model that left the layout -> its configuration, and until when it is still served.
    self._leaving: dict[backends.SavedModel, tuple[Any, float]] = {}
    self._changed = threading.Event()
    descriptor, self._config_path = tempfile.mkstemp(prefix="models_", suffix=".conf")
    os.close(descriptor)

  @property
  def container(self) -> backends.Container:
    """The name of this process in ZooKeeper."""
    return self._container

  def start(self) -> None:
    """Connects, starts the server, answers calls, and follows the layout.

    Raises:
      kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
      OSError: the server cannot be started.
      RuntimeError: the agent's port is taken.
    """
    self._backend.start()
    self._start_server(config_path=self._config_path)
    self._service = AgentService(
      AgentDataProvider(self._backend.get_service_map),
      conf=self._config,
      port=self._config.agent_port,
      host=self._agent_host,
    )
    self._service.start()
    self._backend.report_service_info(self._container, self._service_info())
    self._backend.register_layout_callback(self._layout_path, self._on_layout)
    for target in (self._apply_loop, self._report_loop):
      thread = threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True)
      thread.start()
      self._threads.append(thread)

  def _service_info(self) -> backends.ContainerServiceInfo:
    host = f"[{self._host}]" if ":" in self._host else self._host
    config = self._config
    return backends.ContainerServiceInfo(
      grpc=f"{host}:{config.tfs_port_grpc}",
      http=f"{host}:{config.tfs_port_http}",
      archon=f"{host}:{config.tfs_port_archon}",
      agent=None if self._service is None else self._service.address,
      idc=config.idc,
      debug_info=f"layout {self._layout_path}, shard {config.shard_id} of {config.num_shard}",
    )

  def _on_layout(self, layout: layouts.Layout) -> None:
    wanted = {}
    for saved_model, config in layout:
      if not self._filter.accepts(saved_model.sub_graph):
        continue
      try:
        wanted[saved_model] = serving_protos.gen_model_config(
          str(saved_model), config.model_base_path or "", config.version_policy or "latest"
        )
      except ValueError as error:
        logging.error("Cannot serve %s: %s", saved_model, error)
    now = time.monotonic()
    with self._lock:
      for saved_model, model in self._wanted.items():
        if saved_model not in wanted:
          self._leaving[saved_model] = (model, now + self._drain_secs)
      for saved_model in wanted:
        self._leaving.pop(saved_model, None)
      self._wanted = wanted
    logging.info("The layout has %d models for this process", len(wanted))
    self._changed.set()

  def _current_models(self) -> list[Any]:
    """Returns what the server shall serve now: the layout, and what is still being left."""
    now = time.monotonic()
    with self._lock:
      self._leaving = {m: left for m, left in self._leaving.items() if left[1] > now}
      models = {**{m: config for m, (config, _) in self._leaving.items()}, **self._wanted}
      return [models[saved_model] for saved_model in sorted(models, key=str)]

  def _apply_loop(self) -> None:
    applied: list[Any] = []
    failure = ""
    while not self._ended.is_set():
      # Also without a change: time passes for models that leave.
      self._changed.wait(self._interval(is_starting=bool(failure)))
      self._changed.clear()
      models = self._current_models()
      if self._ended.is_set():
        return
      if models == applied:
        continue
      try:
        self._write_config(models)
        status = self._monitor.handle_reload_config_request(_UNIFIED, models)
        failure = ""
        if status.error_code == 0:
          applied = models
        else:
          logging.error("The server refuses the layout: %s", status.error_message)
      except (grpc.RpcError, OSError, ValueError) as error:
        if not failure and not self._ended.is_set():  # once, not five times a second
          logging.warning("Cannot tell the server its models, trying again: %s", error)
        failure = str(error)

  def _interval(self, is_starting: bool) -> float:
    """Returns how long to wait for the next question to the server."""
    interval = self._config.update_model_status_interval
    return min(interval, _STARTING_SECS) if is_starting else interval

  def _write_config(self, models: list[Any]) -> None:
    """Replaces the file at once, so that a server that polls it never sees half of it."""
    text = str(serving_protos.gen_model_server_config(models))
    temporary = f"{self._config_path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
      file.write(text)
    os.replace(temporary, self._config_path)

  def _report_loop(self) -> None:
    reported: set[backends.SavedModel] | None = None
    last_binding = last_report = time.monotonic()
    is_starting = True
    while not self._ended.wait(self._interval(is_starting)):
      now = time.monotonic()
      with self._lock:
        wanted = list(self._wanted)
      try:
        available = {m for m in wanted if self._monitor.get_state(str(m))[0] == _AVAILABLE}
        is_starting = len(available) < len(wanted)
        if available != reported or now - last_binding >= _BINDING_SECS:
          self._backend.sync_available_saved_models(self._container, available)
          reported, last_binding = available, now
        if now - last_report >= _REPORT_SECS:
          self._backend.report_service_info(self._container, self._service_info())
          last_report = now
      except Exception as error:  # ZooKeeper may be away for long: the next round tries again.
        reported = None
        if not self._ended.is_set():
          logging.warning("Cannot say what is served, trying again: %r", error)

  def _stop_parts(self) -> None:
    self._ended.set()
    self._changed.set()
    # Ends the session, and with it the registration: nobody asks a server that is about to end.
    self._backend.stop()
    for thread in self._threads:
      thread.join(timeout=10)
    if self._service is not None:
      self._service.stop()
    self._monitor.stop()
    if os.path.exists(self._config_path):
      os.remove(self._config_path)
