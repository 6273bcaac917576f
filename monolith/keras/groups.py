"""Tables of Keras in the files of a group, which `Estimator` and `local_train` write and read.

Graph mode trains all tables of a model as one resource, and saves them together; the name of a
table is that of its slot:

  <model_dir>/model.ckpt-<step>.assets/MonolithMultiHashTable_-00000-of-00001

  load_group({"user": users.table, "item": items.table},
             "<model_dir>/model.ckpt-500.assets/MonolithMultiHashTable_")
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from monolith.keras import devices
from monolith.keras.table import HashTable
from monolith.native_training.runtime.ops import gen_monolith_ops


def save_group(tables: Mapping[str, HashTable], path: Any) -> None:
  """Writes the rows of tables, with the state of their optimizers, to the files of one group.

  Args:
    tables: name in the group -> table.
    path: the files are `<path>-00000-of-00001` and so on, and `<path>.meta-00000-of-00001`.

  Raises:
    ValueError: there is no table, they do not expire after the same time, of which a group has one,
      or some are on a GPU and some are not.
    tf.errors.OpError: writing failed; files of an earlier save stay as they were.
  """
  handles = _handles(tables)
  expiry = {name: table.expire_config() for name, table in tables.items()}
  if len(set(expiry.values())) > 1:
    raise ValueError(
      f"Tables {sorted(tables)} have different values of expire_after, and a group has one: "
      "save them as groups of their own"
    )
  with _scope(tables):
    gen_monolith_ops.monolith_hash_table_save_group(
      handles[0],
      str(path),
      handles[1:],
      names=list(tables),
      slot_expire_time_config=next(iter(expiry.values())),
    )


def load_group(tables: Mapping[str, HashTable], path: Any) -> None:
  """Replaces the rows of tables by those that a group of graph mode has under these names.

  Args:
    tables: name in the group -> table.
    path: the base name of the group's files.

  Raises:
    ValueError: there is no table, or some are on a GPU and some are not.
    tf.errors.NotFoundError: there are no such files, or no table of a name; the message has the
      names that are there.
    tf.errors.OpError: the files are damaged, or hold rows of another dimension. Nothing has changed
      then.
  """
  handles = _handles(tables)
  with _scope(tables):
    gen_monolith_ops.monolith_hash_table_restore_group(
      handles[0], str(path), handles[1:], names=list(tables)
    )
  for table in tables.values():
    table.note_loaded()


def _scope(tables: Mapping[str, HashTable]) -> contextlib.AbstractContextManager:
  remedy = "save and load them as groups of their own"
  return devices.scope(devices.common(tables.items(), remedy))


def _handles(tables: Mapping[str, HashTable]) -> list[tf.Tensor]:
  if not tables:
    raise ValueError("tables is empty, want name -> HashTable")
  return [table.resource_handle for table in tables.values()]
