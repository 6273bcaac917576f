"""Modules that moved keep their specified path: it leads to the same module, with the same state.

Covers `core/base_tpu_test.py`, `hooks/ckpt_hooks.py`, `hooks/session_hooks.py`,
`model_export/export_context.py`, `model_export/demo_export.py`, `model_export/demo_predictor.py`
and `model_export/demo_predictor_client.py`.
"""

import importlib
import pathlib
import subprocess
import sys
import unittest

import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import import_layers  # noqa: E402

_NATIVE = "monolith.native_training."
_OF_TPU = "monolith.tasks.base_tpu_test"  # ended with TensorFlow 2.15
# Specified path -> where the module is.
_DOORS = {
  "monolith.core.base_tpu_test": _OF_TPU,
  _NATIVE + "hooks.ckpt_hooks": _NATIVE + "checkpoints.ckpt_hooks",
  _NATIVE + "hooks.session_hooks": _NATIVE + "graph.session_hooks",
  _NATIVE + "model_export.demo_export": _NATIVE + "demos.export",
  _NATIVE + "model_export.demo_predictor": _NATIVE + "demos.predictor",
  _NATIVE + "model_export.demo_predictor_client": _NATIVE + "demos.predictor_client",
  _NATIVE + "model_export.export_context": _NATIVE + "graph.export_context",
}


class DoorsTest(unittest.TestCase):
  def test_a_specified_path_leads_to_the_module_itself(self):
    for path, place in _DOORS.items():
      package, _, name = (path).rpartition(".")
      if place == _OF_TPU and not hasattr(tf, "estimator"):
        with self.assertRaisesRegex(ImportError, "TPUEstimator"):
          importlib.import_module(path)
        continue
      module = importlib.import_module(place)

      self.assertIs(importlib.import_module(path), module)
      self.assertIs(getattr(importlib.import_module(package), name), module)

  def test_the_alias_of_a_package_leads_there_too(self):
    from monolith.model_export import export_context
    from monolith.native_training.graph import export_context as module

    self.assertIs(export_context, module)

  def test_every_door_is_here(self):
    self.assertEqual(import_layers.find_doors(import_layers.find_modules()), _DOORS)

  def test_a_program_starts_at_its_specified_path(self):
    program = _NATIVE + "model_export.demo_predictor_client"
    done = subprocess.run(
      [sys.executable, "-m", program, "--help"], capture_output=True, text=True, check=False
    )
    self.assertIn("--server: host:port of the server's gRPC", done.stdout)


if __name__ == "__main__":
  unittest.main()
