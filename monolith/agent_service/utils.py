"""What the serving side agrees on: states of a model, an agent's settings, paths in ZooKeeper."""

from __future__ import annotations

import dataclasses
import enum
import re


class ModelState(enum.IntEnum):
  """State of a served model, as TensorFlow Serving counts it."""

  UNKNOWN = 0
  START = 10
  LOADING = 20
  AVAILABLE = 30
  UNLOADING = 40
  END = 50


class DeployType(str, enum.Enum):
  """What a serving process hosts; equal to its string."""

  PS = "ps"
  ENTRY = "entry"
  DENSE = "dense"
  MIXED = "mixed"
  UNIFIED = "unified"

  def __str__(self) -> str:
    return self.value


@dataclasses.dataclass
class AgentConfig:
  """Settings of an agent, which looks after one serving process.

  Attributes:
    bzid: business the model belongs to; first part of all paths.
    base_name: name of the model.
    base_path: folder of its exports.
    num_ps: number of parameter-server sub graphs.
    num_shard: number of processes that share them.
    deploy_type: what the process hosts, a `DeployType` or its string.
    replica_id: index of the process among those that host the same.
    stand_alone_serving: everything in one process; `deploy_type` is not needed then.
    zk_servers: comma-joined addresses of ZooKeeper.
    dense_alone: whether the dense part is a process of its own.
    dc_aware: whether paths have a level `<idc>:<cluster>`.

  Raises:
    ValueError: `deploy_type` is unknown, or missing.
  """

  bzid: str | None = None
  base_name: str | None = None
  base_path: str | None = None
  num_ps: int = 1
  num_shard: int | None = None
  deploy_type: str | None = None
  replica_id: int | None = None
  stand_alone_serving: bool = False
  zk_servers: str | None = None
  dense_alone: bool = False
  dc_aware: bool = False

  def __post_init__(self):
    if self.deploy_type is None and self.stand_alone_serving:
      return
    known = [kind.value for kind in DeployType]
    if self.deploy_type is None or str(self.deploy_type) not in known:
      raise ValueError(f"deploy_type is {self.deploy_type!r}, want one of {known}")
    self.deploy_type = DeployType(str(self.deploy_type))


class ZKPath:
  """The path of a task or of one of its replicas, parsed.

    /<bzid>/service/<base_name>[/<idc>:<cluster>]/<server_type>:<index>[/<replica_id>]

  The server type may be any word.

  Attributes:
    path: the path itself.
    bzid, base_name, idc, cluster, server_type, index, replica_id: its parts, strings; `None` for
      parts that are missing and when the path is none of these.
  """

  _PATTERN = re.compile(
    r"/(?P<bzid>[^/]+)/service/(?P<base_name>[^/]+)"
    r"(/(?P<idc>[^/:]+):(?P<cluster>[^/:]+))?"
    r"/(?P<server_type>\w+):(?P<index>\d+)(/(?P<replica_id>[-_0-9A-Za-z]+))?"
  )

  def __init__(self, path: str):
    self.path = path
    match = self._PATTERN.fullmatch(path)
    parts = match.groupdict() if match else {}
    self.bzid: str | None = parts.get("bzid")
    self.base_name: str | None = parts.get("base_name")
    self.idc: str | None = parts.get("idc")
    self.cluster: str | None = parts.get("cluster")
    self.server_type: str | None = parts.get("server_type")
    self.index: str | None = parts.get("index")
    self.replica_id: str | None = parts.get("replica_id")

  @property
  def task(self) -> str | None:
    """`<server_type>:<index>`."""
    return None if self.server_type is None else f"{self.server_type}:{self.index}"

  @property
  def replica(self) -> int:
    """The replica's number, -1 where its id is none."""
    text = self.replica_id or ""
    return int(text) if text.isascii() and text.isdigit() else -1

  @property
  def location(self) -> str | None:
    """`<idc>:<cluster>`."""
    return None if self.idc is None else f"{self.idc}:{self.cluster}"

  def ship_in(self, idc: str | None, cluster: str | None) -> bool:
    """Tells whether the path is in that place; everything is when either is `None`."""
    if idc is None or cluster is None:
      return True
    return self.idc == idc and self.cluster == cluster
