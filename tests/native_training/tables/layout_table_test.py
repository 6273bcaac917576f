"""Fused-layout tables on servers in this process: configuration, lookup, update, export.

Covers `layout_config`.
"""

import collections
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from idl.matrix.proto import example_pb2
from monolith.native_training import (
  distributed_ps,
  distributed_ps_factory,
  embedding_combiners,
  entry,
  native_task_context,
  prefetch_queue,
  test_utils,
)
from monolith.native_training.data import parsers
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.tables import layout_config as partitioned_features
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_PREFIX = "__sharding_sparse_fids__"
_NATIVE_TABLE = "native_multi_hash_table_fake_table"
_SLICE_DIMS = {"uid": [1, 4], "gid": [1, 4, 8], "cid": [1, 4, 8]}
# Slices of each layout, and its width.
_LAYOUTS = {
  "bias": ([("uid", 0, 1), ("gid", 0, 1), ("cid", 0, 1)], 3),
  "vec": ([("uid", 1, 5), ("gid", 1, 5), ("cid", 1, 5)], 12),
  "deep": ([("gid", 5, 13), ("cid", 5, 13)], 16),
}


def _config(slice_dims):
  """Returns a configuration with FTRL in column 0 and Adagrad in the others."""
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  entry.CuckooHashTableConfig().mutate_table(table_config)
  for i, dim in enumerate(slice_dims):
    make = entry.FtrlOptimizer if i == 0 else entry.AdagradOptimizer
    kwargs = {"beta": 0.0} if i == 0 else {}
    table_config.entry_config.segments.append(
      entry.CombineAsSegment(
        dim,
        entry.ZerosInitializer(),
        make(learning_rate=1.0, initial_accumulator_value=0.1, **kwargs),
        entry.Fp32Compressor(),
      )
    )
  return entry.HashTableConfigInstance(table_config, [1.0] * len(slice_dims))


def _out_config(slices, *widths, out_type=example_pb2.OutType.CONCAT):
  config = example_pb2.OutConfig(out_type=out_type)
  for name, start, end in slices:
    config.slice_configs.add(feature_name=name, start=start, end=end)
  for width in widths:
    config.shape.add(dims=[-1, width])
  return config


def _params(num_ps, native, layouts=None, **kwargs):
  if layouts is None:
    layouts = {name: _out_config(*layout) for name, layout in _LAYOUTS.items()}
  combiner = embedding_combiners.ReduceSum()
  return distributed_ps.PartitionedHashTable.gen_feature_configs(
    num_ps,
    {name: _config(dims) for name, dims in _SLICE_DIMS.items()},
    layouts,
    _SLICE_DIMS,
    {name: combiner for name in _SLICE_DIMS},
    native,
    **kwargs,
  )


def _shard(batch, feature_configs, num_ps):
  """Shards `feature -> ids of each example` in plain Python, as the input pipeline does."""
  configs = feature_configs.feature_configs
  tables = sorted({config.table for config in configs.values()})
  lists, row_splits, sizes, place = {}, {}, [], {}
  for t, table in enumerate(tables):
    names = sorted(name for name in configs if configs[name].table == table)
    for ps in range(num_ps):
      fids, splits, floats = [], [0], 0
      for name in names:
        dim = sum(configs[name].slice_dims)
        for ids in batch[name]:
          for fid in ids:
            if fid % num_ps == ps and (name, fid) not in place:
              place[name, fid] = (t * num_ps + ps, floats)
              fids.append(fid)
              floats += dim
        splits.append(len(fids))
      lists[f"{table}:{ps}"] = np.array(fids, np.int64)
      row_splits[f"{table}:{ps}"] = np.array(splits, np.int64)
      sizes.append(floats)
  fid_offset, feature_offset, nfl_offset = [], [], []
  for name in sorted(configs):
    nfl_offset.append(len(feature_offset))
    for ids in batch[name]:
      feature_offset.append(len(fid_offset))
      fid_offset += [place[name, fid][0] << 32 | place[name, fid][1] for fid in ids]
  feature_offset.append(len(fid_offset))
  nfl_offset.append(len(feature_offset))
  return {
    "shards": lists,
    "shards_row_split": row_splits,
    "shards_row_split_size": {
      key: np.array([len(value)], np.int32) for key, value in row_splits.items()
    },
    "fid_offset": np.array(fid_offset, np.uint64),
    "feature_offset": np.array(feature_offset, np.int32),
    "nfl_offset": np.array(nfl_offset, np.uint32),
    "batch_size": np.array([len(next(iter(batch.values())))], np.int32),
    "nfl_size": np.array([len(nfl_offset)], np.int32),
    "feature_size": np.array([len(feature_offset)], np.int32),
    "fid_size": np.array([len(fid_offset)], np.int32),
    "emb_size": np.array(sizes, np.int32),
  }


