"""Objects of `tf.estimator` are taken where TensorFlow still has it, and ours are taken by it.

Covers `estimator.py`, `receivers.py`, `run_config.py` and `spec.py` beside TensorFlow 2.15.
"""

from __future__ import annotations

import os
import tempfile
import unittest

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import cpu_training, entry, feature, graph_estimator, native_task

tf.compat.v1.disable_eager_execution()

_BATCHES = 4


def _input_fn():
  return tf.data.Dataset.from_tensors(({"x": [1.0, 2.0]}, [2.0, 4.0])).repeat(_BATCHES)


def _make_model_fn(names):
  """Returns a model function whose spec is of the class that `names` has."""

  def model_fn(features, labels, mode, params):
    weight = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.ones_initializer())
    predictions = {"y": weight * features["x"]}
    if mode == names.ModeKeys.PREDICT:
      return names.EstimatorSpec(mode, predictions=predictions)
    loss = tf.reduce_mean((predictions["y"] - labels) ** 2)
    train_op = tf.compat.v1.train.GradientDescentOptimizer(params["rate"]).minimize(
      loss, tf.compat.v1.train.get_global_step()
    )
    metrics = {"mean": tf.compat.v1.metrics.mean(predictions["y"])}
    return names.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)

  return model_fn


@unittest.skipUnless(hasattr(tf, "estimator"), "tf.estimator ended with TensorFlow 2.15")
class TfEstimatorTest(absltest.TestCase):
  def _run(self, names, estimator_names, receiver_class):
    """Trains, evaluates, predicts and exports; returns the numbers."""
    folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
    config = estimator_names.RunConfig(folder, save_checkpoints_steps=2, tf_random_seed=1)
    estimator = estimator_names.Estimator(
      _make_model_fn(names), config=config, params={"rate": 0.1}
    )
    estimator.train(_input_fn)
    metrics = estimator.evaluate(_input_fn, steps=3)
    predictions = [float(p["y"]) for p in estimator.predict(_input_fn)]

    def receiver_fn():
      x = tf.compat.v1.placeholder(tf.float32, [None])
      return receiver_class({"x": x}, {"x": x})

    exported = estimator.export_saved_model(os.path.join(folder, "exported"), receiver_fn)
    self.assertTrue(os.path.exists(os.path.join(exported, b"saved_model.pb")))
    files = sorted(name for name in os.listdir(folder) if not name.startswith("events"))
    return metrics, predictions, estimator.get_variable_names(), files

  def test_all_mixtures_give_the_same(self):
    tf_receiver = tf.estimator.export.ServingInputReceiver
    want = self._run(tf.estimator, tf.estimator, tf_receiver)
    for names, estimator_names, receiver in (
      (graph_estimator, graph_estimator, graph_estimator.ServingInputReceiver),
      (tf.estimator, graph_estimator, tf_receiver),
      (graph_estimator, tf.estimator, graph_estimator.ServingInputReceiver),
    ):
      self.assertEqual(self._run(names, estimator_names, receiver), want)

  def test_ours_are_instances_of_the_originals(self):
    tensor = tf.constant(1.0)
    spec = graph_estimator.EstimatorSpec("infer", tensor)
    receiver = graph_estimator.ServingInputReceiver(tensor, tensor)
    self.assertIsInstance(spec, tf.estimator.EstimatorSpec)
    self.assertIsInstance(spec._replace(prediction_hooks=[]), tf.estimator.EstimatorSpec)
    self.assertIsInstance(receiver, tf.estimator.export.ServingInputReceiver)
    for name in ("ClassificationOutput", "ExportOutput", "PredictOutput", "RegressionOutput"):
      self.assertIs(getattr(graph_estimator, name), getattr(tf.estimator.export, name))
    for name in ("TRAIN", "EVAL", "PREDICT"):
      self.assertEqual(
        getattr(graph_estimator.ModeKeys, name), getattr(tf.estimator.ModeKeys, name)
      )

  def test_configuration_of_the_original(self):
    config = tf.estimator.RunConfig("/folder", save_checkpoints_steps=7)
    estimator = graph_estimator.Estimator(_make_model_fn(tf.estimator), config=config, params={})
    self.assertEqual((estimator.model_dir, estimator.config.save_checkpoints_steps), ("/folder", 7))

    config = tf.estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy("cpu:0"))
    with self.assertRaisesRegex(ValueError, "train_distribute is"):
      graph_estimator.Estimator(_make_model_fn(tf.estimator), config=config, params={})

  def test_train_and_evaluate_takes_the_originals(self):
    def receiver_fn():
      x = tf.compat.v1.placeholder(tf.float32, [None])
      return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
    estimator = graph_estimator.Estimator(
      _make_model_fn(tf.estimator), config=tf.estimator.RunConfig(folder), params={"rate": 0.1}
    )
    metrics, exports = graph_estimator.train_and_evaluate(
      estimator,
      tf.estimator.TrainSpec(_input_fn, max_steps=3),
      tf.estimator.EvalSpec(
        _input_fn, steps=2, exporters=tf.estimator.FinalExporter("last", receiver_fn)
      ),
    )

    self.assertEqual(metrics["global_step"], 3)
    self.assertTrue(os.path.exists(os.path.join(exports[0], b"saved_model.pb")))

  def test_warm_start_of_the_original(self):
    first = graph_estimator.Estimator(
      _make_model_fn(tf.estimator),
      tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"]),
      params={"rate": 0.1},
    ).train(_input_fn)
    second = graph_estimator.Estimator(
      _make_model_fn(tf.estimator),
      tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"]),
      params={},
      warm_start_from=tf.estimator.WarmStartSettings(first.model_dir),
    )
    self.assertEqual(next(second.predict(_input_fn))["y"], first.get_variable_value("w"))

  def test_driver_takes_the_spec_of_a_task(self):
    class Task(native_task.NativeTask):
      def create_input_fn(self, mode):
        return lambda: tf.data.Dataset.from_tensors(
          {"id": tf.ragged.constant([[1], [2]], dtype=tf.int64)}
        ).repeat(_BATCHES)

      def create_model_fn(self):
        def model_fn(features, mode, config):
          slot = self.ctx.create_feature_slot(
            feature.FeatureSlotConfig(
              name="id", default_vec_optimizer=entry.SgdOptimizer(learning_rate=1.0)
            )
          )
          column = feature.FeatureColumn(slot, "id")
          vector = column.embedding_lookup(slot.add_feature_slice(1))
          if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=vector)
          loss = tf.reduce_sum(vector)
          rows = [column.get_all_embeddings_concat()]
          update = self.ctx.apply_embedding_gradients(zip(tf.gradients(loss, rows), rows))
          step = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
          return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(update, step))

        return model_fn

    folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
    params = Task.params()
    params.name = "ids"
    cpu_training.local_train(params, model_dir=folder, steps=3)

    training = cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(), Task(params))
    predictions = []
    for names in (tf.estimator, graph_estimator):
      estimator = names.Estimator(training.create_model_fn(), folder)
      self.assertEqual(estimator.get_variable_value("global_step"), 3)
      predicted = estimator.predict(training.create_input_fn(names.ModeKeys.PREDICT))
      predictions.append([float(row[0]) for row in predicted])
    self.assertEqual(predictions[0], predictions[1])
    self.assertLess(max(predictions[0]), -2.5)


if __name__ == "__main__":
  absltest.main()
