"""ZooKeeper helpers: default servers, an authenticated client, and removal of stale jobs."""

import datetime
import os
import socket

from absl import logging
from kazoo.client import KazooClient

from monolith.native_training import env_utils

_PORT = 2181
# A deployment may fill these with the addresses of its own ensemble.
_HOSTS = []
_HOSTS_IPV6 = []

_BASE_PATH = "/monolith"
_STALE_AFTER = datetime.timedelta(weeks=9)


def is_ipv6_only() -> bool:
  """Tells whether this host has no IPv4 address, by container variables or else by its name."""
  if any(os.environ.get(name) for name in ("MY_HOST_IP", "MY_POD_IP", "MY_HOST_IPV6")):
    ipv4_addr = os.environ.get("MY_HOST_IP") or os.environ.get("MY_POD_IP")
  else:
    try:
      ipv4_addr = socket.gethostbyname(socket.gethostname())
    except Exception:  # Whatever keeps a name from having one, there is none.
      ipv4_addr = None
  ipv6_only = not ipv4_addr
  logging.info("ipv4 address is %s, ipv6 only: %s", ipv4_addr, ipv6_only)
  return ipv6_only


def default_zk_servers(use_ipv6: bool = False) -> str:
  """Returns the comma-joined `host:port` of the deployment's ensemble, empty without one."""
  if use_ipv6 or is_ipv6_only():
    return ",".join(f"[{ip}]:{_PORT}" for ip in _HOSTS_IPV6)
  return ",".join(f"{ip}:{_PORT}" for ip in _HOSTS)


class MonolithKazooClient(KazooClient):
  """A `KazooClient` that authenticates with `env_utils.get_zk_auth_data()` by default."""

  def __init__(self, *args, **kwargs):
    if "auth_data" not in kwargs:
      kwargs["auth_data"] = env_utils.get_zk_auth_data()
    super().__init__(*args, **kwargs)


def clear_zk_path(zk_server: str, job_name: str, force_clear_zk_path: bool) -> None:
  """Removes jobs untouched for nine weeks, and makes sure `job_name` has no node yet.

  Args:
    zk_server: comma-joined addresses; empty for `default_zk_servers()`.
    job_name: the job about to start.
    force_clear_zk_path: whether to delete an existing node of that job.

  Raises:
    ValueError: if the job has a node already and `force_clear_zk_path` is false.
  """
  client = MonolithKazooClient(zk_server or default_zk_servers())
  try:
    client.start()
    client.ensure_path(_BASE_PATH)
    for child in client.get_children(_BASE_PATH):
      _delete_if_stale(client, f"{_BASE_PATH}/{child}")

    job_path = f"{_BASE_PATH}/{job_name}"
    if not client.exists(job_path):
      return
    if not force_clear_zk_path:
      children = ",".join(sorted(client.get_children(job_path)))
      raise ValueError(f"there are [{children}] in monolith zk path")
    client.delete(job_path, recursive=True)
  finally:
    client.stop()
    client.close()


def _delete_if_stale(client: KazooClient, path: str) -> None:
  # Several jobs may clean up at once, so a node may vanish under us at any moment.
  try:
    _, stat = client.get_children(path, include_data=True)
    modified = datetime.datetime.fromtimestamp(stat.mtime // 1000)
    if modified + _STALE_AFTER < datetime.datetime.now():
      client.delete(path, recursive=True)
  except Exception as e:
    logging.info("cannot clear zk path %s: %r", path, e)
