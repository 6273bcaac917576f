"""The hook that checks subjects of commits."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import yaml

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _check(message):
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    file.write(message)
    file.flush()
    command = [sys.executable, "tools/commit_subject.py", file.name]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)


class CommitSubjectTest(unittest.TestCase):
  def test_good_subjects(self):
    for message in ("Keep rows in order", "Sayings of users in the FAQ", "A" * 72 + "\n\nWhy."):
      self.assertEqual(_check(message).returncode, 0, message)

  def test_faults(self):
    for message, fault in (
      ("\nbody", "is empty"),
      ("A" * 73, "73 characters, want at most 72"),
      ("Say why", "begins with 'Say'"),
      ("Write down what ran", "begins with 'Write down'"),
      ("wip", "begins with 'wip'"),
      ("fixup! Keep rows", "begins with 'fixup!'"),
      ("keep rows", "a capital letter first"),
      ("Keep rows.", "no full stop"),
    ):
      checked = _check(message)
      self.assertEqual(checked.returncode, 1, message)
      self.assertRegex(checked.stderr, rf"^error: the subject .*{fault}.*: CONTRIBUTING.md\n$")

  def test_it_is_a_hook(self):
    config = yaml.safe_load((_ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}

    self.assertIn("commit-msg", config["default_install_hook_types"])
    self.assertEqual(hooks["commit-subject"]["stages"], ["commit-msg"])
    self.assertTrue((_ROOT / hooks["commit-subject"]["entry"].split()[-1]).exists())
    # The others look at files, not at messages.
    self.assertEqual(config["default_stages"], ["pre-commit"])


if __name__ == "__main__":
  unittest.main()
