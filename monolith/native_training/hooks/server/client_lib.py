"""Finds the controller of a training run."""

from __future__ import annotations

import os

import grpc
import tensorflow as tf

from monolith.native_training.hooks.server import constants, service_pb2_grpc


def get_stub_from_model_dir(model_dir: str) -> service_pb2_grpc.ControllerStub:
  """Returns a stub of the controller whose address is in a model folder.

  Raises:
    tf.errors.NotFoundError: no training run has begun there.
  """
  with tf.io.gfile.GFile(os.path.join(model_dir, constants.SERVER_ADDR_FILENAME)) as f:
    address = f.read().strip()
  # The server is reached directly, whatever proxy the environment names.
  channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
  return service_pb2_grpc.ControllerStub(channel)
