"""Puts the rows of tables into every kind of checkpoint that TensorFlow and Keras write.

`tf.train.Checkpoint`, `save_weights`, `ModelCheckpoint` and SavedModels all go through TensorFlow's
object-based saver, which calls `_save` and `_restore` below. Rows lie where graph mode has them:

    <prefix>.index, <prefix>.data-00000-of-00001             variables
    <prefix>.assets/MonolithHashTable_<name>-00000-of-00001  rows and the state of their optimizers

The name is the table's own; a table without one is called after its place in the model, such as
`layer_with_weights-0.table`, which stays the same when the program runs again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Union

import tensorflow as tf
from tensorflow.python.saved_model import registration
from tensorflow.python.trackable import resource

from monolith.keras.table import HashTable
from monolith.native_training.runtime.ops import gen_monolith_ops

_PACKAGE, _NAME = "monolith", "HashTable"
_SAVER = f"{_PACKAGE}.{_NAME}"
_FILE_PREFIX = "MonolithHashTable_"
# Says which table is in which file. A folder that has it goes when its checkpoint is deleted.
_MANIFEST = "keras_tables.json"
_installed = False


class LoadedTable(resource.RestoredResource):
  """A table of a SavedModel that `tf.saved_model.load` has loaded: the model's functions use it."""

  name = None

  def save(self, path: tf.Tensor) -> None:
    """Writes all rows, for a model that is saved again."""
    with tf.device(self._resource_device):
      gen_monolith_ops.monolith_hash_table_save(self.resource_handle, path)

  def load(self, path: tf.Tensor) -> None:
    """Replaces all rows by what was saved."""
    with tf.device(self._resource_device):
      gen_monolith_ops.monolith_hash_table_restore(self.resource_handle, path)

  def _export_to_saved_model_graph(
    self, object_map: Any, tensor_map: Any, **kwargs: Any
  ) -> list[tf.Tensor]:
    del kwargs
    with tf.device(self._resource_device):
      table = self._create_resource()
    object_map[self] = self
    tensor_map[self.resource_handle] = table
    return [self.resource_handle]


Table = Union[HashTable, LoadedTable]


def _is_table(trackable: Any) -> bool:
  return isinstance(trackable, (HashTable, LoadedTable))


def install() -> None:
  """Registers the tables' saver with TensorFlow, once per process."""
  global _installed
  if _installed:
    return
  registration.register_checkpoint_saver(
    package=_PACKAGE,
    name=_NAME,
    predicate=_is_table,
    save_fn=_save,
    restore_fn=_restore,
  )
  registration.register_serializable(package=_PACKAGE, name=_NAME, predicate=_is_table)(LoadedTable)
  _installed = True


def _save(trackables: Mapping[str, Table], file_prefix: tf.Tensor) -> list[tf.Tensor]:
  """Writes the rows of tables.

  Args:
    trackables: name of an object in the checkpoint -> table.
    file_prefix: `<prefix of the checkpoint>-monolith.HashTable`.

  Returns:
    Nothing to merge into the checkpoint of the variables.

  Raises:
    ValueError: two tables have one name.
  """
  names = _file_names(trackables)
  prefix = tf.strings.regex_replace(file_prefix, f"-{re.escape(_SAVER)}$", "")
  if tf.executing_eagerly():
    _delete_orphans(prefix.numpy().decode())
  for key, table in trackables.items():
    table.save(prefix + f".assets/{names[key]}")
  tf.io.write_file(prefix + f".assets/{_MANIFEST}", json.dumps(names))
  return []


def _restore(trackables: Mapping[str, Table], merged_prefix: tf.Tensor) -> None:
  """Reads the rows of tables.

  Args:
    trackables: name of an object in the checkpoint -> table.
    merged_prefix: the checkpoint's prefix.

  Raises:
    FileNotFoundError: the checkpoint has no files of a table.
    tf.errors.OpError: they are damaged, or hold rows of another dimension.
  """
  names = _file_names(trackables)
  for key, table in trackables.items():
    name = names[key]
    if tf.executing_eagerly():
      folder = f"{tf.convert_to_tensor(merged_prefix).numpy().decode()}.assets"
      name = _find(folder, key, name)
    table.load(merged_prefix + f".assets/{name}")


def _automatic_name(key: str) -> str:
  return _FILE_PREFIX + re.sub(r"[^\w.-]", ".", key)


def _file_names(trackables: Mapping[str, Table]) -> dict[str, str]:
  """Returns the base name of each table's files."""
  names: dict[str, str] = {}
  owners: dict[str, str] = {}
  for key, table in trackables.items():
    name = table.name
    name = _automatic_name(key) if name is None else _FILE_PREFIX + re.sub(r"[^\w.-]", "-", name)
    if name in owners:
      raise ValueError(
        f"Two tables of one name: {owners[name]} and {key} would both be saved as {name}. "
        "Give one another name, or share one table between both"
      )
    owners[name] = key
    names[key] = name
  return names


def _find(folder: str, key: str, own_name: str) -> str:
  """Returns the base name of a table's files: its own if there are such, or what it was then."""
  manifest = os.path.join(folder, _MANIFEST)
  saved: dict[str, str] = {}
  if tf.io.gfile.exists(manifest):
    with tf.io.gfile.GFile(manifest) as file:
      saved = json.load(file)
  for name in (own_name, saved.get(key)):
    if name and tf.io.gfile.glob(os.path.join(folder, f"{name}-?????-of-?????")):
      return name
  files = tf.io.gfile.glob(os.path.join(folder, f"{_FILE_PREFIX}*-of-?????"))
  found = sorted({re.sub(r"-\d{5}-of-\d{5}$", "", os.path.basename(file)) for file in files})
  raise FileNotFoundError(
    f"{folder} has no files of table {own_name}; it has {found}. Name the table as it was named "
    "when it was saved, or copy the .assets folder together with its checkpoint"
  )


def _delete_orphans(prefix: str) -> None:
  """Deletes the rows of checkpoints that `CheckpointManager` has deleted: it knows only its own.

  A folder is an orphan if its checkpoint is not there but a later one is: not one that another
  process is about to complete.
  """
  match = re.fullmatch(r"(.*-)(\d+)", prefix)
  if not match:
    return
  stem, current = match[1], int(match[2])

  def numbers(suffix: str) -> set[int]:
    found = (
      re.fullmatch(re.escape(stem) + r"(\d+)" + re.escape(suffix), path)
      for path in tf.io.gfile.glob(f"{stem}*{suffix}")
    )
    return {int(path[1]) for path in found if path}

  complete = numbers(".index")
  for number in numbers(".assets") - complete:
    folder = f"{stem}{number}.assets"
    replaced = any(number < later < current for later in complete)
    if replaced and tf.io.gfile.exists(os.path.join(folder, _MANIFEST)):
      tf.io.gfile.rmtree(folder)
