"""Modules that moved keep their specified path: it leads to the same module, with the same state.

Covers `native_training/model_export/export_context.py`.
"""

import importlib
import unittest

_NATIVE = "monolith.native_training."
# Specified path -> where the module is.
_DOORS = {
  "model_export.export_context": "graph.export_context",
}


class DoorsTest(unittest.TestCase):
  def test_a_specified_path_leads_to_the_module_itself(self):
    for path, place in _DOORS.items():
      package, _, name = (_NATIVE + path).rpartition(".")
      module = importlib.import_module(_NATIVE + place)

      self.assertIs(importlib.import_module(_NATIVE + path), module)
      self.assertIs(getattr(importlib.import_module(package), name), module)

  def test_the_alias_of_a_package_leads_there_too(self):
    from monolith.model_export import export_context
    from monolith.native_training.graph import export_context as module

    self.assertIs(export_context, module)


if __name__ == "__main__":
  unittest.main()
