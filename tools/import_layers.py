"""Prints and draws how the folders of the package import one another, and which layer each is in.

    python tools/import_layers.py               figures, edges that run up, layers
    python tools/import_layers.py --draw FILE   an SVG too; edges that run up are red
    python tools/import_layers.py --write       puts the table of layers into docs/design.md

Sources are read, nothing is imported. Imports inside functions count like those at module level:
both tie two folders together. Imports below `if TYPE_CHECKING:` make no process load anything; they
count in circles alone.

A *place* is a folder of `monolith/` or `monolith/native_training/`, or a module in one of the two
themselves. The *knot* is the largest set of places that all reach one another; a *circle* is a set
of modules that do. A place stands on a *floor* above all that it imports, except for the edges that
*run up*: a few, found greedily, without which no circle is left.

A *door* only leads to another module, from the path where scripts expect it. Who imports a door
imports what is behind it; the door itself is counted nowhere.
"""

from __future__ import annotations

import argparse
import ast
import html
import pathlib
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design.md"

# Bottom to top: layer -> what it holds.
LAYERS = {
  "base": "params, and what a process knows about itself: no graph, no other process",
  "ops": "the op library, and thin wrappers around groups of its ops; tables without TensorFlow",
  "graph": "helpers that build graphs and run sessions; metrics",
  "cluster": "where processes are, how they find and call one another",
  "ranks": "what several synchronous processes agree on",
  "checkpoints": "saving and restoring: files, savers, and the log of changed rows; not tables",
  "tables": "embeddings: in this process, on parameter servers, over ranks",
  "features": "slots, columns and slices of a task, and gradients",
  "data": "reading, filtering and parsing samples",
  "models": "what a model author derives from and builds with",
  "export": "SavedModels",
  "driver": "runs a task: in this process, on parameter servers, on ranks",
  "runners": "programs, and the few lines that programs begin with; other doors",
}

# Each folder is in one layer: below `monolith/native_training/`, or below `monolith/` with a slash.
FOLDERS = {
  "/core": "base",
  "proto": "base",
  "settings": "base",
  "/table": "ops",
  "gpu": "ops",
  "ops": "ops",
  "runtime": "ops",
  "graph": "graph",
  "graph_estimator": "graph",
  "metric": "graph",
  "/agent_service": "cluster",
  "serving": "cluster",
  "ranks": "ranks",
  "/row_log": "checkpoints",
  "checkpoints": "checkpoints",
  "tables": "tables",
  "data": "data",
  "distribute": "data",
  "/jax": "models",
  "/torch": "models",
  "layers": "models",
  "losses": "models",
  "model_dump": "models",
  "models": "models",
  "optimizers": "models",
  "summary": "models",
  "model_export": "export",
  "alert": "driver",
  "debugging": "driver",
  "driver": "driver",
  "hooks": "driver",
  "/keras": "runners",
  "/launch": "runners",
  "/realtime": "runners",
  "/serving": "runners",
  "/tasks": "runners",
  "demos": "runners",
}

# Modules in the two folders themselves, where scripts expect them; `.` and `/` are those packages.
MODULES = {
  "base": "/ /_facades /_install /_lazy_api /_lazy_imports /_quiet /_tensorflow /path_utils "
  "/utils . env_utils gflags_utils monolith_export native_task_context signal_utils",
  "ops": "distribution_ops file_ops gen_seq_mask gpu_table logging_ops remote_predict_ops "
  "static_reshape_op touched_key_set_ops",
  "graph": "barrier_ops clip_ops device_utils graph_meta graph_utils nested_tensors prefetch_queue "
  "ragged_utils session_run_hooks tensor_utils utils variables",
  "cluster": "cluster_manager consul distributed_serving_ops mlp_utils net_utils service_discovery "
  "yarn_runtime zk_utils",
  "ranks": "distribution_utils hvd_lib",
  "checkpoints": "basic_restore_hook dense_reload_utils save_utils",
  "tables": "distributed_ps distributed_ps_factory distributed_ps_near distributed_ps_sync "
  "embedding_combiners entry hash_filter_ops hash_table_ops hash_table_utils "
  "learning_rate_functions multi_hash_table_ops multi_type_hash_table test_utils",
  "features": "feature feature_utils native_task",
  "data": "input",
  "models": "model native_model",
  "driver": "cpu_training ps_benchmark sync_hooks sync_training_hooks",
  "runners": "/base_runner /gpu_runner /tpu_runner cpu_training_distributed_test_binary demo "
  "estimator runner_utils",
}

