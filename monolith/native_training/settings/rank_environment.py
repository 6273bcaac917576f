"""Rank and size of this process among those that a launcher started together.

An initialised library knows them best. Before that the environment tells, whatever started the
process, in this order: Horovod's own launcher, Open MPI, a launcher that speaks PMI (MPICH, Slurm,
Intel), one that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` as PyTorch's do, and
`TF_CONFIG` of a cluster of workers without parameter servers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

from absl import logging

from monolith.native_training import gflags_utils

TF_CONFIG = "TF_CONFIG"
ENGINE_ENV = "MONOLITH_RANKS_ENGINE"
HOROVOD, TENSORFLOW = "horovod", "tensorflow"

# For each value the variables that hold it, the first one that is set counts.
_VARIABLES = {
  "rank": ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
  "local_rank": (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "MPI_LOCALRANKID",
  ),
  "size": ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
  "local_size": (
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
  ),
}
# Others set one of these too, for something else: they count together.
_TORCH_VARIABLES = {
  "rank": "RANK",
  "local_rank": "LOCAL_RANK",
  "size": "WORLD_SIZE",
  "local_size": "LOCAL_WORLD_SIZE",
}
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
# All that say something about the rank of this process, or where it meets the others.
LAUNCHER_VARIABLES = frozenset(
  (
    *(name for names in _VARIABLES.values() for name in names),
    *_TORCH_VARIABLES.values(),
    *_MASTER,
    "TORCHELASTIC_USE_AGENT_STORE",
    TF_CONFIG,
  )
)

_BACKENDS = (
  "byteps.tensorflow",
  "horovod.tensorflow",
  "monolith.native_training.ranks.tensorflow_engine",
)


class WorkerCluster(NamedTuple):
  """A cluster of workers alone, as `TF_CONFIG` describes it.

  Attributes:
    rank: of this process; the chief, if there is one, comes first.
    addresses: `host:port` by rank.
  """

  rank: int
  addresses: list[str]


def is_under_mpi() -> bool:
  """Returns whether a launcher of any kind started this process."""
  return (
    any(name in os.environ for name in (*_VARIABLES["rank"], *_VARIABLES["local_rank"]))
    or meets_without_library()
  )


def meets_without_library() -> bool:
  """Returns whether the launcher is one that says nothing to Horovod."""
  if any(name in os.environ for name in (*_VARIABLES["rank"], *_VARIABLES["local_rank"])):
    return False
  return _has_torch_variables() or read_worker_cluster() is not None


def enable_sync_training() -> bool:
  """Returns whether this is a launched rank of synchronous training, by the flag of that name."""
  return bool(gflags_utils.read_flag("enable_sync_training", False)) and is_under_mpi()


def get_mpi_rank() -> int:
  """Returns the rank of this process, 0 without a launcher."""
  return _get("rank", 0)


def get_mpi_local_rank() -> int:
  """Returns the rank of this process on its host, 0 without a launcher."""
  return _get("local_rank", 0)


def get_mpi_size() -> int:
  """Returns the number of ranks, 1 without a launcher."""
  return _get("size", 1)


def get_mpi_local_size() -> int:
  """Returns the number of ranks on this host, 1 without a launcher."""
  return _get("local_size", 1)


def read_launcher(value: str) -> int | None:
  """Returns what the launcher says about this process, `None` if it says nothing.

  Args:
    value: `rank`, `local_rank`, `size` or `local_size`.

  Raises:
    ValueError: the variable is not an integer.
  """
  variables = _VARIABLES[value]
  if _has_torch_variables():
    variables = (*variables, _TORCH_VARIABLES[value])
  for variable in variables:
    text = os.environ.get(variable)
    if text is not None:
      return _to_int(variable, text)
  cluster = read_worker_cluster()
  if cluster is None:
    return None
  host = _host(cluster.addresses[cluster.rank])
  neighbours = [rank for rank, address in enumerate(cluster.addresses) if _host(address) == host]
  return {
    "rank": cluster.rank,
    "size": len(cluster.addresses),
    "local_rank": neighbours.index(cluster.rank),
    "local_size": len(neighbours),
  }[value]


def read_master() -> tuple[str, int] | None:
  """Returns host and port where ranks meet that no library brings together, if they are given.

  Raises:
    ValueError: the port is not an integer.
  """
  host, port = (os.environ.get(name) for name in _MASTER)
  return (host, _to_int(_MASTER[1], port)) if host and port else None


def read_worker_cluster() -> WorkerCluster | None:
  """Returns the cluster of `TF_CONFIG` if it has several workers, of which this is one, and no
  parameter servers.

  Raises:
    ValueError: the text is no JSON.
  """
  text = os.environ.get(TF_CONFIG)
  if not text:
    return None
  try:
    config = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{TF_CONFIG} is {text!r}, want JSON") from error
  cluster = config.get("cluster") or {} if isinstance(config, dict) else {}
  task = config.get("task") or {} if isinstance(config, dict) else {}
  if not isinstance(cluster, dict) or not isinstance(task, dict) or cluster.get("ps"):
    return None
  workers = [
    (job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job) or ()))
  ]
  own = (task.get("type"), _to_int(f"the task of {TF_CONFIG}", task.get("index", 0)))
  if len(workers) < 2 or own not in workers:
    return None
  return WorkerCluster(workers.index(own), [cluster[job][index] for job, index in workers])


def read_engine() -> str | None:
  """Returns what is to carry out the exchanges, `None` if the environment leaves the choice.

  Raises:
    ValueError: there is no such engine.
  """
  engine = os.environ.get(ENGINE_ENV, "")
  if engine not in ("", HOROVOD, TENSORFLOW):
    raise ValueError(f"{ENGINE_ENV} is {engine!r}, want {HOROVOD!r} or {TENSORFLOW!r}")
  return engine or None


def find_local_engine() -> str:
  """Returns the engine for ranks that this process starts; imports none.

  Raises:
    ValueError: the environment asks for one that does not exist.
  """
  engine = read_engine()
  if engine is None:
    spec = importlib.util.find_spec("horovod")
    folders = [] if spec is None else (spec.submodule_search_locations or [])
    libraries = [
      path for f in folders for path in pathlib.Path(f, "tensorflow").glob("mpi_lib*.so")
    ]
    engine = HOROVOD if libraries else TENSORFLOW
  return engine


def find_initialized_backend() -> Any:
  """Returns the module of the backend that this process has initialised, else `None`.

  Imports nothing: a backend that was not imported cannot be initialised.
  """
  for name in _BACKENDS:
    module = sys.modules.get(name)
    # Another thread may be in the middle of the import.
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is not None and is_initialized():
      return module
  return None


def _has_torch_variables() -> bool:
  return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", *_MASTER))


def _host(address: str) -> str:
  return address.rsplit(":", 1)[0]


def _to_int(name: str, text: Any) -> int:
  try:
    return int(text)
  except (TypeError, ValueError):
    raise ValueError(f"{name} is {text!r}, want an integer") from None


def _get(value: str, default: int) -> int:
  backend = find_initialized_backend()
  if backend is not None:
    return getattr(backend, value)()
  launched = read_launcher(value)
  if launched is None:
    logging.log_first_n(
      logging.WARNING, "no launcher tells the %s of this process, taking %d", 1, value, default
    )
    return default
  return launched
