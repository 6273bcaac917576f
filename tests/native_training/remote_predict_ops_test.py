"""Ops of parameter sync and remote prediction: graphs with them can be built and saved."""

import subprocess
import sys

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ops

tf.compat.v1.disable_eager_execution()


def _remote_predict(input_aliases=("a", "b"), output_aliases=("x",), **kwargs):
  return ops.tf_serving_remote_predict(
    list(input_aliases),
    [tf.constant(1.0), tf.constant(["s"])],
    list(output_aliases),
    output_types=[tf.float32],
    **kwargs,
  )


class RemotePredictOpsTest(tf.test.TestCase):
  def test_the_module_is_empty_and_imports_nothing(self):
    code = (
      "import monolith.native_training.remote_predict_ops as m, sys;"
      "assert not [n for n in dir(m) if not n.startswith('__')], dir(m);"
      "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

  def test_outputs_and_defaults(self):
    result = _remote_predict(model_name="m:ps_0", task=3)

    self.assertEqual(result.status_code.dtype, tf.int32)
    self.assertEqual(result.status_code.shape.as_list(), [])
    self.assertEqual(result.status_error_message.dtype, tf.string)
    self.assertLen(result.output_tensors, 1)
    self.assertIsNone(result.output_tensors[0].shape.rank)
    op = result.status_code.op
    self.assertTrue(op.op_def.is_stateful)
    self.assertEqual(op.get_attr("model_version"), -1)
    self.assertTrue(op.get_attr("fail_op_on_rpc_error"))
    self.assertEqual(op.get_attr("max_rpc_deadline_millis"), 30)
    self.assertEqual(op.get_attr("signature_name"), b"serving_default")
    self.assertEqual(op.get_attr("old_model_name"), b"")
    self.assertEqual(op.get_attr("task"), 3)

  def test_alias_counts_are_checked_when_the_graph_is_built(self):
    with self.assertRaisesRegex(ValueError, "input_tensor_aliases has 1 elements, want .* 2"):
      _remote_predict(input_aliases=["a"])
    with self.assertRaisesRegex(ValueError, "output_tensor_aliases has 2 elements, want .* 1"):
      _remote_predict(output_aliases=["x", "y"])

  def test_running_it_says_what_is_missing(self):
    with self.session() as session:
      with self.assertRaisesRegex(tf.errors.UnimplementedError, "model 'm', .* transport"):
        session.run(_remote_predict(model_name="m"))

  def test_a_graph_with_it_survives_export_and_import(self):
    _remote_predict(model_name="m", name="remote")
    meta_graph = tf.compat.v1.train.export_meta_graph()

    with tf.Graph().as_default() as graph:
      tf.compat.v1.train.import_meta_graph(meta_graph)

      self.assertEqual(graph.get_operation_by_name("remote").type, "TfServingRemotePredict")

  def test_parameter_sync_definitions(self):
    client = ops.monolith_parameter_sync_client(config="", shared_name="MonolithSyncClient_x")
    result = ops.monolith_parameter_sync(client, b"config")
    server = ops.monolith_dummy_sync_server(address="localhost:0")
    port = ops.monolith_dummy_sync_server_get_port(server)
    shutdown = ops.monolith_dummy_sync_server_shutdown(server)

    for tensor, dtype in (
      (client, tf.resource),
      (result, tf.string),
      (server, tf.resource),
      (port, tf.int32),
      (shutdown, tf.int64),
    ):
      self.assertEqual(tensor.dtype, dtype)
      self.assertTrue(tensor.op.op_def.is_stateful)
    self.assertEqual(client.shape.as_list(), [])
    self.assertIsNone(result.shape.rank)
    self.assertIsNone(port.shape.rank)


if __name__ == "__main__":
  tf.test.main()
