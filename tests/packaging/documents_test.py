"""Documents name files that exist, and the layers that a test asserts."""

import importlib.util
import pathlib
import re
import sys
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools"))

import import_layers  # noqa: E402

_FOLDERS = (".", ".github", "benchmarks", "docs", "examples", "monolith", "tests")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# A file or folder of the repository, written out from its root; `x.py` stands for any.
_PATH = re.compile(
  r"`((?:benchmarks|docs|examples|monolith|proto|tests|tools)/(?!\S*/x[._])[\w./-]*)`"
)


def _documents():
  for folder in _FOLDERS:
    pattern = "*.md" if folder == "." else "**/*.md"
    yield from (_ROOT / folder).glob(pattern)


class DocumentsTest(unittest.TestCase):
  def test_linked_files_exist(self):
    links = [
      (document, link)
      for document in _documents()
      for link in _LINK.findall(document.read_text())
      if "://" not in link
    ]

    self.assertGreater(len(links), 20)
    for document, link in links:
      self.assertTrue((document.parent / link).exists(), f"{document.name} links {link}")

  def test_named_files_exist(self):
    named = [
      (document, path) for document in _documents() for path in _PATH.findall(document.read_text())
    ]

    self.assertGreater(len(named), 50)
    for document, path in named:
      self.assertTrue((_ROOT / path).exists(), f"{document.name} names {path}")

  def test_headings_that_are_linked_exist(self):
    for document in _documents():
      for file, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", document.read_text()):
        if "://" in file:
          continue
        text = (document.parent / file if file else document).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        self.assertIn(anchor, anchors, f"{document.name} links {file}#{anchor}")

  def test_way_of_the_ids_passes_files_that_have_what_it_names(self):
    way = (_ROOT / "docs/design.md").read_text().partition("### Follow the ids")[2]
    way = way.partition("\n## ")[0]

    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| (.*) \|$", way, re.MULTILINE)
    files = [file for file, _ in rows]

    self.assertEqual(re.findall(r"There and back, (\d+) files", way), [str(len(files))])
    self.assertEqual(len(set(files)), len(files))
    for file, what in rows:
      text = (_ROOT / "monolith/native_training" / file).read_text()
      for name in re.findall(r"`([\w.]+)`", what):
        if (_ROOT / "monolith/native_training" / name).is_file():
          continue
        for part in name.split("."):
          self.assertIn(part, text, f"design.md says that {file} has {name}")

  def test_every_extra_is_explained(self):
    spec = importlib.util.spec_from_file_location("requirements", _ROOT / "tools/requirements.py")
    requirements = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(requirements)
    page = (
      (_ROOT / "docs/get_started.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    )

    explained = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)

    self.assertCountEqual(explained, requirements.extras())

  def test_design_shows_the_layers_that_are_asserted(self):
    page = (_ROOT / "docs/design.md").read_text(encoding="utf-8")

    self.assertIn(import_layers.layer_table(), page, "run `python tools/import_layers.py --write`")


if __name__ == "__main__":
  unittest.main()
