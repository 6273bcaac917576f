"""Classify, Regress and MultiInference, for models with signatures of those methods.

Monolith's exports have none; SavedModels of TensorFlow's own estimators do. Such a signature takes
serialized `tf.Example`s, which these requests carry as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
  classification_pb2,
  inference_pb2,
  input_pb2,
  regression_pb2,
)

from monolith.serving import prediction
from monolith.serving.errors import ServingError, invalid
from monolith.serving.json_tensors import to_bytes
from monolith.serving.servable import Servable, Signature

_constants = tf.compat.v1.saved_model.signature_constants
CLASSIFY = _constants.CLASSIFY_METHOD_NAME
REGRESS = _constants.REGRESS_METHOD_NAME
_CLASSES = _constants.CLASSIFY_OUTPUT_CLASSES
_SCORES = _constants.CLASSIFY_OUTPUT_SCORES
_OUTPUTS = _constants.REGRESS_OUTPUTS


def find_signature(servable: Servable, name: str, method: str) -> Signature:
  """Returns a signature of a method.

  Raises:
    ServingError: UNIMPLEMENTED, the model has none of this method; INVALID_ARGUMENT, the one that
      is named is of another, or there is no such one.
  """
  if not any(s.definition.method_name == method for s in servable.signatures.values()):
    raise ServingError(
      grpc.StatusCode.UNIMPLEMENTED, f"the model has no signature of the method {method}"
    )
  signature = servable.signature(name)
  if signature.definition.method_name != method:
    raise invalid(
      f"signature {signature.name!r} is of the method {signature.definition.method_name!r}, want "
      f"{method!r}"
    )
  return signature


def to_examples(message: input_pb2.Input) -> list[bytes]:
  """Returns the serialized examples of a request, each with what they have in common.

  Raises:
    ServingError: INVALID_ARGUMENT, there are none.
  """
  if message.WhichOneof("kind") == "example_list_with_context":
    examples = []
    for example in message.example_list_with_context.examples:
      merged = tf.train.Example()
      merged.CopyFrom(message.example_list_with_context.context)
      for name, feature in example.features.feature.items():
        merged.features.feature[name].CopyFrom(feature)
      examples.append(merged.SerializeToString())
  else:
    examples = [example.SerializeToString() for example in message.example_list.examples]
  if not examples:
    raise invalid("the request has no examples")
  return examples


def classify(
  servable: Servable, signature: Signature, examples: Sequence[bytes]
) -> classification_pb2.ClassificationResult:
  """Returns classes and scores of examples.

  Raises:
    ServingError: the model failed, or its outputs are not classes and scores of each example.
  """
  outputs = _run(servable, signature, examples)
  classes, scores = outputs.get(_CLASSES), outputs.get(_SCORES)
  if classes is None and scores is None:
    raise _odd_outputs(signature, outputs)
  for array in (classes, scores):
    if array is not None and (array.ndim != 2 or len(array) != len(examples)):
      raise _odd_outputs(signature, outputs)
  if classes is not None and scores is not None and classes.shape != scores.shape:
    raise _odd_outputs(signature, outputs)
  width = next(array.shape[1] for array in (scores, classes) if array is not None)
  result = classification_pb2.ClassificationResult()
  for row in range(len(examples)):
    classification = result.classifications.add()
    for column in range(width):
      found = classification.classes.add()
      if classes is not None:
        found.label = tf.compat.as_str_any(classes[row, column])
      if scores is not None:
        found.score = scores[row, column]
  return result


def regress(
  servable: Servable, signature: Signature, examples: Sequence[bytes]
) -> regression_pb2.RegressionResult:
  """Returns the value of each example.

  Raises:
    ServingError: the model failed, or its output is not one value per example.
  """
  outputs = _run(servable, signature, examples)
  values = outputs.get(_OUTPUTS)
  if values is None or values.size != len(examples):
    raise _odd_outputs(signature, outputs)
  result = regression_pb2.RegressionResult()
  for value in values.ravel():
    result.regressions.add(value=value)
  return result


def infer(
  servable: Servable, task: inference_pb2.InferenceTask, examples: Sequence[bytes]
) -> inference_pb2.InferenceResult:
  """Returns the result of one task of a MultiInference request.

  Raises:
    ServingError: as `find_signature`, `classify` and `regress`.
  """
  result = inference_pb2.InferenceResult()
  signature = find_signature(servable, task.model_spec.signature_name, task.method_name)
  result.model_spec.signature_name = signature.name
  if task.method_name == CLASSIFY:
    result.classification_result.CopyFrom(classify(servable, signature, examples))
  elif task.method_name == REGRESS:
    result.regression_result.CopyFrom(regress(servable, signature, examples))
  else:
    raise ServingError(
      grpc.StatusCode.UNIMPLEMENTED, f"the method is {task.method_name!r}, want {CLASSIFY!r}"
    )
  return result


def examples_from_json(document: dict[str, Any]) -> list[bytes]:
  """Returns the serialized examples of a REST request: `examples`, and `context` of all.

  Raises:
    ServingError: INVALID_ARGUMENT, it has other keys or values.
  """
  unknown = sorted(set(document) - {"signature_name", "context", "examples"})
  if unknown:
    raise invalid(f"unknown keys {unknown[:16]}")
  context, examples = document.get("context", {}), document.get("examples")
  if not isinstance(examples, list) or not examples:
    raise invalid("examples is not a list with elements")
  serialized = []
  for number, features in enumerate(examples):
    if not isinstance(features, dict) or not isinstance(context, dict):
      raise invalid(f"example {number} or the context is not an object")
    example = tf.train.Example()
    for name, value in {**context, **features}.items():
      _set_feature(example.features.feature[name], name, value)
    serialized.append(example.SerializeToString())
  return serialized


def _set_feature(feature: tf.train.Feature, name: str, value: Any) -> None:
  values = value if isinstance(value, list) else [value]
  kinds = {type(element) for element in values}
  try:
    if kinds == {int}:
      feature.int64_list.value.extend(values)
    elif kinds <= {int, float}:
      feature.float_list.value.extend(values)
    elif kinds <= {str, dict}:
      feature.bytes_list.value.extend(to_bytes(name, element) for element in values)
    else:
      raise invalid(f"feature {name!r} has values of {sorted(kind.__name__ for kind in kinds)}")
  except (ValueError, OverflowError) as error:
    raise invalid(f"feature {name!r}: {error}") from error


def _run(
  servable: Servable, signature: Signature, examples: Sequence[bytes]
) -> dict[str, np.ndarray]:
  if len(signature.inputs) != 1:
    raise ServingError(
      grpc.StatusCode.FAILED_PRECONDITION,
      f"signature {signature.name!r} takes {sorted(signature.inputs)}, want serialized examples",
    )
  array = np.empty(len(examples), object)
  array[:] = list(examples)
  return prediction.predict_arrays(servable, signature, {next(iter(signature.inputs)): array})


def _odd_outputs(signature: Signature, outputs: dict[str, np.ndarray]) -> ServingError:
  shapes = {name: list(array.shape) for name, array in outputs.items()}
  return ServingError(
    grpc.StatusCode.FAILED_PRECONDITION,
    f"signature {signature.name!r} answers with {shapes}, which is not a "
    f"{signature.definition.method_name}",
  )
