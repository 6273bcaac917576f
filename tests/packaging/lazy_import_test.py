"""`import monolith` is light: no TensorFlow, no op library, no flag; aliases load on demand.

Covers `monolith/_lazy_imports.py`, `monolith/_lazy_api.py`, `ops/gen_monolith_ops.py` and
`ops/gen_monolith_ops_base.py`.
"""

import gc
import importlib.metadata
import subprocess
import sys
import types
import unittest

import pytest

import monolith
from monolith import _lazy_imports

pytestmark = pytest.mark.thorough


def _run(program: str) -> str:
  return subprocess.run(
    [sys.executable, "-c", program], check=True, capture_output=True, text=True
  ).stdout.strip()


class LazyImportTest(unittest.TestCase):
  def test_importing_the_package_loads_neither_tensorflow_nor_flags(self):
    program = (
      "import sys, monolith, monolith.path_utils, monolith.utils\n"
      "from absl import flags\n"
      "known = set(flags.FLAGS)\n"
      "print('tensorflow' in sys.modules, [f for f in known if 'monolith' in f])"
    )
    self.assertEqual(_run(program), "False []")

  def test_tensorflow_is_patched_when_it_is_imported_later(self):
    program = (
      "import monolith\n"
      "from tensorflow.python.training import monitored_session as m\n"
      "print([e.__name__ for e in m._PREEMPTION_ERRORS])"
    )
    self.assertEqual(_run(program), "['AbortedError']")

  def test_tensorflow_is_patched_when_it_was_imported_before(self):
    program = (
      "from tensorflow.python.training import monitored_session as m\n"
      "import monolith\n"
      "print([e.__name__ for e in m._PREEMPTION_ERRORS])"
    )
    self.assertEqual(_run(program), "['AbortedError']")

  def test_alias_is_the_same_module_under_both_names(self):
    program = (
      "import monolith.layers, monolith.layers.layer_ops as by_alias\n"
      "import monolith.native_training.layers as real\n"
      "import monolith.native_training.layers.layer_ops as ops\n"
      "print(monolith.layers is real, by_alias is ops, ops.__name__, ops.__spec__.name)"
    )
    name = "monolith.native_training.layers.layer_ops"
    self.assertEqual(_run(program), f"True True {name} {name}")

  def test_garbage_is_collected_again_after_an_import(self):
    for was_enabled in (True, False):
      (gc.enable if was_enabled else gc.disable)()
      try:
        with self.assertRaises(ImportError), _lazy_imports._garbage_kept():
          self.assertFalse(gc.isenabled())
          raise ImportError
        self.assertEqual(gc.isenabled(), was_enabled)
      finally:
        gc.enable()

  def test_importing_the_ops_twice_registers_them_once(self):
    program = (
      "import importlib\n"
      "from monolith.native_training.runtime.ops import gen_monolith_ops as a\n"
      "from monolith.native_training.runtime.ops import gen_monolith_ops_base as b\n"
      "importlib.reload(a)\n"
      "print(a.MonolithTouchedKeySet is b.MonolithTouchedKeySet, callable(a.ffm))"
    )
    self.assertEqual(_run(program), "True True")

  def test_add_module_takes_modules_and_names(self):
    module = types.ModuleType("somewhere.native_model_of_test")
    monolith.add_module(module)
    self.assertIs(sys.modules["monolith.native_model_of_test"], module)

    monolith.add_module("xml.dom")
    self.assertIs(sys.modules["monolith.dom"], sys.modules["xml.dom"])
    with self.assertRaises(ImportError):
      monolith.add_module("no.such.module")

  def test_unknown_attribute(self):
    with self.assertRaisesRegex(AttributeError, "no_such_thing"):
      _ = monolith.no_such_thing


_PUBLISHED = """
import sys
import tensorflow as tf
if sys.argv[1:] == ["with"]:
  import monolith
tf.estimator.Estimator, tf.estimator.RunConfig, tf.estimator.export.ServingInputReceiver
canned = any(".canned." in name for name in sys.modules)
found = {}
for api in (tf.estimator, tf.compat.v1.estimator):
  for module in (api, api.export, api.experimental, getattr(api, "tpu", None)):
    if module is None:
      continue
    star = {}
    exec(f"from {module.__name__} import *", star)
    for names in (dir(module), star):
      for name in names:
        if not name.startswith("_"):
          value = getattr(module, name)
          found[module.__name__, name] = getattr(value, "__module__", None), value.__name__
print(canned, sorted(found.items()))
"""


@unittest.skipUnless(
  importlib.metadata.version("tensorflow").startswith("2.15."), "tf.estimator ended with 2.15"
)
class LazyApiTest(unittest.TestCase):
  def _find_names(self, *args: str) -> tuple[str, str]:
    process = subprocess.run(
      [sys.executable, "-c", _PUBLISHED, *args], check=True, capture_output=True, text=True
    )
    canned, names = process.stdout.strip().split(" ", 1)
    return canned, names

  def test_ready_made_models_are_imported_when_used_and_no_name_is_missing(self):
    canned, names = self._find_names("with")
    plain_canned, plain_names = self._find_names()

    self.assertEqual((canned, plain_canned), ("False", "True"))
    self.assertIn("'DNNClassifier'", names)
    self.assertEqual(names, plain_names)

  def test_unknown_name(self):
    program = (
      "import monolith, tensorflow as tf\n"
      "print(hasattr(tf.estimator, 'NoSuchModel'), hasattr(tf.estimator, 'Estimator'))"
    )
    self.assertEqual(_run(program), "False True")


class LibraryLoadTest(unittest.TestCase):
  def _import_error(self, patch: str) -> str:
    return _run(
      "import monolith.utils\n"
      f"{patch}\n"
      "try:\n"
      "  from monolith.native_training.runtime.ops import gen_monolith_ops\n"
      "except ImportError as error:\n"
      "  print(error)"
    )

  def test_missing_library_is_named(self):
    message = self._import_error(
      "monolith.utils.get_libops_path = lambda name: '/nowhere/' + name.split('/')[-1]"
    )
    self.assertIn("/nowhere/libtfkernel_monolith_ops_for_load.so does not exist", message)

  def test_library_of_another_tensorflow_names_both_versions(self):
    message = self._import_error(
      "from monolith import _install\n"
      "_install._build_info = lambda package: {'TENSORFLOW_VERSION': '2.14.0', 'PROTOBUF': ''}"
    )
    self.assertRegex(
      message, r"compiled for TensorFlow 2\.14\.0, but .* has TensorFlow 2\.\d+\.\d+: compile"
    )


if __name__ == "__main__":
  unittest.main()
