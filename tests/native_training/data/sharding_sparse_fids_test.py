"""Tests `sharding_sparse_fids` on the worked examples, in all versions and input types.

Covers `tables/id_sharding.py`.
"""

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith.native_training.data import parsers

tf.compat.v1.disable_eager_execution()

NAMES = (
  "fid_list fid_offset feature_offset nfl_offset batch_size nfl_size feature_size fid_size "
  "emb_size row_splits row_splits_size emb_row_lenth table_row_length shard_row_lenth"
).split()
SHARED_BIT = 1 << 31
# row -> feature -> ids
ROWS = [{"a": [10, 11], "b": [4], "c": [7]}, {"a": [10], "b": [], "c": [7, 8]}]
TABLES = {"a": ("t0", [1, 2]), "b": ("t0", [2]), "c": ("t1", [1])}


def make_configs(tables):
  configs = example_pb2.FeatureConfigs()
  for name, (table, dims) in tables.items():
    configs.feature_configs[name].table = table
    configs.feature_configs[name].slice_dims.extend(dims)
  return configs


def make_example(row):
  example = example_pb2.Example()
  for name, fids in row.items():
    named = example.named_feature.add(name=name)
    named.feature.fid_v2_list.value.extend(fid % (1 << 64) for fid in fids)
  return example.SerializeToString()


def make_batch(rows, shared=()):
  batch = example_pb2.ExampleBatch(batch_size=len(rows))
  for name in sorted({name for row in rows for name in row}):
    column = batch.named_feature_list.add(name=name)
    if name in shared:
      column.type = example_pb2.SHARED
    for row in rows[:1] if name in shared else rows:
      column.feature.add().fid_v2_list.value.extend(row.get(name, []))
  return batch.SerializeToString()


def shard(protos, tables, ps_num=2, unique=True, input_type="example", version=5, **kwargs):
  """Returns the outputs that are not None, by name."""
  with tf.Graph().as_default(), parsers.ParserCtx(enable_fused_layout=True):
    parse = parsers.parse_examples if input_type == "example" else parsers.parse_example_batch
    variants = parse(protos, [])[parsers.ParserCtx.sharding_sparse_fids_sparse_features_key]
    out = parsers.sharding_sparse_fids(
      variants, ps_num, make_configs(tables), unique, input_type, version=version, **kwargs
    )
    assert len(out) == 14
    out = {name: value for name, value in zip(NAMES, out) if value is not None}
    with tf.compat.v1.Session() as sess:
      return sess.run(out)


def halves(offsets):
  return [(int(offset) >> 32, int(offset) & 0xFFFFFFFF) for offset in offsets]


def as_lists(arrays):
  return {key: list(value) for key, value in arrays.items()}


