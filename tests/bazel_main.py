"""Runs one test file with pytest inside a Bazel runfiles tree."""

import sys

import pytest

if __name__ == "__main__":
  sys.exit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider"]))
