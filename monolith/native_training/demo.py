"""Trains two models and shows how it goes: `python -m monolith.native_training.demo`.

First the FFM model, then a ranking model on a million ratings. The data is generated with a planted
structure, so the best possible AUC is known. With `--num_ps 2 --num_workers 2` the same happens on
real processes, which find one another on loopback; `--data` takes a MovieLens file instead, and
`--gpu` trains on a GPU, which also holds the tables if `libmonolith_cuda.so` was built.

Ctrl-C writes a checkpoint and stops; the command that is printed goes on from there.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from monolith.native_training import (
  cluster_manager,
  cpu_training,
  gpu_table,
  graph_estimator,
  service_discovery,
)
from monolith.native_training.demos import data as demo_data
from monolith.native_training.demos import hooks as demo_hooks
from monolith.native_training.demos import models as demo_models
from monolith.native_training.graph import export_context

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_ps", 0, "parameter servers; 0 keeps tables in the worker")
flags.DEFINE_string("model_dir", None, "where checkpoints go; training goes on from those there")
flags.DEFINE_integer("num_workers", 1, "workers; more than one needs parameter servers")
flags.DEFINE_string("data", None, "a MovieLens file: u.data, ratings.dat or ratings.csv")
flags.DEFINE_integer("num_ratings", 1000000, "how many ratings to generate")
flags.DEFINE_integer("num_users", 3000, "how many users rate")
flags.DEFINE_integer("num_movies", 2000, "how many movies are rated")
flags.DEFINE_integer("epochs", 2, "how often the ratings are read")
flags.DEFINE_integer("batch_size", 1024, "ratings per step of a worker")
flags.DEFINE_integer("ffm_steps", 4000, "how long to train the FFM model")
flags.DEFINE_bool("gpu", False, "train on the first GPU, tables included; in this process only")
flags.DEFINE_enum(
  "server_type", None, ["ps", "worker"], "role of this process; set by the demo for its children"
)
flags.DEFINE_enum(
  "model", "ranking", ["ffm", "ranking"], "what to train; set by the demo for its children"
)
flags.DEFINE_integer("index", 0, "index inside the role; set by the demo for its children")
flags.DEFINE_string("uuid", "", "id of the job; set by the demo for its children")

_COMMON_CONFIG: dict[str, Any] = {
  "embedding_prefetch_capacity": 1,
  "enable_embedding_postpush": True,
  "save_checkpoints_steps": 500,
  "checkpoints_max_to_keep": 3,
}
# Arguments that a second run needs to go on with the first one.
_RESUME_FLAGS = (
  "num_ps",
  "num_workers",
  "data",
  "num_ratings",
  "num_users",
  "num_movies",
  "epochs",
  "batch_size",
  "ffm_steps",
  "gpu",
)
_POLL_SECS = 0.2
_STOP_SECS = 300
# How long a worker may take to end when the chief, which waits for those that train, has ended.
_LATE_SECS = 30
INTERRUPTED = 130


def main(argv: list[str]) -> int:
  """Runs the demo; returns the exit status."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  _check_flags()
  tf.compat.v1.disable_eager_execution()
  tf.get_logger().setLevel("ERROR")
  logging.set_verbosity(logging.ERROR)
  model_dir = FLAGS.model_dir or default_model_dir("monolith_demo")
  if FLAGS.server_type:
    return _play_role(model_dir)
  demo_hooks.stop_on_interrupt()
  is_new = tf.train.latest_checkpoint(os.path.join(model_dir, "ranking")) is None
  if FLAGS.data is None and is_new:
    status = _train_ffm(model_dir)
    if demo_hooks.is_stop_requested():
      return _report_interrupt(model_dir)
    if status != 0:
      return status
  return _train_ranking(model_dir)


def default_model_dir(name: str) -> str:
  """Returns where a demo puts its files unless it is told otherwise."""
  return os.path.join("/tmp", getpass.getuser(), name)


