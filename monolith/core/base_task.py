"""`BaseTask`: what a runner drives. A task supplies the input function and the model function."""

from typing import Any, Callable

from monolith.core import base_layer, hyperparams


class BaseTask(base_layer.BaseLayer):
  """A training task."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("accelerator", None, 'None, "tpu" or "horovod".')

    p.define("input", hyperparams.Params(), "Input params.")
    p.input.define("eval_examples", None, "Number of examples of one evaluation.")
    p.input.define("train_examples", None, "Number of examples to train on.")

    p.define("eval", hyperparams.Params(), "Evaluation params.")
    p.eval.define("per_replica_batch_size", None, "Evaluation batch size of one replica.")
    p.eval.define("steps_per_eval", 10000, "Training steps between two evaluations.")
    p.eval.define("steps", None, "Steps of one evaluation.")

    p.define("train", hyperparams.Params(), "Training params.")
    p.train.define("steps", None, "Steps to train.")
    p.train.define("max_steps", None, "Global step at which training ends.")
    p.train.define("per_replica_batch_size", None, "Training batch size of one replica.")
    p.train.define("file_pattern", None, "Training files; wins over a folder.")
    p.train.define("repeat", False, "Whether to read the training files again and again.")
    p.train.define("label_key", "label", "Key of the label in the features.")
    p.train.define(
      "save_checkpoints_steps", None, "Steps between checkpoints; None: the runner decides."
    )
    p.train.define(
      "save_checkpoints_secs", None, "Seconds between checkpoints; None: the runner decides."
    )
    p.train.define(
      "dense_only_save_checkpoints_secs", None, "Seconds between checkpoints of dense variables."
    )
    p.train.define(
      "dense_only_save_checkpoints_steps", None, "Steps between checkpoints of dense variables."
    )
    return p

  def __init__(self, params: hyperparams.Params):
    super().__init__(params)

  def create_input_fn(self, mode: str) -> Callable[..., Any]:
    """Returns the input function of an Estimator for a `graph_estimator.ModeKeys` mode."""
    raise NotImplementedError("Abstract method.")

  def create_model_fn(self) -> Callable[..., Any]:
    """Returns the model function of an Estimator."""
    raise NotImplementedError("Abstract method.")
