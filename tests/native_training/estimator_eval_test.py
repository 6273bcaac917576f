"""`Estimator.evaluate` measures evaluation data, alone and while a model trains.

Covers `driver/evaluation.py`, `hooks/evaluation_metrics.py`, `metric/heads.py`,
`metric/streaming.py` and `models/shown_loss.py`.
"""

from __future__ import annotations

import glob
import io
import os
import re
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl import api as autograph_api

from monolith.native_training import entry, estimator, graph_estimator, native_model, runner_utils
from monolith.native_training.driver import dry_run
from monolith.native_training.hooks import evaluation_metrics
from monolith.native_training.metric import streaming
from monolith.native_training.models import shown_loss

tf.compat.v1.disable_eager_execution()

_EVAL = graph_estimator.ModeKeys.EVAL
_BATCH = 8
_NUM_EXAMPLES = 64


class _Clicks(native_model.MonolithModel):
  """Users with even ids click; users of the evaluation data, from 100 on, were never trained."""

  optimizer = entry.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=1.0)

  def input_fn(self, mode):
    first = 100 if mode == _EVAL else 0
    users = first + np.arange(_NUM_EXAMPLES) % 16
    data = tf.data.Dataset.from_tensor_slices((users, (users % 2 == 0).astype(np.float32)))
    if mode != _EVAL:
      data = data.repeat()
    return data.batch(_BATCH).map(
      lambda user, label: {
        "user": tf.RaggedTensor.from_tensor(user[:, None]),
        "label": label,
      }
    )

  def model_fn(self, features, mode):
    self.create_embedding_feature_column("user")
    vector = self.lookup_embedding_slice(["user"], "vec", 4, optimizer=self.optimizer)[0]
    bias = tf.compat.v1.get_variable("bias", [], initializer=tf.compat.v1.zeros_initializer())
    logits = tf.reduce_sum(vector, axis=1) + bias
    label = features.get("label")
    loss, pred = native_model.get_sigmoid_loss_and_pred("ctr", logits, label, None, mode=mode)
    if mode == _EVAL:
      self.add_metric("mean_label", label)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)
    return native_model.EstimatorSpec(label, pred, "ctr", loss, optimizer)


