"""Queries an agent, or reads and writes the nodes of agents in ZooKeeper.

hb, gr                the agent at --port: heart beat, replicas of --server_type and --task
addr                  addresses of all replicas of --model_name
get                   the nodes that --args names: addr, portal, pub, res, lock, elect, info
load, unload          requests --model_name, or withdraws the request
clean                 deletes the nodes of --args
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from monolith.agent_service import (
  agent_service_pb2,
  agent_service_pb2_grpc,
  backends,
  client,
  zk_nodes,
)

_TIMEOUT_SECS = 10
# --args -> folder below the one of the business.
_FOLDERS = {
  "addr": "service",
  "portal": "portal",
  "pub": "publish",
  "res": "resource",
  "lock": "locks",
  "elect": "election",
}


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="agent_client",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  kinds = ["hb", "gr", "addr", "get", "load", "unload", "clean"]
  parser.add_argument("--cmd_type", required=True, choices=kinds)
  parser.add_argument("--args", choices=[*_FOLDERS, "info"], help="get, clean: what")
  parser.add_argument("--server_type", default="ps", choices=["ps", "entry", "dense"])
  parser.add_argument("--task", type=int, default=0, help="gr: index of the task")
  parser.add_argument("--model_name", help="the model")
  parser.add_argument("--model_dir", help="load: folder of its exports")
  parser.add_argument("--ckpt", help="load: which checkpoint")
  parser.add_argument("--num_shard", type=int, default=-1, help="load: over how many processes")
  parser.add_argument("--host", default="localhost", help="hb, gr: the agent's host")
  parser.add_argument("--port", type=int, help="hb, gr: the agent's port")
  parser.add_argument("--bzid", help="business the model belongs to")
  parser.add_argument("--zk_servers", help="comma-joined addresses of ZooKeeper")
  return parser


def ask_agent(options: argparse.Namespace) -> Any:
  """Returns an agent's answer to `hb` or `gr`.

  Raises:
    grpc.RpcError: it does not answer.
  """
  server_type = agent_service_pb2.ServerType.Value(options.server_type.upper())
  with grpc.insecure_channel(
    f"{options.host}:{options.port}", options=[("grpc.enable_http_proxy", 0)]
  ) as channel:
    stub = agent_service_pb2_grpc.AgentServiceStub(channel)
    if options.cmd_type == "hb":
      beat = stub.HeartBeat(
        agent_service_pb2.HeartBeatRequest(server_type=server_type), timeout=_TIMEOUT_SECS
      )
      return {key: list(beat.addresses[key].address) for key in sorted(beat.addresses)}
    replicas = stub.GetReplicas(
      agent_service_pb2.GetReplicasRequest(
        server_type=server_type, task=options.task, model_name=options.model_name or ""
      ),
      timeout=_TIMEOUT_SECS,
    )
    return list(replicas.address_list.address)


def read_tree(zk: Any, path: str) -> dict[str, Any]:
  """Returns the values of all non-empty nodes below `path`, by their paths."""
  found = {}
  for child in zk_nodes.read_children(zk, path):
    data = zk_nodes.read_node(zk, f"{path}/{child}")
    if data:
      found[f"{path}/{child}"] = _as_json(data)
    found.update(read_tree(zk, f"{path}/{child}"))
  return found


def run(options: argparse.Namespace, backend: backends.ZKBackend) -> Any:
  """Runs a command on a started backend; returns the text to print."""
  zk, root = backend.zk, f"/{options.bzid}"
  if options.cmd_type == "addr":
    suffix = f"/{options.model_name}" if options.model_name else ""
    return read_tree(zk, f"{root}/service{suffix}")
  if options.args == "info":
    if options.cmd_type == "clean":
      raise ValueError("clean cannot delete info: name what to delete")
    return backend.bzid_info()
  if options.args is None:
    raise ValueError(f"{options.cmd_type} needs --args")
  folder = f"{root}/{_FOLDERS[options.args]}"
  if options.cmd_type == "get":
    return read_tree(zk, folder)
  children = zk_nodes.read_children(zk, folder)
  for child in children:
    zk_nodes.delete_node(zk, f"{folder}/{child}", recursive=True)
  return children


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = make_parser()
  options = parser.parse_args(argv)
  if options.cmd_type in ("hb", "gr"):
    if options.port is None:
      parser.error(f"{options.cmd_type} needs --port")
    try:
      print(json.dumps(ask_agent(options), indent=2))
    except grpc.RpcError as error:
      print(f"agent_client: {error.code().name}: {error.details()}", file=sys.stderr)
      return 1
    return 0
  if not options.bzid:
    parser.error(f"{options.cmd_type} needs --bzid")
  if options.cmd_type in ("load", "unload"):
    if not options.model_name:
      parser.error(f"{options.cmd_type} needs --model_name")
    words = ["--cmd", options.cmd_type, "--bzid", options.bzid, "--model_name", options.model_name]
    for name in ("zk_servers", "model_dir", "ckpt", "num_shard"):
      if getattr(options, name) is not None:
        words.append(f"--{name}={getattr(options, name)}")
    return client.main(words)
  try:
    with backends.connect(options.bzid, options.zk_servers) as backend:
      print(json.dumps(run(options, backend), indent=2))
  except (ValueError, KazooException, KazooTimeoutError) as error:
    print(f"agent_client: {error!r}", file=sys.stderr)
    return 1
  return 0


def _as_json(data: bytes) -> Any:
  try:
    return json.loads(data)
  except ValueError:
    return data.decode(errors="backslashreplace")


if __name__ == "__main__":
  sys.exit(main())
