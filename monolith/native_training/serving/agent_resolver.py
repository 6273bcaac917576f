"""Asks the agent beside a serving process who serves the other parts of the model."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

import grpc
from absl import logging

from monolith.agent_service import agent_service_pb2, agent_service_pb2_grpc

_ASK_AGAIN_SECS = 15
_DEADLINE_SECS = 5
_SERVER_TYPES = (agent_service_pb2.PS, agent_service_pb2.DENSE)


class ServedModel(NamedTuple):
  """Where a model is served, and under which name.

  Attributes:
    model_name: the name to put into requests.
    addresses: `host:port` of its replicas.
  """

  model_name: str
  addresses: list[str]


def find_served_model(
  services: dict[str, list[str]], model_name: str, old_model_name: str
) -> ServedModel:
  """Picks the replicas of a model, and its name, by the kind of keys that an agent answers.

  Args:
    services: the answer of `HeartBeat`: `<model>:ps_<i>` (unified) or `ps:<i>` -> addresses.
    model_name: `<model>:ps_<i>`, which is also its name in unified serving.
    old_model_name: `ps_<i>`, which is its name otherwise.
  """
  if any(":ps" in key for key in services):
    return ServedModel(model_name, services.get(model_name, []))
  server_type, _, task = old_model_name.rpartition("_")
  return ServedModel(old_model_name, services.get(f"{server_type}:{task}", []))


class AgentResolver:
  """Knows from the agent's heart beat where models are served.

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
    self._asked = -float("inf")

  def __call__(self, model_name: str, old_model_name: str, task: int) -> ServedModel:
    """Returns where a model is served; nowhere if the agent never answered.

    Args:
      model_name: `<model>:<sub graph>`.
      old_model_name: the sub graph.
      task: index of the parameter server; the names say it already.
    """
    del task
    return find_served_model(self._get_services(), model_name, old_model_name)

  def close(self) -> None:
    self._channel.close()

  def _get_services(self) -> dict[str, list[str]]:
    # Who finds the answer too old asks; the others go on with it, unless there is none yet.
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
      self._services = services
    except grpc.RpcError as error:
      logging.warning("The agent at %s does not answer: %s", self._address, error.details())
    self._asked = time.monotonic()