class ShardingSparseFidsTest(tf.test.TestCase):
  def test_v5(self):
    out = shard([make_example(row) for row in ROWS], TABLES)

    self.assertEqual(
      as_lists(out["fid_list"]), {"t0:0": [10, 4], "t0:1": [11], "t1:0": [8], "t1:1": [7]}
    )
    self.assertEqual(
      as_lists(out["row_splits"]),
      {"t0:0": [0, 1, 2], "t0:1": [0, 1, 1], "t1:0": [0, 1], "t1:1": [0, 1]},
    )
    self.assertEqual(
      as_lists(out["row_splits_size"]), {"t0:0": [3], "t0:1": [3], "t1:0": [2], "t1:1": [2]}
    )
    self.assertAllEqual(out["feature_offset"], [0, 2, 3, 4, 4, 5, 7])
    self.assertAllEqual(out["nfl_offset"], [0, 2, 4, 7])
    self.assertEqual(
      halves(out["fid_offset"]), [(0, 0), (1, 0), (0, 0), (0, 3), (3, 0), (3, 0), (2, 0)]
    )
    self.assertAllEqual(out["emb_size"], [5, 3, 1, 1])
    for name, value in {"batch_size": 2, "nfl_size": 4, "feature_size": 7, "fid_size": 7}.items():
      self.assertAllEqual(out[name], [value])
    self.assertEqual(
      [out[name].dtype for name in ("fid_offset", "feature_offset", "nfl_offset")],
      [np.uint64, np.int32, np.uint32],
    )

  def test_example_batch_gives_the_same(self):
    by_row = shard([make_example(row) for row in ROWS], TABLES)
    by_column = shard(make_batch(ROWS), TABLES, input_type="examplebatch")

    self.assertAllEqual(by_column["fid_offset"], by_row["fid_offset"])
    self.assertAllEqual(by_column["feature_offset"], by_row["feature_offset"])
    self.assertEqual(as_lists(by_column["fid_list"]), as_lists(by_row["fid_list"]))

  def test_v1_v2_v3(self):
    protos = [make_example(row) for row in ROWS]
    v1, v2, v3 = (shard(protos, TABLES, version=version) for version in (1, 2, 3))

    self.assertEqual(halves(v1["fid_offset"])[3], (0, 1))
    self.assertEqual(
      halves(v2["fid_offset"]), [(0, 0), (2, 0), (0, 0), (1, 0), (5, 0), (5, 0), (4, 0)]
    )
    self.assertEqual(
      halves(v3["fid_offset"]), [(0, 0), (1, 0), (0, 0), (0, 3), (3, 0), (3, 0), (2, 0)]
    )
    self.assertAllEqual(v3["batch_size"], 2)
    self.assertNotIn("emb_size", v3)

  def test_v4(self):
    out = shard([make_example(row) for row in ROWS], TABLES, version=4)

    self.assertAllEqual(out["fid_list"], [10, 4, 8, 11, 7])
    self.assertAllEqual(out["row_splits"], [0, 1, 2, 0, 1, 0, 1, 1, 0, 1])
    self.assertAllEqual(out["table_row_length"], [2, 1, 1, 1])
    self.assertAllEqual(out["shard_row_lenth"], [3, 2])
    self.assertAllEqual(out["emb_row_lenth"], [5, 1, 3, 1])

  def test_v4_lengths_are_static(self):
    with tf.Graph().as_default():
      out = parsers.sharding_sparse_fids(
        tf.compat.v1.placeholder(tf.variant, [None]),
        2,
        make_configs(TABLES),
        True,
        "example",
        version=4,
      )
      self.assertEqual([t.shape.as_list() for t in out[11:]], [[4], [4], [2]])

  def test_not_unique(self):
    out = shard([make_example(row) for row in ROWS], TABLES, unique=False)

    self.assertAllEqual(out["fid_list"]["t0:0"], [10, 10, 4])
    self.assertEqual(halves(out["fid_offset"])[2:4], [(0, 3), (0, 6)])

  def test_two_tables(self):
    rows = [{"a": [4], "b": [3, 6]}, {"a": [4, 5], "b": []}]
    out = shard(
      [make_example(row) for row in rows],
      {"a": ("ta", [1]), "b": ("tb", [2])},
      fid_list_ret_list=True,
    )

    self.assertEqual([list(x) for x in out["fid_list"]], [[4], [5], [6], [3]])
    self.assertEqual(halves(out["fid_offset"]), [(0, 0), (0, 0), (1, 0), (3, 0), (2, 0)])
    self.assertAllEqual(out["feature_offset"], [0, 1, 3, 5, 5])
    self.assertAllEqual(out["nfl_offset"], [0, 2, 5])
    self.assertAllEqual(out["emb_size"], [1, 1, 2, 2])

  def test_one_pseudo_table(self):
    rows = [{"a": [4], "b": [3, 6]}, {"a": [4, 5], "b": []}]
    out = shard([make_example(row) for row in rows], {"a": ("t", [1]), "b": ("t", [2])})

    self.assertEqual(as_lists(out["fid_list"]), {"t:0": [4, 6], "t:1": [5, 3]})
    self.assertEqual(as_lists(out["row_splits"]), {"t:0": [0, 1, 2], "t:1": [0, 1, 2]})
    self.assertEqual(halves(out["fid_offset"]), [(0, 0), (0, 0), (1, 0), (1, 1), (0, 1)])
    self.assertAllEqual(out["emb_size"], [3, 3])

  def test_negative_ids_are_sharded_by_floor_modulo(self):
    lowest = -(1 << 63)
    out = shard([make_example({"a": [-1, lowest, 0, -1]})], {"a": ("t", [1])}, ps_num=3)

    self.assertEqual(as_lists(out["fid_list"]), {"t:0": [0], "t:1": [lowest], "t:2": [-1]})

  def test_every_id_has_one_home(self):
    rng = np.random.default_rng(0)
    ids = [
      base + delta
      for base in (-(1 << 63), -(1 << 62), -(1 << 32), 0, 1 << 32, 1 << 48, 1 << 62, (1 << 63) - 1)
      for delta in (-2, -1, 0, 1, 2)
      if -(1 << 63) <= base + delta < 1 << 63
    ] + rng.integers(-(1 << 63), 1 << 63, 50, dtype=np.int64).tolist()
    for ps_num in (1, 2, 3, 5, 7, 64, 97):
      for version in (1, 2, 3, 5):
        out = shard([make_example({"a": ids})], {"a": ("t", [1])}, ps_num, version=version)
        # Python's % is floor modulo, with exact integers.
        self.assertEqual(
          as_lists(out["fid_list"]),
          {f"t:{ps}": [i for i in ids if i % ps_num == ps] for ps in range(ps_num)},
        )

  def test_shared_and_absent_columns(self):
    rows = [{"a": [1, 2]}, {"a": [1, 2]}]
    out = shard(
      make_batch(rows, shared=("a",)),
      {"a": ("t", [1]), "b": ("t", [1])},
      ps_num=0,
      input_type="examplebatch",
    )

    self.assertAllEqual(out["fid_list"]["t:0"], [1, 2])
    self.assertAllEqual(out["feature_offset"], [0, 2, 2])
    self.assertAllEqual(out["nfl_offset"], [SHARED_BIT, SHARED_BIT | 1, 3])
    self.assertAllEqual(out["batch_size"], [2])

  def test_instances(self):
    instances = []
    for fids, named in (([(3 << 54) | 7, (4 << 54) | 8, (3 << 54) | 9], [5]), ([], [])):
      instance = proto_parser_pb2.Instance(fid=fids)
      instance.feature.add(name="v2", fid=named)
      instances.append(instance.SerializeToString())
    tables = {"fc_slot_3": ("t", [1]), "slot_4": ("t", [1]), "v2": ("t", [1])}
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      out = sess.run(
        parsers.sharding_sparse_fids(instances, 1, make_configs(tables), True, "instance")[:3]
      )

    self.assertAllEqual(out[0]["t:0"], [(3 << 48) | 7, (3 << 48) | 9, (4 << 48) | 8, 5])
    self.assertAllEqual(out[2], [0, 2, 2, 3, 3, 4, 4])

  def test_positions_need_no_dims(self):
    instances = [
      proto_parser_pb2.Instance(fid=[(3 << 54) | 7, (3 << 54) | 8, (3 << 54) | 7, (4 << 54) | 9]),
      proto_parser_pb2.Instance(fid=[(4 << 54) | 9]),
    ]
    serialized = [instance.SerializeToString() for instance in instances]
    for version in (1, 2):
      outputs = []
      for dims in ([], [4]):
        tables = {"fc_slot_3": ("t", dims), "slot_4": ("u", dims)}
        with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
          out = parsers.sharding_sparse_fids(
            serialized, 3, make_configs(tables), False, "instance", version=version
          )
          outputs.append(sess.run([out[0], out[1], out[2], out[3], out[9]]))
      without_dims, with_dims = outputs
      tf.nest.map_structure(self.assertAllEqual, without_dims, with_dims)
      base = 3 << 48
      fids = [base + 7, base + 8, base + 7]
      self.assertEqual(
        as_lists({name: ids for name, ids in without_dims[0].items() if name.startswith("t:")}),
        {f"t:{ps}": [fid for fid in fids if fid % 3 == ps] for ps in range(3)},
      )

  def test_parallel_flag_changes_nothing(self):
    random = np.random.RandomState(0)
    rows = [
      {name: random.randint(-1000, 1000, size=random.randint(200)).tolist() for name in TABLES}
      for _ in range(64)
    ]
    protos = [make_example(row) for row in rows]
    expected = shard(protos, TABLES, ps_num=3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      out = parsers.parse_instance_ops.sharding_sparse_fids_v5(
        protos,
        ps_num=3,
        feature_cfgs=make_configs(TABLES).SerializeToString(),
        unique=True,
        input_type="example",
        parallel_flag=15,
        single_thread_feature_watermark=0,
        N=6,
      )
      self.assertAllEqual(sess.run(out.fid_offset), expected["fid_offset"])
      for got, want in zip(sess.run(out.fid_list), expected["fid_list"].values()):
        self.assertAllEqual(got, want)

  def test_empty_batch(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      out = sess.run(
        parsers.sharding_sparse_fids(
          tf.zeros([0], tf.string), 1, make_configs(TABLES), True, "example"
        )[:5]
      )
    self.assertAllEqual(out[2], [0])
    self.assertAllEqual(out[3], [0, 0, 0, 1])

  def test_bad_input(self):
    def run(protos, input_type="example", tables=TABLES, **kwargs):
      with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
        sess.run(
          parsers.sharding_sparse_fids(protos, 2, make_configs(tables), True, input_type, **kwargs)[
            :2
          ]
        )

    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Failed to parse the Example"):
      run([b"\xff\xff"])
    dense = example_pb2.Example()
    dense.named_feature.add(name="a").feature.float_list.value.append(1)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "sparse feature 'a'"):
      run([dense.SerializeToString()])
    short = example_pb2.ExampleBatch(batch_size=3)
    short.named_feature_list.add(name="a").feature.add()
    with self.assertRaisesRegex(tf.errors.OutOfRangeError, "batch_size should be equal"):
      run(short.SerializeToString(), "examplebatch")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "input_type is 'parquet'"):
      run([b""], "parquet")
    for version in (3, 4, 5):
      # By the shape function, or by the kernel.
      with self.assertRaisesRegex(
        (ValueError, tf.errors.InvalidArgumentError), "slice_dims of feature 'a'"
      ):
        run([b""], tables={"a": ("t", [])}, version=version)
    with self.assertRaisesRegex(ValueError, "version is 6"):
      run([b""], version=6)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want monolith::ExampleBatch"):
      with tf.Graph().as_default(), parsers.ParserCtx(True):
        examples = parsers.parse_examples([make_example({})], [])
        variants = examples[parsers.ParserCtx.sharding_sparse_fids_sparse_features_key]
        out = parsers.sharding_sparse_fids(variants, 2, make_configs(TABLES), True, "examplebatch")
        with tf.compat.v1.Session() as sess:
          sess.run(out[1])


