"""What serving processes write about themselves."""

from __future__ import annotations

import dataclasses
import json

from monolith.agent_service.utils import ModelState

# A process that listens on all interfaces does not say under which address it is reached.
_WILDCARDS = ("0.0.0.0", "[::]")


@dataclasses.dataclass
class ReplicaMeta:
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

  def to_json(self) -> str:
    """Returns a flat JSON object of all attributes."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> ReplicaMeta:
    """Undoes `to_json`; missing attributes get their defaults, unknown ones are dropped."""
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in json.loads(text).items() if name in known})

  def serialize(self) -> bytes:
    return self.to_json().encode("utf-8")

  @classmethod
  def deserialize(cls, data: bytes) -> ReplicaMeta:
    return cls.from_json(data.decode("utf-8"))

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
