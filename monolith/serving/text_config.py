"""Small text-format messages of TensorFlow Serving that `tensorflow-serving-api` does not ship."""

from __future__ import annotations

import tensorflow as tf
from google.protobuf import (
  descriptor_pb2,
  descriptor_pool,
  message,
  message_factory,
  text_format,
  wrappers_pb2,
)

from monolith.serving.errors import invalid

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "monolith.serving.text_config"


def _define() -> descriptor_pool.DescriptorPool:
  """Declares the two messages in a pool of their own; only field names matter in text."""
  pool = descriptor_pool.DescriptorPool()
  pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
  file = descriptor_pb2.FileDescriptorProto(
    name="monolith/serving/text_config.proto",
    package=_PACKAGE,
    syntax="proto3",
    dependency=[wrappers_pb2.DESCRIPTOR.name],
  )
  batching = file.message_type.add(name="BatchingParameters")
  for number, name in enumerate(
    ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads"), 1
  ):
    batching.field.add(
      name=name,
      number=number,
      label=_Field.LABEL_OPTIONAL,
      type=_Field.TYPE_MESSAGE,
      type_name=".google.protobuf.Int64Value",
    )
  batching.field.add(
    name="allowed_batch_sizes",
    number=6,
    label=_Field.LABEL_REPEATED,
    type=_Field.TYPE_INT64,
  )
  ssl = file.message_type.add(name="SSLConfig")
  for number, name in enumerate(("server_key", "server_cert", "custom_ca"), 1):
    ssl.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
  ssl.field.add(name="client_verify", number=4, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_BOOL)
  pool.Add(file)
  return pool


_pool = _define()


def read(kind: str, path: str) -> message.Message:
  """Reads a file.

  Args:
    kind: `BatchingParameters` or `SSLConfig`.
    path: the file, in text format.

  Raises:
    ServingError: INVALID_ARGUMENT, it cannot be read, or has a field that this server has no use
      for.
  """
  descriptor = _pool.FindMessageTypeByName(f"{_PACKAGE}.{kind}")
  if hasattr(message_factory, "GetMessageClass"):
    found = message_factory.GetMessageClass(descriptor)()
  else:  # protobuf before 4.22
    found = message_factory.MessageFactory(_pool).GetPrototype(descriptor)()
  try:
    with tf.io.gfile.GFile(path) as stream:
      return text_format.Parse(stream.read(), found)
  except (tf.errors.OpError, text_format.ParseError, UnicodeDecodeError) as error:
    raise invalid(f"cannot read the {kind} of {path}: {error}") from error
