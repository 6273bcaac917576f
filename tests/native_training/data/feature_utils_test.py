"""Tests of filters, label ops and small ops in `feature_utils`, and of `sample_conversions`."""

import os
import struct

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training.data import feature_utils, parsers
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  frame,
  make_example,
  make_instance,
  proto_of,
)

INVALID = np.float32(-3.4028235e38)


def variant_of(sample):
  kind = {"Example": "example", "Instance": "instance", "ExampleBatch": "example_batch"}
  name = kind[type(sample).__name__]
  return feature_utils.string_to_variant(sample.SerializeToString(), name), name


def labels_of(variant, width, kind="example"):
  if kind == "instance":
    out = parsers.parse_instances(
      variant[None], dense_features=["label"], dense_feature_shapes=[width]
    )
  else:
    out = parsers.parse_examples(variant[None], [], ["label"], [width])
  return out["label"].numpy()[0].tolist()


def line_id_of(variant, name, width=1):
  out = parsers.parse_examples(
    variant[None], [], extra_features=[name], extra_feature_shapes=[width]
  )
  return out[name].numpy()[0].tolist()


class FilterTest(tf.test.TestCase):
  def test_filter_by_fids(self):
    v1, v2 = fid_v1(1000, 5), fid_v2(7, 6)
    instance = make_instance([v1], uid=1, req_time=100, actions=[2])
    instance.feature.add(name="x", fid=[v2])
    example = make_example({"b": [v2]}, uid=1, req_time=100, actions=[2])
    example.named_feature.add(name="a").feature.fid_v1_list.value.append(v1)
    for sample, v2_counts in ((instance, False), (example, True)):
      variant, kind = variant_of(sample)

      def keeps(variant=variant, kind=kind, **kwargs):
        return bool(feature_utils.filter_by_fids(variant, variant_type=kind, **kwargs))

      self.assertTrue(keeps())
      self.assertFalse(keeps(filter_fids=[v1]))
      self.assertTrue(keeps(filter_fids=[4]))
      self.assertTrue(keeps(has_fids=[4, v1]))
      self.assertFalse(keeps(has_fids=[4]))
      self.assertEqual(keeps(select_fids=[v1, v2]), v2_counts)
      self.assertFalse(keeps(select_fids=[v1, 4]))
      self.assertTrue(keeps(select_slots=[1000, 7]))
      self.assertFalse(keeps(select_slots=[1000, 8]))
      self.assertTrue(keeps(has_actions=[1, 2]))
      self.assertFalse(keeps(has_actions=[1]))
      self.assertTrue(keeps(req_time_min=100))
      self.assertFalse(keeps(req_time_min=1 << 40))

  def test_filter_by_value(self):
    variant, _ = variant_of(
      make_example(uid=2, actions=[3, 2], did="hello", video_play_time=0.5, req_id="huggle")
    )

    def keeps(*args, **kwargs):
      return bool(feature_utils.filter_by_value(variant, *args, variant_type="example", **kwargs))

    self.assertTrue(keeps("uid", "between", [1, 3]))
    self.assertFalse(keeps("uid", "neq", 2))
    self.assertTrue(keeps("actions", "any", [1, 2]))
    self.assertFalse(keeps("actions", "any", [1, 4]))
    self.assertTrue(keeps("actions", "all", [2, 3]))
    self.assertFalse(keeps("actions", "all", [2, 3, 4]))
    self.assertTrue(keeps("actions", "diff", [1, 4]))
    self.assertFalse(keeps("actions", "diff", [1, 2, 4]))
    self.assertTrue(keeps("did", "le", "hello1"))
    self.assertTrue(keeps("did", "ge", "hell"))
    self.assertTrue(keeps("did", "in", ["x", "hello"]))
    self.assertTrue(keeps("req_id", "startswith", ["hu", "x"]))
    self.assertTrue(keeps("req_id", "endswith", ["x", "gle"]))
    self.assertTrue(keeps("video_play_time", "eq", 0.5))
    self.assertFalse(keeps("pre_actions", "any", [1]))
    self.assertTrue(keeps("pre_actions", "any", [1], keep_empty=True))

  def test_filter_by_value_file(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "operands")
    values = example_pb2.FilterValues()
    values.int64_list.value.extend([1, 2])
    with open(path, "wb") as stream:
      stream.write(values.SerializeToString())
    variant, _ = variant_of(make_example(uid=2))

    def keeps(field, op, operand=None):
      return bool(
        feature_utils.filter_by_value(
          variant, field, op, operand, variant_type="example", operand_filepath=path
        )
      )

    self.assertTrue(keeps("uid", "in"))
    self.assertFalse(keeps("uid", "not-in"))
    with self.assertRaises(AssertionError):
      keeps("uid", "gt")
    with self.assertRaises(AssertionError):
      keeps("uid", "in", [1])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want a list of string"):
      keeps("did", "in")
    with open(path, "wb") as stream:
      stream.write(b"\xff")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "not a serialized FilterValues"):
      keeps("item_id", "in")

  def test_filter_by_feature_value(self):
    example = make_example()
    example.named_feature.add(name="i").feature.int64_list.value.append(5)
    example.named_feature.add(name="l").feature.int64_list.value.extend([1, 2])
    example.named_feature.add(name="f").feature.float_list.value.append(0.1)
    example.named_feature.add(name="d").feature.double_list.value.append(0.1)
    example.named_feature.add(name="b").feature.bytes_list.value.append(b"abc")
    variant, _ = variant_of(example)

    def keeps(*args, **kwargs):
      return bool(feature_utils.filter_by_feature_value(variant, *args, **kwargs))

    self.assertTrue(keeps("i", "gt", 4, "int64"))
    self.assertTrue(keeps("l", "all", [1, 2], "int64"))
    self.assertFalse(keeps("l", "gt", 0, "int64"))
    self.assertTrue(keeps("f", "eq", 0.1, "float"))
    self.assertTrue(keeps("d", "eq", 0.1, "double"))
    self.assertTrue(keeps("b", "startswith", "ab", "bytes"))
    self.assertFalse(keeps("none", "eq", 1, "int64"))
    self.assertTrue(keeps("none", "eq", 1, "int64", keep_empty=True))
    self.assertTrue(keeps("f", "eq", 1, "int64", keep_empty=True))
    instance, _ = variant_of(make_instance())
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "input must be Example proto"):
      feature_utils.filter_by_feature_value(instance, "i", "gt", 4, "int64")

  def test_filter_by_label(self):
    variant, _ = variant_of(make_example(label=[0, 1]))

    def keeps(*args, **kwargs):
      return bool(feature_utils.filter_by_label(variant, *args, **kwargs))

    self.assertTrue(keeps([0.5, 0.5]))
    self.assertFalse(keeps([0.5, 1.5]))
    self.assertTrue(keeps([0.5, 1.0]))
    self.assertFalse(keeps([0.5, 1.0], filter_equal=True))
    self.assertFalse(keeps([-1, -1, -1]))

  def test_special_strategy(self):
    variant, kind = variant_of(make_instance(label=[5], special_strategies=[7, 8]))

    def keeps(*args, **kwargs):
      return bool(feature_utils.special_strategy(variant, *args, **kwargs))

    self.assertTrue(keeps([8, 9]))
    self.assertFalse(keeps([9]))
    self.assertFalse(keeps([8, 7], "8:0.0"))
    self.assertTrue(keeps([7], "7:1.0:3"))
    self.assertEqual(labels_of(variant, 1, kind), [3])
    empty, _ = variant_of(make_instance())
    self.assertTrue(bool(feature_utils.special_strategy(empty, [1])))
    self.assertFalse(bool(feature_utils.special_strategy(empty, [1], keep_empty_strategy=False)))

  def test_negative_sample(self):
    positive, _ = variant_of(make_instance(label=[1]))
    negative, _ = variant_of(make_instance(label=[-1], actions=[2, 9]))
    self.assertTrue(bool(feature_utils.negative_sample(positive, 1.0)))
    self.assertFalse(bool(feature_utils.negative_sample(negative, 1.0)))
    self.assertTrue(bool(feature_utils.negative_sample(negative, 0.0)))
    by_action = {"action_priority": "3,2", "per_action_drop_rate": "1:1.0,2:0.0"}
    self.assertTrue(bool(feature_utils.negative_sample(negative, 1.0, **by_action)))
    kept = sum(bool(feature_utils.negative_sample(negative, 0.5)) for _ in range(400))
    self.assertBetween(kept, 130, 270)

  def test_bad_input(self):
    example, _ = variant_of(make_example(uid=1))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want monolith::Instance"):
      feature_utils.filter_by_fids(example, variant_type="instance")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "variant_type is 'foo'"):
      feature_utils.filter_by_fids(example, variant_type="foo")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "op is 'like'"):
      feature_utils.filter_by_value(example, "uid", "like", 1, "example")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want rank 0"):
      feature_utils.filter_by_fids(example[None], variant_type="example")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "between has 1 operands"):
      feature_utils.filter_by_value(example, "uid", "between", [1], "example")
    with self.assertRaisesRegex(ValueError, "not a field of LineId"):
      feature_utils.filter_by_value(example, "foo", "eq", 1)
    with self.assertRaisesRegex(ValueError, "does not fit into 64 bits"):
      feature_utils.filter_by_fids(example, filter_fids=[1 << 64])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "strategy_conf"):
      feature_utils.special_strategy(example, [1], "1", "example")


