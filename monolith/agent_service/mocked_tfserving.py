"""A server that loads nothing, and says what TensorFlow Serving would say about it.

Tests of agents use it where the model does not matter.
"""

from __future__ import annotations

import os
import threading
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import text_format
from tensorflow_serving.apis import (
  get_model_status_pb2,
  model_management_pb2,
  model_service_pb2_grpc,
)
from tensorflow_serving.config import model_server_config_pb2

from monolith.agent_service import serving_protos
from monolith.agent_service.utils import ModelState

_STEP_SECS = 0.05
_NEXT_STATE = {
  ModelState.START: ModelState.LOADING,
  ModelState.LOADING: ModelState.AVAILABLE,
  ModelState.UNLOADING: ModelState.END,
}
_NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


class FakeTFServing(model_service_pb2_grpc.ModelServiceServicer):
  """Answers `GetModelStatus` and `HandleReloadConfigRequest`.

  Every model passes through START and LOADING to AVAILABLE, and through UNLOADING to END when a new
  configuration does not have it any more. An unknown model is a version -1 with error code 5.

  Args:
    model_name: name of the one model.
    base_path: the folder of its versions; those that are there are served.
    num_versions: how many versions to pretend where the folder has none, or is not there.
    port: where to listen; 0 for a free port. `self.port` says which.
    max_workers: how many calls it answers at a time.
    model_config_file: a `ModelServerConfig` in text form, instead of the one model. It is read
      again when it changes.

  Raises:
    RuntimeError: the port is taken.
  """

  def __init__(
    self,
    model_name: str | None = None,
    base_path: str | None = None,
    num_versions: int = 1,
    port: int = 8500,
    max_workers: int = 10,
    model_config_file: str | None = None,
  ):
    self._num_versions = num_versions
    self._model_config_file = model_config_file
    self._file_stamp: tuple[int, int] | None = None
    self._lock = threading.Lock()
    self._states: dict[str, dict[int, ModelState]] = {}
    self._stopped = threading.Event()
    self._thread: threading.Thread | None = None
    if model_config_file is not None:
      self._read_config()
    elif model_name is not None:
      self._set_models([serving_protos.gen_model_config(model_name, base_path or "")])
    self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=max_workers))
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
    self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
    if self.port == 0:
      raise RuntimeError(f"cannot listen on port {port}")

  def start(self) -> None:
    self._server.start()
    self._thread = threading.Thread(target=self._run, name="fake-tfserving", daemon=True)
    self._thread.start()

  def stop(self) -> None:
    self._stopped.set()
    if self._thread is not None:
      self._thread.join()
    self._server.stop(None).wait()

  def wait_for_termination(self) -> None:
    self._server.wait_for_termination()

  def GetModelStatus(  # noqa: N802
    self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.ServicerContext
  ) -> get_model_status_pb2.GetModelStatusResponse:
    response = get_model_status_pb2.GetModelStatusResponse()
    spec = request.model_spec
    with self._lock:
      states = dict(self._states.get(spec.name, {}))
    if spec.HasField("version"):
      states = {v: state for v, state in states.items() if v == spec.version.value}
    for version, state in sorted(states.items(), reverse=True):
      response.model_version_status.append(serving_protos.gen_model_version_status(version, state))
    if not states:
      response.model_version_status.append(
        serving_protos.gen_model_version_status(
          -1, ModelState.UNKNOWN, _NOT_FOUND, f"{spec.name} is not found"
        )
      )
    return response

  def HandleReloadConfigRequest(  # noqa: N802
    self, request: model_management_pb2.ReloadConfigRequest, context: grpc.ServicerContext
  ) -> model_management_pb2.ReloadConfigResponse:
    self._set_models(request.config.model_config_list.config)
    return model_management_pb2.ReloadConfigResponse(status=serving_protos.gen_status_proto())

  def _set_models(self, models: Any) -> None:
    with self._lock:
      for name in set(self._states) - {model.name for model in models}:
        for version in self._states[name]:
          self._states[name][version] = ModelState.UNLOADING
      for model in models:
        for version in self._list_versions(model):
          known = self._states.setdefault(model.name, {})
          if known.get(version) in (None, ModelState.UNLOADING, ModelState.END):
            known[version] = ModelState.START

  def _list_versions(self, model: model_server_config_pb2.ModelConfig) -> list[int]:
    try:
      found = sorted(int(name) for name in os.listdir(model.base_path) if name.isdigit())
    except OSError:
      found = []
    found = found or list(range(1, self._num_versions + 1))
    policy = model.model_version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "specific":
      return [version for version in found if version in policy.specific.versions]
    if kind == "all" or model.base_path == "":
      return found
    return found[-max(self._num_versions, policy.latest.num_versions or 1) :]

  def _read_config(self) -> None:
    stat = os.stat(str(self._model_config_file))
    stamp = (stat.st_mtime_ns, stat.st_ino)
    if stamp == self._file_stamp:
      return
    with open(str(self._model_config_file), encoding="utf-8") as file:
      config = text_format.Parse(file.read(), model_server_config_pb2.ModelServerConfig())
    self._file_stamp = stamp
    self._set_models(config.model_config_list.config)

  def _run(self) -> None:
    while not self._stopped.wait(_STEP_SECS):
      if self._model_config_file is not None:
        try:
          self._read_config()
        except (OSError, text_format.ParseError):
          pass  # It is being replaced: the next round reads it.
      with self._lock:
        for states in self._states.values():
          for version, state in states.items():
            states[version] = _NEXT_STATE.get(state, state)
