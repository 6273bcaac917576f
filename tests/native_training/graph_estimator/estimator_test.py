"""Training, evaluating, predicting and exporting what a model function builds.

Covers `estimator.py`, `evaluating.py`, `inputs.py`, `receivers.py`, `run_config.py`,
`saved_model.py`, `spec.py` and `warm_start.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import json
import os
import tempfile
import threading
import types
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.training import monitored_session

from monolith import _tensorflow
from monolith.native_training import graph_estimator
from monolith.native_training.graph_estimator import inputs, run_config

keras = _tensorflow.import_keras()

tf.compat.v1.disable_eager_execution()

TRAIN, EVAL, PREDICT = "train", "eval", "infer"


def _input_fn(batches=5):
  return (
    tf.data.Dataset.range(1, batches + 1)
    .map(lambda i: ({"x": [tf.cast(i, tf.float32), 1.0]}, [0.0, 2.0]))
    .prefetch(1)
  )


def _model_fn(features, labels, mode, params=None, config=None, **spec_fields):
  """Predicts `weight * x`; the weight starts at 1 and grows by 1 in each step."""
  weight = tf.compat.v1.get_variable("weight", [], initializer=tf.compat.v1.ones_initializer())
  predictions = {"y": weight * features["x"], "x": features["x"]}
  if mode == PREDICT:
    return graph_estimator.EstimatorSpec(mode, predictions)
  step = tf.compat.v1.train.get_global_step()
  loss = tf.reduce_sum(features["x"])
  # A step needs its data.
  with tf.control_dependencies([loss]):
    updates = [tf.compat.v1.assign_add(weight, 1.0), tf.compat.v1.assign_add(step, 1)]
  return graph_estimator.EstimatorSpec(
    mode,
    predictions,
    loss=loss,
    train_op=tf.group(updates),
    **spec_fields,
  )


class _RecordingHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self):
    self.calls = []
    self.losses = []

  def begin(self):
    self.calls.append("begin")
    self.losses = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)

  def after_run(self, run_context, run_values):
    self.calls.append("run")

  def end(self, session):
    self.calls.append("end")


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
  def __init__(self):
    self.steps = []

  def after_save(self, session, global_step_value):
    self.steps.append(int(global_step_value))


class EstimatorTestCase(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])

  def create(self, model_fn=_model_fn, **kwargs):
    return graph_estimator.Estimator(model_fn, self.model_dir, **kwargs)

  def saved_steps(self):
    names = glob.glob(os.path.join(self.model_dir, "model.ckpt-*.index"))
    return sorted(int(name.rsplit("-", 1)[1].split(".")[0]) for name in names)

  def read_events(self, folder):
    events = {}
    for path in glob.glob(os.path.join(folder, "events.*")):
      for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
          events[value.tag, event.step] = value
    return events


class TrainTest(EstimatorTestCase):
  def test_limits(self):
    estimator = self.create()

    self.assertIs(estimator.train(_input_fn, steps=2), estimator)
    self.assertEqual(estimator.get_variable_value("global_step"), 2)
    estimator.train(_input_fn, steps=1)
    self.assertEqual(estimator.get_variable_value("weight"), 4.0)
    estimator.train(_input_fn, max_steps=4)
    self.assertEqual(estimator.get_variable_value("global_step"), 4)
    # The data has an end.
    estimator.train(_input_fn, max_steps=100)
    self.assertEqual(estimator.get_variable_value("global_step"), 9)

  def test_nothing_is_built_for_a_limit_that_is_reached(self):
    self.create().train(_input_fn, steps=3)

    self.create(lambda features, mode: self.fail("called")).train(_input_fn, max_steps=3)

  def test_wrong_limits(self):
    estimator = self.create()
    with self.assertRaisesRegex(ValueError, "both steps and max_steps"):
      estimator.train(_input_fn, steps=1, max_steps=1)
    for limits in ({"steps": 0}, {"max_steps": -1}):
      with self.assertRaisesRegex(ValueError, "> 0, given"):
        estimator.train(_input_fn, **limits)

  def test_no_data_is_reported(self):
    with self.assertLogs("absl", "WARNING") as logs:
      self.create().train(lambda: _input_fn(0))
    self.assertIn("No step was trained", logs.output[-1])

  def test_hooks_of_caller_and_model(self):
    hooks = {name: _RecordingHook() for name in ("caller", "chief", "all", "evaluation")}
    model_fn = functools.partial(
      _model_fn,
      training_chief_hooks=[hooks["chief"]],
      training_hooks=(hooks["all"],),
      evaluation_hooks=[hooks["evaluation"]],
    )
    self.create(model_fn).train(_input_fn, hooks=[hooks["caller"]], steps=2)

    for name in ("caller", "chief", "all"):
      self.assertEqual(hooks[name].calls, ["begin", "run", "run", "end"], name)
    self.assertEqual(hooks["evaluation"].calls, [])
    self.assertLen(hooks["caller"].losses, 1)
    with self.assertRaisesRegex(TypeError, "Hooks must be a SessionRunHook"):
      self.create().train(_input_fn, hooks=["no hook"])

  def test_interval_of_checkpoints_and_how_many_are_kept(self):
    config = graph_estimator.RunConfig(save_checkpoints_steps=2, keep_checkpoint_max=2)
    listener = _Listener()

    self.create(config=config).train(_input_fn, saving_listeners=[listener])

    self.assertEqual(self.saved_steps(), [4, 5])
    self.assertEqual(listener.steps, [0, 2, 4, 5])

  def test_saver_of_the_model_saves_and_tells_listeners(self):
    def model_fn(features, labels, mode):
      saver = tf.compat.v1.train.CheckpointSaverHook(self.model_dir, save_steps=3)
      return _model_fn(features, labels, mode, training_chief_hooks=[saver])

    listener = _Listener()
    self.create(model_fn).train(_input_fn, saving_listeners=[listener])
    self.assertEqual(listener.steps, [0, 3, 5])

  def test_listeners_need_a_saver(self):
    config = graph_estimator.RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None)
    estimator = self.create(config=config)
    with self.assertRaisesRegex(ValueError, "should be a CheckpointSaverHook"):
      estimator.train(_input_fn, saving_listeners=[_Listener()])
    with self.assertRaisesRegex(TypeError, "CheckpointSaverListeners"):
      self.create().train(_input_fn, saving_listeners=[_RecordingHook()])

    estimator.train(_input_fn)
    self.assertEqual(self.saved_steps(), [])

  def test_curves(self):
    config = graph_estimator.RunConfig(save_summary_steps=2, log_step_count_steps=2)
    self.create(config=config).train(_input_fn)

    events = self.read_events(self.model_dir)
    losses = {step: value.simple_value for (tag, step), value in events.items() if tag == "loss"}
    self.assertEqual(losses, {1: 2.0, 3: 4.0, 5: 6.0})
    self.assertIn("global_step/sec", {tag for tag, _ in events})

  def test_loss_that_is_no_number_ends_training(self):
    def model_fn(features, labels, mode):
      spec = _model_fn(features, labels, mode)
      return spec._replace(loss=spec.loss * float("nan"))

    with self.assertRaises(tf.compat.v1.train.NanLossDuringTrainingError):
      self.create(model_fn).train(_input_fn)

  def test_seed_makes_a_graph_that_draws_the_same(self):
    def model_fn(features, labels, mode):
      tf.compat.v1.get_variable("drawn", [4], initializer=tf.compat.v1.random_normal_initializer())
      return _model_fn(features, labels, mode)

    drawn = []
    for seed in (7, 7, 8):
      folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
      config = graph_estimator.RunConfig(folder, tf_random_seed=seed)
      estimator = graph_estimator.Estimator(model_fn, config=config)
      drawn.append(list(estimator.train(_input_fn, steps=1).get_variable_value("drawn")))

    self.assertEqual(drawn[0], drawn[1])
    self.assertNotEqual(drawn[0], drawn[2])


class EvaluateTest(EstimatorTestCase):
  def _metric_fn(self, features, labels, mode):
    mean = keras.metrics.Mean()
    mean.update_state(features["x"])
    return _model_fn(
      features,
      labels,
      mode,
      eval_metric_ops={"labels": tf.compat.v1.metrics.mean(labels), "keras": mean},
    )

  def test_metrics_of_the_newest_checkpoint(self):
    estimator = self.create(self._metric_fn)
    estimator.train(_input_fn, steps=3)
    hook = _RecordingHook()

    metrics = estimator.evaluate(_input_fn, hooks=[hook])

    # Batches of (1, 1) to (5, 1).
    self.assertEqual(metrics, {"labels": 1.0, "keras": 2.0, "loss": 4.0, "global_step": 3})
    self.assertEqual(hook.calls, ["begin", *["run"] * 5, "end"])
    self.assertEqual(estimator.evaluate(_input_fn, steps=2)["loss"], 2.5)
    # Nothing was learnt.
    self.assertEqual(estimator.get_variable_value("weight"), 4.0)

  def test_no_data_is_reported(self):
    estimator = self.create(self._metric_fn)
    estimator.train(_input_fn, steps=1)
    with self.assertLogs("absl", "WARNING") as logs:
      estimator.evaluate(lambda: _input_fn(0))
    self.assertIn("No batch was evaluated, so the metrics say nothing", logs.output[-1])

  def test_metrics_are_written(self):
    estimator = self.create(self._metric_fn)
    estimator.train(_input_fn, steps=1)
    estimator.evaluate(_input_fn, name="more")

    self.assertFalse(os.path.exists(estimator.eval_dir()))
    events = self.read_events(os.path.join(self.model_dir, "eval_more"))
    self.assertEqual(events["loss", 1].simple_value, 4.0)
    path = tf.make_ndarray(events["checkpoint_path", 1].tensor).item()
    self.assertEqual(path.decode(), os.path.join(self.model_dir, "model.ckpt-1"))

  def test_chosen_and_missing_checkpoints(self):
    estimator = self.create(config=graph_estimator.RunConfig(save_checkpoints_steps=1))
    self.assertEqual(estimator.evaluate(_input_fn)["global_step"], 0)
    estimator.train(_input_fn, steps=3)

    path = os.path.join(self.model_dir, "model.ckpt-2")
    self.assertEqual(estimator.evaluate(_input_fn, checkpoint_path=path)["global_step"], 2)

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, "steps > 0"):
      self.create().evaluate(_input_fn, steps=0)
    for name in ("loss", "global_step"):
      metric = {name: (tf.constant(0), tf.no_op())}
      model_fn = functools.partial(_model_fn, eval_metric_ops=metric)
      with self.assertRaisesRegex(ValueError, f'"{name}" is not allowed'):
        self.create(model_fn).evaluate(_input_fn)


class PredictTest(EstimatorTestCase):
  def test_examples_and_batches(self):
    estimator = self.create().train(_input_fn, steps=1)

    examples = list(estimator.predict(lambda: _input_fn(2)))
    batches = list(estimator.predict(lambda: _input_fn(2), "y", yield_single_examples=False))

    self.assertEqual([example["y"] for example in examples], [2.0, 2.0, 4.0, 2.0])
    self.assertEqual(set(examples[0]), {"x", "y"})
    self.assertEqual([{k: list(v) for k, v in b.items()} for b in batches],
                     [{"y": [2.0, 2.0]}, {"y": [4.0, 2.0]}])  # fmt: skip

  def test_callers_graph_is_the_default_between_batches(self):
    hook = _RecordingHook()
    with tf.Graph().as_default() as graph:
      predictions = self.create().predict(_input_fn, hooks=[hook])
      next(predictions)
      self.assertIs(tf.compat.v1.get_default_graph(), graph)
      predictions.close()
      self.assertIs(tf.compat.v1.get_default_graph(), graph)
    # Nobody wanted the rest, which is no end of the data.
    self.assertEqual(hook.calls, ["begin", "run"])

  def test_predictions_without_names(self):
    def model_fn(features, mode):
      return graph_estimator.EstimatorSpec(mode, predictions=features["x"] * 2)

    estimator = self.create(model_fn)
    self.assertEqual(list(estimator.predict(lambda: _input_fn(1))), [2.0, 2.0])
    with self.assertRaisesRegex(ValueError, "non-dict predictions"):
      next(estimator.predict(_input_fn, ["y"]))

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, "at least one output"):
      next(self.create().predict(_input_fn, predict_keys=["z"]))

    def model_fn(features, mode):
      return graph_estimator.EstimatorSpec(mode, {"a": features["x"], "b": features["x"][:1]})

    with self.assertRaisesRegex(ValueError, "should be same"):
      next(self.create(model_fn).predict(_input_fn))

  def test_input_without_an_end_is_reported(self):
    with self.assertLogs("absl", "WARNING") as logs:
      predictions = self.create().predict(lambda: {"x": tf.constant([3.0])})
      self.assertEqual([next(predictions)["y"] for _ in range(3)], [3.0] * 3)
      predictions.close()
    self.assertIn("predictions never end", logs.output[0])


class WarmStartTest(EstimatorTestCase):
  def test_first_session_starts_from_the_other_model(self):
    other = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
    graph_estimator.Estimator(_model_fn, other).train(_input_fn, steps=3)
    settings = graph_estimator.WarmStartSettings(other, vars_to_warm_start="weight")
    for warm_start_from in (other, settings):
      self.model_dir = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
      estimator = self.create(warm_start_from=warm_start_from)

      self.assertEqual(next(estimator.predict(_input_fn))["y"], 4.0)
      estimator.train(_input_fn, steps=1)
      self.assertEqual(estimator.get_variable_value("weight"), 5.0)
      # Now there is a checkpoint of its own.
      self.assertEqual(next(estimator.predict(_input_fn))["y"], 5.0)
      estimator.train(_input_fn, steps=1)
      self.assertEqual(estimator.get_variable_value("weight"), 6.0)

  def test_from_an_export(self):
    exported = self.create().train(_input_fn, steps=2).export_saved_model(
      os.path.join(self.model_dir, "exported"), _receiver_fn
    )  # fmt: skip
    self.model_dir = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])

    estimator = self.create(warm_start_from=exported)

    self.assertEqual(next(estimator.predict(_input_fn))["y"], 3.0)

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, "warm_start_from is 3"):
      self.create(warm_start_from=3)


def _receiver_fn():
  x = tf.compat.v1.placeholder(tf.float32, [None], "x")
  return graph_estimator.ServingInputReceiver({"x": x}, x, {"twice": {"half": x}})


class ExportTest(EstimatorTestCase):
  def test_model_can_be_asked(self):
    asset = os.path.join(self.model_dir, "asset")
    with open(asset, "w", encoding="utf-8") as file:
      file.write("text")
    estimator = self.create().train(_input_fn, steps=2)

    folder = estimator.export_saved_model(
      os.path.join(self.model_dir, "exported"), _receiver_fn, {"some/asset": asset}
    )

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      meta_graph = tf.compat.v1.saved_model.load(session, ["serve"], tf.compat.as_str(folder))
      signature = meta_graph.signature_def["serving_default"]
      fed = {signature.inputs["input"].name: [1.0, 2.0]}
      self.assertEqual(list(session.run(signature.outputs["y"].name, fed)), [3.0, 6.0])
      self.assertIn("half", meta_graph.signature_def["twice:serving_default"].inputs)
    with open(os.path.join(folder, b"assets.extra/some/asset"), encoding="utf-8") as file:
      self.assertEqual(file.read(), "text")

  def test_nothing_to_export(self):
    with self.assertRaisesRegex(ValueError, "find trained model"):
      self.create().export_saved_model(self.model_dir, _receiver_fn)

  def test_receivers_of_raw_and_serialized_features(self):
    with tf.Graph().as_default():
      raw = graph_estimator.build_raw_serving_input_receiver_fn({"x": tf.zeros([7, 3])}, 2)()
      self.assertEqual(raw.receiver_tensors["x"].shape, [2, 3])
      parsed = graph_estimator.build_parsing_serving_input_receiver_fn(
        {"x": tf.io.FixedLenFeature([1], tf.float32)}
      )()
      example = tf.train.Example()
      example.features.feature["x"].float_list.value.append(4)
      with tf.compat.v1.Session() as session:
        fed = {parsed.receiver_tensors["examples"]: [example.SerializeToString()]}
        self.assertEqual(session.run(parsed.features["x"], fed), [[4.0]])

  def test_receivers_check_names_and_tensors(self):
    tensor = tf.constant(0)
    receiver = graph_estimator.ServingInputReceiver(tensor, tensor)
    self.assertEqual((set(receiver.features), set(receiver[1])), ({"feature"}, {"input"}))
    self.assertIs(graph_estimator.TensorServingInputReceiver(tensor, tensor).features, tensor)
    for features, tensors, alternatives, message in (
      ({1: tensor}, tensor, None, "keys must be strings"),
      ({"x": 1}, tensor, None, "must be a Tensor"),
      (tensor, None, None, "must be defined"),
      (tensor, tensor, [tensor], "must be a dict"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        graph_estimator.ServingInputReceiver(features, tensors, alternatives)
    with self.assertRaisesRegex(ValueError, "must be a Tensor"):
      graph_estimator.TensorServingInputReceiver({"x": tensor}, tensor)


class SpecTest(absltest.TestCase):
  def test_each_mode_needs_its_fields(self):
    loss, op = tf.constant(1.0), tf.no_op()
    graph_estimator.EstimatorSpec(EVAL, loss=loss)
    for mode, fields, name in (
      (TRAIN, {"loss": loss}, "train_op"),
      (TRAIN, {"train_op": op}, "loss"),
      (EVAL, {}, "loss"),
      (PREDICT, {}, "predictions"),
    ):
      with self.assertRaisesRegex(ValueError, f"Missing {name}"):
        graph_estimator.EstimatorSpec(mode, **fields)

  def test_fields_are_checked(self):
    loss = tf.constant(1.0)
    spec = graph_estimator.EstimatorSpec(EVAL, loss=tf.constant([1.0]))
    self.assertEqual(spec.loss.shape, [])
    self.assertIsInstance(spec.scaffold, tf.compat.v1.train.Scaffold)
    with self.assertRaisesRegex(ValueError, "Loss must be scalar"):
      graph_estimator.EstimatorSpec(EVAL, loss=tf.constant([1.0, 2.0]))
    for fields in (
      {"train_op": "op"},
      {"predictions": {"x": 1}},
      {"eval_metric_ops": {"x": loss}},
      {"eval_metric_ops": [loss]},
      {"training_hooks": ["hook"]},
      {"scaffold": "scaffold"},
    ):
      with self.assertRaises(TypeError, msg=fields):
        graph_estimator.EstimatorSpec(EVAL, loss=loss, **fields)

  def test_replace_checks_again(self):
    spec = graph_estimator.EstimatorSpec(EVAL, loss=tf.constant(1.0))
    hook = _RecordingHook()
    replaced = spec._replace(evaluation_hooks=[hook])
    self.assertIsInstance(replaced, graph_estimator.EstimatorSpec)
    self.assertEqual(replaced.evaluation_hooks, (hook,))
    self.assertIs(replaced.loss, spec.loss)
    with self.assertRaisesRegex(ValueError, "Missing loss"):
      spec._replace(loss=None)
    with self.assertRaisesRegex(ValueError, "cannot become 'train'"):
      spec._replace(mode=TRAIN)


class FunctionsTest(EstimatorTestCase):
  def test_functions_get_what_they_take(self):
    seen = []

    def input_fn(params, mode):
      seen.append((dict(params), mode))
      params["added"] = 2
      return _input_fn(1)

    def model_fn(features, labels, config, mode, params):
      seen.append((params, config.model_dir))
      params["added"] = 1
      return _model_fn(features, labels, mode)

    given = {"key": [1]}
    estimator = self.create(model_fn, params=given)
    estimator.train(input_fn)
    estimator.evaluate(input_fn)

    self.assertEqual(seen[::2], [({"key": [1]}, TRAIN), ({"key": [1]}, EVAL)])
    self.assertEqual(seen[1::2], [({"key": [1], "added": 1}, self.model_dir)] * 2)
    self.assertEqual(given, {"key": [1]})

  def test_names_of_partial_and_callable_objects(self):
    class Model:
      def __call__(self, features, mode):
        return None

    partial = functools.partial(_model_fn, None, mode=TRAIN)
    self.assertEqual(inputs.get_argument_names(partial), {"labels", "params", "config"})
    self.assertEqual(inputs.get_argument_names(Model()), {"features", "mode"})

  def test_wrong_model_functions(self):
    for function, params, message in (
      (lambda x: None, None, "must include features"),
      (lambda features: None, {"a": 1}, "does not include params"),
      (lambda features, other: None, None, r"not known: \['other'\]"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.create(function, params=params)
    with self.assertRaisesRegex(ValueError, "should return an EstimatorSpec"):
      self.create(lambda features, labels: None).train(_input_fn)
    with self.assertRaisesRegex(ValueError, "does not take labels"):
      self.create(lambda features: None).train(_input_fn)

  def test_input_of_three_things(self):
    with self.assertRaisesRegex(ValueError, "has returned 3"):
      self.create().train(lambda: (1, 2, 3))

  def test_model_dir(self):
    config = graph_estimator.RunConfig(model_dir="/other")
    with self.assertRaisesRegex(ValueError, "'/other'"):
      self.create(config=config)
    self.assertEqual(graph_estimator.Estimator(_model_fn, config=config).model_dir, "/other")
    with self.assertLogs("absl", "WARNING"):
      self.assertTrue(os.path.isdir(graph_estimator.Estimator(_model_fn).model_dir))
    with self.assertRaisesRegex(ValueError, "must be an instance of RunConfig"):
      self.create(config={"model_dir": "x"})


def _cluster_env(task_type, index=0, **cluster):
  tf_config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
  return mock.patch.dict(os.environ, TF_CONFIG=json.dumps(tf_config))


class RunConfigTest(absltest.TestCase):
  _CLUSTER = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2", "p:3"]}

  def _role(self, task_type, index=0):
    with _cluster_env(task_type, index, **self._CLUSTER):
      config = graph_estimator.RunConfig()
    return (config.master, config.is_chief, config.num_ps_replicas, config.num_worker_replicas,
            config.global_id_in_cluster)  # fmt: skip

  def test_roles(self):
    self.assertEqual(self._role("chief"), ("grpc://c:1", True, 3, 3, 0))
    self.assertEqual(self._role("worker", 1), ("grpc://w:2", False, 3, 3, 2))
    self.assertEqual(self._role("ps", 2), ("grpc://p:3", False, 3, 3, 5))
    self.assertEqual(self._role("evaluator"), ("", False, 0, 0, None))

  def test_alone(self):
    for config in (graph_estimator.RunConfig(), self._alone_in_a_cluster()):
      self.assertEqual((config.master, config.is_chief, config.num_ps_replicas), ("", True, 0))
      self.assertEqual(config.num_worker_replicas, 1)

  def _alone_in_a_cluster(self):
    with _cluster_env("chief", chief=["c:1"]):
      return graph_estimator.RunConfig()

  def test_wrong_clusters(self):
    for task_type, index, cluster, message in (
      ("worker", 0, {"worker": ["w:1"]}, 'must have one "chief"'),
      ("chief", 0, {"chief": ["c:1", "c:2"]}, 'must have one "chief"'),
      ("worker", 2, self._CLUSTER, "not in its cluster"),
      (None, 0, self._CLUSTER, "not in its cluster"),
      ("worker", 1, {}, "index must be 0"),
    ):
      with _cluster_env(task_type, index, **cluster), self.assertRaisesRegex(ValueError, message):
        graph_estimator.RunConfig()

  def test_texts_that_describe_no_cluster(self):
    for text, message in (
      ("{", "TF_CONFIG is '{', want JSON: Expecting"),
      ("[1]", r"TF_CONFIG is '\[1\]', want a JSON object"),
      ('{"task": "chief"}', "task of TF_CONFIG is 'chief', want a type and an index"),
      ('{"task": {"index": "x"}}', "task index of TF_CONFIG is 'x', want an integer"),
      ('{"cluster": {"chief": "c:1"}}', "cluster of TF_CONFIG is .*'c:1'}, want jobs with lists"),
    ):
      with mock.patch.dict(os.environ, TF_CONFIG=text), self.assertRaisesRegex(ValueError, message):
        graph_estimator.RunConfig()
    with mock.patch.dict(os.environ, TF_CONFIG='{"cluster": null, "task": null}'):
      self.assertTrue(graph_estimator.RunConfig().is_chief)

  def test_intervals(self):
    config = graph_estimator.RunConfig()
    self.assertEqual((config.save_checkpoints_secs, config.save_checkpoints_steps), (600, None))
    config = graph_estimator.RunConfig(save_checkpoints_steps=5)
    self.assertEqual((config.save_checkpoints_secs, config.save_checkpoints_steps), (None, 5))
    with self.assertRaisesRegex(ValueError, "give one of them"):
      graph_estimator.RunConfig(save_checkpoints_steps=5, save_checkpoints_secs=5)
    with self.assertRaisesRegex(ValueError, "save_summary_steps is -1"):
      graph_estimator.RunConfig(save_summary_steps=-1)

  def test_replace_keeps_the_role(self):
    with _cluster_env("worker", 1, **self._CLUSTER):
      config = graph_estimator.RunConfig(save_checkpoints_secs=5)
    replaced = config.replace(model_dir="folder", save_checkpoints_steps=7)
    self.assertEqual((replaced.model_dir, config.model_dir), ("folder", None))
    self.assertEqual((replaced.save_checkpoints_steps, replaced.save_checkpoints_secs), (7, None))
    self.assertEqual((replaced.task_type, replaced.task_id), ("worker", 1))
    with self.assertRaisesRegex(ValueError, "'role'"):
      config.replace(role=None)

  def test_strategies_are_refused(self):
    fields = {field.name: None for field in dataclasses.fields(graph_estimator.RunConfig)}
    distribute = collections.namedtuple("DistributeConfig", "train_distribute remote_cluster")
    for name, value in (
      ("train_distribute", "a strategy"),
      ("eval_distribute", "a strategy"),
      ("_experimental_distribute", distribute(None, "a cluster")),
    ):
      config = types.SimpleNamespace(**fields, replace=lambda **kwargs: None, **{name: value})
      with self.assertRaisesRegex(ValueError, f"^{name.lstrip('_')} is .*by ranks"):
        run_config.check(config)
    unset = types.SimpleNamespace(
      **fields, replace=lambda **kwargs: None, _experimental_distribute=distribute(None, None)
    )
    self.assertIs(run_config.check(unset), unset)

  def test_model_dir_of_the_environment(self):
    with mock.patch.dict(os.environ, TF_CONFIG='{"model_dir": "/a"}'):
      self.assertEqual(graph_estimator.RunConfig().model_dir, "/a")
      with self.assertRaisesRegex(ValueError, "TF_CONFIG says '/a'"):
        graph_estimator.RunConfig(model_dir="/b")

  def test_sessions_look_at_their_own_task_and_servers(self):
    with _cluster_env("worker", 1, **self._CLUSTER):
      config = graph_estimator.RunConfig()
    self.assertEqual(
      list(run_config.get_session_config(config).device_filters), ["/job:ps", "/job:worker/task:1"]
    )
    own = tf.compat.v1.ConfigProto(log_device_placement=True)
    self.assertIs(run_config.get_session_config(config.replace(session_config=own)), own)

  def test_variables_live_on_servers(self):
    with _cluster_env("worker", 1, **self._CLUSTER):
      config = graph_estimator.RunConfig()
    with tf.Graph().as_default() as graph, graph.device(run_config.get_device_fn(config)):
      variables = [tf.compat.v1.get_variable(f"v{i}", []) for i in range(2)]
      constant = tf.constant(1)
    self.assertEqual([v.device for v in variables], ["/job:ps/task:0", "/job:ps/task:1"])
    self.assertEqual(constant.device, "/job:worker/task:1")
    self.assertIsNone(run_config.get_device_fn(graph_estimator.RunConfig()))


class ClusterTest(EstimatorTestCase):
  def test_only_training_puts_variables_on_servers(self):
    devices = {}

    class Built(Exception):
      pass

    def model_fn(features, mode):
      devices[mode] = tf.compat.v1.get_variable("v", []).device
      raise Built

    with _cluster_env("worker", 1, **RunConfigTest._CLUSTER):
      estimator = self.create(model_fn)
    input_fn = lambda: tf.data.Dataset.from_tensors({"x": 1.0})  # noqa: E731
    for run in (
      estimator.train,
      estimator.evaluate,
      lambda input_fn: next(estimator.predict(input_fn)),
    ):
      with self.assertRaises(Built):
        run(input_fn)

    # Evaluations have a session of their own.
    wanted = {TRAIN: "/job:ps/task:1", EVAL: "", PREDICT: "/job:worker/task:1"}
    self.assertEqual(devices, wanted)

  def test_chief_and_worker_train_on_a_server(self):
    servers = {job: tf.distribute.Server.create_local_server() for job in ("chief", "worker", "ps")}
    cluster = {job: [server.target[len("grpc://") :]] for job, server in servers.items()}
    session_config = tf.compat.v1.ConfigProto(share_cluster_devices_in_session=True)
    session_config.cluster_def.CopyFrom(tf.train.ClusterSpec(cluster).as_cluster_def())
    session_config.experimental.share_session_state_in_clusterspec_propagation = True
    estimators = {}
    for job in ("chief", "worker"):
      with _cluster_env(job, **cluster):
        config = graph_estimator.RunConfig(session_config=session_config)
      estimators[job] = self.create(config=config)
    has_trained = threading.Event()

    class Wait(tf.compat.v1.train.SessionRunHook):
      def end(self, session):
        has_trained.wait(60)

    def work():
      estimators["worker"].train(_input_fn, steps=3)
      has_trained.set()

    # Otherwise a worker that finds no model looks again after half a minute.
    often = functools.partial(monitored_session.sm.SessionManager, recovery_wait_secs=0.1)
    with mock.patch.object(monitored_session.sm, "SessionManager", often):
      thread = threading.Thread(target=work)
      thread.start()
      estimators["chief"].train(_input_fn, hooks=[Wait()], steps=2)
      thread.join()

    # The chief alone saves, what both have trained.
    self.assertTrue(has_trained.is_set())
    self.assertEqual(self.saved_steps()[0], 0)
    self.assertEqual(len(glob.glob(os.path.join(self.model_dir, "graph.pbtxt"))), 1)
    self.assertGreaterEqual(estimators["chief"].get_variable_value("global_step"), 2)


if __name__ == "__main__":
  absltest.main()
