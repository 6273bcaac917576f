"""Reads flags that other modules define, also before the command line is parsed."""

from __future__ import annotations

from typing import Any

from absl import flags


def get_flag(name: str, default: Any = None) -> Any:
  """Returns the value of a flag, `default` if it is not defined or `None`."""
  if name not in flags.FLAGS:
    return default
  value = flags.FLAGS[name].value
  return default if value is None else value
