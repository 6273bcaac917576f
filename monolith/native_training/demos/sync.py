"""Trains the demo's ranking model synchronously: `python -m monolith.native_training.demos.sync`.

Without a launcher it starts `--num_ranks` ranks on this machine; rank 0 prints how it goes, the
others write to `<model_dir>/logs`. Under a launcher (`horovodrun`, `torchrun`) it is one of them.
Checkpoints can be restored on any number of ranks. Ctrl-C stops all ranks after a checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import tensorflow as tf
from absl import app, flags, logging

from monolith.native_training import cpu_training, demo, feature_utils, hvd_lib, sync_training_hooks
from monolith.native_training.demos import data as demo_data
from monolith.native_training.demos import hooks as demo_hooks
from monolith.native_training.demos import models as demo_models
from monolith.native_training.ranks import agreement as sync_agreement
from monolith.native_training.ranks import local as local_ranks
from monolith.native_training.settings import rank_environment as mpi_utils

FLAGS = flags.FLAGS

flags.DEFINE_integer("num_ranks", 2, "ranks to start on this machine")
flags.DEFINE_bool("pipeline", False, "overlap exchanges and updates with the next step")

_STOP_FILE = "stop"
_STOP_CHECK_STEPS = 20
_POLL_SECS = 0.2
_STOP_SECS = 60
# Arguments that a rank needs, and a second run to go on with the first one.
_RESUME_FLAGS = (
  "data",
  "num_ratings",
  "num_users",
  "num_movies",
  "epochs",
  "batch_size",
  "pipeline",
)
_PIPELINE = {
  "embedding_prefetch_capacity": 1,
  "enable_pipelined_fwda2a": True,
  "enable_pipelined_bwda2a": True,
  "enable_async_optimize": True,
}


class SyncRankingTask(demo_models.RankingTask):
  """The ranking model whose dense gradients are averaged over the ranks."""

  def _reduce(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    return feature_utils.allreduce_cond(gradients)

  def _stop_hook(self) -> tf.compat.v1.train.SessionRunHook:
    return _StopFileHook(os.path.join(self.p.data_dir, _STOP_FILE))


class _StopFileHook(sync_training_hooks.EveryNRunsHook):
  """Ends the training on all ranks when rank 0 finds a file."""

  def __init__(self, path: str):
    super().__init__(_STOP_CHECK_STEPS)
    self._path = path

  def begin(self) -> None:
    super().begin()
    self._broadcast = sync_agreement.Broadcast("demo_stop", [], tf.int32)

  def check(self, run_context: Any, step: int) -> None:
    del step
    found = os.path.exists(self._path) or demo_hooks.is_stop_requested()
    if self._broadcast.run(run_context.session, int(found)):
      run_context.request_stop()


def main(argv: list[str]) -> int:
  """Runs the demo, or one rank of it; returns the exit status."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if FLAGS.num_ranks < 1:
    raise app.UsageError(f"--num_ranks is {FLAGS.num_ranks}, want at least 1")
  if FLAGS.gpu:
    raise app.UsageError("--gpu trains in one process, without ranks: leave it out here")
  if FLAGS.data is not None and not os.path.exists(FLAGS.data):
    raise app.UsageError(f"--data {FLAGS.data} does not exist")
  tf.compat.v1.disable_eager_execution()
  tf.get_logger().setLevel("ERROR")
  logging.set_verbosity(logging.ERROR)
  model_dir = FLAGS.model_dir or demo.default_model_dir("monolith_demo_sync")
  if mpi_utils.is_under_mpi():
    # The process that started the ranks tells them to stop, all at the same step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    return _train_rank(model_dir)
  return _train(model_dir)


def _train(model_dir: str) -> int:
  """Prepares the data, starts the ranks and evaluates what they have learnt."""
  ranking_dir = os.path.join(model_dir, "ranking")
  info = demo.prepare_data(os.path.join(model_dir, "data"))
  _delete_stop_file(info)
  engine = f" with {mpi_utils.find_local_engine()}" if FLAGS.num_ranks > 1 else ""
  print(
    f"Ranking model on {FLAGS.num_ranks} ranks{engine}, {info.num_train:,} ratings to train on, "
    f"{info.num_eval:,} to evaluate",
    flush=True,
  )
  before = tf.train.latest_checkpoint(ranking_dir)
  if before:
    print(f"Going on from {before}", flush=True)
  demo_hooks.stop_on_interrupt()
  start = time.monotonic()
  if FLAGS.num_ranks == 1:
    status = _train_rank(model_dir)
  else:
    status = _launch(model_dir, info)
  seconds = time.monotonic() - start
  _delete_stop_file(info)
  if status != 0:
    return status
  if demo_hooks.is_stop_requested():
    print("Stopped by Ctrl-C.")
    _report_checkpoint(model_dir)
    return demo.INTERRUPTED
  # A checkpoint of n ranks is one of n parameter servers.
  predictions = demo.predict(demo.ranking_params(info), FLAGS.num_ranks, ranking_dir)
  auc = demo_data.compute_auc(demo_data.read_labels(info), predictions)
  allowed = "" if info.best_auc is None else f", the planted structure allows {info.best_auc:.4f}"
  print(f"Ranking: evaluation AUC {auc:.4f}{allowed}; {seconds:.0f} s")
  _report_checkpoint(model_dir)
  return 0