_GENERATED = ("_pb2", "_pb2_grpc")
_KINDS = ("now", "late", "types")
_DOOR = "\nsys.modules[__name__] = "
Graph = Mapping[str, set[str]]


def short_name(module: str) -> str:
  """Returns `.x` for `monolith.native_training.x`, and `/x` for `monolith.x`."""
  name = module[len("monolith") :].lstrip(".")
  if name == "native_training" or name.startswith("native_training."):
    return "." + name[len("native_training.") :]
  return "/" + name


def place_of(module: str) -> str:
  """Returns the folder or top module that a module belongs to: `.tables` for `.tables.local`."""
  name = short_name(module)
  return name[0] + name[1:].partition(".")[0]


def find_modules(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
  """Returns path by name of our modules, without those that a build writes."""
  modules = {}
  for path in sorted((root / "monolith").rglob("*.py")):
    if path.stem.endswith(_GENERATED) or path.stem == "_build_info":
      continue
    parts = path.relative_to(root).with_suffix("").parts
    modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  return modules


class Imports(ast.NodeVisitor):
  """Collects the imports of one module by the time at which they happen.

  Attributes:
    found: "now" (at module level), "late" (in functions) or "types" -> names of our modules.
  """

  def __init__(self, name: str, path: pathlib.Path, modules: Mapping[str, pathlib.Path]):
    self._modules = modules
    self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    self._when = "now"
    self.found: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    self.visit(ast.parse(path.read_text(encoding="utf-8")))
    for names in self.found.values():
      names.discard(name)

  def _visit_as(self, when: str, node: ast.AST) -> None:
    before, self._when = self._when, when
    self.generic_visit(node)
    self._when = before

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    self._visit_as("late", node)

  visit_AsyncFunctionDef = visit_FunctionDef

  def visit_If(self, node: ast.If) -> None:
    is_types = "TYPE_CHECKING" in ast.unparse(node.test)
    self._visit_as("types" if is_types else self._when, node)

  def visit_Import(self, node: ast.Import) -> None:
    for alias in node.names:
      self._add(alias.name)

  def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
    base = node.module or ""
    if node.level:
      package = self._package.split(".")
      base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
    for alias in node.names:
      name = f"{base}.{alias.name}"
      if not alias.name.endswith(_GENERATED):
        self._add(name if name in self._modules else base)

  def _add(self, name: str) -> None:
    if name in self._modules:
      self.found[self._when].add(name)


def read_imports(root: pathlib.Path = ROOT) -> dict[str, dict[str, set[str]]]:
  """Returns by module what it imports: "now", "late" or "types" -> names of our modules.

  Doors are left out, and what is behind them stands in their place.
  """
  modules = find_modules(root)
  imports = {name: Imports(name, path, modules).found for name, path in modules.items()}
  doors = find_doors(modules)
  for door in doors:
    del imports[door]
  return {
    name: {kind: {doors.get(other, other) for other in found[kind]} for kind in _KINDS}
    for name, found in imports.items()
  }


def find_doors(modules: Mapping[str, pathlib.Path]) -> dict[str, str]:
  """Returns door -> the module behind it.

  Raises:
    ValueError: a door defines something, or imports more than what is behind it.
  """
  doors: dict[str, str] = {}
  for name, path in modules.items():
    text = path.read_text(encoding="utf-8")
    if _DOOR in text:
      behind = set().union(*Imports(name, path, modules).found.values())
      defined = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While)
      if len(behind) != 1 or any(isinstance(node, defined) for node in ast.walk(ast.parse(text))):
        raise ValueError(f"{path} is more than a door: {sorted(behind)}")
      doors[name] = behind.pop()
  return doors


def module_graph(imports: Mapping[str, Mapping[str, set[str]]], kinds: Iterable[str]) -> Graph:
  """Returns module -> the modules it imports in one of these ways."""
  kinds = tuple(kinds)
  return {name: set().union(*(found[kind] for kind in kinds)) for name, found in imports.items()}


