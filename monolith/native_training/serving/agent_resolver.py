"""Asks the agent beside a serving process which processes serve the other parts of the model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc
from absl import logging

from monolith.agent_service import agent_service_pb2, agent_service_pb2_grpc

_ASK_AGAIN_SECS = 15
_DEADLINE_SECS = 5
_MIN_GAP_SECS = 0.1
# A replica missing from an answer may only have lost its session: for this long it is tried when
# all others fail.
_REMEMBER_SECS = 60
_SERVER_TYPES = (agent_service_pb2.PS, agent_service_pb2.DENSE)


class ServedModel(NamedTuple):
  """The addresses and the name of a served model.

  Attributes:
    model_name: the name to put into requests.
    addresses: `host:port` of its replicas.
    former_addresses: replicas that disappeared a moment ago, to be tried when the others fail.
  """

  model_name: str
  addresses: list[str]
  former_addresses: tuple[str, ...] = ()


def find_key(services: Mapping[str, Any], model_name: str, old_model_name: str) -> tuple[str, str]:
  """Chooses a model's key and name by the kind of keys in an agent's answer.

  Args:
    services: the answer of `HeartBeat`: `<model>:ps_<i>` (unified) or `ps:<i>` -> addresses.
    model_name: `<model>:ps_<i>`, which is also its name in unified serving.
    old_model_name: `ps_<i>`, which is its name otherwise.

  Returns:
    Its key in `services`, and its name in requests.
  """
  if any(":ps" in key for key in services):
    return model_name, model_name
  server_type, _, task = old_model_name.rpartition("_")
  return f"{server_type}:{task}", old_model_name


class AgentResolver:
  """Finds out from the agent's heart beat where models are served.

  The agent is asked at the first call and then every 15 seconds. An agent that does not answer
  changes nothing: the last answer holds.

  Args:
    address: the agent's address; `localhost:$PORT2` by default.

  Raises:
    ValueError: no address is given and `PORT2` is not set.
  """

  def __init__(self, address: str | None = None):
    if address is None:
      port = os.environ.get("PORT2")
      if not port:
        raise ValueError("PORT2, the agent's port, is not set")
      address = f"localhost:{port}"
    self._address = address
    self._channel = grpc.insecure_channel(
      address,
      options=[("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000)],
    )
    self._stub = agent_service_pb2_grpc.AgentServiceStub(self._channel)
    self._lock = threading.Lock()
    self._services: dict[str, list[str]] | None = None
    # Key -> address -> when an answer last had it.
    self._seen: dict[str, dict[str, float]] = {}
    self._asked = -float("inf")

  def __call__(self, model_name: str, old_model_name: str, task: int) -> ServedModel:
    """Returns where a model is served; no address if the agent never answered.

    Args:
      model_name: `<model>:<sub graph>`.
      old_model_name: the sub graph.
      task: index of the parameter server; the names say it already.
    """
    del task
    services = self._get_services()
    key, name = find_key(services or self._seen, model_name, old_model_name)
    addresses = services.get(key, [])
    now = time.monotonic()
    former = tuple(
      address
      for address, seen in self._seen.get(key, {}).items()
      if address not in addresses and now - seen < _REMEMBER_SECS
    )
    return ServedModel(name, addresses, former)

  def ask_again(self, since: float, deadline: float) -> None:
    """Asks the agent earlier than planned, because replicas failed.

    Calls that fail together share one answer, and there are at most ten questions a second: a call
    waits for its turn.

    Args:
      since: the `time.monotonic()` at which the caller took the addresses that failed.
      deadline: the time until which the caller can wait.
    """
    with self._lock:
      if self._asked > since:
        return
      wait_secs = self._asked + _MIN_GAP_SECS - time.monotonic()
      if wait_secs > 0:
        time.sleep(max(0.0, min(wait_secs, deadline - time.monotonic())))
      self._ask()

  def close(self) -> None:
    self._channel.close()

  def _get_services(self) -> dict[str, list[str]]:
    # A caller that finds the answer too old asks; others use the old one, unless there is none yet.
    first = self._services is None
    if time.monotonic() - self._asked < (1 if first else _ASK_AGAIN_SECS):
      return self._services or {}
    if not self._lock.acquire(blocking=first):
      return self._services or {}
    try:
      if time.monotonic() - self._asked >= (1 if self._services is None else _ASK_AGAIN_SECS):
        self._ask()
    finally:
      self._lock.release()
    return self._services or {}

  def _ask(self) -> None:
    services: dict[str, list[str]] = {}
    try:
      for server_type in _SERVER_TYPES:
        answer = self._stub.HeartBeat(
          agent_service_pb2.HeartBeatRequest(server_type=server_type), timeout=_DEADLINE_SECS
        )
        for key, addresses in answer.addresses.items():
          services[key] = list(addresses.address)
      self._remember(services)
      self._services = services
    except grpc.RpcError as error:
      logging.warning("The agent at %s does not answer: %s", self._address, error.details())
    self._asked = time.monotonic()

  def _remember(self, services: dict[str, list[str]]) -> None:
    now = time.monotonic()
    seen: dict[str, dict[str, float]] = {}
    for key, times in self._seen.items():
      kept = {a: when for a, when in times.items() if now - when < _REMEMBER_SECS}
      if kept:
        seen[key] = kept
    for key, addresses in services.items():
      seen.setdefault(key, {}).update(dict.fromkeys(addresses, now))
    self._seen = seen
