"""Descriptions of TensorFlow Serving's services, for gRPC's reflection.

`tensorflow-serving-api` ships messages that load with every protobuf, but the two modules that
describe services were generated so long ago that protobuf 4 refuses them.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool
from tensorflow_serving.apis import (  # noqa: F401 (their messages must be in the pool)
  classification_pb2,
  get_model_metadata_pb2,
  get_model_status_pb2,
  inference_pb2,
  model_management_pb2,
  predict_pb2,
  regression_pb2,
)

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"

_PACKAGE = "tensorflow.serving"
_METHODS = {
  PREDICTION_SERVICE: {
    "Classify": ("ClassificationRequest", "ClassificationResponse"),
    "Regress": ("RegressionRequest", "RegressionResponse"),
    "Predict": ("PredictRequest", "PredictResponse"),
    "MultiInference": ("MultiInferenceRequest", "MultiInferenceResponse"),
    "GetModelMetadata": ("GetModelMetadataRequest", "GetModelMetadataResponse"),
  },
  MODEL_SERVICE: {
    "GetModelStatus": ("GetModelStatusRequest", "GetModelStatusResponse"),
    "HandleReloadConfigRequest": ("ReloadConfigRequest", "ReloadConfigResponse"),
  },
}


def register() -> None:
  """Describes both services in the default pool, unless something did so before."""
  pool = descriptor_pool.Default()
  for service, methods in _METHODS.items():
    try:
      pool.FindServiceByName(service)
      continue
    except KeyError:
      pass
    name = service.rpartition(".")[2]
    file = descriptor_pb2.FileDescriptorProto(
      name=f"monolith/serving/{name}.proto", package=_PACKAGE, syntax="proto3"
    )
    described = file.service.add(name=name)
    for method, types in methods.items():
      messages = [pool.FindMessageTypeByName(f"{_PACKAGE}.{kind}") for kind in types]
      described.method.add(
        name=method,
        input_type=f".{messages[0].full_name}",
        output_type=f".{messages[1].full_name}",
      )
      for message in messages:
        if message.file.name not in file.dependency:
          file.dependency.append(message.file.name)
    pool.AddSerializedFile(file.SerializeToString())
