"""Marks the public classes and functions of the library."""

from typing import TypeVar

T = TypeVar("T")


def monolith_export(obj: T) -> T:
  """Marks `obj` as part of the documented API and returns it unchanged otherwise."""
  setattr(obj, "__monolith_doc", None)
  return obj
