"""Records with a checkpoint which slices the rows of its tables consist of.

A row is one vector. The meaning of its columns follows from the order in which the model declares
slices: a model that declares them in another order would misread every row, and the rows could not
tell. So a checkpoint has a JSON file `<prefix>.slices`, which is compared when a model starts from
it. Checkpoints of other programs have none and are restored as they are.

Between two runs, tables may come and go, and a slice may get another initializer, optimizer,
compressor or learning rate. The number of slices, their sizes and their order may not change.
Slices that are equal in all of this cannot be told apart.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.lib.io import file_io

from monolith.native_training.checkpoints import state as checkpoint_state

_SUFFIX = ".slices"


class Slice(NamedTuple):
  """A range of columns.

  Attributes:
    dim: the number of columns.
    optimizer: the kind of optimizer.
    config: all other settings that distinguish it from other slices, as text.
  """

  dim: int
  optimizer: str
  config: str


# Table name -> the slices of its rows.
Tables = Mapping[str, Sequence[Slice]]


def write(prefix: str, tables: Tables) -> None:
  """Writes the record of the checkpoint `prefix` atomically."""
  content = {
    name: [slice_._asdict() for slice_ in slices] for name, slices in sorted(tables.items())
  }
  record = {"checksum": _checksum(content), "tables": content}
  file_io.atomic_write_string_to_file(prefix + _SUFFIX, json.dumps(record, indent=1))


def read(prefix: str) -> dict[str, list[Slice]] | None:
  """Returns the record of a checkpoint, `None` if it has none.

  Raises:
    tf.errors.DataLossError: the file is damaged.
  """
  path = prefix + _SUFFIX
  try:
    with tf.io.gfile.GFile(path) as f:
      record = json.loads(f.read())
    content = record["tables"]
    if record["checksum"] != _checksum(content):
      raise ValueError(f"the checksum is {record['checksum']}, want {_checksum(content)}")
    return {name: [Slice(**fields) for fields in slices] for name, slices in content.items()}
  except tf.errors.NotFoundError:
    return None
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise tf.errors.DataLossError(
      None,
      None,
      f"{path} is damaged: {type(e).__name__}: {e}. If the model is the one that was saved, delete "
      "that file: it is only compared with the model.",
    ) from e


def _checksum(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def check_newest(model_dir: str, tables: Tables) -> None:
  """Checks that a model can read the rows of the newest checkpoint of a folder, if there is one.

  Raises:
    ValueError: the slices of a table differ from those in the checkpoint, or their order does.
    tf.errors.DataLossError: the record is damaged.
  """
  newest = tf.train.latest_checkpoint(model_dir)
  saved = read(newest) if newest is not None else None
  for name, wanted in sorted(tables.items()):
    if saved is None or name not in saved:
      continue
    difference = _find_difference(saved[name], wanted)
    if difference is not None:
      has, wants = difference
      raise ValueError(
        f"the rows of table {name!r} in the checkpoint {newest} consist of the slices {has}, but "
        f"the model declares {wants}: declare them as the checkpoint has them, train in another "
        f"model_dir, or delete {newest}{_SUFFIX} if the rows are to be read in the new way"
      )


def _find_difference(saved: Sequence[Slice], wanted: Sequence[Slice]) -> tuple[str, str] | None:
  """Returns a description of the difference if one cannot be read as the other."""
  if [s.dim for s in saved] != [s.dim for s in wanted] or _is_reordered(
    [s.optimizer for s in saved], [s.optimizer for s in wanted]
  ):
    return _describe(saved), _describe(wanted)
  if _is_reordered(saved, wanted):
    return _describe(saved, with_config=True), _describe(wanted, with_config=True)
  return None


def _is_reordered(saved: Sequence[Any], wanted: Sequence[Any]) -> bool:
  """Returns whether two lists differ in their order alone."""
  return list(saved) != list(wanted) and sorted(saved) == sorted(wanted)


def _describe(slices: Sequence[Slice], with_config: bool = False) -> str:
  parts = [
    f"{s.dim} {s.optimizer} ({s.config})" if with_config else f"{s.dim} {s.optimizer}"
    for s in slices
  ]
  return f"[{', '.join(parts)}]"


class SlicesSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Writes the record of every checkpoint before the checkpoint becomes the newest.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    tables: the model's tables.
  """

  def __init__(self, basename: str, tables: Tables):
    super().__init__()
    self._helper = checkpoint_state.SaveHelper(basename)
    self._tables = tables

  def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    write(self._helper.get_ckpt_prefix(global_step_value), self._tables)
