"""Writes the messages of deep insight to files, one folder per key, in parts of bounded size.

Its names are published by `metric_hook`.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import native_task_context

_DEFAULT_BASE_NAME = "/vepfs/jaguar_deepinsight_results"
_DEFAULT_PARTITION_SIZE = int(1e6)
_DEEP_INSIGHT_OP = "deep_insight_op"
_MAX_PENDING = 100000
_IDLE_SECS = 24 * 3600
_IDLE_CHECK_SECS = 600

ParseFn = Callable[[Any], Any]
KeyFn = Callable[[Any, int, str], str]
LayoutFn = Callable[[Any], str]


def default_parse_fn(obj: Any) -> Any:
  """Parses JSON text; other objects pass."""
  return json.loads(obj) if isinstance(obj, (str, bytes)) else obj


def default_layout_fn(obj: Any) -> str:
  """Returns one line of JSON; text passes."""
  return obj if isinstance(obj, str) else json.dumps(obj)


def vepfs_key_fn(obj: dict[str, Any], worker_id: int, base_name: str) -> str:
  """Returns `<base>/<model_name>/<req_time>/worker_<id>`."""
  req_time = _first(obj, ("__REQ_TIME__", "req_time"), "")
  return os.path.join(base_name, str(obj["model_name"]), str(req_time), f"worker_{worker_id}")


def vepfs_layout_fn(obj: dict[str, Any]) -> str:
  """Returns `req_time;gid;uid;<predictions as JSON>;<labels as JSON>`."""
  return ";".join(
    [
      str(_first(obj, ("__REQ_TIME__", "req_time"), "")),
      str(_first(obj, ("__FEED_ID__", "feedid", "gid"), "gid")),
      str(_first(obj, ("__UID__", "userid", "uid"), "uid")),
      json.dumps(obj["predict"]),
      json.dumps(obj["label"]),
    ]
  )


def _first(obj: dict[str, Any], names: Iterable[str], default: Any) -> Any:
  """Looks for the first name, among the fields and the extra fields of a message."""
  places = [obj, *(obj.get(extra) or {} for extra in ("extra_str", "extra_int", "extra_float"))]
  for name in names:
    for place in places:
      if name in place:
        return place[name]
  return default


class WriteOnlyFileAndStat:
  """The files of one key: `<key>/part_<n>.<ext>`.

  A rerun overwrites them. A write first flushes a full buffer, a flush begins a new part when the
  current one is full; closing never does.

  Args:
    key: the folder, created if missing.
    layout_fn: how an object becomes a line.
    batch_size: lines that are buffered.
    partition_size: lines of a part, a million by default.
    file_ext: extension of the files.
  """

  def __init__(
    self,
    key: str,
    layout_fn: LayoutFn | None = None,
    batch_size: int = 1024,
    partition_size: int | None = None,
    file_ext: str = "txt",
  ):
    self._key = key
    self._layout_fn = layout_fn or default_layout_fn
    self._batch_size = batch_size
    self._partition_size = partition_size or _DEFAULT_PARTITION_SIZE
    self._file_ext = file_ext
    self._buffer: list[str] = []
    self._partition = 0
    self._written = 0
    self._file: Any = None
    self._last_write = time.time()

  def is_available(self) -> bool:
    """Returns whether something was written in the last day."""
    return time.time() - self._last_write < _IDLE_SECS

  def write(self, obj: Any) -> None:
    """Adds a line."""
    if len(self._buffer) >= self._batch_size:
      self.flush()
    self._buffer.append(self._layout_fn(obj))
    self._last_write = time.time()

  def flush(self, check: bool = True) -> None:
    """Writes what is buffered.

    Args:
      check: begin a new part with the next line if this one is full.
    """
    if self._buffer:
      if self._file is None:
        tf.io.gfile.makedirs(self._key)
        path = os.path.join(self._key, f"part_{self._partition:06d}.{self._file_ext}")
        self._file = tf.io.gfile.GFile(path, "w")
      self._file.write("".join(line + "\n" for line in self._buffer))
      self._file.flush()
      self._written += len(self._buffer)
      self._buffer.clear()
    if check and self._written >= self._partition_size:
      self._close_file()
      self._partition += 1
      self._written = 0

  def close(self) -> None:
    """Writes what is buffered and closes the file."""
    self.flush(check=False)
    self._close_file()

  def _close_file(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None


class FileMetricHook(tf.compat.v1.train.SessionRunHook):
  """Writes the messages of deep insight to files in a thread of its own; one per process.

  Args:
    deep_insight_op: string messages; what `run_value` brings under that name if `None`.
    worker_id: part of the default key; this worker's index by default.
    parse_fn: how a message becomes an object; JSON by default.
    key_fn: `(object, worker_id, base_name)` -> folder.
    layout_fn: how an object becomes a line; JSON by default.
    batch_size: lines that are buffered per folder.
    partition_size: lines of a file.
    base_name: part of the default key.
    file_ext: extension of the files.
  """

  _instance: FileMetricHook | None = None
  _lock = threading.Lock()

  def __new__(cls, *args: Any, **kwargs: Any) -> FileMetricHook:
    with cls._lock:
      if cls._instance is None:
        cls._instance = super().__new__(cls)
        cls._instance._thread = None
      return cls._instance

  def __init__(
    self,
    deep_insight_op: tf.Tensor | None = None,
    *,
    worker_id: int | None = None,
    parse_fn: ParseFn | None = None,
    key_fn: KeyFn | None = None,
    layout_fn: LayoutFn | None = None,
    batch_size: int = 1024,
    partition_size: int | None = None,
    base_name: str = _DEFAULT_BASE_NAME,
    file_ext: str = "txt",
  ):
    self._deep_insight_op = deep_insight_op
    if self._thread is not None:
      # The thread that is running keeps its files and settings.
      return
    if worker_id is None:
      worker_id = native_task_context.get().worker_index
    self._worker_id = worker_id
    self._parse_fn = parse_fn or default_parse_fn
    self._key_fn = key_fn or vepfs_key_fn
    self._layout_fn = layout_fn
    self._batch_size = batch_size
    self._partition_size = partition_size
    self._base_name = base_name
    self._file_ext = file_ext
    self._queue: queue.Queue[Any] = queue.Queue(_MAX_PENDING)
    self._files: dict[str, WriteOnlyFileAndStat] = {}
    self._last_idle_check = time.time()

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    if self._deep_insight_op is None:
      return None
    return tf.compat.v1.train.SessionRunArgs({_DEEP_INSIGHT_OP: self._deep_insight_op})

  def after_run(self, run_context: Any, run_value: Any) -> None:
    """Queues the messages of a step; blocks when the files are too slow for the queue's size."""
    if self._thread is None:
      self._thread = threading.Thread(target=self._run, name="file_metric", daemon=True)
      self._thread.start()
    msgs = (run_value.results or {}).get(_DEEP_INSIGHT_OP)
    if msgs is None:
      return
    for msg in [msgs] if isinstance(msgs, (str, bytes, dict)) else msgs:
      if msg is not None and len(msg):
        self._queue.put(msg)

  def end(self, session: Any) -> None:
    """Writes what is queued, and closes the files."""
    if self._thread is None:
      return
    self._queue.put(_STOP)
    self._thread.join()
    self._thread = None

  def _run(self) -> None:
    while True:
      try:
        msg = self._queue.get(timeout=_IDLE_CHECK_SECS)
        if msg is _STOP:
          break
        self._write(msg)
      except queue.Empty:
        pass
      except Exception:  # One bad message must not lose the others.
        logging.exception("A message could not be written.")
      self._close_idle_files()
    for file in self._files.values():
      file.close()
    self._files.clear()

  def _write(self, msg: Any) -> None:
    obj = self._parse_fn(msg)
    key = self._key_fn(obj, self._worker_id, self._base_name)
    if key not in self._files:
      self._files[key] = WriteOnlyFileAndStat(
        key, self._layout_fn, self._batch_size, self._partition_size, self._file_ext
      )
    self._files[key].write(obj)

  def _close_idle_files(self) -> None:
    now = time.time()
    if now - self._last_idle_check < _IDLE_CHECK_SECS:
      return
    self._last_idle_check = now
    for key, file in list(self._files.items()):
      if not file.is_available():
        file.close()
        del self._files[key]


_STOP = object()
