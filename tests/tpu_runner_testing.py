"""Shared by the tests of the TPU runner: the planted data, a dense task, a reader of summaries."""

import glob
import os
import tempfile
import unittest
from unittest import mock

import tensorflow as tf

from monolith.core import base_model_params, base_task, model_registry
from monolith.tasks import parity_data

EXAMPLE = "monolith.tasks.parity_example.ParityExample"
SIMPLE = f"{__name__}.Simple"


def read_scalars(folder):
  """Returns {tag: {step: [values]}} of all event files in a folder, each read to its end."""
  result = {}
  for path in sorted(glob.glob(os.path.join(folder, "events.out.tfevents.*"))):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        if value.HasField("tensor"):
          if value.tensor.dtype != tf.float32.as_datatype_enum:
            continue
          number = float(tf.make_ndarray(value.tensor))
        elif value.HasField("simple_value"):
          number = value.simple_value
        else:
          continue
        result.setdefault(value.tag, {}).setdefault(event.step, []).append(number)
  return result


class DataTestCase(unittest.TestCase):
  """Has the planted data of the example."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.root = folder.name
    cls.data = os.path.join(folder.name, "data")
    parity_data.write(cls.data)
    environment = mock.patch.dict(os.environ, {"PARITY_DATA": cls.data})
    environment.start()
    cls.addClassCleanup(environment.stop)

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name
    self.model_dir = os.path.join(folder.name, "model")


class SimpleTask(base_task.BaseTask):
  """Logistic regression on one dense feature; notes what the functions are given."""

  seen = {}

  def __init__(self, params):
    super().__init__(params)
    self.p = params

  def create_input_fn(self, mode):
    def input_fn(params):
      SimpleTask.seen[f"input_{mode}"] = dict(params)
      x = tf.data.Dataset.from_tensor_slices([[-1.0], [1.0], [-2.0], [2.0]]).repeat()
      return x.map(lambda x: ({"x": x}, tf.cast(x > 0, tf.float32))).batch(
        params["batch_size"], drop_remainder=True
      )

    return input_fn

  def create_model_fn(self):
    def model_fn(features, labels, mode, params):
      SimpleTask.seen[f"model_{mode}"] = dict(params)
      weight = tf.compat.v1.get_variable("weight", [1, 1])
      logits = tf.matmul(features["x"], weight)
      loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
      train_op = None
      if mode == tf.estimator.ModeKeys.TRAIN:
        train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(
          loss, tf.compat.v1.train.get_global_step()
        )
      return tf.compat.v1.estimator.tpu.TPUEstimatorSpec(
        mode=mode,
        loss=loss,
        train_op=train_op,
        eval_metrics=(
          lambda labels, logits: {"auc": tf.compat.v1.metrics.auc(labels, tf.sigmoid(logits))},
          [labels, logits],
        ),
      )

    return model_fn


@model_registry.RegisterSingleTaskModel
class Simple(base_model_params.SingleTaskModelParams):
  def task(self):
    p = SimpleTask.params()
    p.input.eval_examples = 256
    p.train.per_replica_batch_size = 16
    p.eval.per_replica_batch_size = 8
    p.train.max_steps = 6
    return p
