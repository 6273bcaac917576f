"""Rank and size of this process under Open MPI (or a launcher that sets its variables)."""

import os

from absl import logging

_PREFIX = "OMPI_COMM_WORLD_"


def is_under_mpi() -> bool:
  return f"{_PREFIX}RANK" in os.environ


def get_mpi_rank() -> int:
  return _get("RANK", 0)


def get_mpi_local_rank() -> int:
  return _get("LOCAL_RANK", 0)


def get_mpi_size() -> int:
  return _get("SIZE", 1)


def get_mpi_local_size() -> int:
  return _get("LOCAL_SIZE", 1)


def _get(name: str, default: int) -> int:
  variable = _PREFIX + name
  text = os.environ.get(variable)
  if text is None:
    logging.log_first_n(logging.WARNING, "%s is not set, taking %d", 1, variable, default)
    return default
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"{variable} is {text!r}, want an integer") from None