class LabelTest(tf.test.TestCase):
  def test_add_label(self):
    samples = [
      make_example(actions=actions).SerializeToString() for actions in ([1, 2, 4], [1], [3, 4], [5])
    ] * 100
    dataset = (
      tf.data.Dataset.from_tensor_slices(samples)
      .map(feature_utils.string_to_variant)
      .map(lambda x: feature_utils.add_label(x, "1,2:3:1.0;4::0.5", 0.0, 0.5))
      .filter(lambda x: feature_utils.filter_by_label(x, [-100, -100]))
    )
    kept = list(dataset)
    self.assertBetween(len(kept), 320, 380)
    self.assertEqual(labels_of(kept[0], 2), [1, 1])
    self.assertEqual(line_id_of(kept[0], "sample_rate"), [0.5])

  def test_add_label_invalidates_the_old_negative(self):
    variant, _ = variant_of(make_example(label=[0], actions=[1]))
    out = feature_utils.add_label(variant, "1:2:1.0", 0.0, 1.0)
    self.assertEqual(labels_of(out, 2), [INVALID, 1])
    self.assertEqual(labels_of(variant, 1), [0])

  def test_scatter_label(self):
    config = "100:3,200:1,300:4"
    variant, _ = variant_of(make_example(label=[7], chnid=200))
    out = feature_utils.scatter_label(variant, config)
    self.assertEqual(labels_of(out, 5), [INVALID, 7, INVALID, INVALID, INVALID])
    variant, _ = variant_of(make_example(label=[7], chnid=5))
    self.assertEqual(labels_of(feature_utils.scatter_label(variant, config), 5), [INVALID] * 5)

  def test_label_upper_bound_and_normalization(self):
    variant, kind = variant_of(make_instance(label=[0, 1]))
    bounded = feature_utils.label_upper_bound(variant, [0.5, 0.5])
    self.assertEqual(labels_of(bounded, 2, kind), [0, 0.5])
    same = feature_utils.label_upper_bound(variant, [0.5] * 3)
    self.assertEqual(labels_of(same, 2, kind), [0, 1])
    scaled = feature_utils.label_normalization(variant, ["scale", "repow"], [0.5, 3])
    self.assertEqual(labels_of(scaled, 2, kind), [0, 8])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "norm_methods has 'exp'"):
      feature_utils.label_normalization(variant, ["exp"], [1])

  def test_use_field_as_label(self):
    variant, kind = variant_of(make_instance(label=[0, 1], sample_rate=1.0))
    out = feature_utils.use_field_as_label(variant, "sample_rate")
    self.assertEqual(labels_of(out, 2, kind), [1, 1])
    variant, kind = variant_of(make_instance(label=[0, 0.5], sample_rate=1.0))
    out = feature_utils.use_field_as_label(variant, "sample_rate", True, 0.9)
    self.assertEqual(labels_of(out, 2, kind), [0, 0.5])

  def test_multi_label_gen(self):
    variant, _ = variant_of(make_example(label=[9], chnid=5, actions=[1, 4]))

    def generate(**kwargs):
      return labels_of(feature_utils.multi_label_gen(variant, {5: 1, 6: 2}, **kwargs), 3)

    self.assertEqual(generate(use_origin_label=True), [INVALID, 9, INVALID])
    kwargs = {"pos_actions": [4], "neg_actions": [1]}
    self.assertEqual(generate(action_priority="4,3,2,1,0", **kwargs), [INVALID, 1, INVALID])
    self.assertEqual(generate(action_priority="1,4", **kwargs), [INVALID, 0, INVALID])
    self.assertEqual(generate(action_priority="7", **kwargs), [INVALID, 0, INVALID])
    self.assertEqual(generate(pos_actions=[3]), [INVALID] * 3)
    by_name = feature_utils.multi_label_gen(
      variant_of(make_example(label=[2], cid="x"))[0], {"x": 0}, "cid", use_origin_label=True
    )
    self.assertEqual(labels_of(by_name, 1), [2])

  def test_fill_multi_rank_output(self):
    variant, kind = variant_of(make_instance(label=[1], is_draw=True, chnid=7, rank=30))

    def fill(**kwargs):
      return labels_of(feature_utils.fill_multi_rank_output(variant, **kwargs), 2, kind)

    self.assertEqual(fill(enable_draw_as_rank=True), [1, 1])
    self.assertEqual(fill(enable_chnid_as_rank=True), [1, 2])
    self.assertEqual(fill(enable_lineid_rank_as_rank=True), [1, 17])

  def test_add_action(self):
    variant, _ = variant_of(make_example(video_finish_percent=0.8, actions=[1]))
    out = feature_utils.add_action(variant, "video_finish_percent", "gt", 0.5, 9)
    self.assertEqual(line_id_of(out, "actions", 2), [1, 9])
    out = feature_utils.add_action(variant, "video_finish_percent", "lt", 0.5, 9)
    self.assertEqual(line_id_of(out, "actions", 2), [1, 0])

  def test_f100_is_not_supported(self):
    with self.assertRaises(NotImplementedError):
      feature_utils.use_f100_multi_head(None)


