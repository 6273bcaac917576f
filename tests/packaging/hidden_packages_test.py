"""No folder beside a program has the name of a package that somebody imports.

`python examples/deepfm.py` puts `examples/` first on the path. A folder called `jax` there looks
like an installed JAX without files: Keras 3 asks for JAX, imports that folder and fails.
"""

from __future__ import annotations

import pathlib
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_OPTIONAL = {"confluent_kafka", "horovod", "jax", "keras", "keras_rs", "tensorflow", "torch"}


class HiddenPackagesTest(unittest.TestCase):
  def test_no_folder_beside_a_program_hides_a_package(self):
    programs = [
      path
      for folder in ("benchmarks", "deploy", "examples", "tests", "tools")
      for path in (_ROOT / folder).rglob("*.py")
      if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
      # Started by pytest or with `-m`, which puts the checkout on the path instead of the folder.
      and not path.name.endswith("_test.py")
      and path.parent != _ROOT / "tests"
    ]
    self.assertGreater(len(programs), 20)
    for program in programs:
      names = {path.name for path in program.parent.iterdir() if path.is_dir()}
      with self.subTest(program.relative_to(_ROOT)):
        self.assertFalse(names & _OPTIONAL, "rename this folder, or move the program")


if __name__ == "__main__":
  unittest.main()
