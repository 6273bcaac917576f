"""`Params`: an ordered, name-checked, freezable bag of configuration values.

Every configurable thing has a class method `params()` that returns an `InstantiableParams`; the
caller edits the values and calls `instantiate()`. The text form `str(params)` is sorted and stable,
so that two configurations can be diffed, and a misspelt name suggests the nearest known one.

TensorFlow is never imported here: configurations stay importable in milliseconds.

Differences from ByteDance's Monolith: a constructor `(self, params, **kwargs)` counts as one that
takes a `Params`; the outermost `name` and `cls` win when nested bags are flattened; values are
compared by identity first, so that bags that hold symbolic tensors can be compared.
"""

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Optional

# Keyword arguments every Keras layer accepts; `instantiate` forwards them when they are set.
allowed_kwargs = {
  "input_dim",
  "input_shape",
  "batch_input_shape",
  "weights",
  "activity_regularizer",
  "autocast",
  "implementation",
  "name",
}

_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
_INDEXED_PART = re.compile(r"(.+)\[(.+)\]")
_OWN_ATTRIBUTES = ("_params", "_immutable")
_IMMUTABLE = "This Params instance is immutable."
# When bags are flattened, a nested value of these names never replaces the outer one.
_OUTERMOST_WINS = ("name", "cls")


class _SortedDict(dict):
  """A dict whose text form lists its keys in sorted order."""

  def __repr__(self) -> str:
    try:
      keys = sorted(self)
    except TypeError:  # keys of different types
      keys = sorted(self, key=lambda key: (type(key).__name__, repr(key)))
    return "{" + ", ".join(f"{key!r}: {self[key]!r}" for key in keys) + "}"


class _Param:
  """One named value with its description."""

  def __init__(self, name: str, default_value: Any, description: str):
    self._name = name
    self._value = default_value
    self._description = description

  def __eq__(self, other: Any) -> bool:
    return (
      isinstance(other, _Param)
      and self._name == other._name
      and _same_value(self._value, other._value)
    )

  __hash__ = None

  def __deepcopy__(self, memo: dict[int, Any]) -> "_Param":
    _share_tensors(self._value, memo)
    return _Param(self._name, copy.deepcopy(self._value, memo), self._description)

  def to_string(self, nested_depth: int) -> str:
    """Returns the line (or block) `name: value`, indented two spaces per depth."""
    if isinstance(self._value, Params):
      text = self._value._to_string(nested_depth)
    elif isinstance(self._value, str):
      text = f'"{self._value}"'
    else:
      text = str(_printable(self._value))
    return f"{'  ' * nested_depth}{self._name}: {text}"

  def set(self, value: Any) -> None:
    # The value is kept as it is: a nested Params is shared with its other holders.
    self._value = value

  def get(self) -> Any:
    return self._value


