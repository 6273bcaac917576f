"""Compiles op library and model server, and generates the protobuf modules.

The metadata is in pyproject.toml, but for what depends on the TensorFlow that is compiled for:
requirements are in tools/requirements.py, and a wheel's version ends with `+tf2.15`. With
`MONOLITH_TENSORFLOW=none` only the engine is compiled, and NumPy is all that the package needs.
"""

import pathlib
import re
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
import tensorflow_versions  # noqa: E402

try:
  # The release to compile against, once pip has brought it; `None` to leave it out.
  TENSORFLOW = None
  if not tensorflow_versions.is_left_out():
    TENSORFLOW = tensorflow_versions.installed() or tensorflow_versions.target()
except native_build.BuildError as error:
  sys.exit(f"error: {error}")
# Files that an earlier build may have left beside the sources of a package without TensorFlow.
OF_TENSORFLOW = ["libtfkernel*.so", "libmonolith_parquet.so", "*_pb2.pyi"]


def _version() -> str:
  """Returns the version of the package, which CMakeLists.txt reads there as well.

  Sources are for every TensorFlow, and pip wants what it builds from an archive to have the
  archive's version: what comes from one, which has a file PKG-INFO, does not name TensorFlow.
  """
  text = (ROOT / "monolith/__init__.py").read_text("utf-8")
  version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)[1]
  if "sdist" in sys.argv or (ROOT / "PKG-INFO").exists():
    return version
  return f"{version}+{f'tf{TENSORFLOW.minor}' if TENSORFLOW else 'notf'}"


def _build_native() -> None:
  try:
    if TENSORFLOW is None:
      native_build.build_engine()
      return
    native_build.build_in_place()
    native_build.build_server(required=False)
  except native_build.BuildError as error:
    sys.exit(f"error: {error}")


class BuildPython(build_py):
  """Generates the protobuf modules first, so that they are packaged like any other module."""

  def run(self) -> None:
    _build_native()
    super().run()

  def find_package_modules(self, package: str, package_dir: str) -> list:
    modules = super().find_package_modules(package, package_dir)
    if TENSORFLOW is not None:
      return modules
    generated = re.compile(r".*_pb2(_grpc)?|_build_info")
    return [found for found in modules if not generated.fullmatch(found[1])]


class BuildOpLibrary(build_ext):
  """Builds op libraries and model server in the source tree, and copies them for setuptools."""

  def run(self) -> None:
    _build_native()
    if not (self.inplace or getattr(self, "editable_mode", False)):
      for binary in self._binaries():
        target = pathlib.Path(self.build_lib) / binary
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / binary, target)

  def get_outputs(self) -> list:
    return [str(pathlib.Path(self.build_lib) / binary) for binary in self._binaries()]

  def _binaries(self) -> list:
    # The others are left out where there is no pyarrow, no CUDA compiler, or no nghttp2.
    optional = [
      native_build.PARQUET_LIBRARY,
      native_build.CUDA_LIBRARY,
      native_build.SERVER_PROGRAM,
    ]
    if TENSORFLOW is None:
      optional, always = [native_build.CUDA_LIBRARY], [native_build.ENGINE_LIBRARY]
    else:
      always = [native_build.OP_LIBRARY, native_build.ENGINE_LIBRARY]
    return [*always, *(path for path in optional if (ROOT / path).exists())]

  def get_output_mapping(self) -> dict:
    return {}


class PlatformWheel(bdist_wheel):
  """The library does not use Python's C API: one wheel serves every Python on a platform."""

  def get_tag(self) -> tuple:
    return "py3", "none", super().get_tag()[2]


setup(
  version=_version(),
  install_requires=requirements.runtime(TENSORFLOW),
  ext_modules=[Extension(".".join(native_build.OP_LIBRARY.with_suffix("").parts), sources=[])],
  extras_require=requirements.extras(TENSORFLOW)
  if TENSORFLOW
  else requirements.extras_without_tensorflow(),
  exclude_package_data={} if TENSORFLOW else {"": OF_TENSORFLOW},
  cmdclass={"build_py": BuildPython, "build_ext": BuildOpLibrary, "bdist_wheel": PlatformWheel},
)
