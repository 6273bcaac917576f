"""A training run shows one line of progress and writes curves, with an AUC of the last batches.

Covers `metric/window_auc`, `hooks/table_count` and `monolith/_quiet.py` as well.
"""

from __future__ import annotations

import glob
import io
import os
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import entry, estimator, native_model
from monolith.native_training.hooks import progress, table_count
from monolith.native_training.metric import window_auc
from monolith.native_training.metric.heads import Head

tf.compat.v1.disable_eager_execution()

_BATCH = 8


class Clicks(native_model.MonolithModel):
  """Users with even ids click."""

  def input_fn(self, mode):
    users = np.arange(64) % 16
    data = tf.data.Dataset.from_tensor_slices((users, (users % 2 == 0).astype(np.float32)))
    return data.repeat().batch(_BATCH).map(
      lambda user, label: {"user": tf.RaggedTensor.from_tensor(user[:, None]), "label": label}
    )  # fmt: skip

  def model_fn(self, features, mode):
    optimizer = entry.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=1.0)
    vector = self.lookup_embedding_slice(["user"], "vec", 4, optimizer=optimizer)[0]
    label = features["label"]
    loss, pred = native_model.get_sigmoid_loss_and_pred(
      "ctr", tf.reduce_sum(vector, axis=1), label, None, mode=mode
    )
    dense_optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, dense_optimizer)


def _read_curves(folder):
  """Returns tag -> {step: value}."""
  curves = {}
  for path in glob.glob(os.path.join(folder, "events.out.tfevents.*")):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        curves.setdefault(value.tag, {})[event.step] = value.simple_value
  return curves


class ProgressTest(tf.test.TestCase):
  def test_curves_of_a_training_run(self):
    folder = self.create_tempdir().full_path
    conf = estimator.RunConfig(is_local=True, model_dir=folder, save_summary_steps=10)
    estimator.Estimator(Clicks(), conf).train(steps=40)

    curves = _read_curves(folder)
    self.assertAllEqual(sorted(curves["auc"]), [10, 20, 30, 40])
    self.assertGreater(curves["auc"][40], 0.9)
    self.assertEqual(curves["rows"][40], 16)
    self.assertEqual(curves["rows/user"][40], 16)
    self.assertEqual(curves["admitted/user"][40], 16)
    self.assertEqual(curves["expired/user"][40], 0)
    self.assertGreater(curves["memory_mb/user"][40], 0)
    self.assertGreater(curves["examples_per_second"][40], 0)
    self.assertGreater(curves["memory_mb"][40], 10)
    # The mean per example, not the sum of eight.
    self.assertLess(max(curves["loss"].values()), 1.0)

  def test_a_run_goes_on_when_nobody_reads_the_lines(self):
    for is_terminal in (False, True):
      stream = io.StringIO()
      stream.isatty = lambda is_terminal=is_terminal: is_terminal
      stream.flush = mock.Mock(side_effect=BrokenPipeError)
      with tf.Graph().as_default():
        add_step = tf.compat.v1.train.get_or_create_global_step().assign_add(1)
        hook = progress.ProgressHook(tf.constant(0.5), interval_secs=0, stream=stream)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
          self.assertEqual([session.run(add_step) for _ in range(3)], [1, 2, 3])
      self.assertGreater(stream.flush.call_count, 2)

  def test_lines(self):
    for is_terminal in (False, True):
      stream = io.StringIO()
      stream.isatty = lambda is_terminal=is_terminal: is_terminal
      with tf.Graph().as_default():
        add_step = tf.compat.v1.train.get_or_create_global_step().assign_add(1)
        hook = progress.ProgressHook(
          tf.constant(0.5),
          tf.constant(3),
          [Head("ctr", tf.constant([0.0, 1.0, 1.0]), tf.constant([0.1, 0.3, 0.2]))],
          {"user": tf.constant([1200, 1 << 20, 0, 0], tf.int64)},
          num_steps=10,
          interval_secs=0,
          stream=stream,
        )
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
          for _ in range(3):
            session.run(add_step)
      lines = stream.getvalue().rstrip("\n").split("\r" if is_terminal else "\n")
      lines = [line for line in lines if line.strip()]
      self.assertLen(lines, 3)
      self.assertRegex(
        lines[-1],
        r"^step 3   [\d,]+ examples/s   loss 0\.5000   AUC 1\.0000   1,200 rows   [\d,]+ MB"
        r"   0:00:\d\d left *$",
      )
      self.assertEqual(stream.getvalue().count("\n"), 1 if is_terminal else 3)

  def test_speed_of_a_line_is_that_since_the_line_before(self):
    speed = progress._Speed()
    speed.start(10.0, 100)
    for _ in range(4):
      speed.add(8)

    # Another worker has made as many steps.
    self.assertEqual(speed.measure(12.0, 108), (4.0, 32.0))

    speed.start(12.0, 108)
    self.assertEqual(speed.num_runs, 0)

  def test_rows_that_come_and_go(self):
    table = table_count.TableCount()
    table.start(np.array([100, 0, 7, 0]))  # restored rows, and what has expired before

    table.update(np.array([130, 1 << 20, 7, 0]))
    self.assertEqual(
      table.values(), {"rows": 130.0, "admitted": 30.0, "expired": 0.0, "memory_mb": 1.0}
    )
    table.update(np.array([120, 1 << 20, 27, 0]))
    self.assertEqual((table.values()["admitted"], table.values()["expired"]), (40.0, 20.0))
    # Read again from a checkpoint without expired rows.
    table.update(np.array([90, 1 << 20, 27, 0]))
    self.assertEqual((table.values()["admitted"], table.values()["expired"]), (40.0, 50.0))

  def test_auc(self):
    self.assertEqual(window_auc.compute_auc([0, 1, 1], [0.5, 0.5, 0.6]), 0.75)


class QuietTest(tf.test.TestCase):
  _PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import monolith.native_training
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
import progress_test
from monolith.native_training import estimator
conf = estimator.RunConfig(is_local=True, model_dir=sys.argv[2])
estimator.Estimator(progress_test.Clicks(), conf).train(steps=5)
"""

  def _run(self, **env):
    here = os.path.dirname(os.path.abspath(__file__))
    process = subprocess.run(
      [sys.executable, "-c", self._PROGRAM, here, self.create_tempdir().full_path],
      env={**{k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}, **env},
      capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in (process.stdout + process.stderr).split("\n") if line.strip()]

  def test_a_program_says_one_line_and_everything_when_asked(self):
    lines = self._run()
    progress_lines = [line for line in lines if re.match(r"step 5 .*AUC", line)]
    self.assertLen(progress_lines, 1)
    noise = [line for line in lines if line not in progress_lines and "cuda" not in line.lower()]
    self.assertLess(len(noise), 5, "\n".join(noise))

    self.assertIn("deprecated", "\n".join(self._run(MONOLITH_VERBOSE="1")))


if __name__ == "__main__":
  tf.test.main()
