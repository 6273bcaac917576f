"""A ZooKeeper in memory, with the part of `KazooClient` that this package uses.

Watches call their function at once if the node exists, then synchronously on every change.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol.states import EventType, WatchedEvent, ZnodeStat


@dataclasses.dataclass
class _Node:
  value: bytes = b""
  ephemeral: bool = False
  version: int = 0
  created: float = dataclasses.field(default_factory=time.time)
  modified: float = dataclasses.field(default_factory=time.time)
  next_sequence: int = 0
  children: dict[str, _Node] = dataclasses.field(default_factory=dict)

  def stat(self) -> ZnodeStat:
    created, modified = int(self.created * 1000), int(self.modified * 1000)
    return ZnodeStat(
      czxid=0, mzxid=0, ctime=created, mtime=modified, version=self.version, cversion=0,
      aversion=0, ephemeralOwner=int(self.ephemeral), dataLength=len(self.value),
      numChildren=len(self.children), pzxid=0,
    )  # fmt: skip


class Election:
  """An election that the first to run wins."""

  def __init__(self, client: FakeKazooClient, path: str, identifier: str | None = None):
    self._client = client
    self._path = path
    self._identifier = identifier

  def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    self._client.ensure_path(self._path)
    return func(*args, **kwargs)

  def cancel(self) -> None:
    """Does nothing: there is no wait to cancel."""

  def contenders(self) -> list[str]:
    return [] if self._identifier is None else [self._identifier]


class FakeKazooClient:
  """A client and its own server.

  Args:
    zk_server: ignored.
  """

  def __init__(self, zk_server: str | None = None):
    del zk_server
    # Watches call back into the client.
    self._lock = threading.RLock()
    self._root = _Node()
    self._children_watches: dict[str, list[Callable]] = collections.defaultdict(list)
    self._data_watches: dict[str, list[Callable]] = collections.defaultdict(list)
    self.ChildrenWatch = self._watch_children
    self.DataWatch = self._watch_data
    self.Election = functools.partial(Election, self)
    self.connected = False

  def start(self, timeout: float = 15) -> None:
    del timeout
    self.connected = True

  def stop(self) -> None:
    """Ends the session: ephemeral nodes vanish."""
    with self._lock:
      self._delete_ephemeral("", self._root)
    self.connected = False

  def close(self) -> None:
    self.connected = False

  def retry(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)

  def add_listener(self, listener: Callable[[str], Any]) -> None:
    """Does nothing: the connection never changes."""

  def ensure_path(self, path: str, acl: Any = None) -> bool:
    del acl
    with self._lock:
      parts = _split(path)
      for i in range(1, len(parts) + 1):
        prefix = _join(parts[:i])
        if self._find(prefix) is None:
          self._create(prefix, b"", False)
    return True

  def create(
    self,
    path: str,
    value: bytes = b"",
    acl: Any = None,
    ephemeral: bool = False,
    makepath: bool = False,
    include_data: bool = False,
    sequence: bool = False,
  ) -> str | tuple[str, ZnodeStat]:
    """Creates a node and returns its path, with `include_data` also its stat.

    Raises:
      NodeExistsError: it exists.
      NoNodeError: its parent does not.
    """
    del acl
    with self._lock:
      parent_path = _join(_split(path)[:-1])
      if makepath:
        self.ensure_path(parent_path)
      parent = self._find(parent_path)
      if parent is None:
        raise NoNodeError(parent_path)
      if sequence:
        path = f"{path}{parent.next_sequence:010d}"
        parent.next_sequence += 1
      if self._find(path) is not None:
        raise NodeExistsError(path)
      node = self._create(path, value, ephemeral)
      return (path, node.stat()) if include_data else path

  def set(self, path: str, value: bytes, version: int = -1) -> ZnodeStat:
    del version
    with self._lock:
      node = self._require(path)
      node.value = value
      node.version += 1
      node.modified = time.time()
      self._notify_data(path, EventType.CHANGED)
      return node.stat()

  def get(self, path: str, watch: Callable | None = None) -> tuple[bytes, ZnodeStat]:
    del watch
    with self._lock:
      node = self._require(path)
      return node.value, node.stat()

  def exists(self, path: str, watch: Callable | None = None) -> ZnodeStat | None:
    del watch
    with self._lock:
      node = self._find(path)
      return None if node is None else node.stat()

  def get_children(
    self, path: str, include_data: bool = False, watch: Callable | None = None
  ) -> list[str] | tuple[list[str], ZnodeStat]:
    del watch
    with self._lock:
      node = self._require(path)
      children = sorted(node.children)
      return (children, node.stat()) if include_data else children

  def delete(self, path: str, recursive: bool = True, version: int = -1) -> bool:
    """Deletes a node.

    Raises:
      NoNodeError: there is none.
      NotEmptyError: it has children and `recursive` is false.
    """
    del version
    with self._lock:
      node = self._require(path)
      if node.children and not recursive:
        raise NotEmptyError(path)
      for child in sorted(node.children):
        self.delete(f"{path.rstrip('/')}/{child}")
      parts = _split(path)
      parent_path = _join(parts[:-1])
      del self._require(parent_path).children[parts[-1]]
      self._notify_data(path, EventType.DELETED)
      self._notify_children(path)
      self._notify_children(parent_path)
      return True

  def _watch_children(
    self, path: str, func: Callable | None = None, send_event: bool = False
  ) -> Callable:
    """Calls `func(children)`; usable as a decorator. A function that returns False is dropped."""
    if func is None:
      return functools.partial(self._watch_children, path, send_event=send_event)

    def call(children: list[str]) -> Any:
      return func(children, None) if send_event else func(children)

    with self._lock:
      self._children_watches[_join(_split(path))].append(call)
      node = self._find(path)
      if node is not None and call(sorted(node.children)) is False:
        self._children_watches[_join(_split(path))].remove(call)
    return func

  def _watch_data(self, path: str, func: Callable | None = None) -> Callable:
    """Calls `func(data, stat, event)`; usable as a decorator. One that returns False is dropped."""
    if func is None:
      return functools.partial(self._watch_data, path)
    call = _with_event(func)
    with self._lock:
      self._data_watches[_join(_split(path))].append(call)
      node = self._find(path)
      if node is not None and call(node.value, node.stat(), None) is False:
        self._data_watches[_join(_split(path))].remove(call)
    return func

  def _find(self, path: str) -> _Node | None:
    node: _Node | None = self._root
    for part in _split(path):
      if node is None:
        return None
      node = node.children.get(part)
    return node

  def _require(self, path: str) -> _Node:
    node = self._find(path)
    if node is None:
      raise NoNodeError(path)
    return node

  def _create(self, path: str, value: bytes, ephemeral: bool) -> _Node:
    parts = _split(path)
    parent_path = _join(parts[:-1])
    node = _Node(value=value, ephemeral=ephemeral)
    self._require(parent_path).children[parts[-1]] = node
    self._notify_data(path, EventType.CREATED)
    self._notify_children(path)
    self._notify_children(parent_path)
    return node

  def _delete_ephemeral(self, path: str, node: _Node) -> None:
    for name in sorted(node.children):
      child = node.children[name]
      self._delete_ephemeral(f"{path}/{name}", child)
      if child.ephemeral:
        self.delete(f"{path}/{name}")

  def _notify_children(self, path: str) -> None:
    path = _join(_split(path))
    node = self._find(path)
    if node is None:
      return
    for func in list(self._children_watches.get(path, ())):
      if func(sorted(node.children)) is False:
        self._children_watches[path].remove(func)

  def _notify_data(self, path: str, event_type: str) -> None:
    path = _join(_split(path))
    node = self._find(path)
    value, stat = (None, None) if node is None else (node.value, node.stat())
    for func in list(self._data_watches.get(path, ())):
      event = WatchedEvent(type=event_type, state="CONNECTED", path=path)
      if func(value, stat, event) is False:
        self._data_watches[path].remove(func)


def _with_event(func: Callable) -> Callable:
  """Lets a function of `(data, stat)` be called with an event too, as kazoo does."""
  try:
    inspect.signature(func).bind(None, None, None)
  except TypeError:
    return lambda data, stat, event: func(data, stat)
  return func


def _split(path: str) -> list[str]:
  return [part for part in path.split("/") if part]


def _join(parts: list[str]) -> str:
  return "/" + "/".join(parts)
