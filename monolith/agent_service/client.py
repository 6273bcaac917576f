"""Asks for models to be loaded or unloaded, and how far that is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from kazoo.handlers.threading import KazooTimeoutError

from monolith.agent_service import zk_nodes
from monolith.agent_service.data_def import ModelMeta, PublishMeta, ReplicaMeta
from monolith.agent_service.json_node import JsonNode
from monolith.agent_service.utils import ModelState
from monolith.native_training.zk_utils import MonolithKazooClient, default_zk_servers


@dataclasses.dataclass
class LoadSate:
  """Says how far a request is.

  Attributes:
    portal: the request is in ZooKeeper.
    publish: processes were told.
    service: replicas are available.
  """

  portal: bool = False
  publish: bool = False
  service: bool = False


class ServingClient:
  """Writes requests to ZooKeeper and reads what became of them.

  Args:
    zk_servers: comma-joined addresses.
    bzid: business the models belong to.
    zk_client: another client, not started yet.
  """

  def __init__(self, zk_servers: str | None, bzid: str, zk_client: Any = None):
    self._bzid = bzid
    self._zk = zk_client or MonolithKazooClient(zk_servers or default_zk_servers())
    self._zk.start()

  def close(self) -> None:
    self._zk.stop()
    self._zk.close()

  def load(
    self, model_name: str, model_dir: str, ckpt: str | None = None, num_shard: int = -1
  ) -> None:
    """Asks to load a model.

    Args:
      model_name: the model.
      model_dir: folder of its exports.
      ckpt: which checkpoint; the newest common version by default.
      num_shard: over how many processes; -1 for all.
    """
    meta = ModelMeta(model_name, model_dir, ckpt, num_shard)
    path = meta.get_path(f"/{self._bzid}/portal")
    self._zk.ensure_path(path)
    self._zk.set(path, meta.serialize())

  def unload(self, model_name: str) -> bool:
    """Takes a request back; returns False if there was none."""
    return zk_nodes.delete_node(self._zk, f"/{self._bzid}/portal/{model_name}")

  def get_status(self, model_name: str) -> LoadSate:
    """Returns how far the request for a model is."""
    root = f"/{self._bzid}"
    published = [
      _parse(PublishMeta, zk_nodes.read_node(self._zk, f"{root}/publish/{child}"))
      for child in zk_nodes.read_children(self._zk, f"{root}/publish")
    ]
    return LoadSate(
      portal=zk_nodes.read_node(self._zk, f"{root}/portal/{model_name}") is not None,
      publish=any(meta is not None and meta.model_name == model_name for meta in published),
      service=self._is_served(f"{root}/service/{model_name}"),
    )

  def _is_served(self, path: str) -> bool:
    data = zk_nodes.read_node(self._zk, path)
    meta = _parse(ReplicaMeta, data) if data else None
    if meta is not None and meta.stat == ModelState.AVAILABLE:
      return True
    children = zk_nodes.read_children(self._zk, path)
    return any(self._is_served(f"{path}/{child}") for child in children)


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(prog="client", description=__doc__, allow_abbrev=False)
  parser.add_argument("--cmd", required=True, choices=["load", "unload", "status"])
  parser.add_argument("--bzid", required=True, help="business the model belongs to")
  parser.add_argument("--zk_servers", help="comma-joined addresses of ZooKeeper")
  parser.add_argument("--model_name", required=True, help="the model")
  parser.add_argument("--model_dir", help="load: folder of its exports")
  parser.add_argument("--ckpt", help="load: which checkpoint")
  parser.add_argument("--num_shard", type=int, default=-1, help="load: over how many processes")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  if options.cmd == "load" and not options.model_dir:
    parser.error("load needs --model_dir")
  try:
    client = ServingClient(options.zk_servers, options.bzid)
  except KazooTimeoutError as error:
    print(f"client: {error!r}", file=sys.stderr)
    return 1
  try:
    if options.cmd == "load":
      client.load(options.model_name, options.model_dir, options.ckpt, options.num_shard)
    elif options.cmd == "unload" and not client.unload(options.model_name):
      print(f"client: nobody asked for {options.model_name}", file=sys.stderr)
      return 1
    print(json.dumps(dataclasses.asdict(client.get_status(options.model_name))))
  finally:
    client.close()
  return 0


def _parse(cls: type[JsonNode], data: bytes | None) -> Any:
  """Returns what a node says, `None` if that is nothing or nonsense."""
  try:
    return cls.deserialize(data) if data else None
  except (ValueError, TypeError):
    return None


if __name__ == "__main__":
  sys.exit(main())
