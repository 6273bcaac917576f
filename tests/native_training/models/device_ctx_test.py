"""Where ops are placed inside of `MonolithDeviceCtx`, and that nothing is placed after it."""

from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import distribution_utils
from monolith.native_training.graph import export_context
from monolith.native_training.models import device_ctx

tf.compat.v1.disable_eager_execution()

_Type = device_ctx.DeviceCtxType


class DeviceCtxTest(absltest.TestCase):
  def _devices(self, ctx_type: str) -> tuple[str, str]:
    """Returns the devices of an op inside and of one after it."""
    with tf.Graph().as_default():
      with device_ctx.MonolithDeviceCtx(ctx_type):
        inside = tf.constant(1.0)
      return inside.op.device, tf.constant(1.0).op.device

  def test_nothing_is_placed_without_synchronous_training(self):
    for ctx_type in _Type.all_types:
      self.assertEqual(self._devices(ctx_type), ("", ""))

  @mock.patch.object(distribution_utils, "enable_sync_training", lambda: True)
  def test_synchronous_training_places_inputs_and_models(self):
    for ctx_type in (_Type.INPUT_FN, _Type.MODEL_FN, _Type.INPUT_RECEIVER_FN):
      self.assertEqual(self._devices(ctx_type), ("/device:CPU:0", ""))
    self.assertEqual(self._devices(_Type.OTHERS), ("", ""))

  @mock.patch.object(distribution_utils, "enable_sync_training", lambda: True)
  def test_exports_are_placed_nowhere(self):
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      self.assertEqual(self._devices(_Type.MODEL_FN), ("", ""))

  @mock.patch.object(distribution_utils, "enable_sync_training", lambda: True)
  def test_the_global_step_goes_where_the_driver_wants_it(self):
    with tf.Graph().as_default(), tf.device("/job:ps/task:1"):
      with device_ctx.MonolithDeviceCtx(_Type.MODEL_FN):
        step = tf.compat.v1.train.get_or_create_global_step()
        weights = tf.constant(1.0)
      self.assertEqual(step.op.device, "/job:ps/task:1")
      self.assertEqual(weights.op.device, "/job:ps/task:1/device:CPU:0")

  @mock.patch.object(distribution_utils, "enable_sync_training", lambda: True)
  def test_an_error_ends_the_placement(self):
    with tf.Graph().as_default():
      with self.assertRaises(KeyError), device_ctx.MonolithDeviceCtx(_Type.INPUT_FN):
        raise KeyError
      self.assertEqual(tf.constant(1.0).op.device, "")

  def test_unknown_type_is_named(self):
    with self.assertRaisesRegex(AssertionError, "ctx_type is 'nothing', want one of"):
      device_ctx.MonolithDeviceCtx("nothing")


if __name__ == "__main__":
  absltest.main()
