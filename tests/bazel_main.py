"""Runs one test file with pytest inside a Bazel runfiles tree."""

import os
import sys

import pytest

from monolith import path_utils


def main() -> int:
  runfiles = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  # The checkout has an op library of its own, which a test must not load by mistake.
  if path_utils.find_main() != runfiles:
    print(f"error: monolith is imported from {path_utils.find_main()}, not from {runfiles}")
    return 1
  return pytest.main([*sys.argv[1:], "-p", "no:cacheprovider"])


if __name__ == "__main__":
  sys.exit(main())
