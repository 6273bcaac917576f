"""Tests of feature list files and of slots by name."""

import os

import tensorflow as tf
from absl import flags

from monolith.native_training.data import feature_list, utils

flags.DEFINE_string("feature_list", None, "defined by the runner in production")
flags.DEFINE_string("data_type", None, "defined by the runner in production")

_CONTENT = """
# a comment
column_name: uid, gid
column_name : cid
cache_column: gid
cache_name=c1; capacity=10; timeout=5
feed_name=feed_a; shared=yes; feature_id=1
feature_name=f_user_id; depend=uid; method=Direct; slot=312; shared=true
feature_name=fc_cross; depend=uid,gid; method=Combine; slot=313; need_raw=0; args=1,2
feature_name=f_a-f_b; depend=uid; method=Combine; slot=313
"""


class FeatureListTest(tf.test.TestCase):
  def write(self, content=_CONTENT):
    path = os.path.join(os.environ["TEST_TMPDIR"], "features.conf")
    with open(path, "w") as stream:
      stream.write(content)
    return path

  def test_parse(self):
    features = feature_list.FeatureList.parse(self.write())

    self.assertEqual(features.column_name, ["uid", "gid", "cid"])
    self.assertLen(features, 3)
    self.assertEqual(features.feeds["feed_a"], feature_list.Feed("feed_a", True, 1))
    self.assertEqual(features.caches["c1"], feature_list.Cache("gid", "c1", capacity=10, timeout=5))
    user = features["user_id"]
    self.assertEqual((user.slot, user.shared, user.depend), (312, True, ["uid"]))
    self.assertEqual(features["cross"].depend, ["uid", "gid"])
    self.assertFalse(features["fc_cross"].need_raw)
    self.assertEqual(features["a-b"].feature_name, "f_a-f_b")
    self.assertEqual(features[313].feature_name, "fc_cross")
    self.assertLen(features.get_with_slot(313), 2)
    self.assertIn("user_id", features)
    self.assertNotIn(1, features)
    self.assertIsNone(features.get("x"))
    with self.assertRaisesRegex(Exception, "there is no feature x"):
      features["x"]
    self.assertEqual(sum(1 for _ in features), 3)

  def test_is_read_once(self):
    path = self.write()
    first = feature_list.FeatureList.parse(path)
    os.remove(path)
    self.assertIs(feature_list.FeatureList.parse(path), first)

  def test_bad_lines(self):
    with self.assertRaisesRegex(ValueError, "features.conf:1: .*not name=value"):
      feature_list.FeatureList.parse(self.write("feature_name"))
    with self.assertRaisesRegex(ValueError, "fname is None"):
      feature_list.FeatureList.parse()

  def test_name_and_slot(self):
    self.assertEqual(feature_list.get_feature_name_and_slot(5), ("slot_5", 5))
    self.assertEqual(feature_list.get_feature_name_and_slot("fc_slot_7"), ("fc_slot_7", 7))
    utils.register_slots({"registered": 99})
    self.assertEqual(feature_list.get_feature_name_and_slot("registered"), ("registered", 99))
    first = feature_list.get_feature_name_and_slot("new_a")[1]
    self.assertEqual(feature_list.get_feature_name_and_slot("new_b")[1], first + 1)
    self.assertEqual(feature_list.get_feature_name_and_slot("new_a")[1], first)
    flags.FLAGS.feature_list = self.write()
    try:
      self.assertEqual(feature_list.get_feature_name_and_slot(312), ("f_user_id", 312))
      self.assertEqual(feature_list.get_feature_name_and_slot("user_id"), ("user_id", 312))
    finally:
      flags.FLAGS.feature_list = None

  def test_used_features(self):
    features = feature_list.FeatureList.parse(self.write())
    with tf.Graph().as_default():
      feature_list.add_feature("b")
      feature_list.add_feature(["a", "b"])
      feature_list.add_feature_by_fids([312 << 48, 312 << 54], features)
      self.assertEqual(feature_list.get_valid_features(), ["a", "b", "f_user_id"])
      with self.assertRaisesRegex(Exception, "there is no feature for fid"):
        feature_list.add_feature_by_fids(1, features)

  def test_data_type(self):
    self.assertFalse(feature_list.is_example_batch())
    for name in ("example_batch", "EXAMPLEBATCH"):
      flags.FLAGS.data_type = name
      self.assertTrue(feature_list.is_example_batch())
    flags.FLAGS.data_type = None


if __name__ == "__main__":
  tf.test.main()
