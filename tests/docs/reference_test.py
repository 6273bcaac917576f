"""The reference has a page for each door, with every name that the door offers."""

from __future__ import annotations

import ast
import pathlib
import re
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DOORS = ("jax", "launch", "table", "torch")
# A constant, which the door's own docstring explains.
_LEFT_OUT = {"monolith.torch.LOCAL"}


def _offered(door: str) -> set[str]:
  """Returns the names in a door's `__all__`, or the door itself if it has none."""
  tree = ast.parse((_ROOT / "monolith" / door / "__init__.py").read_text("utf-8"))
  for node in tree.body:
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
      return {f"monolith.{door}.{name}" for name in ast.literal_eval(node.value)}
  return {f"monolith.{door}"}


class ReferenceTest(unittest.TestCase):
  def test_every_name_of_a_door_is_there(self):
    pages = "\n".join(path.read_text("utf-8") for path in (_ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))

    for door in _DOORS:
      with self.subTest(door):
        self.assertEqual(_offered(door) - shown - _LEFT_OUT, set())

  def test_every_page_is_in_the_menu(self):
    menu = (_ROOT / "mkdocs.yml").read_text("utf-8")

    for path in (_ROOT / "docs/reference").glob("*.md"):
      self.assertIn(f"reference/{path.name}\n", menu)


if __name__ == "__main__":
  unittest.main()
