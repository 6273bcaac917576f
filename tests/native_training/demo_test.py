"""The demo as a user runs it: a program that trains, evaluates, and can be interrupted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import app
from absl.testing import absltest, flagsaver

from monolith.native_training import demo, utils
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_SMALL = ["--num_ratings=300000", "--num_users=200", "--num_movies=100", "--batch_size=512"]
_TOLERANCE = 0.005
_TIMEOUT_SECS = 400


def _start(*arguments, output=subprocess.PIPE):
  return subprocess.Popen(
    [sys.executable, "-m", "monolith.native_training.demo", *arguments],
    cwd=_ROOT,
    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    stdout=output,
    stderr=subprocess.STDOUT,
    text=True,
  )


class DemoTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = os.path.join(utils.get_test_tmp_dir(), "demo")

  def _run(self, *arguments):
    process = _start(f"--model_dir={self.model_dir}", *arguments)
    output, _ = process.communicate(timeout=_TIMEOUT_SECS)
    return process.returncode, output

  def _check_auc(self, name, output):
    match = re.search(rf"{name}: evaluation AUC ([\d.]+), .* allows ([\d.]+)", output)
    self.assertIsNotNone(match, output)
    auc, best = (float(group) for group in match.groups())
    self.assertGreater(best, 0.75)
    self.assertGreaterEqual(auc, best - _TOLERANCE, output)

  def test_local(self):
    code, output = self._run(*_SMALL, "--epochs=3")

    self.assertEqual(code, 0, output)
    self.assertRegex(
      output, r"step +\d+ +[\d,]+ examples/s +loss [\d.]+ +AUC [\d.]+ +[\d,]+ rows in tables"
    )
    self._check_auc("FFM", output)
    self._check_auc("Ranking", output)
    self.assertIn(f"Checkpoint: {self.model_dir}/ranking/model.ckpt-", output)
    self.assertRegex(output, "Go on with: .*python.* -m monolith.native_training.demo")

  def test_gpu_that_cannot_be(self):
    code, output = self._run("--gpu", "--num_ps=2")
    self.assertNotEqual(code, 0)
    self.assertIn("--gpu trains in this process: want --num_ps 0, not 2", output)

    with (
      flagsaver.flagsaver(gpu=True),
      mock.patch.object(tf.config, "list_physical_devices", return_value=[]),
    ):
      with self.assertRaisesRegex(app.UsageError, "--gpu: TensorFlow finds no GPU"):
        demo._check_flags()

  def test_processes(self):
    code, output = self._run(
      *_SMALL, "--epochs=3", "--num_ps=2", "--num_workers=2", "--ffm_steps=1"
    )

    self.assertEqual(code, 0, output)
    self._check_auc("Ranking", output)

  def test_interrupt_and_resume(self):
    arguments = [f"--model_dir={self.model_dir}", *_SMALL, "--epochs=100", "--ffm_steps=1"]
    output = self._interrupt(arguments)
    step = self._saved_step(output)
    self.assertGreater(step, 0)

    command = shlex.split(re.search(r"Go on with: (.*)", output).group(1))
    self.assertEqual(command[1:3], ["-m", "monolith.native_training.demo"])
    python = os.path.join(_ROOT, shutil.which(command[0]) or command[0])
    self.assertTrue(os.path.samefile(python, sys.executable))
    output = self._interrupt(command[3:])

    self.assertIn(f"Going on from {self.model_dir}/ranking/model.ckpt-{step}\n", output)
    self.assertNotIn("FFM model", output)
    first_step = int(re.search(r"step +(\d+)", output).group(1))
    self.assertGreater(first_step, step)
    self.assertGreater(self._saved_step(output), step)

  @absltest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_interrupt_of_the_first_model(self):
    arguments = [f"--model_dir={self.model_dir}", *_SMALL, "--epochs=1", "--ffm_steps=1000000"]
    output = self._interrupt(arguments, "FFM model")
    step = self._saved_step(output)
    self.assertIn(f"Checkpoint: {self.model_dir}/ffm/model.ckpt-{step}\n", output)
    self.assertNotIn("Ranking model", output)

    command = shlex.split(re.search(r"Go on with: (.*)", output).group(1))
    code, output = self._run(*command[3:], f"--ffm_steps={step + 10}")

    self.assertEqual(code, 0, output)
    self.assertIn(f"Going on from {self.model_dir}/ffm/model.ckpt-{step}\n", output)
    self.assertRegex(output, rf"step +{step + 10}\b")
    self.assertIn("Ranking: evaluation AUC", output)

  def _saved_step(self, output):
    return int(re.search(r"Checkpoint: .*model.ckpt-(\d+)", output).group(1))

  def _interrupt(self, arguments, model="Ranking model"):
    """Starts the demo, presses Ctrl-C while that model trains; returns the output."""
    log_path = os.path.join(utils.get_test_tmp_dir(), "log")
    with open(log_path, "w") as log:
      process = _start(*arguments, output=log)
    self.addCleanup(process.kill)

    def read_log():
      with open(log_path) as f:
        return f.read()

    def is_training():
      self.assertIsNone(process.poll(), read_log())
      return "step" in read_log().partition(model)[2]

    wait_until(is_training, timeout_secs=_TIMEOUT_SECS)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=_TIMEOUT_SECS)
    self.assertEqual(process.returncode, 130, read_log())
    return read_log()

  def test_movielens_file(self):
    path = os.path.join(utils.get_test_tmp_dir(), "u.data")
    rng = np.random.default_rng(0)
    with open(path, "w") as f:
      for _ in range(2000):
        user, movie = rng.integers(1, 20, size=2)
        f.write(f"{user}\t{movie}\t{5 if (user + movie) % 2 else 1}\t881250949\n")

    code, output = self._run(f"--data={path}", "--batch_size=64", "--epochs=5")

    self.assertEqual(code, 0, output)
    self.assertRegex(output, r"Ranking: evaluation AUC [\d.]+; ")

  def test_bad_flags(self):
    code, output = self._run("--num_workers=2")
    self.assertNotEqual(code, 0)
    self.assertIn("add --num_ps", output)


class WaitTest(absltest.TestCase):
  def _start(self, program):
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    self.addCleanup(process.stdin.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process

  @mock.patch.object(demo, "_LATE_SECS", 0.5)
  def test_worker_that_comes_when_training_is_over_is_left_behind(self):
    processes = {
      ("ps", 0): self._start("pass"),
      ("worker", 0): self._start("pass"),
      ("worker", 1): self._start("import sys; sys.stdin.read()"),
    }

    self.assertEqual(demo._wait(processes, "logs"), 0)
    self.assertIsNone(processes["worker", 1].poll())

  def test_failed_worker_is_reported(self):
    processes = {
      ("worker", 0): self._start("import sys; sys.stdin.read()"),
      ("worker", 1): self._start("import sys; sys.exit(3)"),
    }

    self.assertEqual(demo._wait(processes, "logs"), 1)


if __name__ == "__main__":
  absltest.main()
