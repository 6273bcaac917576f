"""The native group of tables: worked examples, raw ops, files, listeners, graph round trips."""

import glob
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from google.protobuf import text_format
from tensorflow.python.ops import resources

from monolith.native_training import (
  basic_restore_hook,
  hash_filter_ops,
  learning_rate_functions,
  multi_hash_table_ops,
  test_utils,
)
from monolith.native_training.multi_hash_table_ops import MultiHashTable
from monolith.native_training.proto import ckpt_info_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import GraphTest, config_of, segment

tf.compat.v1.disable_eager_execution()

_config = test_utils.generate_test_hash_table_config


def _step(value: int = 0) -> tf.Tensor:
  return tf.constant(value, tf.int64)


class GroupTest(GraphTest):
  def setUp(self):
    super().setUp()
    self.folder = os.environ["TEST_TMPDIR"]
    self.base = os.path.join(self.folder, "ckpt", "group")

  def example(self) -> MultiHashTable:
    """Returns the group of the worked examples, filled."""
    group = MultiHashTable.from_configs(
      {"slot0": _config(1), "slot1": _config(2), "slot2": _config(2), "unused": _config(2)}
    )
    self.initialize = group.initializer
    return group.assign_add(
      {
        "slot0": ([0], [[1.0]]),
        "slot1": ([1], [[2.0, 2.0]]),
        "slot2": ([2, 3], [[4.0, 4.0], [8.0, 8.0]]),
      }
    )


