"""Decides whether a training run goes on in its data where an earlier one has stopped.

Workers save the position of their input with each checkpoint (`ckpt_hooks`). Put back without a
thought, it makes a run on new data begin at the end of the old, and train nothing. So the folder
has a file `data_worker_<index>.json` beside it, which says what the data was, by a fingerprint of
its pipeline, and whether it has been read to its end.
"""

from __future__ import annotations

import enum
import glob
import hashlib
import json
import math
import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.lib.io import file_io

# Attributes that differ between two runs of one program, and say nothing about data.
_IGNORED_ATTRS = frozenset(
  ("metadata", "token", "shared_name", "container", "name", "config_proto")
)
_MAX_PATHS = 10000


class Resume(enum.Enum):
  """When to go on in the data.

  Attributes:
    ALWAYS: if a position was saved.
    SAME_DATA: if it was saved for the same data.
    UNFINISHED: if, besides, that data had not been read to its end.
    NEVER: start with the first example.
  """

  ALWAYS = "always"
  SAME_DATA = "same_data"
  UNFINISHED = "unfinished"
  NEVER = "never"


class DataPositionHook(tf.compat.v1.train.SessionRunHook):
  """Restores the position if it is to be restored, and says so if no step was trained.

  Args:
    restorer: the hook that restores the position.
    model_dir: where positions are saved.
    index: the worker's index.
    fingerprint: what `fingerprint` returned for the data; `None` where that is not known.
    resume: when to restore.
  """

  def __init__(
    self,
    restorer: tf.compat.v1.train.SessionRunHook,
    model_dir: str,
    index: int,
    fingerprint: str | None,
    resume: Resume,
  ):
    self._restorer = restorer
    self._model_dir = model_dir
    self._state_file = f"checkpoint_input_worker_{index}"
    self._record_path = os.path.join(model_dir, f"data_worker_{index}.json")
    self._fingerprint = fingerprint
    self._resume = resume
    self._has_started = False
    self._restored_from: str | None = None
    self._num_steps = 0
    self._is_in_step = False

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    # A session that replaces a broken one goes on in the data of this very run.
    if self._has_started or self._is_to_be_restored():
      self._restored_from = tf.train.latest_checkpoint(self._model_dir, self._state_file)
      self._restorer.after_create_session(session, coord)
    else:
      # The next run must not take it for a position in this run's data.
      _delete(os.path.join(self._model_dir, self._state_file))
    self._has_started = True
    self._write_record(is_finished=False)

  def _is_to_be_restored(self) -> bool:
    if self._resume in (Resume.ALWAYS, Resume.NEVER):
      return self._resume == Resume.ALWAYS
    if tf.train.latest_checkpoint(self._model_dir, self._state_file) is None:
      return False
    record = self._read_record()
    if record is None or self._fingerprint is None:
      return True
    if record.get("fingerprint") != self._fingerprint:
      logging.info("The data is other than that of the last run: reading it from its start.")
      return False
    if record.get("is_finished") and self._resume == Resume.UNFINISHED:
      logging.info("The last run has read the data to its end: reading it again from its start.")
      return False
    return True

  def _read_record(self) -> dict[str, Any] | None:
    try:
      with tf.io.gfile.GFile(self._record_path) as f:
        record = json.loads(f.read())
    except (tf.errors.NotFoundError, ValueError):
      return None
    return record if isinstance(record, dict) else None

  def _write_record(self, is_finished: bool) -> None:
    tf.io.gfile.makedirs(self._model_dir)
    record = {"fingerprint": self._fingerprint, "is_finished": is_finished}
    file_io.atomic_write_string_to_file(self._record_path, json.dumps(record))

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    self._is_in_step = True

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    self._is_in_step = False
    self._num_steps += 1

  def end(self, session: tf.compat.v1.Session) -> None:
    # Only the end of the data breaks off a step and is no error.
    if self._is_in_step:
      self._write_record(is_finished=True)
    if self._num_steps:
      return
    if self._restored_from is None:
      reason = "the input function gave no batch"
    else:
      reason = (
        f"its position in the data was restored from {self._restored_from}, which is the end. "
        "Train with resume_data=False to read the data again"
      )
    logging.warning("No step was trained: %s.", reason)


