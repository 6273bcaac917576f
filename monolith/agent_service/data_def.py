"""Defines the records that processes of a serving deployment write to ZooKeeper."""

from __future__ import annotations

import dataclasses
import enum

from monolith.agent_service.json_node import JsonNode
from monolith.agent_service.utils import ModelState

# A process that listens on all interfaces does not say under which address it is reached.
_WILDCARDS = ("0.0.0.0", "[::]")


@dataclasses.dataclass
class ReplicaMeta(JsonNode):
  """One replica of a task.

  Attributes:
    address: `host:port`, IPv4.
    address_ipv6: `[host]:port`.
    stat: a `ModelState`.
    model_name: which model.
    server_type: ps, entry or dense.
    task: index of the task.
    replica: index of the replica.
    archon_address: address behind a load balancer, IPv4.
    archon_address_ipv6: address behind a load balancer, IPv6.
  """

  address: str | None = None
  address_ipv6: str | None = None
  stat: int = ModelState.UNKNOWN
  model_name: str | None = None
  server_type: str | None = None
  task: int = -1
  replica: int = -1
  archon_address: str | None = None
  archon_address_ipv6: str | None = None

  def get_path(self, path_prefix: str) -> str:
    """Returns the replica's node below `AgentConfig.path_prefix`; entries have 11 digits."""
    replica = f"{self.replica:011d}" if self.server_type == "entry" else str(self.replica)
    return f"{path_prefix}/{self.server_type}:{self.task}/{replica}"

  def get_address(self, use_archon: bool = False, address_family: str = "ipv4") -> str | None:
    """Returns the address of a family, of the other one if that is missing, or `None`.

    Args:
      use_archon: the address behind a load balancer.
      address_family: `ipv4` or `ipv6`.

    Raises:
      ValueError: unknown `address_family`.
    """
    if address_family not in ("ipv4", "ipv6"):
      raise ValueError(f"address_family is {address_family!r}, want ipv4 or ipv6")
    if use_archon:
      addresses = [self.archon_address, self.archon_address_ipv6]
    else:
      addresses = [self.address, self.address_ipv6]
    if address_family == "ipv6":
      addresses.reverse()
    for address in addresses:
      if address and not address.startswith(_WILDCARDS):
        return address
    return None


@dataclasses.dataclass
class ModelMeta(JsonNode):
  """Names a model that a client asks to load or unload; a node of `/<bzid>/portal`.

  Attributes:
    model_name: which model.
    model_dir: folder of its exports.
    ckpt: which checkpoint; the newest common version by default.
    num_shard: over how many processes; -1 for all.
    action: free text, `NONE` by default.
    spec_replicas: which replicas; all by default.
  """

  model_name: str | None = None
  model_dir: str | None = None
  ckpt: str | None = None
  num_shard: int = -1
  action: str = "NONE"
  spec_replicas: list[int] = dataclasses.field(default_factory=list)

  def get_path(self, base_path: str) -> str:
    return f"{base_path}/{self.model_name}"


class PublishType(enum.IntEnum):
  """Holds an order of the scheduler: what a process does with a model."""

  LOAD = 1
  UNLOAD = 2


@dataclasses.dataclass
class PublishMeta(JsonNode):
  """Orders a process to load or unload models; a node of `/<bzid>/publish`.

  Attributes:
    shard_id: index of the process's shard.
    replica_id: index of its replica.
    model_name: which model.
    num_ps: how many parameter servers the model has.
    total_publish_num: how many such nodes belong together.
    sub_models: sub model -> path of its version.
    ptype: a `PublishType`.
    is_spec: whether it is for one replica only.
  """

  shard_id: int | None = None
  replica_id: int = -1
  model_name: str | None = None
  num_ps: int | None = None
  total_publish_num: int = 1
  sub_models: dict[str, str] | None = None
  ptype: int = PublishType.LOAD
  is_spec: bool = False

  def get_path(self, base_path: str) -> str:
    return f"{base_path}/{self.shard_id}:{self.replica_id}:{self.model_name}"


@dataclasses.dataclass
class ResourceSpec(JsonNode):
  """Reports the free resources of a process; a node of `/<bzid>/resource`.

  Attributes:
    address: address of its agent.
    shard_id: index of its shard.
    replica_id: index of its replica.
    memory: free bytes.
    cpu, network, work_load: -1 where unknown.
  """

  address: str | None = None
  shard_id: int | None = None
  replica_id: int | None = None
  memory: int | None = None
  cpu: float = -1.0
  network: float = -1.0
  work_load: float = -1.0

  def get_path(self, base_path: str) -> str:
    return f"{base_path}/{self.shard_id}:{self.replica_id}"


class EventType(enum.IntEnum):
  """Numbers the kinds of changes in ZooKeeper."""

  UNKNOWN = 0
  PORTAL = 1
  SERVICE = 2
  PUBLISH = 3
  RESOURCE = 4


@dataclasses.dataclass
class Event:
  """A change.

  Attributes:
    path: the node.
    data: what it says now, empty when it is gone.
    etype: what kind of node.
  """

  path: str | None = None
  data: bytes = b""
  etype: EventType = EventType.UNKNOWN
