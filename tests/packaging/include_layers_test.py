"""C++ folders include only themselves and those below them in the table of `runtime/README.md`."""

import pathlib
import re
import unittest

_RUNTIME = pathlib.Path(__file__).resolve().parents[2] / "monolith/native_training/runtime"
_INCLUDE = re.compile(r'^#include "monolith/native_training/runtime/(\w+)/([^"]+)"', re.MULTILINE)


def _folders_of_readme() -> list[str]:
  """Returns the folders in the order of the table, each once."""
  rows = re.findall(r"^\| (`.*?) \|", (_RUNTIME / "README.md").read_text(), re.MULTILINE)
  return list(dict.fromkeys(name for row in rows for name in re.findall(r"`(\w+)/", row)))


def _includes() -> set[tuple[str, str]]:
  """Returns (file, folder that it includes from) of all sources, generated headers left out."""
  return {
    (path.relative_to(_RUNTIME).as_posix(), folder)
    for path in _RUNTIME.rglob("*")
    if path.suffix in (".cc", ".cu", ".h")
    for folder, file in _INCLUDE.findall(path.read_text(encoding="utf-8"))
    if not file.endswith(".pb.h")
  }


class IncludeLayersTest(unittest.TestCase):
  def test_every_folder_with_sources_is_in_the_table(self):
    folders = {file.partition("/")[0] for file, _ in _includes()}
    self.assertGreater(len(folders), 8)
    self.assertEqual(folders - set(_folders_of_readme()), set())

  def test_includes_point_down(self):
    place = {folder: i for i, folder in enumerate(_folders_of_readme())}
    wrong = {
      f"{file} includes {folder}/"
      for file, folder in _includes()
      if place[folder] < place[file.partition("/")[0]]
    }
    self.assertEqual(wrong, set())


if __name__ == "__main__":
  unittest.main()
