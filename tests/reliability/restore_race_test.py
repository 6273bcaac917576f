"""Promise: who restores beside a process that saves, and is killed, gets one whole checkpoint.

`MONOLITH_SOAK=1` kills 1,000 times instead of 12: in turn the process that saves, and one that
restores. All are forked from this process, which has imported TensorFlow but run nothing.
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
    for kill in range(_KILLS):
      reader = trainer.Child(_restore, self.model_dir)
      if kill % 2:
        time.sleep(self.random.uniform(0, _MAX_SECONDS))
        reader.kill()
        continue
      time.sleep(self.random.uniform(0, _MAX_SECONDS))
      saver.kill()
      saver = self._start_saver()
      outcome = reader.result()
      if isinstance(outcome, int):
        self.assertGreaterEqual(outcome, last_step, "a restore went back")
        last_step = outcome
      else:
        self.assertRegex(outcome, "deleted|no index|does not exist|No such file")
      outcomes["whole" if isinstance(outcome, int) else "gone"] += 1
    saver.kill()

    # How often a checkpoint is gone while others save depends on the machine; now nobody does.
    self.assertIsInstance(trainer.Child(_restore, self.model_dir).result(), int, outcomes)

  def _start_saver(self):
    """Starts a process that trains and saves, and returns it when it has restored."""
    saver = trainer.Child(_train_until_killed, self.model_dir, wants_send=True)
    saver.receive()
    return saver


if __name__ == "__main__":
  absltest.main()