class SmallOpsTest(tf.test.TestCase):
  def test_switch_slot(self):
    ragged = tf.ragged.constant([[fid_v2(305, 4)], [], [fid_v2(2, 5), 6]], dtype=tf.int64)
    out = feature_utils.switch_slot(ragged, 306)
    self.assertEqual(out.to_list(), [[fid_v2(306, 4)], [], [fid_v2(306, 5), fid_v2(306, 6)]])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "slot is 32768"):
      feature_utils.switch_slot(ragged, 32768)

  def test_feature_combine(self):
    first = tf.ragged.constant([[fid_v2(1, 3), 3], []], dtype=tf.int64)
    second = tf.ragged.constant([[fid_v2(2, 5), 5], [1]], dtype=tf.int64)
    out = feature_utils.feature_combine(first, second, 505).to_list()
    self.assertEqual(out[1], [])
    self.assertLen(out[0], 4)
    self.assertEqual((out[0][0], out[0][3]), (142144871828815887, 142144863238881295))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "splits of src1"):
      feature_utils.feature_combine(first, second[:1], 505)

  def test_extract_fid(self):
    out = feature_utils.ragged_data_ops.extract_fid(tf.constant(185, tf.int64), slot=4)
    self.assertEqual(int(out), 1153447759131936)

  def test_map_id(self):
    for dtype in (tf.int32, tf.int64):
      out = feature_utils.map_id(tf.constant([123, 456, 789, 912], dtype), {123: 0, 456: 1, 789: 2})
      self.assertAllEqual(out, [0, 1, 2, -1])

  def test_gen_fid_mask(self):
    ragged = tf.ragged.constant([[1, 2, 3], [3], [], [4]], dtype=tf.int64)
    self.assertAllEqual(feature_utils.gen_fid_mask(ragged, 3), [1, 1, 0, 0])
    with self.assertRaises(tf.errors.InvalidArgumentError):
      feature_utils.ragged_data_ops.monolith_gen_fid_mask([0, 9], tf.zeros([1], tf.int64), fid=3)

  def test_switch_slot_batch(self):
    example = make_example({"a": [fid_v2(1, 5)], "b": [fid_v2(2, 6)]})
    variant, _ = variant_of(example)
    out = feature_utils.switch_slot_batch(variant, {"a": (True, 10), "b": (False, 11)}, "example")
    out = parsers.parse_examples(out[None], ["a", "b", "b_share"])
    self.assertEqual(
      {name: value.to_list() for name, value in out.items()},
      {"a": [[fid_v2(10, 5)]], "b": [[fid_v2(2, 6)]], "b_share": [[fid_v2(11, 6)]]},
    )
    batch = example_pb2.ExampleBatch(batch_size=1)
    batch.named_feature_list.add(name="a").feature.add().fid_v1_list.value.append(fid_v1(3, 5))
    out = feature_utils.switch_slot_batch(variant_of(batch)[0], {"a": (True, 2000)})
    out = parsers.parse_example_batch(out, ["a"])
    self.assertEqual(out["a"].to_list(), [[fid_v2(2000, 5)]])

  def test_feature_hash(self):
    def make(**lists):
      example = example_pb2.Example()
      for slot, (name, values) in enumerate(lists.items(), start=4):
        kind = name.split("_")[0]
        named = example.named_feature.add(name=name, id=slot)
        getattr(named.feature, f"{kind}_list").value.extend(values)
      return example

    long = b"a text of more than sixty-four bytes, " * 2
    first = make(int64_a=[185, -1], bytes_b=[b"", b"ab", long], int64_c=[7], float_d=[0.5])
    first.named_feature.add(name="empty")
    second = make(int64_a=[])
    second.named_feature.add(name="fids", id=9).feature.fid_v2_list.value.append(5)
    variants = tf.stack([variant_of(first)[0], variant_of(second)[0]])
    out = feature_utils.ragged_data_ops.feature_hash(
      variants, names=["int64_a", "bytes_b", "fids", "empty", "missing"]
    )

    self.assertEqual(out.shape, [2])
    changed = [proto_of(out[i], example_pb2.Example) for i in range(2)]
    named = {feature.name: feature.feature for feature in changed[0].named_feature}
    # Integers must hash as in ExtractFid, text as in the published CityHash64.
    self.assertEqual(
      list(named["int64_a"].fid_v2_list.value),
      [1153447759131936, int(feature_utils.ragged_data_ops.extract_fid(-1, slot=4))],
    )
    self.assertEqual(
      list(named["bytes_b"].fid_v2_list.value),
      [fid_v2(5, 116802433597519), fid_v2(5, 121299585049886), fid_v2(5, 157135588608189)],
    )
    self.assertEqual(named["int64_c"], first.named_feature[2].feature)
    self.assertEqual(named["float_d"], first.named_feature[3].feature)
    self.assertIsNone(named["empty"].WhichOneof("type"))
    self.assertEqual(changed[1].named_feature[1], second.named_feature[1])
    self.assertEmpty(changed[1].named_feature[0].feature.fid_v2_list.value)
    self.assertEqual(proto_of(variants[0], example_pb2.Example), first)  # the input is unchanged

  def test_feature_hash_of_bad_input(self):
    example = example_pb2.Example()
    example.named_feature.add(name="floats", id=3).feature.float_list.value.append(0.5)
    example.named_feature.add(name="no_slot").feature.int64_list.value.append(1)
    example.named_feature.add(name="big", id=32768).feature.bytes_list.value.append(b"x")
    variant = variant_of(example)[0]
    hash_op = feature_utils.ragged_data_ops.feature_hash
    for names, message in (
      (["floats"], "feature 'floats' holds neither integers nor text"),
      (["no_slot"], "the id of feature 'no_slot' is 0, want a slot from 1 to 32767"),
      (["big"], "the id of feature 'big' is 32768"),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        hash_op(variant[None], names=names)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want a vector|rank 1"):
      hash_op(variant, names=[])
    instance = variant_of(make_instance())[0]
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want monolith::Example"):
      hash_op(instance[None], names=[])

  def test_string_to_variant(self):
    strings = [[make_example(uid=3).SerializeToString(), b""]]
    out = feature_utils.string_to_variant(strings)
    self.assertEqual(out.shape, (1, 2))
    self.assertAllEqual(feature_utils.variant_to_zeros(out), [[0, 0]])
    self.assertTrue(bool(feature_utils.has_variant(out[0, 0])))
    self.assertFalse(bool(feature_utils.has_variant(out[0, 1])))
    framed = frame(make_example(uid=3).SerializeToString(), struct.pack("<Q", 2) + b"ab")
    out = feature_utils.string_to_variant(framed, has_header=True, has_sort_id=True)
    self.assertEqual(line_id_of(out, "uid"), [3])
    with self.assertRaisesRegex(tf.errors.DataLossError, "truncated record"):
      feature_utils.string_to_variant(framed[:-1], has_header=True, has_sort_id=True)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Example"):
      feature_utils.string_to_variant(b"\xff\xff")

  def test_data_sources(self):
    example = make_example(chnid=2).SerializeToString()
    out = feature_utils.string_to_variant(
      example, chnids=[1, 2], datasources=["pc", "mobile"], default_datasource="cloud"
    )
    self.assertEqual(proto_of(out, example_pb2.Example).data_source_key, 1250992640)
    out = feature_utils.string_to_variant(
      make_example(chnid=3).SerializeToString(), default_datasource="cloud"
    )
    self.assertEqual(proto_of(out, example_pb2.Example).data_source_key, 2782803200)

  def test_string_to_variant_with_transform(self):
    batch = example_pb2.ExampleBatch(batch_size=2)
    column = batch.named_feature_list.add(name="a")
    for fid in (1, 2):
      column.feature.add().fid_v2_list.value.append(fid)
    strings = [batch.SerializeToString()]
    out = feature_utils.string_to_variant_with_transform(strings, "examplebatch", "example")
    self.assertEqual(parsers.parse_examples(out, ["a"])["a"].to_list(), [[1], [2]])
    out = feature_utils.string_to_variant_with_transform(strings, "examplebatch", "instance")
    out = parsers.parse_instances(out, fidv2_features=["a"])
    self.assertEqual(out["a"].to_list(), [[1], [2]])

  def test_tf_example_to_example(self):
    source = tf.train.Example()
    source.features.feature["ids"].int64_list.value.extend([7])
    source.features.feature["price"].float_list.value.extend([0, 1, 2.5, -3, 7])
    source.features.feature["dense"].float_list.value.extend([0.5])
    source.features.feature["y"].float_list.value.extend([1])
    source.features.feature["w"].float_list.value.extend([2])
    source.features.feature["other"].int64_list.value.extend([1])
    variant = feature_utils.tf_example_to_example(
      source.SerializeToString(), {"ids": 2, "price": 3}, ["dense"], "y", "w"
    )
    out = parsers.parse_examples(
      variant[None], ["ids", "price", "other"], ["dense", "label", "instance_weight"], [1, 1, 1]
    )
    self.assertEqual(out["ids"].to_list(), [[fid_v2(2, 7)]])
    base = 844424930131968
    self.assertEqual(out["price"].to_list(), [[base, base + 1, base + 1, base + 2, base + 3]])
    self.assertEqual(out["other"].to_list(), [[]])
    self.assertAllEqual(out["dense"], [[0.5]])
    self.assertAllEqual(out["label"], [[1]])
    self.assertAllEqual(out["instance_weight"], [[2]])
    with self.assertRaisesRegex(tf.errors.DataLossError, "Corrupted data!"):
      feature_utils.tf_example_to_example(b"\xff", {"ids": 2}, [], "y")
    for sparse, dense in (({"a": 1, "b": 1}, []), ({"a": 0}, []), ({"a": 1}, ["a"])):
      with self.assertRaises(AssertionError):
        feature_utils.tf_example_to_example(b"", sparse, dense, "y")


if __name__ == "__main__":
  tf.test.main()
