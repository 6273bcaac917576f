"""`NestedMap`: a dict whose keys are also attributes, for trees of layers and tensors.

A tree consists of `NestedMap`s and lists; everything else, plain dicts and tuples included, is a
leaf. Trees are walked in sorted key order, and a leaf's path looks like `b.c[1].d`.
"""

import re
from collections.abc import Iterator
from typing import Any, Callable, Optional

from absl import logging

# A prefix match: whatever follows the first character is accepted, as it always was.
_KEY_PATTERN = re.compile(r"[A-Za-z_]")
_RESERVED_KEYS = frozenset(dir(dict))
_DROPPED = object()


class NestedMap(dict):
  """A dict with attribute access and checked keys."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    for key in self:
      NestedMap.CheckKey(key)

  def __setitem__(self, key: str, value: Any) -> None:
    NestedMap.CheckKey(key)
    super().__setitem__(key, value)

  def __setattr__(self, name: str, value: Any) -> None:
    self[name] = value

  def __getattr__(self, name: str) -> Any:
    try:
      return self[name]
    except KeyError as error:
      raise AttributeError(f"{error}; available attributes: {sorted(self)}") from None

  def __delattr__(self, name: str) -> None:
    try:
      del self[name]
    except KeyError as error:
      raise AttributeError(f"{error}; available attributes: {sorted(self)}") from None

  def __deepcopy__(self, memo: Any) -> "NestedMap":
    return self.DeepCopy()

  def copy(self) -> "NestedMap":
    """Returns a shallow copy."""
    return NestedMap(self)

  def DeepCopy(self) -> "NestedMap":
    """Returns a new structure (maps and lists) with the same leaf objects."""
    return self.Transform(lambda leaf: leaf)

  @staticmethod
  def FromNestedDict(x: Any) -> Any:
    """Turns dicts into `NestedMap`s, inside lists and tuples too."""
    if isinstance(x, dict):
      return NestedMap({key: NestedMap.FromNestedDict(value) for key, value in x.items()})
    if isinstance(x, (list, tuple)):
      items = [NestedMap.FromNestedDict(item) for item in x]
      return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x

  @staticmethod
  def CheckKey(key: Any) -> None:
    """Checks that a key is legal.

    Raises:
      AssertionError: it is not a string, or it is the name of a dict method.
      ValueError: it starts with neither a letter nor an underscore.
    """
    assert isinstance(key, str), (
      "Key in a NestedMap has to be a six.string_types. "
      f"Currently type: {type(key)}, value: {key}"
    )
    if not _KEY_PATTERN.match(key):
      raise ValueError(f"Invalid NestedMap key '{key}'")
    assert key not in _RESERVED_KEYS, f"{key} is a reserved key"

  def GetItem(self, key: str) -> Any:
    """Returns the value at a dotted path.

    Raises:
      KeyError: a part is missing.
      TypeError: a list is in the way.
    """
    value = self
    for part in key.split("."):
      value = value[part]
    return value

  def Get(self, key: str, default: Any = None) -> Any:
    """Returns the value at a dotted path, or `default` where there is none."""
    try:
      return self.GetItem(key)
    except (KeyError, TypeError):
      return default

  def Set(self, key: str, value: Any) -> None:
    """Sets the value at a dotted path, creating the maps on the way.

    Raises:
      ValueError: something that is not a dict is in the way.
    """
    *path, last = key.split(".")
    holder = self
    for part in path:
      if part not in holder:
        holder[part] = NestedMap()
      holder = holder[part]
      if not isinstance(holder, dict):
        raise ValueError(
          f'Error while setting key {key}. Sub key "{part}" is of type {type(holder)} '
          "but must be a dict or NestedMap."
        )
    holder[last] = value

  def Flatten(self) -> list[Any]:
    """Returns the leaves."""
    return [leaf for _, leaf in _walk("", self)]

  def FlattenItems(self) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` pairs."""
    return list(_walk("", self))

  def Pack(self, lst: list[Any]) -> "NestedMap":
    """Returns the same structure with the leaves replaced, in flatten order.

    Raises:
      AssertionError: the number of leaves differs.
    """
    count = len(self.Flatten())
    assert count == len(lst), f"Pack got {len(lst)} values for {count} leaves"
    values = iter(lst)
    return self.Transform(lambda _: next(values))

  def Transform(self, fn: Callable[[Any], Any]) -> "NestedMap":
    """Returns the same structure with `fn` applied to each leaf."""
    return _transform(self, fn)

  def IsCompatible(self, other: "NestedMap") -> bool:
    """Tells whether both have the same paths."""
    return [path for path, _ in _walk("", self)] == [path for path, _ in _walk("", other)]

  def Filter(self, fn: Callable[[Any], bool]) -> "NestedMap":
    """Keeps the leaves where `fn(leaf)` is true; containers without leaves vanish."""
    return self.FilterKeyVal(lambda _, leaf: fn(leaf))

  def FilterKeyVal(self, fn: Callable[[str, Any], bool]) -> "NestedMap":
    """Keeps the leaves where `fn(path, leaf)` is true; containers without leaves vanish."""
    kept = _filter("", self, fn)
    return NestedMap() if kept is _DROPPED else kept

  def DebugString(self) -> str:
    """Returns one line per leaf, sorted, the values aligned."""
    items = self.FlattenItems()
    width = max((len(path) for path, _ in items), default=0) + 4
    return "\n".join(sorted(f"{path:<{width}}{leaf}" for path, leaf in items))

  def VLog(self, level: Optional[int] = None, prefix: Optional[str] = None) -> None:
    """Logs the lines of `DebugString`, by default at level 0 with prefix `nmap: `."""
    level = 0 if level is None else level
    prefix = "nmap: " if prefix is None else prefix
    for line in self.DebugString().split("\n"):
      logging.vlog(level, "%s%s", prefix, line)


def _children(path: str, node: Any) -> Iterator[tuple[Any, str, Any]]:
  """Yields `(key, path, value)` of the entries of a container."""
  if isinstance(node, NestedMap):
    for key in sorted(node):
      yield key, f"{path}.{key}" if path else key, node[key]
  else:
    for i, value in enumerate(node):
      yield i, f"{path}[{i}]", value


def _walk(path: str, node: Any) -> Iterator[tuple[str, Any]]:
  if not isinstance(node, (NestedMap, list)):
    yield path, node
    return
  for _, child_path, value in _children(path, node):
    yield from _walk(child_path, value)


def _transform(node: Any, fn: Callable[[Any], Any]) -> Any:
  if isinstance(node, NestedMap):
    return NestedMap({key: _transform(node[key], fn) for key in sorted(node)})
  if isinstance(node, list):
    return [_transform(value, fn) for value in node]
  return fn(node)


def _filter(path: str, node: Any, fn: Callable[[str, Any], bool]) -> Any:
  if not isinstance(node, (NestedMap, list)):
    return node if fn(path, node) else _DROPPED
  kept = []
  for key, child_path, value in _children(path, node):
    child = _filter(child_path, value, fn)
    if child is not _DROPPED:
      kept.append((key, child))
  if not kept:
    return _DROPPED
  return NestedMap(kept) if isinstance(node, NestedMap) else [child for _, child in kept]
