"""Promise: whenever a trainer is killed, its newest checkpoint is whole and from one step.

`MONOLITH_SOAK=1` kills 200 times instead of 30. The trainers are forked from this process, which
has imported TensorFlow but run nothing; each one restores, compares everything with the global
step, and trains and saves until it is killed.
"""

import os
import random
import re
import time

import pytest
import tensorflow as tf
from absl.testing import absltest

from tests.reliability import trainer

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_KILLS = 200 if os.environ.get("MONOLITH_SOAK") == "1" else 30
_MAX_TO_KEEP = 2
# So long after the restore, at most, a trainer is killed; a step with its save takes a tenth of it.
_MAX_TRAINING_SECONDS = 0.5
_TEMPORARY = re.compile(r"_temp$|\.tempstate|\.tmp|-tmp-|\.unfinished$")


class _Reporter(tf.compat.v1.train.CheckpointSaverListener):
  def __init__(self, send):
    self._send = send

  def after_save(self, session, global_step_value):
    self._send(("saved", int(global_step_value)))


def _train_until_killed(send, model_dir: str, save_twice: bool) -> None:
  training = trainer.Trainer(model_dir, _MAX_TO_KEEP, listeners=[_Reporter(send)])
  with training.session() as sess:
    send(("restored", training.check(sess)))
    send(("files", _all_names(model_dir)))
    while True:
      sess.run(training.train_op)
      if save_twice:
        # The newest checkpoint is written again.
        training.saver_hook.trigger_save(sess)


def _restore(model_dir: str) -> int:
  training = trainer.Trainer(model_dir, _MAX_TO_KEEP)
  with training.session() as sess:
    return training.check(sess)


def _all_names(folder: str) -> list:
  return [name for _, folders, files in os.walk(folder) for name in folders + files]


class KillTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    self.saved_step = 0
    self.start_seconds = 3.0
    self.random = random.Random(1)

  def test_newest_checkpoint_is_whole_after_every_kill(self):
    for kill in range(_KILLS):
      phase = ("training", "start", "first save")[kill % 3]
      messages = self._train_and_kill(phase, save_twice=kill % 4 == 3)
      self._check_messages(messages)
      self._check_state_file()

    step = trainer.run_in_child(_restore, self.model_dir)
    self.assertGreaterEqual(step, self.saved_step)
    self.assertGreaterEqual(step, _KILLS // 3)

  def _train_and_kill(self, phase: str, save_twice: bool) -> list:
    """Returns what a trainer reported until it was killed at a random moment.

    Args:
      phase: killed during `start`, from the restore to the `first save` and later, or when it has
        saved once, in `training`.
      save_twice: every step is saved twice.
    """
    start = time.monotonic()
    child = trainer.Child(_train_until_killed, self.model_dir, save_twice, wants_send=True)
    messages = []
    if phase == "start":
      time.sleep(self.random.uniform(0, self.start_seconds))
    else:
      messages.append(child.receive())
      self.start_seconds = time.monotonic() - start
      while phase == "training" and messages[-1][0] != "saved":
        messages.append(child.receive())
      time.sleep(self.random.uniform(0, _MAX_TRAINING_SECONDS))
    child.kill()
    return messages + child.drain()

  def _check_messages(self, messages: list) -> None:
    for kind, value in messages:
      if kind == "restored":
        self.assertGreaterEqual(value, self.saved_step, "a saved step is lost")
      elif kind == "files":
        self._check_no_leftovers(value)
      else:
        self.saved_step = value

  def _check_no_leftovers(self, names: list) -> None:
    self.assertEqual([name for name in names if _TEMPORARY.search(name)], [])
    steps = {m.group(1) for m in (re.match(r"model\.ckpt-(\d+)\.", name) for name in names) if m}
    self.assertLessEqual(len(steps), _MAX_TO_KEEP)

  def _check_state_file(self) -> None:
    state = tf.train.get_checkpoint_state(self.model_dir)
    if state is None:
      self.assertEqual(self.saved_step, 0)
      return
    names = os.listdir(self.model_dir)
    newest = os.path.basename(state.model_checkpoint_path)
    self.assertIn(newest + ".index", names)
    self.assertIn(newest + ".assets", names)
    self.assertIn(newest + ".manifest", names)


if __name__ == "__main__":
  absltest.main()