def _batch():
  """Returns six examples with ids 3i, 3i + 1, 3i + 2 in uid, gid and cid."""
  return {
    name: [[3 * i + offset] for i in range(6)] for offset, name in enumerate(("uid", "gid", "cid"))
  }


def _features(batch, params):
  sharded = _shard(batch, params.feature_configs, params.num_ps)
  features = {"label": tf.constant([1.0])}
  parsers.ParserCtx.sharding_sparse_fids_features_insert_to_features(
    tf.nest.map_structure(tf.constant, sharded), features
  )
  return features


def _assign_data(params, constant):
  """Returns data that assigns `constant` to every id below 10 (uid) or 26 (the others)."""
  data = collections.defaultdict(dict)
  for name, dims in _SLICE_DIMS.items():
    limit = 10 if name == "uid" else 26
    table = name
    if not params.use_native_multi_hash_table:
      table = params.feature_configs.feature_configs[name].table
    for ps in range(params.num_ps):
      ids = [i for i in range(limit) if i % params.num_ps == ps]
      data[ps][table] = (ids, np.full([len(ids), sum(dims)], constant))
  return data


class ShardHelperTest(tf.test.TestCase):
  """Tests that `_shard` delivers what is specified for the input pipeline."""

  def _configs(self, a_table, b_table):
    configs = example_pb2.FeatureConfigs()
    configs.feature_configs["a"].table = a_table
    configs.feature_configs["a"].slice_dims.append(1)
    configs.feature_configs["b"].table = b_table
    configs.feature_configs["b"].slice_dims.append(2)
    return configs

  def _offsets(self, sharded):
    return [(int(x) >> 32, int(x) & 0xFFFFFFFF) for x in sharded["fid_offset"]]

  def test_two_tables(self):
    batch = {"a": [[4], [4, 5]], "b": [[3, 6], []]}
    sharded = _shard(batch, self._configs("ta", "tb"), 2)
    lists = [sharded["shards"][key].tolist() for key in ("ta:0", "ta:1", "tb:0", "tb:1")]
    self.assertEqual(lists, [[4], [5], [6], [3]])
    self.assertEqual(self._offsets(sharded), [(0, 0), (0, 0), (1, 0), (3, 0), (2, 0)])
    self.assertAllEqual(sharded["feature_offset"], [0, 1, 3, 5, 5])
    self.assertAllEqual(sharded["nfl_offset"], [0, 2, 5])
    self.assertAllEqual(sharded["emb_size"], [1, 1, 2, 2])

  def test_one_pseudo_table(self):
    batch = {"a": [[4], [4, 5]], "b": [[3, 6], []]}
    sharded = _shard(batch, self._configs("t", "t"), 2)
    self.assertEqual([v.tolist() for v in sharded["shards"].values()], [[4, 6], [5, 3]])
    self.assertAllEqual(sharded["shards_row_split"]["t:1"], [0, 1, 2])
    self.assertEqual(self._offsets(sharded), [(0, 0), (0, 0), (1, 0), (1, 1), (0, 1)])
    self.assertAllEqual(sharded["emb_size"], [3, 3])


