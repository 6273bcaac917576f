"""The error of a request that a model cannot answer, with its code of gRPC."""

from __future__ import annotations

import grpc
import tensorflow as tf

_CODES = {code.value[0]: code for code in grpc.StatusCode}

# A session's message can quote a whole graph; gRPC sends details as a header of limited size.
MAX_MESSAGE_CHARS = 1024


class ServingError(Exception):
  """A request that cannot be answered.

  Args:
    code: what went wrong, in gRPC's words.
    message: what the client is told.
  """

  def __init__(self, code: grpc.StatusCode, message: str):
    super().__init__(message[:MAX_MESSAGE_CHARS])
    self.code = code


def invalid(message: str) -> ServingError:
  """Returns the error of a request that no model could answer."""
  return ServingError(grpc.StatusCode.INVALID_ARGUMENT, message)


def from_exception(error: BaseException) -> ServingError:
  """Returns `error` as an answer: TensorFlow's errors keep their code, others are INTERNAL."""
  if isinstance(error, ServingError):
    return error
  if isinstance(error, tf.errors.OpError):
    code = _CODES.get(error.error_code, grpc.StatusCode.UNKNOWN)
    return ServingError(code, error.message or str(error))
  if isinstance(error, MemoryError):
    return ServingError(grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory")
  return ServingError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
