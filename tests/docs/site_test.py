"""The documentation builds as a site: no broken link, no box that overflows, nothing fetched.

Chromium shows every page at two widths; pictures of some are left in `build/pictures/`.
"""

from __future__ import annotations

import functools
import html.parser
import http.server
import json
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.parse
import xml.etree.ElementTree as ElementTree

import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_WIDTHS = (1280, 420)
_TIMEOUT_SECS = 300
_PICTURED = ("", "get_started/", "speed/", "reference/keras/", "settings/")
# Shows each page in a frame of each width, and writes down what sticks out or was not found.
_CHECK = """<!doctype html><title>check</title><body><script>
const pages = PAGES, widths = WIDTHS, wrong = [];
const scrolls = (box, top) => {
  for (; box && box !== top; box = box.parentElement) {
    const style = getComputedStyle(box);
    if (style.overflowX !== "visible" || style.position === "fixed" || style.position === "sticky")
      return true;
  }
  return false;
};
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.appendChild(frame);
  await loaded;
  const inside = frame.contentDocument, say = text => wrong.push(`${page} at ${width}: ${text}`);
  if (inside.documentElement.scrollWidth > width + 1)
    say(`the page is ${inside.documentElement.scrollWidth} wide`);
  const content = inside.querySelector(".md-content");
  if (!content) return say("there is no text");
  for (const box of content.querySelectorAll("*")) {
    const {right, width: own} = box.getBoundingClientRect();
    if (own && right > width + 1 && !scrolls(box.parentElement, content))
      say(`<${box.tagName} class="${box.className}"> ends at ${Math.round(right)}`);
  }
  for (const image of inside.images) {
    await image.decode().catch(() => 0);
    if (!image.naturalWidth) say(`no picture ${image.src}`);
  }
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await look(page, width);
  return wrong;
})().catch(error => [`${error}`]).then(found => fetch("/result", {
  method: "POST", body: JSON.stringify(found)
}));
</script>"""


class _Page(html.parser.HTMLParser):
  """Collects the targets and the ids of a page."""

  def __init__(self, text: str):
    super().__init__()
    self.targets: list[str] = []
    self.ids: set[str] = set()
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    for name, value in attrs:
      if name in ("href", "src") and value and tag != "base":
        self.targets.append(value)
      if name == "id" or (tag == "a" and name == "name"):
        self.ids.add(value)


class _Handler(http.server.SimpleHTTPRequestHandler):
  """Serves files, and puts what a page sends back into the server's queue."""

  def do_POST(self):
    self.server.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
    self.send_response(204)
    self.end_headers()

  def log_message(self, *args):
    """Keeps the test's output empty."""


class SiteTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    result = subprocess.run(
      [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder.name],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    cls.site = pathlib.Path(folder.name)

  def _read(self, page: str) -> str:
    return (self.site / page / "index.html").read_text()

  def test_reference_has_signatures_and_examples(self):
    models = self._read("reference/models")

    self.assertIn("lookup_embedding_slice", models)
    self.assertIn("on_bad_row", self._read("reference/data"))
    keras = self._read("reference/keras")
    self.assertRegex(keras, r'(?s)class="doc-signature.*Embedding.*expire_after')
    for page in (self.site / "reference").glob("*/index.html"):
      text = page.read_text()
      self.assertIn("doc-object", text)
      if page.parent.name not in ("launch", "serving"):  # commands
        self.assertIn('<span class="kn">import</span>', text, f"{page}: no example")

  def test_nothing_is_fetched_from_elsewhere(self):
    pages = sorted(self.site.rglob("*.html"))
    self.assertGreater(len(pages), 30)
    for page in pages:
      fetched = re.findall(
        r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
      )
      self.assertEqual(fetched, [], page)
    for sheet in self.site.rglob("*.css"):
      self.assertNotRegex(sheet.read_text(), r"(url\(|@import )[\"']?(https?:)?//", sheet)

  def test_every_link_leads_somewhere(self):
    pages = {path: _Page(path.read_text()) for path in self.site.rglob("*.html")}
    count = 0
    for path, page in pages.items():
      if path.name == "404.html":
        continue  # its links begin at the root of a server
      for target in page.targets:
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or parts.netloc:
          continue
        file = path
        if parts.path:
          file = (path.parent / urllib.parse.unquote(parts.path)).resolve()
          file = file / "index.html" if file.is_dir() else file
        self.assertTrue(file.exists(), f"{path.relative_to(self.site)} links {target}")
        if parts.fragment and file.suffix == ".html" and not parts.fragment.startswith("__"):
          ids = pages[self.site / file.relative_to(self.site.resolve())].ids
          self.assertIn(urllib.parse.unquote(parts.fragment), ids, f"{path} links {target}")
        count += 1
    self.assertGreater(count, 1000)

  def test_a_browser_shows_every_page_at_two_widths(self):
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
      # Also with CI=true: `make test-all` does not install a browser.
      self.skipTest(f"none of {_BROWSERS} is installed; on Debian: apt-get install chromium")
    pages = sorted(
      f"/{path.parent.relative_to(self.site).as_posix()}/".replace("/./", "/")
      for path in self.site.rglob("index.html")
    )
    check = _CHECK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(_WIDTHS))
    (self.site / "check.html").write_text(check)
    self.addCleanup((self.site / "check.html").unlink)
    handler = functools.partial(_Handler, directory=str(self.site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.results = queue.Queue()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(server.server_close)
    self.addCleanup(server.shutdown)
    root = f"http://127.0.0.1:{server.server_port}"
    profile = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, profile, ignore_errors=True)
    command = [
      *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
      f"--user-data-dir={profile}",
    ]

    pictures = _ROOT / "build/pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for page in _PICTURED:
      for width in _WIDTHS:
        # A window of Chromium is at least 500 wide: a frame may be less.
        style = f"border:0;width:{width}px;height:1400px"
        frame = f'<body style="margin:0"><iframe src="/{page}" style="{style}"></iframe>'
        (self.site / "frame.html").write_text(frame)
        name = page.strip("/").replace("/", "-") or "index"
        picture = pictures / f"{name}-{width}.png"
        picture.unlink(missing_ok=True)
        options = [f"--window-size={width},1400", f"--screenshot={picture}"]
        subprocess.run(
          [*command, *options, f"{root}/frame.html"],
          check=True, capture_output=True, timeout=_TIMEOUT_SECS,
        )  # fmt: skip
        self.assertGreater(picture.stat().st_size, 10_000, f"{picture} is empty")
    (self.site / "frame.html").unlink()

    process = subprocess.Popen(
      [*command, "--remote-debugging-port=0", f"{root}/check.html"],
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
      self.assertEqual(server.results.get(timeout=_TIMEOUT_SECS), [])
    finally:
      process.terminate()
      process.wait(timeout=60)


class DrawingsTest(unittest.TestCase):
  def test_drawings_are_well_formed_and_say_what_they_show(self):
    drawings = sorted((_ROOT / "docs/images").glob("*.svg"))
    self.assertGreater(len(drawings), 4)
    pages = "".join(
      page.read_text() for page in [*(_ROOT / "docs").rglob("*.md"), *_ROOT.glob("*.md")]
    )
    for drawing in drawings:
      title = ElementTree.parse(drawing).getroot().find("{http://www.w3.org/2000/svg}title")
      self.assertTrue(title.text)
      self.assertIn(f"images/{drawing.name}", pages)


if __name__ == "__main__":
  unittest.main()
