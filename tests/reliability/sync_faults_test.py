"""Promise: when one synchronous rank is in trouble, the others end soon, and name it.

Whatever carries out the exchanges: Horovod's and TensorFlow's engine take turns, and both see a
rank that is killed and one that fails.
"""

from __future__ import annotations

import os
import re
import time

import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from monolith.native_training import hvd_lib
from tests import rank_processes, sync_trainer
from tests.sync_trainer import Job, own_id, read_rows

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TIMEOUT_SECS = 400
# How soon the other ranks must have ended.
_PROMISED_SECS = 60
_PIPELINE = {
  "enable_pipelined_fwda2a": True,
  "enable_async_optimize": True,
  "embedding_prefetch_capacity": 2,
}


_HOROVOD, _TENSORFLOW = rank_processes.ENGINES


class SyncFaultsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = os.environ["TEST_TMPDIR"]
    self.model_dir = os.path.join(self.folder, "model")

  def _run(self, count, job, engine):
    """Runs ranks to their end; returns statuses, outputs, seconds between first and last end."""
    rank_processes.require_engine(engine)
    job.write(self.folder, "job")
    command = ["-m", "tests.sync_trainer", self.folder, "job"]
    with rank_processes.RankProcesses(count, command, engine) as ranks:
      deadline = time.monotonic() + _TIMEOUT_SECS
      while all(process.poll() is None for process in ranks.processes):
        if time.monotonic() > deadline:
          self.fail(f"no rank has ended:\n{ranks.report()}")
        time.sleep(0.05)
      start = time.monotonic()
      statuses = ranks.wait(_TIMEOUT_SECS)
      return statuses, [ranks.output(i) for i in range(count)], time.monotonic() - start

  # With `enable_async_optimize` the update of a step is applied in the next one, after its save.
  @parameterized.named_parameters(
    ("plain", {}, 10, _TENSORFLOW),
    ("pipelined", _PIPELINE, 9, _TENSORFLOW),
    ("pipelined_horovod", _PIPELINE, 9, _HOROVOD),
  )
  def test_a_killed_rank_ends_the_others_and_training_goes_on_without_it(
    self, config, num_updates, engine
  ):
    job = Job(
      self.model_dir,
      [100, 100],
      config={"save_checkpoints_steps": 5, **config},
      die_at={"1": 12},
    )

    statuses, outputs, seconds = self._run(2, job, engine)

    self.assertEqual(statuses[1], -9, outputs[1])
    self.assertGreater(statuses[0], 0, outputs[0])
    self.assertLess(seconds, _PROMISED_SECS)
    self.assertRegex(outputs[0], r"Rank 0 lost rank 1: its process ended")
    self.assertIn(f"they go on from {self.model_dir}/model.ckpt-10", outputs[0])

    hvd_lib.init()
    result = sync_trainer.run_job(Job(self.model_dir, [2]))

    self.assertEqual(result["error"], "")
    self.assertEqual(result["steps"], [11, 12])
    saved = read_rows(os.path.join(self.model_dir, "model.ckpt-10"))
    restored = read_rows(os.path.join(self.model_dir, "model.ckpt-12"))
    self.assertContainsSubset(saved.keys(), restored.keys())
    for rank in range(2):
      for element in range(num_updates):
        self.assertIn(own_id(rank, element), {row_id for _, row_id in restored})

  @parameterized.parameters(*rank_processes.ENGINES)
  def test_an_error_of_one_rank_ends_the_others(self, engine):
    job = Job(self.model_dir, [1000, 1000, 1000], config=_PIPELINE, raise_at={"2": 4})

    statuses, outputs, seconds = self._run(3, job, engine)

    self.assertTrue(all(status > 0 for status in statuses), statuses)
    self.assertLess(seconds, _PROMISED_SECS)
    self.assertIn("RuntimeError: as the job says", outputs[2])
    self.assertRegex(outputs[0], r"Rank 0 lost rank 2")
    self.assertTrue(re.search(r"Rank 1 lost rank 0", outputs[1]), outputs[1])

  def test_a_rank_without_data_says_so(self):
    statuses, outputs, seconds = self._run(2, Job(self.model_dir, [5, 0]), _TENSORFLOW)

    self.assertTrue(all(status > 0 for status in statuses), statuses)
    self.assertLess(seconds, _PROMISED_SECS)
    self.assertIn("rank 1 of 2 has no data at all", outputs[1])
    self.assertRegex(outputs[0], r"Rank 0 lost rank 1")

  def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(self):
    job = Job(self.model_dir, [3, 3], fail_saves={"1": "os"})

    statuses, outputs, seconds = self._run(2, job, _HOROVOD)

    self.assertTrue(all(status > 0 for status in statuses), statuses)
    self.assertLess(seconds, _PROMISED_SECS)
    self.assertIn("OSError: as the job says", outputs[1])
    self.assertIn("step 3 could not be saved on ranks [1]", outputs[0])
    # Nothing that looks like a checkpoint is left.
    self.assertIsNone(tf.train.latest_checkpoint(self.model_dir))
    self.assertFalse(os.path.exists(os.path.join(self.model_dir, "model.ckpt-3.assets")))

  def test_a_rank_with_another_model_folder(self):
    for rank in range(2):
      os.makedirs(f"{self.model_dir}{rank}")
    hvd_lib.init()
    result = sync_trainer.run_job(Job(f"{self.model_dir}0", [2]))
    self.assertEqual(result["error"], "")

    job = Job(self.model_dir + "{rank}", [2, 2])
    statuses, outputs, _ = self._run(2, job, _TENSORFLOW)

    self.assertTrue(all(status > 0 for status in statuses), statuses)
    for output in outputs:
      self.assertIn("is the folder the same on all machines?", output)


if __name__ == "__main__":
  absltest.main()
