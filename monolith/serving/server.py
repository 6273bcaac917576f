"""The server in Python: its models, its two ports, and the threads that look for changes."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable

import grpc
import tensorflow as tf
from absl import logging

from monolith import _install
from monolith.serving import model_config, prediction, remote_servers, text_config, warmup
from monolith.serving.batching import Batcher, BatchingParameters
from monolith.serving.errors import ServingError, invalid
from monolith.serving.grpc_server import GrpcServer, Service
from monolith.serving.metrics import Metrics
from monolith.serving.model_manager import ModelManager
from monolith.serving.rest_server import RestServer
from monolith.serving.servable import Follower, Servable

_GRACE_SECS = 10
# A signal that the kernel hands to another thread is handled when the main thread wakes up.
_SIGNAL_SECS = 1.0


class ModelServer:
  """A running server.

  Args:
    flags: what `options.parse` returned.

  Raises:
    ServingError: a file that a flag names is wrong, or a port cannot be had.
  """

  def __init__(self, flags: argparse.Namespace):
    self._flags = flags
    self._stopping = threading.Event()
    self._threads: list[threading.Thread] = []
    if flags.row_log_servers and importlib.util.find_spec("confluent_kafka") is None:
      raise ServingError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"--row_log_servers needs confluent-kafka: {_install.install_line('realtime')}",
      )
    if flags.ps_address:
      remote_servers.install(remote_servers.parse_addresses(flags.ps_address))
    configs = self._read_configs()
    self._manager = ModelManager(
      _make_loader(flags),
      flags.max_num_load_retries,
      flags.load_retry_interval_micros / 1e6,
      flags.num_load_threads,
      flags.num_unload_threads,
      flags.allow_version_labels_for_unavailable_models,
    )
    service = Service(self._manager, Metrics(self._manager), _make_runner(flags))
    self._grpc = self._rest = None
    if flags.port:
      self._grpc = GrpcServer(
        service,
        f"{flags.bind_address}:{flags.port}",
        flags.grpc_max_threads or max(16, 4 * (os.cpu_count() or 1)),
        flags.grpc_channel_arguments,
        _read_credentials(flags.ssl_config_file),
      )
    if flags.rest_api_port:
      self._rest = RestServer(
        service,
        flags.bind_address,
        flags.rest_api_port,
        flags.rest_api_num_threads,
        flags.rest_api_timeout_in_ms / 1000,
      )
    self._manager.set_models(configs)

  def start(self) -> None:
    """Begins to answer; models that load answer when they are loaded."""
    if self._grpc:
      self._grpc.start()
      logging.info("gRPC on %s:%d", self._flags.bind_address, self._flags.port)
    if self._rest:
      self._rest.start()
      logging.info("HTTP on %s:%d", self._flags.bind_address, self._flags.rest_api_port)
    if self._flags.file_system_poll_wait_seconds:
      self._repeat("folders", self._flags.file_system_poll_wait_seconds, self._manager.poll)
    if self._flags.model_config_file and self._flags.model_config_file_poll_wait_seconds:
      self._repeat(
        "config", self._flags.model_config_file_poll_wait_seconds, self._make_config_poll()
      )

  def is_ready(self) -> bool:
    """Whether every model has a version that answers."""
    return all(self._manager.availability().values())

  def stop(self) -> None:
    """Takes no more requests, answers those under way, and frees the models."""
    self._stopping.set()
    if self._grpc:
      self._grpc.stop(_GRACE_SECS)
    if self._rest:
      self._rest.stop()
    for thread in self._threads:
      thread.join()
    self._manager.close()

  def _read_configs(self) -> dict[str, model_config.ModelConfig]:
    if self._flags.model_config_file:
      return model_config.from_file(self._flags.model_config_file)
    return model_config.from_flags(self._flags.model_name, self._flags.model_base_path)

  def _make_config_poll(self) -> Callable[[], None]:
    last = self._read_configs()

    def poll() -> None:
      nonlocal last
      configs = self._read_configs()
      if configs != last:  # A file that stays as it is does not undo a reload by request.
        logging.info("%s changed: %s", self._flags.model_config_file, sorted(configs))
        last = configs
        self._manager.set_models(configs)

    return poll

  def _repeat(self, name: str, seconds: float, function: Callable[[], None]) -> None:
    def run() -> None:
      failure = ""
      while not self._stopping.wait(seconds):
        try:
          function()
          failure = ""
        except Exception as error:  # A file that is wrong today may be right tomorrow.
          if str(error) != failure:  # once, not every second
            logging.error("Cannot poll: %s", error)
          failure = str(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    self._threads.append(thread)
    thread.start()


def _make_loader(flags: argparse.Namespace) -> Callable[[str], Servable]:
  both = flags.tensorflow_session_parallelism
  config = tf.compat.v1.ConfigProto(
    allow_soft_placement=True,
    intra_op_parallelism_threads=both or flags.tensorflow_intra_op_parallelism,
    inter_op_parallelism_threads=both or flags.tensorflow_inter_op_parallelism,
  )
  config.gpu_options.allow_growth = flags.allow_growth
  if flags.per_process_gpu_memory_fraction:
    config.gpu_options.per_process_gpu_memory_fraction = flags.per_process_gpu_memory_fraction
  tags = [tag for tag in flags.saved_model_tags.split(",") if tag]
  make_follower: Callable[[Servable, str, float], Follower | None] | None = None
  if flags.row_log_servers:
    # Needs a client of Kafka, which servers of models that stay as they are do without; and it must
    # come before models are loaded, since it knows what tables are in a graph's collections.
    from monolith.realtime import replica

    make_follower = replica.make_follower

  def load(path: str) -> Servable:
    servable = Servable(path, tags, config, flags.fetch_ps_timeout_ms or None)
    try:
      if flags.enable_model_warmup:
        warmup.warm_up(servable)
      if make_follower is not None:
        servable.follower = make_follower(
          servable, flags.row_log_servers, flags.row_log_interval_secs
        )
    except Exception:
      servable.close()
      raise
    return servable

  return load


def _make_runner(flags: argparse.Namespace) -> prediction.Runner:
  if not flags.enable_batching:
    return prediction.run_directly
  if flags.batching_parameters_file:
    return Batcher(BatchingParameters.from_file(flags.batching_parameters_file))
  return Batcher(BatchingParameters())


def _read_credentials(path: str) -> grpc.ServerCredentials | None:
  if not path:
    return None
  config = text_config.read("SSLConfig", path)
  for name in ("server_key", "server_cert"):
    if not getattr(config, name):
      raise invalid(f"{path}: {name} is missing")
  if config.client_verify and not config.custom_ca:
    raise invalid(f"{path}: client_verify needs custom_ca: whose clients are to be believed?")
  return grpc.ssl_server_credentials(
    [(config.server_key.encode(), config.server_cert.encode())],
    config.custom_ca.encode() or None,
    config.client_verify,
  )


def run(flags: argparse.Namespace) -> int:
  """Runs a server until a signal ends it; returns the exit status.

  Args:
    flags: what `options.parse` returned.
  """
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  tf.compat.v1.disable_eager_execution()
  # What is imported stays: to look through it for garbage would hold up requests.
  gc.freeze()
  stopped = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stopped.set())
  try:
    server = ModelServer(flags)
  except ServingError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  server.start()
  while not stopped.wait(_SIGNAL_SECS):
    pass
  server.stop()
  return 0
