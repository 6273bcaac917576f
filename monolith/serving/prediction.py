"""From a `PredictRequest` to a `PredictResponse`, for every way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tensorflow_serving.apis import predict_pb2

from monolith.serving import tensors
from monolith.serving.errors import from_exception
from monolith.serving.servable import Servable, Signature

# Runs a signature now, or together with other requests.
Runner = Callable[
  [Servable, Signature, Mapping[str, np.ndarray], "tuple[str, ...]"], "dict[str, np.ndarray]"
]


def run_directly(
  servable: Servable,
  signature: Signature,
  inputs: Mapping[str, np.ndarray],
  outputs: tuple[str, ...],
) -> dict[str, np.ndarray]:
  """The `Runner` without batching."""
  return servable.run(signature, inputs, outputs)


def predict_arrays(
  servable: Servable,
  signature: Signature,
  inputs: Mapping[str, np.ndarray],
  output_filter: Sequence[str] = (),
  runner: Runner = run_directly,
) -> dict[str, np.ndarray]:
  """Answers a request that is arrays already.

  Raises:
    ServingError: the request does not fit the signature, or the graph failed.
  """
  outputs = signature.select_outputs(output_filter)
  signature.check_inputs(inputs)
  try:
    return runner(servable, signature, inputs, outputs)
  except Exception as error:
    raise from_exception(error) from error


def predict(
  servable: Servable, request: predict_pb2.PredictRequest, runner: Runner = run_directly
) -> predict_pb2.PredictResponse:
  """Answers a request; name and version in the answer are the caller's to set.

  Raises:
    ServingError: the request does not fit the signature, or the graph failed.
  """
  signature = servable.signature(request.model_spec.signature_name)
  # Names first: what is missing says more than what is wrong with the rest.
  signature.check_names(request.inputs)
  tensors.check_total(request.inputs)
  inputs = {key: tensors.to_array(key, proto) for key, proto in request.inputs.items()}
  answer = predict_arrays(servable, signature, inputs, request.output_filter, runner)
  response = predict_pb2.PredictResponse()
  response.model_spec.signature_name = signature.name
  for key, array in answer.items():
    response.outputs[key].CopyFrom(tensors.to_proto(array))
  return response
