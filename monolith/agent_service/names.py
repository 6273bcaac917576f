"""Names of sub models, and patterns that match or list them."""

from __future__ import annotations

import re

_MAX_EXPANDED = 100_000


def normalize_regex(pattern: str) -> str:
  """Returns a regular expression in which `{name}` is a named group of digits.

  The rest is a regular expression already: `ps_{i}` becomes `ps_(?P<i>[0-9]+)`.

  Raises:
    ValueError: it is no regular expression then, such as when a name is used twice.
  """
  regex = re.sub(r"\{([A-Za-z_]\w*)\}", r"(?P<\1>[0-9]+)", pattern)
  try:
    re.compile(regex)
  except re.error as error:
    raise ValueError(f"{pattern!r} is no pattern: {error}") from None
  return regex


def expand_pattern(pattern: str) -> list[str]:
  """Returns the names that a pattern such as `ps_[0-3,7]` stands for, both ends included.

  Several brackets give every combination.

  Raises:
    ValueError: what is in the brackets is not numbers and ranges, or gives too many names.
  """
  match = re.search(r"\[([^\[\]]*)\]", pattern)
  if match is None:
    return [pattern]
  numbers: list[int] = []
  for item in match[1].split(","):
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
    if found is None:
      raise ValueError(f"{item!r} in {pattern!r} is no number or range")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first or last - first + len(numbers) >= _MAX_EXPANDED:
      raise ValueError(f"{item!r} in {pattern!r} has {last - first + 1} numbers")
    numbers.extend(range(first, last + 1))
  tails = expand_pattern(pattern[match.end() :])
  if len(numbers) * len(tails) > _MAX_EXPANDED:
    raise ValueError(f"{pattern!r} stands for more than {_MAX_EXPANDED} names")
  return [f"{pattern[: match.start()]}{n}{tail}" for n in numbers for tail in tails]


def pasre_sub_model_name(sub_model_name: str) -> tuple[str, int]:
  """Returns kind and index of a sub model: `ps_3` is `("ps", 3)`, `entry` is `("entry", 0)`.

  Raises:
    ValueError: the name is empty, or has an index that is no number.
  """
  kind, underscore, index = sub_model_name.lower().rpartition("_")
  if not underscore:
    kind, index = index, "0"
  if not kind or not (index.isascii() and index.isdigit()):
    raise ValueError(f"sub model name is {sub_model_name!r}, want <kind> or <kind>_<index>")
  return kind, int(index)
