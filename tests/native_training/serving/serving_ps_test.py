"""Samples and layout configurations as a serving process would get them."""

import collections

import numpy as np
import tensorflow as tf

from idl.matrix.proto.example_pb2 import (
  ExampleBatch,
  FeatureConfigs,
  FeatureListType,
  OutType,
  PoolingType,
)
from monolith.native_training.distribution_ops import *  # noqa: F403

tf.compat.v1.disable_eager_execution()

FeatMeta = collections.namedtuple(
  "FeatMeta", "name table slot feature_type fid_version slice_dims pooling_type max_sequence_length"
)
TableMeta = collections.namedtuple("TableMeta", "name dim")

_INDIVIDUAL, _SHARED = FeatureListType.INDIVIDUAL, FeatureListType.SHARED
_TABLES = [TableMeta("user", 13), TableMeta("item", 9)]
_FEATURES = [
  FeatMeta("uid", "user", 1, _SHARED, 2, [1, 4, 8], PoolingType.SUM, 0),
  FeatMeta("age", "user", 2, _SHARED, 1, [1, 4, 8], PoolingType.MEAN, 0),
  FeatMeta("clicks", "item", 3, _INDIVIDUAL, 2, [9], PoolingType.FIRSTN, 3),
  FeatMeta("gid", "item", 4, _INDIVIDUAL, 2, [1, 4, 4], PoolingType.SUM, 0),
]
features = {meta.name: meta for meta in _FEATURES}
_BATCH_SIZE = 10


def _make_batch():
  batch = ExampleBatch(batch_size=_BATCH_SIZE)
  for meta in features.values():
    named = batch.named_feature_list.add(name=meta.name, id=meta.slot, type=meta.feature_type)
    for i in range(_BATCH_SIZE):
      feature = named.feature.add()
      if meta.fid_version == 1:
        feature.fid_v1_list.value.append(meta.slot << 54 | i)
      else:
        feature.fid_v2_list.value.append(meta.slot << 48 | i)
      if meta.feature_type == _SHARED:
        break
  return batch


def _make_configs():
  configs = FeatureConfigs()
  for meta in features.values():
    config = configs.feature_configs[meta.name]
    config.table = meta.table
    config.slice_dims.extend(meta.slice_dims)
    config.pooling_type = meta.pooling_type
    config.max_sequence_length = meta.max_sequence_length

  def add(layout, out_type, slices, shapes):
    out = configs.out_configs[layout]
    out.out_type = out_type
    for name, start, end in slices:
      out.slice_configs.add(feature_name=name, start=start, end=end)
    for shape in shapes:
      out.shape.add(dims=shape)

  pooled = ["uid", "age", "gid"]
  add("bias", OutType.CONCAT, [(name, 0, 1) for name in pooled], [[-1, 3]])
  add("vec", OutType.CONCAT, [(name, 1, 5) for name in pooled], [[-1, 12]])
  add("uffm", OutType.NONE, [("uid", 5, 13), ("age", 5, 13)], [[-1, 8], [-1, 8]])
  add("iffm", OutType.NONE, [("gid", 5, 9)], [[-1, 4]])
  add("seq", OutType.NONE, [("clicks", 0, 9)], [[-1, 3, 9]])
  add("user_only", OutType.STACK, [("uid", 1, 5), ("age", 1, 5)], [[-1, 2, 4]])
  return configs


class ServingPSTest(tf.test.TestCase):
  def test_example_gen(self):
    batch = ExampleBatch.FromString(_make_batch().SerializeToString())

    self.assertEqual(batch.batch_size, _BATCH_SIZE)
    for named in batch.named_feature_list:
      meta = features[named.name]
      self.assertLen(named.feature, 1 if meta.feature_type == _SHARED else _BATCH_SIZE)
      kind = "fid_v1_list" if meta.fid_version == 1 else "fid_v2_list"
      self.assertEqual({f.WhichOneof("type") for f in named.feature}, {kind})

  def test_conf_gen(self):
    configs = FeatureConfigs.FromString(_make_configs().SerializeToString())

    self.assertCountEqual(configs.out_configs, ["bias", "vec", "uffm", "iffm", "seq", "user_only"])
    widths = {table.name: table.dim for table in _TABLES}
    for name, config in configs.feature_configs.items():
      self.assertEqual(sum(config.slice_dims), widths[config.table])
      self.assertEqual(config.pooling_type, features[name].pooling_type)

  def test_layouts_of_the_config(self):
    """The configuration works with the layout op: every id of the batch looks up ones."""
    configs = _make_configs()
    # Features by name: age (shared), clicks, gid, uid (shared).
    rows = [1, _BATCH_SIZE, _BATCH_SIZE, 1]
    shared = 1 << 31
    feature_offset = list(range(sum(rows) + 1))
    # Every occurrence is the first row of list 0 (item) or 1 (user).
    owner = [1] + [0] * _BATCH_SIZE * 2 + [1]
    fid_offset = [table << 32 for table in owner]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      tensors = fused_embedding_to_layout(  # noqa: F405
        [tf.ones([9]), tf.ones([13])],
        None,
        tf.constant(fid_offset, tf.uint64),
        tf.constant(feature_offset, tf.int32),
        tf.constant([shared, 1, 11, 21 | shared, 22], tf.uint32),
        tf.constant([_BATCH_SIZE], tf.int32),
        "example_batch",
        configs,
        1,
        version=3,
      )
      results = session.run(tensors)

    # bias, iffm, seq, uffm (2), user_only, vec: layouts by name.
    self.assertEqual(
      [result.shape for result in results],
      [(10, 3), (10, 4), (10, 3, 9), (10, 8), (10, 8), (10, 2, 4), (10, 12)],
    )
    for i, result in enumerate(results):
      if i != 2:
        self.assertAllEqual(result, np.ones(result.shape))
    # One click per example, two places left.
    self.assertAllEqual(results[2][:, 0], np.ones([_BATCH_SIZE, 9]))
    self.assertAllEqual(results[2][:, 1:], np.zeros([_BATCH_SIZE, 2, 9]))


if __name__ == "__main__":
  tf.test.main()
