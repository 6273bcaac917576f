"""Ephemeral nodes that outlive the loss of a ZooKeeper session.

An ephemeral node belongs to the session that made it. A process that lost its session, or that was
restarted before its old session expired, must not take a node of the old session for its own: it
would vanish a few seconds later.
"""

from __future__ import annotations

from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import ZnodeStat


def write_ephemeral(zk: Any, path: str, value: bytes) -> None:
  """Makes sure that an ephemeral node of this client's session has a value.

  Args:
    zk: a started `KazooClient`.
    path: the node's path; missing parents are made.
    value: the content it is to have.

  Raises:
    KazooException: ZooKeeper does not answer, or refuses the request.
  """
  # Another process may delete the node between two calls.
  for _ in range(3):
    stat = zk.exists(path)
    try:
      if stat is None:
        zk.create(path, value, ephemeral=True, makepath=True)
      elif _is_own(zk, stat):
        if zk.get(path)[0] != value:
          zk.set(path, value)
      else:
        zk.delete(path, recursive=False)
        continue
      return
    except (NoNodeError, NodeExistsError):
      continue
  raise NodeExistsError(f"{path} changes all the time: do two processes have the same id?")


def delete_node(zk: Any, path: str, recursive: bool = False) -> bool:
  """Deletes a node, on demand with all nodes below it; returns False if there is none."""
  try:
    zk.delete(path, recursive=recursive)
  except NoNodeError:
    return False
  return True


def read_children(zk: Any, path: str) -> list[str]:
  """Returns the names of a node's children, sorted; none if the node is missing."""
  try:
    return sorted(zk.get_children(path))
  except NoNodeError:
    return []


def read_node(zk: Any, path: str) -> bytes | None:
  """Returns the content of a node, `None` if the node is missing."""
  try:
    return zk.get(path)[0]
  except NoNodeError:
    return None


def _is_own(zk: Any, stat: ZnodeStat) -> bool:
  client_id = getattr(zk, "client_id", None)
  # A client in memory has one session only.
  return client_id is None or stat.ephemeralOwner == client_id[0]
