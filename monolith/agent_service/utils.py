"""Defines terms of the serving side: states of a model, settings of agents, paths in ZooKeeper."""

from __future__ import annotations

import enum
import re

from monolith.agent_service.agent_config import AgentConfig as AgentConfig
from monolith.agent_service.agent_config import TfServingConfig as TfServingConfig
from monolith.agent_service.config_file import read_config_file as read_config_file
from monolith.agent_service.deploy_type import DeployType as DeployType
from monolith.agent_service.instance_formater import InstanceFormater as InstanceFormater
from monolith.agent_service.names import expand_pattern as expand_pattern
from monolith.agent_service.names import normalize_regex as normalize_regex
from monolith.agent_service.names import pasre_sub_model_name as pasre_sub_model_name
from monolith.agent_service.ports import check_port_open as check_port_open
from monolith.agent_service.ports import find_free_port as find_free_port
from monolith.agent_service.ports import get_local_ip as get_local_ip
from monolith.agent_service.serving_protos import gen_model_config as gen_model_config
from monolith.agent_service.serving_protos import gen_model_spec as gen_model_spec
from monolith.agent_service.serving_protos import (
  gen_model_version_status as gen_model_version_status,
)
from monolith.agent_service.serving_protos import gen_status_proto as gen_status_proto
from monolith.agent_service.serving_protos import make_tensor_proto as make_tensor_proto


class ModelState(enum.IntEnum):
  """State of a served model, as TensorFlow Serving counts it."""

  UNKNOWN = 0
  START = 10
  LOADING = 20
  AVAILABLE = 30
  UNLOADING = 40
  END = 50


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
