"""Tests the script behind every target of the Makefile on systems that lack things.

It runs in a small checkout, in a folder whose name has a space; nothing is downloaded. Programs of
a system with apt-get are stubs that note what they are asked for.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PYTHON = getattr(sys, "_base_executable", sys.executable)
_SETTINGS = ("CXX", "PYTHON", "VENV", "TENSORFLOW", "MONOLITH_TENSORFLOW", "PYTHONPATH")


class _SetUp(unittest.TestCase):
  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._folder = pathlib.Path(folder.name)
    self._programs = self._folder / "programs"
    self._programs.mkdir()
    self._root = self._folder / "a checkout"
    (self._root / "tools").mkdir(parents=True)
    for name in ("setup_environment.sh", "tensorflow_versions.py"):
      shutil.copy(_ROOT / "tools" / name, self._root / "tools")
    for name in ("requirements.py", "install_requirements.py"):
      (self._root / "tools" / name).write_text("")

  def _program(self, name, text):
    path = self._programs / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)

  def _set_up(self, target="demo", python=_PYTHON, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    environment["PATH"] = f"{self._programs}:{environment['PATH']}"
    return subprocess.run(
      ["bash", str(self._root / "tools/setup_environment.sh"), target],
      env={**environment, "PYTHON": python, "TMPDIR": str(self._folder), **variables},
      capture_output=True,
      text=True,
    )


class EnvironmentTest(_SetUp):
  def _environment(self, path):
    """Makes an environment with a pip that does nothing, in a tenth of the time of a real one."""
    subprocess.run([_PYTHON, "-m", "venv", "--without-pip", path], check=True)
    pip = next(path.glob("lib/*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text("")

  def _imports(self, root):
    """Returns the folders of Python's path that lie in a checkout."""
    program = "import sys; print('\\n'.join(sys.path))"
    done = subprocess.run(
      [root / ".venv/bin/python", "-c", program], capture_output=True, text=True, cwd="/"
    )
    return [path for path in done.stdout.splitlines() if "/lib" not in path and path]

  def test_one_that_was_interrupted_gets_its_pip(self):
    environment = self._root / ".venv"
    subprocess.run([_PYTHON, "-m", "venv", "--without-pip", environment], check=True)

    done = self._set_up()

    self.assertEqual(done.returncode, 0, done.stderr)
    subprocess.run([environment / "bin/python", "-m", "pip", "--version"], check=True)

  def test_one_whose_python_is_gone_is_made_again_for_every_target(self):
    (self._root / ".venv/bin").mkdir(parents=True)
    (self._root / ".venv/bin/python").symlink_to("/nonexistent/python3")
    (self._root / ".venv/.for-test").touch()

    done = self._set_up()

    self.assertEqual(done.returncode, 0, done.stderr)
    subprocess.run([self._root / ".venv/bin/python", "-m", "pip", "--version"], check=True)
    self.assertFalse((self._root / ".venv/.for-test").exists())

  def test_a_checkout_may_be_moved(self):
    self._environment(self._root / ".venv")
    self.assertEqual(self._set_up().returncode, 0)
    self.assertIn(str(self._root), self._imports(self._root))

    moved = self._root.rename(self._folder / "elsewhere")

    self.assertIn(str(moved), self._imports(moved))

  def test_one_outside_the_checkout_finds_it(self):
    self._environment(self._folder / ".venv")
    self.assertEqual(self._set_up(VENV=str(self._folder / ".venv")).returncode, 0)

    self.assertIn(str(self._root), self._imports(self._folder))

  def test_one_with_a_wrong_python_is_named(self):
    (self._root / ".venv/bin").mkdir(parents=True)
    python = self._root / ".venv/bin/python"
    python.write_text("#!/bin/sh\necho 'error: Monolith needs another' >&2; exit 1\n")
    python.chmod(0o755)

    done = self._set_up()

    self.assertEqual(done.returncode, 1)
    self.assertIn("rm -r '.venv'", done.stderr)


class SystemPackagesTest(_SetUp):
  """As root: `id` is a stub as well, and Python one that can only make copies of itself."""

  def setUp(self):
    super().setUp()
    self._asked = self._folder / "asked"
    self._program("id", "echo 0")
    self._program("dpkg-query", "exit 1")
    self._python = self._program(
      "python3", 'case "$*" in "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; esac'
    )

  def _set_up_as_root(self, apt_get):
    self._program("apt-get", f'echo "$*" >> {self._asked}\n{apt_get}')
    return self._set_up("test", python=self._python)

  def test_one_that_the_distribution_lacks_keeps_none_of_the_others(self):
    done = self._set_up_as_root('case "$*" in *zookeeper*) exit 100;; esac')

    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertRegex(done.stderr, r"^apt-get could not install zookeeper \(\S+\): parts that need ")
    alone = [line.split()[-1] for line in self._asked.read_text().splitlines()]
    self.assertIn("libgtest-dev", alone)
    self.assertIn("openssh-server", alone)

  def test_a_source_that_cannot_be_reached_is_no_reason_to_ask_for_nothing(self):
    done = self._set_up_as_root('[ "$1" = install ]')

    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertNotIn("could not", done.stderr)
    self.assertIn("install -y", self._asked.read_text())

  def test_venv_of_a_python_with_a_version_in_its_name(self):
    python = self._program("python3.12", 'case "$*" in *ensurepip*) exit 1;; esac')
    self._program("apt-get", f'echo "$*" >> {self._asked}')

    done = self._set_up(python=python)

    self.assertEqual(done.returncode, 1)
    self.assertRegex(self._asked.read_text(), r"(?m)^install .* python3\.12-venv$")

  def test_a_python_that_there_is_not(self):
    done = self._set_up(python="python3.99")

    self.assertEqual(done.returncode, 1)
    self.assertEqual(done.stderr, "error: PYTHON is 'python3.99', but there is no such program.\n")
    self.assertEqual(done.stdout, "")


if __name__ == "__main__":
  unittest.main()
