"""Models as their authors write them: declared features, heads, hooks, files and exports."""

from __future__ import annotations

import copy
import hashlib
import math
import os

import numpy as np
import tensorflow as tf
from absl.testing import flagsaver, parameterized

from idl.matrix.proto import example_pb2
from monolith.native_training import (
  cpu_training,
  embedding_combiners,
  entry,
  estimator,
  feature,
  file_ops,
  graph_estimator,
  native_model,
  native_task,
  prefetch_queue,
  utils,
)
from monolith.native_training.data import parsers
from monolith.native_training.data import utils as data_utils
from monolith.native_training.graph import export_context
from monolith.native_training.metric import file_metric_hook, metric_hook
from monolith.native_training.models import outputs as model_outputs

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_EVAL = graph_estimator.ModeKeys.EVAL
_PREDICT = graph_estimator.ModeKeys.PREDICT

_ROWS = {"user": [[1], [2]], "item": [[7, 8], [8]]}


def _serialized():
  examples = []
  for i in range(2):
    example = example_pb2.Example()
    for name, rows in _ROWS.items():
      example.named_feature.add(name=name).feature.fid_v2_list.value.extend(rows[i])
    example.named_feature.add(name="label").feature.float_list.value.append(float(i))
    examples.append(example.SerializeToString())
  return examples


def _parse(examples):
  return parsers.parse_examples(
    examples,
    sparse_features=list(_ROWS),
    dense_features=["label"],
    dense_feature_shapes=[1],
    dense_feature_types=[tf.float32],
  )


class Model(native_model.MonolithModel):
  """Vectors that fall by the learning rate times their uses, and one dense variable."""

  returns = "spec"
  out_type = "concat"

  def input_fn(self, mode):
    dataset = tf.data.Dataset.from_tensors(_serialized()).map(_parse)
    return dataset.repeat() if mode != _PREDICT else dataset

  def model_fn(self, features, mode):
    for name in _ROWS:
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(
      ["user", "item"],
      "vec",
      4,
      initializer=native_model.ZerosInitializer(),
      optimizer=native_model.SgdOptimizer(learning_rate=0.5),
      compressor=native_model.Fp32Compressor(),
      out_type=self.out_type,
    )
    if self.out_type is None:
      vectors = tf.concat(vectors, axis=1)
    weight = tf.compat.v1.get_variable("weight", [], initializer=tf.zeros_initializer())
    label = tf.reshape(features["label"], [-1])
    pred = tf.reduce_sum(vectors, axis=1)
    # Its gradient is one for every element, whatever the weight is.
    loss = None if mode == _PREDICT else tf.reduce_sum(vectors) + weight
    self.add_extra_output("vectors", {"vectors": vectors})
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    if self.returns == "tuple":
      self._default_dense_optimizer = optimizer
      return label, loss, pred
    if self.returns == "dict":
      return native_model.EstimatorSpec(
        {"b": label, "a": label},
        {"b": pred, "a": 2 * pred},
        loss=loss,
        optimizer=optimizer,
        classification={"a": False, "b": False},
      )
    return native_model.EstimatorSpec(label, pred, "sum", loss, optimizer, classification=False)

  def serving_input_receiver_fn(self):
    instances = tf.compat.v1.placeholder(tf.string, [None], name="instances")
    return graph_estimator.ServingInputReceiver(_parse(instances), {"instances": instances})


def _model(**attributes):
  model = Model()
  model.metrics.enable_tf2_profiler_hook = False
  model.batch_size = 2
  for name, value in attributes.items():
    setattr(model, name, value)
  return model


class NamesTest(tf.test.TestCase):
  def test_names_of_entry_and_feature_are_names_of_the_module(self):
    for module in (entry, feature):
      for name in module.__all__:
        self.assertIs(getattr(native_model, name), getattr(module, name))

  def test_what_entry_and_feature_import_is_not(self):
    for name in ("dataclasses", "message", "prefetch_queue", "ragged_utils"):
      self.assertFalse(hasattr(native_model, name), name)

  def test_all_is_what_feature_defines(self):
    defined = {
      name
      for name, value in vars(feature).items()
      if getattr(value, "__module__", None) == feature.__name__ and not name.startswith("_")
    }
    # Constants and other names for something.
    defined |= {"DEFAULT_EXPIRE_TIME", "FeatureColumnV1", "GradsAndVars", "SliceConfig"}
    defined |= {"create_embedding_slices"}
    self.assertEqual(set(feature.__all__), defined)


