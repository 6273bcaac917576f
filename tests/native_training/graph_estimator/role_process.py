"""A process of `training_test.py`: `role_process MODEL_DIR` is what its `TF_CONFIG` says.

The model's weight grows by 1 in each step, of which there are 20. The chief does not end before the
worker has trained, and both leave a file with the number of steps that they have run themselves.
"""

import functools
import json
import pathlib
import sys
import time

import tensorflow as tf
from tensorflow.python.training import monitored_session

from monolith.native_training import graph_estimator

MAX_STEPS = 20


def input_fn():
  return tf.data.Dataset.from_tensors({"x": [1.0]}).repeat()


def eval_input_fn():
  return input_fn().take(3)


def model_fn(features, labels, mode):
  weight = tf.compat.v1.get_variable("weight", [], initializer=tf.compat.v1.zeros_initializer())
  step = tf.compat.v1.train.get_global_step()
  with tf.control_dependencies([features["x"]]):
    updates = [tf.compat.v1.assign_add(weight, 1.0), tf.compat.v1.assign_add(step, 1)]
  return graph_estimator.EstimatorSpec(
    mode,
    predictions={"weight": weight * features["x"]},
    loss=tf.reduce_sum(weight * features["x"]),
    train_op=tf.group(updates),
  )


class _CountSteps(tf.compat.v1.train.SessionRunHook):
  """Counts; the chief's waits in its first step until the worker has counted some."""

  def __init__(self, folder: pathlib.Path, role: str) -> None:
    self._worker, self._own = folder / "steps_of_worker", folder / f"steps_of_{role}"
    self._waits = role == "chief"
    self._count = 0

  def before_run(self, run_context):
    while self._waits and not self._worker.exists():
      time.sleep(0.05)

  def after_run(self, run_context, run_values):
    self._count += 1
    partial = self._own.with_suffix(".tmp")
    partial.write_text(str(self._count))
    partial.replace(self._own)


def main(model_dir: str) -> None:
  tf.compat.v1.disable_eager_execution()
  # A worker that finds no model yet would look again after half a minute.
  monitored_session.sm.SessionManager = functools.partial(
    monitored_session.sm.SessionManager, recovery_wait_secs=0.1
  )
  config = graph_estimator.RunConfig(save_checkpoints_steps=10)
  estimator = graph_estimator.Estimator(model_fn, model_dir, config)
  hooks = [_CountSteps(pathlib.Path(model_dir).parent, config.task_type)]
  metrics, exports = graph_estimator.train_and_evaluate(
    estimator,
    graph_estimator.TrainSpec(input_fn, max_steps=MAX_STEPS, hooks=hooks),
    graph_estimator.EvalSpec(eval_input_fn, start_delay_secs=0, throttle_secs=0),
  )
  print(json.dumps({name: float(value) for name, value in (metrics or {}).items()}), exports)


if __name__ == "__main__":
  main(sys.argv[1])
