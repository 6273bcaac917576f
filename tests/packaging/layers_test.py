"""Who may import whom: a module imports from its own layer and from those below, never in a circle.

`docs/design.md` shows the same table. A module belongs to the layer with the longest prefix of its
name, so a line may take one module out of a folder.
"""

import ast
import pathlib
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Bottom to top: layer -> what it holds, and its modules. A name without a slash is under
# `monolith.native_training`, one with a slash under `monolith`.
LAYERS = {
  "base": (
    "params, and what a process knows about itself: no graph, no other process",
    "/ /_facades /_install /_lazy_api /_lazy_imports /_quiet /_tensorflow /core /path_utils "
    "/utils . data.dataservice_flags env_utils gflags_utils monolith_export "
    "native_task_context proto ranks.environment signal_utils",
  ),
  "ops": (
    "the op library, and thin wrappers around groups of its ops; tables without TensorFlow",
    "/table distribution_ops file_ops gen_seq_mask gpu_table logging_ops ranks.flat_buffer_ops "
    "remote_predict_ops runtime static_reshape_op tables.layout_ops touched_key_set_ops",
  ),
  "graph": (
    "helpers that build graphs and run sessions; metrics",
    "barrier_ops clip_ops device_utils graph_estimator graph_meta graph_utils hooks metric "
    "model_export.export_context nested_tensors prefetch_queue ragged_utils session_run_hooks "
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
    "/keras /torch layers losses model model_dump models native_model optimizers summary",
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
    "/base_runner /core.base_tpu_test /gpu_runner /keras.training /realtime /serving /tasks "
    "/tpu_runner "
    "cpu_training_distributed_test_binary demo demos estimator model_export.demo_export "
    "model_export.demo_predictor model_export.demo_predictor_client "
    "model_export.warmup_data_decoder model_export.warmup_data_gen "
    "model_export.saved_model_visulizer model_export.warmup_example_batch runner_utils "
    "summary.report",
  ),
}

# Imports inside functions, and why they are there.
LATE_IMPORTS = {
  ("/serving.model_server", "/serving.server"): "the program in C++ needs no TensorFlow in Python",
  ("/serving.server", "/realtime.replica"): "only followers of a log need a Kafka client",
  (".driver.hooks", "/realtime.dense_sets"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/realtime.partition_reader"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/realtime.row_log_hooks"): "only writers of a row log need a Kafka client",
  (".driver.hooks", "/realtime.topics"): "only writers of a row log need a Kafka client",
  (".driver.local", "/realtime.row_log_hooks"): "only writers of a row log need a Kafka client",
  (".driver.server", "/realtime.row_log_hooks"): "only writers of a row log need a Kafka client",
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

# Imports from a layer above.
UPWARD_IMPORTS: dict[tuple[str, str], str] = {}


def _short(module: str) -> str:
  """Returns `.x` for `monolith.native_training.x`, and `/x` for `monolith.x`."""
  name = module[len("monolith") :].lstrip(".")
  if name == "native_training" or name.startswith("native_training."):
    return "." + name[len("native_training.") :]
  return "/" + name


def _modules() -> dict[str, pathlib.Path]:
  """Returns path by name of our modules, without those that a build writes."""
  modules = {}
  for path in sorted((_ROOT / "monolith").rglob("*.py")):
    if path.stem.endswith(("_pb2", "_pb2_grpc")) or path.stem == "_build_info":
      continue
    parts = path.relative_to(_ROOT).with_suffix("").parts
    modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
  return modules


class _Imports(ast.NodeVisitor):
  """Collects the imports of one module by the time at which they happen.

  Attributes:
    found: "now" (at module level), "late" (in functions) or "types" -> names of our modules.
  """

  def __init__(self, name: str, path: pathlib.Path, modules: dict[str, pathlib.Path]):
    self._modules = modules
    self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    self._when = "now"
    self.found: dict[str, set[str]] = {"now": set(), "late": set(), "types": set()}
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


def _layer_of(module: str, prefixes: dict[str, int]) -> int:
  """Returns the number of a module's layer.

  Raises:
    KeyError: the table does not name it.
  """
  name = module
  while name not in prefixes:
    name = name.rpartition(".")[0]
    if not name:
      raise KeyError(f"{module} is in no layer")
  return prefixes[name]


def _find_circle(imports: dict[str, set[str]]) -> list[str]:
  """Returns the modules of a circle, in order; empty if there is none."""
  done: set[str] = set()

  def walk(module: str, path: list[str]) -> list[str]:
    if module in path:
      return path[path.index(module) :]
    if module in done:
      return []
    for other in sorted(imports[module]):
      circle = walk(other, [*path, module])
      if circle:
        return circle
    done.add(module)
    return []

  for module in sorted(imports):
    circle = walk(module, [])
    if circle:
      return circle
  return []


class LayersTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    modules = _modules()
    cls._imports = {name: _Imports(name, path, modules).found for name, path in modules.items()}
    cls._prefixes = {}
    for number, (_, names) in enumerate(LAYERS.values()):
      for name in names.split():
        prefix = name if name[0] in "./" else "." + name
        assert prefix not in cls._prefixes, f"{prefix} is in two layers"
        cls._prefixes[prefix] = number

  def _pairs(self, *times: str) -> set[tuple[str, str]]:
    return {
      (_short(name), _short(other))
      for name, found in self._imports.items()
      for time in times
      for other in found[time]
    }

  def test_every_module_has_a_layer_and_every_line_a_module(self):
    modules = {_short(name) for name in self._imports}
    self.assertGreater(len(modules), 200)
    for module in modules:
      _layer_of(module, self._prefixes)
    self.assertEqual(set(self._prefixes) - modules, set())

  def test_imports_point_down(self):
    names = list(LAYERS)
    upward = {
      (module, other)
      for module, other in self._pairs("now", "late", "types")
      if _layer_of(module, self._prefixes) < _layer_of(other, self._prefixes)
    }
    told = {
      f"{module} ({names[_layer_of(module, self._prefixes)]}) imports "
      f"{other} ({names[_layer_of(other, self._prefixes)]})"
      for module, other in upward - set(UPWARD_IMPORTS)
    }
    self.assertEqual(told, set())

  def test_no_circle_at_module_level(self):
    imports = {name: found["now"] for name, found in self._imports.items()}
    self.assertEqual(_find_circle(imports), [])

  def test_late_imports_are_named(self):
    self.assertEqual(self._pairs("late") - set(LATE_IMPORTS), set())

  def test_exceptions_are_still_needed(self):
    self.assertEqual(set(LATE_IMPORTS) - self._pairs("late"), set())
    self.assertEqual(set(UPWARD_IMPORTS) - self._pairs("now", "late", "types"), set())

  def test_the_check_notices_circles_and_reads_every_kind_of_import(self):
    self.assertEqual(_find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}), ["b", "c"])
    driver = self._imports["monolith.native_training.cpu_training"]
    self.assertIn("monolith.native_training.driver.worker", driver["now"])
    export = self._imports["monolith.native_training.driver.export"]
    self.assertIn("monolith.native_training.driver.graph", export["types"])
    self.assertIn((".ranks.local", ".hvd_lib"), self._pairs("late"))


if __name__ == "__main__":
  unittest.main()
