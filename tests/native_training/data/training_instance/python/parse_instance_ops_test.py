"""parse_instances, parse_instances2 and the raw op."""

import numpy as np
import tensorflow as tf

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training.data.training_instance.python import parse_instance_ops
from tests.native_training.data.data_test_utils import fid_v1, fid_v2, make_line_id

tf.compat.v1.disable_eager_execution()


def make_instance():
  instance = proto_parser_pb2.Instance(
    fid=[fid_v1(i, i) for i in range(10)],
    label=[1.0, 2.0],
    line_id=make_line_id(uid=100, req_time=64, sample_rate=0.5, actions=[0, 100], did="x"),
  )
  instance.feature.add(name="fidv2", fid=[fid_v2(100, i) for i in range(10)])
  instance.feature.add(name="float", float_value=[float(i) for i in range(8)])
  instance.feature.add(name="int", int64_value=[7])
  instance.feature.add(name="string", bytes_value=[b"abc"])
  return instance.SerializeToString()


class ParseInstancesTest(tf.test.TestCase):
  def run_op(self, fn, *args, **kwargs):
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      return sess.run(fn(*args, **kwargs))

  def test_with_fidv2(self):
    out = self.run_op(
      parse_instance_ops.parse_instances2,
      [make_instance()],
      fidv1_features=[1, 200],
      fidv2_features=["fidv2", "missing"],
      float_features=["float", "missing_float"],
      float_feature_dims=[8, 8],
      int64_features=["int"],
      int64_feature_dims=[1],
      string_features=["string", "missing_string"],
      string_feature_dims=[1, 10],
      misc_float_features=["sample_rate", "label", "instance_weight"],
      misc_float_dims=[1, 2, 1],
      misc_int64_features=["req_time", "uid", "actions"],
      misc_int64_dims=[1, 1, 3],
      misc_string_features=["did"],
      misc_string_dims=[1],
    )
    self.assertEqual(out["slot_1"].to_list(), [[281474976710657]])
    self.assertEqual(out["slot_200"].to_list(), [[]])
    self.assertEqual(out["fidv2"].to_list(), [[fid_v2(100, i) for i in range(10)]])
    self.assertEqual(out["missing"].to_list(), [[]])
    self.assertAllEqual(out["float"], [np.arange(8)])
    self.assertAllEqual(out["missing_float"], np.zeros([1, 8]))
    self.assertAllEqual(out["int"], [[7]])
    self.assertAllEqual(out["string"], [[b"abc"]])
    self.assertAllEqual(out["missing_string"], [[b""] * 10])
    self.assertAllEqual(out["label"], [[1, 2]])
    self.assertAllEqual(out["instance_weight"], [[1]])
    self.assertAllEqual(out["actions"], [[0, 100, 0]])
    self.assertAllEqual(out["did"], [[b"x"]])

  def test_without_fidv2(self):
    out = self.run_op(parse_instance_ops.parse_instances2, [make_instance()], [1])
    self.assertEqual(out["slot_1"].to_list(), [[18014398509481985]])

  def test_scalars_lose_their_dimension(self):
    out = self.run_op(parse_instance_ops.parse_instances, [make_instance()] * 2, [1])
    self.assertAllEqual(out["sample_rate"], [0.5, 0.5])
    self.assertAllEqual(out["uid"], [100, 100])
    self.assertAllEqual(out["label"], [[1], [1]])

  def test_concat(self):
    out = self.run_op(
      parse_instance_ops.monolith_raw_parse_instance,
      [make_instance()],
      T=[tf.int64, tf.int64, tf.float32],
      fidv1_features=[0, 1],
      fidv2_features=["fidv2"],
      float_features=["float"],
      float_feature_dims=[8],
      collapse_batch_dim=True,
      fid_output_type="CONCAT",
    )
    self.assertAllEqual(out[0], [0, 1, 2, 12])
    self.assertAllEqual(out[1][:3], [0, 281474976710657, fid_v2(100, 0)])
    self.assertAllEqual(out[2], np.arange(8))

  def test_regular_raw(self):
    out = self.run_op(
      parse_instance_ops.monolith_raw_parse_instance,
      [make_instance()] * 2,
      T=[tf.int64] * 4,
      fidv1_features=[0, 1],
    )
    self.assertAllEqual(out[0], [0, 1, 2])
    self.assertAllEqual(out[3], [fid_v1(1, 1)] * 2)

  def test_bad_input(self):
    raw = parse_instance_ops.monolith_raw_parse_instance
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "2 Instances, want 1"):
      self.run_op(raw, [make_instance()] * 2, T=[tf.int64] * 2, fid_output_type="CONCAT")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"T\[1\] is float, want int64"):
      self.run_op(raw, [make_instance()], T=[tf.int64, tf.float32], fidv1_features=[0])
    with self.assertRaisesRegex(ValueError, "number of outputs"):
      self.run_op(raw, [make_instance()], T=[tf.int64] * 3, fidv1_features=[0])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Instance"):
      self.run_op(parse_instance_ops.parse_instances2, [b"\xff"], [1])
    with self.assertRaisesRegex(ValueError, "slot 1 twice"):
      self.run_op(parse_instance_ops.parse_instances2, [b""], [1, 1])
    with self.assertRaisesRegex(ValueError, "requested as int64, but is float"):
      self.run_op(
        parse_instance_ops.parse_instances2,
        [b""],
        misc_int64_features=["sample_rate"],
        misc_int64_dims=[1],
      )
    with self.assertRaisesRegex(ValueError, "float_feature_dims"):
      self.run_op(parse_instance_ops.parse_instances2, [b""], float_features=["x"])


if __name__ == "__main__":
  tf.test.main()
