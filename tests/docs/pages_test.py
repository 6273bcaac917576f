"""Every block of Python in README and docs runs, in the order of its page.

A block that cannot run is marked by a comment that says why: `<!-- not run: needs a cluster -->`.
Of such Python the imports run. Pages that turn eager execution off come last, as nothing turns it
on again. Shell commands are marked here; `commands_test.py` runs them or takes them apart.
"""

import ast
import contextlib
import importlib.util
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


# Why a whole program is not run beside the others -> the module that it needs.
_PROGRAMS = {"needs PyTorch": "torch", "needs JAX": "jax"}


def _can_run(imports):
  """Yields imports without those of frameworks that this environment lacks."""
  for node in imports:
    if isinstance(node, ast.ImportFrom):
      if _is_there(node.module):
        yield node
    elif names := [alias for alias in node.names if _is_there(alias.name)]:
      yield ast.Import(names, lineno=node.lineno, col_offset=node.col_offset)


def _is_there(module):
  root, _, rest = module.partition(".")
  framework = rest.partition(".")[0] if root == "monolith" else root
  if framework not in _PROGRAMS.values():
    return True
  return importlib.util.find_spec(framework) is not None


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
        # A comment at the end of a line has its output.
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
      exec(compile(ast.Module(list(_can_run(imports)), []), "page", "exec"), {})

  def test_imports_of_frameworks_that_are_missing_are_left_out(self):
    lines = ("import torch, monolith.torch, os", "import jax.numpy as jnp", "from torch import nn")
    imports = [ast.parse(line).body[0] for line in lines]
    with mock.patch("importlib.util.find_spec", return_value=None):
      self.assertEqual([ast.unparse(n) for n in _can_run(imports)], ["import os"])
    with mock.patch("importlib.util.find_spec", return_value=object()):
      self.assertEqual([ast.unparse(n) for n in _can_run(imports)], list(lines))

  def test_programs_of_other_frameworks_run_where_those_are(self):
    """Whole programs, which say that they need PyTorch or JAX and nothing else."""
    found = set()
    for page in _pages():
      for block in _blocks(page, "python"):
        name = _PROGRAMS.get(block["reason"])
        if name is None:
          continue
        found.add(page.name)
        if importlib.util.find_spec(name) is None:
          continue
        with self.subTest(page.name), tempfile.TemporaryDirectory() as folder:
          done = subprocess.run(
            [sys.executable, "-c", block["code"]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            capture_output=True,
            text=True,
          )
          self.assertEqual(done.returncode, 0, done.stderr)
    self.assertContainsSubset({"README.md", "jax.md"}, found)

  def test_readme_is_short(self):
    self.assertLessEqual(len((_ROOT / "README.md").read_text().splitlines()), 150)

  def test_every_block_has_a_known_language(self):
    for page in _pages():
      for block in _BLOCK.finditer(page.read_text()):
        self.assertIn(block["language"], ("", "bash", "python", "text"), page.name)


if __name__ == "__main__":
  absltest.main()
