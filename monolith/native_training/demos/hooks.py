"""Shows the progress of the demo, and ends it on Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training import training_util

from monolith.native_training import hash_table_ops, multi_hash_table_ops
from monolith.native_training.demos import data as demo_data

_INTERVAL_SECS = 2.0
_MAX_WINDOW = 200

_stop_requested = threading.Event()


def stop_on_interrupt() -> None:
  """Lets the first Ctrl-C end the training in an orderly way, and the second one at once."""

  def handle(signo: int, frame: Any) -> None:
    if _stop_requested.is_set():
      raise KeyboardInterrupt
    _stop_requested.set()
    print("\nStopping: the checkpoint is being written.", file=sys.stderr, flush=True)

  signal.signal(signal.SIGINT, handle)


def is_stop_requested() -> bool:
  """Whether there was a Ctrl-C."""
  return _stop_requested.is_set()


class StopOnSignalHook(tf.compat.v1.train.SessionRunHook):
  """Ends the training after the step in which Ctrl-C was pressed; hooks then save."""

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if _stop_requested.is_set():
      run_context.request_stop()


class ProgressHook(tf.compat.v1.train.SessionRunHook):
  """Prints step, speed, loss, AUC of what was predicted before it was learnt, and rows.

  Args:
    loss: scalar.
    labels: `[batch]`.
    predictions: `[batch]`.
    interval_secs: how often to print.
    num_ranks: how many train as many examples each, with as many tables that are not counted here.
  """

  # The driver adds no second line.
  shows_progress = True

  def __init__(
    self,
    loss: tf.Tensor,
    labels: tf.Tensor,
    predictions: tf.Tensor,
    interval_secs: float = _INTERVAL_SECS,
    num_ranks: int = 1,
  ):
    self._fetches = {"loss": loss, "labels": labels, "predictions": predictions}
    self._interval_secs = interval_secs
    self._num_ranks = num_ranks
    self._step: tf.Tensor | None = None
    self._rows: tf.Tensor | None = None
    self._window: list[dict[str, np.ndarray]] = []
    self._last_time = 0.0
    self._last_step: int | None = None

  def begin(self) -> None:
    self._step = training_util._get_or_create_global_step_read()
    sizes = [tf.constant(0, tf.int64)]
    for group in tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY):
      with tf.device(group.handle.device):
        sizes.append(tf.reduce_sum(group.sizes()))
    for table in tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY):
      with tf.device(table.table.device):
        sizes.append(table.size())
    self._rows = tf.add_n(sizes)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._fetches)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    result, now = run_values.results, time.monotonic()
    self._window = [*self._window[-_MAX_WINDOW + 1 :], result]
    # The step is read in runs of its own: within a training run nothing orders the read and the
    # train op, and either may come first.
    if self._last_step is None:
      self._last_step, self._last_time = int(run_context.session.run(self._step)), now
    elif now - self._last_time >= self._interval_secs:
      self._print(run_context.session, now)

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._window and int(session.run(self._step)) != self._last_step:
      self._print(session, time.monotonic())

  def _print(self, session: tf.compat.v1.Session, now: float) -> None:
    window = self._window
    step, rows = (int(value) for value in session.run((self._step, self._rows)))
    batch_size = np.mean([len(result["labels"]) for result in window])
    num_examples = (step - self._last_step) * batch_size * self._num_ranks
    speed = num_examples / max(now - self._last_time, 1e-9)
    auc = demo_data.compute_auc(
      np.concatenate([result["labels"] for result in window]),
      np.concatenate([result["predictions"] for result in window]),
    )
    loss = np.mean([result["loss"] for result in window])
    print(
      f"step {step:6d}   {speed:9,.0f} examples/s   loss {loss:.4f}   AUC {auc:.4f}   "
      f"{rows:,} rows in tables" + (" of this rank" if self._num_ranks > 1 else ""),
      flush=True,
    )
    self._last_step, self._last_time = step, now
