"""Tests of the halves of saver listeners."""

import tensorflow as tf

from monolith.native_training.hooks import hook_utils


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
  def __init__(self):
    self.calls = []

  def before_save(self, session, global_step_value):
    self.calls.append(("before", global_step_value))

  def after_save(self, session, global_step_value):
    self.calls.append(("after", global_step_value))
    return True

  def __repr__(self):
    return "the listener"


class HookUtilsTest(tf.test.TestCase):
  def test_before_save_listener(self):
    listener = _Listener()
    half = hook_utils.BeforeSaveListener(listener)

    half.before_save(None, 1)
    half.after_save(None, 1)

    self.assertEqual(listener.calls, [("before", 1)])
    self.assertIn("the listener", repr(half))
    self.assertIn("BeforeSaveListener", repr(half))

  def test_after_save_listener(self):
    listener = _Listener()
    half = hook_utils.AfterSaveListener(listener)

    half.before_save(None, 1)
    self.assertTrue(half.after_save(None, 1))

    self.assertEqual(listener.calls, [("after", 1)])
    self.assertIn("the listener", repr(half))
    self.assertIn("AfterSaveListener", repr(half))


if __name__ == "__main__":
  tf.test.main()