def _check_flags() -> None:
  if FLAGS.num_ps < 0 or FLAGS.num_workers < 1:
    raise app.UsageError(
      f"--num_ps is {FLAGS.num_ps} and --num_workers {FLAGS.num_workers}, want at least 0 and 1"
    )
  if FLAGS.num_workers > 1 and FLAGS.num_ps == 0:
    raise app.UsageError(f"{FLAGS.num_workers} workers share tables only on servers: add --num_ps")
  if FLAGS.gpu and FLAGS.num_ps > 0:
    raise app.UsageError(f"--gpu trains in this process: want --num_ps 0, not {FLAGS.num_ps}")
  if FLAGS.gpu and not tf.config.list_physical_devices("GPU"):
    raise app.UsageError("--gpu: TensorFlow finds no GPU on this machine")
  if FLAGS.data is not None and not os.path.exists(FLAGS.data):
    raise app.UsageError(f"--data {FLAGS.data} does not exist")


def _train_ffm(model_dir: str) -> int:
  ffm_dir = os.path.join(model_dir, "ffm")
  params = ffm_params()
  print(f"FFM model, {params.num_examples:,} examples with a planted structure", flush=True)
  start = time.monotonic()
  steps_left = FLAGS.ffm_steps - _report_start(ffm_dir)
  if FLAGS.num_workers > 1 and steps_left > 0:
    status = _run_processes(model_dir, "ffm")
    if status != 0:
      return status
  elif steps_left > 0:
    train_locally(
      params, FLAGS.num_ps, ffm_dir, steps_left, save_checkpoints_steps=_ffm_save_steps()
    )
  if demo_hooks.is_stop_requested():
    return 0
  _, labels, probabilities = params.instantiate().generate(graph_estimator.ModeKeys.EVAL)
  predictions = predict(params, FLAGS.num_ps, ffm_dir)
  auc = demo_data.compute_auc(labels, predictions)
  best_auc = demo_data.compute_auc(labels, probabilities)
  print(
    f"FFM: evaluation AUC {auc:.4f}, the planted structure allows {best_auc:.4f}; "
    f"{time.monotonic() - start:.0f} s\n",
    flush=True,
  )
  return 0


def ffm_params() -> Any:
  """Returns the params of the FFM model."""
  params = demo_models.FFMTask.params()
  params.name = "test_ffm_model"
  params.serving.export_when_saving = True
  params.serving.export_mode = export_context.ExportMode.DISTRIBUTED
  params.train.max_steps = FLAGS.ffm_steps
  params.train.max_pending_seconds_for_barrier = 3
  return params


