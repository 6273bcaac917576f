"""Tests of a sub-model in its own graph."""

from unittest import mock

import tensorflow as tf

from monolith.native_training.graph import export_context
from monolith.native_training.model_export import export_utils

tf.compat.v1.disable_eager_execution()


class RemotePredictHelperTest(tf.test.TestCase):
  def test_basic(self):
    with export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as ctx:
      with tf.Graph().as_default():
        inputs = {"x": tf.constant([1.0], name="x"), "y": (tf.constant([2.0], name="y"),)}
        remote_graph = ctx.sub_graph("remote")
        with remote_graph.as_default():
          helper = export_utils.RemotePredictHelper(
            "call", inputs, lambda tensors: {"sum": tensors["x"] + tensors["y"][0]}
          )
        with mock.patch.object(export_utils, "remote_predict") as remote_predict:
          remote_predict.return_value = [tf.constant([3.0])]
          result = helper.call_remote_predict("model:remote", old_model_name="remote", task=1)

      (signature,) = ctx.signatures(remote_graph)

    self.assertEqual(signature.name, "call")
    self.assertEqual(sorted(signature.inputs), ["x_0", "y_0"])
    self.assertEqual(signature.inputs["x_0"].name, "x_0_remote_input_ph:0")
    self.assertIs(signature.inputs["x_0"].graph, remote_graph)
    self.assertEqual(list(result), ["sum"])
    args, kwargs = remote_predict.call_args
    self.assertEqual(args[0], ["x_0", "y_0"])
    self.assertEqual(args[2], list(signature.outputs))
    self.assertEqual(kwargs["model_name"], "model:remote")
    self.assertEqual(kwargs["signature_name"], "call")
    self.assertEqual(kwargs["task"], 1)

  def test_ragged_inputs(self):
    with export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as ctx:
      with tf.Graph().as_default():
        ragged = tf.ragged.constant([[1, 2], []], dtype=tf.int64)
        with ctx.sub_graph("remote").as_default():
          helper = export_utils.RemotePredictHelper(
            "call", ragged, lambda remote: tf.reduce_sum(remote, axis=1)
          )
        result = helper.call_remote_predict("model:remote")

    self.assertEqual(result.dtype, tf.int64)

  def test_colliding_outputs(self):
    with export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED):
      with tf.Graph().as_default(), tf.Graph().as_default():
        x = tf.constant(1.0)
        with self.assertRaises(AssertionError):
          export_utils._unique([x.name, x.name])


if __name__ == "__main__":
  tf.test.main()
