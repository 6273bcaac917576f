"""Prints a warm-up file.

python -m monolith.native_training.model_export.warmup_data_decoder FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf
from google.protobuf import message

from monolith import _install
from monolith.serving.sample_files import read_tfrecords

with _install.naming_extra("serving"):
  from tensorflow_serving.apis import prediction_log_pb2


def decode(path: str) -> Iterator[str]:
  """Yields a line per request: model, signature, and type and shape of its inputs.

  Raises:
    ValueError: the file has something else.
    tf.errors.OpError: it cannot be read, or is torn.
  """
  for number, record in enumerate(read_tfrecords(path)):
    try:
      log = prediction_log_pb2.PredictionLog.FromString(record)
    except message.DecodeError as error:
      raise ValueError(f"record {number} of {path} is not a PredictionLog: {error}") from error
    request = log.predict_log.request
    inputs = []
    for name, tensor in sorted(request.inputs.items()):
      try:
        dtype = tf.dtypes.as_dtype(tensor.dtype).name
      except TypeError as error:
        raise ValueError(f"record {number} of {path}: input {name!r}: {error}") from error
      inputs.append(f"{name} {dtype}{[dim.size for dim in tensor.tensor_shape.dim]}")
    yield f"{request.model_spec.name} {request.model_spec.signature_name}: {', '.join(inputs)}"


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the file that the argument names; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("file")
  flags = parser.parse_args(arguments)
  try:
    for line in decode(flags.file):
      print(line)
  except (ValueError, tf.errors.OpError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
