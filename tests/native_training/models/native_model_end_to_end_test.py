"""A `MonolithModel` trains, evaluates, predicts and is exported."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import flagsaver

from monolith.native_training import estimator, graph_estimator, native_model, utils
from monolith.native_training.estimator import EstimatorSpec
from monolith.native_training.native_model import MonolithModel
from monolith.native_training.runner_utils import RunnerConfig

tf.compat.v1.disable_eager_execution()

_BATCH = 32


def _rows():
  rng = np.random.RandomState(0)
  return rng.randint(0, 20, 320), rng.randint(0, 20, 320)


class _RatingModel(MonolithModel):
  """Movies and users with even ids like one another."""

  def input_fn(self, mode):
    mov, uid = _rows()
    label = ((mov + uid) % 2 == 0).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices({"mov": mov, "uid": uid, "label": label})
    if mode == graph_estimator.ModeKeys.TRAIN and self.mode == graph_estimator.ModeKeys.TRAIN:
      dataset = dataset.repeat()
    return dataset.batch(self.batch_size, drop_remainder=True).map(self._to_ragged)

  @staticmethod
  def _to_ragged(row):
    ragged = {k: tf.RaggedTensor.from_tensor(row[k][:, tf.newaxis]) for k in ("mov", "uid")}
    return {**ragged, "label": row["label"]}

  def model_fn(self, features, mode):
    for name in ("mov", "uid"):
      self.create_embedding_feature_column(name)
    mov, uid = self.lookup_embedding_slice(
      ["mov", "uid"], "vec", 8,
      initializer=native_model.RandomUniformInitializer(-0.5, 0.5),
      optimizer=native_model.AdagradOptimizer(0.3, 0.1),
    )  # fmt: skip
    logits = tf.reduce_sum(mov * uid, axis=1) + tf.compat.v1.get_variable("bias", initializer=0.0)
    label = features.get("label")
    loss, pred = native_model.get_sigmoid_loss_and_pred("rank", logits, label, _BATCH, mode=mode)
    self.add_extra_output("vectors", {"mov": mov})
    if mode == graph_estimator.ModeKeys.PREDICT:
      return EstimatorSpec(label=None, pred=pred, head_name="rank")
    self.add_loss([tf.constant(0.25)])
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.05)
    return EstimatorSpec(label, pred, "rank", loss, optimizer)

  def serving_input_receiver_fn(self):
    placeholders = {k: tf.compat.v1.placeholder(tf.int64, [None], name=k) for k in ("mov", "uid")}
    features = {k: tf.RaggedTensor.from_tensor(t[:, tf.newaxis]) for k, t in placeholders.items()}
    return graph_estimator.ServingInputReceiver(features, placeholders)


def _make_model():
  model = _RatingModel()
  model.batch_size = _BATCH
  model.serving.shared_embedding = False
  return model


class MonolithModelTest(tf.test.TestCase):
  def test_the_whole_way(self):
    conf = RunnerConfig(is_local=True, model_dir=utils.get_test_tmp_dir())
    est = estimator.Estimator(_make_model(), conf)
    est.train(steps=200)
    self.assertEqual(est.get_variable_value("global_step"), 200)

    est.evaluate()  # The data ends; the step stays.
    self.assertEqual(est.get_variable_value("global_step"), 200)

    predictions = np.array([float(p) for p in itertools.islice(est.predict(), 320)])
    mov, uid = _rows()
    accuracy = np.mean((predictions > 0.5) == ((mov + uid) % 2 == 0))
    self.assertGreater(accuracy, 0.9)

    exported = est.export_saved_model(batch_size=_BATCH)
    path = exported["entry"].decode()
    with estimator.import_saved_model(path, ["mov", "uid"]) as infer:
      served = infer({"mov": mov, "uid": uid})["output"]
    self.assertAllClose(served, predictions, atol=1e-2)
    with estimator.import_saved_model(path, ["mov", "uid"], None, "vectors") as infer:
      self.assertAllEqual(infer({"mov": mov[:3], "uid": uid[:3]})["mov"].shape, [3, 8])

  @flagsaver.flagsaver(disable_native_metrics=False)
  def test_native_metrics(self):
    conf = RunnerConfig(is_local=True, model_dir=utils.get_test_tmp_dir())
    est = estimator.Estimator(_make_model(), conf)
    est.train(steps=2)
    self.assertEqual(est.get_variable_value("global_step"), 2)


if __name__ == "__main__":
  tf.test.main()
