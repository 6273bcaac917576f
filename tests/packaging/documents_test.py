"""Documents name files that exist."""

import pathlib
import re
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
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


if __name__ == "__main__":
  unittest.main()
