"""Trains or evaluates a registered task with a plain Estimator, on GPUs or on CPU.

    python -m monolith.gpu_runner --task=<module>.<Class> --model_dir=<folder> --mode=train

A task whose `accelerator` is `horovod` is trained by as many processes as the launcher starts:

    horovodrun -np 2 python -m monolith.gpu_runner --task=... --model_dir=<shared folder>

Its model function gets `num_replicas` and `hvd_rank` in `params` and has to average the gradients,
with `horovod.tensorflow.DistributedOptimizer`.

`tf.compat.v1.disable_v2_behavior()` must be in force before `GPURunner.run`; the command line does
it. Importing this module defines absl flags; Horovod and MPI are imported on first use.

Differences from ByteDance's Monolith: evaluation has an event file with a name of its own; one
process does not wait before it evaluates; where Horovod runs without MPI its own barrier is used;
only one rank writes summaries; what cannot work is refused early.
"""

import importlib
import time
import types
from typing import Any, Callable, Optional

import tensorflow as tf
from absl import app, flags, logging

from monolith import _install, base_runner
from monolith.core import hyperparams
from monolith.native_training import graph_estimator, hvd_lib

FLAGS = flags.FLAGS

_HOROVOD = "horovod"
# Until all ranks, maybe on other machines, see the checkpoint.
_EVAL_DELAY_SECONDS = 10

base_runner.define_task_flags()


class _LazyModule(types.ModuleType):
  """Stands for a module that is imported when one of its attributes is first used."""

  def __init__(self, name: str, remedy: str):
    super().__init__(name)
    self._remedy = remedy

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith("_"):
      # Tools look for these in every module, which must not import anything.
      raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
    try:
      module = importlib.import_module(self.__name__)
    except ImportError as error:
      raise ImportError(
        f"accelerator=horovod needs {self.__name__}: {self._remedy} ({error})"
      ) from error
    return getattr(module, attribute)


hvd = _LazyModule("horovod.tensorflow", _install.install_line("horovod"))
MPI = _LazyModule("mpi4py.MPI", "pip install mpi4py, as Horovod runs over MPI")


