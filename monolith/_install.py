"""Names the commands that install this package, and refuses to run with what it was not built for.

On PyPI `monolith` is a framework for command-line programs with a `monolith/` folder of its own.
This distribution is called `monolith-recsys`. The ops have the same line in C++:
`runtime/base/install_line.h`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterator

DISTRIBUTION = "monolith-recsys"
_PACKAGE = pathlib.Path(__file__).resolve().parent
_BUILD_INFO = "native_training/runtime/ops/_build_info.py"
# Packages that come with TensorFlow, or because of it.
_WITH_TENSORFLOW = ("tensorflow", "google", "absl", "grpc", "kazoo", "keras", "tf_keras")
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws")


def install_line(extra: str = "", *, package: pathlib.Path = _PACKAGE) -> str:
  """Returns the command that installs this package with an extra.

  Args:
    extra: one of the extras in `tools/requirements.py`; without one, the package alone.
    package: the folder `monolith`.
  """
  if (package.parent / "pyproject.toml").exists():  # a checkout
    return f"pip install '.[{extra}]'" if extra else "pip install ."
  return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


@contextlib.contextmanager
def naming_extra(extra: str) -> Iterator[None]:
  """Lets an import that fails in its block say which command installs what is missing.

  Args:
    extra: the extra that has it.

  Raises:
    ModuleNotFoundError: a module of another package is missing.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == _PACKAGE.name:
      raise
    raise ModuleNotFoundError(f"{error}: {install_line(extra)}", name=error.name) from None


def is_without_tensorflow(package: pathlib.Path = _PACKAGE) -> bool:
  """Tells whether there is no TensorFlow, or no protobuf module of this package."""
  generated = package / "native_training/runtime/hash_table/embedding_hash_table_pb2.py"
  return importlib.util.find_spec("tensorflow") is None or not generated.exists()


@contextlib.contextmanager
def naming_tensorflow(module: str) -> Iterator[None]:
  """Lets an import that fails in its block for want of TensorFlow say so.

  Args:
    module: what is imported.

  Raises:
    ModuleNotFoundError: TensorFlow is missing, or what comes with it, or what its build generates.
  """
  try:
    yield
  except ImportError as error:
    name = error.name or ""
    # `from package import module_pb2` names the package, and the module in its text alone.
    if found := re.match(r"cannot import name '(\w+_pb2(_grpc)?)' from", str(error)):
      name = f"{name}.{found[1]}"
    is_missing = isinstance(error, ModuleNotFoundError) or bool(found)
    if not is_missing or not (
      name.partition(".")[0] in _WITH_TENSORFLOW or name.endswith(("_pb2", "_pb2_grpc"))
    ):
      raise
    raise ModuleNotFoundError(
      f"{module} needs TensorFlow, and this package compiled for it (there is no module {name}): "
      f"{install_line()} does both; monolith.table, monolith.torch and monolith.jax work without.",
      name=name,
    ) from None


def refuse_strangers(package: pathlib.Path = _PACKAGE) -> None:
  """Checks that no other distribution has installed files into the folder of this package.

  Raises:
    ImportError: one has; whichever came last has overwritten files of the other.
  """
  for found in package.parent.glob("monolith-*.dist-info"):
    stranger = found.name[: -len(".dist-info")].replace("-", " ")
    raise ImportError(
      f"Another distribution, {stranger}, shares the folder {package} with this one, "
      f"{DISTRIBUTION}, and they overwrite each other's files: pip uninstall monolith, then "
      f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
    )


def check_build(package: pathlib.Path = _PACKAGE) -> None:
  """Checks that TensorFlow and protobuf are those that the package was compiled for.

  A package that was not compiled, or by Bazel, is not checked. TensorFlow is not imported.

  Raises:
    ImportError: one of them is not.
  """
  built = _build_info(package)
  if not built:
    return
  was, now = built["TENSORFLOW_VERSION"], _tensorflow_version()
  if now and _minor(was) != _minor(now):
    raise ImportError(
      f"{package} was compiled for TensorFlow {was}, but {sys.executable} has TensorFlow {now}"
      f"{_remedy(package, built, now)}"
    )
  wanted, protobuf = built.get("PROTOBUF", ""), _version_of("protobuf")
  if protobuf and not _is_within(protobuf, wanted):
    raise ImportError(
      f"{package} was compiled for {wanted}, but {sys.executable} has protobuf {protobuf}: "
      f"pip install '{wanted}'"
    )


def _build_info(package: pathlib.Path) -> dict[str, str]:
  """Returns what the build has written: names and values."""
  try:
    text = (package / _BUILD_INFO).read_text("utf-8")
  except OSError:
    return {}
  return dict(re.findall(r'^(\w+) = "(.*)"$', text, re.MULTILINE))


def _remedy(package: pathlib.Path, built: dict[str, str], now: str) -> str:
  """Returns how the sentence about a TensorFlow that the package is not compiled for ends."""
  install = f"pip install tensorflow=={built['TENSORFLOW_VERSION']}"
  supported = built.get("SUPPORTED", "").split()
  if supported and ".".join(_minor(now)) not in supported:
    return f", and Monolith works with {supported[0]} to {supported[-1]}: {install}"
  if (package.parent / "pyproject.toml").exists():
    command = f"{sys.executable} tools/native_build.py"
    return f": compile it for this one with `{command}`, or {install}"
  return f": {install}, or install a wheel of {DISTRIBUTION} for the TensorFlow that is there"


@functools.cache
def _version_of(distribution: str) -> str:
  """Returns the version that is installed, or nothing.

  importlib.metadata knows it as well, but takes longer to import than all of this package.
  """
  pattern = re.compile(rf"{distribution.replace('-', '_')}-(.+)\.dist-info")
  for folder in sys.path:
    try:
      found = filter(None, map(pattern.fullmatch, os.listdir(folder or ".")))
    except OSError:  # it does not exist, or is an archive
      continue
    for match in found:
      return match[1]
  return ""


def _tensorflow_version() -> str:
  """Returns the version of the TensorFlow that is imported, or would be; empty if there is none."""
  imported = getattr(sys.modules.get("tensorflow"), "__version__", "")
  return imported or next(filter(None, map(_version_of, _TENSORFLOWS)), "")


def minor_version_of_tensorflow() -> list[str]:
  """Returns ["2", "21"] for the TensorFlow that is there, as `check_build` sees it."""
  return _minor(_tensorflow_version())


def _minor(version: str) -> list[str]:
  return version.split(".")[:2]


def _is_within(version: str, requirement: str) -> bool:
  """Returns whether a release fits a requirement such as `protobuf>=6.31.1,<8`."""
  for operator, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
    if (_numbers(version) < _numbers(bound)) == (operator == ">="):
      return False
  return True


def _numbers(version: str) -> tuple[int, ...]:
  return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
