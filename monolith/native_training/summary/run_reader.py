"""Reads what a training run has left in its folder: curves, histograms, checkpoints, profiles."""

from __future__ import annotations

import bisect
import collections
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io

from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.summary import step_time

TRAINING, EVALUATION = "training", "evaluation"

# Kinds of curves that there is one of for each table, `rows/user` and so on.
TABLE_CURVES = ("rows", "admitted", "expired", "memory_mb")

_ROWS_PER_TABLE = 5000
# The second ones are those of `tf.keras.callbacks.TensorBoard`.
_FOLDERS = {TRAINING: ("", "train"), EVALUATION: ("eval", "validation")}
_KERAS_PREFIX = "epoch_"
_STEPS_PER_SECOND = "steps_per_second"


class Point(NamedTuple):
  """A value of a curve.

  Attributes:
    time: when it was written, in unix seconds.
    step: the step, or the epoch of a curve that Keras wrote.
    value: the value; may be infinite or NaN.
  """

  time: float
  step: int
  value: float


class Table(NamedTuple):
  """A table in a checkpoint.

  Attributes:
    name: its name.
    num_rows: all of them.
    dim: floats of a row.
    optimizers: what its slices are trained with.
    norms: the lengths of some rows' vectors.
  """

  name: str
  num_rows: int
  dim: int
  optimizers: str
  norms: Sequence[float]


class Checkpoint(NamedTuple):
  """A checkpoint on disk.

  Attributes:
    name: the last part of its prefix.
    time: when it was finished, in unix seconds.
    num_bytes: the size of its files.
  """

  name: str
  time: float
  num_bytes: int


class Session(NamedTuple):
  """A time without a restart in which a process trained.

  Attributes:
    start: when it began, in unix seconds.
    end: when it wrote its last value.
  """

  start: float
  end: float


class Run(NamedTuple):
  """A folder in which models were trained.

  Attributes:
    name: what the page calls it.
    folder: where it is.
    points: `training` or `evaluation` -> tag -> its points, the oldest first.
    epochs: the tags whose steps are epochs.
    restarts: time and step of each start that the training wrote down, the oldest first.
    sessions: the times in which processes trained, the oldest first.
    histograms: tag -> the newest histogram.
    checkpoints: those that are on disk, the oldest first.
    tables: the tables of the newest checkpoint, the largest first.
    profiles: where the time of a step went, the oldest profile first.
  """

  name: str
  folder: str
  points: dict[str, dict[str, list[Point]]]
  epochs: set[str]
  restarts: list[tuple[float, int]]
  sessions: list[Session]
  histograms: dict[str, Any]
  checkpoints: list[Checkpoint]
  tables: list[Table]
  profiles: list[step_time.StepTime]

  def curve(self, kind: str, tag: str) -> list[Point]:
    """Returns the points of a curve by step, the newest of each step.

    What a process wrote after the checkpoint from which its successor started is left out.

    Args:
      kind: `training` or `evaluation`.
      tag: the curve's name.
    """
    by_step: dict[int, Point] = {}
    restarts = collections.deque(self.restarts if kind == TRAINING else [])
    for point in self.points[kind].get(tag, []):
      while restarts and restarts[0][0] <= point.time:
        _, first_step = restarts.popleft()
        by_step = {step: p for step, p in by_step.items() if step < first_step}
      by_step[point.step] = point
    return [by_step[step] for step in sorted(by_step)]


def is_of_table(tag: str) -> bool:
  """Returns whether a curve is that of a table, such as `rows/user`."""
  kind, slash, _ = tag.partition("/")
  return bool(slash) and kind in TABLE_CURVES


def read_run(folder: str, name: str | None = None) -> Run:
  """Reads a folder in which models were trained.

  Args:
    folder: the folder of the model, or the one that Keras's `TensorBoard` writes to.
    name: what the page calls it, the folder's name by default.

  Raises:
    FileNotFoundError: the folder has neither curves nor a checkpoint.
    ValueError: a profile is damaged.
  """
  points: dict[str, dict[str, list[Point]]] = {}
  epochs: set[str] = set()
  histograms: dict[str, Any] = {}
  starts: list[float] = []
  restarts: list[tuple[float, int]] = []
  for kind, subfolders in _FOLDERS.items():
    points[kind] = collections.defaultdict(list)
    for subfolder in subfolders:
      events = _Events(os.path.join(folder, subfolder))
      for tag, found in events.points.items():
        points[kind][tag] += found
      epochs |= events.epochs
      histograms.update(events.histograms)
      if kind == TRAINING and events.points:
        restarts = restarts or events.restarts
        # The last folder that has any: Keras's curves of tables begin a file of their own.
        starts = events.starts
  _replace_speed(points[TRAINING])
  for of_kind in points.values():
    for found in of_kind.values():
      found.sort(key=lambda point: point.time)
  checkpoint = tf.train.latest_checkpoint(folder)
  if checkpoint is None and not any(points[TRAINING].values()):
    raise FileNotFoundError(f"{folder} has neither curves nor a checkpoint: train there first")
  return Run(
    name=name or os.path.basename(os.path.abspath(folder)),
    folder=folder,
    points=points,
    epochs=epochs,
    restarts=sorted(restarts),
    sessions=_find_sessions(starts, points[TRAINING]),
    histograms=histograms,
    checkpoints=_find_checkpoints(folder),
    tables=[] if checkpoint is None else read_tables(checkpoint),
    profiles=step_time.read_all(folder),
  )


