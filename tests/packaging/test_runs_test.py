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
    self.assertTrue(results["quick"])
    self.assertEqual((results["passed"], results["failed"]), (2, 0))
    names = [pathlib.Path(file).name for file in results["files"]]
    self.assertEqual(names, ["a_test.py", "c_test.py"])

  def test_everything_runs_without_it(self):
    ended, results = self._run()

    self.assertEqual(ended.returncode, 1, ended.stdout + ended.stderr)
    self.assertFalse(results["quick"])
    self.assertEqual((results["passed"], results["failed"]), (2, 2))
    self.assertEqual(len(results["files"]), 3)
    self.assertRegex(ended.stdout, re.compile(r"^2 passed, 2 failed, 0 skipped$", re.MULTILINE))


class TestedPageTest(unittest.TestCase):
  _RESULTS = {
    "machine": "x86_64",
    "cores": 2,
    "system": "Debian",
    "python": "3.11.7",
    "tensorflow": "2.15.1",
    "quick": False,
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

  def test_a_page_without_the_table_is_an_error(self):
    with self.assertRaisesRegex(ValueError, "no table"):
      tested_page.renew("nothing", self._ROW)


if __name__ == "__main__":
  unittest.main()
