"""Tests of deep insight messages made from features."""

import inspect
import json
import os
from unittest import mock

import tensorflow as tf

from monolith.native_training.metric import deep_insight_ops, utils

tf.compat.v1.disable_eager_execution()


def _features(**extra):
  return {
    "uid": tf.constant([[1], [2], [3]], tf.int64),
    "req_time": tf.constant([[10], [20], [30]], tf.int64),
    "sample_rate": tf.constant([[0.5], [0.25], [1.0]]),
    **extra,
  }


class WriteDeepInsightTest(tf.test.TestCase):
  @mock.patch.object(deep_insight_ops, "write_deep_insight")
  def test_basic(self, write):
    def check(**kwargs):
      with self.session() as session:
        self.assertAllEqual(session.run(kwargs["uids"]), [1, 2, 3])
      return tf.no_op()

    write.side_effect = check
    # The order that callers of the first version use: labels where model_name is.
    utils.write_deep_insight(
      _features(), 1.0, tf.constant([1.0, 0.0, 1.0]), tf.constant([0.1, 0.2, 0.3]), "model"
    )

    self.assertEqual(write.call_args.args, ())
    self.assertEqual(
      set(write.call_args.kwargs),
      {
        "deep_insight_client_tensor",
        "uids",
        "req_times",
        "labels",
        "preds",
        "sample_rates",
        "model_name",
        "target",
        "sample_ratio",
        "return_msgs",
      },
    )
    self.assertFalse(write.call_args.kwargs["return_msgs"])

  def test_without_req_time_nothing_is_done(self):
    features = _features()
    del features["req_time"]

    op = utils.write_deep_insight(features, 0.01, "model", labels=[1.0], preds=[1.0])

    self.assertIsInstance(op, tf.Operation)
    self.assertEqual(op.type, "NoOp")

  def test_one_target(self):
    msgs = utils.write_deep_insight(
      _features(),
      0.01,
      "model",
      labels=[1.0, 0.0, 1.0],
      preds=[0.1, 0.2, 0.3],
      target="click",
      enable_kafka_metrics=True,
    )

    with self.session() as session:
      second = json.loads(session.run(msgs)[1])

    self.assertEqual(second["uid"], 2)
    self.assertEqual(second["req_time"], 20)
    self.assertEqual(second["predict"], {"click": 0.2})
    self.assertEqual(second["sample_rate"], {"click": 0.25})

  def test_messages_are_empty_without_kafka_and_file(self):
    msgs = utils.write_deep_insight(
      _features(), 0.01, "model", labels=[1.0, 0.0, 1.0], preds=[0.1, 0.2, 0.3]
    )

    with self.session() as session:
      self.assertAllEqual(session.run(msgs), [b""] * 3)

  def test_several_targets(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "dump")
    keys = ["gid"]
    msgs = utils.write_deep_insight(
      _features(gid=tf.constant([[7], [8], [9]], tf.int64)),
      0.01,
      "model",
      targets=["a", "b"],
      labels_list=[tf.constant([[1], [0], [1]]), tf.constant([0.0, 0.0, 1.0])],
      preds_list=[tf.constant([0.1, 0.2, 0.3]), tf.constant([0.4, 0.5, 0.6])],
      extra_fields_keys=keys,
      dump_filename=path,
    )

    with self.session() as session:
      third = json.loads(session.run(msgs)[2])

    self.assertEqual(third["label"], {"a": 1.0, "b": 1.0})
    self.assertEqual(third["predict"], {"a": 0.3, "b": 0.6})
    self.assertEqual(third["sample_rate"], {"a": 1.0, "b": 1.0})
    self.assertEqual((third["uid"], third["gid"]), (3, 9))
    self.assertTrue(os.path.exists(path))
    self.assertEqual(keys, ["gid"])

  def test_sample_rates_of_each_target(self):
    msgs = utils.write_deep_insight(
      _features(),
      0.01,
      "model",
      targets=["a", "b"],
      labels_list=[tf.zeros([3])] * 2,
      preds_list=[tf.zeros([3])] * 2,
      sample_rates_list=[tf.fill([3], 0.5), tf.fill([3], 0.75)],
      enable_kafka_metrics=True,
    )

    with self.session() as session:
      self.assertEqual(json.loads(session.run(msgs)[0])["sample_rate"], {"a": 0.5, "b": 0.75})

  def test_the_default_list_of_extra_fields_stays_empty(self):
    self.test_sample_rates_of_each_target()

    parameter = inspect.signature(utils.write_deep_insight).parameters["extra_fields_keys"]
    self.assertEqual(parameter.default, [])

  def test_lists_must_match_the_targets(self):
    with self.assertRaisesRegex(ValueError, "preds_list is 1 tensors, want .* 2 targets"):
      utils.write_deep_insight(
        _features(),
        0.01,
        "model",
        targets=["a", "b"],
        labels_list=[tf.zeros([3])] * 2,
        preds_list=[tf.zeros([3])],
      )
    with self.assertRaisesRegex(ValueError, "labels_list is None"):
      utils.write_deep_insight(_features(), 0.01, "model", targets=["a"])


if __name__ == "__main__":
  tf.test.main()
