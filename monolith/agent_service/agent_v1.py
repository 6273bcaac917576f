"""The agent of a process with a role: parameter servers, entry, dense part, or all in one pod."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from monolith.agent_service import agent_service_pb2, ports
from monolith.agent_service.agent_base import AgentBase
from monolith.agent_service.agent_service import AgentService
from monolith.agent_service.model_manager import ModelManager
from monolith.agent_service.replica_manager import ReplicaManager
from monolith.agent_service.tfs_monitor import TFSMonitor
from monolith.agent_service.utils import AgentConfig
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers

_START_LIMIT_SECS = 3600
_POLL_SECS = 0.2


class AgentV1(AgentBase):
  """Registers the process, starts its servers in order, and says in which state they are.

  Parameter servers start first, then the dense part if it is alone, then the entry, when every
  other task has an available replica somewhere. A server that ends, ends the agent.

  Args:
    config: the agent's settings, `agent_version` 1.
    tfs_log, host, agent_host, command: as for `AgentBase`.
    zk_client: a client that is not started yet; one for `config.zk_servers` by default.
  """

  def __init__(self, config: AgentConfig, *args: Any, zk_client: Any = None, **kwargs: Any):
    if config.agent_version != 1:
      raise ValueError(f"agent_version is {config.agent_version}, want 1")
    super().__init__(config, *args, **kwargs)
    self._zk = zk_client or MonolithKazooClient(config.zk_servers or default_zk_servers())
    monitor_host = self._host if self._host != "0.0.0.0" else "127.0.0.1"
    self._monitor = TFSMonitor(config, monitor_host)
    self._manager = ReplicaManager(self._zk, config, self._monitor, self._host)
    self._service: AgentService | None = None
    self._model_manager: ModelManager | None = None
    self._starter: threading.Thread | None = None

  @property
  def manager(self) -> ReplicaManager:
    return self._manager

  def start(self) -> None:
    """Connects, registers with state UNKNOWN, watches, answers calls and starts the servers.

    Raises:
      kazoo.handlers.threading.KazooTimeoutError: no ZooKeeper answers.
      kazoo.exceptions.NodeExistsError: another process has this replica id.
      RuntimeError: the agent's port is taken.
    """
    self._zk.start()
    self._manager.start()
    self._service = AgentService(
      self._manager.watcher, port=self._config.agent_port, host=self._agent_host
    )
    self._service.start()
    self._starter = threading.Thread(target=self._start_servers, name="starter", daemon=True)
    self._starter.start()

  def _start_servers(self) -> None:
    try:
      config = self._config
      if config.rough_sort_model_name and config.rough_sort_model_p2p_path:
        self._model_manager = ModelManager(
          config.rough_sort_model_name,
          config.rough_sort_model_p2p_path,
          str(config.rough_sort_model_local_path),
          config.use_metrics,
          max_waiting_sec=config.max_waiting_sec,
        )
        self._model_manager.start()
      for server_type in config.server_types():
        if server_type == "entry":
          self._wait_for("parameter servers", self._are_others_available)
        if self._stopped or self._ended.is_set():
          return
        self._start_server(server_type)
        self._wait_for(f"the port of {server_type}", self._make_port_check(server_type))
    except Exception as error:
      if not self._stopped:
        self._fail(error)

  def _make_port_check(self, server_type: str) -> Callable[[], bool]:
    port = self._config.get_server_port(server_type)
    host = "127.0.0.1" if self._host == "0.0.0.0" else self._host
    return lambda: ports.check_port_open(port, host)

  def _are_others_available(self) -> bool:
    is_available = self._manager.is_available
    return is_available(agent_service_pb2.PS, self._config.num_ps) and (
      not self._config.dense_alone or is_available(agent_service_pb2.DENSE, 1)
    )

  def _wait_for(self, what: str, predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_LIMIT_SECS
    while not predicate():
      if self._stopped or self._ended.is_set():
        return
      if time.monotonic() > deadline:
        raise TimeoutError(f"{what} did not come up within {_START_LIMIT_SECS} s")
      time.sleep(_POLL_SECS)
    logging.info("Done waiting for %s", what)

  def _stop_parts(self) -> None:
    if self._model_manager is not None:
      self._model_manager.stop()
    self._manager.stop()
    # Ends the session, and with it the registration: nobody asks servers that are about to end.
    self._zk.stop()
    self._zk.close()
    if self._starter is not None and self._starter is not threading.current_thread():
      self._starter.join()
    if self._service is not None:
      self._service.stop()
    self._monitor.stop()
