"""Pages, examples and notebooks import monolith before TensorFlow, which then says nothing."""

import ast
import json
import pathlib
import re
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IMPORT_TENSORFLOW = {"keras", "keras_rs", "tensorflow", "tf_keras"}


def _early(code: str) -> list[str]:
  """Returns the packages with TensorFlow that a program imports before monolith, if it does."""
  imports = []
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.Import):
      imports += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      imports.append((node.lineno, node.module))
  packages = [name.partition(".")[0] for _, name in sorted(imports)]
  if "monolith" not in packages:
    return []
  return [name for name in packages[: packages.index("monolith")] if name in _IMPORT_TENSORFLOW]


def _cells(path: pathlib.Path) -> str:
  """Returns the code of a notebook."""
  cells = json.loads(path.read_text())["cells"]
  return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


class ImportOrderTest(unittest.TestCase):
  def _check(self, path: pathlib.Path, code: str) -> None:
    with self.subTest(str(path.relative_to(_ROOT))):
      self.assertEqual(_early(code), [], code[:300])

  def test_wrong_order_is_found(self):
    self.assertEqual(_early("import os, keras\nimport monolith.keras"), ["keras"])
    self.assertEqual(_early("from monolith import data\nimport keras"), [])
    self.assertEqual(_early("import tensorflow as tf"), [])

  def test_pages(self):
    pages = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
    blocks = [(page, code) for page in pages for code in _BLOCK.findall(page.read_text())]
    self.assertGreater(len(blocks), 30)
    for page, code in blocks:
      self._check(page, code)

  def test_examples(self):
    programs = list((_ROOT / "examples").rglob("*.py"))
    self.assertGreater(len(programs), 10)
    for program in programs:
      self._check(program, program.read_text())

  def test_notebooks(self):
    notebooks = list((_ROOT / "examples/notebooks").glob("*.ipynb"))
    self.assertGreater(len(notebooks), 2)
    for notebook in notebooks:
      self._check(notebook, _cells(notebook))


if __name__ == "__main__":
  unittest.main()