class GPURunner(base_runner.BaseRunner):
  """Runs one task, as the flags say."""

  def __init__(self, task_param: hyperparams.InstantiableParams, *args: Any, **kwargs: Any):
    """Args:
    task_param: params of a `BaseTask`; if its `accelerator` is `horovod`, this process is a rank.
    """
    super().__init__(*args, **kwargs)
    self._model_dir = FLAGS.model_dir
    self._mode = FLAGS.mode
    self._eval_delay_seconds = _EVAL_DELAY_SECONDS
    self._task = None
    self._task_param = task_param
    self._save_checkpoints_steps = task_param.train.save_checkpoints_steps
    if self._save_checkpoints_steps is None:
      self._save_checkpoints_steps = FLAGS.save_checkpoints_steps

  @property
  def _is_horovod(self) -> bool:
    return self._task_param.accelerator == _HOROVOD

  @property
  def _num_replicas(self) -> int:
    return hvd.size() if self._is_horovod else 1

  @property
  def _rank(self) -> int:
    return hvd.rank() if self._is_horovod else 0

  def create_estimator(self, model_fn: Callable[..., Any]) -> graph_estimator.Estimator:
    """Returns the estimator of this process.

    Args:
      model_fn: the task's. Its `params` have `train_batch_size` and `eval_batch_size` (of one
        replica), `accelerator`, `num_replicas` and `hvd_rank`.

    Raises:
      ImportError: the accelerator is `horovod`, which is not installed.
    """
    config = {"model_dir": self._model_dir, "save_checkpoints_steps": self._save_checkpoints_steps}
    if self._is_horovod:
      session_config = tf.compat.v1.ConfigProto()
      session_config.graph_options.optimizer_options.global_jit_level = (
        tf.compat.v1.OptimizerOptions.ON_1
      )
      session_config.gpu_options.allow_growth = True
      session_config.gpu_options.visible_device_list = str(hvd.local_rank())
      config["session_config"] = session_config
      if self._rank != 0:
        # All have the folder, to start from the same checkpoint; one writes there.
        config.update(
          save_checkpoints_steps=None, save_summary_steps=None, log_step_count_steps=None
        )
    return graph_estimator.Estimator(
      model_fn=model_fn,
      config=graph_estimator.RunConfig(**config),
      params={
        "train_batch_size": self._task_param.train.per_replica_batch_size,
        "eval_batch_size": self._task_param.eval.per_replica_batch_size,
        "accelerator": self._task_param.accelerator,
        "num_replicas": self._num_replicas,
        "hvd_rank": self._rank,
      },
    )

  def run(self) -> None:
    """Trains, evaluates the latest checkpoint, or does both in turns.

    Raises:
      ImportError: the accelerator is `horovod`, which is not installed.
      TypeError: something the mode needs is None.
      ValueError: flags or params contradict each other.
    """
    self._validate()
    current_step = self._load_global_step()
    logging.info("Current step: %d", current_step)
    if self._is_horovod:
      hvd.init()
      _pin_gpu(hvd.local_rank())

    self._task = self._task_param.instantiate()
    train_input_fn = self._task.create_input_fn(graph_estimator.ModeKeys.TRAIN)
    eval_input_fn = self._task.create_input_fn(graph_estimator.ModeKeys.EVAL)
    estimator = self.create_estimator(self._task.create_model_fn())

    if self._mode == "train":
      self._train(estimator, train_input_fn, self._task_param.train.max_steps)
    elif self._mode == "eval":
      if self._rank == 0:
        self._evaluate(estimator, eval_input_fn, current_step)
    else:
      self._train_and_evaluate(estimator, train_input_fn, eval_input_fn, current_step)

  def _validate(self) -> None:
    """Refuses, before anything is started, what cannot work."""
    params = self._task_param
    if (self._save_checkpoints_steps or 0) < 0:
      raise ValueError(f"--save_checkpoints_steps={self._save_checkpoints_steps} is negative")
    if self._mode != "train":
      if not self._model_dir:
        raise TypeError(f"--mode={self._mode} needs --model_dir, the folder of the checkpoints")
      self._count_eval_steps()
    if self._mode == "train_and_eval":
      self._require(params.train, "train", "max_steps")
      if self._require(params.eval, "eval", "steps_per_eval") < 1:
        raise ValueError(f"eval.steps_per_eval is {params.eval.steps_per_eval}, want at least 1")
      if self._save_checkpoints_steps is None:
        # Evaluation reads a checkpoint, and the next round starts from one.
        self._save_checkpoints_steps = params.eval.steps_per_eval
    if self._mode == "train" and self._save_checkpoints_steps is None:
      logging.warning(
        "No checkpoint will be written: set --save_checkpoints_steps or "
        "train.save_checkpoints_steps"
      )

  def _count_eval_steps(self) -> int:
    params = self._task_param
    examples = self._require(params.input, "input", "eval_examples")
    batch_size = self._require(params.eval, "eval", "per_replica_batch_size")
    if examples < batch_size:
      raise ValueError(
        f"input.eval_examples is {examples}, fewer than one batch of {batch_size} examples"
      )
    return examples // batch_size

  def _train(
    self,
    estimator: graph_estimator.Estimator,
    input_fn: Callable[..., Any],
    max_steps: Optional[int],
  ) -> None:
    hooks = [hvd_lib.BroadcastGlobalVariablesHook(0)] if self._is_horovod else []
    estimator.train(input_fn, hooks=hooks, max_steps=max_steps)

  def _evaluate(
    self,
    estimator: graph_estimator.Estimator,
    input_fn: Callable[..., Any],
    step: int,
  ) -> None:
    """Evaluates the latest checkpoint and writes the results at `step`."""
    start = time.time()
    results = estimator.evaluate(input_fn, steps=self._count_eval_steps())
    logging.info("Results at step %d: %s, %.1f s", step, results, time.time() - start)
    writer = self._open_eval_writer("gpu_runner")
    try:
      self.write_summary(results, writer, step)
    finally:
      writer.close()

  def _train_and_evaluate(
    self,
    estimator: graph_estimator.Estimator,
    train_input_fn: Callable[..., Any],
    eval_input_fn: Callable[..., Any],
    step: int,
  ) -> None:
    params = self._task_param
    while step < params.train.max_steps:
      goal = min(step + params.eval.steps_per_eval, params.train.max_steps)
      self._train(estimator, train_input_fn, goal)
      # All ranks read that step from the checkpoint of the first, so that all stop.
      self._barrier()
      reached = self._load_global_step()
      if self._rank == 0:
        if self._num_replicas > 1:
          time.sleep(self._eval_delay_seconds)
        self._evaluate(estimator, eval_input_fn, reached)
      self._barrier()
      if reached <= step:
        logging.warning("Training did not get beyond step %d: the data has ended", step)
        return
      step = reached

  def _barrier(self) -> None:
    """Waits until all ranks are here."""
    if self._num_replicas == 1:
      return
    if hvd.mpi_enabled():
      MPI.COMM_WORLD.Barrier()
      return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      session.run(hvd.allreduce(tf.constant(0.0), name="gpu_runner_barrier"))


def _pin_gpu(local_rank: int) -> None:
  """Gives this process one of the GPUs of the machine, and of that only the memory it needs.

  Raises:
    ValueError: there are GPUs, but fewer than processes.
  """
  gpus = tf.config.list_physical_devices("GPU")
  if not gpus:
    return
  if local_rank >= len(gpus):
    raise ValueError(f"local rank {local_rank} has no GPU: there are {len(gpus)}")
  for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
  tf.config.set_visible_devices(gpus[local_rank], "GPU")


def main(argv: list[str]) -> None:
  """Runs the task that the flags name.

  Raises:
    app.UsageError: `--task` is missing, or there are arguments that are not flags.
    LookupError: there is no such task; the nearest names are suggested.
  """
  base_runner.run_task(GPURunner, argv)


def cli() -> None:
  """Runs the command line."""
  tf.compat.v1.disable_v2_behavior()
  app.run(main)


if __name__ == "__main__":
  cli()
