"""Every test of faults says in its first lines what is promised."""

import ast
import pathlib
import unittest

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "reliability"


class PromisesTest(unittest.TestCase):
  def test_every_test_of_faults_names_its_promise(self):
    paths = sorted(_FOLDER.glob("*_test.py"))

    self.assertGreater(len(paths), 10)
    silent = [
      path.name
      for path in paths
      if "Promise: " not in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    self.assertEqual(silent, [])


if __name__ == "__main__":
  unittest.main()
