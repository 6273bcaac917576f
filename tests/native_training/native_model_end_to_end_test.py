"""A `MonolithModel` trains, evaluates, predicts and is exported; its helpers have their values."""

import copy
import itertools
import math
import os

import numpy as np
import tensorflow as tf
from absl.testing import flagsaver

from monolith import base_model
from monolith.native_training import estimator, native_model, utils
from monolith.native_training.estimator import EstimatorSpec
from monolith.native_training.model_export import export_context
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
    if mode == tf.estimator.ModeKeys.TRAIN and self.mode == tf.estimator.ModeKeys.TRAIN:
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
    if mode == tf.estimator.ModeKeys.PREDICT:
      return EstimatorSpec(label=None, pred=pred, head_name="rank")
    self.add_loss([tf.constant(0.25)])
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.05)
    return EstimatorSpec(label, pred, "rank", loss, optimizer)

  def serving_input_receiver_fn(self):
    placeholders = {k: tf.compat.v1.placeholder(tf.int64, [None], name=k) for k in ("mov", "uid")}
    features = {k: tf.RaggedTensor.from_tensor(t[:, tf.newaxis]) for k, t in placeholders.items()}
    return tf.estimator.export.ServingInputReceiver(features, placeholders)


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

  def test_output_path(self):
    folder = utils.get_test_tmp_dir()
    conf = RunnerConfig(is_local=True, model_dir=os.path.join(folder, "model"))
    model = _make_model()
    estimator.Estimator(model, conf).train(steps=1)
    model.output_path, model.output_fields = os.path.join(folder, "out"), "label"
    predictions = [float(p) for p in estimator.Estimator(model, conf).predict()]
    with open(os.path.join(folder, "out", "part-00000")) as f:
      lines = [line.rstrip("\n").split("\t") for line in f]
    self.assertLen(lines, 320)
    labels = [float((mov + uid) % 2 == 0) for mov, uid in zip(*_rows())]
    self.assertEqual([float(line[0]) for line in lines], labels)
    self.assertAllClose([float(line[1]) for line in lines], predictions, atol=1e-5)

  @flagsaver.flagsaver(disable_native_metrics=False)
  def test_native_metrics(self):
    conf = RunnerConfig(is_local=True, model_dir=utils.get_test_tmp_dir())
    est = estimator.Estimator(_make_model(), conf)
    est.train(steps=2)
    self.assertEqual(est.get_variable_value("global_step"), 2)

  def test_attributes_are_params(self):
    model = _make_model()
    self.assertEqual(model.batch_size, _BATCH)
    self.assertEqual(model.p.eval.per_replica_batch_size, _BATCH)
    model.clip_norm = 3.0
    self.assertEqual(model.p.clip_norm, 3.0)
    self.assertEqual(model.delimiter, "\t")
    self.assertIs(model.instantiate(), model)
    model.dump_utils = object()
    copied = copy.deepcopy(model)
    self.assertIs(copied.dump_utils, model.dump_utils)
    copied.clip_norm = 4.0
    self.assertEqual(model.clip_norm, 3.0)
    with self.assertRaises(AttributeError):
      model.nothing  # noqa: B018

  def test_state_belongs_to_the_graph(self):
    model = _make_model()
    with tf.Graph().as_default():
      model.add_loss(tf.constant(1.0))
      model.add_loss([tf.constant(2.0)])
      self.assertLen(model.losses, 2)
      model.losses = []
      self.assertEmpty(model.losses)
      model.add_loss(tf.constant(1.0))
    with tf.Graph().as_default():
      self.assertEmpty(model.losses)

  def test_extra_outputs(self):
    model = _make_model()
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      with tf.Graph().as_default() as graph:
        model.add_extra_output("a", tf.constant(1.0))
        self.assertEqual(graph.get_collection("signature_name"), ["a"])
        with self.assertRaisesRegex(KeyError, "key a exists!"):
          model.add_extra_output("a", tf.constant(1.0))

  def test_layout(self):
    model = _make_model()
    model.add_layout("l", [("mov", native_model.FeatureSlice(None, 0, 8))], "concat", [[4, 8]])
    layout = model.layout_dict["l"]
    self.assertEqual(layout.out_type, 0)
    self.assertEqual(list(layout.shape[0].dims), [-1, 8])
    self.assertEqual((layout.slice_configs[0].start, layout.slice_configs[0].end), (0, 8))

  def test_names(self):
    self.assertIs(base_model, native_model)
    for name in ("FeatureColumn", "AdagradOptimizer", "FeatureSlotConfig", "Fp16Compressor"):
      self.assertTrue(hasattr(native_model, name), name)


class LossTest(tf.test.TestCase):
  def test_sigmoid(self):
    logits = tf.constant([[0.0], [2.0], [-1.0]])
    label = tf.constant([1.0, 0.0, 1.0])
    loss, pred = native_model.get_sigmoid_loss_and_pred("h", logits, label, None)
    self.assertEqual(pred.op.name, "h_sigmoid_pred")
    self.assertEqual(loss.op.name, "h_sigmoid_loss")
    want = [math.log(2), 2 + math.log1p(math.exp(-2)), 1 + math.log1p(math.exp(-1))]
    masked, _ = native_model.get_sigmoid_loss_and_pred(
      "m", logits, label, None, None, instance_weight=tf.constant([1.0, 2.0, 3.0]),
      mask=tf.constant([True, False, True]),
    )  # fmt: skip
    clipped, _ = native_model.get_sigmoid_loss_and_pred(
      "c", tf.constant([9.0]), tf.constant([0.0]), None, logit_clip_threshold=0.1
    )
    _, corrected = native_model.get_sigmoid_loss_and_pred(
      "r", logits, label, None, 0.5, predict_before_correction=False
    )
    none, _ = native_model.get_sigmoid_loss_and_pred("p", logits, None, None, mode="infer")
    self.assertIsNone(none)
    with self.session() as sess:
      self.assertAllClose(sess.run(loss), sum(want))
      self.assertAllClose(sess.run(pred), 1 / (1 + np.exp([0.0, -2.0, 1.0])))
      self.assertAllClose(sess.run(masked), want[0] + 3 * want[2])
      self.assertAllClose(sess.run(clipped), 2.19722 + math.log1p(math.exp(-2.19722)), atol=1e-5)
      self.assertAllClose(sess.run(corrected)[0], 1 / (1 + math.exp(-math.log(2))))
    with self.assertRaises(AssertionError):
      native_model.get_sigmoid_loss_and_pred("b", logits, label, None, logit_clip_threshold=1.0)

  def test_softmax(self):
    logits, label = tf.constant([[0.0, 0.0], [0.0, 1.0]]), tf.constant([[1.0, 0.0], [0.0, 1.0]])
    loss, pred = native_model.get_softmax_loss_and_pred("h", logits, label, "train")
    self.assertIsNone(native_model.get_softmax_loss_and_pred("h", logits, None, "infer")[0])
    with self.session() as sess:
      self.assertAllClose(sess.run(loss), [math.log(2), math.log1p(math.exp(-1))])
      self.assertAllEqual(sess.run(pred), [0, 1])

  def test_device_ctx(self):
    with self.assertRaises(AssertionError):
      native_model.MonolithDeviceCtx("nothing")
    with native_model.MonolithDeviceCtx(native_model.DeviceCtxType.INPUT_FN):
      self.assertEqual(tf.constant(1).device, "")


if __name__ == "__main__":
  tf.test.main()
