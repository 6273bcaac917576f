"""The flags of a model server, by the names that TensorFlow Serving gives to them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

LOOPBACK = "127.0.0.1"


def make_parser() -> argparse.ArgumentParser:
  """Returns the parser; every flag is used, an unknown one is an error."""
  parser = argparse.ArgumentParser(
    prog="model_server",
    description="Serves SavedModels over gRPC and HTTP, with the APIs of TensorFlow Serving.",
    allow_abbrev=False,
  )
  add = parser.add_argument
  cores = os.cpu_count() or 1
  # Where it listens.
  add("--port", type=_port, default=8500, help="port for gRPC; 0 for none")
  add("--rest_api_port", type=_port, default=0, help="port for HTTP; 0 for none")
  add("--bind_address", default=LOOPBACK, help="address of both ports; 0.0.0.0 for every interface")
  add("--rest_api_num_threads", type=_positive, default=4 * cores, help="HTTP requests at a time")
  add("--rest_api_timeout_in_ms", type=_positive, default=30_000, help="limit of an HTTP request")
  add("--grpc_max_threads", type=_at_least_0, default=0, help="gRPC calls at a time; 0: by cores")
  add("--grpc_channel_arguments", type=_pairs, default=(), help="key=value,... for gRPC")
  add("--ssl_config_file", default="", help="SSLConfig in text format, for gRPC")
  # What it serves.
  add("--model_name", default="default", help="name of the one model")
  add("--model_base_path", default="", help="its folder, which holds a folder per version")
  add("--model_config_file", default="", help="ModelServerConfig in text format, instead")
  add("--model_config_file_poll_wait_seconds", type=_at_least_0, default=0, help="0: read once")
  add("--file_system_poll_wait_seconds", type=_at_least_0, default=1, help="0: look once")
  add("--allow_version_labels_for_unavailable_models", **_bool(False), help="labels may wait")
  add("--saved_model_tags", default="serve", help="which graphs, separated by commas")
  add("--enable_model_warmup", **_bool(True), help="answer the requests in assets.extra first")
  add(
    "--max_num_load_retries",
    type=_at_least_0,
    default=5,
    help="how often a version that failed is tried again",
  )
  add(
    "--load_retry_interval_micros",
    type=int,
    default=60_000_000,
    help="how long after a failure; negative: at once",
  )
  add("--num_load_threads", type=_at_least_0, default=0, help="versions that load at a time")
  add("--num_unload_threads", type=_at_least_0, default=0, help="versions unloaded at a time")
  # How it runs.
  add("--enable_batching", **_bool(False), help="join requests into one run")
  add("--batching_parameters_file", default="", help="BatchingParameters in text format")
  add("--tensorflow_session_parallelism", type=_at_least_0, default=0, help="sets the two below")
  add("--tensorflow_intra_op_parallelism", type=_at_least_0, default=0, help="threads of one op")
  add("--tensorflow_inter_op_parallelism", type=_at_least_0, default=0, help="ops at a time")
  add("--per_process_gpu_memory_fraction", type=float, default=0, help="0: TensorFlow decides")
  add("--allow_growth", **_bool(True), help="take GPU memory when it is needed")
  add("--ps_address", default="", help="name=host:port|host:port,... of an entry's servers")
  add(
    "--fetch_ps_timeout_ms",
    type=_at_least_0,
    default=0,
    help="limit of an entry's call of a server; 0: what the export says",
  )
  add(
    "--row_log_servers",
    type=_servers,
    default="",
    help="host:port,... of the Kafka brokers whose row logs keep models new; none by default",
  )
  add(
    "--row_log_interval_secs",
    type=_seconds,
    default=0.0,
    help="how long changes may wait in a row log; 0: none does",
  )
  add("--native", **_bool(False), help="run the server in C++ instead, which make server builds")
  add("--version", action="store_true", help="print the version and exit")
  return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Parses flags; exits with status 2 and a message if they are wrong."""
  parser = make_parser()
  options = parser.parse_args(arguments)
  if options.version:
    return options
  if bool(options.model_base_path) == bool(options.model_config_file):
    parser.error("want either --model_base_path or --model_config_file")
  if not options.port and not options.rest_api_port:
    parser.error("--port and --rest_api_port are both 0: nothing could be asked")
  if options.batching_parameters_file and not options.enable_batching:
    parser.error("--batching_parameters_file needs --enable_batching")
  if options.tensorflow_session_parallelism and (
    options.tensorflow_intra_op_parallelism or options.tensorflow_inter_op_parallelism
  ):
    parser.error("--tensorflow_session_parallelism is instead of intra and inter")
  if options.row_log_interval_secs and not options.row_log_servers:
    parser.error("--row_log_interval_secs needs --row_log_servers")
  if not 0 <= options.per_process_gpu_memory_fraction <= 1:
    parser.error("--per_process_gpu_memory_fraction is not from 0 to 1")
  return options


def without_native(arguments: Sequence[str]) -> list[str]:
  """Returns the arguments without `--native`, for the program that it chooses."""
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument("--native", **_bool(False))
  return parser.parse_known_args(arguments)[1]


def _bool(default: bool) -> dict[str, Any]:
  """Returns the arguments of a flag that is `--x`, `--x=true` or `--x=false`."""
  return {"type": _to_bool, "nargs": "?", "const": True, "default": default}


def _to_bool(text: str) -> bool:
  if text.lower() in ("true", "1"):
    return True
  if text.lower() in ("false", "0"):
    return False
  raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def _at_least_0(text: str) -> int:
  number = int(text)
  if number < 0:
    raise argparse.ArgumentTypeError(f"{text} is negative")
  return number


def _servers(text: str) -> str:
  for server in filter(None, text.split(",")):
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
      raise argparse.ArgumentTypeError(f"{server!r} is not host:port")
  return text


def _seconds(text: str) -> float:
  number = float(text)
  if not 0 <= number < float("inf"):
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
  return number


def _positive(text: str) -> int:
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text} is not positive")
  return number


def _port(text: str) -> int:
  number = int(text)
  if not 0 <= number < 65536:
    raise argparse.ArgumentTypeError(f"{text} is no port")
  return number


def _pairs(text: str) -> tuple[tuple[str, Any], ...]:
  pairs = []
  for item in filter(None, text.split(",")):
    key, equals, value = item.partition("=")
    if not equals:
      raise argparse.ArgumentTypeError(f"{item!r} is not key=value")
    pairs.append((key, int(value) if value.lstrip("-").isdigit() else value))
  return tuple(pairs)
