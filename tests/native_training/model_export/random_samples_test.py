"""Tests of single random samples."""

import inspect
import os
import random

import tensorflow as tf

from idl.matrix.proto import example_pb2, feature_pb2, line_id_pb2
from monolith.native_training import utils
from monolith.native_training.data import feature_list
from monolith.native_training.data import utils as data_utils
from monolith.native_training.model_export import data_gen_utils
from monolith.native_training.model_export.data_gen_utils import (
  FeatureMeta,
  fill_features,
  fill_line_id,
  gen_example,
  gen_example_batch,
  gen_fids_v1,
  gen_fids_v2,
  gen_instance,
)

_DENSE = [
  FeatureMeta("label", shape=2),
  FeatureMeta("floats", shape=3),
  FeatureMeta("ints", shape=2, dtype=tf.int64),
  FeatureMeta("text", dtype=tf.string),
]
_EXTRA = [FeatureMeta("uid"), FeatureMeta("pre_actions", shape=2)]


class FeatureMetaTest(tf.test.TestCase):
  def test_defaults(self):
    for meta, want in (
      (FeatureMeta("price"), (None, 1, tf.float32, False)),
      (FeatureMeta("user", 3), (3, -1, tf.int64, False)),
      (FeatureMeta("uid"), (None, 1, tf.int64, True)),
      (FeatureMeta("uid", slot=3), (3, -1, tf.int64, True)),
      (FeatureMeta("sample_rate"), (None, 1, tf.float32, True)),
      (FeatureMeta("did"), (None, 1, tf.string, True)),
      (FeatureMeta("is_draw"), (None, 1, tf.bool, True)),
      (FeatureMeta("did", extra=False), (None, 1, tf.float32, False)),
      (FeatureMeta("uid", 3, 2, "float32", True), (3, 2, tf.float32, True)),
    ):
      self.assertEqual((meta.slot, meta.shape, meta.dtype, meta.extra), want)

  def test_errors(self):
    with self.assertRaisesRegex(ValueError, "'price' is no field of LineId"):
      FeatureMeta("price", extra=True)
    with self.assertRaisesRegex(ValueError, "shape of 'price' is -2"):
      FeatureMeta("price", shape=-2)


class SignatureTest(tf.test.TestCase):
  def test_parameters(self):
    rest = "dense_features=None,extra_features=None,feature_list=None,"
    dropped = "drop_rate=0,actions=None"
    for function, want in (
      (gen_example, f"sparse_features,{rest}{dropped}"),
      (gen_example_batch, f"sparse_features,{rest}batch_size=64,{dropped}"),
      (gen_instance, f"fidv1_features=None,fidv2_features=None,{rest}{dropped}"),
      (fill_line_id, "line_id,features=None,hash_len=48,actions=None"),
      (fill_features, "feature,meta,drop_rate=0"),
      (FeatureMeta, "name,slot=None,shape=None,dtype=None,extra=None"),
      (data_gen_utils.gen_warmup_file, "warmup_file=None,drop_rate=None"),
    ):
      parameters = inspect.signature(function).parameters.values()
      empty = inspect.Parameter.empty
      got = [p.name if p.default is empty else f"{p.name}={p.default}" for p in parameters]
      self.assertEqual(",".join(got), want)


class FidsTest(tf.test.TestCase):
  def test_slots(self):
    for slot in (0, 1, 1023):
      fids = gen_fids_v1(slot, 20)
      self.assertEqual({fid >> 54 for fid in fids}, {slot})
      self.assertLen(set(fids), 20)
    for slot in (0, 1, 32767):
      fids = gen_fids_v2(slot, 20)
      self.assertEqual({fid >> 48 for fid in fids}, {slot})
    self.assertLen(gen_fids_v1(1), 1)
    self.assertEqual(gen_fids_v2(1, size=0), [])

  def test_no_such_slot(self):
    with self.assertRaisesRegex(ValueError, "slot should be less than 1024, while got 1024"):
      gen_fids_v1(1024)
    with self.assertRaisesRegex(ValueError, "slot should be less than 32768, while got 32768"):
      gen_fids_v2(32768)
    with self.assertRaisesRegex(ValueError, "while got -1"):
      gen_fids_v1(-1)

  def test_seed(self):
    random.seed(5)
    first = gen_example(["user"], _DENSE, _EXTRA)
    random.seed(5)
    self.assertEqual(gen_example(["user"], _DENSE, _EXTRA), first)
    self.assertNotEqual(gen_example(["user"], _DENSE, _EXTRA), first)