class WorkedExamplesTest(GroupTest):
  def test_lookup(self):
    group = self.example()
    with self.session() as sess:
      sess.run(self.initialize)
      values = sess.run(group.lookup({"slot0": [0], "slot1": [1], "slot2": [2, 3]}))

      self.assertCountEqual(values, ["slot0", "slot1", "slot2"])
      self.assertAllEqual(values["slot0"], [[1]])
      self.assertAllEqual(values["slot1"], [[2, 2]])
      self.assertAllEqual(values["slot2"], [[4, 4], [8, 8]])

  def test_reinitialize(self):
    group = self.example()
    with self.session() as sess:
      sess.run(self.initialize)
      group, status = group.reinitialize("slot2", [1, 2, 3])
      group, unknown = group.reinitialize("slot3", [1, 2, 3])
      values, status, unknown = sess.run(
        [
          group.lookup({"slot0": [0], "slot1": [1], "slot2": [1, 2, 3], "slot3": [1]}),
          status,
          unknown,
        ]
      )

      self.assertCountEqual(values, ["slot0", "slot1", "slot2"])
      self.assertAllEqual(status, [0, 1, 1])
      self.assertEqual(status.dtype, np.int32)
      self.assertAllEqual(unknown, [-1, -1, -1])
      self.assertAllEqual(values["slot0"], [[1]])
      self.assertAllEqual(values["slot1"], [[2, 2]])
      self.assertAllEqual(values["slot2"], np.zeros((3, 2)))

  @parameterized.named_parameters(("number", False, 1.0), ("schedule", True, 0.1))
  def test_apply_gradients(self, schedule, factor):
    step = tf.compat.v1.train.get_or_create_global_step()
    rate = 1.0
    if schedule:
      rate = learning_rate_functions.PolynomialDecay(
        initial_learning_rate=0.1, decay_steps=10, end_learning_rate=1.1
      )
    group = MultiHashTable.from_configs(
      {"slot0": _config(1, learning_rate=rate), "slot1": _config(2, learning_rate=rate)}
    )
    with self.session() as sess:
      sess.run([tf.compat.v1.global_variables_initializer(), group.initializer])
      updated = group.apply_gradients(
        {"slot0": ([0], tf.constant(2.0)), "slot1": ([1, 2], [[1.0, 3.0], [2.0, 4.0]])}, step
      )
      values = sess.run(updated.lookup({"slot0": [0], "slot1": [1, 2]}))

      self.assertAllClose(values["slot0"], [[-2 * factor]])
      self.assertAllClose(values["slot1"], np.array([[-1, -3], [-2, -4]]) * factor)

  def test_duplicates(self):
    group = MultiHashTable.from_configs({"slot1": _config(2)})
    with self.session() as sess:
      sess.run(group.initializer)
      updated = group.apply_gradients({"slot1": ([2, 2], [[1.1, 3.1], [2.2, 4.2]])}, _step())
      values = sess.run(updated.lookup({"slot1": [1, 2]}))["slot1"]
      self.assertAllClose(values, [[0, 0], [-3.3, -7.3]])

  def _three(self) -> MultiHashTable:
    group = MultiHashTable.from_configs(
      {"slot0": _config(1), "slot1": _config(2), "slot2": _config(2)}
    )
    self.initialize = group.initializer
    return group.assign_add(
      {
        "slot0": ([0], [[1.0]]),
        "slot1": ([1], [[2.0, 2.0]]),
        "slot2": ([2, 3], [[4.0, 4.0], [8.0, 8.0]]),
      }
    )

  @parameterized.parameters(
    (
      [0, 1, 2, 3],
      [1, 1, 2],
      1,
      [1, 2, 2, 4, 4, 8, 8],
      [7],
      [0, 1, 2, 4],
      [0, 1, 3, 7],
    ),
    (
      [0, 2, 1, 3],
      [1, 0, 1, 0, 1, 1],
      2,
      [1, 4, 4, 2, 2, 8, 8],
      [3, 4],
      [0, 1, 1, 2, 2, 3, 4],
      [0, 1, 1, 3, 3, 5, 7],
    ),
  )
  def test_fused_lookup(self, ids, sizes, shards, want, splits, id_offsets, offsets):
    group = self._three()
    with self.session() as sess:
      sess.run(self.initialize)
      got = sess.run(group.fused_lookup(ids, sizes, shards))
      for actual, expected in zip(got, (want, splits, id_offsets, offsets, ids)):
        self.assertAllEqual(actual, expected)

  @parameterized.parameters(
    ([0, 1, 2], [1, 2], [2.0, 1, 3, 2, 4], 1, [-2, -1, -3, -2, -4], [5], [0, 1, 3], [0, 1, 5]),
    ([1, 1], [1, 0, 1, 0], [1.0, 2], 2, [-3, -3], [1, 1], [0, 1, 1, 2, 2], [0, 1, 1, 2, 2]),
  )
  def test_fused_apply_gradient(self, ids, sizes, grads, shards, want, splits, id_offsets, offsets):
    for accumulate in (False, True):
      with tf.Graph().as_default(), self.session() as sess, self.subTest(accumulate):
        group = MultiHashTable.from_configs({"slot0": _config(1), "slot1": _config(2)})
        sess.run(group.initializer)
        _, _, id_offset, offset, indices = group.fused_lookup(ids, sizes, shards)
        updated = group.fused_apply_gradient(
          ids, indices, sizes, grads, id_offset, offset, _step(), _step(), shards, accumulate
        )
        got = sess.run(updated.fused_lookup(ids, sizes, shards))
        for actual, expected in zip(got, (want, splits, id_offsets, offsets, ids)):
          self.assertAllClose(actual, expected)

  def test_restore_into_other_tables(self):
    with self.session() as sess:
      group = self._three()
      sess.run(self.initialize)
      sess.run(group.save(self.base).as_op())
    with tf.Graph().as_default(), self.session() as sess:
      other = MultiHashTable.from_configs(
        {"slot0": _config(1), "slot2": _config(2), "slot3": _config(3)}
      )
      sess.run(other.initializer)
      restored = other.restore(self.base)
      values = sess.run(restored.lookup({"slot0": [0], "slot2": [2, 3], "slot3": [1]}))
      self.assertAllEqual(values["slot0"], [[1]])
      self.assertAllEqual(values["slot2"], [[4, 4], [8, 8]])
      self.assertAllEqual(values["slot3"], [[0, 0, 0]])

  def test_saver_and_restorer_hooks(self):
    step = tf.compat.v1.train.create_global_step()
    group = MultiHashTable.from_configs({"slot0": _config(1), "slot1": _config(2)})
    pairs = {"slot0": ([0], [[1.0]]), "slot1": ([1], [[2.0, 2.0]])}
    train = [group.assign_add(pairs).as_op(), step.assign_add(1)]
    subtract = group.assign_add({"slot0": ([0], [[-1.0]])}).as_op()
    values = group.lookup({"slot0": [0], "slot1": [1]})
    basename = os.path.join(self.folder, "model.ckpt")
    saver = tf.compat.v1.train.CheckpointSaverHook(
      self.folder,
      save_steps=1000,
      listeners=[multi_hash_table_ops.MultiHashTableCheckpointSaverListener(basename)],
    )
    restorer = basic_restore_hook.CheckpointRestorerHook(
      listeners=[multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(basename)]
    )
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[saver]) as sess:
      sess.run(train)
    info = ckpt_info_pb2.CkptInfo()
    with open(os.path.join(self.folder, "ckpt.info-1")) as file:
      text_format.Parse(file.read(), info)
    self.assertEqual(dict(info.feature_counts), {"slot0": 1, "slot1": 1})
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[restorer]) as sess:
      self.assertAllEqual(sess.run(values)["slot0"], [[1]])
      sess.run(subtract)
      self.assertAllEqual(sess.run(values)["slot0"], [[0]])
      restorer.after_create_session(sess.raw_session(), None)
      self.assertAllEqual(sess.run(values)["slot0"], [[1]])
      self.assertAllEqual(sess.run(values)["slot1"], [[2, 2]])

  def test_export_meta_graph(self):
    MultiHashTable.from_configs({"slot0": _config(1)})
    meta_graph = tf.compat.v1.train.export_meta_graph()
    self.assertIn(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY, meta_graph.collection_def)
    with tf.Graph().as_default():
      tf.compat.v1.train.import_meta_graph(meta_graph)
      (group,) = tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
      updated = group.apply_gradients({"slot0": ([1], [[1.0]])}, _step()).lookup({"slot0": [1]})
      with self.session() as sess:
        sess.run(group.initializer)
        self.assertAllEqual(sess.run(updated)["slot0"], [[-1]])