class Params:
  """A bag of named values.

  Names are defined once with `define`, then read and written as attributes, as items, or by dotted
  path with `get`, `set` and `delete`. Any access to an unknown name is an `AttributeError`, never a
  `KeyError`, so `hasattr`, `copy` and `pickle` behave.
  """

  def __init__(self):
    self.__dict__["_immutable"] = False
    self.__dict__["_params"] = {}

  def __setattr__(self, name: str, value: Any) -> None:
    if self._immutable:
      raise TypeError(_IMMUTABLE)
    if name in _OWN_ATTRIBUTES:
      self.__dict__[name] = value
      return
    self._record(name).set(value)

  def __getattr__(self, name: str) -> Any:
    # Called only when ordinary lookup failed, so `_params` itself missing means that the object is
    # being unpickled or copied.
    if name in _OWN_ATTRIBUTES:
      raise AttributeError(name)
    return self._record(name).get()

  def __getitem__(self, name: str) -> Any:
    return self._record(name).get()

  def __setitem__(self, name: str, value: Any) -> None:
    self.__setattr__(name, value)

  def __dir__(self) -> list[str]:
    return sorted(self._params)

  def __contains__(self, name: str) -> bool:
    return name in self._params

  def __len__(self) -> int:
    return len(self._params)

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, Params) and self._params == other._params

  __hash__ = None

  def __str__(self) -> str:
    return self._to_string(0)

  def __deepcopy__(self, memo: dict[int, Any]) -> "Params":
    result = type(self).__new__(type(self))
    memo[id(self)] = result
    result.__dict__["_immutable"] = self._immutable
    result.__dict__["_params"] = copy.deepcopy(self._params, memo)
    return result

  def contain(self, name: str) -> bool:
    """Tells whether `name` is defined at the top level."""
    return name in self._params

  def copy(self) -> "Params":
    """Returns a deep copy of the same type and frozen state; tensors are shared."""
    return copy.deepcopy(self)

  def define(self, name: str, default_value: Any, description: str) -> None:
    """Defines a parameter.

    Args:
      name: matches `[a-z][a-z0-9_]*`.
      default_value: its first value.
      description: what it means.

    Raises:
      TypeError: the bag is frozen.
      AssertionError: the name is not legal.
      AttributeError: the name is already defined.
    """
    if self._immutable:
      raise TypeError(_IMMUTABLE)
    assert isinstance(name, str) and _NAME_PATTERN.fullmatch(
      name
    ), f"Parameter name {name!r} must be a string that matches {_NAME_PATTERN.pattern}"
    if name in self._params:
      raise AttributeError(f"Parameter {name} is already defined")
    self._params[name] = _Param(name, default_value, description)

  def freeze(self) -> None:
    """Makes this bag immutable for good; nested bags stay as they are."""
    self.__dict__["_immutable"] = True

  def is_immutable(self) -> bool:
    return self._immutable

  def set(self, **kwargs: Any) -> "Params":
    """Sets values by dotted path, e.g. `set(**{'train.steps': 10, 'towers[0].units': 3})`.

    Raises:
      TypeError: this bag, or the bag a path leads to, is frozen.
      AttributeError: unknown name.
      AssertionError: a path leads through something that is not a `Params`.
    """
    if self._immutable:
      raise TypeError(f"This Params instance is immutable: {self}")
    for name, value in kwargs.items():
      holder, key = self._navigate(name)
      if holder._immutable:
        raise TypeError(f"This Params instance is immutable: {holder}")
      holder._record(key, full_name=name).set(value)
    return self

  def get(self, name: str) -> Any:
    """Returns the value at a dotted path; raises as `set` does."""
    holder, key = self._navigate(name)
    return holder._record(key, full_name=name).get()

  def delete(self, *args: str) -> "Params":
    """Removes the parameters at the dotted paths; raises as `set` does."""
    if self._immutable:
      raise TypeError(_IMMUTABLE)
    for name in args:
      holder, key = self._navigate(name)
      if holder._immutable:
        raise TypeError(_IMMUTABLE)
      holder._record(key, full_name=name)
      del holder._params[key]
    return self

  def iter_params(self) -> Iterator[tuple[str, Any]]:
    """Yields `(name, value)` in definition order."""
    for name, param in self._params.items():
      yield name, param.get()

  def _record(self, name: str, full_name: Optional[str] = None) -> _Param:
    """Returns the record of a top-level name, or raises naming `full_name`."""
    try:
      return self._params[name]
    except (KeyError, TypeError):
      raise AttributeError(self._key_error_string(name, full_name)) from None

  def _navigate(self, name: str) -> tuple["Params", str]:
    """Returns the bag that holds the last part of a dotted path, and that part."""
    parts = name.split(".")
    holder = self
    for i, part in enumerate(parts[:-1]):
      prefix = ".".join(parts[: i + 1])
      indexed = _INDEXED_PART.fullmatch(part)
      key = indexed.group(1) if indexed else part
      holder = holder._record(key, full_name=prefix).get()
      if indexed:
        holder = holder[int(indexed.group(2))]
      assert isinstance(holder, Params), f"Cannot introspect {type(holder)} for {prefix}"
    return holder, parts[-1]

  def _similar_keys(self, name: str) -> list[str]:
    """Returns, sorted, the keys in which more than half of the name's trigrams occur."""
    # The last trigram is left out, as it always was: suggestions are part of the messages.
    trigrams = [name[i : i + 3] for i in range(len(name) - 3)]
    if not trigrams:
      return []
    return sorted(
      key for key in self._params if sum(t in key for t in trigrams) / len(trigrams) > 0.5
    )

  def _key_error_string(self, name: Any, full_name: Optional[str] = None) -> str:
    shown = str(name) if full_name is None else full_name
    similar = self._similar_keys(name) if isinstance(name, str) else []
    return f"{shown} (did you mean: [{','.join(similar)}])" if similar else shown

  def _to_string(self, nested_depth: int) -> str:
    lines = [param.to_string(nested_depth + 1) for _, param in sorted(self._params.items())]
    return "{\n" + "\n".join(lines) + "\n" + "  " * nested_depth + "}"


