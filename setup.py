"""Compiles the op library and generates the protobuf modules.

The metadata is in pyproject.toml, the extras are in tools/requirements.py.
"""

import pathlib
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
  from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
  from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402
import requirements  # noqa: E402

# Before pip tries to find a TensorFlow for a Python that has none.
try:
  native_build.check_python()
except native_build.BuildError as error:
  sys.exit(f"error: {error}")


def _build_native() -> None:
  try:
    native_build.build_in_place()
  except native_build.BuildError as error:
    sys.exit(f"error: {error}")


class BuildPython(build_py):
  """Generates the protobuf modules first, so that they are packaged like any other module."""

  def run(self) -> None:
    _build_native()
    super().run()


class BuildOpLibrary(build_ext):
  """Builds the op libraries in the source tree and copies them to where setuptools wants them."""

  def run(self) -> None:
    _build_native()
    if not (self.inplace or getattr(self, "editable_mode", False)):
      for library in self._libraries():
        target = pathlib.Path(self.build_lib) / library
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / library, target)

  def get_outputs(self) -> list:
    return [str(pathlib.Path(self.build_lib) / library) for library in self._libraries()]

  def _libraries(self) -> list:
    # The others are left out where there is no pyarrow, or no CUDA compiler.
    optional = [native_build.PARQUET_LIBRARY, native_build.CUDA_LIBRARY]
    return [native_build.OP_LIBRARY, *(path for path in optional if (ROOT / path).exists())]

  def get_output_mapping(self) -> dict:
    return {}


class PlatformWheel(bdist_wheel):
  """The library does not use Python's C API: one wheel serves every Python on a platform."""

  def get_tag(self) -> tuple:
    return "py3", "none", super().get_tag()[2]


setup(
  ext_modules=[Extension(".".join(native_build.OP_LIBRARY.with_suffix("").parts), sources=[])],
  extras_require=requirements.extras(),
  cmdclass={"build_py": BuildPython, "build_ext": BuildOpLibrary, "bdist_wheel": PlatformWheel},
)
