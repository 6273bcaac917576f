"""Import hooks of the package: alias modules, a quiet TensorFlow and its patch, when needed.

`monolith.entry` and its siblings are other names of modules under `monolith.native_training`. The
patch of `monolith.utils.enable_monkey_patch` is applied right after TensorFlow's monitored session
is imported, so that `import monolith` alone does not load TensorFlow.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

from monolith import _install, _quiet

_PATCHED_MODULE = "tensorflow.python.training.monitored_session"


class _AliasLoader(importlib.abc.Loader):
  """Hands out the module that already lives under another name."""

  def __init__(self, target: str):
    self._target = target

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    with _garbage_kept():
      module = importlib.import_module(self._target)
    # The import system overwrites __spec__ with the alias's; exec_module puts it back.
    self._own_spec = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    module.__spec__ = self._own_spec


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
  """Collects no garbage meanwhile: a look at all objects of TensorFlow takes long for nothing."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


class _AliasFinder(importlib.abc.MetaPathFinder):
  """Finds `monolith.<alias>` and the modules below it."""

  def __init__(self, aliases: Mapping[str, str]):
    self._aliases = aliases

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    for alias, real_name in self._aliases.items():
      # Submodules too: a second copy under the alias would define its flags and ops twice.
      if fullname == alias or fullname.startswith(alias + "."):
        real_name += fullname[len(alias) :]
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(real_name))
    return None


class _NamingFinder(importlib.abc.MetaPathFinder):
  """Lets modules of the package that need TensorFlow say so."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if not fullname.startswith("monolith."):
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      _run_within(spec.loader, lambda: _install.naming_tensorflow(fullname))
    return spec


def _run_within(
  loader: importlib.abc.Loader, around: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
  """Lets a loader execute its module within a context."""
  execute = loader.exec_module

  def execute_within(module: types.ModuleType) -> None:
    with around():
      execute(module)

  loader.exec_module = execute_within


class _AroundFinder(importlib.abc.MetaPathFinder):
  """Has one module executed by its own loader within a context."""

  def __init__(self, name: str, around: Callable[[], contextlib.AbstractContextManager[None]]):
    self._name = name
    self._around = around

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname != self._name:
      return None
    # A caller that only asks for the spec must not be the last that gets it.
    sys.meta_path.remove(self)
    try:
      spec = importlib.util.find_spec(fullname)
    finally:
      sys.meta_path.insert(0, self)
    if spec is not None and spec.loader is not None:
      _run_within(spec.loader, self._around)
    return spec


@contextlib.contextmanager
def _patched_after() -> Iterator[None]:
  yield
  _patch()


def _patch() -> None:
  try:
    from tensorflow.python.framework import errors

    module = sys.modules[_PATCHED_MODULE]
    module._PREEMPTION_ERRORS = (errors.AbortedError,)
  except Exception:  # a TensorFlow without this internal still works, only without the patch
    logging.getLogger("monolith").exception("enable_monkey_patch failed")


def install(aliases: Mapping[str, str]) -> None:
  """Installs all hooks, once per process."""
  if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
    return
  sys.meta_path.insert(0, _AliasFinder(aliases))
  if _PATCHED_MODULE in sys.modules:
    _patch()
  else:
    sys.meta_path.insert(0, _AroundFinder(_PATCHED_MODULE, _patched_after))
  if "tensorflow" not in sys.modules:
    sys.meta_path.insert(0, _AroundFinder("tensorflow", _quiet.import_of_tensorflow))
  if _install.is_without_tensorflow():
    sys.meta_path.insert(0, _NamingFinder())
