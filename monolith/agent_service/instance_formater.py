"""Turns one sample into the forms that clients of a server want."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import json_format, text_format

from idl.matrix.proto import proto_parser_pb2
from monolith.agent_service import record_file, serving_protos

if TYPE_CHECKING:
  from tensorflow.core.framework import tensor_pb2


class InstanceFormater:
  """An `Instance`, read from and written to several formats.

  Args:
    inst: the sample.
  """

  def __init__(self, inst: proto_parser_pb2.Instance):
    self.inst = inst

  @classmethod
  def from_json(cls, fname: str) -> InstanceFormater:
    """Reads a file with the JSON of an `Instance`.

    Raises:
      ValueError: it is none.
    """
    with open(fname, encoding="utf-8") as file:
      try:
        return cls(json_format.Parse(file.read(), proto_parser_pb2.Instance()))
      except json_format.ParseError as error:
        raise ValueError(f"{fname} is no JSON of an Instance: {error}") from error

  @classmethod
  def from_pb_text(cls, fname: str) -> InstanceFormater:
    """Reads a file with the text form of an `Instance`.

    Raises:
      ValueError: it is none.
    """
    with open(fname, encoding="utf-8") as file:
      try:
        return cls(text_format.Parse(file.read(), proto_parser_pb2.Instance()))
      except text_format.ParseError as error:
        raise ValueError(f"{fname} is no text of an Instance: {error}") from error

  @classmethod
  def from_dump(cls, fname: str) -> InstanceFormater:
    """Reads the first record of a data file: 8 bytes of header, a length, an `Instance`.

    Raises:
      ValueError: it has no such record.
    """
    with open(fname, "rb") as file:
      for record in record_file.read_records(file, lagrangex_header=True):
        try:
          return cls(proto_parser_pb2.Instance.FromString(record))
        except ValueError as error:
          raise ValueError(f"the first record of {fname} is no Instance: {error}") from error
    raise ValueError(f"{fname} is empty")

  def to_tensor_proto(self, batch_size: int) -> tensor_pb2.TensorProto:
    """Returns a vector of `batch_size` copies, serialized."""
    return serving_protos.make_tensor_proto([self.inst.SerializeToString()] * batch_size)

  def to_pb(self, fname: str | None = None) -> bytes:
    """Returns the serialized sample, and writes it to a file where one is given."""
    data = self.inst.SerializeToString()
    if fname is not None:
      with open(fname, "wb") as file:
        file.write(data)
    return data

  def to_json(self, fname: str | None = None) -> str:
    """Returns its JSON, and writes it to a file where one is given."""
    return _write(json_format.MessageToJson(self.inst), fname)

  def to_pb_text(self, fname: str | None = None) -> str:
    """Returns its text form, and writes it to a file where one is given."""
    return _write(text_format.MessageToString(self.inst), fname)


def _write(text: str, fname: str | None) -> str:
  if fname is not None:
    with open(fname, "w", encoding="utf-8") as file:
      file.write(text)
  return text