def place_graph(modules: Graph) -> Graph:
  """Returns place -> the other places that its modules import."""
  graph: dict[str, set[str]] = {place_of(name): set() for name in modules}
  for name, others in modules.items():
    graph[place_of(name)].update(place_of(other) for other in others)
  for place, others in graph.items():
    others.discard(place)
  return graph


def layer_numbers() -> dict[str, int]:
  """Returns the number of a layer, from the bottom, by place.

  Raises:
    ValueError: a place is in two layers.
  """
  named = [*FOLDERS.items()]
  named += [(name, layer) for layer, names in MODULES.items() for name in names.split()]
  order = list(LAYERS)
  numbers: dict[str, int] = {}
  for name, layer in named:
    place = name if name[0] in "./" else "." + name
    if place in numbers:
      raise ValueError(f"{place} is in two layers")
    numbers[place] = order.index(layer)
  return numbers


def layer_table() -> str:
  """Returns the rows of the table in `docs/design.md`, from the top, without engine and wire."""
  rows = []
  for layer, what in reversed(LAYERS.items()):
    folders = sorted(folder for folder, its in FOLDERS.items() if its == layer)
    modules = sorted(MODULES.get(layer, "").split())
    cells = [layer, what]
    cells.append(", ".join(f"`{folder}/`" for folder in folders))
    cells.append(", ".join(f"`{module}`" for module in modules))
    rows.append(f"| {' | '.join(cells)} |\n")
  return "".join(rows)


def write_table() -> None:
  """Puts the table into `docs/design.md`, in the place of the one that is there."""
  text = PAGE.read_text(encoding="utf-8")
  first, last = (f"| {layer} |" for layer in (list(LAYERS)[-1], list(LAYERS)[0]))
  start = text.index(first)
  end = text.index("\n", text.index(last)) + 1
  PAGE.write_text(text[:start] + layer_table() + text[end:], encoding="utf-8")


def find_knots(graph: Graph) -> list[list[str]]:
  """Returns the sets of at least two nodes that all reach one another, the largest first."""
  reached: dict[str, set[str]] = {}
  for node in graph:
    seen: set[str] = set()
    ahead = list(graph[node])
    while ahead:
      other = ahead.pop()
      if other not in seen:
        seen.add(other)
        ahead.extend(graph[other])
    reached[node] = seen
  knots = {
    frozenset(other for other in reached[node] if node in reached[other])
    for node in graph
    if node in reached[node]
  }
  return sorted((sorted(knot) for knot in knots if len(knot) > 1), key=lambda k: (-len(k), k))


def edges_up(graph: Graph) -> list[tuple[str, str]]:
  """Returns a few edges without which the graph has no circle, found as Eades, Lin and Smyth do."""
  up: list[tuple[str, str]] = []
  for knot in find_knots(graph):
    left = {node: graph[node] & set(knot) for node in knot}
    bottom: list[str] = []
    top: list[str] = []
    while left:
      into = {node: sum(node in others for others in left.values()) for node in left}
      sinks = [node for node in left if not left[node]]
      sources = [node for node in left if not into[node]]
      node = min(sinks or sources or left, key=lambda n: (len(left[n]) - into[n], n))
      (bottom if sinks or not sources else top).append(node)
      del left[node]
      for others in left.values():
        others.discard(node)
    order = {node: place for place, node in enumerate(bottom + top[::-1])}
    up += [(a, b) for a in knot for b in graph[a] & set(knot) if order[a] < order[b]]
  return sorted(up)


def find_floors(graph: Graph, up: Iterable[tuple[str, str]]) -> dict[str, int]:
  """Returns node -> its floor, from 1: above all that it imports by edges that do not run up."""
  dropped = set(up)
  floors: dict[str, int] = {}

  def visit(node: str) -> int:
    if node not in floors:
      below = (visit(other) for other in graph[node] if (node, other) not in dropped)
      floors[node] = 1 + max(below, default=0)
    return floors[node]

  for node in sorted(graph):
    visit(node)
  return floors


