"""Gives every test a process per file, a fresh `TEST_TMPDIR` and parsed absl flags."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import pytest

# Not resolved: under Bazel this is a link, and what it points to is another copy of the package.
ROOT = pathlib.Path(__file__).absolute().parent.parent
sys.path.insert(0, str(ROOT))
pytest_plugins = ["tests.one_process_per_file"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  # A script's command with & at its end ignores Ctrl-C, and all that it starts would.
  signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list) -> None:
  """Drops `tf.test.TestCase.test_session`, a helper of TensorFlow that is not a test."""
  items[:] = [item for item in items if item.name != "test_session"]


@pytest.fixture(autouse=True)
def test_tmpdir(tmp_path, monkeypatch) -> str:
  """Gives the test its own empty folder, also as the environment variable `TEST_TMPDIR`."""
  monkeypatch.setenv("TEST_TMPDIR", str(tmp_path))
  return str(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def parsed_flags() -> None:
  """Lets code read absl flags as it does after `app.run`."""
  from absl import flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["pytest"], known_only=True)
