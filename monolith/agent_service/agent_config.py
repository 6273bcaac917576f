"""Settings of an agent and of the server that it looks after.

The names of settings, of environment variables and the defaults are those of ByteDance's Monolith,
so that configuration files work unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import tempfile
from collections.abc import Sequence
from typing import Any

from monolith.agent_service import config_file, ports, serving_protos
from monolith.agent_service.deploy_type import DeployType

# Old name of a setting -> its name.
_ALIASES = {"server_type": "deploy_type"}
# Settings of `AgentConfig` that are flags of the server too, passed when they differ.
_FETCH_FLAGS = (
  "fetch_ps_timeout_ms",
  "fetch_ps_long_conn_num",
  "fetch_ps_long_conn_enable",
  "fetch_ps_retry",
  "aio_thread_num",
)
# Role -> environment variables of its gRPC, HTTP and archon port in a mixed process.
_MIXED_PORTS = {
  "entry": ("PORT3", "PORT4", "PORT"),
  "ps": ("PORT5", "PORT6", "PORT7"),
  "dense": ("PORT8", "PORT9", "PORT10"),
}
_MAIN_PORTS = ("PORT3", "PORT4", "PORT")


@dataclasses.dataclass
class TfServingConfig:
  """Flags of the server, by TensorFlow Serving's names; passed when they differ from a default."""

  enable_batching: bool = False
  allow_version_labels_for_unavailable_models: bool = False
  batching_parameters_file: str | None = None
  num_load_threads: int = 0
  num_unload_threads: int = 0
  max_num_load_retries: int = 5
  load_retry_interval_micros: int = 60 * 1000 * 1000
  file_system_poll_wait_seconds: int = 1
  flush_filesystem_caches: bool = True
  tensorflow_session_parallelism: int = 0
  tensorflow_intra_op_parallelism: int = 0
  tensorflow_inter_op_parallelism: int = 0
  ssl_config_file: str | None = None
  platform_config_file: str | None = None
  per_process_gpu_memory_fraction: float = 0
  allow_growth: bool = True
  saved_model_tags: str | None = None
  grpc_channel_arguments: str | None = None
  grpc_max_threads: int = 0
  enable_model_warmup: bool = True
  version: str | None = None
  remove_unused_fields_from_bundle_metagraph: bool = True
  enable_signature_method_name_check: bool = False
  xla_cpu_compilation_enabled: bool = False
  enable_profiler: bool = True

  def get_cmd(self, binary: str | Sequence[str]) -> str:
    """Returns a command line of the server: the program and the flags that differ.

    Args:
      binary: the program, or the words of its command line.
    """
    names = [field.name for field in dataclasses.fields(TfServingConfig)]
    return shlex.join([*_words(binary), *_flags(self, names)])


