"""Scores batches with a SavedModel in this process, or with a model of a server."""

from __future__ import annotations

import os
import re
from typing import Any

import grpc
import numpy as np
import tensorflow as tf

from monolith import _install
from monolith.serving.errors import ServingError, invalid
from monolith.serving.servable import DEFAULT_SIGNATURE, Servable, Signature

with _install.naming_extra("serving"):
  from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
  )

_TIMEOUT_SECS = 60
_VERSION = re.compile(r"[0-9]{1,18}")


class LocalScorer:
  """Scores with a SavedModel.

  Args:
    path: its folder, or one with a folder per version, of which the newest is taken.
    signature_name: the signature's name.

  Raises:
    ServingError: there is no such model or signature.
  """

  def __init__(self, path: str, signature_name: str = DEFAULT_SIGNATURE):
    versions = _list_versions(path)
    if versions and not tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
      path = versions[max(versions)]
    self._servable = Servable(path)
    self.signature = self._servable.signature(signature_name)

  def score(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the outputs of a batch.

    Raises:
      ServingError: the batch does not fit the signature, or the model failed.
    """
    return self._servable.run(self.signature, inputs)

  def close(self) -> None:
    """Frees the model."""
    self._servable.close()


class RemoteScorer:
  """Scores with a model of a server.

  Args:
    address: `host:port` of the server's gRPC.
    model_name: the model's name.
    signature_name: the signature's name.

  Raises:
    ServingError: the server has no such model or signature, or cannot be reached.
  """

  def __init__(self, address: str, model_name: str, signature_name: str = DEFAULT_SIGNATURE):
    self._model_name = model_name
    self._channel = grpc.insecure_channel(
      address,
      options=[
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
      ],
    )
    self._stub = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = model_name
    response = self._call(self._stub.GetModelMetadata, request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    if signature_name not in signatures.signature_def:
      raise invalid(
        f"model {model_name!r} has no signature {signature_name!r}, only "
        f"{sorted(signatures.signature_def)}"
      )
    self.signature = Signature(signature_name, signatures.signature_def[signature_name])

  def score(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the outputs of a batch.

    Raises:
      ServingError: the server answered with an error, or cannot be reached.
    """
    request = predict_pb2.PredictRequest()
    request.model_spec.name = self._model_name
    request.model_spec.signature_name = self.signature.name
    for key, array in inputs.items():
      request.inputs[key].CopyFrom(tf.make_tensor_proto(array))
    response = self._call(self._stub.Predict, request)
    return {key: tf.make_ndarray(proto) for key, proto in response.outputs.items()}

  def close(self) -> None:
    """Ends the connection."""
    self._channel.close()

  def _call(self, method: grpc.UnaryUnaryMultiCallable, request: Any) -> Any:
    try:
      return method(request, timeout=_TIMEOUT_SECS)
    except grpc.RpcError as error:
      raise ServingError(error.code(), error.details() or "") from error


def _list_versions(base_path: str) -> dict[int, str]:
  """Returns folder by version of the numbered folders in `base_path`; empty if it is missing."""
  versions = {}
  try:
    names = tf.io.gfile.listdir(base_path)
  except tf.errors.OpError:
    return {}
  for name in names:
    name = name.rstrip("/")  # listdir of some file systems ends folders with a slash
    path = os.path.join(base_path, name)
    if _VERSION.fullmatch(name) and tf.io.gfile.isdir(path):
      versions[int(name)] = path
  return versions
