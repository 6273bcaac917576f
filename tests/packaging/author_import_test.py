"""Tests that imports of model authors load no driver, no cluster module, none of their flags."""

import json
import subprocess
import sys
import unittest

_NATIVE = "monolith.native_training."
# Modules that run a training job, or find and talk to other processes.
_FORBIDDEN = (
  "agent_service",
  "native_training.alert",
  "native_training.barrier_ops",
  "native_training.checkpoints",
  "native_training.cluster_manager",
  "native_training.consul",
  "native_training.cpu_training",
  "native_training.distribute",
  "native_training.driver",
  "native_training.estimator",
  "native_training.hooks",
  "native_training.mlp_utils",
  "native_training.net_utils",
  "native_training.runner_utils",
  "native_training.save_utils",
  "native_training.service_discovery",
  "native_training.serving",
  "native_training.sync_hooks",
  "native_training.sync_training_hooks",
  "native_training.yarn_runtime",
  "native_training.zk_utils",
)
_PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
from absl import flags
by_module = flags.FLAGS.flags_by_module_dict()
print(json.dumps({
  "modules": sorted(name for name in sys.modules if name.startswith("monolith.")),
  "flags": {m: sorted(f.name for f in fs) for m, fs in by_module.items() if "monolith" in m},
}))
"""


def _import(*names: str) -> dict:
  """Returns our modules and flags by module, as they are after the imports in a new process."""
  process = subprocess.run(
    [sys.executable, "-c", _PROGRAM, *names], check=True, capture_output=True, text=True
  )
  return json.loads(process.stdout.splitlines()[-1])


def _is_forbidden(module: str) -> bool:
  name = module[len("monolith.") :]
  return any(name == other or name.startswith(other + ".") for other in _FORBIDDEN)


class AuthorImportTest(unittest.TestCase):
  def test_base_model_loads_no_driver_and_defines_no_flag(self):
    loaded = _import("monolith.base_model")

    self.assertIn(_NATIVE + "native_model", loaded["modules"])
    self.assertEqual([m for m in loaded["modules"] if _is_forbidden(m)], [])
    self.assertEqual(loaded["flags"], {})

  def test_other_modules_of_the_author_load_no_driver(self):
    loaded = _import("monolith.entry", "monolith.layers", _NATIVE + "losses", _NATIVE + "model")

    self.assertEqual([m for m in loaded["modules"] if _is_forbidden(m)], [])

  def test_the_driver_still_defines_its_flags(self):
    flags = _import("monolith.estimator")["flags"]
    names = {name for defined in flags.values() for name in defined}

    self.assertLessEqual(
      {"index", "mode", "model_dir", "num_ps", "uuid", "restore_dir", "dataset_use_dataservice"},
      names,
    )
    self.assertIn("monolith_chief_alert_proto", flags[_NATIVE + "cpu_training"])
    self.assertIn("monolith_alert_proto", flags[_NATIVE + "alert.alert_manager"])


if __name__ == "__main__":
  unittest.main()
