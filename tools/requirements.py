"""Prints requirement lists of pyproject.toml: `requirements.py build runtime test lint ...`.

`build` is what compiling needs, `runtime` what the package needs, any other name is an extra.
"""

from __future__ import annotations

import pathlib
import re
import sys

try:
  import tomllib
except ImportError:  # Python before 3.11: pip ships the same parser
  from pip._vendor import tomli as tomllib


def requirements(groups: list[str]) -> list[str]:
  """Returns the requirement strings of the named groups, in order, without repeats.

  Raises:
    KeyError: a group is not an extra of the project.
  """
  text = (pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8")
  document = tomllib.loads(text)
  result: list[str] = []
  for group in groups:
    if group == "build":
      names = document["build-system"]["requires"]
    elif group == "runtime":
      names = document["project"]["dependencies"]
    else:
      names = document["project"]["optional-dependencies"][group]
    result += [name for name in names if name not in result]
  return result


if __name__ == "__main__":
  if not all(re.fullmatch(r"[a-z]+", group) for group in sys.argv[1:]):
    sys.exit(f"usage: {sys.argv[0]} build runtime EXTRA...")
  print("\n".join(requirements(sys.argv[1:])))
