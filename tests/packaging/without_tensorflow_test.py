"""`MONOLITH_TENSORFLOW=none pip install .`: tables, without all that TensorFlow brings."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest
import venv
import zipfile

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_USE = """
import sys
import numpy as np
import monolith.table
table = monolith.table.HashTable(2, "sgd", "zeros", learning_rate=1.0)
table.update([7], [[1, 2]])
print(monolith.table.__file__)
print(table.lookup([7, 9]).tolist(), table.save(sys.argv[1] + "/saved"))
for name in sys.argv[2:]:
  try:
    __import__(name)
    print(name, "was imported")
  except ImportError as error:
    print(error)
try:
  monolith.HashTable
except ImportError as error:
  print(error)
"""
_DOORS = ("monolith.keras", "monolith.entry", "monolith.native_training.native_model")


class WithoutTensorFlowTest(unittest.TestCase):
  def test_a_package_without_tensorflow_needs_numpy_alone(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    source = folder / "source"
    # Compiled objects go along, so that nothing is compiled again; so does what an earlier build
    # has left beside the sources for a TensorFlow.
    ignore = shutil.ignore_patterns("__pycache__", "cpp-*", "tf2.*", "bazel-*")
    for name in ("monolith", "idl", "tools", "build", "third_party"):
      shutil.copytree(_ROOT / name, source / name, ignore=ignore, symlinks=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
      shutil.copy2(_ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = subprocess.run(
      [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, "."],
      cwd=source,
      env={**os.environ, "MONOLITH_TENSORFLOW": "none"},
      capture_output=True,
      text=True,
    )
    self.assertEqual(made.returncode, 0, made.stderr)
    (wheel,) = folder.glob("monolith_recsys-*.whl")
    self.assertIn("+notf-py3-none-", wheel.name)

    with zipfile.ZipFile(wheel) as archive:
      names = archive.namelist()
      (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    self.assertEqual(re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.M), ["numpy>=1.23.5"])
    self.assertEqual(
      set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M)), {"torch", "jax", "cuda"}
    )
    libraries = {name.rpartition("/")[2] for name in names if name.endswith(".so")}
    self.assertIn("libmonolith_engine.so", libraries)
    self.assertLessEqual(libraries, {"libmonolith_engine.so", "libmonolith_cuda.so"})
    self.assertEqual([name for name in names if "_pb2" in name or "_build_info" in name], [])

    # NumPy comes from this environment, alone.
    venv.create(folder / "env", with_pip=False)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    for package in pathlib.Path(np.__file__).parents[1].glob("numpy*"):
      (site / package.name).symlink_to(package)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    used = subprocess.run(
      [folder / "env/bin/python", "-c", _USE, folder, *_DOORS],
      cwd=folder,
      env=environment,
      capture_output=True,
      text=True,
    )

    self.assertEqual(used.returncode, 0, used.stderr)
    where, rows, *said = used.stdout.strip().splitlines()
    self.assertTrue(where.startswith(str(folder / "env")), where)
    self.assertEqual(rows, "[[-1.0, -2.0], [0.0, 0.0]] 1")
    doors = (*_DOORS, "monolith.keras")
    self.assertEqual(len(said), len(doors))
    for door, text in zip(doors, said):
      name = "monolith.native_training.entry" if door == "monolith.entry" else door
      self.assertRegex(text, rf"^{re.escape(name)} needs TensorFlow, .*: pip install .*without\.$")


if __name__ == "__main__":
  unittest.main()
