"""Collisionless tables in `tf.keras` and in eager code.

| name | what it is |
|---|---|
| `callbacks.TableCurves` | rows, memory and expiry of each table for TensorBoard |
| `HashTable` | a table to look up, update, save and load directly |
| `layers.Embedding` | a table as a layer: ids in, vectors out |
| `layers.EmbeddingGroup` | many features, looked up and updated together |
| `load_group`, `save_group` | tables from and to a checkpoint of `Estimator` and `local_train` |
"""

from monolith.keras import callbacks, checkpoint, layers
from monolith.keras.groups import load_group, save_group
from monolith.keras.ids import hash_strings
from monolith.keras.table import HashTable

__all__ = ["HashTable", "callbacks", "hash_strings", "layers", "load_group", "save_group"]

checkpoint.install()
