"""parse_examples, parse_instances, parse_example_batch and parse_example_batch_list."""

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training.data import parsers
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  make_example,
  make_instance,
  make_line_id,
)

tf.compat.v1.disable_eager_execution()

FLT_MIN = np.finfo(np.float32).tiny
INVALID = np.float32(-3.4028235e38)


class _ParseTest(tf.test.TestCase):
  def parse(self, parse_fn, protos, *args, **kwargs):
    if isinstance(protos, list):
      protos = [proto.SerializeToString() for proto in protos]
    elif not isinstance(protos, bytes):
      protos = protos.SerializeToString()
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      return sess.run(parse_fn(protos, *args, **kwargs))

  def assert_bad(self, message, parse_fn, protos, *args, **kwargs):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
      self.parse(parse_fn, protos, *args, **kwargs)


class ParseExamplesTest(_ParseTest):
  def test_sparse(self):
    first = make_example({"a": [1, 2], "b": [fid_v2(5, 6)]})
    first.named_feature.add(name="v1").feature.fid_v1_list.value.append(fid_v1(200, 12345))
    sequence = make_example()
    lists = sequence.named_feature.add(name="a").feature.fid_v2_lists
    lists.list.add(value=[3])
    lists.list.add(value=[4, 5])
    out = self.parse(parsers.parse_examples, [first, sequence], ["a", "b", "v1", "none"])

    self.assertEqual(out["a"].to_list(), [[1, 2], [3, 4, 5]])
    self.assertEqual(out["b"].to_list(), [[fid_v2(5, 6)], []])
    self.assertEqual(out["v1"].to_list(), [[56294995342143545], []])
    self.assertEqual(out["none"].to_list(), [[], []])
    self.assertEqual(out["a"].row_splits.dtype, np.int64)

  def test_dense(self):
    example = make_example(label=[1, 2])
    example.named_feature.add(name="f").feature.float_list.value.extend([1, 2, 3])
    example.named_feature.add(name="d").feature.double_list.value.append(0.5)
    example.named_feature.add(name="i").feature.int64_list.value.append(7)
    example.named_feature.add(name="s").feature.bytes_list.value.append(b"x")
    example.named_feature.add(name="empty").feature.float_list.SetInParent()
    out = self.parse(
      parsers.parse_examples,
      [example, example_pb2.Example()],
      [],
      dense_features=["f", "d", "i", "s", "empty", "label", "instance_weight"],
      dense_feature_shapes=[2, 3, 2, 1, 1, 3, 1],
      dense_feature_types=[tf.float32] * 2 + [tf.int64, tf.string] + [tf.float32] * 3,
    )

    self.assertAllEqual(out["f"], [[1, 2], [0, 0]])
    self.assertAllEqual(out["d"], [[0.5, 0, 0], [0, 0, 0]])
    self.assertAllEqual(out["i"], [[7, 0], [0, 0]])
    self.assertAllEqual(out["s"], [[b"x"], [b""]])
    self.assertAllEqual(out["empty"], [[FLT_MIN], [0]])
    self.assertAllEqual(out["label"], [[1, 2, INVALID], [INVALID] * 3])
    self.assertAllEqual(out["instance_weight"], [[1], [1]])

  def test_line_id(self):
    example = make_example(uid=2**64 - 1, actions=[3, 4, 5], did="d", sample_rate=0.5, chnid=9)
    out = self.parse(
      parsers.parse_examples,
      [example, example_pb2.Example()],
      [],
      extra_features=["uid", "actions", "did", "sample_rate", "chnid"],
      extra_feature_shapes=[1, 2, 1, 1, 2],
    )

    self.assertAllEqual(out["uid"], [[-1], [0]])
    self.assertAllEqual(out["actions"], [[3, 4], [0, 0]])
    self.assertAllEqual(out["did"], [[b"d"], [b""]])
    self.assertAllEqual(out["sample_rate"], [[0.5], [1.0]])
    self.assertAllEqual(out["chnid"], [[9, 0], [0, 0]])

  def test_reserved_features(self):
    example = example_pb2.Example()
    line_id = make_line_id(uid=5).SerializeToString()
    example.named_feature.add(name="__LINE_ID__").feature.bytes_list.value.append(line_id)
    example.named_feature.add(name="__LABEL__").feature.float_list.value.extend([1, 0])
    example.named_feature.add(name="instance_weight").feature.float_list.value.append(2)
    out = self.parse(
      parsers.parse_examples,
      [example],
      [],
      ["label", "instance_weight"],
      [2, 1],
      extra_features=["uid"],
    )

    self.assertAllEqual(out["label"], [[1, 0]])
    self.assertAllEqual(out["instance_weight"], [[2]])
    self.assertAllEqual(out["uid"], [[5]])

  def test_last_of_a_name_wins(self):
    example = make_example({"a": [1]})
    example.named_feature.add(name="a").feature.fid_v2_list.value.append(2)
    self.assertEqual(self.parse(parsers.parse_examples, [example], ["a"])["a"].to_list(), [[2]])

  def test_empty_batch(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      out = sess.run(parsers.parse_examples(tf.zeros([0], tf.string), ["a"], ["f"], [2]))
    self.assertEqual(out["a"].to_list(), [])
    self.assertEqual(out["f"].shape, (0, 2))

  def test_static_shapes(self):
    with tf.Graph().as_default():
      out = parsers.parse_examples(
        tf.compat.v1.placeholder(tf.string, [None]), ["a"], ["f"], [2], extra_features=["uid"]
      )
    self.assertEqual(out["f"].shape.as_list(), [None, 2])
    self.assertEqual(out["uid"].shape.as_list(), [None, 1])
    self.assertEqual(out["uid"].dtype, tf.int64)

  def test_bad_samples(self):
    floats = example_pb2.Example()
    floats.named_feature.add(name="x").feature.float_list.value.append(1)
    ints = example_pb2.Example()
    ints.named_feature.add(name="x").feature.int64_list.SetInParent()
    bad_line_id = example_pb2.Example()
    bad_line_id.named_feature.add(name="__LINE_ID__").feature.bytes_list.value.append(b"\xff")
    parse = parsers.parse_examples

    self.assert_bad("sparse feature 'x'", parse, [floats], ["x"])
    self.assert_bad("dense feature 'x'", parse, [floats], [], ["x"], [1], [tf.int64])
    self.assert_bad("'x' is empty", parse, [ints], [], ["x"], [1], [tf.int64])
    self.assert_bad("string feature 'x' is 2", parse, [floats], [], ["x"], [2], [tf.string])
    self.assert_bad("parse the LineId", parse, [bad_line_id], ["x"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      features = parse(tf.constant([b"", b"\x0a\xff"]), ["a"])
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, r"Failed to parse the Example. pb_input\[1\]"
      ):
        sess.run(features)
      matrix = parse(tf.constant([[b""]]), ["a"])
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"pb_input has shape \[1,1\]"):
        sess.run(matrix)

  def test_bad_arguments(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(AssertionError, "deplicate names, pls check!"):
        parsers.parse_examples([b""], ["a", "a"])
      with self.assertRaisesRegex(Exception, "foo is not in line id, pls check!"):
        parsers.parse_examples([b""], ["a"], extra_features=["foo"])
      with self.assertRaisesRegex(Exception, "is_draw is not in line id, pls check!"):
        parsers.parse_examples([b""], ["a"], extra_features=["is_draw"])
      with self.assertRaises(AssertionError):
        parsers.parse_examples([b""], [], ["f"], [1, 2])
      with self.assertRaises(AssertionError):
        parsers.parse_examples([b""], [], ["f"], [0])
      with self.assertRaisesRegex(ValueError, "nothing to parse"):
        parsers.parse_examples([b""], [])

  def test_bad_attributes(self):
    ops = parsers.parse_instance_ops
    for message, attrs in {
      "length of shapes": {"names": ["a"], "shapes": [], "dtypes": [tf.int64]},
      "length of dtypes": {"names": ["a"], "shapes": [-1], "dtypes": [tf.int64]},
      "want -1 or more than 0": {"names": ["a"], "shapes": [0], "dtypes": [tf.int64]},
      "must come first": {"names": ["a", "b"], "shapes": [1, -1], "dtypes": [tf.int64] * 3},
      "'a' twice": {"names": ["a", "a"], "shapes": [1, 1], "dtypes": [tf.int64] * 2},
      "want float, int64 or string": {"names": ["a"], "shapes": [1], "dtypes": [tf.bool]},
    }.items():
      with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, message):
        ops.parse_examples([b""], extra_names=[], **attrs)

  def test_records_its_arguments(self):
    with tf.Graph().as_default(), parsers.ParserCtx() as ctx:
      parsers.parse_examples([b""], ["a"], ["f"], [1])
      self.assertEqual(ctx.parser_type, "example")
      self.assertEqual(tf.compat.v1.get_collection("sparse_features"), [["a"]])
      self.assertEqual(tf.compat.v1.get_collection("variant_type"), ["example"])

  def test_fused_layout_returns_samples(self):
    with tf.Graph().as_default(), parsers.ParserCtx(enable_fused_layout=True):
      features = parsers.parse_examples([make_example({"a": [1]}).SerializeToString()], ["a"])
      self.assertEqual(list(features), ["__sharding_sparse_fids__sparse_features"])
      self.assertEqual(list(features.values())[0].dtype, tf.variant)


class ParseInstancesTest(_ParseTest):
  def make(self):
    instance = make_instance([fid_v1(i, i) for i in range(10)], label=[1, 2], uid=3, actions=[1])
    instance.feature.add(name="v2", fid=[fid_v2(100, 1)]).fid_list.add(value=[fid_v2(100, 2)])
    instance.feature.add(name="f", float_value=[1, 2])
    instance.feature.add(name="i", int64_value=[5])
    instance.feature.add(name="s", bytes_value=[b"x", b"y"])
    return instance

  def test_v1_only(self):
    out = self.parse(parsers.parse_instances, [self.make()], [1, 11])
    self.assertEqual(out["slot_1"].to_list(), [[18014398509481985]])
    self.assertEqual(out["slot_11"].to_list(), [[]])

  def test_v2_converts_v1(self):
    out = self.parse(parsers.parse_instances, [self.make()], [1], ["v2", "none"])
    self.assertEqual(out["slot_1"].to_list(), [[281474976710657]])
    self.assertEqual(out["v2"].to_list(), [[fid_v2(100, 1), fid_v2(100, 2)]])
    self.assertEqual(out["none"].to_list(), [[]])

  def test_dense(self):
    instance = self.make()
    quantized = b"UE_QTZ" + np.array([1.5, -2], np.float16).tobytes()
    instance.feature.add(name="q", bytes_value=[quantized])
    out = self.parse(
      parsers.parse_instances,
      [instance, make_instance()],
      dense_features=["f", "i", "s", "wrong_size", "q", "label", "instance_weight"],
      dense_feature_shapes=[2, 1, 2, 3, 2, 3, 1],
      dense_feature_types=[tf.float32, tf.int64, tf.string] + [tf.float32] * 4,
      extra_features=["uid"],
    )
    self.assertAllEqual(out["f"], [[1, 2], [0, 0]])
    self.assertAllEqual(out["i"], [[5], [0]])
    self.assertAllEqual(out["s"], [[b"x", b"y"], [b"", b""]])
    self.assertAllEqual(out["q"], [[1.5, -2], [0, 0]])
    self.assertAllEqual(out["label"], [[1, 2, 0], [0, 0, 0]])
    self.assertAllEqual(out["instance_weight"], [[1], [1]])
    self.assertAllEqual(out["uid"], [[3], [0]])

  def test_names_with_slots(self):
    out = self.parse(parsers.parse_instances, [self.make()], ["fc_slot_3"])
    self.assertEqual(out["fc_slot_3"].to_list(), [[fid_v1(3, 3)]])
    with self.assertRaisesRegex(RuntimeError, "fidv1_features error"):
      self.parse(parsers.parse_instances, [self.make()], ["user"])

  def test_bad_input(self):
    self.assert_bad("slot 1024", parsers.parse_instances, [self.make()], [1024])
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Instance"):
        sess.run(parsers.parse_instances([b"\x0a\x03x"], [1]))


class ParseExampleBatchTest(_ParseTest):
  def make(self):
    batch = example_pb2.ExampleBatch(batch_size=2)
    own = batch.named_feature_list.add(name="own", id=7)
    own.feature.add().fid_v2_list.value.extend([1, 2])
    own.feature.add().fid_v1_list.value.append(fid_v1(1, 100))
    shared = batch.named_feature_list.add(name="shared", type=example_pb2.SHARED, id=8)
    shared.feature.add().fid_v2_list.value.append(9)
    dense = batch.named_feature_list.add(name="dense")
    dense.feature.add().float_list.value.append(0.5)
    dense.feature.add().float_list.SetInParent()
    label = batch.named_feature_list.add(name="__LABEL__")
    label.feature.add().float_list.value.append(1)
    label.feature.add()
    line_ids = batch.named_feature_list.add(name="__LINE_ID__")
    for uid, actions in ((1, [2]), (2, [3, 4])):
      line_id = make_line_id(uid=uid, actions=actions).SerializeToString()
      line_ids.feature.add().bytes_list.value.append(line_id)
    return batch

  def test_parse(self):
    for protos in (self.make(), [self.make()]):
      out = self.parse(
        parsers.parse_example_batch,
        protos,
        ["own", "shared", "none"],
        ["dense", "label", "instance_weight", "nodense"],
        [1, 2, 1, 2],
        extra_features=["uid"],
      )
      self.assertEqual(out["own"].to_list(), [[1, 2], [281474976710756]])
      self.assertEqual(out["shared"].to_list(), [[9], [9]])
      self.assertEqual(out["none"].to_list(), [[], []])
      self.assertAllEqual(out["dense"], [[0.5], [FLT_MIN]])
      self.assertAllEqual(out["label"], [[1, 0], [0, 0]])
      self.assertAllEqual(out["instance_weight"], [[1], [1]])
      self.assertAllEqual(out["nodense"], [[0, 0], [0, 0]])
      self.assertAllEqual(out["uid"], [[1], [2]])

  def test_shared_line_id_applies_to_all_rows(self):
    batch = example_pb2.ExampleBatch(batch_size=3)
    column = batch.named_feature_list.add(name="__LINE_ID__", type=example_pb2.SHARED)
    column.feature.add().bytes_list.value.append(make_line_id(uid=4).SerializeToString())
    out = self.parse(parsers.parse_example_batch, batch, [], extra_features=["uid"])
    self.assertAllEqual(out["uid"], [[4]] * 3)

  def test_static_batch_size(self):
    with tf.Graph().as_default(), parsers.ParserCtx() as ctx:
      ctx.set("batch_size", 2)
      out = parsers.parse_example_batch(self.make().SerializeToString(), ["own"])
    self.assertEqual(out["own"].row_splits.shape.as_list(), [3])

  def test_bad_input(self):
    batch = example_pb2.ExampleBatch(batch_size=3)
    batch.named_feature_list.add(name="a").feature.add()
    with self.assertRaisesRegex(tf.errors.OutOfRangeError, "a has 1 values and batch_size is 3"):
      self.parse(parsers.parse_example_batch, batch, ["a"])
    negative = example_pb2.ExampleBatch(batch_size=-1)
    self.assert_bad(
      "batch_size of the ExampleBatch is -1", parsers.parse_example_batch, negative, ["a"]
    )
    self.assert_bad("Failed to parse the ExampleBatch", parsers.parse_example_batch, b"\xff", ["a"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "at least one element"):
        sess.run(parsers.parse_example_batch(tf.zeros([0], tf.string), ["a"]))

  def test_list(self):
    other = example_pb2.ExampleBatch(batch_size=2)
    column = other.named_feature_list.add(name="more", id=20)
    for fid in (fid_v2(1, 5), fid_v2(2, 6)):
      column.feature.add().fid_v2_list.value.append(fid)
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      with parsers.ParserCtx(enable_fused_layout=True):
        variants = [
          parsers.parse_example_batch(batch.SerializeToString(), [])[
            parsers.ParserCtx.sharding_sparse_fids_sparse_features_key
          ]
          for batch in (self.make(), other)
        ]
      out = sess.run(
        parsers.parse_example_batch_list(
          variants,
          label_config="2:4;3:5",
          names=["own", "more", "uid"],
          shapes=[-1, -1, 1],
          dtypes=[tf.int64] * 3,
          extra_features=["uid"],
        )
      )
    self.assertEqual(out["own"].to_list(), [[fid_v2(7, 1), fid_v2(7, 2)], [fid_v2(7, 100)]])
    self.assertEqual(out["more"].to_list(), [[fid_v2(20, 5)], [fid_v2(20, 6)]])
    self.assertAllEqual(out["uid"], [[1], [2]])
    self.assertAllEqual(out["label"], [[1, INVALID], [0, 1]])


class LabelConfigTest(tf.test.TestCase):
  def test_parse(self):
    config = parsers.parse_label_config("1,2:3:1.0;4::0.5")
    self.assertEqual([list(task.pos_actions) for task in config.conf], [[1, 2], [4]])
    self.assertEqual([list(task.neg_actions) for task in config.conf], [[3], []])
    self.assertEqual([task.sample_rate for task in config.conf], [1.0, 0.5])

  def test_rejects_contradictions(self):
    for config in (":1", "1:1", "1:2:3:4"):
      with self.assertRaises(ValueError):
        parsers.parse_label_config(config)


if __name__ == "__main__":
  tf.test.main()
