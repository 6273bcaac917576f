"""Samples and files for the data tests."""

from __future__ import annotations

import os
import struct
import unittest
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from idl.matrix.proto import example_pb2, line_id_pb2, proto_parser_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops_base


def needs_parquet(test: type) -> type:
  """Skips a test case where the library that reads Parquet files is left out."""
  folder = os.path.dirname(gen_monolith_ops_base.LIBRARY_PATH)
  beside = os.path.join(folder, "libmonolith_parquet.so")
  library = os.environ.get("MONOLITH_PARQUET_LIBRARY", beside)
  reason = "libmonolith_parquet.so is not built"
  return unittest.skipUnless(os.path.exists(library), reason)(test)


def fid_v1(slot: int, signature: int) -> int:
  return (slot << 54) | signature


def fid_v2(slot: int, signature: int) -> int:
  return (slot << 48) | signature


def make_line_id(**fields) -> line_id_pb2.LineId:
  return line_id_pb2.LineId(**fields)


def make_example(features=None, label=(), **line_id) -> example_pb2.Example:
  """Returns an example; `features` maps names to v2 ids."""
  example = example_pb2.Example(label=label, line_id=make_line_id(**line_id))
  for name, fids in (features or {}).items():
    example.named_feature.add(name=name).feature.fid_v2_list.value.extend(fids)
  return example


def make_instance(fids=(), label=(), **line_id) -> proto_parser_pb2.Instance:
  return proto_parser_pb2.Instance(fid=fids, label=label, line_id=make_line_id(**line_id))


def frame(payload: bytes, header: bytes = b"") -> bytes:
  return header + struct.pack("<Q", len(payload)) + payload


def write_records(
  path: str, payloads: Sequence[bytes], header: bytes = struct.pack("<Q", 0)
) -> str:
  """Writes framed records; the default header is an empty sort id."""
  with open(path, "wb") as stream:
    for payload in payloads:
      stream.write(frame(payload, header))
  return path


def proto_of(variant: tf.Tensor, proto_class: type):
  """Decodes the proto that a scalar variant holds."""
  tensor = tensor_pb2.TensorProto.FromString(tf.io.serialize_tensor(variant).numpy())
  # The content is the size as a varint, then the encoded variant.
  content = tensor.tensor_content
  start = next(i for i, byte in enumerate(content) if byte < 0x80) + 1
  encoded = tensor_pb2.VariantTensorDataProto.FromString(content[start:])
  return proto_class.FromString(encoded.metadata)
