"""`benchmarks/gpu_table.cu`, which no build compiles, is a program that nvcc takes."""

import os
import pathlib
import subprocess
import sys
import unittest

import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools"))
import native_build  # noqa: E402


class GpuTableProgramTest(unittest.TestCase):
  @unittest.skipIf(native_build.find_nvcc() is None, "needs nvcc")
  def test_compiles(self):
    # Down to PTX: no machine code, which would take longer.
    flags = "-std=c++17 -diag-suppress 2810 -I. -gencode arch=compute_90,code=compute_90"
    output = os.path.join(os.environ["TEST_TMPDIR"], "gpu_table.o")
    done = subprocess.run(
      [native_build.find_nvcc(), *flags.split(), "-c", "benchmarks/gpu_table.cu", "-o", output],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
  unittest.main()