def _ffm_save_steps() -> int:
  return max(1, FLAGS.ffm_steps // 2)


def _train_ranking(model_dir: str) -> int:
  ranking_dir = os.path.join(model_dir, "ranking")
  info = prepare_data(os.path.join(model_dir, "data"))
  params = ranking_params(info)
  print(
    f"Ranking model, {info.num_train:,} ratings to train on, {info.num_eval:,} to evaluate",
    flush=True,
  )
  start = time.monotonic()
  first_step = _report_start(ranking_dir)
  if FLAGS.num_workers > 1:
    status = _run_processes(model_dir, "ranking")
    if status != 0:
      return status
  else:
    train_locally(params, FLAGS.num_ps, ranking_dir)
  seconds = time.monotonic() - start
  if demo_hooks.is_stop_requested():
    return _report_interrupt(model_dir)
  if first_step and first_step == _latest_step(ranking_dir):
    print("The data had been read to its end before: nothing was left to train on.")
  predictions = predict(params, FLAGS.num_ps, ranking_dir)
  auc = demo_data.compute_auc(demo_data.read_labels(info), predictions)
  allowed = "" if info.best_auc is None else f", the planted structure allows {info.best_auc:.4f}"
  print(f"Ranking: evaluation AUC {auc:.4f}{allowed}; {seconds:.0f} s")
  _report_checkpoint(model_dir)
  return 0


def prepare_data(folder: str) -> demo_data.RatingsInfo:
  """Makes, or finds, the dataset that the flags ask for."""
  if FLAGS.data is not None:
    return demo_data.read_movielens(FLAGS.data, folder)
  return demo_data.generate(folder, FLAGS.num_ratings, FLAGS.num_users, FLAGS.num_movies)


def ranking_params(
  info: demo_data.RatingsInfo, task: type[demo_models.RankingTask] = demo_models.RankingTask
) -> Any:
  """Returns the params of the ranking model, as a task of that class, on a dataset."""
  params = task.params()
  params.name = "movie_ranking"
  params.data_dir = info.folder
  params.epochs = FLAGS.epochs
  params.train.per_replica_batch_size = FLAGS.batch_size
  # A worker whose share of the data is used up does not come to the barrier of a save.
  params.train.max_pending_seconds_for_barrier = 3
  return params


def train_locally(
  params: Any, num_ps: int, model_dir: str, steps: int | None = None, **overrides: Any
) -> None:
  """Trains a model in this process: this many steps, or until its data ends."""
  conf = cpu_training.CpuTrainingConfig(
    model_name=params.name,
    num_ps=num_ps,
    enable_gpu_training=FLAGS.gpu,
    **{**_COMMON_CONFIG, **overrides},
  )
  cpu_training.make_config_backward_compatible(model_dir, conf)
  # An endless dataset has no place to go on from.
  resume_data = True if steps is None else None
  params = params.copy()
  params.train.use_gpu_emb_table = FLAGS.gpu and gpu_table.is_available()
  cpu_training.local_train_internal(params, conf, model_dir, steps, resume_data=resume_data)


def predict(params: Any, num_ps: int, model_dir: str) -> np.ndarray:
  """Returns what the newest checkpoint predicts for the evaluation set."""
  conf = cpu_training.CpuTrainingConfig(num_ps=num_ps)
  cpu_training.make_config_backward_compatible(model_dir, conf)
  with cpu_training._local_cluster(num_ps) as (session_config, _):
    training = cpu_training.CpuTraining(conf, params.instantiate())
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(model_dir=model_dir, session_config=session_config),
    )
    batches = estimator.predict(
      training.create_input_fn(graph_estimator.ModeKeys.PREDICT), yield_single_examples=False
    )
    return np.concatenate(list(batches))


def _run_processes(model_dir: str, model: str) -> int:
  """Starts parameter servers and workers, and waits for them; returns the exit status."""
  uuid = f"{os.getpid()}_{int(time.time())}"
  log_dir = os.path.join(model_dir, "logs")
  os.makedirs(log_dir, exist_ok=True)
  roles = [("ps", i) for i in range(FLAGS.num_ps)]
  roles += [("worker", i) for i in range(FLAGS.num_workers)]
  processes = {}
  for server_type, index in roles:
    is_chief = (server_type, index) == ("worker", 0)
    log_path = os.path.join(log_dir, f"{model}_{server_type}_{index}.log")
    log = None if is_chief else open(log_path, "wb")
    processes[server_type, index] = subprocess.Popen(
      _child_command(model_dir, model, server_type, index, uuid),
      env={**os.environ, "CLOUDNATIVE_INET_ADDR": "127.0.0.1"},
      stdout=log,
      stderr=log,
    )
  print(f"Started {FLAGS.num_ps} servers and {FLAGS.num_workers} workers; logs in {log_dir}")
  try:
    return _wait(processes, log_dir)
  finally:
    for process in processes.values():
      if process.poll() is None:
        process.kill()
        process.wait()


def _child_command(
  model_dir: str, model: str, server_type: str, index: int, uuid: str
) -> list[str]:
  flag_values = {
    "model_dir": model_dir,
    "model": model,
    "server_type": server_type,
    "index": index,
    "uuid": uuid,
    "num_ps": FLAGS.num_ps,
    "num_workers": FLAGS.num_workers,
    "epochs": FLAGS.epochs,
    "batch_size": FLAGS.batch_size,
    "ffm_steps": FLAGS.ffm_steps,
  }
  arguments = [f"--{name}={value}" for name, value in flag_values.items()]
  return [sys.executable, "-m", "monolith.native_training.demo", *arguments]


