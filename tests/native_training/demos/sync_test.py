"""Runs the synchronous demo as a user does: ranks train, evaluate, and can be interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import utils
from monolith.native_training.ranks import local as local_ranks
from monolith.native_training.settings import rank_environment
from tests import rank_processes
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

_SMALL = ["--num_ratings=300000", "--num_users=200", "--num_movies=100", "--batch_size=512"]
_TOLERANCE = 0.005
_TIMEOUT_SECS = 400
_PROGRESS = r"step +(\d+) +[\d,]+ examples/s +loss [\d.]+ +AUC [\d.]+ +[\d,]+ rows in tables"


class DemoSyncTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = os.path.join(utils.get_test_tmp_dir(), "demo")

  def _start(self, *arguments, output=subprocess.PIPE, engine=None):
    command = [sys.executable, "-m", "monolith.native_training.demos.sync"]
    engine_env = {} if engine is None else {rank_environment.ENGINE_ENV: engine}
    return subprocess.Popen(
      [*command, f"--model_dir={self.model_dir}", *_SMALL, *arguments],
      cwd=rank_processes.ROOT,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **engine_env},
      stdout=output,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def _run(self, *arguments):
    process = self._start(*arguments)
    output, _ = process.communicate(timeout=_TIMEOUT_SECS)
    return process.returncode, output

  def test_learns_what_there_is_to_learn(self):
    code, output = self._run("--epochs=3")

    self.assertEqual(code, 0, output)
    match = re.search(r"Ranking: evaluation AUC ([\d.]+), .* allows ([\d.]+)", output)
    self.assertIsNotNone(match, output)
    auc, best = (float(group) for group in match.groups())
    self.assertGreater(best, 0.75)
    self.assertGreaterEqual(auc, best - _TOLERANCE, output)
    # One rank shows progress, the other one is silent.
    steps = [int(step) for step in re.findall(_PROGRESS, output)]
    self.assertNotEmpty(steps)
    self.assertEqual(steps, sorted(set(steps)))
    with open(os.path.join(self.model_dir, "logs", "rank_1.log")) as f:
      self.assertNotRegex(f.read(), _PROGRESS)

  def test_interrupt_and_go_on_with_one_rank(self):
    log_path = os.path.join(utils.get_test_tmp_dir(), "log")
    with open(log_path, "w") as log:
      process = self._start(
        "--epochs=1000", "--pipeline", output=log, engine=rank_environment.TENSORFLOW
      )
      self.addCleanup(process.kill)

      def has_progress():
        self.assertIsNone(process.poll(), open(log_path).read())
        return re.search(_PROGRESS, open(log_path).read())

      wait_until(has_progress, _TIMEOUT_SECS)
      process.send_signal(signal.SIGINT)
      code = process.wait(_TIMEOUT_SECS)
    output = open(log_path).read()
    self.assertEqual(code, 130, output)
    checkpoint = tf.train.latest_checkpoint(os.path.join(self.model_dir, "ranking"))
    self.assertIn(f"Checkpoint: {checkpoint}", output)
    step = int(checkpoint.rsplit("-", 1)[1])

    code, output = self._run("--num_ranks=1", "--epochs=1")

    self.assertEqual(code, 0, output)
    self.assertIn(f"Going on from {checkpoint}", output)
    last = tf.train.latest_checkpoint(os.path.join(self.model_dir, "ranking"))
    # One epoch of 270,000 ratings in batches of 512.
    self.assertEqual(int(last.rsplit("-", 1)[1]), step + 528)

  @absltest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_launcher_of_ones_own(self):
    """Finds no prepared data: rank 0 prepares it while the other one waits."""
    command = ["-m", "monolith.native_training.demos.sync", f"--model_dir={self.model_dir}"]
    paths = [os.path.join(utils.get_test_tmp_dir(), f"rank_{rank}") for rank in range(2)]
    with contextlib.ExitStack() as stack:
      outputs = [stack.enter_context(open(path, "w")) for path in paths]
      ranks = stack.enter_context(
        local_ranks.LocalRanks(
          2, [*command, *_SMALL, "--epochs=1"], outputs=outputs, engine=rank_environment.TENSORFLOW
        )
      )
      codes = [process.wait(_TIMEOUT_SECS) for process in ranks.processes]
    text = [open(path).read() for path in paths]
    self.assertEqual(codes, [0, 0], text)
    self.assertRegex(text[0], _PROGRESS)
    self.assertNotRegex(text[1], _PROGRESS)
    self.assertIsNotNone(tf.train.latest_checkpoint(os.path.join(self.model_dir, "ranking")))

  def test_bad_flags(self):
    code, output = self._run("--num_ranks=0")
    self.assertNotEqual(code, 0)
    self.assertIn("--num_ranks is 0, want at least 1", output)


if __name__ == "__main__":
  absltest.main()
