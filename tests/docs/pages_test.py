"""Every block of Python in README and docs runs, in the order of its page.

A block that cannot run is marked by a comment that says why: `<!-- not run: needs a cluster -->`.
Of such Python the imports run. Pages that turn eager execution off come last, as nothing turns it
on again. Shell commands are marked here; `commands_test.py` runs them or takes them apart.
"""

import ast
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
import tensorflow as tf
from absl.testing import absltest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
  r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
  re.MULTILINE | re.DOTALL,
)
# Pages whose own tests run their blocks.
_OTHERS = {"agents.md", "gpu.md", "keras.md", "ratings.md", "serving.md"}
_EAGER_OFF = "disable_eager_execution()"


def _pages():
  pages = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
  return [page for page in pages if page.name not in _OTHERS]


def _blocks(page, language):
  return [m for m in _BLOCK.finditer(page.read_text()) if m["language"] == language]


def _python(page):
  return [m["code"] for m in _blocks(page, "python") if not m["reason"]]


class PagesTest(absltest.TestCase):
  def test_python_runs(self):
    pages = [page for page in _pages() if _python(page)]
    self.assertGreater(len(pages), 5)
    pages.sort(key=lambda page: any(_EAGER_OFF in code for code in _python(page)))
    for page in pages:
      with self.subTest(page.name), tempfile.TemporaryDirectory() as folder:
        self._run(page, folder)

  def _run(self, page, folder):
    """Runs a page's blocks as one program, in an empty folder, and compares what they print."""
    names = {"__name__": "__main__"}
    arguments, before = sys.argv, os.getcwd()
    # All runs begin with the same weights and rows, and learn the same.
    tf.keras.utils.set_random_seed(1)
    self.enter_context(mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="1"))
    os.chdir(folder)
    sys.argv = [page.stem]
    try:
      for code in _python(page):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
          try:
            exec(compile(code, str(page), "exec"), names)
          except SystemExit as end:  # what `app.run` ends with
            self.assertIn(end.code, (None, 0))
        printed = " ".join(output.getvalue().split())
        # What a line prints is said at its end.
        for said in re.findall(r"^\s*print\(.*\)  # (.*)$", code, re.MULTILINE):
          self.assertIn(" ".join(said.split()), printed)
        right = re.search(r"right: ([\d.]+), possible: 0.9", printed)
        if "right:" in code and right is None:
          self.assertNotIn("app.run", code)
        if right:
          self.assertBetween(float(right[1]), 0.86, 0.91)
    finally:
      os.chdir(before)
      sys.argv = arguments

  def test_shell_commands_say_why_they_are_not_run_and_parse(self):
    for page in _pages():
      for block in _blocks(page, "bash"):
        self.assertIsNotNone(block["reason"], f"{page.name}: {block['code']}")
        code = re.sub(r"<[\w ]+>", "x", block["code"])
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)

  def test_python_that_is_not_run_imports_what_there_is(self):
    blocks = [m for page in _pages() for m in _blocks(page, "python") if m["reason"]]
    self.assertNotEmpty(blocks)
    for block in blocks:
      tree = ast.parse(block["code"])
      imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
      # No test environment has PyTorch.
      needs_pytorch = ("import torch", "import monolith.torch")
      imports = [n for n in imports if ast.unparse(n) not in needs_pytorch]
      exec(compile(ast.Module(imports, []), "page", "exec"), {})

  def test_readme_is_short(self):
    self.assertLessEqual(len((_ROOT / "README.md").read_text().splitlines()), 150)

  def test_every_block_has_a_known_language(self):
    for page in _pages():
      for block in _BLOCK.finditer(page.read_text()):
        self.assertIn(block["language"], ("", "bash", "python", "text"), page.name)


if __name__ == "__main__":
  absltest.main()
