"""Asks the servers of this host how their models are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc

from monolith.agent_service import names, serving_protos
from monolith.agent_service.utils import AgentConfig, DeployType, ModelState

if TYPE_CHECKING:
  from tensorflow_serving.apis import get_model_status_pb2, status_pb2
  from tensorflow_serving.config import model_server_config_pb2

_TIMEOUT_SECS = 5
# Servers are on this host and start beside the agent: to try again soon costs nothing.
_CHANNEL_OPTIONS = (
  ("grpc.enable_http_proxy", 0),
  ("grpc.initial_reconnect_backoff_ms", 200),
  ("grpc.min_reconnect_backoff_ms", 200),
  ("grpc.max_reconnect_backoff_ms", 500),
)
_NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


class TFSMonitor:
  """Speaks `ModelService` with the servers of an agent.

  Args:
    config: knows their ports.
    host: where they listen.
  """

  def __init__(self, config: AgentConfig, host: str = "127.0.0.1"):
    self._config = config
    self._host = host
    self._lock = threading.Lock()
    self._channels: dict[str, grpc.Channel] = {}

  def connect(self) -> None:
    """Does nothing but opening the channels, which the first call would do too."""
    for server_type in self._server_types():
      self._stub(server_type)

  def stop(self) -> None:
    with self._lock:
      for channel in self._channels.values():
        channel.close()
      self._channels.clear()

  def get_addr(self, sub_model_name: str) -> str:
    """Returns the address of the server that serves a sub model.

    Args:
      sub_model_name: `ps_0`, `entry`, `dense_0`, or `<model>:<sub graph>` in unified serving.

    Raises:
      ValueError: this process has no such server.
    """
    if self._config.deploy_type == DeployType.UNIFIED:
      server_type = "unified"
    else:
      server_type, _ = names.pasre_sub_model_name(sub_model_name.rpartition(":")[2])
    return f"{self._host}:{self._config.get_server_port(server_type)}"

  def get_model_status(
    self, model_name: str, version: int | None = None
  ) -> list[get_model_status_pb2.ModelVersionStatus]:
    """Returns the states of a model's versions; one of version -1 and code 5 if it is unknown.

    Raises:
      grpc.RpcError: the server does not answer.
    """
    from tensorflow_serving.apis import get_model_status_pb2

    request = get_model_status_pb2.GetModelStatusRequest(
      model_spec=serving_protos.gen_model_spec(model_name, version)
    )
    stub = self._stub_at(self.get_addr(model_name))
    try:
      return list(stub.GetModelStatus(request, timeout=_TIMEOUT_SECS).model_version_status)
    except grpc.RpcError as error:
      if error.code() != grpc.StatusCode.NOT_FOUND:
        raise
      return [
        serving_protos.gen_model_version_status(-1, ModelState.UNKNOWN, _NOT_FOUND, error.details())
      ]

  def get_state(self, model_name: str) -> tuple[ModelState, int]:
    """Returns state and version of a model: its newest available version, else the newest.

    A server that does not answer, or does not know the model, is `UNKNOWN` and version -1.
    """
    try:
      status = serving_protos.newest_version_status(self.get_model_status(model_name))
    except grpc.RpcError:
      status = None
    if status is None:
      return ModelState.UNKNOWN, -1
    return ModelState(status.state), status.version

  def handle_reload_config_request(
    self, server_type: str, models: Sequence[model_server_config_pb2.ModelConfig]
  ) -> status_pb2.StatusProto:
    """Tells a server which models it shall serve from now on.

    Args:
      server_type: `ps`, `entry`, `dense` or `unified`.
      models: all of them.

    Returns:
      The server's status; code 0 is OK.

    Raises:
      grpc.RpcError: the server does not answer.
    """
    from tensorflow_serving.apis import model_management_pb2

    request = model_management_pb2.ReloadConfigRequest(
      config=serving_protos.gen_model_server_config(models)
    )
    stub = self._stub(server_type)
    # A server may answer only when the models are loaded.
    return stub.HandleReloadConfigRequest(request, timeout=self._config.max_waiting_sec).status

  def is_serving(self, server_type: str) -> bool:
    """Tells whether a server answers calls, whatever it says."""
    from tensorflow_serving.apis import get_model_status_pb2

    request = get_model_status_pb2.GetModelStatusRequest(
      model_spec=serving_protos.gen_model_spec("?")
    )
    try:
      self._stub(server_type).GetModelStatus(request, timeout=_TIMEOUT_SECS)
    except grpc.RpcError as error:
      return error.code() not in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
      )
    return True

  def _server_types(self) -> list[str]:
    return self._config.server_types()

  def _stub(self, server_type: str) -> Any:
    return self._stub_at(f"{self._host}:{self._config.get_server_port(server_type)}")

  def _stub_at(self, address: str) -> Any:
    from tensorflow_serving.apis import model_service_pb2_grpc

    with self._lock:
      if address not in self._channels:
        self._channels[address] = grpc.insecure_channel(
          address,
          options=_CHANNEL_OPTIONS,
        )
      return model_service_pb2_grpc.ModelServiceStub(self._channels[address])
