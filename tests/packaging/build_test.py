"""The build: clear errors, the same ops in sources and library, incremental rebuilds."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run_build(patch: str) -> subprocess.CompletedProcess:
  """Runs the build in a process whose modules a few lines have changed before."""
  program = (
    "import pathlib, subprocess, sys\n"
    f"sys.argv = ['native_build.py']; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
    f"import native_build\n{patch}\nsys.exit(native_build.main())"
  )
  return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")


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

  def test_the_checkout_may_have_a_space_in_its_path(self):
    program = (
      "import pathlib, shlex, native_build as b; "
      "tools = b.Toolchain('c++', 'protoc', 'python', pathlib.Path('/a checkout/tf'), '2.21.0'); "
      "print(shlex.split(b._server_libs(tools))[-1])"
    )
    process = subprocess.run(
      [sys.executable, "-c", program], cwd=ROOT / "tools", capture_output=True, text=True
    )
    self.assertEqual(process.stdout, "-Wl,-rpath,/a checkout/tf\n", process.stderr)


class BuildErrorsTest(unittest.TestCase):
  def test_missing_compiler_is_one_sentence(self):
    process = _run_build("native_build.os.environ['CXX'] = 'no-such-compiler'")

    self.assertEqual(process.returncode, 1)
    self.assertEqual(len(process.stderr.strip().splitlines()), 1)
    self.assertIn("No C++17 compiler found (no-such-compiler)", process.stderr)

  def _build_with(self, patch: str) -> str:
    process = _run_build(patch)
    self.assertEqual(process.returncode, 1)
    self.assertEqual(len(process.stderr.strip().splitlines()), 1, process.stderr)
    return process.stderr

  def test_wrong_tensorflow_is_one_sentence(self):
    for found in ("2.14.1", "2.22.0"):
      message = self._build_with(f"native_build._tensorflow_version = lambda folder: {found!r}")
      self.assertIn(
        f"Monolith builds against TensorFlow 2.15 to 2.21, found {found}: pip ", message
      )

  def test_wrong_protobuf_is_one_sentence(self):
    for tensorflow, found, wanted in (
      ("2.15.1", "5.29.5", ">=3.20.3,<5"),
      ("2.21.0", "6.30.2", ">=6.31.1,<8"),
      ("2.21.0", "8.0.0", ">=6.31.1,<8"),
    ):
      message = self._build_with(
        f"native_build._tensorflow_version = lambda folder: {tensorflow!r}\n"
        f"native_build.importlib.metadata.version = lambda name: {found!r}"
      )
      self.assertRegex(
        message,
        rf"^error: Monolith for TensorFlow {tensorflow[:4]} needs protobuf{wanted}, but .* has "
        rf"{found}: pip install 'protobuf{wanted}'\.$",
      )

  def test_wrong_protoc_is_one_sentence(self):
    message = self._build_with(
      "native_build._tensorflow_version = lambda folder: '2.20.0'\n"
      "native_build._check_protobuf = lambda version: None\n"
      "native_build.shutil.which = lambda name, **kw: name\n"
      "class Done: stdout = 'libprotoc 21.12'; returncode = 0\n"
      "subprocess.run = lambda *args, **kwargs: Done"
    )
    self.assertIn("protoc is version 21.12, but TensorFlow 2.20 needs 28.3: pip install ", message)

  def test_a_wrong_protoc_beside_python_does_not_hide_the_right_one(self):
    # As where pip builds for the system's Python, beside which the distribution's protoc lies.
    process = _run_build(
      "import tensorflow_versions\n"
      "native_build.shutil.which = lambda name, path=None: path + '/' + name\n"
      "native_build.os.environ['PATH'] = '/of-pip'\n"
      "class Done: returncode = 0\n"
      "def run(command, **kwargs):\n"
      "  Done.stdout = 'libprotoc ' + ('28.3' if command[0] == '/of-pip/protoc' else '21.12')\n"
      "  return Done\n"
      "subprocess.run = run\n"
      "print(native_build._find_protoc(tensorflow_versions.VERSIONS['2.20']))\n"
      "sys.exit(0)"
    )
    self.assertEqual(process.stdout, "/of-pip/protoc\n", process.stderr)

  def test_missing_libraries_of_cpp_programs_are_one_sentence(self):
    for option, name in (("--cpp-tests", "libgtest-dev"), ("--benchmarks", "libbenchmark-dev")):
      message = self._build_with(
        f"sys.argv.append({option!r})\nnative_build._has_header = lambda tools, name: False"
      )
      self.assertRegex(message, rf"^error: The C\+\+ .*: sudo apt-get install {name}\)\.$")

  def test_missing_tensorflow_is_one_sentence(self):
    message = self._build_with("native_build.importlib.util.find_spec = lambda name: None")
    self.assertIn(
      "TensorFlow is needed to build Monolith but is not installed: pip install ", message
    )

  def test_wrong_python_is_one_sentence(self):
    message = self._build_with("sys.version_info = (3, 14, 0)")
    self.assertIn("Monolith needs Python 3.9 to 3.13", message)


class GpuKernelsTest(unittest.TestCase):
  """Kernels take minutes, and need a compiler that many have for other things."""

  def _chosen(self, *, gpu: bool, asked: str | None = None, built: bool = False) -> str:
    with tempfile.TemporaryDirectory() as folder:
      root, gpu_device = pathlib.Path(folder), pathlib.Path(folder, "nvidia0")
      (root / "monolith/native_training/runtime/ops").mkdir(parents=True)
      library = root / "monolith/native_training/runtime/ops/libmonolith_cuda.so"
      for path in [gpu_device] * gpu + [library] * built:
        path.touch()
      environment = {k: v for k, v in os.environ.items() if k != "MONOLITH_CUDA"}
      if asked is not None:
        environment["MONOLITH_CUDA"] = asked
      process = subprocess.run(
        [
          sys.executable,
          "-c",
          "import pathlib, native_build\n"
          f"native_build.ROOT = pathlib.Path({folder!r})\n"
          f"native_build.GPU_DEVICE = {str(gpu_device)!r}\n"
          "native_build.find_nvcc = lambda: 'nvcc'\n"
          "chosen = native_build._find_optional_libraries(cuda_required=False)\n"
          "print(native_build.CUDA_LIBRARY in chosen)",
        ],
        cwd=ROOT / "tools",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
      )
      return process.stdout.strip() + process.stderr.strip()[-300:]

  def test_they_are_compiled_where_there_is_a_gpu(self):
    self.assertTrue(self._chosen(gpu=True).endswith("True"))
    self.assertTrue(self._chosen(gpu=True, asked="0").endswith("False"))

  def test_elsewhere_they_are_compiled_where_asked_and_left_out_with_a_line(self):
    left_out = self._chosen(gpu=False)
    self.assertIn("libmonolith_cuda.so is left out: there is no GPU", left_out)
    self.assertTrue(left_out.endswith("False"))
    self.assertTrue(self._chosen(gpu=False, asked="1").endswith("True"))

  def test_a_library_that_was_asked_for_once_follows_its_sources(self):
    self.assertTrue(self._chosen(gpu=False, built=True).endswith("True"))

  def test_another_value_is_refused(self):
    self.assertIn("MONOLITH_CUDA is 'yes', want 0 or 1.", self._chosen(gpu=True, asked="yes"))


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
    # Ninja only says what it would do. Let loose on a checkout that is not up to date, it would
    # compile for ten minutes before this fails, or passes although the server was compiled.
    process = _run_build(
      "run = subprocess.run\n"
      "def ask(command, **kwargs):\n"
      "  if pathlib.Path(command[0]).name == 'ninja':\n"
      "    print('asking Ninja', flush=True)\n"
      "    command = [command[0], '-n', *command[1:]]\n"
      "  return run(command, **kwargs)\n"
      "subprocess.run = ask"
    )

    self.assertEqual(process.returncode, 0, process.stderr)
    asked = process.stdout.count("asking Ninja")
    # The part that all versions share, the op library, and the server where it can be built.
    self.assertIn(asked, (2, 4), process.stdout)
    self.assertEqual(process.stdout.count("no work to do"), asked, process.stdout[-3000:])


if __name__ == "__main__":
  unittest.main()
