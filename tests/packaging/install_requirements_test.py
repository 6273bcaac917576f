"""Tests that uv is told of pip's configuration, and that pip does it where uv cannot."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import install_requirements  # noqa: E402


class SettingsTest(unittest.TestCase):
  def test_the_environment_wins_over_files_and_lists_are_split(self):
    settings = install_requirements.pip_settings(
      ":env:.find-links='/wheels'\n"
      ":env:.no-index='1'\n"
      "global.extra-index-url='file:///a file:///b'\n"
      "global.find-links='/old'\n"
      "install.trusted-host='mirror'\n"
      "freeze.timeout='10'\n"
    )
    self.assertEqual(
      install_requirements.uv_arguments(settings)[2:],
      ["--extra-index-url", "file:///a", "--extra-index-url", "file:///b"]
      + ["--find-links", "/wheels", "--allow-insecure-host", "mirror", "--no-index"],
    )
    self.assertNotIn("timeout", settings)

  def test_no_configuration(self):
    settings = install_requirements.pip_settings("")
    self.assertEqual(
      install_requirements.uv_arguments(settings), ["--index-strategy", "unsafe-best-match"]
    )


class IncompletePackagesTest(unittest.TestCase):
  """Packages as an interrupted installation leaves them."""

  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._folder = pathlib.Path(folder.name)

  def _install(self, name):
    (self._folder / f"{name}.py").write_text("A = 1\n")
    metadata = self._folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    record = f"{name}.py,sha256=x,6\n__pycache__/{name}.pyc,,\n{name}-1.0.dist-info/RECORD,,\n"
    (metadata / "RECORD").write_text(record)
    return metadata

  def test_they_are_forgotten_and_the_others_are_not(self):
    whole = self._install("whole")
    (self._folder / "whole.py").write_text("A = 1  # changed by hand\n")
    names = ["bare", "cut", "empty", "lost", "torn", "zeros"]
    bare, cut, empty, lost, torn, zeros = map(self._install, names)
    (self._folder / "cut.py").write_text("A =")
    (self._folder / "lost.py").unlink()
    (bare / "RECORD").unlink()
    (torn / "RECORD").write_text("torn.py,sha2")
    (empty / "RECORD").write_text("")
    (zeros / "RECORD").write_bytes(bytes(1 << 18))

    found = install_requirements.forget_incomplete_packages(self._folder)

    self.assertEqual(found, names)
    self.assertEqual(list(self._folder.glob("*.dist-info")), [whole])
    for metadata in (bare, cut, empty, lost, torn, zeros):
      self.assertFalse(metadata.exists())


class InstallTest(unittest.TestCase):
  def test_a_configuration_for_the_home_folder_does_not_count(self):
    with tempfile.TemporaryDirectory() as folder:
      done = subprocess.run(
        [sys.executable, "tools/install_requirements.py", "no-such-package-of-monolith==1.0"],
        env={"PIP_USER": "1", "PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin", "HOME": folder},
        capture_output=True,
        text=True,
        cwd=ROOT,
      )
    self.assertIn("No matching distribution found for no-such-package-of-monolith", done.stderr)
    self.assertNotIn("--user", done.stderr)

  def test_what_cannot_be_installed_fails_with_the_message_of_pip(self):
    with tempfile.TemporaryDirectory() as folder:
      requirements = pathlib.Path(folder) / "requirements.txt"
      requirements.write_text("no-such-package-of-monolith==1.0\n")
      done = subprocess.run(
        [sys.executable, "tools/install_requirements.py", "-r", str(requirements)],
        # No index is asked: this needs no network.
        env={"PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin", "HOME": folder},
        capture_output=True,
        text=True,
        cwd=ROOT,
      )
    self.assertNotEqual(done.returncode, 0)
    self.assertIn("pip does it", done.stderr)
    self.assertIn("No matching distribution found for no-such-package-of-monolith", done.stderr)


if __name__ == "__main__":
  unittest.main()
