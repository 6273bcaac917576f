"""The HTTP API of TensorFlow Serving.

POST /v1/models/<m>[/versions/<v>|/labels/<l>]:predict     and :classify, :regress
GET  /v1/models/<m>[/versions/<v>|/labels/<l>]             states
GET  /v1/models/<m>[/versions/<v>|/labels/<l>]/metadata    signatures
GET  /monitoring/prometheus/metrics
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures

import grpc
import numpy as np
import uvicorn
from absl import logging
from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from tensorflow.core.framework import types_pb2  # noqa: F401 (names of types in metadata)
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from monolith import _tensorflow
from monolith.serving import examples_api, prediction
from monolith.serving import metrics as metrics_lib
from monolith.serving.errors import ServingError, from_exception, invalid
from monolith.serving.grpc_server import Service, metadata_of
from monolith.serving.json_tensors import JsonRequest, get_signature_name, parse_object, to_json

MAX_BODY_BYTES = 64 << 20
METRICS_PATH = "/monitoring/prometheus/metrics"
# Names may have colons, as those of parameter servers do: the last one begins the verb.
_MODEL_PATH = re.compile(
  r"/v1/models/(?P<name>[^/]+?)"
  r"(?:/versions/(?P<version>[0-9]{1,18})|/labels/(?P<label>[^/:]+))?"
  r"(?::(?P<verb>predict|classify|regress)|(?P<metadata>/metadata))?",
)


class RestServer:
  """Listens for HTTP requests, in a thread of its own.

  Args:
    service: answers them.
    host: address to listen on.
    port: port to listen on.
    num_threads: how many requests are answered at a time.
    timeout_secs: how long an answer may take.

  Raises:
    ServingError: UNAVAILABLE, the address cannot be had.
  """

  def __init__(self, service: Service, host: str, port: int, num_threads: int, timeout_secs: float):
    self._service = service
    self._timeout_secs = timeout_secs
    self._threads = futures.ThreadPoolExecutor(num_threads, "rest")
    app = Starlette(
      routes=[
        Route(METRICS_PATH, self._metrics, methods=["GET"]),
        Route("/{path:path}", self._handle, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
      ]
    )
    self._socket = _listen(host, port)
    config = uvicorn.Config(
      app, log_level="warning", access_log=False, timeout_graceful_shutdown=10, lifespan="off"
    )
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(
      target=self._server.run, kwargs={"sockets": [self._socket]}, name="rest", daemon=True
    )

  def start(self) -> None:
    """Begins to answer."""
    self._thread.start()

  def stop(self) -> None:
    """Takes no more requests, and returns when those under way are answered."""
    self._server.should_exit = True
    self._thread.join()
    self._socket.close()
    self._threads.shutdown(wait=True)

  async def _metrics(self, _: Request) -> Response:
    return Response(
      self._service.metrics.text(), headers={"Content-Type": metrics_lib.CONTENT_TYPE}
    )

  async def _handle(self, request: Request) -> Response:
    start = time.perf_counter()
    model, method, code, status = "", "Rest", "OK", 200
    try:
      match = self._match(request)
      model = match["name"]
      method, answer = self._choose(match)
      body = await _read_body(request) if request.method == "POST" else b""
      answered = asyncio.get_running_loop().run_in_executor(self._threads, answer, body)
      content = await asyncio.wait_for(answered, self._timeout_secs)
    except asyncio.TimeoutError:
      error = ServingError(
        grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer after {self._timeout_secs} s"
      )
      code, status, content = error.code.name, error.http_status, _error_body(error)
    except ClientDisconnect:
      code, status, content = grpc.StatusCode.CANCELLED.name, 499, b""
    except _TooLarge as e:
      code, status, content = grpc.StatusCode.RESOURCE_EXHAUSTED.name, 413, _error_body(e)
    except Exception as e:
      error = from_exception(e)
      if error.code == grpc.StatusCode.INTERNAL:
        logging.exception("%s %s failed", request.method, request.url.path)
      code, status, content = error.code.name, error.http_status, _error_body(error)
    self._service.metrics.observe(model, method, code, time.perf_counter() - start)
    return Response(content, status, media_type="application/json")

  def _match(self, request: Request) -> re.Match:
    path = request.scope["path"]
    match = _MODEL_PATH.fullmatch(path)
    if match is None or (match["verb"] is not None) != (request.method == "POST"):
      text = f"Malformed request: {request.method} {path[:200]}"
      if path.startswith("/v1/"):
        raise invalid(text)
      raise ServingError(grpc.StatusCode.NOT_FOUND, text)
    if request.method not in ("GET", "POST"):
      raise invalid(f"Malformed request: {request.method} {path[:200]}")
    return match

  def _choose(self, match: re.Match) -> tuple[str, Callable[[bytes], bytes]]:
    spec = model_pb2.ModelSpec(name=match["name"])
    if match["version"]:
      spec.version.value = int(match["version"])
    elif match["label"]:
      spec.version_label = match["label"]
    if match["metadata"]:
      return "GetModelMetadata", lambda _: self._get_metadata(spec)
    if match["verb"] is None:
      return "GetModelStatus", lambda _: self._get_status(spec)
    if match["verb"] == "predict":
      return "Predict", lambda body: self._predict(spec, body)
    if match["verb"] == "classify":
      return "Classify", lambda body: self._classify(spec, body)
    return "Regress", lambda body: self._regress(spec, body)

  def _predict(self, spec: model_pb2.ModelSpec, body: bytes) -> bytes:
    with self._service.manager.lease(spec) as lease:
      request = JsonRequest(body, lease.servable)
      outputs = prediction.predict_arrays(
        lease.servable, request.signature, request.inputs, runner=self._service.runner
      )
      return request.answer(outputs)

  def _get_status(self, spec: model_pb2.ModelSpec) -> bytes:
    response = get_model_status_pb2.GetModelStatusResponse(
      model_version_status=self._service.manager.status(spec)
    )
    document = json_format.MessageToDict(response, preserving_proto_field_name=True)
    for status in document["model_version_status"]:
      status.setdefault("status", {})
      status["status"].setdefault("error_code", "OK")
      status["status"].setdefault("error_message", "")
    return json.dumps(document, indent=1).encode()

  def _get_metadata(self, spec: model_pb2.ModelSpec) -> bytes:
    with self._service.manager.lease(spec) as lease:
      response = metadata_of(lease)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    names = {"preserving_proto_field_name": True}
    document = {
      "model_spec": _tensorflow.message_to_dict(response.model_spec, **names),
      "metadata": {"signature_def": _tensorflow.message_to_dict(signatures, **names)},
    }
    return json.dumps(document, indent=1).encode()

  def _classify(self, spec: model_pb2.ModelSpec, body: bytes) -> bytes:
    document = parse_object(body)
    with self._service.manager.lease(spec) as lease:
      signature = examples_api.find_signature(
        lease.servable, get_signature_name(document), examples_api.CLASSIFY
      )
      examples = examples_api.examples_from_json(document)
      result = examples_api.classify(lease.servable, signature, examples)
    rows = [
      [[found.label, to_json("", np.array(found.score, np.float32))] for found in row.classes]
      for row in result.classifications
    ]
    return json.dumps({"results": rows}).encode()

  def _regress(self, spec: model_pb2.ModelSpec, body: bytes) -> bytes:
    document = parse_object(body)
    with self._service.manager.lease(spec) as lease:
      signature = examples_api.find_signature(
        lease.servable, get_signature_name(document), examples_api.REGRESS
      )
      examples = examples_api.examples_from_json(document)
      result = examples_api.regress(lease.servable, signature, examples)
    values = np.array([row.value for row in result.regressions], np.float32)
    return json.dumps({"results": to_json("", values)}).encode()


class _TooLarge(Exception):
  """A body beyond the limit."""


async def _read_body(request: Request) -> bytes:
  body = bytearray()
  async for chunk in request.stream():
    body += chunk
    if len(body) > MAX_BODY_BYTES:
      raise _TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
  return bytes(body)


def _error_body(error: Exception) -> bytes:
  return json.dumps({"error": str(error)}).encode()


def _listen(host: str, port: int) -> socket.socket:
  host = host.removeprefix("[").removesuffix("]")
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  listener = socket.socket(family, socket.SOCK_STREAM)
  try:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    # Predictions are small and answered at once: waiting to fill a packet would delay them.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  except OSError as error:
    listener.close()
    raise ServingError(
      grpc.StatusCode.UNAVAILABLE, f"cannot listen on {host}:{port}: {error}"
    ) from error
  return listener
