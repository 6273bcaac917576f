"""The gRPC service of an agent, which the server beside it and command line tools ask.

Differences from ByteDance's Monolith: it listens on loopback unless a host is given, because the
server that asks it runs on the same host; and with `dc_aware` a heart beat has the replicas of the
agent's own place only, where replicas of equal ids in several places were merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Union

import grpc
from absl import logging

from monolith.agent_service import agent_service_pb2 as pb
from monolith.agent_service import agent_service_pb2_grpc, resource_utils
from monolith.agent_service.replica_manager import ReplicaWatcher
from monolith.agent_service.utils import AgentConfig
from monolith.agent_service.zk_mirror import ZKMirror

LOOPBACK = "127.0.0.1"


class AgentDataProvider:
  """Holds the state of an agent of unified serving.

  Args:
    addrs_fn: returns `<model>:<sub graph>` -> addresses.
  """

  def __init__(self, addrs_fn: Callable[[], Mapping[str, Sequence[str]]]):
    self._addrs_fn = addrs_fn

  def get_addrs(self) -> Mapping[str, Sequence[str]]:
    return self._addrs_fn()


Source = Union[ReplicaWatcher, ZKMirror, AgentDataProvider]


def _set_addresses(
  response: pb.HeartBeatResponse, services: Mapping[str, Sequence[str]]
) -> pb.HeartBeatResponse:
  for key, addresses in services.items():
    response.addresses[key].address.extend(addresses)
  return response


class WatcherServicer(agent_service_pb2_grpc.AgentServiceServicer):
  """Answers of an agent v1: replicas by role and task.

  Args:
    watcher: knows the replicas.
  """

  def __init__(self, watcher: ReplicaWatcher):
    self._watcher = watcher

  def _place(self) -> tuple[str | None, str | None]:
    config = self._watcher.config
    return (config.idc, config.cluster) if config.dc_aware else (None, None)

  def GetReplicas(  # noqa: N802
    self, request: pb.GetReplicasRequest, context: grpc.ServicerContext
  ) -> pb.GetReplicasResponse:
    response = pb.GetReplicasResponse()
    response.address_list.address.extend(
      self._watcher.get_replicas(request.server_type, request.task, *self._place())
    )
    return response

  def HeartBeat(  # noqa: N802
    self, request: pb.HeartBeatRequest, context: grpc.ServicerContext
  ) -> pb.HeartBeatResponse:
    services = self._watcher.get_all_replicas(request.server_type, *self._place())
    return _set_addresses(pb.HeartBeatResponse(), services)

  def GetResource(  # noqa: N802
    self, request: pb.GetResourceRequest, context: grpc.ServicerContext
  ) -> pb.GetResourceResponse:
    return pb.GetResourceResponse()


class ProviderServicer(agent_service_pb2_grpc.AgentServiceServicer):
  """Answers of an agent v3 (and v2): models by name; `GetReplicas` is not implemented.

  Args:
    get_services: returns key -> addresses for a `ServerType`.
    conf: the agent's settings.
    address: the agent's own address.
  """

  def __init__(self, get_services: Callable[[int], Mapping[str, Sequence[str]]], conf: AgentConfig):
    self._get_services = get_services
    self._conf = conf
    self.address = ""

  def HeartBeat(  # noqa: N802
    self, request: pb.HeartBeatRequest, context: grpc.ServicerContext
  ) -> pb.HeartBeatResponse:
    return _set_addresses(pb.HeartBeatResponse(), self._get_services(request.server_type))

  def GetResource(  # noqa: N802
    self, request: pb.GetResourceRequest, context: grpc.ServicerContext
  ) -> pb.GetResourceResponse:
    return pb.GetResourceResponse(
      address=self.address,
      shard_id=self._conf.shard_id,
      replica_id=_as_int32(self._conf.replica_id),
      memory=resource_utils.available_memory(),
      cpu=-1,
      network=-1,
      work_load=-1,
    )


class AgentService:
  """A gRPC server with one of the two services.

  Args:
    source: a `ReplicaWatcher` (agents v1), an `AgentDataProvider` (v3) or a `ZKMirror` (v2).
    conf: the agent's settings; needed unless the source is a `ReplicaWatcher`.
    port: where to listen; a free port by default. `self.port` says which.
    max_workers: how many calls it answers at a time.
    host: where to listen. Loopback, because the server that asks runs on the same host; `[::]`
      is every interface.

  Raises:
    TypeError: another source.
    ValueError: settings are missing.
    RuntimeError: the port is taken.
  """

  def __init__(
    self,
    source: Source,
    conf: AgentConfig | None = None,
    port: int | None = None,
    max_workers: int = 10,
    host: str = LOOPBACK,
  ):
    servicer = _make_servicer(source, conf)
    self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=max_workers))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(servicer, self._server)
    self.port = self._server.add_insecure_port(f"{host}:{port or 0}")
    if self.port == 0:
      raise RuntimeError(f"the agent cannot listen on {host}:{port}")
    self.address = f"{host}:{self.port}"
    if isinstance(servicer, ProviderServicer):
      servicer.address = self.address

  def start(self) -> None:
    self._server.start()
    logging.info("The agent listens on %s", self.address)

  def stop(self, grace: float | None = None) -> None:
    """Ends it, and waits for calls under way up to `grace` seconds."""
    self._server.stop(grace).wait()

  def wait_for_termination(self) -> None:
    self._server.wait_for_termination()


def _make_servicer(source: Source, conf: AgentConfig | None) -> Any:
  if isinstance(source, ReplicaWatcher):
    return WatcherServicer(source)
  if not isinstance(source, (ZKMirror, AgentDataProvider)):
    raise TypeError(f"source is {type(source).__name__}, want a watcher, a mirror or a provider")
  if conf is None:
    raise ValueError(f"conf is needed for a {type(source).__name__}")
  if isinstance(source, ZKMirror):
    return ProviderServicer(source.get_all_replicas, conf)
  return ProviderServicer(lambda server_type: source.get_addrs(), conf)


def _as_int32(number: int | None) -> int:
  """Ids that are made of a pod's name have 40 bits, the field has 32."""
  return -1 if number is None or not -(2**31) <= number < 2**31 else number
