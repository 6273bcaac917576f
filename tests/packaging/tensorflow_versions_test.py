"""Tests that differences between versions of TensorFlow are in `monolith/_tensorflow.py`."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import os
import pathlib
import re
import subprocess
import sys
import unittest
from collections.abc import Iterable, Iterator
from unittest import mock

import tensorflow as tf
from google.protobuf import descriptor_pb2

from monolith import _tensorflow

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "tensorflow.tsl")
_MODULE = "_tensorflow.py"
# Only `_tensorflow.py` may import from them: a version has no such package, or another one.
_ELSEWHERE = ("tensorflow_estimator", "tensorboard", "keras", "tf_keras")
_VERSION = re.compile(
  r"(tf|tensorflow|np|numpy|keras|protobuf|tf_keras)\.(__version__|version\b|VERSION)"
  r"|sys\.version_info|importlib\.metadata"
)
# Names of TensorFlow that some version lacks.
_LOST = ("tf.estimator", "tf.compat.v1.estimator", "tensorflow.estimator")
# File -> why it may use them.
_MAY_USE_LOST = {"tpu_runner.py": "runs up to 2.15, and says so where it ends"}
_PRIVATE_IN_TEXT = re.compile(rf"({'|'.join((*_PRIVATE, *_ELSEWHERE[:2]))})(\.\w+)+\.?")
# Modules named in strings, beyond the list -> why.
_MAY_NAME = {"_lazy_api.py": "waits for somebody to import them, and imports none"}
# Names that Python 3.9 or 3.10 lacks; ruff finds syntax alone.
_NEW_IN_PYTHON = re.compile(
  r"\bzip\(.*strict=|\.enterContext\(|\.assertNoLogs\(|ignore_cleanup_errors=|itertools\.pairwise"
  r"|platform\.freedesktop_os_release|import tomllib|dataclass\(.*(slots|kw_only)="
  r"|hashlib\.file_digest|(datetime|dt)\.UTC\b|StrEnum|ExceptionGroup|\.add_note\("
)
# File -> why it may name it.
_MAY_NAME_NEW = {
  "tests/native_training/net_utils_test.py": "asks whether there is one",
  "tests/packaging/tensorflow_versions_test.py": "has the list",
}
# File -> why it looks at a version.
_MAY_ASK = {
  "_install.py": "a library fits one TensorFlow",
  "tpu_runner.py": "tells the TPU",
}


@functools.cache
def _sources() -> dict[str, str]:
  """Returns path below the package -> text of what somebody wrote."""
  package = _ROOT / "monolith"
  return {
    path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(package.rglob("*.py"))
    if not path.stem.endswith(("_pb2", "_pb2_grpc")) and path.stem != "_build_info"
  }


@functools.cache
def _trees() -> dict[str, ast.Module]:
  return {path: ast.parse(text) for path, text in _sources().items()}


def _imports_of(node: ast.AST) -> list[tuple[str, str, str]]:
  """Returns (module, imported name, name here) of each import; no name for `import module`.

  `import tensorflow.python.x.y as z` is `from tensorflow.python.x import y as z`.
  """
  if isinstance(node, ast.ImportFrom) and node.module and not node.level:
    return [(node.module, alias.name, alias.asname or alias.name) for alias in node.names]
  if isinstance(node, ast.Import):
    return [
      (*alias.name.rpartition(".")[::2], alias.asname)
      if alias.asname and alias.name.startswith(_PRIVATE)
      else (alias.name, "", alias.asname or alias.name)
      for alias in node.names
    ]
  return []


def _is_module(name: str) -> bool:
  """Tells so by the habit of TensorFlow: its modules have small letters, its classes do not."""
  return name.islower()


def _find_private_names() -> dict[str, set[str]]:
  """Returns module -> names that the package uses of it."""
  return _find_private_names_of(_trees().values())


def _find_private_names_of(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
  found: dict[str, set[str]] = {}
  for tree in trees:
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    inside = {id(n) for function in functions for n in ast.walk(function)}
    for scope in (tree, *functions):
      modules = {}
      for node in ast.walk(scope):
        if scope is tree and id(node) in inside:
          continue
        for module, name, here in _imports_of(node):
          if not module.startswith(_PRIVATE):
            continue
          if not name:  # A use by a longer name, of which nothing is known here.
            found.setdefault(module, set()).add("?")
          elif _is_module(name):
            modules[here] = f"{module}.{name}"
            found.setdefault(modules[here], set())
          else:
            found.setdefault(module, set()).add(name)
      for node in ast.walk(scope) if modules else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
          if node.value.id in modules:
            found[modules[node.value.id]].add(node.attr)
  return found


def _dotted(node: ast.AST) -> str:
  """Returns `a.b.c` for an expression of names and attributes, else nothing."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    owner = _dotted(node.value)
    return f"{owner}.{node.attr}" if owner else ""
  return ""


