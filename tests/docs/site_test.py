"""The documentation builds as a site: no broken link, every page with its drawings."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class SiteTest(unittest.TestCase):
  def test_site_builds_and_has_the_reference(self):
    with tempfile.TemporaryDirectory() as folder:
      result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=_ROOT,
        capture_output=True,
        text=True,
      )
      self.assertEqual(result.returncode, 0, result.stderr[-3000:])

      site = pathlib.Path(folder)
      self.assertIn("lookup_embedding_slice", (site / "reference/models/index.html").read_text())
      self.assertIn("on_bad_row", (site / "reference/data/index.html").read_text())
      for page in site.rglob("*.html"):
        # What a page would fetch from elsewhere, without which it is not whole.
        fetched = re.findall(
          r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        self.assertEqual(fetched, [], page)

  def test_drawings_are_well_formed_and_say_what_they_show(self):
    drawings = sorted((_ROOT / "docs/images").glob("*.svg"))
    self.assertGreater(len(drawings), 4)
    pages = "".join(page.read_text() for page in (_ROOT / "docs").rglob("*.md"))
    for drawing in drawings:
      title = ElementTree.parse(drawing).getroot().find("{http://www.w3.org/2000/svg}title")
      self.assertTrue(title.text)
      self.assertIn(f"images/{drawing.name}", pages)


if __name__ == "__main__":
  unittest.main()
