"""The error that an answer carries, with the code that the two protocols give to it."""

from __future__ import annotations

import grpc
import tensorflow as tf

# HTTP statuses of gRPC codes; what is missing here is 500.
_HTTP_STATUSES = {
  grpc.StatusCode.INVALID_ARGUMENT: 400,
  grpc.StatusCode.OUT_OF_RANGE: 400,
  grpc.StatusCode.UNAUTHENTICATED: 401,
  grpc.StatusCode.PERMISSION_DENIED: 403,
  grpc.StatusCode.NOT_FOUND: 404,
  grpc.StatusCode.ALREADY_EXISTS: 409,
  grpc.StatusCode.ABORTED: 409,
  grpc.StatusCode.FAILED_PRECONDITION: 412,
  grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
  grpc.StatusCode.CANCELLED: 499,
  grpc.StatusCode.UNIMPLEMENTED: 501,
  grpc.StatusCode.UNAVAILABLE: 503,
  grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
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

  @property
  def http_status(self) -> int:
    """Returns the status of an HTTP answer."""
    return _HTTP_STATUSES.get(self.code, 500)


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
