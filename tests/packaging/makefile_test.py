"""Tests what targets of the Makefile run: where, and what they do when a step fails."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SETTINGS = (
  *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CI"),
  *("PYTHON", "TENSORFLOW", "MONOLITH_TENSORFLOW"),
)


def _make(*arguments, **variables):
  environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
  return subprocess.run(
    ["make", "PYTHON=python3", *arguments],
    cwd=_ROOT,
    env={**environment, **variables},
    capture_output=True,
    text=True,
  )


class EnvironmentTest(unittest.TestCase):
  def test_version_may_come_from_either_variable(self):
    for arguments, variables, environment in (
      ([], {}, ".venv"),
      (["TENSORFLOW=2.18"], {}, ".venv-tf2.18"),
      ([], {"MONOLITH_TENSORFLOW": "2.18"}, ".venv-tf2.18"),
      (["TENSORFLOW=2.15"], {"MONOLITH_TENSORFLOW": "2.18"}, ".venv-tf2.15"),
    ):
      with self.subTest(arguments=arguments, **variables):
        printed = _make("--dry-run", *arguments, "native", "cpp-test", **variables).stdout
        self.assertIn(f"\n{environment}/bin/python tools/native_build.py", f"\n{printed}")

  def test_a_package_without_tensorflow_is_made_by_pip(self):
    made = _make("build", MONOLITH_TENSORFLOW="none")

    self.assertNotEqual(made.returncode, 0)
    said = [line for line in made.stderr.splitlines() if not line.startswith("make: ***")]
    self.assertEqual(len(said), 1, made.stderr)
    self.assertRegex(said[0], r"^error: .*: MONOLITH_TENSORFLOW=none pip install \.$")
    self.assertFalse((_ROOT / ".venv-tfnone").exists())

  def test_set_up_runs_again_where_the_python_is_gone(self):
    with tempfile.TemporaryDirectory() as folder:
      python = pathlib.Path(folder, "bin/python")
      python.parent.mkdir()
      pathlib.Path(folder, ".for-demo").touch()
      for target, runs in ((sys.executable, False), ("/nonexistent/python3", True)):
        python.unlink(missing_ok=True)
        python.symlink_to(target)
        printed = _make("--dry-run", f"VENV={folder}", "demo").stdout
        self.assertEqual("setup_environment.sh demo" in printed, runs, printed)

  def test_no_tool_names_an_environment_of_its_own(self):
    for name in ("bazel_test.sh", "sanitize_ops.sh", "setup_environment.sh"):
      text = (_ROOT / "tools" / name).read_text("utf-8")
      self.assertIn("${VENV:-.venv}", text)
      self.assertNotIn(".venv/", text, name)
    for target in ("bazel-test", "sanitize-ops"):
      printed = _make("--dry-run", "TENSORFLOW=2.15", target).stdout
      self.assertRegex(printed.splitlines()[-1], r'^VENV="\.venv-tf2\.15" bash tools/')

  def test_results_of_every_target_and_version_have_a_file_of_their_own(self):
    files = set()
    for target in ("test", "test-all", "test-chosen"):
      for arguments in ([], ["TENSORFLOW=2.15"], ["TENSORFLOW=2.18"]):
        # Under --dry-run make still runs the lines that call make.
        printed = _make("--dry-run", "MAKE=true", *arguments, target).stdout
        files.add(re.search(rf"--target {target} --results (build/results/\S+\.json)", printed)[1])
    self.assertEqual(len(files), 9)


class FailingStepsTest(unittest.TestCase):
  """In the place of `make`, recipes call a program that notes its arguments and fails for one."""

  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._calls = pathlib.Path(folder.name, "calls")
    self._program = pathlib.Path(folder.name, "make")

  def _make(self, failing, *arguments, **variables):
    self._program.write_text(
      f'#!/bin/sh\necho "$*" >> {self._calls}\ncase "$*" in *{failing}*) exit 1;; esac\n'
    )
    self._program.chmod(0o755)
    return _make("--dry-run", f"MAKE={self._program}", *arguments, **variables)

  def test_a_version_that_fails_does_not_stop_the_others(self):
    for target, step in (("test-versions", "test-chosen"), ("test-all-versions", "test-all")):
      self._calls.unlink(missing_ok=True)
      made = self._make("TENSORFLOW=2.15", target)

      self.assertNotEqual(made.returncode, 0)
      self.assertIn(f"{step} failed on TensorFlow 2.15\n", made.stderr)
      calls = self._calls.read_text().splitlines()
      self.assertIn(f"TENSORFLOW=2.18 {step}", calls)

  def test_what_cannot_be_installed_fails_ci_and_nobody_else(self):
    for package in ("horovod", "torch", "jax"):
      with self.subTest(package):
        self.assertEqual(self._make(package, "test-all").returncode, 0)
        made = self._make(package, "test-all", CI="true")
        self.assertNotEqual(made.returncode, 0)
        self.assertRegex(made.stderr, rf"(?i){package}\w* could not be installed")


if __name__ == "__main__":
  unittest.main()
