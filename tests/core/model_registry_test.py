"""Tests of `monolith.core.model_registry` and `monolith.core.model_imports`.

Covers `monolith.core.base_model_params`, too.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

from monolith.core import base_layer, base_model_params, model_imports, model_registry

_REGISTRATION = """
from monolith.core import base_layer, base_model_params, model_registry

@model_registry.RegisterSingleTaskModel
class {name}(base_model_params.SingleTaskModelParams):
  def task(self):
    return base_layer.BaseLayer.params().set(name='{name} task')
"""


def _make_class(name, module):
  return type(
    name,
    (base_model_params.SingleTaskModelParams,),
    {
      "__module__": module,
      "task": lambda self: base_layer.BaseLayer.params().set(name=f"{name} task"),
    },
  )


class ModelRegistryTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    patch = mock.patch.dict(model_registry._registry, clear=True)
    patch.start()
    self.addCleanup(patch.stop)
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.root = pathlib.Path(folder.name)
    path = mock.patch.object(sys, "path", [folder.name, *sys.path])
    path.start()
    self.addCleanup(path.stop)
    modules = mock.patch.dict(sys.modules)
    modules.start()
    self.addCleanup(modules.stop)

  def _write(self, name, text):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.parents:
      if folder == self.root:
        break
      (folder / "__init__.py").touch()
    path.write_text(textwrap.dedent(text))

  def test_keys(self):
    cls = _make_class("A", "monolith.tasks.foo.params.bar")
    self.assertIs(model_registry.RegisterSingleTaskModel(cls), cls)
    self.assertEqual(
      model_registry.GetAllRegisteredClasses(),
      {"monolith.tasks.foo.params.bar.A": cls, "foo.bar.A": cls},
    )
    self.assertIs(model_registry.GetClass("foo.bar.A"), cls)
    self.assertEqual(model_registry.GetParams("foo.bar.A").name, "A task")

  def test_equal_keys_make_one_entry(self):
    cls = _make_class("A", "mine")
    model_registry.RegisterSingleTaskModel(cls)
    self.assertEqual(model_registry.GetAllRegisteredClasses(), {"mine.A": cls})

  def test_wrong_class(self):
    class NotParams:
      pass

    with self.assertRaisesRegex(TypeError, "^src_cls NotParams is not a SingleTaskModelParams!$"):
      model_registry.RegisterSingleTaskModel(NotParams)

  def test_duplicate(self):
    first = _make_class("A", "monolith.tasks.foo")
    model_registry.RegisterSingleTaskModel(first)
    with self.assertRaisesRegex(
      ValueError, r"^Duplicate model registered for key monolith.tasks.foo.A: monolith.tasks.foo.A$"
    ):
      model_registry.RegisterSingleTaskModel(_make_class("A", "monolith.tasks.foo"))
    with self.assertRaisesRegex(ValueError, r"^Duplicate model registered for key foo.A: foo.A$"):
      model_registry.RegisterSingleTaskModel(_make_class("A", "foo"))
    self.assertIs(model_registry.GetClass("foo.A"), first)

  def test_empty_registry_warns(self):
    with self.assertLogs("absl", level="WARNING"):
      self.assertEqual(model_registry.GetAllRegisteredClasses(), {})

  def test_class_is_imported(self):
    self._write("registered_tasks.py", _REGISTRATION.format(name="Mine"))
    self.assertEqual(model_registry.GetParams("registered_tasks.Mine").name, "Mine task")

  def test_unknown_class_suggests_the_nearest(self):
    self._write("registered_tasks.py", _REGISTRATION.format(name="Mine"))
    with self.assertLogs("absl", level="INFO") as logs, self.assertRaises(LookupError) as caught:
      model_registry.GetClass("registered_tasks.Mind")
    self.assertEqual(
      str(caught.exception),
      "Model registered_tasks.Mind not found from list of above known models. "
      "Did you mean: registered_tasks.Mine?",
    )
    self.assertTrue(any("registered_tasks.Mine" in r.getMessage() for r in logs.records))

  def test_unknown_module_suggests_the_nearest(self):
    model_registry.RegisterSingleTaskModel(_make_class("Mine", "registered_tasks"))
    with self.assertRaisesRegex(
      LookupError,
      "^Could not find any valid import paths for module registred_tasks. .*"
      r"Did you mean: registered_tasks\.Mine\?$",
    ):
      model_registry.GetClass("registred_tasks.Mine")

  def test_main_module(self):
    self._write(
      "script.py",
      _REGISTRATION.format(name="Mine")
      + "\nassert model_registry.GetParams('__main__.Mine').name == 'Mine task'\n",
    )
    repository = pathlib.Path(__file__).absolute().parents[2]
    subprocess.run(
      [sys.executable, str(self.root / "script.py")],
      check=True,
      env={**os.environ, "PYTHONPATH": str(repository)},
    )

  def test_import_params_errors(self):
    with self.assertRaisesRegex(ValueError, "^Invalid model name nodot$"):
      model_imports.ImportParams("nodot")
    with self.assertRaises(LookupError) as caught:
      model_imports.ImportParams("no_such_module.X")
    self.assertEqual(
      str(caught.exception),
      "Could not find any valid import paths for module no_such_module. Check the logs above to "
      "see if there were errors importing the module, and make sure the relevant params files are "
      "linked into the binary.",
    )
    self.assertIsInstance(caught.exception.__cause__, ImportError)
    self.assertFalse(model_imports.ImportParams("no_such_module.X", require_success=False))

  def test_other_exceptions_of_a_module_propagate(self):
    self._write("broken_task.py", "raise RuntimeError('inside')")
    with self.assertRaisesRegex(RuntimeError, "^inside$"):
      model_imports.ImportParams("broken_task.X")

  def test_task_dirs(self):
    self._write("roots/foo/params/bar.py", _REGISTRATION.format(name="Mine"))
    self.assertTrue(
      model_imports.ImportParams("foo.bar.Mine", task_root="roots", task_dirs=("zoo", "foo"))
    )
    self.assertIn("roots.foo.bar.Mine", model_registry._registry)

  def test_import_all_params(self):
    self._write("roots/foo/params/bar.py", _REGISTRATION.format(name="Mine"))
    self.assertFalse(model_imports.ImportAllParams())
    with self.assertRaises(LookupError) as caught:
      model_imports.ImportAllParams("roots", ("nothing",), require_success=True)
    self.assertEqual(
      str(caught.exception),
      "Could not import any task params. Make sure task params are linked into the binary.",
    )
    self.assertTrue(model_imports.ImportAllParams("roots", ("nothing", "foo"), True))
    self.assertIn("roots.foo.params.bar.Mine", model_registry._registry)


if __name__ == "__main__":
  unittest.main()
