"""The project that builds Horovod: its cache, what it refuses, and the extra that names it."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BACKEND = ROOT / "third_party/horovod/horovod_backend.py"
WHEEL = "horovod-0.28.1-cp311-cp311-linux_x.whl"
EXTENSION = "horovod/tensorflow/mpi_lib.cpython-311-x-linux-gnu.so"

_CALL = """
import sys
import horovod_backend
print(len(horovod_backend.get_requires_for_build_wheel()))
sys.stdout.flush()
print(horovod_backend.build_wheel(sys.argv[1]))
"""

# Takes the place of pip: notes that it was called, and leaves a wheel behind.
_PIP = """
import os, pathlib, signal, sys, tarfile, zipfile
SOURCE = pathlib.Path("horovod-0.28.1/horovod/tensorflow/xla_mpi_ops.cc")
if sys.argv[1] == "download":
  assert sys.argv[-1] == "horovod==0.28.1", sys.argv
  folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
  (folder / "new" / SOURCE.parent).mkdir(parents=True)
  (folder / "new" / SOURCE).write_text("#if TENSORFLOW_VERSION >= 2006000000\\n#endif\\n")
  with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
    archive.add(folder / "new" / SOURCE.parts[0], SOURCE.parts[0])
  sys.exit()
source = pathlib.Path(sys.argv[-1]).parent / SOURCE
guard, _ = source.read_text().splitlines()
assert guard == "#if TENSORFLOW_VERSION >= 2006000000 && TENSORFLOW_VERSION < 2016000000", guard
print("pip", *sys.argv[1:])
assert "PEP517_BACKEND_PATH" not in os.environ and "_PYPROJECT_HOOKS_BACKEND_PATH" not in os.environ
assert "-include stdexcept" in os.environ["CXXFLAGS"]
folder = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
with zipfile.ZipFile(folder / {wheel!r}, "w") as archive:
  archive.writestr({member!r}, os.environ["HOROVOD_WITH_TENSORFLOW"])
sys.stdout.flush()
{then}
"""


def _load(path: pathlib.Path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class BackendTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.cache = self.folder / "cache/monolith"
    self.out = self.folder / "out"
    self.out.mkdir()

  def build(self, member: str = EXTENSION, then: str = "") -> subprocess.CompletedProcess:
    """Does what pip does with the backend, with another pip for the backend's own use."""
    pip = self.folder / "path/pip/__main__.py"
    pip.parent.mkdir(parents=True, exist_ok=True)
    (pip.parent / "__init__.py").touch()
    pip.write_text(_PIP.format(wheel=WHEEL, member=member, then=then))
    path = os.pathsep.join([str(pip.parent.parent), str(BACKEND.parent)])
    backend_path = str(BACKEND.parent)  # as pip's hooks tell it, older and newer
    environment = {
      "PEP517_BACKEND_PATH": backend_path,
      "_PYPROJECT_HOOKS_BACKEND_PATH": backend_path,
      "PYTHONPATH": path,
      "XDG_CACHE_HOME": str(self.folder / "cache"),
    }
    return subprocess.run(
      [sys.executable, "-c", _CALL, str(self.out)],
      env={**os.environ, **environment},
      capture_output=True,
      text=True,
    )

  def test_a_cached_wheel_is_taken_without_building(self):
    first = self.build()
    self.assertEqual(first.returncode, 0, first.stderr)
    requirements, called, name = first.stdout.splitlines()
    self.assertGreater(int(requirements), 0)
    self.assertRegex(
      called, r"^pip wheel .*--no-cache-dir .*--no-build-isolation .*/horovod-0\.28\.1$"
    )
    self.assertEqual(name, WHEEL)
    (out,) = self.out.iterdir()
    built = out.read_bytes()
    out.unlink()

    # A pip that is called again fails.
    second = self.build(then="sys.exit(1)")
    self.assertEqual(second.returncode, 0, second.stderr)
    self.assertEqual(second.stdout.splitlines(), ["0", WHEEL])
    self.assertEqual((self.out / WHEEL).read_bytes(), built)

    with zipfile.ZipFile(self.out / WHEEL) as archive:
      self.assertEqual(archive.read(EXTENSION), b"1")
    self.assertEqual([path.name for path in self.cache.glob("*/*")], [WHEEL])

  def test_an_interrupted_build_leaves_nothing_in_the_cache(self):
    for then, message in (
      ("os.kill(os.getppid(), signal.SIGKILL)", ""),
      ("os.kill(os.getpid(), signal.SIGKILL)", "error: building Horovod 0.28.1 failed"),
    ):
      process = self.build(then=then)
      self.assertNotEqual(process.returncode, 0)
      self.assertIn(message, process.stderr)
      self.assertEqual(list(self.cache.glob("*/*")), [])
      self.assertEqual(list(self.out.iterdir()), [])

    process = self.build()
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertNotEqual(process.stdout.splitlines()[0], "0")

  def test_a_wheel_without_tensorflow_is_refused(self):
    process = self.build(member="horovod/torch/mpi_lib_v2.cpython-311-x-linux-gnu.so")

    self.assertEqual(process.returncode, 1)
    self.assertEqual(
      process.stderr.strip(),
      f"error: Horovod 0.28.1 was built without its TensorFlow part, {WHEEL}.",
    )
    self.assertEqual(list(self.cache.glob("*/*")), [])
    self.assertEqual(list(self.out.iterdir()), [])

  def test_a_cache_that_cannot_be_written_is_done_without(self):
    (self.folder / "cache").write_text("not a folder")
    process = self.build()

    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertIn("not kept for the next time", process.stderr)
    self.assertTrue((self.out / WHEEL).exists())

  def test_versions_are_those_of_the_package(self):
    backend = _load(BACKEND)
    os.environ["XDG_CACHE_HOME"] = str(self.folder)
    self.addCleanup(os.environ.pop, "XDG_CACHE_HOME")
    required = backend.get_requires_for_build_wheel()[-1]
    self.assertIn(required, _load(ROOT / "tools/requirements.py").requirements(["build"]))
    extra = _load(ROOT / "tools/requirements.py").requirements
    os.environ["MONOLITH_PORTABLE_WHEEL"] = "1"
    self.addCleanup(os.environ.pop, "MONOLITH_PORTABLE_WHEEL")
    self.assertEqual(extra(["horovod"]), [f"horovod=={backend.VERSION}"])


