"""The wheel works in an empty virtual environment, away from the checkout."""

import os
import pathlib
import shutil
import subprocess
import sys
import unittest
import venv

import pytest

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

_USE_AN_OP = """
import monolith.native_training.runtime.ops.gen_monolith_ops as m
import idl.matrix.proto.example_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
print(m.__file__)
print(len(dir(m)))
print(m.monolith_fused_value_rowids([0, 0, 1, 3]).numpy().tolist())
"""


class WheelTest(unittest.TestCase):
  def test_wheel_works_away_from_the_checkout(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    # A copy, so that setuptools' build folders do not collide with a build in the checkout; the
    # compiled objects go along, so that nothing is compiled again.
    source = folder / "source"
    # Tests beside this one write byte code, through files that are soon gone.
    ignore = shutil.ignore_patterns(
      ".git", ".venv*", "bazel-*", "dist", "cpp-*", ".cache", "__pycache__", ".pytest_cache"
    )
    shutil.copytree(ROOT, source, ignore=ignore, symlinks=True)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
      [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, "."],
      cwd=source,
      check=True,
      capture_output=True,
    )
    wheels = list(folder.glob("monolith_recsys-*.whl"))
    self.assertEqual(len(wheels), 1)
    self.assertRegex(wheels[0].name, r"\+tf2\.\d+-py3-none-(linux|manylinux)\w+\.whl$")

    # The dependencies come from this environment: fetching TensorFlow again proves nothing.
    # So does pip: one of its own would need ensurepip, which minimal systems lack.
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    site_packages = subprocess.run(
      [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
      check=True,
      capture_output=True,
      text=True,
    ).stdout.strip()
    subprocess.run(
      [*pip, "install", "-q", "--no-deps", "--target", site_packages, *wheels], check=True
    )
    here = next(p for p in sys.path if p.endswith("site-packages"))
    # As a site folder, not in PYTHONPATH: some packages bring .pth files that others need.
    dependencies = str(_without_checkout(here, folder))
    pathlib.Path(site_packages, "dependencies.pth").write_text(
      f"import site; site.addsitedir({dependencies!r})\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
      [python, "-c", _USE_AN_OP], cwd=folder, env=environment, capture_output=True, text=True
    )

    self.assertEqual(process.returncode, 0, process.stderr)
    where, names, rowids = process.stdout.strip().splitlines()
    self.assertTrue(where.startswith(str(folder / "env")), where)
    self.assertGreater(int(names), 100)
    self.assertEqual(rowids, "[1, 2, 2]")
    self._check_server(pathlib.Path(site_packages), folder, environment)

  def _check_server(self, site_packages, folder, environment):
    """The model server is in the wheel, can be executed, and carries nghttp2 along."""
    if native_build.missing_for_server(native_build.find_toolchain()):
      return
    program = site_packages / native_build.SERVER_PROGRAM
    answer = subprocess.run(
      [program, "--version"], cwd=folder, env=environment, capture_output=True, text=True
    )
    self.assertEqual(answer.returncode, 0, answer.stderr)
    self.assertIn("TensorFlow", answer.stdout)
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    is_static = native_build.nghttp2_library(native_build.find_toolchain()).endswith(".a")
    self.assertEqual("libnghttp2" in libraries, not is_static, libraries)


def _without_checkout(site_packages: str, folder: pathlib.Path) -> pathlib.Path:
  """Returns a folder of links to everything installed except the checkout's own package."""
  links = folder / "dependencies"
  links.mkdir()
  for path in pathlib.Path(site_packages).iterdir():
    if not path.name.lower().startswith(("monolith", "__editable__", "idl")):
      (links / path.name).symlink_to(path)
  return links


if __name__ == "__main__":
  unittest.main()
