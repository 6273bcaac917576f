"""The build: clear errors, the same ops in sources and library, incremental rebuilds."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = [sys.executable, str(ROOT / "tools/native_build.py")]


def _build(**environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    BUILD, env={**os.environ, **environment}, capture_output=True, text=True, cwd="/"
  )


class FlagsTest(unittest.TestCase):
  def test_all_builds_use_the_same_rules_of_arithmetic(self):
    program = "import platform; platform.machine = lambda: 'x86_64'; import native_build as b; "
    process = subprocess.run(
      [sys.executable, "-c", program + "print(b.COMMON_FLAGS)"],
      cwd=ROOT / "tools",
      capture_output=True,
      text=True,
      check=True,
    )
    flags = set(re.findall(r"-f\S*(?:math|fp)\S*", process.stdout))
    self.assertEqual(flags, {"-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"})
    bazel = (ROOT / ".bazelrc").read_text() + (ROOT / "BUILD.bazel").read_text()
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for flag in flags:
      self.assertIn(flag, bazel)
      self.assertIn(flag, cmake)


class BuildErrorsTest(unittest.TestCase):
  def test_missing_compiler_is_one_sentence(self):
    process = _build(CXX="no-such-compiler")

    self.assertEqual(process.returncode, 1)
    self.assertEqual(len(process.stderr.strip().splitlines()), 1)
    self.assertIn("No C++17 compiler found (no-such-compiler)", process.stderr)

  def _build_with(self, patch: str) -> str:
    program = (
      f"import sys; sys.argv = ['native_build.py']; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
      f"import native_build\n{patch}\nsys.exit(native_build.main())"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual(process.returncode, 1)
    self.assertEqual(len(process.stderr.strip().splitlines()), 1, process.stderr)
    return process.stderr

  def test_wrong_tensorflow_is_one_sentence(self):
    message = self._build_with("native_build._tensorflow_version = lambda folder: '2.17.0'")
    self.assertIn("Monolith builds against TensorFlow 2.15, found 2.17.0.", message)

  def test_missing_tensorflow_is_one_sentence(self):
    message = self._build_with("native_build.importlib.util.find_spec = lambda name: None")
    self.assertIn("TensorFlow 2.15 is needed to build Monolith but is not installed", message)

  def test_wrong_python_is_one_sentence(self):
    message = self._build_with("sys.version_info = (3, 12, 0)")
    self.assertIn("Monolith needs Python 3.9, 3.10 or 3.11", message)


class RegisteredOpsTest(unittest.TestCase):
  def test_library_registers_what_the_sources_declare(self):
    from monolith.native_training.runtime.ops import gen_monolith_ops

    sources = (ROOT / "monolith/native_training/runtime/ops").rglob("*.cc")
    declared = set()
    for source in sources:
      declared |= set(re.findall(r'REGISTER_OP\("(\w+)"\)', source.read_text()))

    self.assertTrue(declared)
    self.assertEqual({name for name in declared if not hasattr(gen_monolith_ops, name)}, set())

  def test_nothing_is_rebuilt_when_nothing_changed(self):
    process = _build()

    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertIn("no work to do", process.stdout)


if __name__ == "__main__":
  unittest.main()
