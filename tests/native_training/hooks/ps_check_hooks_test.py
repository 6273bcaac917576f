"""Tests of the parameter servers' health checks."""

import threading
from unittest import mock

import tensorflow as tf
from absl.testing import flagsaver

from monolith.native_training import barrier_ops
from monolith.native_training.hooks import ps_check_hooks
from monolith.native_training.runtime.ops import logging_ops_pb2

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


class _RaisingHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self, method: str):
    setattr(self, method, self._raise)

  def _raise(self, *args):
    raise tf.errors.DeadlineExceededError(None, None, "too slow")


class PsCheckHooksTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    v1.reset_default_graph()
    self.reported = threading.Event()
    self.results = []

  def _report(self, results):
    self.results.append(results)
    self.reported.set()

  def _hook(self, num_ps=1):
    self.barrier_op = barrier_ops.BarrierOp(1)
    config = ps_check_hooks.Config(
      self.barrier_op, num_ps, ps_device_fn=lambda i: None, report_fn=self._report
    )
    return ps_check_hooks.PsHealthCheckerHook(config)

  def test_basic(self):
    with v1.train.SingularMonitoredSession(hooks=[self._hook()]) as sess:
      sess.run(tf.compat.v1.get_default_graph().get_tensor_by_name("ps_machine_info_0:0").op)
    self.assertEqual(self.results, [])

  def test_report(self):
    with flagsaver.flagsaver(monolith_default_machine_info_mem_limit=0):
      hook = self._hook(num_ps=2)
      with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        self.assertTrue(self.reported.wait(60))
        raw = sess.raw_session()
        while not self.barrier_op.is_barrier_placed(raw):
          threading.Event().wait(0.01)

    self.assertLen(self.results, 1)
    self.assertEqual(list(self.results[0]), [0, 1])
    self.assertEqual(self.results[0][0].status, logging_ops_pb2.MachineHealthResult.OUT_OF_MEMORY)

  def test_barrier_that_is_placed_already(self):
    with flagsaver.flagsaver(monolith_default_machine_info_mem_limit=0):
      hook = self._hook()
      with mock.patch.object(
        self.barrier_op, "place_barrier", side_effect=barrier_ops.BarrierAlreadyPlacedError
      ) as place:
        with v1.train.SingularMonitoredSession(hooks=[hook]):
          self.assertTrue(self.reported.wait(60))
        place.assert_called_once()

  def test_default_report(self):
    result = logging_ops_pb2.MachineHealthResult(
      status=logging_ops_pb2.MachineHealthResult.OUT_OF_MEMORY, message="9 GB"
    )
    with self.assertLogs("absl", "ERROR") as logs:
      ps_check_hooks._default_report({3: result, 1: result})

    self.assertLen(logs.output, 2)
    self.assertIn("PS 1 is not healthy: OUT_OF_MEMORY 9 GB", logs.output[0])

  def test_after_create_session_error(self):
    with self.assertRaises(tf.errors.DeadlineExceededError):
      with v1.train.SingularMonitoredSession(
        hooks=[self._hook(), _RaisingHook("after_create_session")]
      ):
        pass

  def test_before_run_error(self):
    constant = tf.constant(1)
    with self.assertRaises(tf.errors.DeadlineExceededError):
      with v1.train.SingularMonitoredSession(
        hooks=[self._hook(), _RaisingHook("before_run")]
      ) as sess:
        sess.run(constant)

  def test_shared_name(self):
    self.assertEqual(ps_check_hooks.get_ps_machine_info_shared_name(3), "ps_machine_info_3")


if __name__ == "__main__":
  tf.test.main()
