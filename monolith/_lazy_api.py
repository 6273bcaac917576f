"""An import hook: the names of `tf.estimator` are imported when they are used, not all at once.

`tf.estimator` publishes a dozen ready-made models. Importing them takes five times as long as
importing the rest of the package, which is all that a program with its own model needs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

_PACKAGES = ("tensorflow_estimator._api.", "tensorflow_estimator.python.estimator.api.")
# The generator of these modules marks each published name with the line of its definition.
_PUBLISHED = re.compile(r"^from (\S+) import (\w+)(?: as (\w+))? # line: \d+$", re.MULTILINE)


class _Loader(importlib.machinery.SourceFileLoader):
  """Executes a generated module, except for the imports of what it publishes."""

  def exec_module(self, module: types.ModuleType) -> None:
    source = self.get_data(self.path).decode()
    origins = {alias or name: (of, name) for of, name, alias in _PUBLISHED.findall(source)}

    def get(name: str) -> Any:
      if name not in origins:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
      of, original_name = origins[name]
      value = getattr(importlib.import_module(of), original_name)
      setattr(module, name, value)
      return value

    module.__dict__.update(__getattr__=get, __dir__=lambda: [*{**vars(module), **origins}])
    exec(compile(_PUBLISHED.sub("", source), self.path, "exec"), vars(module))
    # Without it, `import *` takes only what is imported already.
    vars(module).setdefault("__all__", [name for name in dir(module) if not name.startswith("_")])


class _Finder(importlib.abc.MetaPathFinder):
  """Finds modules that only publish names of others."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if not fullname.startswith(_PACKAGES):
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
      spec.loader = _Loader(fullname, spec.loader.path)
    return spec


def install() -> None:
  """Installs the hook, once per process; it has no effect on modules that are imported already."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
