"""Tests the decisions of the saver's hook; tests/native_training/save_utils_test.py saves."""

import os
import threading

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.checkpoints import saver as savers
from monolith.native_training.checkpoints import saver_hook as saver_hooks

tf.compat.v1.disable_eager_execution()


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
  def __init__(self, before_save=lambda session, step: None):
    self.saved = []
    self.before_save = before_save

  def after_save(self, session, global_step_value):
    self.saved.append(int(global_step_value))


class SaverHookTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    graph = tf.Graph()
    context = graph.as_default()
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)
    step = tf.compat.v1.train.get_or_create_global_step()
    self._train_op = tf.compat.v1.assign_add(step, 1)
    self._saver = savers.PartialRecoverySaver(sharded=True)

  def _hook(self, listener, **kwargs):
    return saver_hooks.NoFirstSaveCheckpointSaverHook(
      self._dir, save_steps=1000000, saver=self._saver, listeners=[listener], **kwargs
    )

  def _session(self, *hooks):
    return tf.compat.v1.train.SingularMonitoredSession(hooks=list(hooks))

  def test_end_does_not_save_a_step_again(self):
    listener = _Listener()
    hook = self._hook(listener)
    with self._session(hook) as session:
      session.run(self._train_op)
      hook.trigger_save(session)

    self.assertEqual(listener.saved, [1])

  def test_always_save_at_end_concerns_one_hook(self):
    listener, other = _Listener(), _Listener()
    hook, other_hook = self._hook(listener), self._hook(other, checkpoint_basename="other")
    hook.always_save_at_end()
    with self._session(hook, other_hook) as session:
      session.run(self._train_op)
      hook.trigger_save(session)
      other_hook.trigger_save(session)

    self.assertEqual(listener.saved, [1, 1])
    self.assertEqual(other.saved, [1])

  def test_triggered_saves_wait_for_each_other(self):
    entered, go_on = threading.Event(), threading.Event()

    def block(session, step):
      entered.set()
      self.assertTrue(go_on.wait(60))

    listener = _Listener(block)
    hook = self._hook(listener)
    with self._session(hook) as session:
      session.run(self._train_op)
      raw = session.raw_session()
      threads = [threading.Thread(target=hook.trigger_save, args=[raw]) for _ in range(2)]
      threads[0].start()
      self.assertTrue(entered.wait(60))
      entered.clear()
      threads[1].start()
      # The second one gets no further than the lock.
      self.assertFalse(entered.wait(0.2))
      self.assertEqual(listener.saved, [])
      go_on.set()
      for thread in threads:
        thread.join()

    self.assertEqual(listener.saved, [1, 1])

  def test_listener_may_save_within_a_save(self):
    def save_other(session, step):
      other.trigger_save(session)

    inner, outer = _Listener(), _Listener(save_other)
    other, hook = self._hook(inner, checkpoint_basename="other"), self._hook(outer)
    with self._session(other, hook) as session:
      session.run(self._train_op)
      hook.trigger_save(session)

    self.assertEqual(inner.saved, [1])
    self.assertEqual(outer.saved, [1])

  def test_ordinary_savers_are_good_enough(self):
    self._saver = tf.compat.v1.train.Saver(sharded=True)
    listener = _Listener()
    with self._session(self._hook(listener)) as session:
      session.run(self._train_op)

    self.assertEqual(tf.train.latest_checkpoint(self._dir), f"{self._dir}/model.ckpt-1")

  def test_newest_checkpoint_that_is_gone_stops_the_start(self):
    os.makedirs(self._dir)
    with open(os.path.join(self._dir, "checkpoint"), "w") as f:
      f.write('model_checkpoint_path: "model.ckpt-7"\n')

    with self.assertRaisesRegex(
      tf.errors.DataLossError,
      "it names .*model.ckpt-7, which does not exist",
    ):
      self._session(self._hook(_Listener()))


class TimerTest(absltest.TestCase):
  def test_only_clocks_disagree(self):
    timer = saver_hooks.SecondOrStepTimerWithTideSetting
    tide = {"tide_start_hour": 1, "tide_end_hour": 3, "tide_every_secs": 5}

    self.assertFalse(timer(every_steps=3).depends_on_clock)
    self.assertTrue(timer(every_secs=3).depends_on_clock)
    self.assertTrue(timer(every_steps=3, **tide).depends_on_clock)
    for name in tide:
      incomplete = {key: value for key, value in tide.items() if key != name}
      self.assertFalse(timer(every_steps=3, **incomplete).depends_on_clock)

  def test_midnight_is_an_hour(self):
    timer = saver_hooks.SecondOrStepTimerWithTideSetting(
      every_steps=3, tide_start_hour=0, tide_end_hour=0, tide_every_secs=5
    )

    self.assertTrue(timer.depends_on_clock)


if __name__ == "__main__":
  absltest.main()
