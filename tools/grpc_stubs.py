"""Writes the `_pb2_grpc.py` of a proto: stubs and servicers for its services.

  python tools/grpc_stubs.py PROTOC OUT_FOLDER a/b/service.proto

The proto's path is relative to `proto/`, below the current folder. The modules have the names that
gRPC's own generator gives them. That one is part of grpcio-tools, each release of which wants one
version of protobuf and one of gRPC; what is written here runs with all of them.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2

_SERVICE_FIELD, _METHOD_FIELD = 6, 2  # in FileDescriptorProto and ServiceDescriptorProto
_CALL_ARGUMENTS = (
  "options=(),\n      channel_credentials=None,\n      call_credentials=None,\n"
  "      insecure=False,\n      compression=None,\n      wait_for_ready=None,\n"
  "      timeout=None,\n      metadata=None,\n"
)


def describe(protoc: str, proto: str) -> descriptor_pb2.FileDescriptorSet:
  """Returns the descriptors of a proto, which comes last, and of all that it imports."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "descriptors")
    command = [protoc, "-Iproto", "--include_imports", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={path}", proto], check=True)
    with open(path, "rb") as stream:
      return descriptor_pb2.FileDescriptorSet.FromString(stream.read())


def _alias(proto: str) -> str:
  return _module(proto).replace("_", "__").replace(".", "_dot_")


def _module(proto: str) -> str:
  return proto[: -len(".proto")].replace("/", ".").replace("-", "_") + "_pb2"


def _message_names(files: descriptor_pb2.FileDescriptorSet) -> dict[str, str]:
  """Returns the expression in Python for the full name of every message."""
  names = {}

  def add(prefix: str, expression: str, messages) -> None:
    for message in messages:
      names[f"{prefix}.{message.name}"] = f"{expression}.{message.name}"
      add(f"{prefix}.{message.name}", f"{expression}.{message.name}", message.nested_type)

  for file in files.file:
    add(f".{file.package}" if file.package else "", _alias(file.name), file.message_type)
  return names


def _comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
  return {
    tuple(location.path): location.leading_comments.strip()
    for location in file.source_code_info.location
    if location.leading_comments.strip()
  }


def _docstring(comment: str, indent: int, default: str) -> str:
  space = " " * indent
  text = "\n".join(f"{space}{line.strip()}".rstrip() for line in (comment or default).splitlines())
  return f'{space}"""{text.lstrip()}\n{space}"""\n'


class _Method:
  """A method of a service, as text."""

  def __init__(self, method, full_service: str, names: dict[str, str], comment: str):
    self.name = method.name
    self.path = f"/{full_service}/{method.name}"
    self.request, self.response = names[method.input_type], names[method.output_type]
    self.comment = comment
    self.request_name = "request_iterator" if method.client_streaming else "request"
    sides = (method.client_streaming, method.server_streaming)
    self.kind = "_".join("stream" if streams else "unary" for streams in sides)

  def stub(self) -> str:
    return (
      f"    self.{self.name} = channel.{self.kind}(\n      {self.path!r},\n"
      f"      request_serializer={self.request}.SerializeToString,\n"
      f"      response_deserializer={self.response}.FromString,\n    )\n"
    )

  def servicer(self) -> str:
    return (
      f"\n  def {self.name}(self, {self.request_name}, context):\n"
      + _docstring(self.comment, 4, "Missing associated documentation comment in .proto file.")
      + "    context.set_code(grpc.StatusCode.UNIMPLEMENTED)\n"
      "    context.set_details('Method not implemented!')\n"
      "    raise NotImplementedError('Method not implemented!')\n"
    )

  def handler(self) -> str:
    return (
      f"    {self.name!r}: grpc.{self.kind}_rpc_method_handler(\n      servicer.{self.name},\n"
      f"      request_deserializer={self.request}.FromString,\n"
      f"      response_serializer={self.response}.SerializeToString,\n    ),\n"
    )

  def call(self) -> str:
    return (
      f"\n  @staticmethod\n  def {self.name}(\n      {self.request_name},\n      target,\n"
      f"      {_CALL_ARGUMENTS}  ):\n    return grpc.experimental.{self.kind}(\n"
      f"      {self.request_name}, target, {self.path!r},\n"
      f"      {self.request}.SerializeToString,\n      {self.response}.FromString,\n"
      "      options, channel_credentials,\n"
      "      insecure, call_credentials, compression, wait_for_ready, timeout, metadata)\n"
    )


def _service(name: str, full_name: str, comment: str, methods: list[_Method]) -> str:
  documented = _docstring(comment, 2, "Missing associated documentation comment in .proto file.")
  return (
    f"\n\nclass {name}Stub(object):\n{documented}\n  def __init__(self, channel):\n"
    '    """Constructor.\n\n    Args:\n      channel: A grpc.Channel.\n    """\n'
    + "".join(method.stub() for method in methods)
    + f"\n\nclass {name}Servicer(object):\n{documented}"
    + "".join(method.servicer() for method in methods)
    + f"\n\ndef add_{name}Servicer_to_server(servicer, server):\n  rpc_method_handlers = {{\n"
    + "".join(method.handler() for method in methods)
    + "  }\n  generic_handler = grpc.method_handlers_generic_handler(\n"
    f"    {full_name!r}, rpc_method_handlers)\n"
    "  server.add_generic_rpc_handlers((generic_handler,))\n"
    f"\n\n# This class is part of an EXPERIMENTAL API of gRPC.\nclass {name}(object):\n{documented}"
    + "".join(method.call() for method in methods)
  )


def generate(files: descriptor_pb2.FileDescriptorSet) -> str:
  """Returns the module for the services of the last of some files."""
  file = files.file[-1]
  names, comments = _message_names(files), _comments(file)
  services, used = [], set()
  for i, service in enumerate(file.service):
    full_name = f"{file.package}.{service.name}" if file.package else service.name
    methods = []
    for j, method in enumerate(service.method):
      comment = comments.get((_SERVICE_FIELD, i, _METHOD_FIELD, j), "")
      methods.append(_Method(method, full_name, names, comment))
      used |= {methods[-1].request.split(".")[0], methods[-1].response.split(".")[0]}
    services.append(
      _service(service.name, full_name, comments.get((_SERVICE_FIELD, i), ""), methods)
    )
  imports = []
  for imported in files.file:
    if _alias(imported.name) in used:
      package, _, module = _module(imported.name).rpartition(".")
      source = f"from {package} import {module}" if package else f"import {module}"
      imports.append(f"{source} as {_alias(imported.name)}\n")
  return (
    "# Generated by tools/grpc_stubs.py. DO NOT EDIT!\n"
    '"""Client and server classes corresponding to protobuf-defined services."""\n'
    "import grpc\n\n" + "".join(imports) + "".join(services)
  )


def main() -> int:
  protoc, folder, proto = sys.argv[1:]
  target = pathlib.Path(folder, proto[: -len(".proto")].replace("-", "_") + "_pb2_grpc.py")
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_text(generate(describe(protoc, proto)), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