def _params(info: demo_data.RatingsInfo) -> Any:
  params = demo.ranking_params(info, SyncRankingTask)
  params.num_ranks = FLAGS.num_ranks
  return params


def _train_rank(model_dir: str) -> int:
  """Is one of the ranks."""
  hvd_lib.init()
  rank, size = hvd_lib.rank(), hvd_lib.size()
  FLAGS.num_ranks = size
  params = _params(_share_data(os.path.join(model_dir, "data")))
  params.show_progress = rank == 0
  num_threads = max(1, len(os.sched_getaffinity(0)) // hvd_lib.local_size())
  config = cpu_training.DistributedCpuTrainingConfig(
    index=rank,
    num_workers=size,
    model_dir=os.path.join(model_dir, "ranking"),
    model_name=params.name,
    enable_sync_training=True,
    reorder_fids_in_data_pipeline=True,
    save_checkpoints_steps=500,
    checkpoints_max_to_keep=3,
    # Threads of one rank that wait actively take the cores of the others.
    intra_op_parallelism_threads=num_threads,
    inter_op_parallelism_threads=num_threads + 1,
    **(_PIPELINE if FLAGS.pipeline else {}),
  )
  cpu_training.distributed_sync_train(config, params)
  return 0


def _share_data(folder: str) -> demo_data.RatingsInfo:
  """Lets rank 0 prepare the data, unless it is there, and the others wait for it."""
  if hvd_lib.rank() == 0:
    demo.prepare_data(folder)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    session.run(hvd_lib.broadcast(tf.constant(0), 0, name="demo_data_is_there"))
  return demo_data.load(folder)


def _launch(model_dir: str, info: demo_data.RatingsInfo) -> int:
  """Starts the ranks and waits for them; returns the exit status."""
  log_dir = os.path.join(model_dir, "logs")
  os.makedirs(log_dir, exist_ok=True)
  with contextlib.ExitStack() as stack:
    outputs: list[Any] = [None]
    for rank in range(1, FLAGS.num_ranks):
      outputs.append(stack.enter_context(open(os.path.join(log_dir, f"rank_{rank}.log"), "wb")))
    try:
      ranks = local_ranks.LocalRanks(FLAGS.num_ranks, _demo_command(model_dir), outputs=outputs)
    except ImportError as e:
      print(f"{e}; --num_ranks=1 trains without it.", file=sys.stderr)
      return 1
    return _wait(stack.enter_context(ranks).processes, info, log_dir)


def _wait(processes: list[subprocess.Popen], info: demo_data.RatingsInfo, log_dir: str) -> int:
  """Waits for the ranks, which end together also when one fails, and tells them of a Ctrl-C."""
  deadline = None
  while any(process.poll() is None for process in processes):
    if demo_hooks.is_stop_requested():
      with open(os.path.join(info.folder, _STOP_FILE), "w"):
        pass
    if deadline is None and any(process.poll() is not None for process in processes):
      deadline = time.monotonic() + _STOP_SECS
    if deadline is not None and time.monotonic() > deadline:
      print(f"Ranks did not end in {_STOP_SECS} s: killing them.", file=sys.stderr)
      for process in processes:
        if process.poll() is None:
          process.send_signal(signal.SIGUSR1)  # They print where they are.
      time.sleep(1)
      return 1
    time.sleep(_POLL_SECS)
  failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
  if failed:
    print(f"Ranks {failed} failed: see {log_dir}", file=sys.stderr)
  return 1 if failed else 0


def _demo_command(model_dir: str) -> list[str]:
  """Returns the arguments of Python that run this demo again, with the flags it has now."""
  arguments = [f"--model_dir={model_dir}"]
  for name in _RESUME_FLAGS:
    if FLAGS[name].value != FLAGS[name].default:
      arguments.append(f"--{name}={FLAGS[name].value}")
  return ["-m", "monolith.native_training.demos.sync", *arguments]


def _delete_stop_file(info: demo_data.RatingsInfo) -> None:
  path = os.path.join(info.folder, _STOP_FILE)
  if os.path.exists(path):
    os.remove(path)


def _report_checkpoint(model_dir: str) -> None:
  print(f"Checkpoint: {tf.train.latest_checkpoint(os.path.join(model_dir, 'ranking'))}")
  command = [demo.python_command(), *_demo_command(model_dir)]
  print(f"Go on with: {shlex.join(command)}, on any --num_ranks")


if __name__ == "__main__":
  app.run(main)
