"""Runs the blocks of `docs/keras.md`, as a notebook does: one after another, no flag parsed.

With the Keras that TensorFlow has; the page and a notebook also with the package `tf_keras`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import pytest

from tests.keras_versions import for_keras_2, for_this_keras, needs_keras_3

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).absolute().parents[2]


class DocumentsTest(unittest.TestCase):
  def test_every_block_of_the_page_runs(self):
    self._check_page(for_this_keras)

  @needs_keras_3  # or the test above is it
  @unittest.skipIf(importlib.util.find_spec("tf_keras") is None, "tf_keras is not installed")
  def test_every_block_of_the_page_runs_with_keras_2(self):
    self._check_page(for_keras_2, TF_USE_LEGACY_KERAS="1")

  @needs_keras_3
  @unittest.skipIf(importlib.util.find_spec("tf_keras") is None, "tf_keras is not installed")
  def test_a_notebook_runs_with_keras_2(self):
    path = _ROOT / "examples/notebooks/keras_to_servers.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = self._run(for_keras_2("\n".join(blocks)), TF_USE_LEGACY_KERAS="1")
    self.assertRegex(shown, r"Keras: right 0\.[89]\d, possible 0\.90")
    self.assertRegex(shown, r"two servers: right 0\.[89]\d")
    self.assertIn("the same: True", shown)

  @needs_keras_3
  @unittest.skipIf(importlib.util.find_spec("tf_keras") is None, "tf_keras is not installed")
  def test_the_errors_of_the_faq_are_those_of_keras_2(self):
    code = (_ROOT / "tests/docs/faq_test.py").read_text(encoding="utf-8")
    code = code.replace("__file__", repr(str(_ROOT / "tests/docs/faq_test.py")))
    self._run(code, TF_USE_LEGACY_KERAS="1")

  def _check_page(self, translate, **environment):
    text = (_ROOT / "docs/keras.md").read_text(encoding="utf-8")
    # Not those below a comment that says why they are not run.
    blocks = re.findall(r"(?<!-->\n)^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    self.assertGreater(len(blocks), 4)

    shown = self._run(translate("\n".join(blocks)), **environment)

    self.assertIn("[7 8 7]\n2\n", shown)
    self.assertIn("(3, 8) 2 [ True False]", shown)
    for said in re.findall(r"^print\(.*\) +# (.*)$", "\n".join(blocks), re.MULTILINE):
      self.assertIn(said, shown)

  def _run(self, code: str, **environment: str) -> str:
    """Returns what a program prints."""
    with tempfile.TemporaryDirectory() as folder:
      script = pathlib.Path(folder, "page.py")
      script.write_text(code, encoding="utf-8")
      result = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
      )
    self.assertEqual(result.returncode, 0, result.stderr)
    return result.stdout


if __name__ == "__main__":
  unittest.main()