def draw(
  graph: Graph,
  floors: Mapping[str, int],
  up: Iterable[tuple[str, str]],
  layers: Mapping[str, str],
) -> str:
  """Returns an SVG: a row per floor, a box per place with its layer below the name."""
  width, height, row = 150, 34, 92
  rows: dict[int, list[str]] = {}
  for place in sorted(floors, key=lambda p: (layers[p], p)):
    rows.setdefault(floors[place], []).append(place)
  across = max(map(len, rows.values())) * (width + 16) + 60
  down = len(rows) * row + 40
  middle: dict[str, tuple[int, int]] = {}
  for floor, places in rows.items():
    left = (across - len(places) * (width + 16)) // 2
    for i, place in enumerate(places):
      middle[place] = (left + i * (width + 16) + width // 2, (len(rows) - floor) * row + 44)
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" '
    'font-family="sans-serif" font-size="11">',
    '<rect width="100%" height="100%" fill="#fff"/>',
  ]
  told = set(up)
  edges = [(a, b) for a, others in graph.items() for b in sorted(others)]
  for a, b in sorted(edges, key=told.__contains__):
    (x1, y1), (x2, y2) = middle[a], middle[b]
    bend = 60 if (a, b) in told else 0
    style = 'stroke="#c00" stroke-width="1.6"' if bend else 'stroke="#89a" stroke-opacity=".35"'
    title = f"<title>{html.escape(a)} imports {html.escape(b)}</title>"
    parts.append(
      f'<path d="M{x1} {y1} Q{(x1 + x2) // 2 + bend} {(y1 + y2) // 2} {x2} {y2}" fill="none" '
      f"{style}>{title}</path>"
    )
  for place, (x, y) in middle.items():
    parts.append(
      f'<rect x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="4" '
      f'fill="#eef4fb" stroke="#567"/><text x="{x}" y="{y - 3}" text-anchor="middle">'
      f'{html.escape(place)}</text><text x="{x}" y="{y + 11}" text-anchor="middle" fill="#678" '
      f'font-size="9">{layers[place]}</text>'
    )
  return "\n".join([*parts, "</svg>", ""])


def main() -> None:
  """Prints the figures, and draws where asked."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--draw", type=pathlib.Path, help="where to write an SVG")
  parser.add_argument("--write", action="store_true", help="renew the table in docs/design.md")
  args = parser.parse_args()
  if args.write:
    write_table()
    return

  imports = read_imports()
  modules = module_graph(imports, ("now", "late"))
  graph = place_graph(modules)
  up = edges_up(graph)
  floors = find_floors(graph, up)
  circles = find_knots(module_graph(imports, _KINDS))
  knots = find_knots(graph)
  numbers, names = layer_numbers(), list(LAYERS)
  layers = {place: names[numbers[place]] for place in graph}

  print(f"modules: {len(modules)} in {len(graph)} places (folders, and modules outside of them)")
  print(f"floors: {max(floors.values())}")
  print(f"edges between places: {sum(map(len, graph.values()))}; that run up: {len(up)}")
  print(f"places in the largest knot: {len(knots[0]) if knots else 0}")
  print(f"circles of modules, types counted: {len(circles)}")
  upward = sorted((a, b) for a in graph for b in graph[a] if numbers[a] < numbers[b])
  print(f"edges to a layer above: {len(upward)}{''.join(f'; {a} -> {b}' for a, b in upward)}")
  print(f"doors: {len(find_doors(find_modules()))}")
  for knot in knots:
    print(f"\nknot of {len(knot)}: {' '.join(knot)}")
  for circle in circles:
    print(f"\ncircle of {len(circle)}: {' '.join(map(short_name, circle))}")
  if up:
    print("\nedges that run up")
  for a, b in up:
    because = sorted(
      f"{short_name(name)} -> {short_name(other)}"
      for name, others in modules.items()
      for other in others
      if (place_of(name), place_of(other)) == (a, b)
    )
    print(f"  {a} -> {b}: {', '.join(because)}")
  print("\nfloor  place: layer")
  for place in sorted(floors, key=lambda p: (-floors[p], p)):
    print(f"  {floors[place]:>2}  {place}: {layers[place]}")
  if args.draw:
    args.draw.parent.mkdir(parents=True, exist_ok=True)
    args.draw.write_text(draw(graph, floors, up, layers), encoding="utf-8")
    print(f"\ndrawn: {args.draw}")


if __name__ == "__main__":
  main()
