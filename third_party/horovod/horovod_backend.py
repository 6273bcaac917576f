"""Builds Horovod with TensorFlow and Gloo, for pip (a build backend as in PEP 517).

Left to itself, pip builds Horovod where there is no TensorFlow, and Horovod then leaves out its
TensorFlow part without a word. Here TensorFlow, CMake and Ninja are requirements of the build, so
that a C++ compiler is all that has to be there. Building takes minutes: the wheel is kept in the
user's cache, in a folder named after what it was built against.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import tensorflow_versions  # noqa: E402

VERSION = "0.28.1"

# Make is not on PyPI, Ninja is.
_REQUIREMENTS = [
  "pip>=23",
  "setuptools>=68,<81",
  "wheel",
  "packaging",
  "cmake>=3.15,<4",
  "ninja",
]
_ENVIRONMENT = {
  "HOROVOD_WITH_TENSORFLOW": "1",
  "HOROVOD_WITH_GLOO": "1",
  "HOROVOD_WITHOUT_MPI": "1",
  "HOROVOD_WITHOUT_MXNET": "1",
  "HOROVOD_WITHOUT_PYTORCH": "1",
  "CMAKE_GENERATOR": "Ninja",
  # Horovod's setup.py asks for 8 jobs, however many cores there are, unless this is set.
  "MAKEFLAGS": " ",
}
_XLA_GUARD = "#if TENSORFLOW_VERSION >= 2006000000"
# Horovod and Gloo use these without including them; libstdc++ 13 no longer does it for them.
_HEADERS = ("cstdint", "stdexcept", "string")


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
  """Returns what `build_wheel` needs: nothing if the wheel is in the cache."""
  if _find_wheel(_cache_folder()) is not None:
    return []
  return [*_REQUIREMENTS, f"tensorflow=={_tensorflow().release}"]


def build_wheel(
  wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
  """Puts the wheel into a folder, from the cache or built now; returns its name."""
  cache = _cache_folder()
  cached = _find_wheel(cache)
  if cached is not None:
    shutil.copy2(cached, wheel_directory)
    return cached.name
  with tempfile.TemporaryDirectory() as folder:
    built = _build(pathlib.Path(folder))
    shutil.copy2(built, wheel_directory)
    try:
      _keep(built, cache)
    except OSError as error:
      print(f"Horovod's wheel is not kept for the next time: {error}", file=sys.stderr)
    return built.name


def _tensorflow() -> tensorflow_versions.Version:
  """Returns the TensorFlow that Horovod is for."""
  try:
    return tensorflow_versions.target()
  except tensorflow_versions.SetupError as error:
    sys.exit(f"error: {error}")


def _cache_folder() -> pathlib.Path:
  python = f"py{sys.version_info[0]}{sys.version_info[1]}"
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  name = f"horovod-{VERSION}-tf{_tensorflow().release}-{python}-{platform.machine()}"
  return pathlib.Path(root) / "monolith" / name


def _find_wheel(folder: pathlib.Path) -> pathlib.Path | None:
  return next(folder.glob(f"horovod-{VERSION}-*.whl"), None)


def _build(folder: pathlib.Path) -> pathlib.Path:
  # How pip called this backend must not reach the pip below, which calls Horovod's.
  hooks = ("PEP517_", "_PYPROJECT_HOOKS_")
  environment = {n: v for n, v in os.environ.items() if not n.startswith(hooks)}
  environment.update(_ENVIRONMENT)
  environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
  flags = [environment.get("CXXFLAGS", ""), *(f"-include {name}" for name in _HEADERS)]
  environment["CXXFLAGS"] = " ".join(flags).strip()
  # pip's cache may hold a wheel without TensorFlow.
  options = ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
  command = [sys.executable, "-m", "pip", "wheel", *options]
  # Without --quiet Horovod's setup.py hands VERBOSE=1 to Ninja, which takes it for a target.
  command += ["--use-pep517", "--config-settings", "--global-option=--quiet"]
  command += ["--wheel-dir", str(folder), str(_sources(folder, options))]
  if subprocess.run(command, env=environment).returncode != 0:
    sys.exit(f"error: building Horovod {VERSION} failed: see above, a C++17 compiler is needed.")
  wheel = _find_wheel(folder)
  if wheel is None:
    sys.exit(f"error: building Horovod {VERSION} gave no wheel.")
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
  if not any(name.startswith("horovod/tensorflow/mpi_lib") for name in names):
    sys.exit(f"error: Horovod {VERSION} was built without its TensorFlow part, {wheel.name}.")
  return wheel


def _sources(folder: pathlib.Path, options: list[str]) -> pathlib.Path:
  """Fetches Horovod's sources, without its ops for XLA where those do not compile.

  TensorFlow 2.16 and newer have other interfaces for custom calls of XLA. Nothing of ours runs
  compiled by XLA on several ranks.

  Returns:
    Their folder.
  """
  command = [sys.executable, "-m", "pip", "download", "--no-binary", "horovod", *options]
  command += ["--dest", str(folder), f"horovod=={VERSION}"]
  if subprocess.run(command).returncode != 0:
    sys.exit(f"error: the sources of Horovod {VERSION} could not be fetched: see above.")
  with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
    archive.extractall(folder)
  root = folder / f"horovod-{VERSION}"
  path = root / "horovod/tensorflow/xla_mpi_ops.cc"
  text = path.read_text("utf-8")
  if _XLA_GUARD not in text:
    sys.exit(f"error: {path.name} of Horovod {VERSION} is not as it was: no line {_XLA_GUARD!r}.")
  path.write_text(text.replace(_XLA_GUARD, f"{_XLA_GUARD} && TENSORFLOW_VERSION < 2016000000"))
  return root


def _keep(wheel: pathlib.Path, cache: pathlib.Path) -> None:
  """Copies the wheel into the cache, where it appears complete or not at all."""
  cache.mkdir(parents=True, exist_ok=True)
  handle, partial = tempfile.mkstemp(dir=cache)
  os.close(handle)
  try:
    shutil.copy2(wheel, partial)
    os.replace(partial, cache / wheel.name)
  except OSError:
    os.unlink(partial)
    raise
