"""Asks a server: state and signatures of a model, a prediction, or predictions under load.

    tfs_client --target localhost:8500 --model_name m:entry --cmd_type status
    tfs_client --target localhost:8500 --model_name m:entry --cmd_type profile \\
      --input_type instance --input_file part-0 --lagrangex_header --parallel_num 4
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import message, text_format

from idl.matrix.proto import example_pb2, feature_pb2, proto_parser_pb2
from monolith.agent_service import record_file, serving_protos

_TIMEOUT_SECS = 30
_INPUT_TYPES = ("instance", "example_batch", "example_batch_to_instance")


def example_batch_to_instances(
  batch: example_pb2.ExampleBatch,
) -> list[proto_parser_pb2.Instance]:
  """Returns the rows of a batch; columns that are shared are in every row.

  Raises:
    ValueError: a column has neither one value nor one per row.
  """
  instances = [proto_parser_pb2.Instance() for _ in range(batch.batch_size)]
  for column in batch.named_feature_list:
    if len(column.feature) not in (1, batch.batch_size):
      raise ValueError(
        f"column {column.name!r} has {len(column.feature)} values for {batch.batch_size} rows"
      )
    for i, instance in enumerate(instances):
      value = column.feature[i if len(column.feature) > 1 else 0]
      _add_feature(instance, column.name, value)
  return instances


def _add_feature(
  instance: proto_parser_pb2.Instance, name: str, value: example_pb2.Feature
) -> None:
  kind = value.WhichOneof("type")
  if kind is None:
    return
  if kind == "fid_v1_list":
    instance.fid.extend(value.fid_v1_list.value)
    return
  if name == "__LABEL__" and kind == "float_list":
    instance.label.extend(value.float_list.value)
    return
  if name == "__LINE_ID__" and kind == "bytes_list":
    try:
      instance.line_id.ParseFromString(b"".join(value.bytes_list.value[:1]))
    except message.DecodeError as error:
      raise ValueError(f"{name} is no LineId: {error}") from error
    return
  feature: feature_pb2.Feature = instance.feature.add(name=name)
  simple = {
    "fid_v2_list": feature.fid,
    "float_list": feature.float_value,
    "double_list": feature.float_value,
    "int64_list": feature.int64_value,
    "bytes_list": feature.bytes_value,
  }
  nested = {
    "fid_v2_lists": feature.fid_list,
    "float_lists": feature.float_list,
    "double_lists": feature.float_list,
    "int64_lists": feature.int64_list,
    "bytes_lists": feature.bytes_list,
  }
  if kind in simple:
    simple[kind].extend(getattr(value, kind).value)
  elif kind in nested:
    for inner in getattr(value, kind).list:
      nested[kind].add().value.extend(inner.value)
  else:
    raise ValueError(f"column {name!r} has a {kind}, which no Instance has")


def read_inputs(options: argparse.Namespace, path: str) -> list[list[bytes]]:
  """Returns the batches of a file, as serialized messages for one request each.

  Args:
    options: the command line: `input_type`, `file_type`, `batch_size` and the headers of records.
    path: the file.

  Raises:
    ValueError: the file has no record, or one that is no such message.
    OSError: it cannot be read.
  """
  is_batch = options.input_type != "instance"
  cls = example_pb2.ExampleBatch if is_batch else proto_parser_pb2.Instance
  messages = []
  if options.file_type == "pbtxt":
    with open(path, encoding="utf-8") as file:
      try:
        messages.append(text_format.Parse(file.read(), cls()))
      except text_format.ParseError as error:
        raise ValueError(f"{path} is no text of {cls.__name__}: {error}") from error
  else:
    with open(path, "rb") as binary:
      records = record_file.read_records(
        binary,
        lagrangex_header=options.lagrangex_header,
        has_sort_id=options.has_sort_id,
        kafka_dump=options.kafka_dump,
        kafka_dump_prefix=options.kafka_dump_prefix,
      )
      # A profile repeats what it has: some batches of a large file are enough.
      for record in itertools.islice(records, 64 * options.batch_size):
        try:
          messages.append(cls.FromString(record))
        except message.DecodeError as error:
          raise ValueError(f"{path} has a record that is no {cls.__name__}: {error}") from error
  if not messages:
    raise ValueError(f"{path} has no record")
  if options.input_type == "example_batch":
    return [[batch.SerializeToString()] for batch in messages]
  if options.input_type == "example_batch_to_instance":
    messages = [row for batch in messages for row in example_batch_to_instances(batch)]
  rows = [row.SerializeToString() for row in messages]
  # A file that has less than a batch is repeated, so that every request has the size asked for.
  if len(rows) < options.batch_size:
    rows = list(itertools.islice(itertools.cycle(rows), options.batch_size))
  starts = range(0, len(rows) - options.batch_size + 1, options.batch_size)
  return [rows[start : start + options.batch_size] for start in starts]


class TfsClient:
  """Speaks with one server.

  Args:
    target: its gRPC address.
    model_name: the model.
    signature_name: the signature of predictions.
  """

  def __init__(self, target: str, model_name: str, signature_name: str = "serving_default"):
    from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

    self._channel = grpc.insecure_channel(
      target,
      options=[("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)],
    )
    self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
    self._predictions = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
    self._model_name = model_name
    self._signature_name = signature_name

  def close(self) -> None:
    self._channel.close()

  def get_status(self) -> Any:
    """Returns a `GetModelStatusResponse`."""
    from tensorflow_serving.apis import get_model_status_pb2

    request = get_model_status_pb2.GetModelStatusRequest(
      model_spec=serving_protos.gen_model_spec(self._model_name)
    )
    return self._models.GetModelStatus(request, timeout=_TIMEOUT_SECS)

  def get_metadata(self) -> Any:
    """Returns a `SignatureDefMap`."""
    from tensorflow_serving.apis import get_model_metadata_pb2

    request = get_model_metadata_pb2.GetModelMetadataRequest(
      model_spec=serving_protos.gen_model_spec(self._model_name), metadata_field=["signature_def"]
    )
    response = self._predictions.GetModelMetadata(request, timeout=_TIMEOUT_SECS)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    return signatures

  def reload(self, path: str) -> Any:
    """Sends a `ModelServerConfig` in text form; returns a `ReloadConfigResponse`."""
    from tensorflow_serving.apis import model_management_pb2
    from tensorflow_serving.config import model_server_config_pb2

    with open(path, encoding="utf-8") as file:
      config = text_format.Parse(file.read(), model_server_config_pb2.ModelServerConfig())
    request = model_management_pb2.ReloadConfigRequest(config=config)
    return self._models.HandleReloadConfigRequest(request, timeout=_TIMEOUT_SECS)

  def find_input(self) -> str:
    """Returns the name of the signature's only input.

    Raises:
      ValueError: there is no such signature, or it has several inputs.
    """
    signatures = self.get_metadata().signature_def
    if self._signature_name not in signatures:
      raise ValueError(f"signature {self._signature_name!r} is not one of {sorted(signatures)}")
    inputs = list(signatures[self._signature_name].inputs)
    if len(inputs) != 1:
      raise ValueError(f"signature {self._signature_name!r} has inputs {inputs}, want one")
    return inputs[0]

  def make_request(self, input_name: str, rows: Sequence[bytes]) -> Any:
    """Returns a `PredictRequest` with a vector of serialized messages."""
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest(
      model_spec=serving_protos.gen_model_spec(
        self._model_name, signature_name=self._signature_name
      )
    )
    request.inputs[input_name].CopyFrom(serving_protos.make_tensor_proto(rows))
    return request

  def predict(self, request: Any) -> Any:
    """Returns a `PredictResponse`.

    Raises:
      grpc.RpcError: the server does not answer, or refuses.
    """
    return self._predictions.Predict(request, timeout=_TIMEOUT_SECS)


@dataclasses.dataclass
class ProfileResult:
  """Holds the measurements of a run under load.

  Attributes:
    count: answered requests.
    errors: requests that failed.
    mean_ms: mean latency.
    p99_ms: what 99 of 100 requests did not exceed.
    qps: answered requests per second.
  """

  count: int
  errors: int
  mean_ms: float
  p99_ms: float
  qps: float


def profile(
  client: TfsClient, requests: Sequence[Any], parallel_num: int, duration_secs: float
) -> ProfileResult:
  """Sends requests in turn from several threads for some time."""
  all_requests = list(requests)
  latencies: list[list[float]] = [[] for _ in range(parallel_num)]
  errors = [0] * parallel_num
  start = time.monotonic()

  def send(index: int) -> None:
    first = index % len(all_requests)
    for request in itertools.cycle(all_requests[first:] + all_requests[:first]):
      begin = time.monotonic()
      if begin - start >= duration_secs:
        return
      try:
        client.predict(request)
        latencies[index].append(time.monotonic() - begin)
      except grpc.RpcError:
        errors[index] += 1

  threads = [threading.Thread(target=send, args=(i,)) for i in range(parallel_num)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  elapsed = time.monotonic() - start
  times = sorted(itertools.chain.from_iterable(latencies))
  if not times:
    return ProfileResult(0, sum(errors), 0, 0, 0)
  p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
  mean = sum(times) / len(times)
  return ProfileResult(len(times), sum(errors), mean * 1e3, p99 * 1e3, len(times) / elapsed)


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  parser = argparse.ArgumentParser(
    prog="tfs_client",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  kinds = ["status", "meta", "load", "get", "profile"]
  add("--cmd_type", required=True, choices=kinds, help="load: send a model configuration file")
  add("--target", required=True, help="the server's gRPC address")
  add("--model_name", default="default", help="the model")
  add("--signature_name", default="serving_default", help="get, profile: the signature")
  add("--input_type", default="instance", choices=_INPUT_TYPES, help="what the server wants")
  add("--input_file", help="get, profile: a file of messages; load: the configuration")
  add("--file_type", default="pb", choices=["pb", "pbtxt"], help="records, or one text")
  add("--batch_size", type=int, default=8, help="rows of a request")
  for name in ("lagrangex_header", "has_sort_id", "kafka_dump", "kafka_dump_prefix"):
    add(f"--{name}", action="store_true", help="header of records")
  add("--parallel_num", type=int, default=1, help="profile: requests at a time")
  add("--profile_duration", type=float, default=600, help="profile: seconds")
  add("--profile_data_dir", help="profile: a folder of files, instead of --input_file")
  return parser


def run(options: argparse.Namespace, client: TfsClient) -> str:
  """Runs one command and returns what to print.

  Raises:
    ValueError: inputs are missing, or not what the options say.
    OSError: a file cannot be read.
    grpc.RpcError: the server does not answer, or refuses.
  """
  if options.cmd_type == "status":
    return str(client.get_status())
  if options.cmd_type == "meta":
    return str(client.get_metadata())
  if options.cmd_type == "load":
    if not options.input_file:
      raise ValueError("load needs --input_file")
    return str(client.reload(options.input_file))
  if options.batch_size < 1 or options.parallel_num < 1:
    raise ValueError("--batch_size and --parallel_num must be positive")
  paths = [options.input_file] if options.input_file else []
  if options.cmd_type == "profile" and options.profile_data_dir:
    folder = options.profile_data_dir
    paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))
  if not paths:
    raise ValueError(f"{options.cmd_type} needs --input_file")
  input_name = client.find_input()
  requests = [
    client.make_request(input_name, rows) for path in paths for rows in read_inputs(options, path)
  ]
  if options.cmd_type == "get":
    return str(client.predict(requests[0]))
  result = profile(client, requests, options.parallel_num, options.profile_duration)
  return (
    f"count {result.count}, errors {result.errors}, mean {result.mean_ms:.3f} ms, "
    f"p99 {result.p99_ms:.3f} ms, QPS {result.qps:.1f}"
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  options = make_parser().parse_args(argv)
  client = TfsClient(options.target, options.model_name, options.signature_name)
  try:
    print(run(options, client))
  except grpc.RpcError as error:
    print(f"tfs_client: {error.code().name}: {error.details()}", file=sys.stderr)
    return 1
  except (ValueError, OSError) as error:
    print(f"tfs_client: {error}", file=sys.stderr)
    return 1
  finally:
    client.close()
  return 0


if __name__ == "__main__":
  sys.exit(main())
