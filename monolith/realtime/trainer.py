"""Trains on a Kafka topic of samples: `python -m monolith.realtime.trainer`.

    --role=local    worker and servers in one process
    --role=ps       a parameter server, number --index of --num_ps
    --role=worker   a worker, number --index of --num_workers; number 0 is the chief

Where training stands in the topic is part of each checkpoint. A worker that is killed goes on where
the servers stand; when servers are killed too, all goes on from the newest checkpoint. Each
checkpoint is exported with its rows, so that a server can be started from it at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import flags, logging

from monolith.native_training import cpu_training, service_discovery
from monolith.native_training.data import stream_positions, stream_status
from monolith.native_training.graph import idle
from monolith.native_training.hooks import interrupt
from monolith.row_log import kafka_client, topics

_METRICS_SECS = 1.0
# A reader who follows a sample through the stages wants to know soon that it was trained.
_POSITIONS_SECS = 0.1
# The exit status that a shell gives a command that Ctrl-C has ended.
INTERRUPTED = 130


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
  """Returns the settings of a command line; what it does not know is for the flags of Monolith.

  Raises:
    SystemExit: the command line is wrong, or asks for help.
  """
  parser = argparse.ArgumentParser(
    prog="python -m monolith.realtime.trainer",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--role", choices=("local", "worker", "ps"), default="local", help="what this process is")
  add("--kafka_servers", required=True, help="comma-separated host:port of brokers")
  add("--topic", default=topics.SAMPLES, help="comma-separated topics of samples")
  add("--group", default="monolith-trainer", help="consumer group that is told the positions")
  add("--task", required=True, help="module:Class of the model")
  add("--model_name", default="", help="name in serving and in topics; by default the class's")
  add("--model_dir", required=True, help="where checkpoints and exports go")
  add("--index", type=int, default=0, help="number of this process in its role")
  add("--num_ps", type=int, default=0, help="parameter servers; 0 keeps tables in the worker")
  add("--num_workers", type=int, default=1, help="workers")
  add("--discovery", default="", help="folder in which processes find one another")
  add("--zk_servers", default="", help="ZooKeeper in which they do so instead of a folder")
  add("--job", default="realtime", help="name of the job in ZooKeeper")
  add("--batch_size", type=int, default=512, help="most samples of a step")
  add("--save_secs", type=int, default=60, help="seconds between checkpoints and exports")
  add("--keep_checkpoints", type=int, default=10, help="how many checkpoints and exports to keep")
  add("--no_export", action="store_true", help="write checkpoints only")
  add("--publish", action="store_true", help="write the log of changed rows to the brokers")
  add("--sync_secs", type=float, default=10, help="seconds between batches of changed rows")
  add("--dense_sync_secs", type=float, default=1800, help="seconds between sets of variables")
  add("--digest_secs", type=float, default=30, help="seconds between digests of tables; 0: none")
  add("--postpush", action="store_true", help="push gradients of a step during the next one")
  add("--max_steps", type=int, default=None, help="step to stop at; by default none")
  add("--stream_timeout", type=int, default=-1, help="milliseconds of silence to stop after")
  add("--metrics_port", type=int, default=None, help="port of the chief's Prometheus metrics")
  add("--kafka_setting", action="append", default=[], help="key=value for the Kafka client")
  known, others = parser.parse_known_args(arguments)
  try:
    flags.FLAGS([parser.prog, *others])
  except flags.Error as error:
    parser.error(str(error))
  if known.role != "local" and not (known.discovery or known.zk_servers):
    parser.error(f"--role={known.role} needs --discovery or --zk_servers")
  if known.num_ps < 0 or known.num_workers < 1 or known.index < 0:
    parser.error("--num_ps and --index must be at least 0, --num_workers at least 1")
  # One with a number too many would read no partition, or hold no table, and say nothing.
  for role, flag, count in (
    ("ps", "num_ps", known.num_ps),
    ("worker", "num_workers", known.num_workers),
  ):
    if known.role == role and known.index >= count > 0:
      parser.error(f"--index={known.index}, want less than --{flag}={count}")
  if known.role == "worker" and known.num_ps == 0:
    parser.error("--role=worker needs --num_ps; --role=local keeps tables in the worker")
  return known


def load_task(name: str) -> Any:
  """Returns the class `module:Class`.

  Raises:
    ValueError: there is none.
  """
  module, colon, attribute = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), attribute) if colon else None
  except (ImportError, AttributeError) as error:
    raise ValueError(f"--task={name}: {error}") from error
  if not hasattr(found, "params"):
    raise ValueError(f"--task={name}: want module:Class of a task")
  return found


def make_params(options: argparse.Namespace) -> Any:
  """Returns the params of the task that the options name, told what to read.

  Raises:
    ValueError: the task is none that reads a stream.
  """
  task = load_task(options.task)
  params = task.params()
  params.name = options.model_name or task.__name__
  if "stream" not in params:
    raise ValueError(
      f"--task={options.task}: {task.__name__} has no params `stream`: derive it from "
      "monolith.realtime.stream_model.StreamModel"
    )
  settings = kafka_client.client_settings(options.kafka_servers)
  # They are for consumers that join a group.
  settings.pop("session.timeout.ms", None)
  params.stream.servers = settings.pop("bootstrap.servers")
  params.stream.topics = [topic.strip() for topic in options.topic.split(",") if topic.strip()]
  params.stream.group = options.group
  params.stream.batch_size = options.batch_size
  params.stream.stream_timeout = options.stream_timeout
  params.stream.settings = [
    *(f"{key}={_as_text(value)}" for key, value in settings.items()),
    *options.kafka_setting,
  ]
  params.train.max_steps = options.max_steps
  params.metrics.enable_tf2_profiler_hook = False
  params.serving.export_when_saving = not options.no_export
  # Exports hold their rows: a checkpoint that they named would be deleted before long.
  params.serving.shared_embedding = False
  return params


def _as_text(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def make_config(options: argparse.Namespace, params: Any) -> Any:
  """Returns the configuration of this process."""
  fields: dict[str, Any] = {
    "num_ps": options.num_ps,
    "model_name": params.name,
    "save_checkpoints_secs": options.save_secs,
    "checkpoints_max_to_keep": options.keep_checkpoints,
    "embedding_prefetch_capacity": 1,
    "enable_embedding_postpush": options.postpush,
    "partial_recovery": True,
  }
  if options.publish:
    fields.update(
      enable_realtime_training=True,
      realtime_kafka_servers=options.kafka_servers,
      realtime_model_name=params.name,
      sync_interval_secs=options.sync_secs,
      dense_sync_secs=options.dense_sync_secs,
      realtime_digest_secs=options.digest_secs,
    )
  if options.role == "local":
    return cpu_training.CpuTrainingConfig(**fields)
  return cpu_training.DistributedCpuTrainingConfig(
    server_type=options.role,
    index=options.index,
    num_workers=options.num_workers,
    model_dir=options.model_dir,
    uuid=options.job,
    retry_wait_in_secs=1,
    max_retry_times=1 << 20,
    **fields,
  )


@contextlib.contextmanager
def make_discovery(
  options: argparse.Namespace,
) -> Iterator[service_discovery.ServiceDiscovery]:
  """Yields where processes find one another, closed at the end."""
  if options.zk_servers:
    discovery: Any = service_discovery.ZKServiceDiscovery(options.job, options.zk_servers)
  else:
    discovery = service_discovery.HostServiceDiscovery(options.discovery)
  try:
    yield discovery
  finally:
    discovery.close()


class MetricsHook(tf.compat.v1.train.SessionRunHook):
  """Publishes where training stands on a Prometheus port, about every second.

  Args:
    port: the port on loopback; 0 for a free one.
    model: the label of all metrics.

  Raises:
    OSError: the port is taken; the message names it.
  """

  def __init__(self, port: int, model: str):
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    self._gauges = {
      name: prometheus_client.Gauge(
        f"monolith_trainer_{name}", text, ["model"], registry=registry
      ).labels(model)
      for name, text in (
        ("global_step", "steps of all workers"),
        ("samples", "samples trained, by all workers"),
        ("bad_messages", "messages that could not be read and were left out"),
        ("repeated_samples", "samples that had come before and were left out"),
        ("newest_event_time_seconds", "newest event time trained"),
        ("lag_messages", "messages in the topics that are not trained yet"),
      )
    }
    self._step_secs = prometheus_client.Gauge(
      "monolith_trainer_step_seconds", "how long the newest step took", registry=registry
    )
    self._trained = prometheus_client.Gauge(
      "monolith_trainer_next_offset",
      "offset behind the newest sample that was trained",
      ["topic", "partition"],
      registry=registry,
    )
    try:
      server, _ = prometheus_client.start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
      raise OSError(error.errno, f"port {port} of the metrics: {error.strerror}") from error
    self.port = server.server_port
    self._positions: stream_positions.StreamPositions | None = None
    self._monitor: stream_status.StreamMonitor | None = None
    self._step: tf.Tensor | None = None
    self._last = self._last_positions = self._step_begin = 0.0

  def begin(self) -> None:
    self._positions = stream_positions.get()
    self._monitor = stream_status.StreamMonitor(self._positions)
    self._step = tf.compat.v1.train.get_or_create_global_step().read_value()
    idle.register(self._measure)

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    self._step_begin = time.monotonic()

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    now = time.monotonic()
    self._step_secs.set(now - self._step_begin)
    if now - self._last >= _METRICS_SECS:
      self._measure(run_context.session)
    elif now - self._last_positions >= _POSITIONS_SECS:
      assert self._positions is not None
      self._show_positions(self._positions.read(run_context.session))

  def _show_positions(self, state: stream_positions.StreamState) -> None:
    for (topic, partition), offset in state.positions.items():
      self._trained.labels(topic, str(partition)).set(offset)
    self._last_positions = time.monotonic()

  def _measure(self, session: tf.compat.v1.Session) -> bool:
    assert self._monitor is not None
    status = self._monitor.read(session)
    self._show_positions(status.state)
    self._gauges["global_step"].set(session.run(self._step))
    self._gauges["samples"].set(status.state.samples)
    self._gauges["bad_messages"].set(status.state.bad_messages)
    self._gauges["repeated_samples"].set(status.state.repeated_samples)
    self._gauges["newest_event_time_seconds"].set(status.state.newest_event_time)
    if status.lag is not None:
      self._gauges["lag_messages"].set(status.lag)
    self._last = time.monotonic()
    return False


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[interrupt.StopOnInterruptHook]:
  """Lets Ctrl-C and SIGTERM end training with a checkpoint, and a second one at once.

  Yields:
    The hook that ends it.
  """
  hook = interrupt.StopOnInterruptHook()

  def handle(signo: int, frame: Any) -> None:
    if hook.is_requested:
      raise KeyboardInterrupt
    hook.request()
    _say("\nStopping to write a checkpoint; a second Ctrl-C does without.")

  previous = {signo: signal.signal(signo, handle) for signo in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield hook
  finally:
    for signo, handler in previous.items():
      signal.signal(signo, handler)


def _say(text: str) -> None:
  # Ctrl-C also ends what the output is piped to, and the run is to save all the same. A signal that
  # comes while something else is printed finds the stream in use, which is a RuntimeError.
  with contextlib.suppress(OSError, RuntimeError):
    print(text, file=sys.stderr, flush=True)


def run(options: argparse.Namespace, params: Any) -> bool:
  """Trains, or serves as a parameter server, until a limit or forever.

  Args:
    options: the settings.
    params: those of the task.

  Returns:
    Whether training came to its end; false if a signal has stopped it.
  """
  if options.role == "ps":
    with make_discovery(options) as discovery:
      cpu_training.distributed_train(make_config(options, params), discovery, params)
    return True
  with _stop_on_signals() as stopper:
    _train(options, params, stopper)
    return not stopper.is_requested


def _train(
  options: argparse.Namespace, params: Any, stopper: interrupt.StopOnInterruptHook
) -> None:
  config = make_config(options, params)
  hooks: list[tf.compat.v1.train.SessionRunHook] = [stopper]
  if options.metrics_port is not None and options.index == 0:
    metrics = MetricsHook(options.metrics_port, params.name)
    hooks.append(metrics)
    _say(f"Metrics are on http://127.0.0.1:{metrics.port}/metrics")
  if options.role == "local":
    cpu_training.local_train_internal(
      params,
      config,
      options.model_dir,
      steps=None,
      max_steps=options.max_steps,
      user_hooks=hooks,
    )
    return
  with make_discovery(options) as discovery:
    cpu_training.distributed_train(config, discovery, params, user_hooks=hooks)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
  tf.compat.v1.disable_eager_execution()
  tf.get_logger().setLevel("ERROR")
  logging.set_verbosity(logging.WARNING)
  try:
    params = make_params(options)
  except (ValueError, ConnectionError) as error:
    print(f"trainer: {error}", file=sys.stderr)
    return 2
  try:
    return 0 if run(options, params) else INTERRUPTED
  except KeyboardInterrupt:
    return INTERRUPTED


if __name__ == "__main__":
  sys.exit(main())
