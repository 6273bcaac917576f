"""Tests mirror sources, as CONTRIBUTING.md promises: a reader finds the test of every module."""

from __future__ import annotations

import functools
import pathlib
import re
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "monolith"
_TESTS = _ROOT / "tests"
_GENERATED = re.compile(r"_pb2(_grpc)?\.py$|/_build_info\.py$")

# Modules that no test is named after and no test's docstring names -> why that is so.
_EXCEPTIONS = {
  "native_training/hooks/server/constants.py": "a file name, which the tests of both sides use",
  "native_training/tables/protocols.py": "types alone: mypy checks who keeps them",
}


def _modules() -> list[pathlib.PurePosixPath]:
  """Returns the modules of the package that somebody wrote, without packages' `__init__.py`."""
  paths = (path for path in _PACKAGE.rglob("*.py") if path.name != "__init__.py")
  return sorted(
    pathlib.PurePosixPath(path.relative_to(_PACKAGE).as_posix())
    for path in paths
    if not _GENERATED.search(path.as_posix())
  )


@functools.cache
def _docstrings() -> dict[pathlib.PurePosixPath, str]:
  """Returns test file -> what its first lines say."""
  found = {}
  for path in _TESTS.rglob("*_test.py"):
    # Without `ast`, which takes seconds for all of them.
    docstring = re.match(r'(?:#.*\n)*"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
    name = pathlib.PurePosixPath(path.relative_to(_TESTS).as_posix())
    found[name] = docstring[1] if docstring else ""
  return found


def _find_tests(module: pathlib.PurePosixPath) -> list[pathlib.PurePosixPath]:
  """Returns the test files that are named after a module or say that they test it.

  A docstring says so with the module's name in backticks, and from another folder with the module's
  folder before it: `data/stream_status.py`, `monolith.core.dense`.
  """
  stem = module.stem
  parts = ("monolith", *module.with_suffix("").parts)
  names = {".".join(parts)}
  for i in range(len(parts) - 1):
    names |= {"/".join(parts[i:]), "/".join(parts[i:]) + ".py"}
  found = []
  for test, text in _docstrings().items():
    named = set(re.findall(r"`([^`]+)`", text))
    if not names.isdisjoint(named):
      found.append(test)
    elif test.parent == module.parent and (
      re.fullmatch(rf"{stem}(_\w+)?_test\.py", test.name) or named & {stem, f"{stem}.py"}
    ):
      found.append(test)
  return found


class MirrorTest(unittest.TestCase):
  def test_every_module_has_a_test_or_a_reason(self):
    modules = _modules()
    self.assertGreater(len(modules), 200)
    missing = [str(m) for m in modules if not _find_tests(m) and str(m) not in _EXCEPTIONS]
    self.assertEqual(
      missing, [], "add a test, or name the module in the docstring of the one that tests it"
    )

  def test_exceptions_are_needed(self):
    modules = {str(module): module for module in _modules()}
    self.assertEqual(sorted(_EXCEPTIONS.keys() - modules.keys()), [])
    tested = {name: _find_tests(modules[name]) for name in _EXCEPTIONS}
    self.assertEqual({name: found for name, found in tested.items() if found}, {})


if __name__ == "__main__":
  unittest.main()
