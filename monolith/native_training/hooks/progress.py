"""Reports the progress of a training run: a line on the screen, and curves for TensorBoard.

    step 1,200   48,310 examples/s   loss 0.4312   AUC 0.7214   81,442 rows   612 MB   0:41 left

On a terminal the line is renewed in place, in a file there is a new one per interval.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training import training_util
from tensorflow.python.training.summary_io import SummaryWriterCache

from monolith.native_training.graph import idle
from monolith.native_training.hooks.table_count import TableCount
from monolith.native_training.metric import window_auc
from monolith.native_training.metric.heads import Head

_LOG_INTERVAL_SECS = 10.0
_TERMINAL_INTERVAL_SECS = 1.0
_MAX_WINDOW = 200
_MEGABYTE = 1 << 20


class ProgressHook(tf.compat.v1.train.SessionRunHook):
  """Prints step, speed, loss, AUC, rows, memory and time left, and writes them as curves.

  The AUC is computed over the last batches, at most 200, before they were learnt.

  Args:
    loss: scalar, the mean per example.
    batch_size: scalar; `None` if not known, then the speed is in steps.
    heads: the heads to compute the AUC of.
    table_stats: table name -> int64 `[4]`, as `stats` of a table returns it: the curves `rows/`,
      `admitted/`, `expired/` and `memory_mb/` with the table's name. Admitted and expired rows
      count from the start of the run.
    model_dir: where curves go; `None` for none.
    curve_steps: steps between the points of a curve.
    last_step: the step at which the run ends; `None` if not known.
    num_steps: how many steps the run has, instead of `last_step`.
    num_ranks: how many processes train as many examples each, with tables of their own.
    interval_secs: how often to print; by default every second on a terminal, else every ten.
    stream: where to print, standard error by default.
    describe: called with the session, returns what else the line says.
  """

  # Only one of two hooks with this attribute is kept.
  shows_progress = True

  def __init__(
    self,
    loss: tf.Tensor,
    batch_size: tf.Tensor | None = None,
    heads: Sequence[Head] = (),
    table_stats: Mapping[str, tf.Tensor] | None = None,
    model_dir: str | None = None,
    curve_steps: int = 100,
    last_step: int | None = None,
    num_steps: int | None = None,
    num_ranks: int = 1,
    interval_secs: float | None = None,
    stream: Any = None,
    describe: Callable[[tf.compat.v1.Session], str] | None = None,
  ):
    self._describe = describe
    self._heads = [head.name for head in heads]
    self._knows_batch_size = batch_size is not None
    # A flat list: nested fetches cost time in every step.
    self._fetches = [loss]
    for head in heads:
      self._fetches += [tf.reshape(head.label, [-1]), tf.reshape(head.prediction, [-1])]
    if batch_size is not None:
      self._fetches.append(batch_size)
    self._stats = dict(table_stats or {})
    self._tables = {name: TableCount() for name in self._stats}
    self._model_dir = model_dir
    self._curve_steps = max(1, curve_steps)
    self._last_step = last_step
    self._num_steps = num_steps
    self._num_ranks = num_ranks
    self._stream = stream
    self._interval_secs = interval_secs
    self._step: tf.Tensor | None = None
    self._window: collections.deque[Any] = collections.deque(maxlen=_MAX_WINDOW)
    # Since the last point of the curves, and since the last line.
    self._curve_speed = _Speed()
    self._line_speed = _Speed()
    self._line_length = 0

  def begin(self) -> None:
    idle.register(self._print_if_late)
    self._step = training_util._get_or_create_global_step_read()
    self._stream = self._stream or sys.stderr
    if self._interval_secs is None:
      is_terminal = self._is_terminal()
      self._interval_secs = _TERMINAL_INTERVAL_SECS if is_terminal else _LOG_INTERVAL_SECS

  def _is_terminal(self) -> bool:
    return bool(getattr(self._stream, "isatty", lambda: False)())

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    step, stats = session.run((self._step, self._stats))
    step = int(step)
    for name, table in self._tables.items():
      table.start(stats[name])
    if self._num_steps is not None:
      self._last_step, self._num_steps = step + self._num_steps, None
    for speed in (self._curve_speed, self._line_speed):
      speed.start(time.monotonic(), step)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._fetches)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    result = run_values.results
    self._window.append(result)
    batch_size = int(result[-1]) if self._knows_batch_size else 0
    for speed in (self._curve_speed, self._line_speed):
      speed.add(batch_size)
    is_late = time.monotonic() - self._line_speed.since >= self._interval_secs
    if is_late or self._curve_speed.num_runs >= self._curve_steps:
      self._measure(run_context.session, is_late)

  def _print_if_late(self, session: tf.compat.v1.Session) -> bool:
    """Reports the last steps when no other comes."""
    is_late = time.monotonic() - self._line_speed.since >= self._interval_secs
    if self._line_speed.num_runs and is_late:
      self._measure(session, do_print=True)
    return False

  def end(self, session: tf.compat.v1.Session) -> None:
    if self._line_speed.num_runs:
      self._measure(session, do_print=True)
    if self._line_length:
      self._write("\n")
      self._line_length = 0

  def _measure(self, session: tf.compat.v1.Session, do_print: bool) -> None:
    # In a run of its own: within a step, nothing orders the read and the train op.
    step, stats = session.run((self._step, self._stats))
    now, step = time.monotonic(), int(step)
    values = {"loss": float(np.mean([result[0] for result in self._window]))}
    for i, name in enumerate(self._heads):
      labels, predictions = (
        np.concatenate([result[j] for result in self._window]) for j in (2 * i + 1, 2 * i + 2)
      )
      values["auc" if len(self._heads) == 1 else f"{name}_auc"] = window_auc.compute_auc(
        labels, predictions
      )
    values["rows"] = float(sum(int(of_table[0]) for of_table in stats.values()))
    values["memory_mb"] = get_memory_bytes() / _MEGABYTE
    for name, table in self._tables.items():
      table.update(stats[name])
    if self._curve_speed.num_runs:
      self._write_curves(step, {**values, **self._measure_speed(self._curve_speed, now, step)})
      self._curve_speed.start(now, step)
    if do_print:
      speed = self._measure_speed(self._line_speed, now, step)
      self._print(step, {**values, **speed}, self._describe and self._describe(session))
      self._line_speed.start(now, step)

  def _measure_speed(self, speed: _Speed, now: float, step: int) -> dict[str, float]:
    steps, examples = speed.measure(now, step)
    if not self._knows_batch_size:
      return {"steps_per_second": steps}
    return {"steps_per_second": steps, "examples_per_second": examples * self._num_ranks}

  def _write_curves(self, step: int, values: Mapping[str, float]) -> None:
    if self._model_dir is None:
      return
    summary = tf.compat.v1.Summary()
    for tag, value in values.items():
      # The graph writes the loss itself.
      if tag != "loss" and not np.isnan(value):
        summary.value.add(tag=tag, simple_value=value)
    for name, table in sorted(self._tables.items()):
      for tag, value in table.values().items():
        summary.value.add(tag=f"{tag}/{name}", simple_value=value)
    writer = SummaryWriterCache.get(self._model_dir)
    writer.add_summary(summary, step)
    writer.flush()

  def _print(self, step: int, values: Mapping[str, float], more: str | None) -> None:
    parts = [f"step {step:,}"]
    if "examples_per_second" in values:
      parts.append(f"{values['examples_per_second']:,.0f} examples/s")
    else:
      parts.append(f"{values['steps_per_second']:,.1f} steps/s")
    parts.append(f"loss {values['loss']:.4f}")
    for tag, value in values.items():
      if tag.endswith("auc"):
        parts.append(f"{tag[:-3].replace('_', ' ')}AUC {value:.4f}")
    if self._tables:
      rows = f"{values['rows']:,.0f} rows"
      parts.append(rows + (" of this rank" if self._num_ranks > 1 else ""))
    parts.append(f"{values['memory_mb']:,.0f} MB")
    if more:
      parts.append(more)
    if self._last_step is not None and values["steps_per_second"] > 0 and step < self._last_step:
      seconds = int((self._last_step - step) / values["steps_per_second"])
      parts.append(f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left")
    line = "   ".join(parts)
    if self._is_terminal():
      padding = " " * max(0, self._line_length - len(line))
      self._write(f"\r{line}{padding}")
      self._line_length = len(line)
    else:
      self._write(f"{line}\n")

  def _write(self, text: str) -> None:
    # A run goes on when its output is closed, such as a pipe whose reader is gone.
    with contextlib.suppress(OSError):
      self._stream.write(text)
      self._stream.flush()


class _Speed:
  """Counts the steps and examples of an interval."""

  def __init__(self) -> None:
    self.since = 0.0
    self.num_runs = 0
    self._since_step = 0
    self._num_examples = 0

  def start(self, now: float, step: int) -> None:
    """Begins another interval."""
    self.since, self._since_step = now, step
    self.num_runs = self._num_examples = 0

  def add(self, num_examples: int) -> None:
    """Counts a step of this process."""
    self.num_runs += 1
    self._num_examples += num_examples

  def measure(self, now: float, step: int) -> tuple[float, float]:
    """Returns steps and examples per second, after one step at least."""
    elapsed = max(now - self.since, 1e-9)
    num_steps = step - self._since_step
    # Other workers move the step too.
    examples = self._num_examples / self.num_runs * max(num_steps, self.num_runs)
    return num_steps / elapsed, examples / elapsed


def get_memory_bytes() -> int:
  """Returns the memory that this process uses, 0 if that is not known."""
  try:
    with open("/proc/self/statm") as f:
      return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except (OSError, ValueError, IndexError):
    return 0
