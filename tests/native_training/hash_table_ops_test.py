"""The table through its ops: worked examples, the Python object, listeners, graph round trips."""

import threading

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  entry,
  graph_meta,
  hash_filter_ops,
  hash_table_ops,
  learning_rate_functions,
)
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import (
  INT64_MAX,
  INT64_MIN,
  GraphTest,
  at_step,
  config_of,
  make_table,
  segment,
  temp_dir,
)

tf.compat.v1.disable_eager_execution()


class WorkedExamplesTest(GraphTest):
  def test_assign_add_and_lookup(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      table = table.assign_add([0, 1], tf.ones([2, 1]))

      values, size = sess.run([table.lookup([0, 1, 2]), table.size()])

      self.assertAllEqual(values, [[1], [1], [0]])
      self.assertEqual(values.dtype, np.float32)
      self.assertEqual(size, 2)

  def test_assign_one_dimensional_value(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      table = table.assign_add([0, 1], tf.ones([2, 1]))
      table = table.assign([1], [5.0])

      self.assertAllEqual(sess.run(table.lookup([0, 1, 2])), [[1], [5], [0]])

  def test_assign_of_padded_and_of_wider_rows(self):
    table = hash_table_ops.test_hash_table(2)
    rows = np.arange(12, dtype=np.float32).reshape([4, 3])
    with self.session() as sess:
      for write in (table.assign, table.assign_add):
        # One row for each id, and more; the shape does not matter where the number is right.
        sess.run(write([1, 2], rows.reshape([6, 2])).as_op())
        sess.run(write([3, 4, 5, 6, 7, 8], rows).as_op())
        for values in (rows[:2], rows[:1], np.zeros([2, 1], np.float32)):
          with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "The dim doesn't match expectation. "
          ):
            sess.run(write([1, 2], values).as_op())

      self.assertAllEqual(sess.run(table.lookup([1, 2])), [[0, 2], [4, 6]])

  @parameterized.named_parameters(
    ("number", lambda: 0.1),
    ("callable", lambda: lambda: tf.constant(0.1)),
  )
  def test_sgd_with_duplicates(self, make_rate):
    table = hash_table_ops.test_hash_table(1, learning_rate=make_rate())
    with self.session() as sess:
      updated = table.apply_gradients([0, 0, 1], tf.constant([[-1.0]] * 3), at_step())

      self.assertAllClose(sess.run(updated.lookup([0, 1])), [[0.2], [0.1]])

  def test_learning_rate_schedule(self):
    step = tf.compat.v1.train.get_or_create_global_step()
    rate = learning_rate_functions.PolynomialDecay(
      initial_learning_rate=0.01, decay_steps=10, end_learning_rate=0.11
    )
    table = hash_table_ops.test_hash_table(1, learning_rate=rate)
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(step.assign(1))
      updated = table.apply_gradients([0, 0, 1], tf.constant([[-1.0]] * 3), step)

      self.assertAllClose(sess.run(updated.lookup([0, 1])), [[0.04], [0.02]])

  @parameterized.parameters(False, True)
  def test_dedup_sums_gradients(self, use_multi_threads):
    table = hash_table_ops.test_hash_table(10, learning_rate=0.1)
    with self.session() as sess:
      updated = table.apply_gradients(
        [0, 1, 0, 1, 0],
        -tf.ones([5, 10]),
        at_step(),
        use_multi_threads=use_multi_threads,
        enable_dedup=True,
      )

      self.assertAllClose(sess.run(updated.lookup([0, 1])), [[0.3] * 10, [0.2] * 10])

  def test_gradients_of_a_lookup_go_to_other_ids(self):
    table = hash_table_ops.test_hash_table(1, learning_rate=0.1)
    with self.session() as sess:
      looked_up = table.lookup([0, 0, 1])
      loss = -2.0 * looked_up
      (gradient,) = tf.gradients(loss, looked_up)
      updated = table.apply_gradients([1, 0, 1], 0.5 * gradient, at_step())

      self.assertAllClose(sess.run(updated.lookup([0, 1])), [[0.1], [0.2]])

  def test_filter_drops_the_first_occurrences(self):
    table = hash_table_ops.test_hash_table(
      1, enable_hash_filter=True, learning_rate=0.1, occurrence_threshold=3
    )
    with self.session() as sess:
      updated = table.apply_gradients([0, 0, 1], tf.constant([[-1.0]] * 3), at_step())
      values = updated.lookup([0, 1])

      self.assertAllClose(sess.run(values), [[0], [0]])
      self.assertAllClose(sess.run(values), [[0.1], [0]])
      self.assertAllClose(sess.run(values), [[0.3], [0]])
      self.assertAllClose(sess.run(values), [[0.5], [0.1]])

  def test_expired_rows_are_not_saved(self):
    now = 10000000
    table = hash_table_ops.test_hash_table(1, expire_time=1)
    with self.session() as sess:
      for fid, time in ((1, now - 86401), (2, now - 86399), (3, now)):
        table = table.assign_add([fid], [[float(fid)]], req_time=tf.constant(time, tf.int64))
      table = table.save(temp_dir("table")).restore(temp_dir("table"))

      self.assertAllEqual(sess.run(table.lookup([1, 2, 3])), [[0], [2], [3]])

  @parameterized.parameters((0, 0.0), (3600, 1.0))
  def test_expire_time_zero_expires_everything(self, expire_time, want):
    table = hash_table_ops.test_hash_table(1, expire_time=expire_time)
    with self.session() as sess:
      table = table.assign_add([1, 2], [[1.0], [1.0]], req_time=tf.constant(100, tf.int64))
      table = table.save(temp_dir("table")).restore(temp_dir("table"))

      self.assertAllEqual(sess.run(table.lookup([1, 2])), [[want], [want]])

  def test_expire_time_per_slot(self):
    first = make_table(segment(1), default_expire_time=3600, slot_expire_times={1: 0, 2: 1})
    ids = [1 << 48, 2 << 48]
    with self.session() as sess:
      table = first.assign_add(ids, [[1.0], [2.0]], req_time=tf.constant(100, tf.int64))
      table = table.save(temp_dir("table")).restore(temp_dir("table"))
      self.assertAllEqual(sess.run(table.lookup(ids)), [[0], [2]])

      again = first.save(temp_dir("again")).restore(temp_dir("again"))
      self.assertAllEqual(sess.run(again.lookup(ids)), [[0], [2]])

  @parameterized.parameters(None, 0, 100)
  def test_equal_times_do_not_expire(self, req_time):
    time = None if req_time is None else tf.constant(req_time, tf.int64)
    table = hash_table_ops.test_hash_table(1, expire_time=1)
    with self.session() as sess:
      table = table.assign_add([1, 2], [[1.0], [2.0]], req_time=time)
      table = table.save(temp_dir("table")).restore(temp_dir("table"))

      self.assertAllEqual(sess.run(table.lookup([1, 2])), [[1], [2]])

  def test_fused_lookup(self):
    tables = []
    for i, dim in enumerate([1, 1, 2]):
      table = hash_table_ops.test_hash_table(dim)
      value = tf.ones([2, dim]) if i % 2 == 0 else tf.zeros([2, dim])
      tables.append(table.assign([3 * i, 3 * i + 1], value))
    with self.session() as sess:
      embeddings, splits, id_offsets, offsets, indices = sess.run(
        hash_table_ops.fused_lookup([t.table for t in tables], [0, 4, 6, 1, 3, 7], [1] * 6, 2)
      )

      self.assertAllEqual(embeddings, [1, 0, 1, 1, 1, 0, 1, 1])
      self.assertAllEqual(splits, [4, 4])
      self.assertAllEqual(id_offsets, [0, 1, 2, 3, 4, 5, 6])
      self.assertAllEqual(offsets, [0, 1, 2, 4, 5, 6, 8])
      self.assertAllEqual(indices, [0, 4, 6, 1, 3, 7])
      self.assertEqual(splits.dtype, np.int32)

  def test_fused_optimize(self):
    tables = []
    for i, dim in enumerate([1, 2]):
      table = hash_table_ops.test_hash_table(dim)
      value = tf.ones([2, dim]) if i % 2 == 0 else tf.zeros([2, dim])
      tables.append(table.assign([3 * i, 3 * i + 1], value).table)
    ids, sizes = tf.constant([0, 4, 1, 3], tf.int64), [1, 1, 1, 1]
    with self.session() as sess:
      _, _, id_offsets, offsets, indices = hash_table_ops.fused_lookup(tables, ids, sizes, 2)
      updated = hash_table_ops.fused_apply_gradient(
        tables,
        ids,
        indices,
        sizes,
        tf.constant([-1.0, -2, -2, -1, -2, -2]),
        id_offsets,
        offsets,
        tf.constant([0.1, 0.1]),
        tf.constant(0, tf.int64),
        at_step(),
        2,
      )
      embeddings, splits, id_offsets, offsets, _ = sess.run(
        hash_table_ops.fused_lookup(updated, ids, sizes, 2)
      )

      self.assertLen(updated, 2)
      self.assertAllClose(embeddings, [1.1, 0.2, 0.2, 1.1, 0.2, 0.2])
      self.assertAllEqual(splits, [3, 3])
      self.assertAllEqual(id_offsets, [0, 1, 2, 3, 4])
      self.assertAllEqual(offsets, [0, 1, 3, 4, 6])

  def test_batch_softmax_counts_steps_between_occurrences(self):
    table = make_table(
      segment(1, entry.BatchSoftmaxOptimizer(0.1), entry.BatchSoftmaxInitializer(1.0)),
      learning_rates=[0.1],
    )
    step = tf.compat.v1.placeholder(tf.int64, [])
    ids = tf.compat.v1.placeholder(tf.int64, [None])
    with self.session() as sess:
      grads = tf.zeros([tf.size(ids), 1])
      update = table.apply_gradients(ids, grads, step).as_op()
      for i in range(0, 1000, 5):
        sess.run(update, {step: i, ids: [0, 1] if i % 10 == 0 else [0]})
      values = sess.run(table.lookup([0, 1]))

      self.assertAllClose(1 / np.maximum(values, 1), [[0.2], [0.1]], atol=0.01)

  def test_restore_of_nothing_is_an_error(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, "There is no valid sharded files for .*absent"
      ):
        sess.run(table.restore(temp_dir("absent")).as_op())

  def test_a_hundred_threads(self):
    table = hash_table_ops.test_hash_table(1, learning_rate=0.01)
    fid = tf.compat.v1.placeholder(tf.int64, [None])
    value = tf.compat.v1.placeholder(tf.float32, [None, 1])
    with self.session() as sess:
      add = table.assign_add(fid, value).as_op()
      optimize = table.apply_gradients(fid, value, at_step()).as_op()

      def work(i):
        sess.run(add, {fid: [i], value: [[i]]})
        sess.run(optimize, {fid: [i], value: [[-200.0 * i]]})

      threads = [threading.Thread(target=work, args=(i,)) for i in range(100)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()

      self.assertAllClose(sess.run(table.lookup(list(range(100)))), [[3.0 * i] for i in range(100)])

  def test_learning_rate_per_segment(self):
    table = make_table(segment(1), segment(2), learning_rates=[1.0, 2.0])
    with self.session() as sess:
      updated = table.apply_gradients([7], [[1.0, 2.0, 3.0]], at_step())

      self.assertAllEqual(sess.run(updated.lookup([7])), [[-1, -4, -6]])


class HashTableTest(GraphTest):
  def test_accessors(self):
    table = hash_table_ops.test_hash_table(3, name_suffix="x", extra_restore_names=["a:b/c"])

    self.assertEqual(table.name, "MonolithHashTable_x")
    self.assertEqual(table.dim_size, 3)
    self.assertEqual(table.extra_restore_names, ["a:b/c"])
    self.assertIsNone(table.export_share_embedding)
    self.assertEqual(table.table.name, "MonolithHashTable_x:0")
    self.assertIs(table.as_op(), table.table)
    self.assertEqual(hash_table_ops._table_tensor_prefix(table), "MonolithHashTable_x")
    self.assertEqual(
      hash_table_ops._all_table_tensor_prefix(table), ["MonolithHashTable_x", "a-b-c"]
    )
    self.assertIn("CPU:0", table.table.device)

  def test_shared_name_is_unique_per_graph(self):
    hash_table_ops.test_hash_table(1, name_suffix="x")
    with self.assertRaisesWithLiteralMatch(
      ValueError, "shared_name MonolithHashTable_x has already been used."
    ):
      hash_table_ops.test_hash_table(1, name_suffix="x")
    with tf.Graph().as_default():
      hash_table_ops.test_hash_table(1, name_suffix="x")

  def test_default_suffix_contains_the_scope(self):
    with tf.name_scope("scope"):
      table = hash_table_ops.test_hash_table(1)
      also = hash_table_ops.test_hash_table(1, name_suffix="")

    self.assertEqual(table.name, "MonolithHashTable_scope/test")
    self.assertEqual(also.name, "MonolithHashTable_scope/test_1")
    self.assertEqual(hash_table_ops._table_tensor_prefix(table), "MonolithHashTable_scope-test")
    with self.session() as sess:
      self.assertEqual(sess.run(table.assign_add([1], [[1.0]]).size()), 1)

  def test_pytest_does_not_collect_the_factory(self):
    self.assertFalse(hash_table_ops.test_hash_table.__test__)

  def test_metadata(self):
    table = hash_table_ops.test_hash_table(1, name_suffix="x")
    metadata = hash_table_ops.HashTable.get_metadata()

    self.assertIs(
      metadata, graph_meta.get_meta("hash_table_metadata", hash_table_ops.HashTableMetadata)
    )
    self.assertEqual(metadata.name_set, {"MonolithHashTable_x"})
    self.assertIs(metadata.tensor_table_to_obj_dict[table.table.ref()], table)

  def test_vocab_hash_table(self):
    table = hash_table_ops.vocab_hash_table(10, 2, learning_rate=0.5)
    with self.session() as sess:
      updated = table.apply_gradients([1000], [[1.0, 2.0]], at_step())
      self.assertAllClose(sess.run(updated.lookup([1000])), [[-0.5, -1.0]])

  def test_adagrad_factory(self):
    table = hash_table_ops.test_hash_table(1, use_adagrad=True)
    with self.session() as sess:
      updated = table.apply_gradients([1], [[1.0]], at_step())
      self.assertAllClose(sess.run(updated.lookup([1])), [[-0.9534626]])

  def test_learning_rates_and_segments_must_be_as_many(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, "Size of learning_rate_fns and size of segments must be equal."
    ):
      make_table(segment(1), segment(1), learning_rates=[1.0])

  def test_type_must_be_set(self):
    config = config_of(segment(1))
    config.table_config.ClearField("cuckoo")
    with self.assertRaises(AssertionError):
      hash_table_ops.hash_table_from_config(config)

  def test_reading_through_the_old_object_sees_what_ran(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      write = table.assign_add([1], [[1.0]]).as_op()
      for i in range(3):
        self.assertAllEqual(sess.run(table.lookup([1])), [[i]])
        sess.run(write)

  def test_identical_ops_are_not_merged(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      adds = [table.assign_add([1], [[1.0]]).as_op() for _ in range(10)]
      sess.run(adds)
      self.assertAllEqual(sess.run(table.lookup([1])), [[10]])

      before = table.lookup([1])
      with tf.control_dependencies([before]):
        write = table.assign_add([1], [[1.0]])
      after = write.lookup([1])
      self.assertAllEqual(sess.run([before, after]), [[[10]], [[11]]])

  def test_table_update_waits(self):
    table = hash_table_ops.test_hash_table(1)
    variable = tf.compat.v1.get_variable("v", initializer=0)
    with self.session() as sess:
      sess.run(variable.initializer)
      sess.run(table.table_update(variable.assign(3)).lookup([1]))
      self.assertEqual(sess.run(variable), 3)

  def test_lookup_does_not_insert_nor_initialize(self):
    table = make_table(segment(1, initializer=entry.ConstantsInitializer(4.0)))
    with self.session() as sess:
      self.assertAllEqual(sess.run(table.lookup([1, 2])), [[0], [0]])
      self.assertEqual(sess.run(table.size()), 0)
      sess.run(table.assign_add([1], [[1.0]]).as_op())
      self.assertAllEqual(sess.run(table.lookup([1, 2])), [[5], [0]])

  def test_every_int64_is_an_id(self):
    ids = [0, 1, -1, INT64_MIN, INT64_MAX, INT64_MIN + 1, 1 << 48, -(1 << 48)]
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      table = table.assign(ids, [[float(i)] for i in range(len(ids))])
      values, absent, size = sess.run([table.lookup(ids), table.lookup([2, -2]), table.size()])

      self.assertAllEqual(values, [[i] for i in range(len(ids))])
      self.assertAllEqual(absent, [[0], [0]])
      self.assertEqual(size, len(ids))

  def test_empty_batches(self):
    table = hash_table_ops.test_hash_table(2)
    none = tf.constant([], tf.int64)
    with self.session() as sess:
      table = table.assign(none, tf.zeros([0, 2])).assign_add(none, tf.zeros([0, 2]))
      for dedup in (False, True):
        for threads in (False, True):
          table = table.apply_gradients(none, tf.zeros([0, 2]), at_step(), threads, dedup)
      values, entries, size = sess.run(
        [table.lookup(none, use_multi_threads=True), table.lookup_entry(none), table.size()]
      )

      self.assertEqual(values.shape, (0, 2))
      self.assertEqual(entries.shape, (0,))
      self.assertEqual(size, 0)

  def test_values_of_any_shape(self):
    table = hash_table_ops.test_hash_table(1)
    wide = hash_table_ops.test_hash_table(2)
    with self.session() as sess:
      table = table.apply_gradients([1], tf.constant(2.0), at_step())
      table = table.apply_gradients([2, 3], [4.0, 5.0], at_step())
      self.assertAllEqual(sess.run(table.lookup([1, 2, 3])), [[-2], [-4], [-5]])
      self.assertAllEqual(sess.run(wide.assign([1], [1.0, 2.0]).lookup([1])), [[1, 2]])
      # Callers pad.
      padded = wide.assign_add([1], [[1.0, 2.0], [7.0, 8.0]])
      self.assertAllEqual(sess.run(padded.lookup([1])), [[2, 4]])

  def test_static_shapes(self):
    table = hash_table_ops.test_hash_table(3)
    unknown = tf.compat.v1.placeholder(tf.int64, [None])

    self.assertEqual(table.lookup([1, 2]).shape.as_list(), [2, 3])
    self.assertEqual(table.lookup(unknown).shape.as_list(), [None, 3])
    self.assertEqual(table.lookup_entry([1, 2]).shape.as_list(), [2])
    self.assertEqual(table.size().shape.as_list(), [])
    offset, entries = table.save_as_tensor(0, 1, 10, 0)
    self.assertEqual(offset.shape.as_list(), [])
    self.assertEqual(entries.shape.as_list(), [None])
    with self.assertRaises(ValueError):
      hash_table_ops.fused_lookup([table], [1], [1, 1], 1)

  def test_lookup_entry(self):
    table = make_table(segment(2, entry.AdagradOptimizer(initial_accumulator_value=0.5)))
    with self.session() as sess:
      table = table.assign([5], [[1.0, -2.0]], req_time=tf.constant(77, tf.int64))
      present, absent = sess.run(table.lookup_entry([5, 6]))
      dump = embedding_hash_table_pb2.EntryDump.FromString(present)

      self.assertEqual(absent, b"")
      self.assertFalse(dump.HasField("id"))
      self.assertAllEqual(dump.num, [1, -2])
      self.assertAllEqual(dump.opt.dump[0].adagrad.norm, [0.5, 0.5])
      self.assertEqual(dump.last_update_ts_sec, 77)

  def test_save_as_tensor_gives_every_entry_once(self):
    table = hash_table_ops.test_hash_table(1)
    part, offset = (tf.compat.v1.placeholder(t, []) for t in (tf.int32, tf.int64))
    with self.session() as sess:
      sess.run(table.assign(list(range(100)), tf.ones([100, 1])).as_op())
      page = table.save_as_tensor(part, 10, 2, offset)
      ids = []
      for i in range(10):
        at = 0
        while True:
          at, entries = sess.run(page, {part: i, offset: at})
          self.assertGreater(at, 0)
          self.assertLessEqual(len(entries), 2)
          ids += [embedding_hash_table_pb2.EntryDump.FromString(e).id for e in entries]
          if len(entries) < 2:
            break

      self.assertAllEqual(sorted(ids), list(range(100)))

  def test_save_as_tensor_ignores_expiry(self):
    table = hash_table_ops.test_hash_table(1, expire_time=0)
    with self.session() as sess:
      table = table.assign([1, 2], [[1.0], [2.0]])
      _, entries = sess.run(table.save_as_tensor(0, 1, 10, 0))
      self.assertLen(entries, 2)

  def test_extract_slot(self):
    dumps = [
      embedding_hash_table_pb2.EntryDump(id=fid).SerializeToString()
      for fid in (1 << 48, -1, INT64_MIN, 5 << 54, 7)
    ]
    with self.session() as sess:
      v2, v1 = sess.run(
        [
          hash_table_ops.extract_slot_from_entry(tf.constant(dumps)),
          hash_table_ops.extract_slot_from_entry(tf.constant(dumps), fid_v2=False),
        ]
      )
      self.assertAllEqual(v2, [1, 32767, 0, 320, 0])
      self.assertAllEqual(v1, [0, 1023, 512, 5, 0])
      self.assertEqual(v2.dtype, np.int32)
      garbage = hash_table_ops.extract_slot_from_entry(tf.constant([b"\xff\xff\xff", b""]))
      self.assertAllEqual(sess.run(garbage), [0, 0])

  def test_lookup_gradient(self):
    with self.session() as sess:
      ids, grads = sess.run(
        gen_monolith_ops.monolith_hash_table_lookup_gradient(
          tf.constant([[1, 0], [0, 0], [1, 1]], tf.int64),
          tf.constant([7, 8, 9], tf.int64),
          tf.constant([[1.0, 2.0], [3.0, 4.0]]),
        )
      )
      self.assertAllEqual(ids, [7, 8, 9])
      self.assertAllEqual(grads, [[3, 4], [1, 2], [3, 4]])

  def test_time_is_set_not_maxed_and_assign_keeps_state(self):
    table = make_table(segment(1, entry.AdagradOptimizer(initial_accumulator_value=1.0)))
    with self.session() as sess:
      table = table.apply_gradients([1], [[2.0]], at_step(), req_time=tf.constant(50, tf.int64))
      table = table.assign([1], [[9.0]])
      dump = embedding_hash_table_pb2.EntryDump.FromString(sess.run(table.lookup_entry([1]))[0])

      self.assertEqual(dump.last_update_ts_sec, 0)
      self.assertAllEqual(dump.num, [9])
      self.assertAllEqual(dump.opt.dump[0].adagrad.norm, [5])

  def test_multi_threaded_batches_equal_single_threaded_ones(self):
    rng = np.random.default_rng(1)
    ids = rng.integers(-500, 500, 20000)
    grads = rng.standard_normal((20000, 4)).astype(np.float32)
    unique = np.unique(ids)
    optimizer = entry.AdagradOptimizer(initial_accumulator_value=0.1)
    with self.session() as sess:
      results = []
      for threads in (False, True):
        for dedup in (False, True):
          table = make_table(segment(4, optimizer), learning_rates=[0.1])
          table = table.apply_gradients(ids, grads, at_step(), threads, dedup)
          results.append(sess.run(table.lookup(unique, use_multi_threads=threads)))

      self.assertAllEqual(results[0], results[2])
      self.assertAllEqual(results[1], results[3])
      self.assertNotAllClose(results[0], results[1])

  def test_queue_size_is_accepted(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      handle = gen_monolith_ops.monolith_hash_table_optimize(
        table.table,
        tf.constant([1], tf.int64),
        tf.constant([[1.0]]),
        tf.constant([1.0]),
        tf.constant(0, tf.int64),
        at_step(),
        queue_size=5,
      )
      sess.run(handle)
      self.assertAllEqual(sess.run(table.lookup([1])), [[-1]])

  def test_wrong_dim_size(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, "dim_size should match hash table size."
      ):
        sess.run(
          gen_monolith_ops.monolith_hash_table_lookup(table.table, tf.constant([1], tf.int64), 2)
        )

  def test_unparsable_config(self):
    with self.session() as sess:
      handle = gen_monolith_ops.monolith_hash_table(
        hash_filter_ops.create_dummy_hash_filter(),
        gen_monolith_ops.monolith_dummy_sync_client(shared_name="s"),
        config=b"\xff\xff",
        shared_name="bad",
      )
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        "Unable to parse config. Make sure it is serialized version of EmbeddingHashTableConfig.",
      ):
        sess.run(handle)

  def test_canonical_config_bytes(self):
    config = config_of(segment(1)).table_config
    # The entry objects write their zero defaults; what a caller fills by hand is shorter.
    plain = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    plain.cuckoo.SetInParent()
    part = plain.entry_config.segments.add(dim_size=1)
    part.init_config.zeros.SetInParent()
    part.opt_config.sgd.SetInParent()
    part.comp_config.fp32.SetInParent()

    self.assertEqual(plain.SerializeToString().hex(), "0a100a0e0a020a00120212001a020a0038012a00")
    self.assertEqual(config.entry_config.segments[0].dim_size, 1)

  def test_read_only_ops_run_in_parallel_in_functions(self):
    table = hash_table_ops.test_hash_table(1)

    @tf.function
    def read_and_write(handle):
      read = gen_monolith_ops.monolith_hash_table_lookup(handle, tf.constant([1], tf.int64), 1)
      again = gen_monolith_ops.monolith_hash_table_lookup(handle, tf.constant([1], tf.int64), 1)
      gen_monolith_ops.monolith_hash_table_assign_add(
        handle, tf.constant([1], tf.int64), tf.constant([[1.0]]), tf.constant(0, tf.int64)
      )
      after = gen_monolith_ops.monolith_hash_table_lookup(handle, tf.constant([1], tf.int64), 1)
      return read, again, after

    concrete = read_and_write.get_concrete_function(tf.TensorSpec([], tf.resource))
    lookups = [op for op in concrete.graph.get_operations() if op.type.endswith("Lookup")]
    (write,) = (op for op in concrete.graph.get_operations() if op.type.endswith("AssignAdd"))
    self.assertLen(lookups, 3)
    self.assertEmpty(lookups[1].control_inputs)
    self.assertCountEqual(write.control_inputs, lookups[:2])
    self.assertIn(write, lookups[2].control_inputs)
    with self.session() as sess:
      self.assertAllEqual(sess.run(read_and_write(table.table)), [[[0]], [[0]], [[1]]])

  def test_exporting_makes_serving_tables(self):
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "ServingEntryAccessor"):
        sess.run(table.apply_gradients([1], [[1.0]], at_step()).as_op())
      self.assertAllEqual(sess.run(table.assign([1], [[2.0]]).lookup([1])), [[2]])
      with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, "ServingEntryAccessor"):
        sess.run(table.save(temp_dir("t")).as_op())

  def test_skip_zero_embedding_of_serving_tables(self):
    table = make_table(segment(2), serving=True, skip_zero_embedding=True)
    with self.session() as sess:
      sess.run(table.assign([1, 2, 3], [[1.0, 0], [0, 0], [0, -1.0]]).as_op())
      self.assertEqual(sess.run(table.size()), 2)
      sess.run(table.assign([1], [[0.0, 0.0]]).as_op())
      self.assertEqual(sess.run(table.size()), 1)
      self.assertAllEqual(sess.run(table.lookup([1, 2, 3])), [[0, 0], [0, 0], [0, -1]])

  def test_skip_zero_embedding_needs_a_serving_table(self):
    table = make_table(segment(1), skip_zero_embedding=True)
    with self.session() as sess:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        "Only EntryConfig_EntryType_SERVING supports skip_zero_embedding!",
      ):
        sess.run(table.size())

  def test_one_table_in_two_sessions_of_one_server(self):
    server = tf.distribute.Server.create_local_server()
    table = hash_table_ops.test_hash_table(1, name_suffix="shared")
    write = table.assign_add([1], [[1.0]]).as_op()
    with tf.compat.v1.Session(server.target) as sess:
      sess.run(write)
    with tf.compat.v1.Session(server.target) as sess:
      sess.run(write)
      self.assertAllEqual(sess.run(table.lookup([1])), [[2]])

  def test_a_dummy_sync_client_changes_nothing(self):
    client = gen_monolith_ops.monolith_dummy_sync_client(shared_name="client")
    table = hash_table_ops.test_hash_table(1, sync_client=client)
    with self.session() as sess:
      updated = table.assign([1], [[1.0]]).apply_gradients([1], [[1.0]], at_step())
      self.assertAllEqual(sess.run(updated.lookup([1])), [[0]])


if __name__ == "__main__":
  tf.test.main()