class FeatureConfigsTest(tf.test.TestCase):
  def test_merge(self):
    params = _params(0, native=False)
    configs = params.feature_configs.feature_configs

    self.assertEqual(params.num_ps, 1)
    self.assertFalse(params.use_native_multi_hash_table)
    self.assertTrue(params.unique())
    self.assertEqual(configs["uid"].table, "9871d3a2c554b27151cacf1422eec048")
    self.assertEqual(configs["gid"].table, "c4a398dea30b21551ae4c09454001dba")
    self.assertEqual(configs["cid"].table, configs["gid"].table)
    self.assertCountEqual(
      params.sub_table_name_to_config, [configs["uid"].table, configs["gid"].table]
    )
    config = params.sub_table_name_to_config[configs["uid"].table]
    self.assertLen(config._table_config.entry_config.segments, 2)
    self.assertEqual(configs["cid"].slice_dims, [1, 4, 8])
    self.assertCountEqual(params.feature_configs.out_configs, ["bias", "vec", "deep"])

  def test_native(self):
    params = _params(3, native=True, enable_gpu_emb=False, use_gpu=True)

    self.assertEqual(params.num_ps, 3)
    self.assertTrue(params.use_native_multi_hash_table)
    self.assertTrue(params.use_gpu)
    self.assertCountEqual(params.sub_table_name_to_config, _SLICE_DIMS)
    self.assertEqual(
      {c.table for c in params.feature_configs.feature_configs.values()}, {_NATIVE_TABLE}
    )

  def test_native_tables_that_are_shared(self):
    params = _params(2, native=True, shared_tables={"gid": "id", "cid": "id"})

    self.assertCountEqual(params.sub_table_name_to_config, ["id", "uid"])
    self.assertEqual(
      {c.table for c in params.feature_configs.feature_configs.values()}, {_NATIVE_TABLE}
    )
    # Other tables share by their configuration.
    params = _params(2, native=False, shared_tables={"gid": "id", "cid": "id"})
    self.assertNotIn("id", params.sub_table_name_to_config)
    self.assertEmpty(params.shared_tables)

  def test_float16_switches_native_off(self):
    params = _params(2, native=True, transfer_float16=True)
    self.assertFalse(params.use_native_multi_hash_table)
    self.assertTrue(params.transfer_float16)
    self.assertLen(params.sub_table_name_to_config, 2)

  def test_unique_is_off_while_exporting(self):
    unique = _params(2, native=True).unique
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      self.assertFalse(unique())
    self.assertTrue(unique())
    self.assertEqual(_params(2, native=True, unique=lambda: 7).unique(), 7)

  def test_combiners(self):
    configs = {
      name: test_utils.generate_test_hash_table_config(1) for name in ("sum", "mean", "first")
    }
    combiners = {
      "sum": embedding_combiners.ReduceSum(),
      "mean": embedding_combiners.ReduceMean(),
      "first": embedding_combiners.FirstN(5),
    }
    gen = distributed_ps.PartitionedHashTable.gen_feature_configs
    dims = {name: [1] for name in configs}
    features = gen(1, configs, {}, dims, combiners, True).feature_configs.feature_configs

    self.assertEqual(features["sum"].pooling_type, example_pb2.PoolingType.SUM)
    self.assertEqual(features["mean"].pooling_type, example_pb2.PoolingType.MEAN)
    self.assertEqual(features["first"].pooling_type, example_pb2.PoolingType.FIRSTN)
    self.assertEqual(features["first"].max_sequence_length, 5)
    with self.assertRaisesRegex(Exception, "pooling_type error!"):
      gen(1, configs, {}, dims, {**combiners, "sum": object()}, True)

  def test_no_merge(self):
    configs = {name: _config(dims) for name, dims in _SLICE_DIMS.items()}
    table = distributed_ps.PartitionedHashTable
    same, mapping = table.no_merge_feature_config(configs, True)
    self.assertIs(same, configs)
    self.assertEqual(set(mapping.values()), {_NATIVE_TABLE})
    _, mapping = table.no_merge_feature_config(configs, False)
    self.assertEqual(mapping, {name: name for name in configs})

  def test_merging_adds_restore_names_to_a_copy(self):
    config = test_utils.generate_test_hash_table_config(1)
    merge = distributed_ps.PartitionedHashTable.merge_feature_config
    for _ in range(2):
      merged, mapping = merge({"fc_slot_0": config})
      self.assertEqual(
        merged[mapping["fc_slot_0"]].extra_restore_names, ["cde3ba88ba62b682f84241b273f8100c"]
      )
    self.assertEmpty(config.extra_restore_names)

  def test_bad_layouts(self):
    for slices, text in (
      ([("nobody", 0, 1)], "slice of nobody"),
      ([("uid", 2, 6)], r"\[2, 6\) of uid.* length 5"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        _params(1, True, layouts={"x": _out_config(slices, 1)})


class PartitionedHashTableTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._ctx = parsers.ParserCtx(enable_fused_layout=True)
    self._ctx.__enter__()
    self.addCleanup(self._ctx.__exit__, None, None, None)
    self._graph = tf.Graph().as_default()
    self._graph.__enter__()
    self.addCleanup(self._graph.__exit__, None, None, None)

  def table(self, num_ps, native, **kwargs):
    self._ctx.sharding_sparse_fids_op_params = _params(num_ps, native, **kwargs)
    return distributed_ps_factory.create_partitioned_hash_table(num_ps, native)

  @property
  def params(self):
    return self._ctx.sharding_sparse_fids_op_params

  def session_on(self, num_ps):
    servers, config = test_utils.create_test_ps_cluster(max(num_ps, 1))
    self._servers = servers
    config.share_cluster_devices_in_session = True
    config.experimental.share_session_state_in_clusterspec_propagation = True
    session = tf.compat.v1.Session(servers[0].target, config=config)
    self.addCleanup(session.close)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(resources.initialize_resources(resources.shared_resources()))
    return session

  def check_example(self, layouts, missing=0.0, constant=2.0):
    bias = np.full([6, 3], constant)
    vec = np.full([6, 12], constant)
    bias[4:, 0] = missing
    vec[4:, :4] = missing
    self.assertAllClose(layouts["bias"], bias)
    self.assertAllClose(layouts["vec"], vec)
    self.assertAllClose(layouts["deep"], np.full([6, 16], constant))

  @parameterized.product(num_ps=(0, 1, 2, 3), native=(True, False))
  def test_lookup(self, num_ps, native):
    table = self.table(num_ps, native)
    table = table.assign(_assign_data(self.params, 2.0))
    features = _features(_batch(), self.params)
    bundle = {}
    layouts = table.lookup(features, auxiliary_bundle=bundle)
    session = self.session_on(num_ps)

    self.check_example(session.run(layouts))
    self.assertEqual(list(features), ["label"])
    self.assertEqual(layouts["vec"].shape.as_list(), [None, 12])
    session.run(bundle)
    expected = {"fid_offset", "feature_offset", "nfl_offset", "batch_size"}
    expected |= {"nfl_size", "feature_size", "fid_size", "emb_size"}
    for name in {c.table for c in self.params.feature_configs.feature_configs.values()}:
      for ps in range(self.params.num_ps):
        expected |= {f"{name}:{ps}:embs", f"{name}:{ps}:fids"}
        expected |= {f"{name}:{ps}:fids_row_split"} if native else set()
    self.assertCountEqual(bundle, {_PREFIX + name for name in expected})

  @parameterized.product(num_ps=(0, 2, 3), native=(True, False))
  def test_apply_gradients(self, num_ps, native):
    table = self.table(num_ps, native)
    assign = table.assign(_assign_data(self.params, 3.0)).as_op()
    bundle = {}
    layouts = table.lookup(_features(_batch(), self.params), bundle)
    flat = table.flatten_layout(layouts)
    update = table.apply_gradients(
      [(tf.fill(tf.shape(tensor), 2.0), tensor) for tensor in flat],
      global_step=tf.constant(0, tf.int64),
      req_time=tf.constant([1, 9, 3], tf.int64),
      auxiliary_bundle=bundle,
    )
    session = self.session_on(num_ps)
    session.run(assign)
    session.run(update)
    result = session.run(layouts)

    self.assertIsInstance(update, tf.Operation)
    # Ids of examples 4 and 5 of uid were not assigned: their update starts from 0.
    adagrad, ftrl = 2.0122704, 1.5437491
    self.assertAllClose(result["bias"][:4], np.full([4, 3], ftrl))
    self.assertAllClose(result["bias"][4:, 1:], np.full([2, 2], ftrl))
    self.assertAllClose(result["vec"][:4], np.full([4, 12], adagrad))
    self.assertAllClose(result["deep"], np.full([6, 16], adagrad))
    self.assertAllClose(result["vec"][4:, :4], np.full([2, 4], -2 / np.sqrt(4.1)))

  @parameterized.product(native=(True, False))
  def test_grad_scale(self, native):
    table = self.table(2, native)
    bundle = {}
    layouts = table.lookup(_features(_batch(), self.params), bundle)
    update = table.apply_gradients(
      [(tf.ones_like(tensor), tensor) for tensor in table.flatten_layout(layouts)],
      tf.constant(0, tf.int64),
      auxiliary_bundle=bundle,
      grad_scale=tf.constant(2.0),
    )
    session = self.session_on(2)
    session.run(update)
    self.assertAllClose(session.run(layouts["deep"]), np.full([6, 16], -2 / np.sqrt(4.1)))

  def test_bundle_is_required(self):
    table = self.table(1, True)
    with self.assertRaisesRegex(AssertionError, "auxiliary_bundle"):
      table.apply_gradients([], tf.constant(0, tf.int64))

  @parameterized.product(native=(True, False))
  def test_float16(self, native):
    table = self.table(2, native, transfer_float16=True)
    table = table.assign(_assign_data(self.params, 2.0))
    layouts = table.lookup(_features(_batch(), self.params))
    names = [op.name for op in tf.compat.v1.get_default_graph().get_operations()]

    self.check_example(self.session_on(2).run(layouts))
    self.assertTrue([name for name in names if name.endswith("_send_1_CastToFloat16")])

  @parameterized.product(native=(True, False))
  def test_lookup_raw_and_assign_add(self, native):
    table = self.table(2, native)
    uid = "uid" if native else self.params.feature_configs.feature_configs["uid"].table
    data = {1: {uid: (tf.constant([1, 3], tf.int64), np.ones([2, 5]))}}
    table = table.assign_add(data).assign_add(data)
    rows = table._lookup_raw({0: {uid: tf.constant([0], tf.int64)},
                              1: {uid: tf.constant([3, 5], tf.int64)}})  # fmt: skip
    rows = self.session_on(2).run(rows)

    self.assertAllEqual(rows[0][uid], np.zeros([1, 5]))
    self.assertAllEqual(rows[1][uid], [[2] * 5, [0] * 5])

  @parameterized.product(native=(True, False))
  def test_layout_callable(self, native):
    table = self.table(2, native)
    table = table.assign(_assign_data(self.params, 2.0))
    features, bundle = _features(_batch(), self.params), {}
    make_layouts = table.lookup(features, bundle, ret_fused_layout_callable_fn=True)
    types = [op.type for op in tf.compat.v1.get_default_graph().get_operations()]
    self.assertNotIn("MonolithEmbeddingToLayoutV5", types)
    layouts = make_layouts(bundle, features)

    self.check_example(self.session_on(2).run(layouts))

  @parameterized.product(native=(True, False))
  def test_lookup_callable(self, native):
    table = self.table(2, native)
    table = table.assign(_assign_data(self.params, 2.0))
    features, bundle = _features(_batch(), self.params), {}
    look_up = table.lookup(features, bundle, ret_lookup_callable_fn=True)
    name = _NATIVE_TABLE if native else self.params.feature_configs.feature_configs["uid"].table
    self.assertIn(f"{_PREFIX}shards@1@{name}", bundle)
    self.assertEqual(native, f"{_PREFIX}shards_row_split@1@{name}" in bundle)
    self.assertEqual(native, f"{_PREFIX}shards_row_split_size@1@{name}" in bundle)
    kind = "MonolithMultiHashTableLookup" if native else "MonolithHashTableLookup"
    types = [op.type for op in tf.compat.v1.get_default_graph().get_operations()]
    self.assertNotIn(kind, types)
    layouts = look_up(bundle, features)

    self.assertFalse([key for key in bundle if "shards@" in key])
    session = self.session_on(2)
    session.run(bundle)
    self.check_example(session.run(layouts))

  @parameterized.product(native=(True, False))
  def test_prefetch(self, native):
    table = self.table(0, native)
    assign = table.assign(_assign_data(self.params, 2.0)).as_op()
    features, bundle = _features(_batch(), self.params), {}
    label = features["label"]
    layouts = table.lookup(features, bundle, embedding_prefetch_capacity=1)
    (hook,) = table.get_queue_hooks()
    self.assertIsNot(features["label"], label)
    self.assertIsInstance(hook, prefetch_queue.EnqueueHook)

    class Assign(tf.compat.v1.train.SessionRunHook):
      def after_create_session(self, session, coord):
        session.run(assign)

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[Assign(), hook]) as session:
      self.check_example(session.run(layouts))

  @parameterized.product(native=(True, False))
  def test_layouts_are_made_on_the_gpu(self, native):
    gpu_placement.allow(self)
    table = self.table(0, native, use_gpu=True)
    assign = table.assign(_assign_data(self.params, 2.0)).as_op()
    features, bundle = _features(_batch(), self.params), {}
    features["text"] = tf.constant(["a"])
    features["req_time"] = tf.constant([1], tf.int64)
    layouts = table.lookup(features, bundle)
    flat = table.flatten_layout(layouts)
    step = tf.constant(0, tf.int64)
    update = table.apply_gradients([(tf.ones_like(t), t) for t in flat], step, None, bundle)

    for kind in ("MonolithEmbeddingToLayoutV5", "MonolithEmbeddingToLayoutGradV3"):
      self.assertEqual(gpu_placement.devices_of(kind), {"GPU"})
    self.assertEqual(gpu_placement.devices_of("IdentityN"), {"GPU", "CPU"})
    self.assertIn("GPU", features["label"].device)
    for tensor in (features["text"], features["req_time"], bundle[_PREFIX + "batch_size"]):
      self.assertNotIn("GPU", tensor.device)
    with self.session(config=gpu_placement.SOFT_PLACEMENT) as session:
      session.run(tf.compat.v1.global_variables_initializer())
      session.run(resources.initialize_resources(resources.shared_resources()))
      session.run(assign)
      self.check_example(session.run(layouts))
      session.run(update)
      self.assertAllLess(session.run(layouts)["deep"], 2.0)

  def test_async_push_uses_the_queued_step(self):
    table = self.table(0, True)
    step = tf.compat.v1.train.get_or_create_global_step()
    manager = prefetch_queue.AsyncFunctionMgr()
    bundle = {}
    layouts = table.lookup(_features(_batch(), self.params), bundle)
    push = table.apply_gradients(
      [(tf.fill(tf.shape(t), 2.0), t) for t in table.flatten_layout(layouts)],
      step,
      auxiliary_bundle=bundle,
      async_function_mgr=manager,
      async_push=True,
    )
    rows = []
    with tf.compat.v1.train.SingularMonitoredSession(hooks=manager.hooks) as session:
      for _ in range(2):
        session.run(push)
        rows.append(session.raw_session().run(layouts["deep"])[0, 0])

    self.assertLen(manager.hooks, 1)
    self.assertIn("QueueEnqueueV2", [op.type for op in push.control_inputs])
    self.assertAllClose(rows, [0.0, -2 / np.sqrt(4.1)])
    optimize = next(
      op
      for op in tf.compat.v1.get_default_graph().get_operations()
      if op.type == "MonolithMultiHashTableOptimize"
    )
    self.assertNotIn(step.op, optimize.inputs[-1].op.inputs)

  def test_pooling_and_nested_layouts(self):
    layouts = {
      "none": _out_config([("uid", 0, 1), ("gid", 1, 5)], 1, 4, out_type=example_pb2.OutType.NONE),
      "add": _out_config([("gid", 1, 5), ("cid", 1, 5)], 4, out_type=example_pb2.OutType.ADDN),
    }
    table = self.table(2, True, layouts=layouts)
    table = table.assign(_assign_data(self.params, 1.0))
    batch = {"uid": [[1, 2, 1], []], "gid": [[], [3]], "cid": [[4, 5], [6]]}
    nested = table.lookup(_features(batch, self.params))
    flat = table.flatten_layout(nested)

    expected = [nested["add"], *nested["none"]]
    self.assertEqual([t.name for t in flat], [t.name for t in expected])
    again = table.nest_layout(flat)
    self.assertEqual(again["none"][1].name, nested["none"][1].name)
    with self.assertRaisesRegex(ValueError, "2 tensors, want 3"):
      table.nest_layout(flat[:2])
    result = self.session_on(2).run(nested)
    self.assertAllClose(result["none"][0], [[3], [0]])
    self.assertAllClose(result["none"][1], [[0] * 4, [1] * 4])
    self.assertAllClose(result["add"], [[2] * 4, [2] * 4])

  def test_without_sizes(self):
    table = self.table(2, False)
    table = table.assign(_assign_data(self.params, 2.0))
    features = _features(_batch(), self.params)
    for name in ("nfl_size", "feature_size", "fid_size", "emb_size"):
      del features[_PREFIX + name]
    layouts = table.lookup(features)
    self.check_example(self.session_on(2).run(layouts))

  def test_missing_shards_are_named(self):
    table = self.table(2, True)
    features = _features(_batch(), self.params)
    del features[f"{_PREFIX}shards/{_NATIVE_TABLE}:1"]
    with self.assertRaisesRegex(ValueError, f"no {_PREFIX}shards/{_NATIVE_TABLE}:1"):
      table.lookup(features)

  @parameterized.product(num_ps=(1, 3), native=(True, False))
  def test_from_protos(self, num_ps, native):
    table = self.table(num_ps, native)
    table = table.assign(_assign_data(self.params, 2.0))
    batch = example_pb2.ExampleBatch(batch_size=6)
    for name, rows in _batch().items():
      named = batch.named_feature_list.add(name=name)
      for ids in rows:
        named.feature.add().fid_v2_list.value.extend(ids)
    features = parsers.parse_example_batch(
      tf.constant([batch.SerializeToString()]), sparse_features=list(_SLICE_DIMS)
    )
    self.assertIn(parsers.ParserCtx.sharding_sparse_fids_sparse_features_key, features)
    layouts = table.lookup(features)

    self.check_example(self.session_on(num_ps).run(layouts))
    self.assertFalse([name for name in features if name.startswith(_PREFIX)])

  def test_names_and_dims(self):
    table = self.table(2, True)
    self.assertEqual(table.as_op().name, "pht_as_op/done")
    self.assertEqual(table.slot_mapping, {name: _NATIVE_TABLE for name in _SLICE_DIMS})
    self.assertEqual(table.get_table_dim_sizes(), [13, 13, 5])
    self.assertEqual(table._tables[1].shared_name, "MonolithMultiHashTable_1")
    self.assertEqual(table._inner_data_type, "example_batch")
    with self.assertRaises(NotImplementedError):
      table.reinitialize("uid", [1])

  def test_local_native_name_has_suffix_0(self):
    self.assertEqual(self.table(0, True)._tables[0].shared_name, "MonolithMultiHashTable_0")

  def test_bad_contexts(self):
    with self.assertRaisesRegex(ValueError, "sharding_sparse_fids_op_params"):
      distributed_ps_factory.create_partitioned_hash_table(2, True)
    self._ctx.sharding_sparse_fids_op_params = _params(3, True)
    with self.assertRaisesRegex(ValueError, "num_ps is 2, but ids are sharded for 3 servers"):
      distributed_ps_factory.create_partitioned_hash_table(2, True)
    with self.assertRaisesRegex(ValueError, "enable_gpu_emb is True, but False where"):
      distributed_ps_factory.create_partitioned_hash_table(3, True, enable_gpu_emb=True)

  @parameterized.product(native=(True, False))
  def test_distributed_export(self, native):
    calls = []

    def remote_predict(inputs, tensors, outputs, **kwargs):
      del tensors
      calls.append((inputs, outputs, kwargs["signature_name"], kwargs["model_name"]))
      return [tf.zeros([0]) for _ in outputs]

    ctx = native_task_context.NativeTaskContext(2, 0, 1, 0, "model", None, "worker")
    bundle = {}
    with (
      native_task_context.with_ctx(ctx),
      mock.patch.object(distributed_ps, "remote_predict", remote_predict),
      export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as export_ctx,
    ):
      table = self.table(2, native)
      table.lookup(_features(_batch(), self.params), bundle)

    self.assertCountEqual(export_ctx.sub_graphs, ["ps_0", "ps_1"])
    names = sorted(self.params.sub_table_name_to_config)
    self.assertEqual(
      calls[1],
      (["id", "id_split"], ["flat_emb"], "raw_lookup", "model:ps_1")
      if native
      else (names, names, "lookup", "model:ps_1"),
    )
    self.assertFalse([key for key in bundle if "fids" in key.replace(_PREFIX, "")])

  @parameterized.product(native=(True, False))
  def test_standalone_export(self, native):
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE) as export_ctx:
      table = self.table(2, native)
      layouts = table.lookup(_features(_batch(), self.params))
    self.assertEqual(export_ctx.sub_graph_num, 0)
    with tf.compat.v1.Session() as session:
      session.run(resources.initialize_resources(resources.shared_resources()))
      self.check_example(session.run(layouts), constant=0.0)


class FeatureRowsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(
    ({"a": 1, "b": 2, "c": 3}, {}),
    ({"a": 2, "b": 1, "c": 2}, {"a": "s", "c": "s"}),
    ({"a": 2, "b": 1, "c": 2, "d": 1, "e": 3}, {"a": "z", "c": "z", "b": "aa", "d": "aa"}),
    # By name, the table of `b` comes before that of `a`.
    ({"a": 1, "b": 2, "c": 2}, {"b": "A", "c": "A"}),
  )
  def test_round_trip(self, dims, shared_tables):
    rows = partitioned_features.FeatureRows(dims, shared_tables)
    rng = np.random.default_rng(len(dims))
    for _ in range(5):
      ids = {name: rng.integers(100, size=rng.integers(4)) for name in sorted(dims)}
      values = {name: rng.random((len(ids[name]), dims[name])) for name in ids}
      tables = collections.defaultdict(list)
      for name in sorted(dims):
        tables[shared_tables.get(name, name)].append(name)
      want_ids = [np.concatenate([ids[n] for n in tables[t]]) for t in sorted(tables)]
      want_values = [values[n].ravel() for t in sorted(tables) for n in tables[t]]

      ragged = tf.RaggedTensor.from_row_lengths(
        tf.constant(np.concatenate(list(ids.values())), tf.int64),
        tf.constant([len(v) for v in ids.values()], tf.int64),
      )
      flat = tf.constant(np.concatenate([v.ravel() for v in values.values()]), tf.float32)
      of_tables = rows.values_of_tables(ragged, flat)
      got_ids, got_values, back, flat = self.evaluate(
        [rows.ids_of_tables(ragged), of_tables, rows.values_of_features(ragged, of_tables), flat]
      )

      self.assertEqual(got_ids.to_list(), [list(v) for v in want_ids])
      self.assertAllClose(got_values, np.concatenate(want_values))
      self.assertAllEqual(back, flat)


if __name__ == "__main__":
  tf.test.main()
