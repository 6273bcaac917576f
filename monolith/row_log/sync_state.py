"""Places a saved table in the row log: what a checkpoint and an export say about it.

A position is taken first and the rows are saved then. What the log holds before the position was
published from the same table earlier, so the saved rows are at least as new: loading them and
reading on from the position may show rows twice, and misses none.

    <checkpoint>.assets/sync_state.<partition>.json    one for each parameter server
    <checkpoint>.assets/dense_state.json               the same for the dense variables
    <export>/assets.extra/sync_state.json              copied into the model that has the tables
    <export>/assets.extra/dense_state.json             copied into `entry`
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training.checkpoints.state import SaveHelper

SYNC_STATE = "sync_state.json"
DENSE_STATE = "dense_state.json"
_EXTRA = "assets.extra"


@dataclasses.dataclass(frozen=True)
class SyncState:
  """A position in one partition of a log.

  Attributes:
    epoch: writer of the newest complete batch before the position; 0 for none.
    seq: number of that batch.
    topic: where the log is.
    partition: which part of it.
    next_offset: the position.
  """

  epoch: int
  seq: int
  topic: str
  partition: int
  next_offset: int

  def to_json(self) -> str:
    """Returns the state as it is written."""
    return json.dumps(dataclasses.asdict(self), sort_keys=True) + "\n"

  @classmethod
  def from_json(cls, text: str) -> SyncState:
    """Reads what `to_json` wrote.

    Raises:
      ValueError: it is something else; the message says what.
    """
    try:
      fields = json.loads(text)
    except ValueError as error:
      raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
      raise ValueError(f"{text[:80]!r} is not an object")
    for name in ("epoch", "seq", "partition", "next_offset"):
      value = fields.get(name)
      if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r}, want a number that is not negative")
    if not isinstance(fields.get("topic"), str) or not fields["topic"]:
      raise ValueError(f"topic is {fields.get('topic')!r}, want a name")
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: fields[name] for name in names})


@dataclasses.dataclass(frozen=True)
class LogEnd:
  """The end of a partition, and the newest complete batch before it."""

  next_offset: int
  epoch: int = 0
  seq: int = 0


# Returns the ends of the first partitions of a topic; raises anything where no broker answers.
LogEnds = Callable[[str, int], Sequence[LogEnd]]


def load_export(folder: str, name: str = SYNC_STATE) -> SyncState | None:
  """Returns the state in the folder of an exported model, None if it has none.

  Args:
    folder: the folder of one version.
    name: `SYNC_STATE` or `DENSE_STATE`.

  Raises:
    ValueError: the file cannot be read; the message names it.
  """
  return _read(os.path.join(folder, _EXTRA, name))


def load_checkpoint(prefix: str, partition: int) -> SyncState | None:
  """Returns the position of one server's tables in a checkpoint, None if it has none.

  Args:
    prefix: `<folder>/model.ckpt-<step>`.
    partition: index of the parameter server.

  Raises:
    ValueError: the file cannot be read; the message names it.
  """
  return _read(_in_checkpoint(SaveHelper.get_ckpt_asset_dir(prefix), SYNC_STATE, partition))


def copy_to_export(table_folder: str, export_dir: str, name: str, partition: int = 0) -> None:
  """Puts what a checkpoint knows into a model that is being exported; nothing if it knows nothing.

  Args:
    table_folder: the checkpoint's `.assets` folder from which the model gets its tables.
    export_dir: the model's folder.
    name: `SYNC_STATE` or `DENSE_STATE`.
    partition: index of the parameter server.
  """
  source = _in_checkpoint(table_folder, name, partition)
  if tf.io.gfile.exists(source):
    folder = os.path.join(export_dir, _EXTRA)
    tf.io.gfile.makedirs(folder)
    tf.io.gfile.copy(source, os.path.join(folder, name), overwrite=True)


class SyncStateListener(tf.compat.v1.train.CheckpointSaverListener):
  """Takes positions before tables are saved; stands before the listeners that save them.

  A broker that is away delays no checkpoint for long: an older position serves as well. That is the
  last one known here, else that of the latest checkpoint, else the begin of the log. Without any,
  replicas would take the export for a model that nobody keeps new.

  Args:
    basename: the checkpoint's base name, `<folder>/model.ckpt`.
    get_ends: asks the broker.
    rows_topic: the row log.
    num_partitions: how many parameter servers write to it, 1 for tables in this process.
    dense_topic: the log of dense variables; empty for none.
  """

  def __init__(
    self,
    basename: str,
    get_ends: LogEnds,
    rows_topic: str,
    num_partitions: int,
    dense_topic: str = "",
  ):
    super().__init__()
    self._folder = os.path.dirname(basename)
    self._helper = SaveHelper(basename)
    self._get_ends = get_ends
    self._topics = {SYNC_STATE: (rows_topic, num_partitions)}
    if dense_topic:
      self._topics[DENSE_STATE] = (dense_topic, 1)
    self._known: dict[str, Sequence[LogEnd]] = {}

  def before_save(self, session: Any, global_step_value: int) -> None:
    """Writes the positions of this moment."""
    folder = self._helper.get_ckpt_asset_dir(self._helper.get_ckpt_prefix(global_step_value))
    for name, (topic, count) in self._topics.items():
      self._ask(name, topic, count)
      tf.io.gfile.makedirs(folder)
      for partition, end in enumerate(self._known[topic]):
        state = SyncState(end.epoch, end.seq, topic, partition, end.next_offset)
        path = _in_checkpoint(folder, name, partition)
        with tf.io.gfile.GFile(path + ".tmp", "w") as file:
          file.write(state.to_json())
        tf.io.gfile.rename(path + ".tmp", path, overwrite=True)

  def _ask(self, name: str, topic: str, count: int) -> None:
    try:
      self._known[topic] = self._get_ends(topic, count)
    except Exception as error:  # Training goes on without serving.
      if topic not in self._known:
        self._known[topic] = [self._last_saved(name, topic, i) for i in range(count)]
      logging.warning("Cannot ask for the end of %s, an older one is saved: %s", topic, error)

  def _last_saved(self, name: str, topic: str, partition: int) -> LogEnd:
    """Returns what the latest checkpoint says, else the begin of the log."""
    latest = tf.train.latest_checkpoint(self._folder)
    state = None
    if latest is not None:
      folder = self._helper.get_ckpt_asset_dir(latest)
      try:
        state = _read(_in_checkpoint(folder, name, partition))
      except ValueError as error:
        logging.error("The place of a checkpoint in %s is lost: %s", topic, error)
    if state is None or state.topic != topic:
      return LogEnd(0)
    return LogEnd(state.next_offset, state.epoch, state.seq)


def _in_checkpoint(folder: str, name: str, partition: int) -> str:
  if name == DENSE_STATE:
    return os.path.join(folder, name)
  stem, extension = os.path.splitext(name)
  return os.path.join(folder, f"{stem}.{partition}{extension}")


def _read(path: str) -> SyncState | None:
  try:
    with tf.io.gfile.GFile(path) as file:
      text = file.read()
  except tf.errors.NotFoundError:
    return None
  except (tf.errors.OpError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: {error}") from error
  try:
    return SyncState.from_json(text)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
