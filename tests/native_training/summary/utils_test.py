import json
import os
import tempfile
import unittest

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training.summary import utils
from monolith.native_training.summary.utils import get_nas_weight_json


class UtilsTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.names = ["f1", "f2", "f3"]
    self.groups = [["f1", "f2"], ["f3", "f4"], ["f5", "f6"]]

  def test_read_head_gating(self):
    head, tag = utils.prepare_head(self.names, [3, 5, 9], self.groups)

    self.assertEqual(tag, utils.SummaryType.GATING)
    self.assertEqual(
      head.numpy(),
      b'{"tag_type": "gating", "segment_names": ["f1", "f2", "f3"], '
      b'"segment_sizes": [3, 5, 9], "group_index": [0, 0, 1]}',
    )

  def test_read_head_selecting(self):
    head, tag = utils.prepare_head(self.names, [[3, 6], [5, 10], [4, 8, 16]])

    self.assertEqual(tag, utils.SummaryType.SELECTING)
    self.assertEqual(
      head.numpy(),
      b'{"tag_type": "selecting", "segment_names": ["f1", "f2", "f3"], '
      b'"segment_sizes": [[3, 6], [5, 10], [4, 8, 16]]}',
    )

  def test_mixed_sizes_are_selecting(self):
    _, tag = utils.prepare_head(self.names, [3, [5, 10], 4])

    self.assertEqual(tag, utils.SummaryType.SELECTING)

  def test_out_types(self):
    text, _ = utils.prepare_head(self.names, [3, 5, 9], out_type="bytes")
    head, _ = utils.prepare_head(self.names, [3, 5, 9], out_type="json")
    tensor, _ = utils.prepare_head(self.names, [3, 5, 9], out_type="tensor")

    self.assertIsInstance(text, str)
    self.assertEqual(json.loads(text), head)
    self.assertEqual(list(head), ["tag_type", "segment_names", "segment_sizes", "group_index"])
    self.assertEqual(tensor.numpy().decode(), text)
    self.assertEqual(tensor.shape.rank, 0)
    with self.assertRaises(AssertionError):
      utils.prepare_head(self.names, [3, 5, 9], out_type="text")

  def test_without_segments(self):
    for names, sizes in ((None, None), ([], []), (self.names, None), (None, [1])):
      self.assertEqual(utils.prepare_head(names, sizes, out_type="bytes"), (b"", None))
    tensor, tag = utils.prepare_head(None, None, raw_tag="simple")
    self.assertEqual((tensor.numpy(), tag), (b"", "simple"))

  def test_group_index_without_groups_is_the_position(self):
    head, _ = utils.prepare_head(self.names, [3, 5, 9], out_type="json")

    self.assertEqual(head["group_index"], [0, 1, 2])

  def test_groups_are_renumbered_in_ascending_order(self):
    head, _ = utils.prepare_head(
      ["f6", "f1", "f5", "f2"], [1, 1, 1, 1], self.groups, out_type="json"
    )

    self.assertEqual(head["group_index"], [1, 0, 1, 0])

  def test_group_index_only_where_it_is_read(self):
    for tag, expected in (
      ("gating", True), ("fi_train", True), ("fi_direct", False), ("mixed", False),
      ("selecting", False), ("simple", False),
    ):  # fmt: skip
      head, out_tag = utils.prepare_head(self.names, [1, 2, 3], raw_tag=tag, out_type="json")
      self.assertEqual(out_tag, tag)
      self.assertEqual(head["tag_type"], tag)
      self.assertEqual("group_index" in head, expected, tag)

  def test_segment_without_group(self):
    with self.assertRaisesRegex(AssertionError, "f9"):
      utils.prepare_head(["f1", "f9"], [1, 2], self.groups)

  def test_metadata(self):
    for content in ("päyload", "päyload".encode()):
      metadata = utils.create_summary_metadata("description", content)

      self.assertEqual(metadata.plugin_data.plugin_name, "monolith")
      self.assertEqual(metadata.plugin_data.content, "päyload".encode())
      self.assertEqual(metadata.summary_description, "description")
      tensor = _tensorflow.import_summary_pb2().DATA_CLASS_TENSOR
      self.assertEqual(metadata.data_class, tensor)
    self.assertEqual(utils.create_summary_metadata().plugin_data.content, b"")

  def test_constants(self):
    self.assertEqual(utils.PLUGIN_NAME, "monolith")
    self.assertEqual(utils.MONOLITH_NAS_DATA, "monolith_nas_weight")
    self.assertEqual(utils.MONOLITH_FI_DATA, "monolith_feature_insight")
    self.assertEqual((utils.KTYPE, utils.KMETA, utils.KDATA), ("tag_type", "meta", "data"))


class NasWeightTest(unittest.TestCase):
  def _save(self, **variables):
    folder = tempfile.mkdtemp()
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      for name, value in variables.items():
        tf.compat.v1.get_variable(name.replace("__", "/"), initializer=tf.constant(value))
      sess.run(tf.compat.v1.global_variables_initializer())
      return folder, tf.compat.v1.train.Saver().save(sess, os.path.join(folder, "model.ckpt"))

  def test_weights_of_a_checkpoint(self):
    folder, path = self._save(
      arch_embedding_weights=[[1.0, 2.5], [3.0, -4.0]],
      arch_embedding_weights__Adagrad=[0.1, 0.1],
      dense=[7.0],
    )

    for ckpt in (folder, path):
      self.assertEqual(get_nas_weight_json(ckpt), ["1.0", "2.5", "3.0", "-4.0"])
    self.assertEqual(get_nas_weight_json(path, prefix="dens"), ["7.0"])

  def test_checkpoint_without_weights(self):
    folder, _ = self._save(dense=[7.0])

    with self.assertRaises(Exception) as raised:
      get_nas_weight_json(folder)
    self.assertEqual(str(raised.exception), "not arch_weights in ckpt")


if __name__ == "__main__":
  unittest.main()
