"""Dataclasses that are the value of a ZooKeeper node."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="JsonNode")


class JsonNode:
  """Gives a dataclass the form of a flat JSON object."""

  def to_json(self) -> str:
    """Returns a flat JSON object of all attributes."""
    return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

  @classmethod
  def from_json(cls: type[_Self], text: str) -> _Self:
    """Undoes `to_json`; missing attributes get their defaults, unknown ones are dropped.

    Raises:
      ValueError: it is no JSON object, or a text or a number is something else.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
      raise ValueError(f"{text[:200]!r} is no JSON object")
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
      if field.name in values:
        arguments[field.name] = _check(field, values[field.name])
    return cls(**arguments)

  def serialize(self) -> bytes:
    return self.to_json().encode("utf-8")

  @classmethod
  def deserialize(cls: type[_Self], data: bytes) -> _Self:
    return cls.from_json(data.decode("utf-8"))


def _check(field: dataclasses.Field, value: Any) -> Any:
  """Anybody can write a node: an address that is a number would fail far from here."""
  kinds = str(field.type).split(" | ")
  wanted = str if "str" in kinds else int if "int" in kinds else None
  if wanted is None or (value is None and "None" in kinds):
    return value
  if not isinstance(value, wanted):
    raise ValueError(f"{field.name} is {value!r}, want {field.type}")
  return value