class GroupObjectTest(GroupTest):
  def test_names_and_properties(self):
    group = MultiHashTable.from_configs({"b": _config(2), "a": _config(1)})
    suffixed = MultiHashTable.from_configs({"a": _config(1)}, name_suffix="x")

    self.assertEqual(list(group.table_names), ["a", "b"])
    self.assertEqual(list(group.get_table_dim_sizes()), [1, 2])
    self.assertEqual(group.shared_name, "MonolithMultiHashTable_")
    self.assertEqual(suffixed.shared_name, "MonolithMultiHashTable_x")
    self.assertIs(group.as_op(1, name="x"), group.handle.op)
    self.assertEqual(group.initializer.type, "CreateMonolithMultiHashTable")
    self.assertEqual(group.handle.op.type, "ReadMonolithMultiHashTable")
    written = group.assign_add({"a": ([1], [1.0])}).save("x").restore("x")
    self.assertIs(written.initializer, group.initializer)
    self.assertEqual(written.shared_name, group.shared_name)
    with self.assertRaises(NotImplementedError):
      group.lookup_entry({"a": [1]})
    with self.assertRaisesWithLiteralMatch(
      ValueError, "shared_name MonolithMultiHashTable_ has already been used."
    ):
      MultiHashTable.from_configs({"a": _config(1)})

  def test_learning_rates_and_segments_must_be_as_many(self):
    config = config_of(segment(1), segment(1), learning_rates=[1.0])
    with self.assertRaisesWithLiteralMatch(
      ValueError, "Size of learning_rate_fns and size of segments must be equal."
    ):
      MultiHashTable.from_configs({"a": config})

  def test_config_helpers(self):
    configs = {"b": _config(2), "a": _config(1)}
    cached = multi_hash_table_ops.convert_to_cached_config(configs)
    self.assertEqual(cached.table_names, ("a", "b"))
    self.assertEqual(cached.dims, (1, 2))
    self.assertEqual(multi_hash_table_ops.infer_dims(configs), [1, 2])
    mconfig = pb.MultiEmbeddingHashTableConfig.FromString(cached.mconfig)
    self.assertEqual(list(mconfig.names), ["a", "b"])
    self.assertEqual([len(c.entry_config.segments) for c in mconfig.configs], [1, 1])
    self.assertEqual(cached.slot_expire_time_config, b"")
    with self.session() as sess:
      self.assertEqual(sess.run(cached.mconfig_tensor), cached.mconfig)
    with tf.Graph().as_default(), self.session() as sess:
      group = MultiHashTable.from_cached_config(cached)
      sess.run(group.initializer)
      written = group.assign_add({"a": ([1], [1.0])})
      self.assertAllEqual(sess.run(written.lookup({"a": [1]}))["a"], [[1]])

  def test_first_expire_config_is_taken(self):
    configs = {
      "a": _config(1),
      "b": config_of(segment(1), default_expire_time=3),
      "c": config_of(segment(1), default_expire_time=4),
    }
    cached = multi_hash_table_ops.convert_to_cached_config(configs)
    self.assertEqual(
      cached.slot_expire_time_config,
      configs["b"].table_config.slot_expire_time_config.SerializeToString(),
    )

  def test_tensor_helpers(self):
    ragged = multi_hash_table_ops.concat_1d_tensors(
      tf.constant([1, 2], tf.int64), tf.constant([], tf.int64), tf.constant([3], tf.int64)
    )
    self.assertEqual(ragged.row_splits.dtype, tf.int64)
    flat = multi_hash_table_ops.flatten_n_tensors(tf.constant([[1.0, 2.0]]), tf.constant(3.0))
    parts = multi_hash_table_ops.get_list_from_flat_value(
      ragged, [1, 2, 3], tf.constant([1.0, 2, 3, 4, 5])
    )
    with self.session() as sess:
      self.assertEqual(sess.run(ragged).to_list(), [[1, 2], [], [3]])
      self.assertAllEqual(sess.run(flat), [1, 2, 3])
      one, two, three = sess.run(parts)
      self.assertAllEqual(one, [[1], [2]])
      self.assertEqual(two.shape, (0, 2))
      self.assertAllEqual(three, [[3, 4, 5]])

  def test_learning_rates_follow_the_sorted_names(self):
    # The dict's order must not matter.
    configs = {
      "b": config_of(segment(1), segment(1), learning_rates=[10.0, 100.0]),
      "a": config_of(segment(1), learning_rates=[1.0]),
    }
    group = MultiHashTable.from_configs(configs)
    with self.session() as sess:
      sess.run(group.initializer)
      updated = group.apply_gradients({"b": ([1], [[1.0, 1.0]]), "a": ([1], [1.0])}, _step())
      values = sess.run(updated.lookup({"a": [1], "b": [1]}))
      self.assertAllEqual(values["a"], [[-1]])
      self.assertAllEqual(values["b"], [[-10, -100]])

  def test_initializing_again_keeps_the_content(self):
    group = MultiHashTable.from_configs({"a": _config(1)})
    write = group.assign({"a": ([1], [[1.0]])}).as_op()
    with self.session() as sess:
      is_initialized = gen_monolith_ops.is_hash_table_initialized(group.handle)
      self.assertFalse(sess.run(is_initialized))
      with self.assertRaises(tf.errors.NotFoundError):
        sess.run(write)
      sess.run(group.initializer)
      self.assertTrue(sess.run(is_initialized))
      sess.run(write)
      sess.run(group.initializer)
      self.assertAllEqual(sess.run(group.lookup({"a": [1]}))["a"], [[1]])

  def test_resources_initializer_creates_it(self):
    group = MultiHashTable.from_configs({"a": _config(1)})
    lookup = group.lookup({"a": [1]})
    missing = resources.report_uninitialized_resources()
    with self.session() as sess:
      self.assertLen(sess.run(missing), 1)
      sess.run(group.initializer)
      self.assertEmpty(sess.run(missing))
    with tf.compat.v1.train.MonitoredSession() as sess:
      self.assertAllEqual(sess.run(lookup)["a"], [[0]])

  def test_proto_round_trip_in_a_scope(self):
    with tf.name_scope("s"):
      group = MultiHashTable.from_configs({"b": _config(2), "a": _config(1)}, saver_parallel=3)
    self.assertIsNone(group.to_proto("t"))
    proto = group.to_proto("s")
    copy = MultiHashTable.from_proto(proto, "s")

    self.assertLen(tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY), 1)
    with self.session() as sess:
      sess.run(copy.initializer)
      updated = copy.apply_gradients({"a": ([1], [2.0])}, _step())
      self.assertAllEqual(sess.run(updated.lookup({"a": [1]}))["a"], [[-2]])
      sess.run(copy.save(self.base).as_op())
    self.assertLen(glob.glob(self.base + "-*"), 3)

  def test_req_time_is_passed(self):
    group = MultiHashTable.from_configs({"a": _config(1)})
    time = lambda value: tf.constant(value, tf.int64)  # noqa: E731
    with self.session() as sess:
      sess.run(group.initializer)
      written = group.assign({"a": ([1], [1.0])}, time(11), enable_inter_table_parallelism=True)
      written = written.assign_add({"a": ([2], [1.0])}, req_time=time(12))
      written = written.apply_gradients({"a": ([3], [1.0])}, _step(), req_time=time(13))
      ragged = group.get_ragged_id({"a": [1, 2, 3, 4]})
      entries = gen_monolith_ops.monolith_multi_hash_table_lookup_entry(
        written.handle, ragged.values, ragged.row_splits
      )
      *present, absent = sess.run(entries)
      self.assertEqual(absent, b"")
      dumps = [pb.EntryDump.FromString(e) for e in present]
      self.assertEqual([d.last_update_ts_sec for d in dumps], [11, 12, 13])
      self.assertFalse(dumps[0].HasField("id"))

  def test_raw_calls(self):
    group = MultiHashTable.from_configs({"a": _config(1), "b": _config(2)})
    ids = {"b": [7, 8], "a": [7]}
    with self.session() as sess:
      sess.run(group.initializer)
      ragged = group.get_ragged_id(ids)
      flat = group.get_flat_value({"b": [[1.0, 2.0], [3.0, 4.0]], "a": 9.0})
      written = group.raw_assign(ragged, flat)
      value = written.raw_lookup(ragged)
      self.assertAllEqual(sess.run(value), [9, 1, 2, 3, 4])
      embeddings = sess.run(group.get_embeddings(ragged, value))
      self.assertAllEqual(embeddings["b"], [[1, 2], [3, 4]])
      updated = written.raw_apply_gradients(ragged, flat, _step())
      self.assertAllEqual(sess.run(updated.raw_lookup(ragged)), [0] * 5)
      empty = group.get_ragged_id({})
      self.assertAllEqual(sess.run(group.raw_lookup(empty)), [])
      self.assertAllEqual(sess.run(group.get_flat_value({})), [])

  def test_many_requests_in_one_lookup(self):
    group = MultiHashTable.from_configs({"a": _config(1), "b": _config(2)})
    with self.session() as sess:
      sess.run(group.initializer)
      pairs = {"a": ([1, 2], [[1.0], [2.0]]), "b": ([1, 2], [[10.0, 11.0], [20.0, 21.0]])}
      handle = group.assign(pairs).handle
      value = gen_monolith_ops.monolith_multi_hash_table_lookup(
        handle,
        tf.constant([1, 2, 2, 1, 1, 2], tf.int64),
        tf.constant([0, 1, 2, 3, 5, 6, 6], tf.int64),
      )
      want = [1, 20, 21] + [2, 10, 11, 10, 11] + [2]
      self.assertAllEqual(sess.run(value), want)

  def test_filter_is_shared_and_asked_for_absent_ids_only(self):
    thresholds = pb.SlotOccurrenceThresholdConfig(default_occurrence_threshold=1)
    handle = hash_filter_ops.create_hash_filter(1000, 7, thresholds.SerializeToString())
    group = MultiHashTable.from_configs({"a": _config(1)}, hash_filter=handle)
    add = group.assign_add({"a": ([1], [1.0])}).as_op()
    with self.session() as sess:
      sess.run(group.initializer)
      for want in (0, 1, 2, 3):
        sess.run(add)
        self.assertAllEqual(sess.run(group.lookup({"a": [1]}))["a"], [[want]])

  def test_bad_arguments(self):
    group = MultiHashTable.from_configs({"a": _config(1), "b": config_of(segment(1), segment(1))})
    ids = tf.constant([1, 2], tf.int64)
    splits = lambda *values: tf.constant(values, tf.int64)  # noqa: E731
    ops = gen_monolith_ops
    zero = _step()
    with self.session() as sess:
      sess.run(group.initializer)
      handle = group.handle
      rates = tf.constant([1.0, 1.0, 1.0])
      num = "The length of tensor ``id`` doesn't equal to table num."
      short = "The length of tensor ``value`` is too short"
      value = tf.constant([1.0, 1.0, 1.0])
      cases = [
        (ops.monolith_multi_hash_table_lookup(handle, ids, splits(0, 2)), "table size: 2"),
        (ops.monolith_multi_hash_table_lookup(handle, ids, splits()), "table size: 2"),
        (ops.monolith_multi_hash_table_lookup(handle, ids, splits(0, 2, 1)), "must not decrease"),
        (ops.monolith_multi_hash_table_lookup(handle, ids, splits(0, 1, 3)), "id_split ends at 3"),
        (ops.monolith_multi_hash_table_lookup(handle, ids, splits(-1, 1, 2)), r"id_split\[0\]"),
        (
          ops.monolith_multi_hash_table_assign(handle, ids, splits(0, 1, 2, 2, 2), value, zero),
          num,
        ),
        (
          ops.monolith_multi_hash_table_assign(handle, ids, splits(0, 1, 2), value[:2], zero),
          short,
        ),
        (
          ops.monolith_multi_hash_table_assign_add(handle, ids, splits(0, 1, 2), value[:2], zero),
          short,
        ),
        (
          ops.monolith_multi_hash_table_optimize(
            handle, ids, splits(0, 1, 2), value[:2], rates, zero, zero
          ),
          short,
        ),
        (
          ops.monolith_multi_hash_table_optimize(
            handle, ids, splits(0, 1, 2), value, rates[:2], zero, zero
          ),
          "The length of tensor ``learning_rate`` is too short",
        ),
        (group.fused_lookup(ids, [1, 2], 1)[0], "fused_slot_size sums up to 3"),
        (group.fused_lookup(ids, [3, -1], 1)[0], r"fused_slot_size\[1\] is -1"),
        (group.fused_lookup(ids, [1, 1, 0], 1)[0], "fused_slot_size has shape"),
        (
          group.fused_apply_gradient(
            ids, ids, [1, 1], [1.0, 1.0], [0, 1, 2], [0, 1, 3], zero, zero, 1
          ).handle,
          "id_grads",
        ),
        (
          group.fused_apply_gradient(
            ids, ids, [1, 1], [1.0] * 3, [0, 2, 2], [0, 1, 3], zero, zero, 1
          ).handle,
          r"id_offsets\[1\] is 2",
        ),
      ]
      for fetch, message in cases:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          sess.run(fetch)
      lookup = group.lookup({"a": [1, 2], "b": [1, 2]})
      self.assertAllEqual(sess.run(lookup)["b"], np.zeros((2, 2)))

  def test_bad_configs(self):
    filters = hash_filter_ops.create_dummy_hash_filter()
    client = gen_monolith_ops.monolith_dummy_sync_client(shared_name="s")
    good = config_of(segment(1)).table_config
    unequal = pb.MultiEmbeddingHashTableConfig(names=["a", "b"], configs=[good])
    twice = pb.MultiEmbeddingHashTableConfig(names=["a", "a"], configs=[good, good])
    broken = pb.MultiEmbeddingHashTableConfig(
      names=["a", "bad"], configs=[good, pb.EmbeddingHashTableConfig()]
    )
    with self.session() as sess:
      for i, (config, message) in enumerate(
        [
          (b"\xff", "Unable to parse config."),
          (unequal.SerializeToString(), "2 names and 1 configs"),
          (twice.SerializeToString(), "two tables named a"),
          (broken.SerializeToString(), "table bad: "),
          (b"", "0 names"),
        ]
      ):
        created = gen_monolith_ops.create_monolith_multi_hash_table(
          config, filters, client, shared_name=f"g{i}"
        )
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          sess.run(created)

  def test_reads_run_in_parallel_in_functions(self):
    group = MultiHashTable.from_configs({"a": _config(1)})

    @tf.function
    def read_twice(handle):
      ids, splits = tf.constant([1], tf.int64), tf.constant([0, 1], tf.int64)
      lookup = gen_monolith_ops.monolith_multi_hash_table_lookup
      return lookup(handle, ids, splits), lookup(handle, ids, splits)

    graph = read_twice.get_concrete_function(tf.TensorSpec([], tf.resource)).graph
    lookups = [op for op in graph.get_operations() if op.type.endswith("Lookup")]
    self.assertLen(lookups, 2)
    self.assertEqual([list(op.control_inputs) for op in lookups], [[], []])
    with self.session() as sess:
      sess.run(group.initializer)
      self.assertAllEqual(sess.run(read_twice(group.handle)), [[0], [0]])


if __name__ == "__main__":
  tf.test.main()
