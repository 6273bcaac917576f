"""Tests of the controller's gRPC server."""

import os
from unittest import mock

import grpc
import tensorflow as tf

from monolith.native_training import barrier_ops, save_utils
from monolith.native_training.hooks.server import client_lib, constants, server_lib, service_pb2

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


class ServerTest(tf.test.TestCase):
  def test_basic(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    barrier_op = barrier_ops.BarrierOp(1)
    saver = save_utils.PartialRecoverySaver(allow_empty=True)
    saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
      model_dir, save_steps=1000000, saver=saver
    )
    hook = server_lib.ServerHook(model_dir, barrier_op, saver_hook)
    hook.end(None)
    with v1.train.SingularMonitoredSession(hooks=[saver_hook, hook]) as sess:
      sess.run(train_op)
      self.assertTrue(os.path.exists(os.path.join(model_dir, constants.SERVER_ADDR_FILENAME)))
      stub = client_lib.get_stub_from_model_dir(model_dir)

      stub.StopTraining(service_pb2.StopTrainingRequest())
      with self.assertRaises(grpc.RpcError) as raised:
        stub.StopTraining(service_pb2.StopTrainingRequest())
      self.assertEqual(raised.exception.code(), grpc.StatusCode.ALREADY_EXISTS)
      self.assertEqual(raised.exception.details(), "Barrier is placed already.")
      status = stub.GetBlockStatus(service_pb2.GetBlockStatusRequest())
      self.assertEqual(list(status.blocked_indices), [0])
      stub.ResumeTraining(service_pb2.ResumeTrainingRequest())
      status = stub.GetBlockStatus(service_pb2.GetBlockStatusRequest())
      self.assertEqual(list(status.blocked_indices), [])
      self.assertEqual(list(status.unblocked_indices), [0])

      stub.SaveCheckpoint(service_pb2.SaveCheckpointRequest())
      self.assertEqual(
        tf.train.latest_checkpoint(model_dir), os.path.join(model_dir, "model.ckpt-1")
      )
      status = stub.GetTrainingStatus(service_pb2.GetTrainingStatusRequest())
      self.assertEqual(status.global_step, 1)
    with self.assertRaises(grpc.RpcError):
      stub.GetTrainingStatus(service_pb2.GetTrainingStatusRequest(), timeout=5)

  def test_save_that_fails_is_answered_with_its_error(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    barrier_op = barrier_ops.BarrierOp(1)
    listener = tf.compat.v1.train.CheckpointSaverListener()
    # The hook of realtime training, which goes on after its scheduled saves.
    saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
      model_dir,
      save_steps=1000000,
      saver=save_utils.PartialRecoverySaver(allow_empty=True),
      listeners=[listener],
      ignore_save_errors=True,
    )
    hook = server_lib.ServerHook(model_dir, barrier_op, saver_hook)
    with v1.train.SingularMonitoredSession(hooks=[saver_hook, hook]) as sess:
      sess.run(train_op)
      stub = client_lib.get_stub_from_model_dir(model_dir)

      with mock.patch.object(listener, "before_save", side_effect=OSError("the disk is full")):
        with self.assertRaises(grpc.RpcError) as raised:
          stub.SaveCheckpoint(service_pb2.SaveCheckpointRequest())

      self.assertEqual(raised.exception.code(), grpc.StatusCode.INTERNAL)
      self.assertIn("the disk is full", raised.exception.details())
      self.assertIsNone(tf.train.latest_checkpoint(model_dir))
      stub.SaveCheckpoint(service_pb2.SaveCheckpointRequest())
      self.assertIsNotNone(tf.train.latest_checkpoint(model_dir))


if __name__ == "__main__":
  tf.test.main()