class InstantiableParams(Params):
  """`Params` that know which class they configure."""

  def __init__(self, cls: Optional[type] = None):
    super().__init__()
    self.define("cls", cls, "Python class object associated with this Params.")

  def instantiate(self) -> Any:
    """Builds an instance of `cls`.

    A constructor `(self, params)`, variadics aside, of a class with an attribute `params` gets this
    very object. Any other gets, as keyword arguments, the leaf values whose names it declares and
    every set value named in `allowed_kwargs`. Nested bags are flattened depth first in definition
    order and the last value of a name wins, except that the outermost `name` and `cls` win.

    Raises:
      AssertionError: `cls` is None.
      TypeError: whatever the constructor makes of its arguments.
    """
    assert self.cls is not None, "cls is None: there is nothing to instantiate"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
      name
      for name, parameter in inspect.signature(self.cls.__init__).parameters.items()
      if parameter.kind not in variadic
    ]
    if len(names) == 2 and "params" in names and hasattr(self.cls, "params"):
      return self.cls(self)

    values = _flatten(self)
    wanted = [name for name in names if name not in ("self", "cls")]
    kwargs = {name: values[name] for name in wanted if name in values}
    for name in allowed_kwargs:
      if values.get(name) is not None:
        kwargs[name] = values[name]
    return self.cls(**kwargs)

  def copy(self) -> "InstantiableParams":
    return super().copy()


def copy_params_to(from_p: Params, to_p: Params, skip: Optional[list[str]] = None) -> Params:
  """Sets every value of `from_p` on `to_p`; nested bags are copied.

  Args:
    from_p: where the values come from.
    to_p: must have all names that are not skipped.
    skip: names to leave out.

  Returns:
    `to_p`.

  Raises:
    AttributeError: `to_p` lacks a name.
  """
  for name, value in from_p.iter_params():
    if skip and name in skip:
      continue
    to_p.set(**{name: value.copy() if isinstance(value, Params) else value})
  return to_p


def update_params(ips: Params, args: dict[str, Any]) -> None:
  """Moves values from `args` to the leaves of the same name, depth first in definition order.

  A name that occurs both outside and inside is consumed by the first one met; what matches nothing
  stays in `args`.
  """
  for name, value in ips.iter_params():
    if isinstance(value, Params):
      update_params(value, args)
    elif name in args:
      ips[name] = args.pop(name)


def _flatten(params: Params) -> dict[str, Any]:
  """Returns all leaf values of nested bags in one dict."""
  result = {}
  for name, value in params.iter_params():
    if isinstance(value, Params):
      result.update(_flatten(value))
    else:
      result[name] = value
  for name in _OUTERMOST_WINS:
    if name in params and not isinstance(params[name], Params):
      result[name] = params[name]
  return result


def _is_named_tuple(value: Any) -> bool:
  return isinstance(value, tuple) and hasattr(value, "_fields")


def _printable(value: Any) -> Any:
  """Returns what stands for `value` in the text form."""
  if isinstance(value, Params):
    return _SortedDict({name: _printable(v) for name, v in value.iter_params()})
  if isinstance(value, dict):
    return _SortedDict({key: _printable(v) for key, v in value.items()})
  if isinstance(value, (list, tuple)) and not _is_named_tuple(value):
    items = [_printable(v) for v in value]
    return items if isinstance(value, list) else tuple(items)
  if hasattr(value, "Repr"):
    return value.Repr()
  return value


def _is_tensor(value: Any) -> bool:
  # A value can be a tensor only if TensorFlow has been imported already.
  tensor_type = getattr(sys.modules.get("tensorflow"), "Tensor", None)
  return tensor_type is not None and isinstance(value, tensor_type)


def _share_tensors(value: Any, memo: dict[int, Any]) -> None:
  """Makes `copy.deepcopy(value, memo)` share the tensors in lists, tuples and dicts."""
  if _is_tensor(value):
    memo[id(value)] = value
  elif isinstance(value, dict):
    for item in value.values():
      _share_tensors(item, memo)
  elif isinstance(value, (list, tuple)):
    for item in value:
      _share_tensors(item, memo)


def _same_value(a: Any, b: Any) -> bool:
  if a is b:
    return True
  if _is_tensor(a) or _is_tensor(b):
    return False  # `==` would build an op in graph mode
  same = a == b
  return bool(same.all()) if hasattr(same, "all") else bool(same)
