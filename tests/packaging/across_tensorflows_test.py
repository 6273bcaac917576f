"""A checkpoint and an export that one TensorFlow wrote are used with another one.

`golden/MONOLITH/tfVERSION` is what `trained_model.py golden` wrote with these two versions: a
release adds its own and keeps the others. The environment of another TensorFlow is taken where the
checkout has one, as `make build TENSORFLOW=2.21` makes it.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import numpy as np
import pytest

import monolith
from monolith import _install

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
_PROGRAM = "tests.packaging.trained_model"
_OPS = "monolith/native_training/runtime/ops"
_LIBRARY = "libtfkernel_monolith_ops_for_load.so"
_BUILT = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*.so", "_build_info.py", "__pycache__")


def _run(
  command: str,
  folder: pathlib.Path,
  python: str = sys.executable,
  root: pathlib.Path = _ROOT,
) -> dict[str, Any]:
  """Returns the predictions that a process of `trained_model` prints."""
  process = subprocess.run(
    [python, "-m", _PROGRAM, command, str(folder)],
    cwd=root,
    env={**os.environ, "PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
  )
  if process.returncode:
    raise AssertionError(f"{command} with {python} failed:\n{process.stderr[-5000:]}")
  return json.loads(process.stdout.splitlines()[-1])


def _minor(release: str) -> str:
  return ".".join(release.split(".")[:2])


def _find_other() -> tuple[str, str] | None:
  """Returns Python and TensorFlow of an environment of another version that has a library."""
  own = _minor(_install._version_of("tensorflow"))
  for environment in sorted(_ROOT.glob(".venv*")):
    for found in environment.glob("lib/python3*/site-packages/tensorflow-*.dist-info"):
      release = found.name[len("tensorflow-") : -len(".dist-info")]
      if _minor(release) != own and (_ROOT / f"build/tf{_minor(release)}" / _LIBRARY).exists():
        return str(environment / "bin/python"), release
  return None


def _make_tree(root: pathlib.Path, release: str) -> None:
  """Writes the package as it is built for a release; a checkout has one build at a time."""
  ignored = shutil.ignore_patterns(*_BUILT)
  for name in ("monolith", "idl"):
    shutil.copytree(_ROOT / name, root / name, ignore=ignored)
  built = _ROOT / f"build/tf{_minor(release)}"
  shutil.copytree(built / "python", root, dirs_exist_ok=True)
  shutil.copy(built / _LIBRARY, root / _OPS)
  (root / _OPS / "_build_info.py").write_text(f'TENSORFLOW_VERSION = "{release}"\n', "utf-8")
  program = pathlib.Path(*_PROGRAM.split(".")).with_suffix(".py")
  (root / program).parent.mkdir(parents=True)
  shutil.copy(_ROOT / program, root / program)


class _Test(unittest.TestCase):
  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._folder = pathlib.Path(folder.name)

  def _check(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    self.assertEqual(found["step"], wanted["step"])
    self.assertGreater(np.std(wanted["of_checkpoint"]), 0.05, "the model has learned nothing")
    for name in ("of_checkpoint", "of_export"):
      np.testing.assert_allclose(found[name], wanted[name], atol=1e-5, err_msg=name)


class GoldenTest(_Test):
  def test_files_of_each_version_are_used(self):
    versions = sorted(_GOLDEN.glob("*/tf*"))
    self.assertIn(monolith.__version__, [golden.parent.name for golden in versions])
    for golden in versions:
      with self.subTest(golden.relative_to(_GOLDEN)):
        copy = self._folder / golden.parent.name / golden.name
        shutil.copytree(golden, copy)
        wanted = json.loads((golden / "predictions.json").read_text("utf-8"))

        self._check(_run("use", copy), wanted)

  def test_files_of_a_version_are_not_written_again(self):
    written = (
      self._folder / monolith.__version__ / f"tf{_minor(_install._version_of('tensorflow'))}"
    )
    written.mkdir(parents=True)

    with self.assertRaisesRegex(AssertionError, "FileExistsError"):
      _run("golden", self._folder)


@pytest.mark.thorough
class OtherEnvironmentTest(_Test):
  def test_files_are_used_there_and_back(self):
    other = _find_other()
    if other is None:
      self.skipTest("no environment of another TensorFlow: make build TENSORFLOW=2.21")
    python, release = other
    root = self._folder / "tree"
    _make_tree(root, release)
    ours, theirs = self._folder / "ours", self._folder / "theirs"

    trained_here, trained_there = _run("train", ours), _run("train", theirs, python, root)

    self._check(_run("use", theirs), trained_there)
    self._check(_run("use", ours, python, root), trained_here)


if __name__ == "__main__":
  unittest.main()
