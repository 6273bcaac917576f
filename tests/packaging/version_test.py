"""The version has one place, and everything that names it agrees."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest
from importlib.metadata import version as tf_version

import monolith

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class VersionTest(unittest.TestCase):
  def test_changelog_begins_with_the_version(self):
    text = (_ROOT / "CHANGELOG.md").read_text()

    versions = re.findall(r"^## \[([\d.]+)\]", text, re.MULTILINE)

    self.assertEqual(versions[0], monolith.__version__)
    self.assertEqual(versions, sorted(versions, key=_as_numbers, reverse=True))

  def test_changelog_has_one_line_per_change(self):
    lines = (_ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()[1:]

    for line in filter(None, lines):
      self.assertRegex(line, r"^(- [A-Z][a-z]+,? .*|#{2,4} .*)$")
      self.assertLessEqual(len(line), 250, line)
    kinds = {line[4:] for line in lines if line.startswith("### ")}
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    self.assertLessEqual(kinds, known)

  def test_wheels_have_the_version(self):
    # A copy: setuptools writes beside the sources.
    folder = pathlib.Path(os.environ["TEST_TMPDIR"], "source")
    for name in ("setup.py", "pyproject.toml", "README.md", "monolith/__init__.py"):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(_ROOT / name, folder / name)
    shutil.copytree(_ROOT / "tools", folder / "tools")

    def version() -> str:
      command = [sys.executable, "setup.py", "--quiet", "--version"]
      result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
      self.assertEqual(result.returncode, 0, result.stderr)
      return result.stdout.strip().splitlines()[-1]

    minor = ".".join(tf_version("tensorflow").split(".")[:2])
    self.assertEqual(version(), f"{monolith.__version__}+tf{minor}")
    # The wheel of an archive, whose name has no TensorFlow in it.
    (folder / "PKG-INFO").touch()
    self.assertEqual(version(), monolith.__version__)

  @unittest.skipIf(shutil.which("cmake") is None, "needs cmake")
  def test_the_engine_library_has_the_version(self):
    folder = os.environ["TEST_TMPDIR"]
    result = subprocess.run(
      ["cmake", "-S", str(_ROOT), "-B", folder], capture_output=True, text=True
    )
    self.assertEqual(result.returncode, 0, result.stderr)

    cache = pathlib.Path(folder, "CMakeCache.txt").read_text()

    self.assertIn(f"CMAKE_PROJECT_VERSION:STATIC={monolith.__version__}\n", cache)


def _as_numbers(version: str) -> tuple[int, ...]:
  return tuple(int(number) for number in version.split("."))


if __name__ == "__main__":
  unittest.main()
