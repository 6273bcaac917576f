"""The engine as a C++ library: built and installed by CMake, used by the example program."""

import os
import pathlib
import shutil
import subprocess
import unittest

import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@unittest.skipIf(shutil.which("cmake") is None, "needs cmake")
class EngineLibraryTest(unittest.TestCase):
  def test_example_builds_against_the_installed_library(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    # Without optimization: what is checked are the files, not their speed.
    self._build(_ROOT, folder / "engine", "-DCMAKE_BUILD_TYPE=Debug")
    self._run("cmake", "--install", folder / "engine", "--prefix", folder / "installed")
    self._build(
      _ROOT / "examples/engine",
      folder / "example",
      f"-DCMAKE_PREFIX_PATH={folder / 'installed'}",
    )

    output = self._run(folder / "example/engine_example", folder / "saved/table")

    self.assertCountEqual(output.split("\n"), ["7: 1 2", "-8: 3 4", ""])
    saved = sorted(path.name for path in (folder / "saved").iterdir())
    self.assertEqual(saved, [".table.manifest", "table-00000-of-00001"])

  def _build(self, source, build, *options):
    self._run("cmake", "-S", source, "-B", build, *options)
    self._run("cmake", "--build", build, "--parallel", str(os.cpu_count()))

  def _run(self, *command):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
    return result.stdout


if __name__ == "__main__":
  unittest.main()
