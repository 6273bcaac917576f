"""Writes a warm-up file for a model from samples that it may be asked for.

  python -m monolith.native_training.model_export.warmup_data_gen --input=instances \\
      --format=instance --output=model/assets.extra/tf_serving_warmup_requests

For random samples there is `data_gen_utils.gen_warmup_file`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf

from monolith import _install
from monolith.serving.errors import ServingError
from monolith.serving.sample_files import RecordHeader, read_records, read_tfrecords

with _install.naming_extra("serving"):
  from tensorflow_serving.apis import prediction_log_pb2

# A server reads no more, as TensorFlow Serving does: a longer file would delay the model for long.
MAX_RECORDS = 1000
_INPUT_NAMES = {"instance": "instances", "example": "examples", "example_batch": "example_batch"}


def gen_prediction_logs(
  records: Iterator[bytes],
  batch_size: int,
  model_name: str,
  signature_names: Sequence[str],
  input_name: str,
) -> Iterator[prediction_log_pb2.PredictionLog]:
  """Yields requests with the samples, for each signature one per batch.

  Args:
    records: serialized samples.
    batch_size: how many are in a request; a rest is left out.
    model_name: the model of the requests.
    signature_names: its signatures.
    input_name: the key of the samples.
  """
  batch: list[bytes] = []
  for record in records:
    batch.append(record)
    if len(batch) == batch_size:
      for signature_name in signature_names:
        log = prediction_log_pb2.PredictionLog()
        request = log.predict_log.request
        request.model_spec.name = model_name
        request.model_spec.signature_name = signature_name
        request.inputs[input_name].CopyFrom(tf.make_tensor_proto(batch, tf.string))
        yield log
      batch = []


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the file that the flags name; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  add = parser.add_argument
  add("--input", required=True, help="file of samples")
  add("--format", choices=[*_INPUT_NAMES, "tfrecord"], default="instance", help="its format")
  add("--output", required=True, help="the warm-up file")
  add("--batch_size", type=int, default=8, help="samples in a request")
  add("--max_records", type=int, default=MAX_RECORDS, help="most requests")
  add("--model_name", default="entry", help="model of the requests")
  add("--signature_name", default="serving_default", help="its signatures, separated by commas")
  add("--input_name", default="", help="key of the samples; by default that of the format")
  for name in RecordHeader._fields:
    add(f"--{name}", action="store_true", help="part of the header of the records")
  flags = parser.parse_args(arguments)
  if not 1 <= flags.max_records <= MAX_RECORDS:
    parser.error(f"--max_records is {flags.max_records}, want 1 to {MAX_RECORDS}")
  if flags.batch_size < 1:
    parser.error(f"--batch_size is {flags.batch_size}, want at least 1")
  batch_size = 1 if flags.format == "example_batch" else flags.batch_size
  header = RecordHeader(*(getattr(flags, name) for name in RecordHeader._fields))
  records = (
    read_tfrecords(flags.input) if flags.format == "tfrecord" else read_records(flags.input, header)
  )
  logs = gen_prediction_logs(
    records,
    batch_size,
    flags.model_name,
    flags.signature_name.split(","),
    flags.input_name or _INPUT_NAMES.get(flags.format, "examples"),
  )
  count = 0
  temporary = f"{flags.output}-tmp"
  try:
    tf.io.gfile.makedirs(os.path.dirname(os.path.abspath(flags.output)))
    with tf.io.TFRecordWriter(temporary) as writer:
      for log in logs:
        writer.write(log.SerializeToString())
        count += 1
        if count == flags.max_records:
          break
  except (ServingError, tf.errors.OpError) as error:
    if tf.io.gfile.exists(temporary):
      tf.io.gfile.remove(temporary)
    print(f"error: {error}", file=sys.stderr)
    return 1
  if count == 0:
    tf.io.gfile.remove(temporary)
    print(f"error: {flags.input} has fewer than {batch_size} samples", file=sys.stderr)
    return 1
  # A reader never sees half a file.
  tf.io.gfile.rename(temporary, flags.output, overwrite=True)
  print(f"{count} requests in {flags.output}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
