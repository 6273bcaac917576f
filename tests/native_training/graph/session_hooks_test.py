"""Tests of the current session."""

import tensorflow as tf

from monolith.native_training.graph import session_hooks

tf.compat.v1.disable_eager_execution()


class SessionHooksTest(tf.test.TestCase):
  def test_current_session(self):
    self.assertIsNone(session_hooks.get_current_session())
    with tf.compat.v1.train.SingularMonitoredSession(
      hooks=[session_hooks.SetCurrentSessionHook()]
    ) as sess:
      self.assertIs(session_hooks.get_current_session(), sess.raw_session())
    self.assertIsNone(session_hooks.get_current_session())

  def test_default_session(self):
    with tf.compat.v1.Session() as sess:
      self.assertIs(session_hooks.get_current_session(), sess)


if __name__ == "__main__":
  tf.test.main()
