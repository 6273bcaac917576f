"""Rank and size of this process among those that a launcher started together.

An initialised Horovod knows them best. Before that the environment tells, whatever started the
process: Horovod's own launcher, Open MPI, or a launcher that speaks PMI (MPICH, Slurm, Intel).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from absl import logging

from monolith.native_training import gflags_utils

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

_BACKENDS = ("byteps.tensorflow", "horovod.tensorflow")


def is_under_mpi() -> bool:
  """Returns whether a launcher of any kind started this process."""
  return any(name in os.environ for name in (*_VARIABLES["rank"], *_VARIABLES["local_rank"]))


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
  for variable in _VARIABLES[value]:
    text = os.environ.get(variable)
    if text is not None:
      try:
        return int(text)
      except ValueError:
        raise ValueError(f"{variable} is {text!r}, want an integer") from None
  return None


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
