"""Ctrl-C writes a checkpoint, says how to go on and ends the program; folders stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from monolith.native_training import cpu_training, model
from monolith.native_training.driver import hooks as driver_hooks
from monolith.native_training.hooks import interrupt

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_PROGRAM = """
import sys
import tensorflow as tf
from monolith.native_training import estimator, model
tf.compat.v1.disable_eager_execution()
class Ready(tf.compat.v1.train.SessionRunHook):
  def after_run(self, run_context, run_values):
    print("running", flush=True)
params = model.TestFFMModel.params()
params.train.per_replica_batch_size = 64
conf = estimator.RunConfig(is_local=True, model_dir=sys.argv[1])
estimator.Estimator(params, conf).train(hooks=[Ready()])
print("not reached", flush=True)
"""


def _params():
  params = model.TestFFMModel.params()
  params.name = "interrupted"
  params.train.per_replica_batch_size = 64
  return params


class InterruptTest(tf.test.TestCase):
  def test_a_program_saves_and_ends(self):
    folder = os.path.join(self.create_tempdir().full_path, "model")
    process = subprocess.Popen(
      [sys.executable, "-c", _PROGRAM, folder],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      # Shells start background jobs with SIGINT ignored, and a program inherits that.
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    self.addCleanup(process.kill)
    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    self.assertEqual(process.stdout.readline().strip(), "running")

    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    process.wait()
    reader.join()

    self.assertNotIn("not reached", rest)
    self.assertNotEqual(process.returncode, 0)
    checkpoint = tf.train.latest_checkpoint(folder)
    self.assertIsNotNone(checkpoint, errors[0][-3000:])
    self.assertIn(f"The newest checkpoint is {checkpoint}: train with model_dir=", errors[0])
    self.assertIn("KeyboardInterrupt", errors[0])

  def test_a_program_saves_though_nobody_reads_what_it_prints(self):
    # As after Ctrl-C in `python train.py 2>&1 | tee log`, which ends `tee` first.
    folder = os.path.join(self.create_tempdir().full_path, "model")
    process = subprocess.Popen(
      [sys.executable, "-c", _PROGRAM, folder],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline().strip(), "running")

    process.stderr.close()
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    process.wait()

    self.assertNotIn("not reached", rest)
    checkpoint = tf.train.latest_checkpoint(folder)
    self.assertIsNotNone(checkpoint)
    self.assertGreater(tf.train.load_variable(checkpoint, "global_step"), 0)

  def test_before_the_first_step_the_program_ends_at_once(self):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, previous)
    with interrupt.save_on_interrupt("model") as hook:
      with self.assertRaises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
      self.assertFalse(hook.is_requested)
    self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

  def test_a_run_that_cannot_save_ends_all_the_same(self):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, previous)
    with self.assertRaises(KeyboardInterrupt):
      with interrupt.save_on_interrupt("model") as hook:
        hook.before_run(None)
        signal.raise_signal(signal.SIGINT)
        self.assertTrue(interrupt.is_requested())
        raise tf.errors.UnavailableError(None, None, "a server is gone")
    self.assertFalse(interrupt.is_requested())

  def test_a_handler_of_the_program_stays(self):
    previous = signal.signal(signal.SIGINT, lambda *args: None)
    self.addCleanup(signal.signal, signal.SIGINT, previous)
    handler = signal.getsignal(signal.SIGINT)
    with interrupt.save_on_interrupt("model") as hook:
      self.assertIs(signal.getsignal(signal.SIGINT), handler)
      os.kill(os.getpid(), signal.SIGINT)
    self.assertFalse(hook.is_requested)


class FolderTest(tf.test.TestCase):
  def test_local_train_deletes_only_what_it_is_told_to(self):
    folder = os.path.join(self.create_tempdir().full_path, "model")

    def train(**kwargs):
      cpu_training.local_train(_params(), model_dir=folder, steps=1, **kwargs)
      return int(tf.train.load_variable(folder, "global_step"))

    self.assertEqual([train(), train(), train(remove_model_dir_if_exists=True)], [1, 2, 1])

  def test_checkpoints_come_by_the_clock_unless_steps_are_given(self):
    config = cpu_training.CpuTrainingConfig()
    self.assertEqual(driver_hooks.get_save_interval(config, _params()), (300, None))
    config.save_checkpoints_steps = 7
    self.assertEqual(driver_hooks.get_save_interval(config, _params()), (None, 7))


if __name__ == "__main__":
  tf.test.main()
