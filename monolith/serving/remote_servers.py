"""Tells an `entry` model where its parameter servers are.

`--ps_address=ps_0=10.0.0.1:8500|10.0.0.2:8500,ps_1=10.0.0.3:8500` names them; without it the agent
at `localhost:$PORT2` is asked. A key is the name under which the other server serves the model:
`ps_0`, or `<model>:ps_0` where one server has the parts of several models.
"""

from __future__ import annotations

from collections.abc import Mapping

from monolith.native_training.serving import transport
from monolith.native_training.serving.agent_resolver import ServedModel
from monolith.serving.errors import invalid


def parse_addresses(text: str) -> dict[str, list[str]]:
  """Returns the addresses of replicas by name of the model.

  Raises:
    ServingError: INVALID_ARGUMENT, it is not `name=host:port|host:port,...`.
  """
  servers: dict[str, list[str]] = {}
  for item in text.split(","):
    name, equals, addresses = item.strip().partition("=")
    replicas = addresses.split("|")
    if not equals or not name or not all(map(_is_address, replicas)):
      raise invalid(
        f"--ps_address has {item.strip()!r}, want name=host:port or name=host:port|host:port"
      )
    if name in servers:
      raise invalid(f"--ps_address names {name!r} twice")
    servers[name] = replicas
  return servers


def install(servers: Mapping[str, list[str]]) -> None:
  """Lets the models of this process call `servers`."""

  def resolve(model_name: str, old_model_name: str, task: int) -> ServedModel:
    for name in (model_name, old_model_name):
      if name in servers:
        return ServedModel(name, list(servers[name]))
    raise transport.HostError(
      5, f"--ps_address names neither {model_name!r} nor {old_model_name!r}, only {sorted(servers)}"
    )

  transport.set_remote_predict_resolver(resolve)


def _is_address(address: str) -> bool:
  host, colon, port = address.rpartition(":")
  return bool(colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536)
