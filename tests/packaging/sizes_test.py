"""Folders and files stay small enough to find one's way in, or say why they do not."""

import pathlib
import re
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SOURCES = (".py", ".cc", ".h", ".cu", ".cuh")
_MOST_LINES = 600
_MOST_FILES = 70
# In the docstring or comment at a file's head.
_REASON = re.compile(rf"Longer than {_MOST_LINES} lines: \S")
_HEAD_LINES = 60
# Modules that model authors read from the top: their heads are for examples.
_AUTHORS = "a model author imports and replaces all of its names in one module"
_REASONS = {
  "monolith/native_training/estimator.py": _AUTHORS,
  "monolith/native_training/feature.py": _AUTHORS,
  "monolith/native_training/native_model.py": _AUTHORS,
}


def _sources() -> list[pathlib.Path]:
  """Returns our source files, without those that a build writes."""
  return [
    path
    for folder in ("monolith", "tools")
    for path in sorted((_ROOT / folder).rglob("*"))
    if path.suffix in _SOURCES
    and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    and path.stem != "_build_info"
  ]


class SizesTest(unittest.TestCase):
  def test_long_files_say_why(self):
    for path in _sources():
      lines = path.read_text(encoding="utf-8").splitlines()
      if len(lines) > _MOST_LINES and str(path.relative_to(_ROOT)) not in _REASONS:
        self.assertRegex(
          "\n".join(lines[:_HEAD_LINES]),
          _REASON,
          f"{path.relative_to(_ROOT)} has {len(lines)} lines: split it, or give the reason at its "
          f"head as 'Longer than {_MOST_LINES} lines: ...'",
        )

  def test_short_files_give_no_reason(self):
    for path in _sources():
      lines = path.read_text(encoding="utf-8").splitlines()
      if len(lines) <= _MOST_LINES:
        self.assertNotRegex("\n".join(lines[:_HEAD_LINES]), _REASON, path.relative_to(_ROOT))

  def test_no_folder_has_too_many_files(self):
    files: dict[pathlib.Path, int] = {}
    for path in _sources():
      files[path.parent] = files.get(path.parent, 0) + 1

    self.assertGreater(len(files), 20)
    for folder, count in files.items():
      self.assertLessEqual(count, _MOST_FILES, folder.relative_to(_ROOT))


if __name__ == "__main__":
  unittest.main()