class LossTest(tf.test.TestCase):
  def test_sigmoid(self):
    logits, label = tf.constant([[1.0], [-2.0], [0.5]]), tf.constant([1.0, 0.0, 1.0])
    loss, pred = native_model.get_sigmoid_loss_and_pred("ctr", logits, label, None)

    self.assertEqual((loss.op.name, pred.op.name), ("ctr_sigmoid_loss", "ctr_sigmoid_pred"))
    probabilities = 1 / (1 + np.exp([-1.0, 2.0, -0.5]))
    want = -np.log([probabilities[0], 1 - probabilities[1], probabilities[2]])
    with self.session() as sess:
      self.assertAllClose(sess.run(pred), probabilities)
      self.assertAllClose(sess.run(loss), want.sum())
      weighted, _ = native_model.get_sigmoid_loss_and_pred(
        "weighted",
        logits,
        label,
        None,
        instance_weight=tf.constant([2.0, 3.0, 4.0]),
        mask=tf.constant([True, False, True]),
      )
      self.assertAllClose(sess.run(weighted), 2 * want[0] + 4 * want[2])

  def test_sigmoid_of_sampled_data(self):
    logits, label = tf.constant([1.0, -2.0]), tf.constant([1.0, 0.0])
    biased = np.array([1.0, -2.0]) - math.log(0.1)
    with self.session() as sess:
      for rate in (0.1, tf.constant([0.1, 0.1])):
        loss, pred = sess.run(
          native_model.get_sigmoid_loss_and_pred("rated", logits, label, None, sample_rate=rate)
        )
        self.assertAllClose(pred, 1 / (1 + np.exp([-1.0, 2.0])))
        self.assertAllClose(loss, np.log1p(np.exp(-biased[0])) + np.log1p(np.exp(biased[1])))
      _, pred = native_model.get_sigmoid_loss_and_pred(
        "late", logits, label, None, 0.1, predict_before_correction=False
      )
      self.assertAllClose(sess.run(pred), 1 / (1 + np.exp(-biased)))
      loss, _ = native_model.get_sigmoid_loss_and_pred(
        "clip", tf.constant([5.0]), tf.constant([0.0]), None, None, logit_clip_threshold=0.1
      )
      self.assertAllClose(sess.run(loss), np.log1p(np.exp(2.19722)), rtol=1e-5)
    for bad in (0, 1, -0.5):
      with self.assertRaisesRegex(AssertionError, "logit_clip_threshold"):
        native_model.get_sigmoid_loss_and_pred("bad", logits, label, None, logit_clip_threshold=bad)

  def test_sigmoid_to_predict(self):
    loss, pred = native_model.get_sigmoid_loss_and_pred(
      "ctr", tf.constant([0.0]), None, None, mode=_PREDICT
    )
    self.assertIsNone(loss)
    self.assertAllClose(pred, [0.5])

  def test_softmax(self):
    logits, label = tf.constant([[1.0, 2.0], [3.0, 0.0]]), tf.constant([[0.0, 1.0], [0.0, 1.0]])
    loss, pred = native_model.get_softmax_loss_and_pred("kind", logits, label, _TRAIN)
    self.assertAllEqual(pred, [1, 0])
    self.assertAllClose(loss, [np.log1p(np.exp(-1.0)), np.log1p(np.exp(3.0))])
    loss, pred = native_model.get_softmax_loss_and_pred("kind", logits, None, _PREDICT)
    self.assertIsNone(loss)
    self.assertAllEqual(pred, [1, 0])


class DeviceCtxTest(tf.test.TestCase):
  def test_does_nothing_alone(self):
    for ctx_type in native_model.DeviceCtxType.all_types:
      with native_model.MonolithDeviceCtx(ctx_type):
        self.assertEqual(tf.constant(1).device, "")
    with self.assertRaisesRegex(AssertionError, "ctx_type is 'nothing'"):
      native_model.MonolithDeviceCtx("nothing")

  def test_places_ops_of_ranks(self):
    target = "monolith.native_training.distribution_utils.enable_sync_training"
    with tf.compat.v1.test.mock.patch(target, return_value=True):
      with tf.Graph().as_default(), tf.device("/job:worker"):
        with native_model.MonolithDeviceCtx(native_model.DeviceCtxType.INPUT_FN):
          self.assertIn("/device:CPU:0", tf.constant(1).device)
        with native_model.MonolithDeviceCtx(native_model.DeviceCtxType.MODEL_FN):
          self.assertIn("/device:CPU:0", tf.constant(1).device)
          step = tf.compat.v1.train.get_or_create_global_step()
        with native_model.MonolithDeviceCtx(native_model.DeviceCtxType.OTHERS):
          self.assertEqual(tf.constant(1).device, "/job:worker")
        self.assertIn("/job:worker", step.op.device)


