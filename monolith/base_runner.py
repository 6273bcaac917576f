"""`BaseRunner`: what the TPU and GPU runners share."""

import itertools
import os
from typing import Any, Callable, Optional

import tensorflow as tf
from absl import app, flags, logging

from monolith.core import hyperparams, model_registry

FLAGS = flags.FLAGS
# Flags defined here are listed under the calling runner.
flags.disclaim_key_flags()

_writer_ids = itertools.count()


def define_flag(define: Callable[..., Any], name: str, *args: Any) -> None:
  """Defines a flag unless another runner has defined it already.

  Args:
    define: `flags.DEFINE_string` or the like.
    name: the flag's name.
    *args: the other arguments of `define`.
  """
  if name not in FLAGS:
    define(name, *args)


def define_task_flags() -> None:
  """Defines the flags that all runners share: the task, the mode and the place."""
  define_flag(flags.DEFINE_string, "task", None, "Registered task, <module>.<Class>.")
  define_flag(flags.DEFINE_string, "model_dir", None, "Folder of checkpoints and summaries.")
  define_flag(
    flags.DEFINE_enum, "mode", "train", ["train_and_eval", "train", "eval"], "What to do."
  )
  define_flag(
    flags.DEFINE_integer,
    "save_checkpoints_steps",
    None,
    "Steps between checkpoints; None: no checkpoint at all, unless the task says otherwise.",
  )


class BaseRunner:
  """Base of runners."""

  # Set by the runners.
  _model_dir: Optional[str] = None
  _task_param: Optional[hyperparams.InstantiableParams] = None

  def __init__(self, *args: Any, **kwargs: Any):
    del args, kwargs

  def run(self) -> None:
    raise NotImplementedError

  def write_summary(
    self, logs: dict[str, Any], summary_writer: tf.compat.v1.summary.FileWriter, current_step: int
  ) -> None:
    """Writes one scalar per item.

    Args:
      logs: numbers by tag.
      summary_writer: the writer to use.
      current_step: the step of the numbers.
    """
    # A graph of its own: the caller's may be finalized, and the writer asks for the default graph.
    with tf.Graph().as_default():
      summary = tf.compat.v1.Summary(
        value=[
          tf.compat.v1.Summary.Value(tag=tag, simple_value=float(value))
          for tag, value in logs.items()
        ]
      )
      summary_writer.add_summary(summary, current_step)

  def _load_global_step(self) -> int:
    """Returns the step of the latest checkpoint, 0 if there is none."""
    try:
      return int(tf.train.load_variable(self._model_dir, "global_step"))
    except (TypeError, ValueError, tf.errors.NotFoundError):
      return 0

  def _require(self, params: hyperparams.Params, group: str, name: str) -> Any:
    """Returns a parameter of the task.

    Raises:
      TypeError: it is None.
    """
    value = params[name]
    if value is None:
      raise TypeError(f"{group}.{name} of task {self._task_param.name} is None")
    return value

  def _open_eval_writer(self, runner: str) -> tf.compat.v1.summary.FileWriter:
    """Returns a writer in the folder `eval`, which is created."""
    eval_dir = os.path.join(self._model_dir, "eval")
    tf.io.gfile.makedirs(eval_dir)
    # The estimator has a writer in the same folder. Files are named after the second in which they
    # were opened, so without a suffix both could have the same name.
    return tf.compat.v1.summary.FileWriter(
      eval_dir, filename_suffix=f".{runner}.{os.getpid()}.{next(_writer_ids)}"
    )


def run_task(runner_class: Callable[..., BaseRunner], argv: list[str]) -> None:
  """Runs the task that the flags name; the `main` of each runner.

  Raises:
    app.UsageError: `--task` is missing, or there are arguments that are not flags.
    LookupError: there is no such task; the nearest names are suggested.
  """
  if argv and len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  if not FLAGS.task:
    raise app.UsageError("--task is missing: --task=<module>.<Class>")
  task_param = model_registry.GetParams(FLAGS.task)
  logging.info("Flags: %s", FLAGS.flag_values_dict())
  logging.info("Task params: %s", task_param)
  runner_class(task_param).run()