@dataclasses.dataclass
class AgentConfig(TfServingConfig):
  """Settings of an agent, which looks after one serving process.

  Attributes:
    bzid: business the model belongs to; first part of all paths.
    base_name: name of the model.
    base_path: folder of its exports, which has a folder per sub model.
    num_ps: number of parameter-server sub graphs.
    num_shard: number of processes that share them; `MONOLITH_HOST_SHARD_N`, else 1.
    deploy_type: what the process hosts, a `DeployType` or its string.
    replica_id: index of the process among those that host the same.
    stand_alone_serving: everything in one pod; implies `deploy_type` mixed.
    zk_servers: comma-joined addresses of ZooKeeper.
    proxy_port: port of a proxy in the pod, free by default.
    tfs_<role>_port, tfs_<role>_http_port, tfs_<role>_archon_port: ports of a role (agents v1).
    tfs_port_grpc, tfs_port_http, tfs_port_archon: ports of the server (agents v3).
    agent_port: port of `AgentService`.
    dense_alone: whether the dense part is a process of its own.
    dense_service_num: how many processes of it one pod starts.
    update_model_status_interval: seconds between two questions to the server.
    agent_version: 1 for roles, 3 for unified serving.
    max_waiting_sec: how long to wait for the first version of a model.
    preload_jemalloc: lets the server use jemalloc where it is installed.
    version_policy, version_data: as for `gen_model_config`.
    fetch_ps_timeout_ms, fetch_ps_long_conn_num, fetch_ps_long_conn_enable, fetch_ps_retry,
      aio_thread_num: flags of the entry server, passed when they differ from the default.
    file_system_poll_wait_seconds_ps: `file_system_poll_wait_seconds` of parameter servers (v1).
    rough_sort_model_name: a further model in the process `rough_sort_model_loaded_server`, served
      from `rough_sort_model_local_path`, to which `ModelManager` copies
      `rough_sort_model_p2p_path`.
    rough_sort_resource_constrained: must be false: servers load the new version of a model before
      they unload the old one.
    dc_aware: whether paths have a level `<idc>:<cluster>`.
    layout_pattern: the layout that a v3 agent follows, absolute or below `/<bzid>/layouts/`.
    layout_filters: which models of it are served here, `<match>;<condition>`.
    use_metrics: whether metrics are emitted.

  Raises:
    AssertionError: `deploy_type` is unknown or missing, or `num_shard` is not the environment's.
    ValueError: `agent_version` is not 1 or 3, or an environment variable is no number.
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
  proxy_port: int | None = None
  tfs_entry_port: int | None = None
  tfs_entry_http_port: int | None = None
  tfs_entry_archon_port: int | None = None
  tfs_ps_port: int | None = None
  tfs_ps_http_port: int | None = None
  tfs_ps_archon_port: int | None = None
  tfs_dense_port: int | None = None
  tfs_dense_http_port: int | None = None
  tfs_dense_archon_port: int | None = None
  tfs_port_archon: int | None = None
  tfs_port_grpc: int | None = None
  tfs_port_http: int | None = None
  agent_port: int | None = None
  dense_alone: bool = False
  dense_service_num: int = 3
  update_model_status_interval: int = 1
  agent_version: int = 1
  max_waiting_sec: int = 1200
  preload_jemalloc: bool = True
  version_policy: str = "latest"
  version_data: int | list[int] = 1
  fetch_ps_timeout_ms: int = 200
  fetch_ps_long_conn_num: int = 100
  fetch_ps_long_conn_enable: bool = True
  fetch_ps_retry: int = 2
  aio_thread_num: int = 30
  file_system_poll_wait_seconds_ps: int = 0
  rough_sort_model_name: str | None = None
  rough_sort_model_local_path: str | None = None
  rough_sort_model_loaded_server: str = "entry"
  rough_sort_model_p2p_path: str | None = None
  rough_sort_resource_constrained: bool = False
  dc_aware: bool = False
  layout_pattern: str | None = None
  layout_filters: list[str] | None = None
  use_metrics: bool = True

  def __post_init__(self) -> None:
    if self.stand_alone_serving:
      self.deploy_type = DeployType.MIXED
    assert (
      self.deploy_type is not None
    ), f"deploy_type is None, want one of {[kind.value for kind in DeployType]}"
    self.deploy_type = DeployType(self.deploy_type)
    if self.agent_version not in (1, 3):
      raise ValueError(f"agent_version is {self.agent_version}, want 1 or 3")
    if self.rough_sort_resource_constrained:
      raise ValueError(
        "rough_sort_resource_constrained is not supported: there must be room for two"
      )
    shards = _env_int("MONOLITH_HOST_SHARD_N")
    assert shards is None or self.num_shard in (
      None,
      shards,
    ), f"num_shard is {self.num_shard}, but MONOLITH_HOST_SHARD_N is {shards}"
    if self.num_shard is None:
      self.num_shard = 1 if shards is None else shards
    if self.replica_id is None:
      self.replica_id = _get_replica_id(self.agent_version)
    if isinstance(self.layout_filters, str):
      self.layout_filters = [self.layout_filters]
    self._set_ports()

  @classmethod
  def from_file(cls, path: str) -> AgentConfig:
    """Reads a configuration file, whose form `config_file` explains.

    Raises:
      OSError: it cannot be read.
      ValueError: it has an unknown key, or a text that is no value of its key.
      AssertionError: as for the constructor.
    """
    return config_file.make_config(cls, config_file.read_config_file(path), _ALIASES)

  @property
  def shard_id(self) -> int:
    """Index of this process among those that share the parameter servers, -1 where unknown."""
    shard = _env_int("SHARD_ID")
    return -1 if shard is None else shard

  @property
  def idc(self) -> str | None:
    """Data centre of this process, lower case."""
    return _lower("TCE_INTERNAL_IDC")

  @property
  def cluster(self) -> str | None:
    """Cluster of this process, lower case."""
    return _lower("TCE_LOGICAL_CLUSTER", "TCE_CLUSTER", "TCE_PHYSICAL_CLUSTER")

  @property
  def location(self) -> str | None:
    """`<idc>:<cluster>`, `None` unless both are known."""
    return f"{self.idc}:{self.cluster}" if self.idc and self.cluster else None

  @property
  def path_prefix(self) -> str:
    """The path where replicas of the model are registered, of this place if `dc_aware`.

    Raises:
      ValueError: `dc_aware` and the place is not known.
    """
    prefix = f"/{self.bzid}/service/{self.base_name}"
    if not self.dc_aware:
      return prefix
    if self.location is None:
      raise ValueError("dc_aware needs TCE_INTERNAL_IDC and TCE_LOGICAL_CLUSTER")
    return f"{prefix}/{self.location}"

  @property
  def layout_path(self) -> str:
    """Path of the layout in ZooKeeper.

    Raises:
      ValueError: there is no `layout_pattern`.
    """
    if not self.layout_pattern:
      raise ValueError("layout_pattern is not set: which layout shall be served?")
    if self.layout_pattern.startswith("/"):
      return self.layout_pattern
    return f"/{self.bzid}/layouts/{self.layout_pattern}"

  @property
  def container_cluster(self) -> str:
    """`<service>;<idc>;<cluster>` of this container."""
    return f"{os.environ.get('TCE_PSM') or 'unknown'};{self.idc};{self.cluster}"

  @property
  def container_id(self) -> str:
    """Name of this container in its cluster."""
    return os.environ.get("MY_POD_NAME") or ports.get_local_ip()

  def server_types(self) -> list[str]:
    """Returns the roles that the process hosts, in the order in which they start."""
    if self.deploy_type != DeployType.MIXED:
      return [str(self.deploy_type)]
    return ["ps", "dense", "entry"] if self.dense_alone else ["ps", "entry"]

  def ps_tasks(self) -> list[int]:
    """Returns the indices of the parameter servers that the process hosts.

    Raises:
      ValueError: there are several shards and `SHARD_ID` is not one of them.
    """
    num_shard, shard_id = self.num_shard or 1, self.shard_id
    if num_shard == 1 and shard_id == -1:
      shard_id = 0
    if not 0 <= shard_id < num_shard:
      raise ValueError(f"SHARD_ID is {shard_id}, want one of {num_shard} shards")
    return [i for i in range(self.num_ps) if i % num_shard == shard_id]

  def get_server_port(self, server_type: str, kind: str = "grpc") -> int:
    """Returns the port of a role.

    Args:
      server_type: `ps`, `entry`, `dense` or `unified`.
      kind: `grpc`, `http` or `archon`.

    Raises:
      ValueError: there is no such port.
    """
    if server_type == DeployType.UNIFIED:
      name = f"tfs_port_{kind}"
    else:
      name = f"tfs_{server_type}_" + ("port" if kind == "grpc" else f"{kind}_port")
    port = getattr(self, name, None)
    if port is None:
      raise ValueError(f"{name} is not set for deploy_type {self.deploy_type}")
    return port

  def sub_models(self, server_type: str) -> list[str]:
    """Returns the names of the sub models that a role serves (v1)."""
    if server_type == DeployType.PS:
      return [f"ps_{i}" for i in self.ps_tasks()]
    return {"entry": ["entry"], "dense": ["dense_0"]}[str(server_type)]

  def gen_model_server_config(self, server_type: str) -> Any:
    """Returns the `ModelServerConfig` with which a role starts; v3 begins without a model.

    Raises:
      ValueError: `base_path` is missing.
    """
    models = []
    if self.agent_version == 1:
      if not self.base_path:
        raise ValueError("base_path is not set: where are the exports?")
      for name in self.sub_models(server_type):
        models.append(
          serving_protos.gen_model_config(
            name, os.path.join(self.base_path, name), self.version_policy, self.version_data
          )
        )
      if self.rough_sort_model_name and self.rough_sort_model_loaded_server == server_type:
        path = os.path.join(
          str(self.rough_sort_model_local_path), self.rough_sort_model_name, str(server_type)
        )
        models.append(serving_protos.gen_model_config(self.rough_sort_model_name, path))
    return serving_protos.gen_model_server_config(models)

  def get_cmd(
    self,
    binary: str | Sequence[str],
    server_type: str | None = None,
    config_path: str | None = None,
  ) -> str:
    """Writes a model configuration file and returns the server's command line, as for a shell.

    Args:
      binary: the server's program, or the words of its command line.
      server_type: the role; needed only in a mixed process.
      config_path: where to write the configuration; a temporary file by default.

    Raises:
      RuntimeError: the process is mixed and no role is given.
      ValueError: a setting that the server needs is missing.
    """
    server_type = DeployType(self.deploy_type).compat_server_type(server_type)
    if config_path is None:
      descriptor, config_path = tempfile.mkstemp(prefix=f"models_{server_type}_", suffix=".conf")
      os.close(descriptor)
    with open(config_path, "w", encoding="utf-8") as file:
      file.write(str(self.gen_model_server_config(server_type)))
    names = [field.name for field in dataclasses.fields(TfServingConfig)]
    if server_type in (DeployType.ENTRY, DeployType.UNIFIED):
      names += _FETCH_FLAGS
    flags = {
      "model_config_file": config_path,
      "port": self.get_server_port(server_type),
      "rest_api_port": self.get_server_port(server_type, "http"),
    }
    if self.agent_version != 1:
      flags["model_config_file_poll_wait_seconds"] = 0
    elif server_type == DeployType.PS:
      names.remove("file_system_poll_wait_seconds")
      flags["file_system_poll_wait_seconds"] = self.file_system_poll_wait_seconds_ps
    return shlex.join(
      [
        *_words(binary),
        *(f"--{name}={value}" for name, value in flags.items()),
        *_flags(self, names),
      ]
    )

  def _set_ports(self) -> None:
    if self.agent_version != 1 or self.deploy_type == DeployType.UNIFIED:
      roles = {"unified": ("tfs_port_grpc", "tfs_port_http", "tfs_port_archon")}
    else:
      roles = {
        role: (f"tfs_{role}_port", f"tfs_{role}_http_port", f"tfs_{role}_archon_port")
        for role in self.server_types()
      }
    for role, names in roles.items():
      variables = _MIXED_PORTS[role] if self.deploy_type == DeployType.MIXED else _MAIN_PORTS
      for name, variable in zip(names, variables):
        self._set_port(name, variable)
    self._set_port("agent_port", "PORT2")
    self._set_port("proxy_port", None)

  def _set_port(self, name: str, variable: str | None) -> None:
    port = None if variable is None else _env_int(variable)
    if port is not None:
      setattr(self, name, port)
    elif getattr(self, name) is None:
      setattr(self, name, ports.find_free_port())


def _get_replica_id(agent_version: int) -> int:
  """Returns `REPLICA_ID` (not in v1), else a number made of `MY_POD_NAME`, else -1."""
  replica = None if agent_version == 1 else _env_int("REPLICA_ID")
  if replica is not None:
    return replica
  pod = os.environ.get("MY_POD_NAME")
  return int(hashlib.md5(pod.encode()).hexdigest()[10:20], 16) if pod else -1


def _env_int(name: str) -> int | None:
  text = os.environ.get(name)
  if not text:
    return None
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"{name} is {text!r}, want a whole number") from None


def _lower(*names: str) -> str | None:
  for name in names:
    if os.environ.get(name):
      return os.environ[name].lower()
  return None


def _words(binary: str | Sequence[str]) -> list[str]:
  return shlex.split(binary) if isinstance(binary, str) else list(binary)


def _flags(config: TfServingConfig, names: Sequence[str]) -> list[str]:
  defaults = {field.name: field.default for field in dataclasses.fields(config)}
  flags = []
  for name in names:
    value = getattr(config, name)
    if value != defaults[name] and value is not None:
      text = str(value).lower() if isinstance(value, bool) else str(value)
      flags.append(f"--{name}={text}")
  return flags