def fingerprint(dataset: tf.data.Dataset) -> str:
  """Returns a text that is the same for the same pipeline over the same files.

  It covers the ops of the pipeline with their constants, and the size and time of change of each
  local file that a constant names; neither names of ops nor Python functions.
  """
  graph = dataset._variant_tensor.graph
  functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
  hashes = _Hashes(functions)
  return hashes.of_op(dataset._variant_tensor.op)


class _Hashes:
  """Hashes of ops and functions, each computed once."""

  def __init__(self, functions: dict[str, Any]):
    self._functions = functions
    self._of_function: dict[str, str] = {}
    self._of_op: dict[str, str] = {}

  def of_op(self, last: tf.Operation) -> str:
    """Returns the hash of an op and all that it is computed from, without recursion."""
    pending, entered = [last], set()
    while pending:
      op = pending[-1]
      # A node that was entered and has no hash yet is an ancestor: a loop, which ends here.
      missing = [
        value.op
        for value in op.inputs
        if value.op.name not in self._of_op and value.op.name not in entered
      ]
      entered.add(op.name)
      if missing:
        pending += missing
        continue
      pending.pop()
      if op.name not in self._of_op:
        links = [(self._of_op.get(v.op.name, ""), v.value_index) for v in op.inputs]
        self._of_op[op.name] = _digest([*self._parts(op.node_def), repr(links)])
    return self._of_op[last.name]

  def _parts(self, node: Any) -> Iterable[str]:
    yield node.op
    for name, attr in sorted(node.attr.items()):
      if name.startswith("_") or name in _IGNORED_ATTRS:
        continue
      yield f"{name}={self._of_attr(attr)}"

  def _of_attr(self, attr: Any) -> str:
    kind = attr.WhichOneof("value")
    if kind == "func":
      return self._of_function_named(attr.func.name)
    if kind == "list" and attr.list.func:
      return repr([self._of_function_named(func.name) for func in attr.list.func])
    if kind == "tensor" and attr.tensor.dtype == tf.string.as_datatype_enum:
      return hashlib.sha256(attr.SerializeToString()).hexdigest() + _describe_files(attr.tensor)
    return hashlib.sha256(attr.SerializeToString(deterministic=True)).hexdigest()

  def _of_function_named(self, name: str) -> str:
    if name not in self._of_function:
      self._of_function[name] = ""  # One that calls itself.
      function = self._functions.get(name)
      parts = [name] if function is None else []
      for node in function.node_def if function is not None else ():
        parts += [node.name, *node.input, *self._parts(node)]
      self._of_function[name] = _digest(parts)
    return self._of_function[name]


def _read_strings(tensor: Any) -> list[bytes]:
  """Returns the strings of a `TensorProto`.

  A dataset that was made eagerly has them as bytes: first all lengths as varints, then the text.
  NumPy, and so `tf.make_ndarray`, cannot read those.
  """
  if not tensor.tensor_content:
    return list(tf.make_ndarray(tensor).reshape(-1))
  content, offset, lengths = tensor.tensor_content, 0, []
  for _ in range(math.prod(dim.size for dim in tensor.tensor_shape.dim)):
    length = shift = 0
    while True:
      byte = content[offset]
      offset += 1
      length |= (byte & 0x7F) << shift
      shift += 7
      if not byte & 0x80:
        break
    lengths.append(length)
  strings = []
  for length in lengths:
    strings.append(content[offset : offset + length])
    offset += length
  return strings


def _describe_files(tensor: Any) -> str:
  if math.prod(dim.size for dim in tensor.tensor_shape.dim) > _MAX_PATHS:
    return ""
  values = _read_strings(tensor)
  found = []
  for value in values:
    try:
      text = os.fsdecode(value)
      paths = sorted(glob.glob(text)) if glob.has_magic(text) else [text]
      for path in paths:
        if os.path.isfile(path):
          stat = os.stat(path)
          found.append((path, stat.st_size, stat.st_mtime_ns))
    except (OSError, ValueError, TypeError):
      continue  # No path, or none of this machine.
  return repr(found)


def _digest(parts: Iterable[str]) -> str:
  return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _delete(path: str) -> None:
  try:
    tf.io.gfile.remove(path)
  except tf.errors.NotFoundError:
    pass