_PRINT_METADATA = """
import pathlib, sys
from setuptools import build_meta
folder = sys.argv[1]
name = build_meta.prepare_metadata_for_build_wheel(folder)
print(pathlib.Path(folder, name, "METADATA").read_text())
"""


class ExtraTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    # Copies the sources of the metadata elsewhere: setuptools writes into the source tree.
    self.source = pathlib.Path(os.environ["TEST_TMPDIR"]) / "a source"
    for name in ("tools", "third_party/horovod"):
      # Tests beside this one write byte code, through files that are soon gone.
      ignore = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / name, self.source / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md"):
      shutil.copy2(ROOT / name, self.source)
    # It has the version.
    (self.source / "monolith").mkdir()
    shutil.copy2(ROOT / "monolith/__init__.py", self.source / "monolith")

  def find_requirements(self, portable: str) -> list:
    """Returns what the package's metadata requires for the extra."""
    process = subprocess.run(
      [sys.executable, "-c", _PRINT_METADATA, os.environ["TEST_TMPDIR"]],
      cwd=self.source,
      env={**os.environ, "MONOLITH_PORTABLE_WHEEL": portable},
      capture_output=True,
      text=True,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", process.stdout, re.MULTILINE))
    self.assertEqual(
      extras,
      {
        "tpu",
        "horovod",
        "torch",
        "jax",
        "kafka",
        "parquet",
        "cuda",
        "serving",
        "realtime",
        "report",
        "debugging",
        "docs",
        "test",
        "lint",
      },
    )
    return re.findall(r"^Requires-Dist: (.*?) ?; extra == .horovod.$", process.stdout, re.MULTILINE)

  def test_from_the_checkout(self):
    (required,) = self.find_requirements(portable="")
    name, url = required.split("@")
    self.assertEqual(name.strip(), "horovod")
    self.assertEqual(url.strip(), (self.source.resolve() / "third_party/horovod").as_uri())

  def test_portable(self):
    self.assertEqual(self.find_requirements(portable="1"), ["horovod==0.28.1"])


if __name__ == "__main__":
  unittest.main()