class ParserCtxTest(tf.test.TestCase):
  def test_nests(self):
    outer = parsers.get_default_parser_ctx()
    with parsers.ParserCtx(True) as ctx:
      self.assertIs(parsers.get_default_parser_ctx(), ctx)
      with ctx:
        self.assertIs(parsers.get_default_parser_ctx(), ctx)
      self.assertIs(parsers.get_default_parser_ctx(), ctx)
    self.assertIs(parsers.get_default_parser_ctx(), outer)
    self.assertFalse(outer.enable_fused_layout)

  def test_keeps_values(self):
    ctx = parsers.ParserCtx()
    ctx.set("batch_size", 3)
    self.assertEqual((ctx.get("batch_size"), ctx.get("x"), ctx.get("x", 1)), (3, None, 1))

  def test_features_round_trip(self):
    features = {"label": 0}
    inputs = {"shards": {"t:0": 1, "t:1": 2}, "fid_offset": 3}
    parsers.ParserCtx.sharding_sparse_fids_features_insert_to_features(inputs, features)
    self.assertEqual(
      sorted(features),
      [
        "__sharding_sparse_fids__fid_offset",
        "__sharding_sparse_fids__shards/t:0",
        "__sharding_sparse_fids__shards/t:1",
        "label",
      ],
    )
    self.assertEqual(
      parsers.ParserCtx.sharding_sparse_fids_features_parse_from_features(features), inputs
    )
    self.assertEqual(features, {"label": 0})

  def test_sharding_with_context(self):
    with tf.Graph().as_default(), parsers.ParserCtx(True) as ctx:
      ctx.sharding_sparse_fids_op_params = parsers.ShardingSparseFidsOpParams(
        num_ps=2,
        use_native_multi_hash_table=True,
        unique=lambda: True,
        transfer_float16=False,
        sub_table_name_to_config={},
        feature_configs=make_configs(TABLES),
        enable_gpu_emb=False,
        use_gpu=True,
      )
      features = parsers.parse_examples([make_example(row) for row in ROWS], ["a", "b", "c"])
      self.assertNotIn(ctx.sharding_sparse_fids_sparse_features_key, features)
      with tf.compat.v1.Session() as sess:
        out = ctx.sharding_sparse_fids_features_parse_from_features(sess.run(features))
    self.assertAllEqual(out["shards"]["t0:0"], [10, 4])
    self.assertAllEqual(out["shards_row_split"]["t0:1"], [0, 1, 1])
    self.assertAllEqual(out["shards_row_split_size"]["t0:1"], [3])
    self.assertAllEqual(out["emb_size"], [5, 3, 1, 1])

  def test_sharding_before_a_parser_was_called(self):
    with tf.Graph().as_default(), parsers.ParserCtx(True) as ctx:
      ctx.sharding_sparse_fids_op_params = parsers.ShardingSparseFidsOpParams(
        1, True, lambda: True, False, {}, make_configs(TABLES), False, False
      )
      with self.assertRaisesRegex(ValueError, "parser_type of the parser context is not set"):
        parsers.sharding_sparse_fids_with_context(tf.constant([""]), {}, ctx)

  def test_sharding_without_parameters(self):
    with self.assertRaisesRegex(ValueError, "sharding_sparse_fids_op_params"):
      parsers.sharding_sparse_fids_with_context(None, {}, parsers.ParserCtx())


if __name__ == "__main__":
  tf.test.main()
