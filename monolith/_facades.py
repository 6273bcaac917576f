"""Modules that publish names whose code lives elsewhere, and that can still be patched.

A test or a program that replaces a name in such a module means the code that reads it. So an
assignment to a name of a facade also reaches the modules behind it.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def forward_assignments(facade: str, *modules: types.ModuleType) -> None:
  """Makes assignments to names of a facade reach the modules behind it.

  Names that a module behind does not have stay with the facade.

  Args:
    facade: the facade's name in `sys.modules`.
    modules: the modules behind it.
  """

  class Facade(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
      super().__setattr__(name, value)
      if not name.startswith("__"):
        for module in modules:
          if hasattr(module, name):
            setattr(module, name, value)

  sys.modules[facade].__class__ = Facade
