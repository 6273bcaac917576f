"""gRPC's reflection under both names that tools ask for, `v1` and `v1alpha`.

`grpcio-reflection` has the older one only. Their messages differ in nothing but the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA = "grpc.reflection.v1alpha"
_STABLE = "grpc.reflection.v1"
_SERVICE = "ServerReflection"


class _Servicer(reflection.ReflectionServicer):
  """Says which request it answers, which grpcio's does not."""

  def ServerReflectionInfo(  # noqa: N802
    self,
    request_iterator: Iterable[reflection_pb2.ServerReflectionRequest],
    context: grpc.ServicerContext,
  ) -> Iterator[reflection_pb2.ServerReflectionResponse]:
    for request in request_iterator:
      for response in super().ServerReflectionInfo(iter([request]), context):
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        yield response


def add_to_server(services: Iterable[str], server: grpc.Server) -> None:
  """Lets a server describe its services.

  Args:
    services: full names; their descriptions are in the default pool. The reflection's own are
      added.
    server: not yet started.
  """
  _describe_stable()
  names = [f"{package}.{_SERVICE}" for package in (_STABLE, _ALPHA)]
  servicer = _Servicer([*services, *names])
  handler = grpc.stream_stream_rpc_method_handler(
    servicer.ServerReflectionInfo,
    request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
    response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
  )
  server.add_generic_rpc_handlers(
    tuple(
      grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
      for name in names
    )
  )


def _describe_stable() -> None:
  """Puts the description of `v1` into the default pool, unless something did so before."""
  pool = descriptor_pool.Default()
  try:
    pool.FindServiceByName(f"{_STABLE}.{_SERVICE}")
    return
  except KeyError:
    pass
  file = descriptor_pb2.FileDescriptorProto()
  reflection_pb2.DESCRIPTOR.CopyToProto(file)
  file.name = "grpc/reflection/v1/reflection.proto"
  file.package = _STABLE
  for described in file.message_type:
    for field in described.field:
      if field.type_name:
        field.type_name = field.type_name.replace(f".{_ALPHA}.", f".{_STABLE}.")
  for service in file.service:
    for method in service.method:
      method.input_type = method.input_type.replace(f".{_ALPHA}.", f".{_STABLE}.")
      method.output_type = method.output_type.replace(f".{_ALPHA}.", f".{_STABLE}.")
  pool.AddSerializedFile(file.SerializeToString())
