"""Tests of finding the controller of a training run."""

import concurrent.futures
import os
from unittest import mock

import grpc
import tensorflow as tf

from monolith.native_training.hooks.server import (
  client_lib,
  constants,
  service_pb2,
  service_pb2_grpc,
)


class _Controller(service_pb2_grpc.ControllerServicer):
  def GetTrainingStatus(self, request, context):
    return service_pb2.GetTrainingStatusResponse(global_step=42)


class ClientLibTest(tf.test.TestCase):
  def test_address_is_in_the_model_folder(self):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_ControllerServicer_to_server(_Controller(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    self.addCleanup(server.stop, None)
    folder = self.create_tempdir()
    folder.create_file(constants.SERVER_ADDR_FILENAME, f"127.0.0.1:{port}\n")

    # A proxy that does not exist must not be asked.
    with mock.patch.dict(os.environ, {"http_proxy": "http://127.0.0.1:1"}):
      stub = client_lib.get_stub_from_model_dir(folder.full_path)
      response = stub.GetTrainingStatus(service_pb2.GetTrainingStatusRequest(), timeout=60)

    self.assertEqual(response.global_step, 42)

  def test_no_controller(self):
    with self.assertRaises(tf.errors.NotFoundError):
      client_lib.get_stub_from_model_dir(self.create_tempdir().full_path)


if __name__ == "__main__":
  tf.test.main()
