"""The gRPC services of a model server: prediction, models, health, reflection.

Messages are parsed here, not by gRPC, which would call a torn one an INTERNAL error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from absl import logging
from google.protobuf import message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
  classification_pb2,
  get_model_metadata_pb2,
  get_model_status_pb2,
  inference_pb2,
  model_management_pb2,
  model_pb2,
  predict_pb2,
  regression_pb2,
)

from monolith.serving import (
  examples_api,
  model_config,
  prediction,
  reflection_service,
  service_descriptors,
)
from monolith.serving.errors import ServingError, from_exception, invalid
from monolith.serving.metrics import Metrics
from monolith.serving.model_manager import Lease, ModelManager
from monolith.serving.service_descriptors import MODEL_SERVICE, PREDICTION_SERVICE

# Without a deadline of the client's own, a reload waits this long.
_RELOAD_SECS = 600
# What gRPC may take to end calls after their time.
_STOP_SECS = 2
# A limit that holds unless --grpc_channel_arguments has another: gRPC's own 4 MiB are little.
MAX_MESSAGE_BYTES = 64 << 20
_SIGNATURE_DEF = "signature_def"

_Answer = Callable[[Any, grpc.ServicerContext], message.Message]


class Service:
  """The calls that both ways in share.

  Args:
    manager: the models.
    metrics: counts the calls.
    runner: runs signatures, batched or not.
  """

  def __init__(self, manager: ModelManager, metrics: Metrics, runner: prediction.Runner):
    self.manager = manager
    self.metrics = metrics
    self.runner = runner

  def predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
    """Answers PredictionService.Predict."""
    with self.manager.lease(request.model_spec) as lease:
      response = prediction.predict(lease.servable, request, self.runner)
      response.model_spec.name = lease.name
      response.model_spec.version.value = lease.number
      return response

  def classify(
    self, request: classification_pb2.ClassificationRequest
  ) -> classification_pb2.ClassificationResponse:
    """Answers PredictionService.Classify."""
    response = classification_pb2.ClassificationResponse()
    with self.manager.lease(request.model_spec) as lease:
      signature = examples_api.find_signature(
        lease.servable, request.model_spec.signature_name, examples_api.CLASSIFY
      )
      examples = examples_api.to_examples(request.input)
      response.result.CopyFrom(examples_api.classify(lease.servable, signature, examples))
      _set_spec(response.model_spec, lease, signature.name)
    return response

  def regress(self, request: regression_pb2.RegressionRequest) -> regression_pb2.RegressionResponse:
    """Answers PredictionService.Regress."""
    response = regression_pb2.RegressionResponse()
    with self.manager.lease(request.model_spec) as lease:
      signature = examples_api.find_signature(
        lease.servable, request.model_spec.signature_name, examples_api.REGRESS
      )
      examples = examples_api.to_examples(request.input)
      response.result.CopyFrom(examples_api.regress(lease.servable, signature, examples))
      _set_spec(response.model_spec, lease, signature.name)
    return response

  def multi_inference(
    self, request: inference_pb2.MultiInferenceRequest
  ) -> inference_pb2.MultiInferenceResponse:
    """Answers PredictionService.MultiInference."""
    if not request.tasks:
      raise invalid("the request has no tasks")
    names = {task.model_spec.name for task in request.tasks}
    if len(names) != 1:
      raise invalid(f"the tasks are of the models {sorted(names)[:16]}, want one")
    response = inference_pb2.MultiInferenceResponse()
    with self.manager.lease(request.tasks[0].model_spec) as lease:
      for task in request.tasks:
        examples_api.find_signature(
          lease.servable, task.model_spec.signature_name, task.method_name
        )
      examples = examples_api.to_examples(request.input)
      for task in request.tasks:
        result = examples_api.infer(lease.servable, task, examples)
        _set_spec(result.model_spec, lease, result.model_spec.signature_name)
        response.results.append(result)
    return response

  def get_model_metadata(
    self, request: get_model_metadata_pb2.GetModelMetadataRequest
  ) -> get_model_metadata_pb2.GetModelMetadataResponse:
    """Answers PredictionService.GetModelMetadata."""
    if list(request.metadata_field) != [_SIGNATURE_DEF]:
      raise invalid(
        f"metadata_field is {list(request.metadata_field)[:4]}, want {[_SIGNATURE_DEF]}"
      )
    with self.manager.lease(request.model_spec) as lease:
      return metadata_of(lease)

  def get_model_status(
    self, request: get_model_status_pb2.GetModelStatusRequest
  ) -> get_model_status_pb2.GetModelStatusResponse:
    """Answers ModelService.GetModelStatus."""
    return get_model_status_pb2.GetModelStatusResponse(
      model_version_status=self.manager.status(request.model_spec)
    )

  def reload(
    self, request: model_management_pb2.ReloadConfigRequest, timeout_secs: float
  ) -> model_management_pb2.ReloadConfigResponse:
    """Answers ModelService.HandleReloadConfigRequest."""
    if request.config.WhichOneof("config") is None:
      raise invalid("the request has no config")
    configs = model_config.from_proto(request.config, "the request")
    self.manager.reload(configs, timeout_secs)
    response = model_management_pb2.ReloadConfigResponse()
    response.status.error_code = 0
    return response


def _set_spec(spec: model_pb2.ModelSpec, lease: Lease, signature_name: str) -> None:
  spec.name = lease.name
  spec.version.value = lease.number
  spec.signature_name = signature_name


def metadata_of(lease: Lease) -> get_model_metadata_pb2.GetModelMetadataResponse:
  """Returns the signatures of a version."""
  response = get_model_metadata_pb2.GetModelMetadataResponse()
  response.model_spec.name = lease.name
  response.model_spec.version.value = lease.number
  signatures = get_model_metadata_pb2.SignatureDefMap()
  for name, signature in lease.servable.signatures.items():
    signatures.signature_def[name].CopyFrom(signature.definition)
  response.metadata[_SIGNATURE_DEF].Pack(signatures)
  return response


class GrpcServer:
  """Listens for gRPC calls.

  Args:
    service: answers them.
    address: `host:port` to listen on.
    max_threads: how many calls are answered at a time.
    options: gRPC's channel arguments; they win over those set here.
    credentials: certificates, for TLS.

  Raises:
    ServingError: UNAVAILABLE, the address cannot be had.
  """

  def __init__(
    self,
    service: Service,
    address: str,
    max_threads: int,
    options: tuple[tuple[str, Any], ...] = (),
    credentials: grpc.ServerCredentials | None = None,
  ):
    self._service = service
    defaults = {
      "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
      "grpc.max_send_message_length": -1,
      # A second server must not take half of the connections.
      "grpc.so_reuseport": 0,
    }
    self._server = grpc.server(
      futures.ThreadPoolExecutor(max_threads, "grpc"),
      options=list({**defaults, **dict(options)}.items()),
    )
    self._health = health.HealthServicer(experimental_non_blocking=True)
    self._watched: set[str] = {health.OVERALL_HEALTH}
    health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
    self._server.add_generic_rpc_handlers(
      (
        grpc.method_handlers_generic_handler(PREDICTION_SERVICE, self._prediction_methods()),
        grpc.method_handlers_generic_handler(MODEL_SERVICE, self._model_methods()),
      )
    )
    service_descriptors.register()
    reflection_service.add_to_server(
      (PREDICTION_SERVICE, MODEL_SERVICE, health.SERVICE_NAME), self._server
    )
    try:
      port = (
        self._server.add_secure_port(address, credentials)
        if credentials
        else self._server.add_insecure_port(address)
      )
    except RuntimeError:
      port = 0
    if port == 0:
      raise ServingError(grpc.StatusCode.UNAVAILABLE, f"cannot listen on {address}")
    service.manager.add_listener(self._set_health)

  def start(self) -> None:
    """Begins to answer."""
    self._server.start()

  def stop(self, grace_secs: float) -> None:
    """Takes no more calls, and returns when those under way are answered or time is up."""
    self._health.enter_graceful_shutdown()
    # A call whose message cannot be read never ends for gRPC, although its client has its answer.
    if not self._server.stop(grace_secs).wait(grace_secs + _STOP_SECS):
      logging.warning("Calls are left that do not end")

  def _set_health(self, available: dict[str, bool]) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    statuses = {name: serving if ok else not_serving for name, ok in available.items()}
    statuses[health.OVERALL_HEALTH] = serving if all(available.values()) else not_serving
    for name in self._watched - statuses.keys():
      self._health.set(name, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    for name, status in statuses.items():
      self._health.set(name, status)
    self._watched |= statuses.keys()

  def _prediction_methods(self) -> dict[str, grpc.RpcMethodHandler]:
    service = self._service
    return self._handlers(
      Classify=(classification_pb2.ClassificationRequest, service.classify),
      Regress=(regression_pb2.RegressionRequest, service.regress),
      MultiInference=(inference_pb2.MultiInferenceRequest, service.multi_inference),
      Predict=(predict_pb2.PredictRequest, service.predict),
      GetModelMetadata=(
        get_model_metadata_pb2.GetModelMetadataRequest,
        service.get_model_metadata,
      ),
    )

  def _model_methods(self) -> dict[str, grpc.RpcMethodHandler]:
    def reload(request: Any, context: grpc.ServicerContext) -> message.Message:
      return self._service.reload(
        request, min(context.time_remaining() or _RELOAD_SECS, _RELOAD_SECS)
      )

    name = "HandleReloadConfigRequest"
    return {
      name: self._handler(name, model_management_pb2.ReloadConfigRequest, reload),
      **self._handlers(
        GetModelStatus=(
          get_model_status_pb2.GetModelStatusRequest,
          self._service.get_model_status,
        )
      ),
    }

  def _handlers(
    self, **methods: tuple[type[message.Message], Callable[[Any], message.Message]]
  ) -> dict[str, grpc.RpcMethodHandler]:
    """Returns the handlers of methods that need nothing but their request."""

    def ignore_context(answer: Callable[[Any], message.Message]) -> _Answer:
      return lambda request, _: answer(request)

    return {
      name: self._handler(name, request_class, ignore_context(answer))
      for name, (request_class, answer) in methods.items()
    }

  def _handler(
    self,
    method: str,
    request_class: type[message.Message],
    answer: _Answer,
  ) -> grpc.RpcMethodHandler:
    def handle(data: bytes, context: grpc.ServicerContext) -> bytes:
      start = time.perf_counter()
      model, code, error = "", "OK", None
      response = b""
      try:
        try:
          request = request_class.FromString(data)
        except message.DecodeError as e:
          raise invalid(f"not a {request_class.DESCRIPTOR.name}: {e}") from e
        if hasattr(request, "model_spec"):
          model = request.model_spec.name
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
          # It waited for a thread for so long that nobody waits for the answer.
          raise ServingError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed in the queue")
        response = answer(request, context).SerializeToString()
      except Exception as e:
        error = from_exception(e)
        code = error.code.name
        if error.code == grpc.StatusCode.INTERNAL:
          logging.exception("%s of model %r failed", method, model)
      self._service.metrics.observe(model, method, code, time.perf_counter() - start)
      if error is not None:
        context.abort(error.code, str(error))
      return response

    return grpc.unary_unary_rpc_method_handler(handle)
