"""Figures stand in `benchmarks/results.json` once, and pages and drawings show them."""

import importlib.util
import json
import pathlib
import re
import sys
import tempfile
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"<!-- figures: \w+ -->.*?<!-- end of figures -->", re.DOTALL)


def _load(name, path):
  spec = importlib.util.spec_from_file_location(name, _ROOT / path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


figures = _load("figures", "tools/figures.py")


def _documents():
  """Returns the text of each page but the diaries, without its generated blocks."""
  pages = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), _ROOT / "benchmarks/README.md"]
  return {
    page: _BLOCK.sub("", page.read_text()) for page in pages if page.name not in ("CHANGELOG.md",)
  }


class FiguresTest(unittest.TestCase):
  def test_pages_and_drawings_show_the_measured_figures(self):
    outputs = figures.outputs()

    self.assertIn("docs/images/speed.svg", outputs)
    for name, text in outputs.items():
      self.assertEqual((_ROOT / name).read_text(), text, f"{name} is stale: run `make plots`")

  def test_no_other_sentence_repeats_a_figure(self):
    results = figures.load()
    ranges = {
      f"{row[machine][0]:.2f} to {row[machine][1]:.2f}"
      for row in results["rows"]
      for machine in ("arm64", "x86_64")
      if machine in row and row[machine][0] != row[machine][1]
    }

    self.assertGreater(len(ranges), 5)
    for page, text in _documents().items():
      for figure in ranges:
        self.assertNotIn(figure, text, f"{page.name} repeats a figure of benchmarks/results.json")

  def test_rows_of_two_tables_agree(self):
    seen = {}
    for page, text in _documents().items():
      for line in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        figure = re.compile(r"[\d.,]+( to [\d.,]+)?")
        if len(cells) < 3 or not all(figure.fullmatch(cell) for cell in cells[2:] if cell):
          continue
        if not any(cells[2:]) or figure.fullmatch(cells[0]):
          continue
        before, where = seen.setdefault((cells[0], cells[1]), (cells[2:], page))
        self.assertEqual(cells[2:], before, f"{cells[0]}: {page.name} and {where.name} differ")

  def test_every_row_comes_from_a_benchmark(self):
    rows = figures.load()["rows"]

    self.assertGreater(len(rows), 50)
    for row in rows:
      self.assertTrue((_ROOT / "benchmarks" / f"{row['prints'][0]}.py").exists(), row["prints"])
      for machine in ("arm64", "x86_64"):
        low, high = row.get(machine, (1, 1))
        self.assertLessEqual(0, low)
        self.assertLessEqual(low, high)
    self.assertEqual(len({tuple(row["prints"]) for row in rows}), len(rows))

  def test_what_a_benchmark_records_is_taken_over(self):
    ratio_table = _load("ratio_table", "benchmarks/ratio_table.py")
    rows = [
      {"prints": ["bench", "lookup", "gather"], "arm64": [1.0, 1.2]},
      {"prints": ["bench", "lookup > CPU time", "gather"]},
      {"prints": ["bench", "growth", ""], "arm64": [2.0, 2.0]},
      {"prints": ["another", "lookup", "gather"], "arm64": [5.0, 5.0]},
    ]
    with tempfile.TemporaryDirectory() as root:
      ratio_table.__file__ = f"{root}/benchmarks/ratio_table.py"
      arguments, sys.argv = sys.argv, ["bench.py"]
      try:
        ratio_table.record(
          [("lookup", "gather", 1.449), ("  CPU time", "", 1.3), ("growth: 3.1 ms", "itself", 2)]
        )
      finally:
        sys.argv = arguments
      folder = pathlib.Path(root) / "build/benchmarks"
      self.assertEqual(len(json.loads((folder / "bench.json").read_text())), 3)

      self.assertEqual(figures.read(rows, "arm64", folder, widen=True), 2)
      self.assertEqual([row.get("arm64") for row in rows[:2]], [[1.0, 1.45], [1.3, 1.3]])
      figures.read(rows, "arm64", folder, widen=False)

    self.assertEqual(rows[0]["arm64"], [1.45, 1.45])
    self.assertEqual(rows[3]["arm64"], [5.0, 5.0])

  def test_a_drawing_has_a_bar_for_each_figure(self):
    text = figures.plot("Title & more", "how", [("one", [1.0, 1.5]), ("two", [2.0, 2.0])])

    self.assertIn("<title>Title &amp; more</title>", text)
    self.assertIn("1.00–1.50", text)
    self.assertIn(">2.00<", text)


if __name__ == "__main__":
  unittest.main()
