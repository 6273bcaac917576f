"""Who may import whom: a layer imports from those below it, and modules never in a circle.

The table is in `tools/import_layers.py`, which `make layers` runs; `docs/design.md` shows it.
"""

import ast
import pathlib
import re
import sys
import unittest
import xml.etree.ElementTree as ElementTree

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools"))

import import_layers  # noqa: E402
from import_layers import LAYERS, place_of, short_name  # noqa: E402

# Imports inside functions, and why they are there.
LATE_IMPORTS = {
  (".driver.hooks", "/row_log.dense_sets"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/row_log.partition_reader"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/row_log.row_log_hooks"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/row_log.topics"): "only writers of a row log need a Kafka client",
  (".driver.local", "/row_log.row_log_hooks"): "only writers of a row log need a Kafka client",
  (".driver.server", "/row_log.row_log_hooks"): "only writers of a row log need a Kafka client",
  (".distributed_ps_factory", ".distributed_ps_sync"): "training on servers needs no ranks",
  (".estimator", "/agent_service.backends"): "only parameter servers in realtime training need it",
  (
    ".estimator",
    "/agent_service.replica_manager",
  ): "only parameter servers in realtime training need it",
  (".estimator", "/agent_service.utils"): "only parameter servers in realtime training need it",
  (".layers", ".utils"): "the package loads TensorFlow when a layer is first used",
  (".ranks.local", ".hvd_lib"): "a launcher of ranks loads no TensorFlow, unless it must fail",
  (".tables.rank_layout", ".distributed_ps_sync"): "training on servers needs no ranks",
}

# Folders that import from a layer above.
UPWARD_IMPORTS = {
  (".model_export", "/serving"): "tools of warm-up files read samples as a model server does",
}


class LayersTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._imports = import_layers.read_imports()
    cls._numbers = import_layers.layer_numbers()

  def _pairs(self, *times: str) -> set[tuple[str, str]]:
    return {
      (short_name(name), short_name(other))
      for name, found in self._imports.items()
      for time in times
      for other in found[time]
    }

  def test_every_folder_and_module_has_one_layer(self):
    self.assertGreater(len(self._imports), 200)
    self.assertEqual(set(map(place_of, self._imports)), set(self._numbers))
    self.assertEqual(
      {place for place in import_layers.FOLDERS if "." in place or "/" in place[1:]}, set()
    )

  def test_folders_say_their_layer(self):
    told = {}
    for path in sorted((_ROOT / "monolith").rglob("__init__.py")):
      text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
      module = ".".join(path.parent.relative_to(_ROOT).parts)
      self.assertNotEqual(text, "", f"{module} has no docstring")
      if found := re.search(r"Layer: (\w+)\.$", text):
        told[module] = found[1]
    names = list(LAYERS)

    self.assertGreater(len(told), 20)
    self.assertEqual(told, {name: names[self._numbers[place_of(name)]] for name in told})

  def test_package_lists_modules_below_their_layers(self):
    text = ast.get_docstring(
      ast.parse((_ROOT / "monolith/native_training/__init__.py").read_text())
    )
    listed = {}
    for layer, section in re.findall(r"^(\w+)\n((?:  .*\n?)+)", text, re.MULTILINE):
      modules = re.match(r"(?:  (?:`\w+`,? ?)+.*\n?|    .*\n?)+", section)
      for name in re.findall(r"`(\w+)`", modules[0]):
        listed["." + name] = layer
    names = list(LAYERS)

    self.assertGreater(len(listed), 60)
    self.assertEqual(listed, {name: names[self._numbers[name]] for name in listed})
    self.assertEqual(
      {place for place in self._numbers if place[0] == "." and place[1:]} - set(listed),
      {".proto"},
    )

  def test_imports_point_down(self):
    names = list(LAYERS)
    told = {
      f"{short_name(name)} ({names[self._numbers[place_of(name)]]}) imports "
      f"{short_name(other)} ({names[self._numbers[place_of(other)]]})"
      for name, found in self._imports.items()
      for other in set().union(*found.values())
      if self._numbers[place_of(name)] < self._numbers[place_of(other)]
      and (place_of(name), place_of(other)) not in UPWARD_IMPORTS
    }
    self.assertEqual(told, set())

  def test_no_circle_of_modules_with_late_imports_and_those_of_types(self):
    graph = import_layers.module_graph(self._imports, ("now", "late", "types"))
    self.assertEqual(import_layers.find_knots(graph), [])

  def test_the_knot_of_folders_stays_small_and_few_edges_run_up(self):
    graph = import_layers.place_graph(import_layers.module_graph(self._imports, ("now", "late")))

    self.assertLessEqual(max(map(len, import_layers.find_knots(graph)), default=0), 4)
    self.assertLessEqual(len(import_layers.edges_up(graph)), 15)

  def test_late_imports_are_named(self):
    self.assertEqual(self._pairs("late") - set(LATE_IMPORTS), set())

  def test_exceptions_are_still_needed(self):
    self.assertEqual(set(LATE_IMPORTS) - self._pairs("late"), set())
    graph = import_layers.place_graph(
      import_layers.module_graph(self._imports, ("now", "late", "types"))
    )
    self.assertEqual({pair for pair in UPWARD_IMPORTS if pair[1] not in graph[pair[0]]}, set())

  def test_the_check_notices_circles_and_reads_every_kind_of_import(self):
    driver = self._imports["monolith.native_training.cpu_training"]
    self.assertIn("monolith.native_training.driver.worker", driver["now"])
    protocols = self._imports["monolith.native_training.tables.protocols"]
    self.assertIn("monolith.native_training.tables.queue_hooks", protocols["types"])
    self.assertIn((".ranks.local", ".hvd_lib"), self._pairs("late"))

  def test_the_picture_has_every_place_on_a_floor_above_what_it_imports(self):
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"d", "b"}, "d": set(), "e": {"a"}}

    up = import_layers.edges_up(graph)
    floors = import_layers.find_floors(graph, up)
    picture = import_layers.draw(graph, floors, up, {place: "base" for place in graph})

    self.assertEqual(import_layers.find_knots(graph), [["b", "c"]])
    self.assertEqual(len(up), 1)
    for place, others in graph.items():
      for other in others:
        self.assertEqual(floors[place] > floors[other], (place, other) not in up)
    boxes = {text.text for text in ElementTree.fromstring(picture).findall(".//{*}text")}
    self.assertLess(set(graph), boxes)


if __name__ == "__main__":
  unittest.main()
