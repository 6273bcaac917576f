"""Prints and draws how the folders of the package import one another, and which layer each is in.

    python tools/import_layers.py               figures, edges that run up, layers by folder
    python tools/import_layers.py --draw FILE   an SVG too; edges that run up are red

Sources are read, nothing is imported. Imports inside functions count like those at module level:
both tie two folders together. Imports below `if TYPE_CHECKING:` make no process load anything; they
count in circles alone.

A *place* is a folder of `monolith/` or `monolith/native_training/`, or a module in one of the two
themselves. The *knot* is the largest set of places that all reach one another; a *circle* is a set
of modules that do. A place stands on a *floor* above all that it imports, except for the edges that
*run up*: a few, found greedily, without which no circle is left.
"""

from __future__ import annotations

import argparse
import ast
import html
import pathlib
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Bottom to top: layer -> what it holds, and its modules. A name without a slash is under
# `monolith.native_training`, one with a slash under `monolith`. A module belongs to the layer with
# the longest prefix of its name.
LAYERS = {
  "base": (
    "params, and what a process knows about itself: no graph, no other process",
    "/ /_facades /_install /_lazy_api /_lazy_imports /_quiet /_tensorflow /core /path_utils "
    "/utils . env_utils gflags_utils monolith_export "
    "native_task_context proto settings signal_utils",
  ),
  "ops": (
    "the op library, and thin wrappers around groups of its ops",
    "distribution_ops file_ops gen_seq_mask gpu_table logging_ops ranks.flat_buffer_ops "
    "remote_predict_ops runtime static_reshape_op tables.layout_ops touched_key_set_ops",
  ),
  "graph": (
    "helpers that build graphs and run sessions; metrics",
    "barrier_ops clip_ops device_utils graph graph_estimator graph_meta graph_utils hooks metric "
    "nested_tensors prefetch_queue ragged_utils session_run_hooks "
    "tensor_utils utils variables",
  ),
  "cluster": (
    "where processes are, how they find and call one another",
    "/agent_service /realtime.kafka_client /realtime.kafka_lib /realtime.log_partition "
    "/realtime.row_log /realtime.row_publisher /realtime.topics cluster_manager consul "
    "distributed_serving_ops mlp_utils net_utils service_discovery serving yarn_runtime zk_utils",
  ),
  "ranks": (
    "what several synchronous processes agree on",
    "distribution_utils hvd_lib ranks",
  ),
  "checkpoints": (
    "saving and restoring: files and savers, not tables",
    "/realtime.framing /realtime.partition_reader /realtime.sync_state "
    "basic_restore_hook checkpoints dense_reload_utils hooks.ckpt_hooks hooks.server save_utils",
  ),
  "tables": (
    "embeddings: local, over parameter servers, over ranks, on a GPU",
    "distributed_ps distributed_ps_factory distributed_ps_sync embedding_combiners entry "
    "hash_filter_ops hash_table_ops hash_table_utils learning_rate_functions "
    "multi_hash_table_ops multi_type_hash_table tables test_utils",
  ),
  "features": (
    "slots, columns and slices of a task, and gradients",
    "feature feature_utils native_task",
  ),
  "data": (
    "reading, filtering and parsing samples",
    "data distribute input",
  ),
  "models": (
    "what a model author derives from and builds with",
    "/keras layers losses model model_dump models native_model optimizers summary",
  ),
  "export": (
    "SavedModels",
    "model_export",
  ),
  "driver": (
    "runs a task: in this process, on parameter servers, on ranks",
    "/realtime.dense_sets /realtime.row_log_hooks alert cpu_training debugging driver "
    "hooks.ckpt_info hooks.feature_engineering_hooks "
    "ps_benchmark sync_hooks sync_training_hooks",
  ),
  "runners": (
    "programs, and the few lines that programs begin with",
    "/base_runner /core.base_tpu_test /gpu_runner /keras.training /launch /realtime /serving "
    "/tasks /tpu_runner "
    "cpu_training_distributed_test_binary demo demos estimator model_export.demo_export "
    "model_export.demo_predictor model_export.demo_predictor_client "
    "model_export.warmup_data_decoder model_export.warmup_data_gen "
    "model_export.saved_model_visulizer model_export.warmup_example_batch runner_utils "
    "summary.report",
  ),
}

