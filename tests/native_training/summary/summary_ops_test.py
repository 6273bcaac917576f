import json
import os
import tempfile
import unittest

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training.summary import summary_ops, utils

try:
  from tensorboard import context as tb_context
  from tensorboard.backend.event_processing import data_provider
  from tensorboard.backend.event_processing import plugin_event_multiplexer as event_multiplexer
  from tensorboard.data import provider as base_provider
except ModuleNotFoundError:  # not every TensorFlow brings it
  base_provider = None

summary_pb2 = _tensorflow.import_summary_pb2()

tf.compat.v1.disable_eager_execution()

_STEPS = 10
_NAMES = ["f1", "f2", "f3"]
_SIZES = [3, 5, 9]
_GROUPS = [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]]


@unittest.skipIf(base_provider is None, "no TensorBoard: pip install tensorboard")
class SummaryTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._log_dir = os.path.join(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")), "demo_logs_v1")
    rng = np.random.RandomState(0)
    cls._weights = rng.rand(17).astype(np.float32)
    cls._input = rng.rand(3, 17).astype(np.float32)
    cls._kernel = rng.rand(17, 2).astype(np.float32)
    cls._label = np.array([1, 0, 1], np.int64)
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      summary_ops.nas_data(tf.constant(cls._weights), _NAMES, _SIZES, group_info=_GROUPS)
      summary_ops.feature_insight_data(
        tf.constant(cls._input),
        _NAMES,
        _SIZES,
        weight=tf.constant(cls._kernel),
        label=tf.constant(cls._label),
      )
      merged = tf.compat.v1.summary.merge_all()
      with tf.compat.v1.summary.FileWriter(cls._log_dir) as writer:
        for step in range(_STEPS):
          writer.add_summary(sess.run(merged), global_step=step)

    multiplexer = event_multiplexer.EventMultiplexer(
      tensor_size_guidance={utils.PLUGIN_NAME: _STEPS}
    )
    multiplexer.AddRunsFromDirectory(cls._log_dir)
    multiplexer.Reload()
    cls._provider = data_provider.MultiplexerDataProvider(multiplexer, cls._log_dir)

  def _read(self, tag):
    """Returns the plugin content of a tag and its tensors, one per step."""
    ctx = tb_context.RequestContext()
    metadata = self._provider.list_tensors(ctx, experiment_id="", plugin_name=utils.PLUGIN_NAME)[
      "."
    ][tag]
    data = self._provider.read_tensors(
      ctx,
      experiment_id="",
      plugin_name=utils.PLUGIN_NAME,
      downsample=_STEPS,
      run_tag_filter=base_provider.RunTagFilter(runs=["."], tags=[tag]),
    )["."][tag]
    self.assertLen(data, _STEPS)
    return metadata, [datum.numpy for datum in data]

  def test_nas_data(self):
    metadata, tensors = self._read("gating/monolith_nas_weight")

    self.assertEqual(
      metadata.plugin_content,
      b'{"tag_type": "gating", "segment_names": ["f1", "f2", "f3"], '
      b'"segment_sizes": [3, 5, 9], "group_index": [0, 0, 1]}',
    )
    self.assertEqual(metadata.description, "gating")
    for tensor in tensors:
      self.assertAllEqual(tensor, self._weights)

  def test_feature_insight_data(self):
    metadata, tensors = self._read("fi_train/monolith_feature_insight")

    self.assertEqual(
      metadata.plugin_content,
      b'{"tag_type": "fi_train", "segment_names": ["f1", "f2", "f3"], '
      b'"segment_sizes": [2, 2, 2], "group_index": [0, 1, 2], "label_size": 1}',
    )
    offsets = np.cumsum([0] + _SIZES)
    expected = np.concatenate(
      [self._input[:, a:b] @ self._kernel[a:b] for a, b in zip(offsets, offsets[1:])]
      + [self._label.reshape([-1, 1])],
      axis=1,
    )
    for tensor in tensors:
      self.assertEqual(tensor.shape, (3, 7))
      self.assertAllClose(tensor, expected)


class SummaryOpsTest(tf.test.TestCase):
  def _evaluate(self, summary):
    """Returns tag, head and tensor of a summary op."""
    with self.session() as sess:
      value = summary_pb2.Summary.FromString(sess.run(summary)).value[0]
    content = value.metadata.plugin_data.content
    return value.tag, json.loads(content) if content else None, tf.make_ndarray(value.tensor)

  def test_without_label_contributions_are_aggregated(self):
    x = np.arange(8, dtype=np.float32).reshape([2, 4])
    w = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)

    tag, head, data = self._evaluate(
      summary_ops.feature_insight_data(
        tf.constant(x), ["a", "b"], [1, 3], weight=tf.constant(w), group_info=[["b"], ["a"]]
      )
    )

    self.assertEqual(tag, "fi_direct/monolith_feature_insight")
    self.assertEqual(
      head,
      {
        "tag_type": "fi_direct",
        "segment_names": ["a", "b"],
        "segment_sizes": [1, 1],
        "label_size": 0,
      },
    )
    parts = [x[:, :1] @ w[:1], x[:, 1:] @ w[1:]]
    self.assertAllClose(data, np.stack([(part**2).sum(axis=1) for part in parts], axis=1))

  def test_without_weight_the_data_are_written_as_they_are(self):
    x = np.arange(8, dtype=np.float32).reshape([2, 4])
    label = np.array([[1, 2], [3, 4]], np.int32)

    tag, head, data = self._evaluate(
      summary_ops.feature_insight_data(
        tf.constant(x), ["a", "b"], [1, 3], label=tf.constant(label), group_info=[["a", "b"]]
      )
    )

    self.assertEqual(tag, "fi_train/monolith_feature_insight")
    self.assertEqual(head["segment_sizes"], [1, 3])
    self.assertEqual(head["group_index"], [0, 0])
    self.assertEqual(head["label_size"], 2)
    self.assertAllEqual(data, np.concatenate([x, label], axis=1))

  def test_names_and_collections(self):
    weight = tf.constant([1.0, 2.0])

    tag, head, data = self._evaluate(
      summary_ops.nas_data(weight, ["a"], [[1, 2]], collections=["mine"], name="tower")
    )

    self.assertEqual(tag, "tower_selecting/monolith_nas_weight")
    self.assertEqual(head["tag_type"], "selecting")
    self.assertAllEqual(data, [1.0, 2.0])
    self.assertLen(tf.compat.v1.get_collection("mine"), 1)
    self.assertEmpty(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES))

  def test_nas_data_without_segments(self):
    weight = tf.constant([1.0])

    tag, head, _ = self._evaluate(summary_ops.nas_data(weight, raw_tag="mixed"))
    self.assertEqual((tag, head), ("mixed/monolith_nas_weight", None))
    tag, head, _ = self._evaluate(summary_ops.nas_data(weight))
    self.assertEqual((tag, head), ("simple/monolith_nas_weight", None))

  def test_names_and_sizes_must_agree(self):
    with self.assertRaisesRegex(AssertionError, "2 segment_names and 1 segment_sizes"):
      summary_ops.feature_insight_data(tf.zeros([1, 2]), ["a", "b"], [2])


if __name__ == "__main__":
  tf.test.main()
