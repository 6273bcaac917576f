"""Reads the environment: HDFS set-up, service names, ZooKeeper credentials, switches."""

import os
from typing import Optional


def setup_hdfs_env() -> None:
  """Does nothing: TensorFlow reads `HADOOP_HDFS_HOME` and `CLASSPATH` by itself."""


def generate_psm_from_uuid(s: str) -> str:
  """Returns the service name of the job with this uuid: the uuid itself."""
  return s


def get_zk_auth_data() -> Optional[list[tuple[str, str]]]:
  """Returns ZooKeeper credentials from `ZK_AUTH` (`user:password`), or None when unset.

  The secret is never logged.
  """
  secret = os.environ.get("ZK_AUTH")
  return [("digest", secret)] if secret else None


def get_bool(name: str, default: bool = False) -> bool:
  """Reads a switch: empty, `0` and `false` (in any case) are off, any other text is on.

  Args:
    name: the environment variable.
    default: where it is not set.
  """
  text = os.environ.get(name)
  return default if text is None else text.strip().lower() not in ("", "0", "false")


def get_int(name: str, default: int) -> int:
  """Reads a number.

  Args:
    name: the environment variable.
    default: where it is not set, or empty.

  Raises:
    ValueError: it is no number.
  """
  text = os.environ.get(name)
  if not text:
    return default
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"{name} is {text!r}, want a whole number") from None