class AttributesTest(tf.test.TestCase):
  def test_params_are_attributes(self):
    model = _model()
    self.assertEqual((model.clip_norm, model.delimiter, model.mode), (1000.0, "\t", _TRAIN))
    model.clip_norm = 3.0
    model.name = "ranking"
    self.assertEqual((model.p.clip_norm, model.p.name), (3.0, "ranking"))
    self.assertIsNone(model.feature_list)
    self.assertIs(model.metrics, model.p.metrics)
    with self.assertRaises(AttributeError):
      model.nothing  # noqa: B018
    model.something = 1
    self.assertNotIn("something", model.p)
    self.assertIs(model.instantiate(), model)

  def test_batch_size(self):
    model = _model()
    model.batch_size = 7
    self.assertEqual(model.p.train.per_replica_batch_size, 7)
    self.assertEqual(model.p.eval.per_replica_batch_size, 7)
    model.p.eval.per_replica_batch_size = 9
    self.assertEqual(model.batch_size, 7)
    model.mode = _EVAL
    self.assertEqual(model.batch_size, 9)

  def test_fused_layout_is_up_to_the_driver(self):
    model = _model()
    self.assertFalse(model.is_fused_layout())
    model.ctx.layout_factory = feature.EmbeddingLayoutFactory(None, {})
    self.assertTrue(model.is_fused_layout())

  def test_copies(self):
    model = _model(dump_utils=object(), other=[1])
    copied = copy.deepcopy(model)
    copied.clip_norm = 1.0
    copied.other.append(2)
    self.assertEqual((model.clip_norm, model.other), (1000.0, [1]))
    self.assertIs(copied.dump_utils, model.dump_utils)

  def test_base_model_is_public(self):
    import monolith

    self.assertIs(monolith.base_model, native_model)
    for name in ("FeatureColumn", "AdagradOptimizer", "FeatureSlotConfig"):
      self.assertTrue(hasattr(native_model, name), name)

  def test_state_belongs_to_a_graph(self):
    model = _model()
    with tf.Graph().as_default():
      model.add_loss(tf.constant(1.0))
      model.add_loss([tf.constant(2.0), tf.constant(3.0)])
      model.add_extra_output("more", tf.constant(1.0))
      with self.assertRaisesRegex(KeyError, "key more exists!"):
        model.add_extra_output("more", tf.constant(1.0))
      self.assertEqual(tf.compat.v1.get_collection("signature_name"), ["more"])
      self.assertLen(model.losses, 3)
      self.assertEmpty(_model().losses)
      model.losses = []
      self.assertEmpty(model.losses)
    with tf.Graph().as_default():
      model.add_extra_output("more", tf.constant(1.0))
      self.assertEmpty(model.losses)

  def test_one_hook_of_each_kind_for_metrics(self):
    self.addCleanup(setattr, file_metric_hook.FileMetricHook, "_instance", None)
    model = _model()
    with tf.Graph().as_default():
      kafka, file = metric_hook.KafkaMetricHook(), file_metric_hook.FileMetricHook()
      other = file_ops.FileCloseHook([])
      for hook in (kafka, other, file, kafka, file, other):
        model.add_training_hook(hook)
      self.assertEqual(model.training_hooks, [kafka, other, file, other])

  def test_models_may_record_themselves(self):
    self.assertFalse(_model().dump_utils.enable)


class LookupTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph()
    context = graph.as_default()
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)
    self.model = _model()
    self.factory = feature.DummyFeatureFactory(2)
    self.model.ctx.feature_factory = self.factory

  def test_columns(self):
    column = self.model.create_embedding_feature_column("user")
    self.assertIs(self.model.create_embedding_feature_column("user"), column)
    self.assertIsInstance(column.combiner, embedding_combiners.ReduceSum)
    mean = self.model.create_embedding_feature_column("mean", combiner="reduce_mean")
    self.assertIsInstance(mean.combiner, embedding_combiners.ReduceMean)
    for name, arguments in {"seq": {}, "named": {"combiner": "first_n"}}.items():
      column = self.model.create_embedding_feature_column(name, max_seq_length=3, **arguments)
      self.assertIsInstance(column.combiner, embedding_combiners.FirstN)
      self.assertEqual(column.combiner.max_seq_length, 3)
    own = embedding_combiners.ReduceMean()
    column = self.model.create_embedding_feature_column("own", combiner=own)
    self.assertIs(column.combiner, own)
    with self.assertRaisesRegex(ValueError, "max_seq_length 0"):
      self.model.create_embedding_feature_column("no_length", combiner="first_n")
    with self.assertRaisesRegex(ValueError, "combiner is 'max'"):
      self.model.create_embedding_feature_column("no_combiner", combiner="max")
    self.assertNotIn("no_combiner", self.model.fs_dict)  # It would be a slot without a slice.

  def test_thresholds(self):
    data_utils.register_slots({"f": 301, "g": 302, "h": 303})
    self.model.default_occurrence_threshold = 4
    self.model.create_embedding_feature_column("f")
    self.model.create_embedding_feature_column("g", occurrence_threshold=2, expire_time=7)
    self.model.create_embedding_feature_column(303)
    self.assertEqual(self.factory.slot_to_occurrence_threshold, {301: 4, 302: 2, 303: 4})
    self.assertEqual(self.factory.slot_to_expire_time[302], 7)
    self.assertIn("slot_303", self.model.fc_dict)

  def test_shared_rows(self):
    user = self.model.create_embedding_feature_column("user")
    friend = self.model.create_embedding_feature_column("friend", shared_name="user")
    fan = self.model.create_embedding_feature_column("fan", shared_name="people")
    guest = self.model.create_embedding_feature_column("guest", shared_name="people")
    self.assertIs(friend.feature_slot, user.feature_slot)
    self.assertIs(guest.feature_slot, fan.feature_slot)
    self.assertEqual(list(self.model.fs_dict), ["user", "people"])
    self.model.lookup_embedding_slice(["user", "friend", "fan"], "vec", 4)
    self.model.lookup_embedding_slice(["friend"], "vec", 4)
    self.model.lookup_embedding_slice(["friend"], "more", 2)
    self.assertEqual(set(self.model.slice_dict["user"]), {"vec", "more"})
    tables = self.factory.get_table_name_to_table_config()
    self.assertEqual(list(tables["user"].unmerged_slice_dims), [4, 2])
    self.assertEqual(list(tables["people"].unmerged_slice_dims), [4])

  @parameterized.parameters(
    (["a", "b"], 4, None, [[2, 4], [2, 4]]),
    ([7, "b"], 4, "stack", [2, 2, 4]),
    ([("a", 4), ("b", 2)], None, "concat", [2, 6]),
    ({"a": 4, "b": 2}, None, None, [[2, 4], [2, 2]]),
    (["a", "b"], 4, "add_n", [2, 4]),
    (["a", "b"], 4, "addn", [2, 4]),
    ([[1, 2], [3]], 4, None, [[2, 4], [2, 4]]),
    ([[1, 2], [3]], 4, "concat", [2, 8]),
  )
  def test_forms(self, features, dim, out_type, want):
    got = self.model.lookup_embedding_slice(features, "vec", dim, out_type=out_type)
    shapes = [t.shape.as_list() for t in got] if isinstance(got, list) else got.shape.as_list()
    self.assertEqual(shapes, want)

  def test_groups_side_by_side(self):
    got = self.model.lookup_embedding_slice([[1, 2], [3, 4]], "vec", 4, group_out_type="concat")
    self.assertEqual([t.shape.as_list() for t in got], [[2, 8], [2, 8]])

  @parameterized.parameters(
    ("a", 4), ([], 4), (["a"], None), ([["a"]], 4), ([("a", "b", "c")], 4), ([1.5], 4), (None, 4)
  )
  def test_bad_features(self, features, dim):
    with self.assertRaisesRegex(
      ValueError, "^ValueError for features: .* slice_dim .*, want a list"
    ):
      self.model.lookup_embedding_slice(features, "vec", dim)

  def test_layouts(self):
    self.model.create_embedding_feature_column("seq", max_seq_length=3)
    self.model.lookup_embedding_slice(["b", "a"], "vec", 4, out_type="concat")
    self.model.lookup_embedding_slice(["a", "seq"], "more", 2)
    name = "vec_" + hashlib.md5(b"a,b").hexdigest()
    layout = self.model.layout_dict[name]
    self.assertEqual(layout.out_type, example_pb2.OutType.CONCAT)
    self.assertEqual(
      [(s.feature_name, s.start, s.end) for s in layout.slice_configs], [("b", 0, 4), ("a", 0, 4)]
    )
    self.assertEqual([list(shape.dims) for shape in layout.shape], [[-1, 8]])
    layout = self.model.layout_dict["more_" + hashlib.md5(b"a,seq").hexdigest()]
    self.assertEqual(layout.out_type, example_pb2.OutType.NONE)
    self.assertEqual([list(shape.dims) for shape in layout.shape], [[-1, 2], [-1, 3, 2]])
    self.assertEqual(layout.slice_configs[0].start, 4)

  def test_share_slot(self):
    ids = tf.ragged.constant([[(5 << 48) | 1], [(6 << 48) | 2]], tf.int64)
    meta = {"in": (True, 9), "out": (False, 10)}
    features = self.model.share_slot({"in": ids, "out": ids}, meta)
    with self.session() as sess:
      self.assertAllEqual(sess.run(features["in"].values), [(9 << 48) | 1, (9 << 48) | 2])
      self.assertAllEqual(sess.run(features["out_share"].values), [(10 << 48) | 1, (10 << 48) | 2])
      self.assertAllEqual(sess.run(features["out"].values), sess.run(ids.values))
    self.assertEqual(data_utils.get_slot_from_feature_name("out_share"), 10)
    self.assertTrue(callable(self.model.share_slot(share_meta=meta)))


