"""Monolith: recommendation models with collisionless embedding hash tables.

Sparse features live in hash tables in which every id owns a row, created when first trained and
expired when stale. A model author writes a task; the library trains it on one machine, on parameter
servers, on synchronous ranks, or on TPU, and checkpoints, restores and exports it.

| name | what it is |
|---|---|
| `monolith.base_model` | `native_training.native_model`: the model to derive from |
| `monolith.data` | `native_training.data`: record formats, parsers, datasets |
| `monolith.entry` | `native_training.entry`: optimizers, initializers, compressors of a table |
| `monolith.estimator` | `native_training.estimator`: train, evaluate and export in a few lines |
| `monolith.HashTable` | a table in eager code: look up, update, save and load rows |
| `monolith.jax` | tables in JAX |
| `monolith.keras` | tables as layers of Keras 2 and 3 |
| `monolith.launch` | starts the processes of a job: `python -m monolith.launch` |
| `monolith.layers` | `native_training.layers`: the dense layers |
| `monolith.model_export` | `native_training.model_export`: SavedModel export |
| `monolith.row_log` | rows on their way from training to serving |
| `monolith.table` | a table on NumPy arrays, without TensorFlow |
| `monolith.torch` | tables as modules of PyTorch |

Those that need TensorFlow are attributes, imported when first used; `jax`, `launch`, `row_log`,
`table` and `torch` are imported by name. `import monolith` itself loads neither TensorFlow nor the
op library, and defines no flag. `monolith.native_training` lists its modules by layer.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from monolith import _install, _lazy_api, _lazy_imports, _quiet

# The only place of the version: setup.py and CMakeLists.txt read this line.
__version__ = "0.2.0"

_NATIVE = "monolith.native_training."
_ALIASES = {
  "monolith.base_model": _NATIVE + "native_model",
  "monolith.data": _NATIVE + "data",
  "monolith.entry": _NATIVE + "entry",
  "monolith.estimator": _NATIVE + "estimator",
  "monolith.layers": _NATIVE + "layers",
  "monolith.model_export": _NATIVE + "model_export",
}


def add_module(module: types.ModuleType | str) -> None:
  """Publishes a module as a direct submodule of `monolith`.

  Args:
    module: a module object or its dotted name. The last component of the name is used;
      `native_model` becomes `base_model`.

  Raises:
    ImportError: the named module cannot be imported.
  """
  if isinstance(module, str):
    module = importlib.import_module(module)
  name = module.__name__.rpartition(".")[2]
  name = "base_model" if name == "native_model" else name
  sys.modules[f"{__name__}.{name}"] = module
  globals()[name] = module


def __getattr__(name: str) -> Any:
  full_name = f"{__name__}.{name}"
  if full_name in _ALIASES or name == "keras":
    return importlib.import_module(full_name)
  if name == "HashTable":
    return importlib.import_module("monolith.keras").HashTable
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_install.refuse_strangers()
_quiet.before_tensorflow()
_lazy_api.install()
_lazy_imports.install(_ALIASES)
