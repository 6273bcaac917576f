"""Requests that a model answers before its first client's, from a file in its folder.

<model>/assets.extra/tf_serving_warmup_requests      a TFRecord file of PredictionLog
"""

from __future__ import annotations

import os

import grpc
import tensorflow as tf
from absl import logging
from google.protobuf import message
from tensorflow_serving.apis import prediction_log_pb2

from monolith.serving import prediction
from monolith.serving.errors import ServingError, from_exception
from monolith.serving.sample_files import read_tfrecords
from monolith.serving.servable import Servable

WARMUP_PATH = os.path.join("assets.extra", "tf_serving_warmup_requests")
# As TensorFlow Serving: a longer file is a mistake, and would delay the model for long.
MAX_RECORDS = 1000

# The model is fine, what it calls is not there yet: it must not wait for what may wait for it.
_ELSEWHERE = (
  grpc.StatusCode.UNAVAILABLE,
  grpc.StatusCode.DEADLINE_EXCEEDED,
  grpc.StatusCode.UNIMPLEMENTED,
)


def warm_up(servable: Servable) -> int:
  """Answers the requests of the model's warm-up file, if it has one.

  Returns:
    How many were answered. A request that needs a server which cannot be reached ends the warm-up
    with a warning.

  Raises:
    ServingError: the file cannot be read, or the model refuses a request.
  """
  path = os.path.join(servable.path, WARMUP_PATH)
  if not tf.io.gfile.exists(path):
    return 0
  answered = 0
  try:
    for record in read_tfrecords(path):
      if answered == MAX_RECORDS:
        raise ServingError(
          grpc.StatusCode.INVALID_ARGUMENT, f"there are more than {MAX_RECORDS} requests"
        )
      log = prediction_log_pb2.PredictionLog.FromString(record)
      if log.WhichOneof("log_type") != "predict_log":
        raise ServingError(
          grpc.StatusCode.UNIMPLEMENTED,
          f"record {answered} is a {log.WhichOneof('log_type')}, want a predict_log",
        )
      try:
        prediction.predict(servable, log.predict_log.request)
      except ServingError as error:
        if error.code not in _ELSEWHERE:
          raise
        logging.warning("Model %s is not warm: request %d: %s", servable.path, answered, error)
        return answered
      answered += 1
  except (tf.errors.OpError, message.DecodeError, ServingError) as error:
    reason = from_exception(error)
    code = grpc.StatusCode.DATA_LOSS if isinstance(error, message.DecodeError) else reason.code
    raise ServingError(code, f"cannot warm up with {path}: {reason}") from error
  return answered