class _Events:
  """The files of events in a folder.

  Attributes:
    points: tag -> points, in the order of the files.
    epochs: the tags whose steps are epochs.
    histograms: tag -> the newest histogram.
    starts: when a process began to train, in unix seconds.
    restarts: time and first step of those that say it.
  """

  def __init__(self, folder: str):
    self.points: dict[str, list[Point]] = collections.defaultdict(list)
    self.epochs: set[str] = set()
    self.histograms: dict[str, Any] = {}
    self.starts: list[float] = []
    self.restarts: list[tuple[float, int]] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*"))):
      has_begun = False
      try:
        for event in tf.compat.v1.train.summary_iterator(path):
          if event.WhichOneof("what") == "file_version":
            continue  # Its time is in whole seconds.
          if not has_begun:
            self.starts.append(event.wall_time)
            has_begun = True
          self._add(event)
      except tf.errors.DataLossError:
        continue  # The run may be writing the last record.

  def _add(self, event: Any) -> None:
    if event.session_log.status == tf.compat.v1.SessionLog.START:
      self.starts.append(event.wall_time)
      self.restarts.append((event.wall_time, event.step))
    for value in event.summary.value:
      if value.HasField("simple_value"):
        self.points[value.tag].append(Point(event.wall_time, event.step, value.simple_value))
      elif value.metadata.plugin_data.plugin_name == "scalars":  # as TensorFlow 2 writes them
        tag = value.tag.removeprefix(_KERAS_PREFIX)
        if tag != value.tag:
          self.epochs.add(tag)
        number = float(tf.make_ndarray(value.tensor))
        self.points[tag].append(Point(event.wall_time, event.step, number))
      elif value.HasField("histo"):
        self.histograms[value.tag] = value.histo


def _replace_speed(points: dict[str, list[Point]]) -> None:
  """Makes `step_ms` of `steps_per_second`."""
  speed = points.pop(_STEPS_PER_SECOND, [])
  if speed:
    points["step_ms"] = [p._replace(value=1000 / p.value) for p in speed if p.value]


def _find_sessions(starts: list[float], points: dict[str, list[Point]]) -> list[Session]:
  """Returns the times that begin at `starts`, without those in which nothing was written."""
  starts = sorted(starts)
  times = sorted({point.time for found in points.values() for point in found})
  sessions = []
  for start, after in itertools.zip_longest(starts, starts[1:], fillvalue=float("inf")):
    within = times[bisect.bisect_left(times, start) : bisect.bisect_left(times, after)]
    if within:
      sessions.append(Session(start, within[-1]))
  return sessions


def _find_checkpoints(folder: str) -> list[Checkpoint]:
  state = tf.train.get_checkpoint_state(folder)
  found = []
  for prefix in state.all_model_checkpoint_paths if state is not None else ():
    index = f"{prefix}.index"
    if os.path.exists(index):
      paths = glob.glob(f"{glob.escape(prefix)}.*") + glob.glob(f"{glob.escape(prefix)}.assets/*")
      num_bytes = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
      found.append(Checkpoint(os.path.basename(prefix), os.path.getmtime(index), num_bytes))
  return sorted(found, key=lambda checkpoint: checkpoint.time)


def read_tables(checkpoint: str) -> list[Table]:
  """Returns the tables of a checkpoint, the largest first.

  Args:
    checkpoint: its prefix.
  """
  counts: dict[str, int] = collections.Counter()
  norms: dict[str, list[float]] = collections.defaultdict(list)
  for name, count, rows in _read_parts(checkpoint + ".assets"):
    counts[name] += count
    left = max(0, _ROWS_PER_TABLE - len(norms[name]))
    norms[name] += [float(np.linalg.norm(row.num)) for row in itertools.islice(rows, left)]
  known = checkpoint_slices.read(checkpoint) or {}
  tables = []
  for name, count in counts.items():
    slices = known.get(name, [])
    optimizers = ", ".join(sorted({s.optimizer for s in slices}))
    tables.append(Table(name, count, sum(s.dim for s in slices), optimizers, norms[name]))
  return sorted(tables, key=lambda table: (-table.num_rows, table.name))


def _read_parts(assets: str) -> Iterator[tuple[str, int, Iterator[Any]]]:
  """Yields table name, number of rows and the rows, for each table in each file."""
  for path in sorted(glob.glob(os.path.join(glob.escape(assets), "*-of-*"))):
    base, _, shard = os.path.basename(path).rpartition("-of-")
    if ".meta-" in base:
      continue
    base, _, number = base.rpartition("-")
    meta = os.path.join(assets, f"{base}.meta-{number}-of-{shard}")
    if not os.path.exists(meta):
      continue
    rows = _read_rows(path)
    for record in _pywrap_record_io.RecordIterator(meta, ""):
      entry = embedding_hash_table_pb2.MultiHashTableMetadata.FromString(record)
      part = itertools.islice(rows, entry.num_entries)
      yield entry.table_name, entry.num_entries, part
      collections.deque(part, maxlen=0)


def _read_rows(path: str) -> Iterator[Any]:
  for record in _pywrap_record_io.RecordIterator(path, "SNAPPY"):
    yield embedding_hash_table_pb2.EntryDump.FromString(record)
