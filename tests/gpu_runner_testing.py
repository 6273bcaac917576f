"""Tasks for the tests of the GPU runner."""

import tensorflow as tf

from monolith import gpu_runner
from monolith.core import base_model_params, base_task, model_registry
from monolith.native_training import graph_estimator

LINEAR = f"{__name__}.Linear"
RANKS = f"{__name__}.Ranks"
LEARNING_RATE = 0.125


class LinearTask(base_task.BaseTask):
  """A weight that goes down by the learning rate times the mean of the inputs in every step.

  It starts at 1 on the first rank, at 2 on the second; the inputs are 1 on the first, 2 on the
  second: after n steps that went as they should it is `1 - LEARNING_RATE * mean(inputs) * n`.
  """

  seen = {}

  @classmethod
  def params(cls):
    p = super().params()
    p.define("train_batches", None, "Batches of one pass; None: endless.")
    return p

  def __init__(self, params):
    super().__init__(params)
    self.p = params

  def create_input_fn(self, mode):
    LinearTask.seen[f"created_{mode}"] = True

    def input_fn(params):
      LinearTask.seen[f"input_{mode}"] = dict(params)
      is_training = mode == graph_estimator.ModeKeys.TRAIN
      size = params["train_batch_size" if is_training else "eval_batch_size"]
      x = tf.data.Dataset.from_tensors(params["hvd_rank"] + 1.0).repeat()
      count = self.p.train_batches if is_training else None
      return x.batch(size).take(-1 if count is None else count).map(lambda x: ({"x": x}, x))

    return input_fn

  def create_model_fn(self):
    def model_fn(features, labels, mode, params):
      LinearTask.seen[f"model_{mode}"] = dict(params)
      weight = tf.compat.v1.get_variable("weight", initializer=params["hvd_rank"] + 1.0)
      loss = weight * tf.reduce_mean(features["x"])
      train_op = None
      if mode == graph_estimator.ModeKeys.TRAIN:
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(LEARNING_RATE)
        if params["accelerator"] == "horovod":
          optimizer = gpu_runner.hvd.DistributedOptimizer(optimizer)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
      count = tf.compat.v1.metrics.mean(tf.cast(tf.size(labels), tf.float32))
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, eval_metric_ops={"rows": count}
      )

    return model_fn


@model_registry.RegisterSingleTaskModel
class Linear(base_model_params.SingleTaskModelParams):
  def task(self):
    p = LinearTask.params()
    p.input.eval_examples = 20
    p.train.per_replica_batch_size = 16
    p.eval.per_replica_batch_size = 8
    p.eval.steps_per_eval = 4
    p.train.max_steps = 6
    return p


@model_registry.RegisterSingleTaskModel
class Ranks(Linear):
  """The same, by the ranks of Horovod."""

  def task(self):
    p = super().task()
    p.accelerator = "horovod"
    return p


def main():
  """Plays one rank of a test: runs without the delay before evaluation, and shows what it saw."""
  gpu_runner._EVAL_DELAY_SECONDS = 0
  try:
    gpu_runner.cli()
  finally:
    for name in ("model_train", "model_eval"):
      print(name, LinearTask.seen.get(name), flush=True)


if __name__ == "__main__":
  # As the module that the registry imports, not as a second copy of it.
  from tests import gpu_runner_testing

  gpu_runner_testing.main()
