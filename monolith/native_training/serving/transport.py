"""Talks to TensorFlow Serving for the kernels of this process.

The op library links no gRPC. Its kernels hand over bytes (`host_call.h`); this module sends them:

  push                 the touched rows of a `PushRequest` to every target of a `ClientConfig`
  predict              a `PredictRequest` to a server that `set_remote_predict_resolver` or the
                       agent at `localhost:$PORT2` knows
  start_dummy_server,  a server that accepts every push
  stop_dummy_server

Messages go over the wire as those of `tensorflow.serving.PredictionService`.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Union

import grpc
import numpy as np
import tensorflow as tf
from absl import logging
from google.protobuf import json_format, message
from tensorflow.core.framework import tensor_pb2

from monolith.native_training.runtime.ops import gen_monolith_ops_base
from monolith.native_training.runtime.parameter_sync import (
  parameter_sync_pb2,
  prediction_service_pb2,
)
from monolith.native_training.serving import push_rows, push_versions
from monolith.native_training.serving.agent_resolver import AgentResolver, ServedModel

PREDICT_METHOD = "/tensorflow.serving.PredictionService/Predict"

# Larger pushes are split: gRPC servers refuse messages beyond 4 MiB by default, and names and
# shapes need some room too.
MAX_REQUEST_BYTES = 7 << 19
_LOOK_UP_SECONDS = 5
_MAX_PUSH_MS = 600_000
_MAX_PUSH_THREADS = 64
# A channel unused for this long belongs to a replica that is gone.
_CHANNEL_IDLE_SECS = 600
_CHANNEL_OPTIONS = (
  ("grpc.enable_http_proxy", 0),
  # A replica that comes back is found within a second, not within gRPC's two minutes.
  ("grpc.initial_reconnect_backoff_ms", 200),
  ("grpc.min_reconnect_backoff_ms", 200),
  ("grpc.max_reconnect_backoff_ms", 1000),
)
# A failed replica is asked again after this time, unless it is the only one.
_AVOID_SECS = 1

RemotePredictResolver = Callable[[str, str, int], Union[Sequence[str], ServedModel]]


class HostError(Exception):
  """An error that becomes the status of the op.

  Args:
    code: the number of the `tf.errors` or gRPC code.
    message: the op's error message.
  """

  def __init__(self, code: int, message: str):
    super().__init__(message)
    self.code = code


# ---- pushing touched rows ----


def make_predict_requests(
  request: parameter_sync_pb2.PushRequest, max_bytes: int = MAX_REQUEST_BYTES
) -> list[prediction_service_pb2.PredictRequest]:
  """Turns a push into calls of the serving model's signature that assigns rows.

  Single tables: inputs `<unique_id>_id` `[n]` and `<unique_id>_value` `[n, dim]`. A group of
  tables: `id`, `id_split` and `flat_value`, tables in the order of the request.

  Args:
    request: the rows.
    max_bytes: the limit for ids and rows of one call, except that one row per table always fits. A
      larger push becomes several calls, with an equal share of every table in each.
  """
  single = [push_rows.decode(delta) for delta in request.delta_hash_tables]
  group = [push_rows.decode(delta) for delta in request.delta_multi_hash_tables]
  parts = max(1, -(-sum(rows.num_bytes for rows in single + group) // max_bytes))
  calls = (
    _make_predict_request(
      request, [r.part(i, parts) for r in single], [r.part(i, parts) for r in group]
    )
    for i in range(parts)
  )
  return [call for call in calls if call is not None]


def _make_predict_request(
  request: parameter_sync_pb2.PushRequest,
  single: Sequence[push_rows.TableRows],
  group: Sequence[push_rows.TableRows],
) -> prediction_service_pb2.PredictRequest | None:
  """Returns one call, `None` if it would be empty."""
  if not any(rows.ids.size for rows in itertools.chain(single, group)):
    return None
  predict = prediction_service_pb2.PredictRequest()
  predict.model_spec.name = request.model_name
  predict.model_spec.signature_name = request.signature_name

  def add(alias: str, value: np.ndarray) -> None:
    predict.inputs[alias] = push_rows.to_tensor_proto(value).SerializeToString()

  for rows in single:
    add(f"{rows.unique_id}_id", rows.ids)
    add(f"{rows.unique_id}_value", rows.values)
  if group:
    add("id", np.concatenate([rows.ids for rows in group]))
    add("id_split", np.cumsum([0] + [rows.ids.size for rows in group], dtype=np.int64))
    add("flat_value", np.concatenate([rows.values.reshape(-1) for rows in group]))
  return predict


def count_ids(request: parameter_sync_pb2.PushRequest) -> int:
  """Returns the number of ids of all tables."""
  return sum(
    len(delta.fids)
    for delta in itertools.chain(request.delta_hash_tables, request.delta_multi_hash_tables)
  )


class _Channels:
  """Open channels by address, kept from call to call; unused ones are closed."""

  def __init__(self):
    self._lock = threading.Lock()
    self._channels: dict[str, grpc.Channel] = {}
    self._used: dict[str, float] = {}

  def predict_call(self, address: str) -> grpc.UnaryUnaryMultiCallable:
    return self.get(address).unary_unary(PREDICT_METHOD)

  def get(self, address: str) -> grpc.Channel:
    now = time.monotonic()
    with self._lock:
      for idle in [a for a, used in self._used.items() if now - used > _CHANNEL_IDLE_SECS]:
        self._used.pop(idle)
        self._channels.pop(idle).close()
      if address not in self._channels:
        self._channels[address] = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
      self._used[address] = now
      return self._channels[address]

  def close(self) -> None:
    with self._lock:
      for channel in self._channels.values():
        channel.close()
      self._channels.clear()
      self._used.clear()


class _Calls:
  """The calls of one push, serialized when the first target wants them; thread-safe."""

  def __init__(
    self, request: parameter_sync_pb2.PushRequest, versions: push_versions.PushVersions
  ) -> None:
    self._calls = make_predict_requests(request)
    self._versions = versions
    self._lock = threading.Lock()
    self._made: dict[bool, list[bytes]] = {}

  def get(self, are_numbered: bool) -> list[bytes]:
    with self._lock:
      if are_numbered not in self._made:
        number = self._versions.number if are_numbered else lambda call: call
        self._made[are_numbered] = [number(call).SerializeToString() for call in self._calls]
      return self._made[are_numbered]


_push_channels = _Channels()
_push_versions = push_versions.PushVersions()


def push(
  request: parameter_sync_pb2.PushRequest,
  config: parameter_sync_pb2.ClientConfig,
  versions: push_versions.PushVersions | None = None,
) -> parameter_sync_pb2.PushResult:
  """Sends the rows of `request` to every target of `config`.

  Args:
    request: the rows.
    config: the targets.
    versions: the numbers of calls to targets that refuse older ones; by default those of this
      process.

  Returns:
    One response per target; a failure is a status code there, not an exception.

  Raises:
    HostError: the timeout in `config` is more than ten minutes.
  """
  if config.timeout_in_ms > _MAX_PUSH_MS:
    raise HostError(
      grpc.StatusCode.INVALID_ARGUMENT.value[0],
      f"timeout_in_ms is {config.timeout_in_ms}, want at most {_MAX_PUSH_MS}",
    )
  versions = versions or _push_versions
  calls = _Calls(request, versions)
  timeout_secs = config.timeout_in_ms / 1000
  result = parameter_sync_pb2.PushResult()
  # All targets at once; the parts of one target one after the other.
  workers = min(max(1, len(config.targets)), _MAX_PUSH_THREADS)
  with futures.ThreadPoolExecutor(max_workers=workers) as pool:
    responses = pool.map(
      lambda target: _push_to_target(target, request, calls, versions, timeout_secs),
      config.targets,
    )
    for response in responses:
      if response.status_code == 0:
        response.update_num = count_ids(request)
      result.responses.append(response)
  return result


def _push_to_target(
  target: str,
  request: parameter_sync_pb2.PushRequest,
  calls: _Calls,
  versions: push_versions.PushVersions,
  timeout_secs: float,
) -> parameter_sync_pb2.PushResponse:
  channel = _push_channels.get(target)
  try:
    are_numbered = versions.are_wanted(
      channel, target, request.model_name, request.signature_name, timeout_secs
    )
    for call in calls.get(are_numbered):
      channel.unary_unary(PREDICT_METHOD)(call, timeout=timeout_secs)
  except grpc.RpcError as error:
    # It may have loaded an export with other signatures.
    versions.forget(target)
    logging.warning("Cannot push embeddings to %s: %s", target, error.details())
    return parameter_sync_pb2.PushResponse(
      status_code=error.code().value[0], error_message=error.details(), target=target, update_num=0
    )
  return parameter_sync_pb2.PushResponse(status_code=0, error_message="", target=target)


def _push_call(request: bytes, config: bytes) -> bytes:
  result = push(
    parameter_sync_pb2.PushRequest.FromString(request),
    parameter_sync_pb2.ClientConfig.FromString(config),
  )
  # The kernel keeps rows that a target did not take for the next push.
  failed = sum(response.status_code != 0 for response in result.responses)
  json = json_format.MessageToJson(result, preserving_proto_field_name=True)
  return f"{failed} {json}".encode()


# ---- remote prediction ----

_resolver: RemotePredictResolver | None = None
_agent_resolver: AgentResolver | None = None
_agent_resolver_lock = threading.Lock()
_predict_channels = _Channels()
_next_replica = itertools.count()
# Address -> when it failed last.
_failed_replicas: dict[str, float] = {}
# For a call that another replica may answer in the remaining time.
_RETRIED = (
  grpc.StatusCode.UNAVAILABLE,
  grpc.StatusCode.NOT_FOUND,
  grpc.StatusCode.DEADLINE_EXCEEDED,
)


def set_remote_predict_resolver(resolver: RemotePredictResolver | None) -> None:
  """Sets where models are served, for the `TfServingRemotePredict` ops of this process.

  Args:
    resolver: `(model_name, old_model_name, task) -> addresses` of the replicas, which is called for
      every request and whose addresses are used in turn; or a `ServedModel`, which also has a name.
      `None` removes it: then the agent at `localhost:$PORT2` is asked, if `PORT2` is set.
  """
  global _resolver, _agent_resolver
  _resolver = resolver
  if resolver is None:
    _predict_channels.close()
    _failed_replicas.clear()
    with _agent_resolver_lock:
      if _agent_resolver is not None:
        _agent_resolver.close()
      _agent_resolver = None


def _get_resolver() -> RemotePredictResolver:
  global _agent_resolver
  if _resolver is not None:
    return _resolver
  if not os.environ.get("PORT2"):
    raise HostError(
      grpc.StatusCode.UNIMPLEMENTED.value[0],
      "the transport does not know where models are served: call set_remote_predict_resolver of "
      "monolith.native_training.serving.transport, or set PORT2 to the port of an agent",
    )
  with _agent_resolver_lock:
    if _agent_resolver is None:
      _agent_resolver = AgentResolver()
    return _agent_resolver


def _predict_call(request: bytes, call: bytes) -> bytes:
  task, deadline_millis, old_model_name = call.decode().split("\n", 2)
  predict = prediction_service_pb2.PredictRequest.FromString(request)
  model_name = predict.model_spec.name
  resolver = _get_resolver()
  # Asked again if all fail: the replicas it knew may be gone.
  agent = resolver if isinstance(resolver, AgentResolver) else None
  deadline = time.monotonic() + int(deadline_millis) / 1000
  errors: list[tuple[grpc.StatusCode, str]] = []
  tried: set[str] = set()
  may_retry = True
  while may_retry:
    served = resolver(model_name, old_model_name, int(task))
    resolved = time.monotonic()
    if not isinstance(served, ServedModel):
      served = ServedModel(model_name, list(served))
    if served.model_name != predict.model_spec.name:
      predict.model_spec.name = served.model_name
      request = predict.SerializeToString()
    chosen = [address for address in _choose_replicas(served) if address not in tried]
    for i, address in enumerate(chosen):
      tried.add(address)
      left_secs = max(0.0, deadline - time.monotonic())
      # A replica that hangs does not answer: the next one must have time to.
      timeout_secs = left_secs / 2 if i + 1 < len(chosen) else left_secs
      try:
        return _predict_channels.predict_call(address)(request, timeout=timeout_secs)
      except grpc.RpcError as error:
        _failed_replicas[address] = time.monotonic()
        errors.append((error.code(), f"{address}: {error.details()}"))
        may_retry = error.code() in _RETRIED and time.monotonic() < deadline
        if not may_retry:
          break
    if agent is None or not may_retry:
      break
    agent.ask_again(resolved, deadline)
    agent = None
  if not errors:
    raise HostError(grpc.StatusCode.UNAVAILABLE.value[0], "no replica serves the model")
  raise HostError(errors[-1][0].value[0], "; ".join(text for _, text in errors))


def _choose_replicas(served: ServedModel) -> list[str]:
  """Returns the replica whose turn it is, another one in case it fails, and a former one."""
  now = time.monotonic()

  def failed(address: str) -> bool:
    return now - _failed_replicas.get(address, -_AVOID_SECS) < _AVOID_SECS

  turn = list(served.addresses)
  if turn:
    start = next(_next_replica) % len(turn)
    # Stable: replicas that failed just now come last, the others keep their turn.
    turn = sorted([*turn[start:], *turn[:start]], key=failed)
  return turn[:2] + sorted(served.former_addresses, key=failed)[:1]


# ---- a server to push to ----


class _DummyPredictionService(grpc.GenericRpcHandler):
  """Answers every well-formed Predict call, and stores nothing."""

  def service(self, handler_call_details: grpc.HandlerCallDetails):
    if handler_call_details.method != PREDICT_METHOD:
      return None
    return grpc.unary_unary_rpc_method_handler(self._predict)

  def _predict(self, request: bytes, context: grpc.ServicerContext) -> bytes:
    try:
      predict = prediction_service_pb2.PredictRequest.FromString(request)
      for value in predict.inputs.values():
        tf.make_ndarray(tensor_pb2.TensorProto.FromString(value))
    except (ValueError, TypeError) as error:
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a PredictRequest: {error}")
    response = prediction_service_pb2.PredictResponse()
    response.model_spec.CopyFrom(predict.model_spec)
    return response.SerializeToString()


_dummy_servers: dict[str, grpc.Server] = {}
_dummy_server_ids: Iterator[int] = itertools.count()


def _start_dummy_server(address: bytes, _: bytes) -> bytes:
  listen_on = _listening_address(address.decode(errors="backslashreplace"))
  server = grpc.server(
    futures.ThreadPoolExecutor(max_workers=2), handlers=[_DummyPredictionService()]
  )
  try:
    port = server.add_insecure_port(listen_on)
  except RuntimeError as error:
    raise HostError(grpc.StatusCode.UNAVAILABLE.value[0], str(error)) from error
  if port == 0:
    raise HostError(grpc.StatusCode.UNAVAILABLE.value[0], f"cannot listen on {listen_on}")
  server.start()
  server_id = str(next(_dummy_server_ids))
  _dummy_servers[server_id] = server
  return f"{server_id} {port}".encode()


def _listening_address(address: str) -> str:
  """Returns `address` with a numeric host: gRPC would look up a name without a time limit."""
  host, colon, port = address.rpartition(":")
  if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
    raise HostError(
      grpc.StatusCode.INVALID_ARGUMENT.value[0], f"address is '{address[:200]}', want host:port"
    )
  host = host.removeprefix("[").removesuffix("]")
  try:
    found = ipaddress.ip_address(host)
  except ValueError:
    found = ipaddress.ip_address(_look_up(host)) if host else ipaddress.IPv6Address("::")
  return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"


def _look_up(host: str) -> str:
  """Returns the first address of a host name.

  Raises:
    HostError: the name has no address, or no name server answers.
  """
  answers: queue.SimpleQueue = queue.SimpleQueue()

  def ask() -> None:
    try:
      answers.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
      answers.put(error)

  # A daemon thread, so that the process can end although a name server does not answer.
  threading.Thread(target=ask, daemon=True, name="look_up").start()
  try:
    answer = answers.get(timeout=_LOOK_UP_SECONDS)
  except queue.Empty:
    answer = TimeoutError(f"no answer in {_LOOK_UP_SECONDS} s")
  if isinstance(answer, Exception):
    raise HostError(
      grpc.StatusCode.UNAVAILABLE.value[0], f"cannot look up '{host[:200]}': {answer}"
    )
  return answer


def _stop_dummy_server(server_id: bytes, _: bytes) -> bytes:
  server = _dummy_servers.pop(server_id.decode(), None)
  if server is not None:
    server.stop(grace=None).wait()
  return b""


# ---- the way in from C++ ----

_METHODS: dict[bytes, Callable[[bytes, bytes], bytes]] = {
  b"push": _push_call,
  b"predict": _predict_call,
  b"start_dummy_server": _start_dummy_server,
  b"stop_dummy_server": _stop_dummy_server,
}

_HostFunction = ctypes.CFUNCTYPE(
  ctypes.c_int32,
  ctypes.c_void_p, ctypes.c_int64,
  ctypes.c_void_p, ctypes.c_int64,
  ctypes.c_void_p, ctypes.c_int64,
  ctypes.c_void_p,
)  # fmt: skip


def _make_host_function(library: ctypes.CDLL) -> ctypes._CFuncPtr:
  def handle(method, method_size, first, first_size, second, second_size, reply) -> int:
    code = 0
    try:
      function = _METHODS[ctypes.string_at(method, method_size)]
      answer = function(ctypes.string_at(first, first_size), ctypes.string_at(second, second_size))
    except HostError as error:
      code, answer = error.code, str(error).encode()
    except message.DecodeError as error:  # as text that is not UTF-8
      code, answer = grpc.StatusCode.INVALID_ARGUMENT.value[0], str(error).encode()
    except Exception as error:  # An exception must not cross the border to C++.
      logging.exception("A call from a kernel failed")
      code, answer = grpc.StatusCode.INTERNAL.value[0], repr(error).encode()
    library.MonolithHostReply(reply, answer, len(answer))
    return code

  return _HostFunction(handle)


def _install() -> ctypes._CFuncPtr:
  """Lets the kernels of this process call this module until the interpreter ends."""
  # TensorFlow must have loaded the library first, or it finds no ops in it.
  library = ctypes.CDLL(gen_monolith_ops_base.LIBRARY_PATH)
  library.MonolithSetHostFunction.argtypes = [_HostFunction]
  library.MonolithSetHostFunction.restype = None
  library.MonolithHostReply.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
  library.MonolithHostReply.restype = None
  function = _make_host_function(library)
  library.MonolithSetHostFunction(function)
  atexit.register(library.MonolithSetHostFunction, ctypes.cast(None, _HostFunction))
  return function


# The C++ side holds a plain pointer: the function must stay referenced here.
_host_function = _install()
