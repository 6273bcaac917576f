"""Reads an agent's configuration file into typed values.

    # A comment, which may begin anywhere.
    bzid          demo
    num_ps      = 16
    load_retry_interval_micros 60 * 1000 * 1000
    layout_filters ps_{i};${shard_id} == i % ${shard_num}
    layout_filters entry;${shard_id} == 0
    include       common.conf

A key that is given again makes a list of all its values.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from monolith.agent_service import expressions

_TRUE = ("true", "y", "t", "yes", "1")
_FALSE = ("false", "n", "f", "no", "0")
_LINE = re.compile(r"(?P<key>\w+)(?:[ \t]*=[ \t]*|[ \t]+|$)(?P<value>.*)")


def read_config_file(path: str) -> dict[str, str | list[str]]:
  """Returns the texts of a file by key, with those of the files it includes.

  Args:
    path: the file. An included file that is not absolute is looked for beside it.

  Raises:
    OSError: a file cannot be read.
    ValueError: a line is not `key value`, or files include one another in a circle.
  """
  values: dict[str, str | list[str]] = {}
  _read(os.path.abspath(path), (), values)
  return values


def _read(path: str, including: tuple[str, ...], values: dict[str, str | list[str]]) -> None:
  if path in including:
    raise ValueError(f"{path} includes itself: {' -> '.join((*including, path))}")
  with open(path, encoding="utf-8") as file:
    lines = file.read().splitlines()
  for number, line in enumerate(lines, 1):
    text = line.partition("#")[0].strip()
    if not text:
      continue
    match = _LINE.fullmatch(text)
    if match is None or not match["value"].strip():
      raise ValueError(f"{path}:{number}: {line.strip()!r} is not 'key value'")
    key, value = match["key"], match["value"].strip()
    if key == "include":
      _read(os.path.join(os.path.dirname(path), value), (*including, path), values)
    elif key not in values:
      values[key] = value
    else:
      known = values[key]
      values[key] = [*(known if isinstance(known, list) else [known]), value]


def convert(name: str, text: str | list[str], kind: str) -> Any:
  """Returns what a text means for a field.

  Args:
    name: the field's name, for messages.
    text: the text, or the list of texts of a key that was given several times.
    kind: the field's type as written: `bool`, `int`, `float`, `str`, `list[int]`, `list[str]`, or
      several of these with ` | ` between.

  Raises:
    ValueError: the text is no such value.
  """
  kinds = [one for one in kind.split(" | ") if one != "None"]
  lists = [one for one in kinds if one.startswith("list[")]
  single = [one for one in kinds if one not in lists]
  if isinstance(text, list) or not single:
    if not lists:
      raise ValueError(f"{name} is given {len(text)} times: {text}, want it once")
    element = lists[0][len("list[") : -1]
    return [convert(name, one, element) for one in ([text] if isinstance(text, str) else text)]
  if text.lower() == "none":
    return None
  if single[0] == "bool":
    if text.lower() not in _TRUE + _FALSE:
      raise ValueError(f"{name} is {text!r}, want one of {_TRUE} or {_FALSE}")
    return text.lower() in _TRUE
  if single[0] == "str":
    return text
  try:
    number = expressions.evaluate(text)
  except ValueError as error:
    raise ValueError(f"{name} is {text!r}, want a number: {error}") from None
  if single[0] == "float":
    return float(number)
  if number != int(number):
    raise ValueError(f"{name} is {text!r}, want a whole number")
  return int(number)


def make_config(cls: type, values: dict[str, str | list[str]], aliases: dict[str, str]) -> Any:
  """Returns a dataclass with the values of a configuration file.

  Args:
    cls: the dataclass.
    values: the texts by key.
    aliases: old name of a field -> its name.

  Raises:
    ValueError: a key is no field, or its text no value of it.
  """
  kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
  arguments = {}
  for key, text in values.items():
    name = aliases.get(key, key)
    if name not in kinds:
      raise ValueError(f"{key} is no setting of {cls.__name__}")
    if name in arguments:
      raise ValueError(f"{key} and {name} are two names of one setting: give one of them")
    arguments[name] = convert(name, text, kinds[name])
  return cls(**arguments)
