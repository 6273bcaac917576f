"""The programs that `bazel run` starts, as BUILD.bazel declares them.

A BUILD file is Python with functions for rules: it is executed here with functions that note what
they are told, and the script of each program is made and run. Bazel itself is not needed.
"""

import builtins
import collections
import os
import pathlib
import subprocess
import sys
import unittest

import pytest
import tensorflow as tf

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import native_build  # noqa: E402


def _load_targets() -> dict[str, dict[str, dict]]:
  """Returns rule name -> target name -> its arguments."""
  targets = collections.defaultdict(dict)

  def glob(include, exclude=()):
    paths = {path for pattern in include for path in ROOT.glob(pattern)}
    paths -= {path for pattern in exclude for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)

  class Rules(dict):
    def __missing__(self, rule):
      if hasattr(builtins, rule):
        raise KeyError(rule)
      return lambda name=None, **kwargs: targets[rule].update({name: kwargs})

  def select(choices):
    return choices["//conditions:default"]

  scope = Rules(glob=glob, load=lambda *args: None, select=select)
  exec(compile((ROOT / "BUILD.bazel").read_text(), "BUILD.bazel", "exec"), scope)
  return targets


class BazelProgramsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.targets = _load_targets()

  def test_programs(self):
    self.assertEqual(set(self.targets["py_binary"]), {"demo", "gpu_runner", "tpu_runner"})

  def test_programs_start(self):
    flags = {"demo": "--num_ratings", "gpu_runner": "--task", "tpu_runner": "--tpu"}
    for name, flag in flags.items():
      with self.subTest(name):
        binary = self.targets["py_binary"][name]
        self.assertEqual(binary["deps"], [":monolith"])
        self.assertEqual(binary["srcs"], [binary["main"]])
        script = self._make(binary["main"])

        result = subprocess.run(
          [sys.executable, script, "--helpshort"],
          cwd=script.parent,
          env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
          capture_output=True,
          text=True,
          check=False,
        )

        if name == "tpu_runner" and not hasattr(tf, "estimator"):
          self.assertIn("exist up to TensorFlow 2.15", result.stderr)
          continue
        # absl ends with 1 after the help that was asked for.
        self.assertIn(f"{flag}: ", result.stdout, result.stderr[-2000:])

  def test_our_sources_are_compiled_with_warnings(self):
    quiet, ours = set(), 0
    for rule in ("cc_library", "cc_binary"):
      for name, target in self.targets[rule].items():
        if any(source.startswith("monolith/") for source in target["srcs"]):
          ours += 1
          self.assertIn("-Wall", target["copts"], name)
          self.assertIn("-Wextra", target["copts"], name)
        if "-w" in target.get("copts", ()):
          quiet.add(name)
          self.assertEqual({s.split("/")[0] for s in target["srcs"]}, {"third_party"}, name)
    self.assertGreaterEqual(ours, 5)
    self.assertEqual(quiet, {"server_parsers"})
    copts = self.targets["cc_binary"][str(native_build.OP_LIBRARY)]["copts"]
    self.assertEqual(copts[copts.index("-include") + 1], str(native_build.DEPRECATIONS))

  def _make(self, output: str) -> pathlib.Path:
    """Runs the rule that makes a file, the way Bazel does."""
    (rule,) = (r for r in self.targets["genrule"].values() if r["outs"] == [output])
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / output
    path.parent.mkdir(parents=True, exist_ok=True)
    command = rule["cmd"].replace("$@", str(path)).replace("$$", "$")
    subprocess.run(["bash", "-c", command], check=True)
    # Python looks for modules beside a script first.
    self.assertFalse((ROOT / output).parent.exists())
    return path


if __name__ == "__main__":
  unittest.main()