def _texts_of(tree: ast.Module) -> Iterator[str]:
  """Yields the strings of a module that are whole names, such as those to import later."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      if _PRIVATE_IN_TEXT.fullmatch(node.value):
        yield node.value


class TensorFlowVersionsTest(unittest.TestCase):
  def test_list_has_what_the_package_uses(self):
    listed = {module: set(names.split()) for module, names in _tensorflow.PRIVATE_NAMES.items()}
    self.assertEqual(_find_private_names(), listed)

  def test_every_private_name_is_there(self):
    # Gives a name back that TensorFlow has lost.
    importlib.import_module("monolith.core.testing_utils")
    for module, names in _tensorflow.PRIVATE_NAMES.items():
      imported = importlib.import_module(module)
      for name in names.split():
        self.assertTrue(hasattr(imported, name), f"{module}.{name}")

  def test_no_other_module_asks_for_a_version(self):
    asking = {
      path
      for path, text in _sources().items()
      if any(_VERSION.search(line.split("#")[0]) for line in text.splitlines())
    }
    self.assertEqual(asking, set(_MAY_ASK))

  def test_no_other_module_imports_what_a_version_lacks(self):
    importing = {
      (path, module)
      for path, tree in _trees().items()
      if path != _MODULE
      for node in ast.walk(tree)
      for module, _, _ in _imports_of(node)
      if module.split(".")[0] in _ELSEWHERE
    }
    self.assertEqual(importing, set())

  def test_no_other_module_uses_what_a_version_has_lost(self):
    using = {
      path
      for path, tree in _trees().items()
      if path != _MODULE
      for node in ast.walk(tree)
      if _dotted(node).startswith(_LOST)
    }
    self.assertEqual(using, set(_MAY_USE_LOST))

  def test_internal_names_are_listed_and_there(self):
    start = "tf.__internal__."
    names = {_dotted(node) for tree in _trees().values() for node in ast.walk(tree)}
    used = {name[len(start) :] for name in names if name.startswith(start)}
    # `tracking` of `tracking.AutoTrackable` is an attribute of its own.
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    self.assertEqual(used, set(_tensorflow.INTERNAL_NAMES.split()))
    for name in used:
      self.assertIsNotNone(operator.attrgetter(name)(tf.__internal__), name)

  def test_modules_named_in_strings_are_listed(self):
    naming = {
      path
      for path, tree in _trees().items()
      if path != _MODULE and set(_texts_of(tree)) - _tensorflow.PRIVATE_NAMES.keys()
    }
    self.assertEqual(naming, set(_MAY_NAME))

  def test_the_check_reads_every_kind_of_use(self):
    for text, wanted in (
      ("import tensorflow.python.a.b as c\nc.d", {"tensorflow.python.a.b": {"d"}}),
      ("import tensorflow.python.a", {"tensorflow.python.a": {"?"}}),
      ("from tensorflow.python.a import b\nb.d", {"tensorflow.python.a.b": {"d"}}),
      ("from tensorflow.python.a import B", {"tensorflow.python.a": {"B"}}),
    ):
      self.assertEqual(_find_private_names_of([ast.parse(text)]), wanted, text)
    text = "load('tensorflow.python.a.b')\n'in tensorflow.python.a there is'"
    self.assertEqual(list(_texts_of(ast.parse(text))), ["tensorflow.python.a.b"])
    found = _find_private_names()
    self.assertIn("_PREEMPTION_ERRORS", found["tensorflow.python.training.monitored_session"])
    self.assertIn("SummaryWriterCache", found["tensorflow.python.training.summary_io"])
    for line in ("if tf.__version__ > '2.15':", "sys.version_info >= (3, 12)"):
      self.assertRegex(line, _VERSION)

  def test_the_module_needs_no_tensorflow_until_it_is_asked(self):
    program = "import sys, monolith._tensorflow; print('tensorflow' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    self.assertEqual(printed.stdout.split(), [b"False"])


class FunctionsTest(unittest.TestCase):
  def test_lists_are_told_from_single_fields(self):
    fields = descriptor_pb2.FileDescriptorProto.DESCRIPTOR.fields_by_name
    self.assertTrue(_tensorflow.is_repeated(fields["dependency"]))
    self.assertFalse(_tensorflow.is_repeated(fields["name"]))

  def test_summaries_are_of_one_kind(self):
    summary_pb2 = _tensorflow.import_summary_pb2()
    metadata = summary_pb2.SummaryMetadata(data_class=summary_pb2.DATA_CLASS_TENSOR)
    self.assertEqual(metadata.data_class, 2)

  def test_keras_has_layers_that_work_in_graphs(self):
    keras, keras_v1 = _tensorflow.import_keras(), _tensorflow.import_keras_v1()
    for layer in (
      keras.layers.Dense(2, name="dense"),
      keras_v1.layers.BatchNormalization(renorm=True, name="norm"),
    ):
      with tf.Graph().as_default():
        layer(tf.ones([3, 2]))
        names = [variable.name for variable in tf.compat.v1.global_variables()]
        self.assertEqual(names[0].split("/")[0], layer.name)

  def test_keras_that_is_missing_is_named(self):
    with mock.patch.object(importlib, "import_module", side_effect=ModuleNotFoundError):
      minor = ".".join(tf.__version__.split(".")[:2])
      with self.assertRaisesRegex(ImportError, rf"pip install 'tf-keras=={minor}\.\*'$"):
        _tensorflow._import_tf_keras("tf_keras")

  def test_keras_2_that_was_asked_for_is_named(self):
    # Only a process of its own has not imported the Keras of TensorFlow.
    program = (
      "import os, sys\n"
      "sys.modules['tf_keras'] = sys.modules['keras'] = None\n"
      "from monolith import _tensorflow\n"
      "_tensorflow.importlib.util.find_spec = lambda name: None\n"
      "try:\n  _tensorflow.import_keras()\nexcept ImportError as error:\n  print(error)"
    )
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    printed = subprocess.run(
      [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    minor = re.escape(".".join(tf.__version__.split(".")[:2]))
    self.assertRegex(
      printed, rf"^TF_USE_LEGACY_KERAS=1 asks for .*: pip install 'tf-keras=={minor}\.\*'\n$"
    )


class PythonTest(unittest.TestCase):
  def test_nothing_is_newer_than_the_oldest_python(self):
    found = {
      path.relative_to(_ROOT).as_posix()
      for folder in ("benchmarks", "examples", "monolith", "tests", "tools")
      for path in (_ROOT / folder).rglob("*.py")
      if _NEW_IN_PYTHON.search(path.read_text(encoding="utf-8"))
    }

    self.assertEqual(found, set(_MAY_NAME_NEW))


if __name__ == "__main__":
  unittest.main()
