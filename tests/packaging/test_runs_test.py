"""Quick runs of the tests leave out what is thorough; `tested_page` makes rows of results."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import tested_page  # noqa: E402

from tests.packaging import mirror_test  # noqa: E402

_OPS = "monolith/native_training/runtime/ops"
_REGISTERED = re.compile(r'REGISTER_(?:OP|GUARDED_KERNEL)\(\s*(?:Name\()?"(\w+)"')
# They list or load ops, and use none.
_NAMES_OF_ALL_OPS = ("gen_monolith_ops", "gen_monolith_ops_base")

_QUICK = """
import pytest

def test_quick():
  pass

@pytest.mark.thorough
def test_thorough():
  raise AssertionError
"""
_THOROUGH = """
import pytest

pytestmark = pytest.mark.thorough

def test_slow():
  raise AssertionError
"""


class QuickRunTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder)
    for name, text in {"a": _QUICK, "b": _THOROUGH, "c": "def test_c(): pass\n"}.items():
      pathlib.Path(folder, f"{name}_test.py").write_text(text)
    cls._folder = folder

  def _run(self, *options):
    results = pathlib.Path(self._folder, "results.json")
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.one_process_per_file"]
    command += [f"--rootdir={self._folder}", f"--confcutdir={self._folder}", "--file-jobs", "3"]
    command += ["-o", "python_files=*_test.py", "--results", str(results), *options, self._folder]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return ended, json.loads(results.read_text())

  def test_quick_leaves_out_thorough_files_and_tests(self):
    ended, results = self._run("--quick")

    self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
    self.assertEqual(results["command"], "pytest")
    self.assertEqual((results["passed"], results["failed"]), (2, 0))
    names = [pathlib.Path(file).name for file in results["files"]]
    self.assertEqual(names, ["a_test.py", "c_test.py"])

  def test_everything_runs_without_it(self):
    ended, results = self._run("--target=test-all")

    self.assertEqual(ended.returncode, 1, ended.stdout + ended.stderr)
    self.assertEqual(results["command"], "make test-all")
    self.assertEqual((results["passed"], results["failed"]), (2, 2))
    self.assertEqual(len(results["files"]), 3)
    self.assertRegex(ended.stdout, re.compile(r"^2 passed, 2 failed, 0 skipped$", re.MULTILINE))


class ChosenTest(unittest.TestCase):
  """The runs of `make test-versions`."""

  def test_a_seventh_of_the_files_covers_what_differs_between_versions(self):
    chosen = _chosen()
    everything = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*_test.py")]

    self.assertEqual(sorted(set(chosen) - set(everything)), [])
    self.assertEqual(len(set(chosen)), len(chosen))
    self.assertAlmostEqual(len(chosen) / len(everything), 1 / 7, delta=0.03)
    for path in (
      "tests/reliability/op_fuzz_test.py",  # calls all of them
      "tests/packaging/across_tensorflows_test.py",
    ):
      self.assertIn(path, chosen)
    for folder in ("driver", "graph_estimator", "checkpoints", "ranks"):
      self.assertTrue(any(f"/{folder}/" in path for path in chosen), folder)
    self.assertTrue(any(path.startswith("tests/serving/") for path in chosen))

  def test_every_file_of_kernels_has_a_test_of_its_results(self):
    """A chosen test names an op of the file, or is the test of a module that does."""
    chosen = _chosen()
    words_of_tests = {path: _words(ROOT / path) for path in chosen}
    words_of_modules = {
      module: _words(ROOT / "monolith" / module)
      for module in mirror_test._modules()
      if module.stem not in _NAMES_OF_ALL_OPS
    }
    files, missing = 0, []
    for source in sorted((ROOT / _OPS).rglob("*.cc")):
      ops = set(_REGISTERED.findall(source.read_text("utf-8")))
      if not ops:
        continue
      files += 1
      names = ops | set(map(_wrapper_of, ops))
      covering = {path for path, words in words_of_tests.items() if words & names}
      for module, words in words_of_modules.items():
        if words & names:
          covering.update(f"tests/{test}" for test in mirror_test._find_tests(module))
      if covering.isdisjoint(chosen):
        missing.append(source.relative_to(ROOT / _OPS).as_posix())

    self.assertGreater(files, 60)
    self.assertEqual(missing, [])


def _chosen():
  lines = (ROOT / "tests/chosen.txt").read_text("utf-8").splitlines()
  return [line for line in lines if line and not line.startswith("#")]


def _words(path):
  return set(re.findall(r"\w+", path.read_text("utf-8")))


def _wrapper_of(op):
  """Returns the name in Python of an op."""
  return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op).lower()


class TestedPageTest(unittest.TestCase):
  _RESULTS = {
    "machine": "x86_64",
    "cores": 2,
    "system": "Debian",
    "python": "3.11.7",
    "tensorflow": "2.15.1",
    "command": "make test-all",
    "date": "2026-01-02",
    "seconds": 600,
    "passed": 1234,
    "failed": 0,
    "skipped": 5,
    "files": {"a": {}, "b": {}},
  }
  _ROW = (
    "| x86_64, 2 cores, Debian | 3.11.7 | 2.15.1 | `make test-all` | 2026-01-02 | "
    "2 files: 1,234 passed, 0 failed, 5 skipped | 10 min |\n"
  )

  def test_a_run_is_a_row_in_the_place_of_an_older_one(self):
    page = (ROOT / "docs/tested.md").read_text("utf-8")

    once = tested_page.renew(page, tested_page.row_of({**self._RESULTS, "date": "2025-12-31"}))
    twice = tested_page.renew(once, tested_page.row_of(self._RESULTS))

    self.assertIn(self._ROW, twice)
    self.assertNotIn("2025-12-31", twice)
    self.assertEqual(len(twice.splitlines()), len(page.splitlines()) + 1)

  def test_other_versions_have_rows_of_their_own_and_new_ones_come_first(self):
    page = tested_page.renew(
      (ROOT / "docs/tested.md").read_text("utf-8"),
      tested_page.row_of({**self._RESULTS, "tensorflow": "2.21.0", "date": "2026-01-01"}),
    )
    page = tested_page.renew(page, tested_page.row_of(self._RESULTS))

    self.assertLess(page.index("| 2.15.1 |"), page.index("| 2.21.0 |"))

  def test_other_commands_have_rows_of_their_own(self):
    page = tested_page.renew(
      (ROOT / "docs/tested.md").read_text("utf-8"), tested_page.row_of(self._RESULTS)
    )
    chosen = tested_page.row_of({**self._RESULTS, "command": "make test-chosen"})

    page = tested_page.renew(page, chosen)

    self.assertIn(self._ROW, page)
    self.assertIn("| `make test-chosen` |", chosen)
    self.assertIn(chosen, page)

  def test_a_run_of_unknown_tests_is_no_row(self):
    with self.assertRaisesRegex(ValueError, "run by 'pytest', want a target of make"):
      tested_page.row_of({**self._RESULTS, "command": "pytest"})

  def test_a_page_without_the_table_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "no table"):
      tested_page.renew("nothing", self._ROW)


if __name__ == "__main__":
  unittest.main()