class FillTest(tf.test.TestCase):
  def test_features_of_both_protos(self):
    for meta, of_example, of_instance in (
      (FeatureMeta("a", 7, shape=2), "fid_v2_list", "fid"),
      (FeatureMeta("a", shape=2), "float_list", "float_value"),
      (FeatureMeta("a", shape=2, dtype=tf.int32), "int64_list", "int64_value"),
      (FeatureMeta("a", shape=2, dtype=tf.string), "bytes_list", "bytes_value"),
      (FeatureMeta("a", 7, shape=2, dtype=tf.float32), "float_list", "float_value"),
    ):
      example = example_pb2.Feature()
      fill_features(example, meta)
      self.assertEqual(example.WhichOneof("type"), of_example)
      values = getattr(example, of_example).value
      self.assertLen(values, 2)
      if of_instance == "fid":
        self.assertEqual({fid >> 48 for fid in values}, {7})

      instance = feature_pb2.Feature()
      fill_features(instance, meta)
      ((field, values),) = instance.ListFields()
      self.assertEqual((field.name, len(values)), (of_instance, 2))

  def test_any_number_of_ids(self):
    counts = set()
    for _ in range(200):
      feature = feature_pb2.Feature()
      fill_features(feature, FeatureMeta("a", 7))
      counts.add(len(feature.fid))
    self.assertEqual(counts, {1, 2, 3, 4})

  def test_dropped_features_stay(self):
    for proto in (example_pb2.Feature, feature_pb2.Feature):
      feature = proto()
      fill_features(feature, FeatureMeta("a"), drop_rate=1)
      self.assertEqual(feature, proto())

  def test_line_id(self):
    line_id = line_id_pb2.LineId()
    fill_line_id(line_id, ["req_time", "did", FeatureMeta("pre_actions", shape=3), "is_draw"])
    self.assertGreater(line_id.req_time, 1_600_000_000)
    self.assertLen(line_id.did, 8)
    self.assertLen(line_id.pre_actions, 3)
    self.assertTrue(line_id.HasField("is_draw"))
    self.assertFalse(line_id.HasField("uid"))
    self.assertEmpty(line_id.actions)
    fill_line_id(line_id, [FeatureMeta("pre_actions", shape=3)], actions=[1, 2])
    self.assertLen(line_id.pre_actions, 3)
    self.assertEqual(list(line_id.actions), [1, 2])

  def test_ids_in_line_id(self):
    line_id = line_id_pb2.LineId()
    metas = [FeatureMeta("uid", 700), FeatureMeta("chnid", 700), FeatureMeta("user_id", 700)]
    fill_line_id(line_id, metas)
    self.assertEqual([fid >> 48 for fid in (line_id.uid, line_id.chnid)], [700, 700])
    self.assertEqual(int(line_id.user_id) >> 48, 700)
    fill_line_id(line_id, metas, hash_len=54)
    self.assertEqual(line_id.uid >> 54, 700)
    self.assertEqual((line_id.chnid % 2**64) >> 54, 700)  # the field is signed

  def test_bad_line_ids(self):
    line_id = line_id_pb2.LineId()
    for args, message in (
      ((["uid"], 50), r"hash_len is 50, want one of \[48, 54\]"),
      (([FeatureMeta("nothing")],), "'nothing', which is no field of LineId"),
      (([FeatureMeta("rank", 3)],), "'rank' of LineId is too small for an id"),
      (([FeatureMeta("uid", 1024)], 54), "slot should be less than 1024, while got 1024"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        fill_line_id(line_id, *args)
    self.assertEqual(line_id, line_id_pb2.LineId())


class SampleTest(tf.test.TestCase):
  def test_instance(self):
    dense = [*_DENSE, FeatureMeta("instance_weight")]
    instance = gen_instance([3, 1023], ["fc_slot_2000"], dense, _EXTRA, actions=[7])
    self.assertEqual({fid >> 54 for fid in instance.fid}, {3, 1023})
    self.assertEqual([f.name for f in instance.feature], ["fc_slot_2000", "floats", "ints", "text"])
    self.assertEqual({fid >> 48 for fid in instance.feature[0].fid}, {2000})
    self.assertLen(instance.label, 2)
    self.assertEqual(instance.instance_weight, 1.0)
    self.assertLen(instance.line_id.pre_actions, 2)
    self.assertEqual(list(instance.line_id.actions), [7])

  def test_ids_of_the_instance_are_those_of_its_line(self):
    for features, bits in (({"fidv1_features": [3]}, 54), ({"fidv2_features": ["a"]}, 48)):
      instance = gen_instance(**features, extra_features=[FeatureMeta("uid", 9)])
      self.assertEqual(instance.line_id.uid >> bits, 9)

  def test_example(self):
    example = gen_example([FeatureMeta("a", 5, shape=3), "fc_slot_7"], _DENSE, ["uid"])
    named = {feature.name: feature for feature in example.named_feature}
    self.assertEqual(list(named), ["a", "fc_slot_7", "floats", "ints", "text"])
    self.assertEqual([fid >> 48 for fid in named["a"].feature.fid_v2_list.value], [5, 5, 5])
    self.assertEqual([named["a"].id, named["fc_slot_7"].id, named["text"].id], [5, 7, 0])
    self.assertLen(example.label, 2)
    self.assertTrue(example.line_id.HasField("uid"))
    (named,) = gen_example([FeatureMeta("fc_slot_8")]).named_feature
    self.assertEqual([fid >> 48 for fid in named.feature.fid_v2_list.value], [8])

  def test_example_batch(self):
    batch = gen_example_batch(["fc_slot_7"], _DENSE, _EXTRA, batch_size=3, actions=[1, 2])
    self.assertEqual(batch.batch_size, 3)
    columns = {column.name: column for column in batch.named_feature_list}
    self.assertCountEqual(
      columns, ["fc_slot_7", "__LABEL__", "floats", "ints", "text", "__LINE_ID__"]
    )
    for column in columns.values():
      self.assertLen(column.feature, 3)
    line_id = line_id_pb2.LineId.FromString(columns["__LINE_ID__"].feature[2].bytes_list.value[0])
    self.assertEqual(list(line_id.actions), [1, 2])
    self.assertLen(line_id.pre_actions, 2)

  def test_drop_rate(self):
    for gen, count, kept in (
      (lambda **k: gen_instance([1, 2], ["c"], _DENSE, **k), lambda x: len(x.feature), 0),
      (lambda **k: gen_example(["a", "b", "c"], _DENSE, **k), lambda x: len(x.named_feature), 0),
      (
        lambda **k: gen_example_batch(["a", "b", "c"], _DENSE, batch_size=1, **k),
        lambda x: len(x.named_feature_list),
        2,  # label and line id are always there
      ),
    ):
      whole = count(gen())
      counts = [count(gen(drop_rate=0.5)) for _ in range(64)]
      self.assertLess(sum(counts), 64 * whole)
      self.assertGreater(max(counts), min(counts))
      self.assertEqual(count(gen(drop_rate=1)), kept)
    self.assertEmpty(gen_instance([1, 2], drop_rate=1).fid)
    self.assertLen(gen_example([], _DENSE, drop_rate=1).label, 2)

  def test_names(self):
    for gen in (gen_example, gen_example_batch, lambda *args: gen_instance([], *args)):
      with self.assertRaisesRegex(AssertionError, "no features are named"):
        gen([])
      with self.assertRaisesRegex(AssertionError, r"several features \['a'\]"):
        gen(["a", "b"], [FeatureMeta("a")])
      with self.assertRaisesRegex(AssertionError, r"several features \['uid'\]"):
        gen(["a"], None, ["uid", "uid"])
      with self.assertRaisesRegex(AssertionError, r"has no name, the others are \['a'\]"):
        gen(["a"], [FeatureMeta("")])

  def test_slots_of_registered_names(self):
    data_utils.register_slots({"registered": 77})
    (named,) = gen_example(["registered"]).named_feature
    self.assertEqual(named.feature.fid_v2_list.value[0] >> 48, 77)

  def test_slots_of_a_feature_list(self):
    path = os.path.join(utils.get_test_tmp_dir(), "list.conf")
    with open(path, "w") as f:
      f.write("feature_name=f_user; slot=312\nfeature_name=f_item; slot=313\n")
    features = feature_list.FeatureList.parse(path)
    example = gen_example(["user", 313, "fc_slot_9"], feature_list=features)
    self.assertEqual(
      [(named.name, named.id) for named in example.named_feature],
      [("user", 312), ("f_item", 313), ("fc_slot_9", 9)],
    )


if __name__ == "__main__":
  tf.test.main()