class ModelFnTest(tf.test.TestCase, parameterized.TestCase):
  def _run(self, result, mode=_TRAIN, **attributes):
    model = _model(**attributes)
    model.model_fn = lambda features, mode: result() if callable(result) else result
    model.ctx.feature_factory = feature.DummyFeatureFactory(2)
    with tf.Graph().as_default():
      return model.create_model_fn()(features={}, mode=mode)

  def test_bad_results(self):
    one = lambda: tf.constant([1.0])  # noqa: E731
    spec = native_model.EstimatorSpec
    with self.assertRaisesRegex(Exception, "^EstimatorSpec Error! model_fn returned 'text', want"):
      self._run("text")
    with self.assertRaisesRegex(AssertionError, "label a .*, want a dict"):
      self._run(lambda: spec(one(), {"a": one()}))
    with self.assertRaisesRegex(AssertionError, "head_name is 'x', want a list"):
      self._run(lambda: spec([one()], [one()], "x"))
    with self.assertRaisesRegex(AssertionError, "head_name is .*, want a string"):
      self._run(lambda: spec(one(), one(), ["x", "y"]))
    with self.assertRaisesRegex(AssertionError, "2 heads, 1 labels, 2 predictions"):
      self._run(lambda: spec([one()], [one(), one()], ["x", "y"]))
    with self.assertRaisesRegex(AssertionError, "classification has 2 entries, want 1"):
      self._run(lambda: spec(one(), one(), "x", classification=[True, False]))
    with self.assertRaisesRegex(Exception, "^dense_optimizer not found! .*EstimatorSpec"):
      self._run(lambda: spec(one(), one(), "x", tf.reduce_sum(one())))
    with self.assertRaisesRegex(Exception, "dense_optimizer not found!"):
      self._run(lambda: (one(), tf.reduce_sum(one()), one()))
    with self.assertRaisesRegex(ValueError, "mode 'eval'"):
      self._run(lambda: (one(), one(), one()), mode=_EVAL)

  @parameterized.parameters("spec", "tuple", "dict")
  def test_trains_evaluates_and_predicts(self, returns):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    out = os.path.join(utils.get_test_tmp_dir(), "out")
    model = _model(returns=returns, clip_norm=1e9)
    conf = estimator.RunConfig(is_local=True, model_dir=folder)
    est = estimator.Estimator(model, conf)
    est.train(steps=3)
    self.assertAllClose(est.get_variable_value("weight"), -0.3)
    model.output_path, model.output_fields = out, "label, label"
    est = estimator.Estimator(model, conf)
    est.evaluate(steps=1)
    self.assertEqual(est.get_variable_value("global_step"), 3)

    # Four columns of a row fall by half a step for each use; item 8 is used twice.
    want = -4 * 3 * 0.5 * np.array([1 + 1 + 2, 1 + 2])
    with open(os.path.join(out, "part-00000")) as file:
      lines = [line.rstrip("\n").split("\t") for line in file]
    self.assertEqual([list(map(float, line[:2])) for line in lines], [[0, 0], [1, 1]])
    if returns == "dict":
      # Sorted by name: first twice the sum.
      self.assertAllClose([float(line[2]) for line in lines], 2 * want)
    self.assertAllClose([float(line[-1]) for line in lines], want)

    model.output_path = None
    predictions = list(estimator.Estimator(model, conf).predict())
    if returns == "dict":
      self.assertAllClose([p["a"] for p in predictions], 2 * want)
      predictions = [p["b"] for p in predictions]
    self.assertAllClose(predictions, want)

  def test_files_of_predictions(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    out = os.path.join(utils.get_test_tmp_dir(), "out")
    model = _model()
    conf = estimator.RunConfig(is_local=True, model_dir=folder)
    estimator.Estimator(model, conf).train(steps=1)
    model.output_path, model.delimiter = out, "|"
    model.output_fields = "label"
    predictions = list(estimator.Estimator(model, conf).predict())
    self.assertLen(predictions, 2)
    with open(os.path.join(out, "part-00000")) as file:
      lines = [line.rstrip("\n").split("|") for line in file]
    self.assertEqual([float(line[0]) for line in lines], [0, 1])
    self.assertAllClose([float(line[1]) for line in lines], predictions)

  def test_columns_of_files(self):
    with tf.Graph().as_default(), self.session() as sess:
      for tensor, want in (
        (tf.constant([1, 2]), [b"1", b"2"]),
        (tf.constant(["a", "b"]), [b"a", b"b"]),
        (tf.constant([[1, 2], [3, 4]]), [b"1,2", b"3,4"]),
        (tf.ragged.constant([[1, 2], [], [3]]), [b"1,2", b"", b"3"]),
        (tf.ragged.constant([["a", "b"], []]), [b"a,b", b""]),
      ):
        self.assertAllEqual(sess.run(model_outputs.as_text(tensor)), want)

  def test_exports_extra_outputs(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    model = _model()
    model.serving.export_mode = export_context.ExportMode.STANDALONE
    est = estimator.Estimator(model, estimator.RunConfig(is_local=True, model_dir=folder))
    est.train(steps=2)
    est.export_saved_model(batch_size=2)
    path = os.path.join(folder, "exported_models")
    with estimator.import_saved_model(path) as infer:
      self.assertAllClose(infer(_serialized())["output"], -4 * np.array([4, 3]))
    with estimator.import_saved_model(path, output_name="vectors", signature="vectors") as infer:
      want = -np.repeat([[1, 3], [1, 2]], 4, axis=1)
      self.assertAllClose(infer(_serialized())["vectors"], want)

  def test_added_losses_are_trained(self):
    class WithLoss(Model):
      def model_fn(self, features, mode):
        spec = super().model_fn(features, mode)
        with tf.compat.v1.variable_scope("", reuse=True):
          self.add_loss(2 * tf.compat.v1.get_variable("weight", []))
        return spec

    model = WithLoss()
    model.metrics.enable_tf2_profiler_hook = False
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    est = estimator.Estimator(model, estimator.RunConfig(is_local=True, model_dir=folder))
    est.train(steps=1)
    self.assertAllClose(est.get_variable_value("weight"), -0.3)

  @parameterized.product(out_type=("concat", None), num_ps=(0, 2))
  def test_fused_layout(self, out_type, num_ps):
    self.addCleanup(setattr, parsers.get_default_parser_ctx(), "enable_fused_layout", False)
    got = {}
    for fused in (False, True):
      folder = os.path.join(utils.get_test_tmp_dir(), f"model_{fused}")
      model = _model(out_type=out_type)
      conf = cpu_training.CpuTrainingConfig(
        num_ps=num_ps, enable_fused_layout=fused, use_native_multi_hash_table=True
      )
      cpu_training.local_train_internal(model, conf, folder, steps=3)
      with cpu_training._local_cluster(num_ps) as (session_config, _):
        training = cpu_training.CpuTraining(conf, model)
        tf_estimator = graph_estimator.Estimator(
          training.create_model_fn(),
          config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
        )
        got[fused] = list(tf_estimator.predict(training.create_input_fn(_PREDICT)))
    self.assertAllClose(got[False], -4 * 3 * 0.5 * np.array([4, 3]))
    self.assertAllClose(got[True], got[False])

  def test_metrics(self):
    spec = lambda: native_model.EstimatorSpec(  # noqa: E731
      [tf.constant([1.0, 0.0, 1.0]), tf.constant([1.0, 2.0, 3.0])],
      [tf.constant([0.9, 0.1, 0.2]), tf.constant([1.0, 2.0, 5.0])],
      ["click", "stars"],
      tf.compat.v1.get_variable("weight", initializer=0.0) * 1.0,
      tf.compat.v1.train.GradientDescentOptimizer(0.1),
      [True, False],
    )
    for disabled, want in ((True, []), (False, ["click_auc", "stars_mse"])):
      model = _model()
      model.model_fn = lambda features, mode: spec()
      model.ctx.feature_factory = feature.DummyFeatureFactory(2)
      model.ctx.async_function_mgr = prefetch_queue.AsyncFunctionMgr(is_async=False)
      with tf.Graph().as_default() as graph, flagsaver.flagsaver(disable_native_metrics=disabled):
        train_op = model.create_model_fn()(features={}, mode=_TRAIN).train_op
        prints = [op for op in graph.get_operations() if op.type == "PrintV2"]
        self.assertEqual([op.get_attr("output_stream") for op in prints], [b"stderr"] * len(want))
        summary = tf.compat.v1.summary.merge_all()
        with self.session(graph=graph) as sess:
          sess.run([tf.compat.v1.global_variables_initializer()])
          sess.run([tf.compat.v1.local_variables_initializer()])
          sess.run(train_op)
          values = tf.compat.v1.Summary.FromString(sess.run(summary)).value
        got = {v.tag: v.simple_value for v in values if v.tag.endswith(("_auc", "_mse"))}
        self.assertEqual(list(got), want)
        self.assertAllClose(list(got.values()), [1.0, 4 / 3][: len(want)], atol=1e-3)

  @parameterized.parameters(False, True)
  def test_deep_insight_to_files(self, also_to_kafka):
    out = os.path.join(utils.get_test_tmp_dir(), "insight")

    class WithUsers(Model):
      def model_fn(self, features, mode):
        for name, value in (("uid", 3), ("req_time", 1700000000)):
          features[name] = tf.fill([2], tf.constant(value, tf.int64))
        features["sample_rate"] = tf.ones([2])
        return super().model_fn(features, mode)

    self.addCleanup(setattr, file_metric_hook.FileMetricHook, "_instance", None)
    model = WithUsers()
    model.metrics.enable_tf2_profiler_hook = False
    model.metrics.enable_file_metrics = True
    # Without a broker in the environment that hook is idle, but it is there.
    model.metrics.enable_kafka_metrics = also_to_kafka
    model.metrics.deep_insight_sample_ratio = 1.0
    model.metrics.deep_insight_name = "ranking"
    model.metrics.file_base_name = out
    model.metrics.key_fn = lambda message, worker_id, base_name: base_name
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    conf = cpu_training.CpuTrainingConfig()
    cpu_training.local_train_internal(model, conf, folder, steps=2)
    lines = []
    for root, _, names in os.walk(out):
      for name in names:
        with open(os.path.join(root, name)) as file:
          lines += file.readlines()
    self.assertLen(lines, 4)
    self.assertIn("ranking", lines[0])


class TaskTest(tf.test.TestCase):
  def test_is_a_task(self):
    self.assertTrue(issubclass(native_model.MonolithBaseModel, native_task.NativeTask))
    with self.assertRaises(TypeError):
      native_model.MonolithModel()
    params = Model.params()
    for name, default in {
      "output_path": None,
      "output_fields": None,
      "delimiter": "\t",
      "file_name": "",
      "enable_grads_and_vars_summary": False,
      "dense_weight_decay": 0.0,
      "clip_norm": 1000.0,
      "sparse_norm_warmup_steps": None,
      "default_occurrence_threshold": 0,
      "feature_list": None,
    }.items():
      self.assertEqual(params.get(name), default, name)
    self.assertIsInstance(params.instantiate(), Model)


if __name__ == "__main__":
  tf.test.main()
