"""Promise: a torn or corrupt data file is an error that names it, never fewer rows without a word.

Files of every kind and compression are damaged at random (`torn_files.py`) and read in a process
that may not die, hang, or grow. Some hundred mutants; `MONOLITH_SOAK=1` reads 20,000.
"""

import ast
import os
import pathlib
import subprocess
import sys
import unittest

from tests.native_training.data.data_test_utils import needs_parquet

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_IS_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
_MUTANTS = 20_000 if _IS_SOAK else 600


@needs_parquet
class TornFilesTest(unittest.TestCase):
  def test_no_mutant_is_read_as_fewer_rows(self):
    result = subprocess.run(
      [
        sys.executable,
        "-m",
        "tests.reliability.torn_files",
        os.environ["TEST_TMPDIR"],
        str(_MUTANTS),
      ],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=7200 if _IS_SOAK else 600,
    )
    lines = result.stdout.splitlines()
    self.assertEqual(result.returncode, 0, f"{lines[-1:]}\n{result.stderr[-4000:]}")
    counts = ast.literal_eval(lines[-1])
    print(counts)
    ends = ("refused", "same", "other values", "whole rows missing")
    self.assertEqual(sum(counts.get(end, 0) for end in ends), _MUTANTS)
    # Neither is everything refused, nor nothing.
    self.assertGreater(counts["refused"], _MUTANTS // 3)
    self.assertGreater(counts["same"], _MUTANTS // 50)


if __name__ == "__main__":
  unittest.main()
