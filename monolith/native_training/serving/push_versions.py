"""Numbers pushes, so that replicas refuse those of a parameter server that was replaced.

Every process that pushes has an epoch, the time when it began, and counts its calls. Exports have a
second signature beside each that assigns rows, which takes both numbers and refuses a call that is
not newer than the last one it has seen:

    <group>/raw_assign  ->  <group>/versioned_assign
    hashtable_assign    ->  hashtable_versioned_assign

Servers of older exports, and those that do not describe their models, get the plain call. Machines
that push the same tables one after the other need clocks that differ by less than the time between.
"""

from __future__ import annotations

import itertools
import threading
import time

import grpc
import numpy as np
from google.protobuf import any_pb2, message

from monolith.native_training.runtime.parameter_sync import prediction_service_pb2
from monolith.native_training.serving import push_rows

METADATA_METHOD = "/tensorflow.serving.PredictionService/GetModelMetadata"

# Names of the two inputs.
EPOCH = "epoch"
SEQ = "seq"

_FIELD = "signature_def"
# A replica may load another export meanwhile.
_ASK_AGAIN_SECS = 60.0


def versioned_name(signature_name: str) -> str:
  """Returns the signature that takes epoch and seq, too, for one that assigns rows."""
  return f"{signature_name.removesuffix('raw_assign').removesuffix('assign')}versioned_assign"


class PushVersions:
  """The numbers of one process's pushes, and the targets that take them. Thread-safe.

  Args:
    epoch: greater than that of every process that pushed these tables before; by default the time
      in microseconds.
  """

  def __init__(self, epoch: int | None = None):
    self.epoch = time.time_ns() // 1000 if epoch is None else epoch
    self._seqs = itertools.count(1)
    self._lock = threading.Lock()
    # (target, model, signature) -> whether the signature exists, and until when that holds.
    self._known: dict[tuple[str, str, str], tuple[bool, float]] = {}

  def number(
    self, request: prediction_service_pb2.PredictRequest
  ) -> prediction_service_pb2.PredictRequest:
    """Returns the same call with the next number, for the signature that takes it."""
    numbered = prediction_service_pb2.PredictRequest()
    numbered.CopyFrom(request)
    numbered.model_spec.signature_name = versioned_name(request.model_spec.signature_name)
    with self._lock:
      seq = next(self._seqs)
    for alias, value in ((EPOCH, self.epoch), (SEQ, seq)):
      tensor = push_rows.to_tensor_proto(np.array(value, np.int64))
      numbered.inputs[alias] = tensor.SerializeToString()
    return numbered

  def are_wanted(
    self, channel: grpc.Channel, target: str, model_name: str, signature_name: str, secs: float
  ) -> bool:
    """Returns whether a target has the numbered signature; asks it from time to time.

    Args:
      channel: the channel to the target.
      target: the target's address.
      model_name: the model.
      signature_name: the plain signature.
      secs: the time limit for the answer.

    Raises:
      grpc.RpcError: the target fails, although it implements the call.
    """
    key = (target, model_name, signature_name)
    known, until = self._known.get(key, (False, 0.0))
    if time.monotonic() < until:
      return known
    request = prediction_service_pb2.ModelMetadataRequest(metadata_field=[_FIELD])
    request.model_spec.name = model_name
    try:
      answer = channel.unary_unary(METADATA_METHOD)(request.SerializeToString(), timeout=secs)
    except grpc.RpcError as error:
      if error.code() != grpc.StatusCode.UNIMPLEMENTED:
        raise
      known = False
    else:
      known = versioned_name(signature_name) in _signature_names(answer)
    self._known[key] = (known, time.monotonic() + _ASK_AGAIN_SECS)
    return known

  def forget(self, target: str) -> None:
    """Makes the next push ask the target again."""
    for key in [key for key in self._known if key[0] == target]:
      self._known.pop(key, None)


def _signature_names(answer: bytes) -> set[str]:
  """Returns the signatures in a model's metadata, none if there are none."""
  try:
    response = prediction_service_pb2.ModelMetadataResponse.FromString(answer)
    packed = any_pb2.Any.FromString(response.metadata.get(_FIELD, b""))
    return set(prediction_service_pb2.SignatureDefMap.FromString(packed.value).signature_def)
  except message.DecodeError:
    return set()