def _wait(processes: dict[tuple[str, int], subprocess.Popen], log_dir: str) -> int:
  """Waits for all processes but workers that come when training is over; returns the status."""
  deadline = late_since = None
  while any(process.poll() is None for process in processes.values()):
    for (server_type, index), process in processes.items():
      if process.poll() not in (None, 0):
        print(
          f"{server_type} {index} failed with {process.returncode}: see {log_dir}",
          file=sys.stderr,
        )
        return 1
    if demo_hooks.is_stop_requested():
      deadline = deadline or time.monotonic() + _STOP_SECS
      if time.monotonic() > deadline:
        print(f"Processes did not stop in {_STOP_SECS} s: killing them.", file=sys.stderr)
        return 1
    running = [role for role, process in processes.items() if process.poll() is None]
    if all(server_type == "worker" and index > 0 for server_type, index in running):
      late_since = late_since or time.monotonic()
      if time.monotonic() - late_since > _LATE_SECS:
        # They look for a chief that will not come back.
        print(f"Workers {[index for _, index in running]} came when training was over.")
        break
    time.sleep(_POLL_SECS)
  return max(abs(process.returncode or 0) for process in processes.values())


def _play_role(model_dir: str) -> int:
  """Plays one process of the cluster."""
  if FLAGS.server_type == "ps":
    # The chief tells servers when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
  else:
    demo_hooks.stop_on_interrupt()
  cluster_manager._cluster_query_failure_handler = lambda: time.sleep(_POLL_SECS)
  overrides = {}
  if FLAGS.model == "ffm":
    params = ffm_params()
    overrides["save_checkpoints_steps"] = _ffm_save_steps()
  else:
    params = ranking_params(demo_data.load(os.path.join(model_dir, "data")))
  config = cpu_training.DistributedCpuTrainingConfig(
    server_type=FLAGS.server_type,
    index=FLAGS.index,
    num_ps=FLAGS.num_ps,
    num_workers=FLAGS.num_workers,
    model_dir=os.path.join(model_dir, FLAGS.model),
    model_name=params.name,
    uuid=FLAGS.uuid,
    retry_wait_in_secs=5,
    **{**_COMMON_CONFIG, **overrides},
  )
  discovery = service_discovery.HostServiceDiscovery(
    os.path.join(model_dir, "discovery", FLAGS.uuid)
  )
  cpu_training.distributed_train(config, discovery, params)
  return 0


def _report_start(folder: str) -> int:
  """Prints from which checkpoint training goes on, if from any; returns its step or 0."""
  step = _latest_step(folder)
  if step:
    print(f"Going on from {tf.train.latest_checkpoint(folder)}", flush=True)
  return step


def _latest_step(folder: str) -> int:
  """Returns the step of the newest checkpoint, 0 if there is none."""
  checkpoint = tf.train.latest_checkpoint(folder)
  return 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])


def _report_checkpoint(model_dir: str) -> None:
  checkpoint = tf.train.latest_checkpoint(
    os.path.join(model_dir, "ranking")
  ) or tf.train.latest_checkpoint(os.path.join(model_dir, "ffm"))
  arguments = [f"--model_dir={model_dir}"]
  for name in _RESUME_FLAGS:
    if FLAGS[name].value != FLAGS[name].default:
      arguments.append(f"--{name}={FLAGS[name].value}")
  print(f"Checkpoint: {checkpoint}")
  command = [python_command(), "-m", "monolith.native_training.demo", *arguments]
  print(f"Go on with: {shlex.join(command)}")


def python_command() -> str:
  """Returns how to call this interpreter from here."""
  if shutil.which("python") == sys.executable:
    return "python"
  relative = os.path.relpath(sys.executable)
  return sys.executable if relative.startswith(os.pardir) else relative


def _report_interrupt(model_dir: str) -> int:
  print("Stopped by Ctrl-C.")
  _report_checkpoint(model_dir)
  return INTERRUPTED


if __name__ == "__main__":
  app.run(main)