class _SameUsers(_Clicks):
  """Evaluates the users that were trained."""

  def input_fn(self, mode):
    data = super().input_fn(graph_estimator.ModeKeys.TRAIN)
    return data.take(_NUM_EXAMPLES // _BATCH) if mode == _EVAL else data


class _Counted(_Clicks):
  """Counts how often its functions are called."""

  def __init__(self, params=None):
    super().__init__(params)
    self.calls = []

  def __deepcopy__(self, memo):
    # Copies count into the same list.
    copied = type(self)(self.p.copy())
    copied.calls = self.calls
    return copied

  def input_fn(self, mode):
    self.calls.append(("input_fn", mode))
    return super().input_fn(mode)

  def model_fn(self, features, mode):
    self.calls.append(("model_fn", mode))
    return super().model_fn(features, mode)


class _Forgetful(_SameUsers):
  """Gets worse with every step: the labels of training are those of evaluation turned round."""

  def input_fn(self, mode):
    data = super().input_fn(mode)
    if mode == _EVAL:
      return data
    return data.map(lambda features: {**features, "label": 1 - features["label"]})


def _read_curve(folder, tag):
  """Returns step -> value of a curve for TensorBoard."""
  curve = {}
  for path in glob.glob(os.path.join(folder, "events.out.tfevents.*")):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        if value.tag == tag:
          curve[event.step] = value.simple_value
  return curve


class _TrainMeanwhile(tf.compat.v1.train.SessionRunHook):
  """Trains and saves, as another process would, when the evaluation has restored its variables."""

  def __init__(self, train):
    self._train = train

  def after_create_session(self, session, coord):
    train, self._train = self._train, lambda: None
    train()


class EvaluateTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._folder = self.create_tempdir().full_path

  def _estimator(self, model_type, **kwargs):
    conf = estimator.RunConfig(is_local=True, model_dir=self._folder, **kwargs)
    return estimator.Estimator(model_type(), conf)

  def test_functions_of_a_model_are_called_once_more_than_there_are_graphs(self):
    counted = _Counted()
    conf = estimator.RunConfig(is_local=True, model_dir=self._folder)
    est = estimator.Estimator(counted, conf)
    convert = mock.Mock(wraps=autograph_api._convert_actual)
    with mock.patch.object(autograph_api, "_convert_actual", convert):
      est.train(steps=2)
      est.evaluate(1)
    train, evaluate = graph_estimator.ModeKeys.TRAIN, graph_estimator.ModeKeys.EVAL

    # The dry run, the training, the evaluation.
    self.assertEqual(
      counted.calls,
      [
        ("input_fn", train),
        ("model_fn", train),
        ("input_fn", train),
        ("model_fn", train),
        ("input_fn", evaluate),
        ("model_fn", evaluate),
      ],
    )
    # AutoGraph converts the user's functions, not the library's.
    modules = {call.args[0].__module__ for call in convert.call_args_list}
    self.assertEmpty([name for name in modules if name.startswith("monolith")], modules)

  def test_a_checkpoint_saved_meanwhile_is_not_mixed_in(self):
    est = self._estimator(_SameUsers)
    est.train(steps=4)
    alone = est.evaluate()
    meanwhile = _TrainMeanwhile(lambda: self._estimator(_SameUsers).train(steps=40))

    self.assertEqual(est.evaluate(hooks=[meanwhile]), alone)

    self.assertEqual(est.evaluate()["global_step"], 44)
    self.assertNotEqual(est.evaluate()["loss"], alone["loss"])

  def test_a_checkpoint_deleted_meanwhile_gives_way_to_the_next(self):
    est = self._estimator(_SameUsers, checkpoints_max_to_keep=1)
    est.train(steps=4)

    def train():
      self._estimator(_SameUsers, checkpoints_max_to_keep=1).train(steps=4)

    result = est.evaluate(hooks=[_TrainMeanwhile(train)])

    self.assertEqual(result["global_step"], 8)
    self.assertEqual(result, est.evaluate())

  def test_a_folder_without_checkpoint_is_named_and_left_alone(self):
    missing = self._folder + "/modle"
    os.mkdir(self._folder + "/model")
    est = estimator.Estimator(_Clicks(), estimator.RunConfig(is_local=True, model_dir=missing))

    for read in (est.evaluate, lambda: list(est.predict())):
      with self.assertRaisesRegex(
        ValueError, "no checkpoint in .*/modle: the folder does not exist. Beside it there is model"
      ):
        read()

    self.assertFalse(os.path.exists(missing))
    with self.assertRaisesRegex(ValueError, "no checkpoint in .*: it has model."):
      self._estimator(_Clicks).evaluate()

  def test_a_lost_state_file_is_an_error_for_who_reads_and_who_trains(self):
    est = self._estimator(_SameUsers)
    est.train(steps=4)
    os.remove(os.path.join(self._folder, "checkpoint"))
    remedy = r"model.ckpt-4 are there.*update_checkpoint_state\((.*)\), or"

    for start in (est.evaluate, lambda: est.train(steps=1)):
      with self.assertRaisesRegex((ValueError, tf.errors.DataLossError), remedy) as raised:
        start()

    (folder, name, names) = re.search(
      r"state\('(.*)', '(.*)', \['(.*)'\]\)", str(raised.exception)
    ).groups()
    tf.compat.v1.train.update_checkpoint_state(folder, name, [names])
    est.train(steps=1)
    self.assertEqual(est.evaluate()["global_step"], 5)

  def test_evaluations_of_a_training_run_are_printed_and_the_best_is_returned(self):
    est = self._estimator(_Forgetful)
    with mock.patch("sys.stderr", new_callable=io.StringIO) as screen:
      best = est.train(steps=8, eval_every=4)

    lines = re.findall("^evaluation at step (.*?)   (.*)$", screen.getvalue(), re.MULTILINE)
    self.assertEqual([step for step, _ in lines], ["4", "8"], screen.getvalue())
    self.assertEqual(best["global_step"], 4)
    for name, value in best.items():
      if name != "global_step":
        self.assertIn(f"{name} {value:.4f}", lines[0][1])
    self.assertIsNone(est.train(steps=1))

  def test_ranks_with_folders_of_their_own_meet_in_the_one_above(self):
    for merged, names in ((False, ["index-0000", "index-0001"]), (True, ["", ""])):
      hooks = []
      for index, name in enumerate(names):
        conf = runner_utils.RunnerConfig(
          enable_sync_training=True,
          merge_sync_training_ckpt=merged,
          index=index,
          num_workers=2,
          model_dir=os.path.join(self._folder, name) if name else self._folder,
        )
        get_place = estimator.Estimator(_Clicks(), conf)._get_place
        hook = evaluation_metrics.EvaluationMetricsHook(get_place, timeout_secs=0)
        # Each has read four examples, with a loss of its index.
        hook._fetches, hook._num_examples, hook._loss_sum = {"loss": None}, 4, 4.0 * index
        hooks.append(hook)
      hooks[1].end(None)
      # It does not wait, and yet has the counts of the other.
      self.assertEqual(hooks[0].get_metrics(), {"loss": 0.5, "global_step": 0})
      hooks[0]._forget_parts()
      self.assertIsNone(hooks[1].get_metrics())

  def test_evaluation_takes_over_what_training_has_declared(self):
    est = self._estimator(_SameUsers)
    with mock.patch.object(dry_run, "collect", wraps=dry_run.collect) as collect:
      est.train(steps=1)
      first = est.evaluate()
      self.assertEqual(est.evaluate(), first)
      self.assertEqual(collect.call_count, 1)
      # A change is asked for again.
      est._model.p.train.per_replica_batch_size = 3
      est.evaluate()
      est._model.users = "others"
      est.evaluate()
    self.assertEqual(collect.call_count, 3)

  def test_returns_and_writes_metrics_of_evaluation_data(self):
    est = self._estimator(_SameUsers)
    est.train(steps=40)
    metrics = est.evaluate()

    self.assertEqual(metrics["auc"], 1.0)
    self.assertEqual(metrics["global_step"], 40)
    self.assertEqual(metrics["mean_label"], 0.5)
    self.assertBetween(metrics["calibration"], 0.9, 1.1)
    # The sum of a batch of eight would be eight times that.
    self.assertAllClose(metrics["loss"], metrics["log_loss"], rtol=1e-4)
    self.assertLess(metrics["loss"], 0.6)
    self.assertAllClose(
      _read_curve(os.path.join(self._folder, "eval"), "auc"), {40: metrics["auc"]}
    )
    self.assertEmpty(_read_curve(self._folder, "mean_label"))

    # Nobody has seen these: all get the same prediction, and every tie counts half.
    unseen = self._estimator(_Clicks).evaluate()
    self.assertEqual(unseen["auc"], 0.5)
    self.assertAllClose(unseen["log_loss"], np.log(2), rtol=1e-2)
    self.assertEqual(est.get_variable_value("global_step"), 40)

  def test_early_stopping_and_the_best_checkpoint(self):
    est = self._estimator(_Forgetful)
    best = est.train_and_evaluate(
      steps=60, eval_every=4, early_stopping=2, keep_best=True, metric="log_loss"
    )

    self.assertEqual(best["global_step"], 4)
    self.assertEqual(est.get_variable_value("global_step"), 12)
    self.assertEqual(
      tf.train.latest_checkpoint(os.path.join(self._folder, "best")),
      os.path.join(self._folder, "best", "model.ckpt-4"),
    )
    curve = _read_curve(os.path.join(self._folder, "eval"), "log_loss")
    self.assertEqual(sorted(curve), [4, 8, 12])
    conf = estimator.RunConfig(is_local=True, model_dir=os.path.join(self._folder, "best"))
    again = estimator.Estimator(_Forgetful(), conf).evaluate()
    self.assertAllClose(again["log_loss"], best["log_loss"])

  def test_options_that_cannot_be_met(self):
    est = self._estimator(_Clicks)
    for options in ({"early_stopping": 2}, {"keep_best": True}, {"metric": "auc"}):
      with self.assertRaisesRegex(ValueError, f"{next(iter(options))}.*say with eval_every"):
        est.train(steps=1, **options)
    with self.assertRaisesRegex(ValueError, "eval_every is 0"):
      est.train(steps=1, eval_every=0)
    with self.assertRaisesRegex(ValueError, "early_stopping is -1"):
      est.train(steps=1, eval_every=5, early_stopping=-1)
    with self.assertRaisesRegex(ValueError, "save_checkpoints_secs 60"):
      self._estimator(_Clicks, save_checkpoints_secs=60).train(steps=1, eval_every=5)
    with self.assertRaisesRegex(ValueError, "is_local is False"):
      conf = estimator.RunConfig(model_dir=self._folder)
      estimator.Estimator(_Clicks(), conf).train(eval_every=5)
    with self.assertRaisesRegex(ValueError, "metric is 'f1', but the evaluation has .*'auc'"):
      est.train_and_evaluate(steps=1, metric="f1")


class StreamingTest(tf.test.TestCase):
  def test_auc_is_that_of_all_pairs(self):
    rng = np.random.RandomState(1)
    labels = rng.rand(5, 100) < 0.02
    predictions = 1 / (1 + np.exp(6 - rng.randn(5, 100) - 2 * labels))
    label = tf.compat.v1.placeholder(tf.float32, [None])
    pred = tf.compat.v1.placeholder(tf.float32, [None])
    metrics = streaming.classification_metrics(label, pred)
    with self.session() as sess:
      sess.run(tf.compat.v1.local_variables_initializer())
      for i in range(5):
        sess.run(
          [update for _, update in metrics.values()], {label: labels[i], pred: predictions[i]}
        )
      got = sess.run({name: value for name, (value, _) in metrics.items()})

    positive, negative = predictions[labels], predictions[~labels]
    pairs = positive[:, None] - negative[None, :]
    self.assertAllClose(got["auc"], np.mean((pairs > 0) + 0.5 * (pairs == 0)), atol=1e-3)
    self.assertAllClose(got["calibration"], predictions.sum() / labels.sum(), rtol=1e-5)
    want = -np.mean(np.where(labels, np.log(predictions), np.log(1 - predictions)))
    self.assertAllClose(got["log_loss"], want, rtol=1e-4)


class ShownLossTest(tf.test.TestCase):
  def test_sums_over_the_batch_are_divided_and_others_are_not(self):
    losses = tf.compat.v1.placeholder(tf.float32, [None])
    weights = tf.compat.v1.get_variable("weights", initializer=tf.ones([2, 3]))
    size = tf.shape(losses)[0]
    penalty = 0.5 * tf.reduce_sum(tf.square(weights))
    cases = (
      (tf.reduce_sum(losses), 2.0),
      (2 * tf.reduce_sum(losses) + 1, 4.25),
      (tf.reduce_mean(losses), 2.0),
      (tf.reduce_mean(losses) + penalty, 5.0),
      (tf.reduce_sum(losses) / tf.cast(size, tf.float32), 2.0),
    )
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      for loss, want in cases:
        shown = shown_loss.per_example(loss, size)
        self.assertAllClose(sess.run(shown, {losses: [2.0, 2.0, 1.0, 3.0]}), want)


if __name__ == "__main__":
  tf.test.main()
