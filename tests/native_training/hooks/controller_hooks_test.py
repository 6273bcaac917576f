"""Tests stopping and saving on demand."""

import os
import pathlib
import time
from unittest import mock

import tensorflow as tf

from monolith.native_training import barrier_ops
from monolith.native_training.hooks import controller_hooks

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


class ControllerHookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    v1.reset_default_graph()
    self.dir = os.environ["TEST_TMPDIR"]

  def test_stop(self):
    helper = controller_hooks.StopHelper()
    barrier_op = barrier_ops.BarrierOp(1, barrier_callbacks=[helper.create_barrier_callback()])
    hook = controller_hooks.ControllerHook(barrier_op=barrier_op)
    with v1.train.SingularMonitoredSession(hooks=[hook, helper.create_stop_hook()]) as sess:
      sess.run(hook._control)
      self.assertFalse(sess.should_stop())
      sess.raw_session().run(hook.stop_op)

      sess.run(hook._control)

      self.assertTrue(sess.should_stop())
      self.assertFalse(barrier_op.is_barrier_placed(sess.raw_session()))

  def test_save(self):
    trigger_save = mock.Mock()
    hook = controller_hooks.ControllerHook(trigger_save=trigger_save)
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(hook._control)
      trigger_save.assert_not_called()
      sess.raw_session().run(hook.trigger_save_op)
      for _ in range(3):
        sess.run(hook._control)
    trigger_save.assert_called_once_with()


class QueryActionHookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    v1.reset_default_graph()
    self.dir = pathlib.Path(os.environ["TEST_TMPDIR"], "model")

  def _request(self, text):
    """Returns the response to a request, and how often a checkpoint was saved because of it."""
    trigger_save = mock.Mock()
    hook = controller_hooks.ControllerHook(trigger_save=trigger_save)
    query_hook = controller_hooks.QueryActionHook(str(self.dir), hook)
    response = self.dir / "monolith_action_response"
    with mock.patch.object(controller_hooks, "QUERY_INTERVAL", 0.1):
      with v1.train.SingularMonitoredSession(hooks=[hook, query_hook]) as sess:
        self.dir.mkdir()
        temporary = self.dir / "request"
        temporary.write_text(text)
        temporary.rename(self.dir / "monolith_action")
        deadline = time.monotonic() + 60
        while (self.dir / "monolith_action").exists() and time.monotonic() < deadline:
          time.sleep(0.05)
        sess.run(hook._control)
    self.assertFalse((self.dir / "monolith_action").exists())
    return response.read_text(), trigger_save.call_count

  def test_save(self):
    self.assertEqual(self._request("action: TRIGGER_SAVE"), ("OK", 1))

  def test_unknown_action(self):
    response, saves = self._request("action: UNKNOWN")

    self.assertIn("Unknown action: action: UNKNOWN", response)
    self.assertEqual(saves, 0)

  def test_bad_request(self):
    response, saves = self._request("action: NONSENSE")

    self.assertIn("NONSENSE", response)
    self.assertEqual(saves, 0)


if __name__ == "__main__":
  tf.test.main()
