"""Runs the blocks of `docs/keras.md`, as a notebook does: one after another, no flag parsed."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import pytest

from tests.keras_versions import needs_keras_2

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).absolute().parents[2]


class DocumentsTest(unittest.TestCase):
  @needs_keras_2  # for its blocks of servers and SavedModels
  def test_every_block_of_the_page_runs(self):
    text = (_ROOT / "docs/keras.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    self.assertGreater(len(blocks), 4)

    with tempfile.TemporaryDirectory() as folder:
      script = pathlib.Path(folder, "page.py")
      script.write_text("\n".join(blocks), encoding="utf-8")
      result = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
      )

    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertIn("[7 8 7]\n2\n", result.stdout)
    self.assertIn("(3, 8) 2 [ True False]", result.stdout)


if __name__ == "__main__":
  unittest.main()