_KINDS = ("now", "late", "types")
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
    if path.stem.endswith(("_pb2", "_pb2_grpc")) or path.stem == "_build_info":
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
      self._add(name if name in self._modules else base)

  def _add(self, name: str) -> None:
    if name in self._modules:
      self.found[self._when].add(name)


def read_imports(root: pathlib.Path = ROOT) -> dict[str, dict[str, set[str]]]:
  """Returns by module what it imports: "now", "late" or "types" -> names of our modules."""
  modules = find_modules(root)
  return {name: Imports(name, path, modules).found for name, path in modules.items()}


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


def layer_prefixes() -> dict[str, int]:
  """Returns the number of a layer by the short name that `LAYERS` gives.

  Raises:
    ValueError: a name is in two layers.
  """
  prefixes: dict[str, int] = {}
  for number, (_, names) in enumerate(LAYERS.values()):
    for name in names.split():
      prefix = name if name[0] in "./" else "." + name
      if prefix in prefixes:
        raise ValueError(f"{prefix} is in two layers")
      prefixes[prefix] = number
  return prefixes


def layer_of(module: str, prefixes: Mapping[str, int]) -> int:
  """Returns the number of the layer of a module, by its short name.

  Raises:
    KeyError: the table does not name it.
  """
  name = module
  while name not in prefixes:
    name = name.rpartition(".")[0]
    if not name:
      raise KeyError(f"{module} is in no layer")
  return prefixes[name]


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
  layers: Mapping[str, list[str]],
) -> str:
  """Returns an SVG: a row per floor, a box per place with its layers below the name."""
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
    color = "#fdd" if len(layers[place]) > 1 else "#eef4fb"
    parts.append(
      f'<rect x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="4" '
      f'fill="{color}" stroke="#567"/><text x="{x}" y="{y - 3}" text-anchor="middle">'
      f'{html.escape(place)}</text><text x="{x}" y="{y + 11}" text-anchor="middle" fill="#678" '
      f'font-size="9">{", ".join(layers[place])}</text>'
    )
  return "\n".join([*parts, "</svg>", ""])


def main() -> None:
  """Prints the figures, and draws where asked."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--draw", type=pathlib.Path, help="where to write an SVG")
  args = parser.parse_args()

  imports = read_imports()
  modules = module_graph(imports, ("now", "late"))
  graph = place_graph(modules)
  up = edges_up(graph)
  floors = find_floors(graph, up)
  circles = find_knots(module_graph(imports, _KINDS))
  knots = find_knots(graph)
  prefixes, names = layer_prefixes(), list(LAYERS)
  numbers: dict[str, set[int]] = {}
  for name in modules:
    numbers.setdefault(place_of(name), set()).add(layer_of(short_name(name), prefixes))
  layers = {place: [names[n] for n in sorted(found)] for place, found in numbers.items()}

  print(f"modules: {len(modules)} in {len(graph)} places (folders, and modules outside of them)")
  print(f"floors: {max(floors.values())}")
  print(f"edges between places: {sum(map(len, graph.values()))}; that run up: {len(up)}")
  print(f"places in the largest knot: {len(knots[0]) if knots else 0}")
  print(f"circles of modules, types counted: {len(circles)}")
  print(f"places in several layers: {sum(len(found) > 1 for found in layers.values())}")
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
  print("\nfloor  place: layers")
  for place in sorted(floors, key=lambda p: (-floors[p], p)):
    print(f"  {floors[place]:>2}  {place}: {', '.join(layers[place])}")
  if args.draw:
    args.draw.parent.mkdir(parents=True, exist_ok=True)
    args.draw.write_text(draw(graph, floors, up, layers), encoding="utf-8")
    print(f"\ndrawn: {args.draw}")


if __name__ == "__main__":
  main()
