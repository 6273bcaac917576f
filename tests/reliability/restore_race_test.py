"""Promise: who restores beside a process that saves, and is killed, gets one whole checkpoint.

`MONOLITH_SOAK=1` kills 1,000 times instead of 12, two at a time: the process that saves, and one of
two that restore; the other one's result is compared. All are forked from this process, which has
imported TensorFlow but run nothing.
"""

import collections
import os
import random
import time

import pytest
import tensorflow as tf
from absl.testing import absltest

from tests.reliability import trainer

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_KILLS = 1000 if os.environ.get("MONOLITH_SOAK") == "1" else 12
# So few that a checkpoint may be deleted while it is read, which is not the rule.
_MAX_TO_KEEP = 8
_MAX_SECONDS = 1.5


def _train_until_killed(send, model_dir: str) -> None:
  training = trainer.Trainer(model_dir, _MAX_TO_KEEP)
  with training.session() as session:
    send(training.check(session))
    while True:
      session.run(training.train_op)


def _restore(model_dir: str) -> "int | str":
  """Returns the restored step, with which everything is compared, or why there is none."""
  reader = trainer.Trainer(model_dir, save_steps=10**9, save_graph_def=False)
  try:
    with reader.session() as session:
      return reader.check(session)
  except (tf.errors.DataLossError, tf.errors.NotFoundError, ValueError) as error:
    # That it is gone, or another one now. An `AssertionError` is a mixture.
    return str(error)


class RestoreRaceTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self.random = random.Random(os.getpid())

  def test_no_restore_mixes_two_checkpoints(self):
    outcomes = collections.Counter()
    saver = self._start_saver()
    last_step = 0
    for kills in range(2, _KILLS + 1, 2):
      readers = [trainer.Child(_restore, self.model_dir) for _ in range(2)]
      # Whether the first or the second of them, which restores a moment later, is killed.
      killed = readers.pop(self.random.randrange(2))
      time.sleep(self.random.uniform(0, _MAX_SECONDS))
      killed.kill()
      saver.kill()
      saver = self._start_saver()
      outcome = readers[0].result()
      if isinstance(outcome, int):
        self.assertGreaterEqual(outcome, last_step, "a restore went back")
        last_step = outcome
        outcomes["whole" if outcome else "nothing saved yet"] += 1
      else:
        self.assertRegex(outcome, "deleted|no index|does not exist|No such file")
        outcomes["gone"] += 1
      if kills % 100 == 0:
        print(f"{kills} kills, step {last_step}: {dict(outcomes)}", flush=True)
    saver.kill()

    print(f"{_KILLS} kills, step {last_step}: {dict(outcomes)}", flush=True)

    # How often a checkpoint is gone while others save depends on the machine, but most are not.
    self.assertGreater(outcomes["whole"], outcomes["gone"], outcomes)
    # Now nobody saves.
    newest = trainer.Child(_restore, self.model_dir).result()
    self.assertIsInstance(newest, int, outcomes)
    self.assertGreaterEqual(newest, last_step)

  def _start_saver(self):
    """Starts a process that trains and saves, and returns it when it has restored."""
    saver = trainer.Child(_train_until_killed, self.model_dir, wants_send=True)
    saver.receive()
    return saver


if __name__ == "__main__":
  absltest.main()
