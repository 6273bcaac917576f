"""Collisionless tables in Keras, 2 and 3, and in eager code.

| name | what it is |
|---|---|
| `callbacks.TableCurves` | rows, memory and expiry of each table for TensorBoard |
| `HashTable` | a table to look up, update, save and load directly |
| `layers.Embedding` | a table as a layer: ids in, vectors out |
| `layers.EmbeddingGroup` | many features, looked up and updated together |
| `load_group`, `save_group` | tables from and to a checkpoint of `Estimator` and `local_train` |
| `optimizers` | clipping by the global norm, float16 and skipping NaN with Keras 3 |
| `train` | trains a compiled model here, on parameter servers, or on Horovod's ranks |
| `load_trained` | gives a model what `train` has saved |
"""

from __future__ import annotations

import importlib
from typing import Any

from monolith.keras import _keras, callbacks, checkpoint, layers
from monolith.keras import table as tables
from monolith.keras.groups import load_group, save_group
from monolith.keras.ids import hash_strings
from monolith.keras.table import HashTable

__all__ = [
  "HashTable",
  "callbacks",
  "hash_strings",
  "layers",
  "load_group",
  "load_trained",
  "optimizers",
  "save_group",
  "train",
]


checkpoint.install()
if not _keras.IS_KERAS_3:
  from monolith.keras import _keras_2

  tables.before_first_table(_keras_2.install)


def __getattr__(name: str) -> Any:
  # The drivers are imported when they are needed: most models train with `fit`.
  if name in ("load_trained", "train"):
    return getattr(importlib.import_module(f"{__name__}.training"), name)
  if name == "optimizers":  # There are some for Keras 3 alone.
    return importlib.import_module(f"{__name__}.optimizers")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
