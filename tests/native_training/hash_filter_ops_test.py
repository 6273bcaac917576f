"""Occurrence filters: worked examples, files, gradients, listeners."""

import glob
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import basic_restore_hook, hash_filter_ops, hash_table_ops, utils
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import GraphTest, config_of, remove_manifest, segment, write_records

tf.compat.v1.disable_eager_execution()


def _thresholds(default: int = 0, slots: dict[int, int] | None = None) -> bytes:
  config = pb.SlotOccurrenceThresholdConfig(default_occurrence_threshold=default)
  for slot, threshold in (slots or {}).items():
    config.slot_occurrence_thresholds.add(slot=slot, occurrence_threshold=threshold)
  return config.SerializeToString()


def _split_files(basename: str) -> list[str]:
  return sorted(glob.glob(basename + "*"))


def _metas(basename: str) -> list[pb.HashFilterSplitMetaDump]:
  return [
    pb.HashFilterSplitMetaDump.FromString(next(tf.compat.v1.io.tf_record_iterator(name)))
    for name in _split_files(basename)
  ]


class FilterTest(GraphTest):
  def setUp(self):
    super().setUp()
    self.folder = os.environ["TEST_TMPDIR"]
    self.base = os.path.join(self.folder, "filters", "filter")

  def masks(self, handle, ids):
    """Returns gradients of ones for `ids`; fetching them counts an occurrence each."""
    embeddings = tf.zeros([len(ids), 2])
    same = hash_filter_ops.intercept_gradient(handle, tf.constant(ids, tf.int64), embeddings)
    (gradient,) = tf.gradients(same, embeddings)
    return gradient[:, 0]


class InterceptTest(FilterTest):
  def test_hash_filter_basic(self):
    handle = hash_filter_ops.create_hash_filter(100, 7, _thresholds(3))
    kept = self.masks(handle, [1, 3 << 17, 1])
    with self.session() as sess:
      self.assertAllEqual(sess.run(kept), [0, 0, 0])
      self.assertAllEqual(sess.run(kept), [0, 0, 1])
      self.assertAllEqual(sess.run(kept), [1, 0, 1])
      self.assertAllEqual(sess.run(kept), [1, 1, 1])

  def test_hash_filter_save_restore(self):
    handle = hash_filter_ops.create_hash_filter(100, 7, _thresholds(3))
    kept = self.masks(handle, [1, 3 << 17, 1])
    save = hash_filter_ops.save_hash_filter(handle, self.base, True)
    restore = hash_filter_ops.restore_hash_filter(handle, self.base, True)
    with self.session() as sess:
      sess.run(kept)
      self.assertAllEqual(sess.run(kept), [0, 0, 1])
      sess.run(save)
      self.assertLen(_split_files(self.base), 7)
      # Counts since the save are forgotten, also in a new session.
      sess.run(kept)
      sess.run(restore)
      self.assertAllEqual(sess.run(kept), [1, 0, 1])
    with self.session() as sess:
      sess.run(restore)
      self.assertAllEqual(sess.run(kept), [1, 0, 1])
      self.assertAllEqual(sess.run(kept), [1, 1, 1])

  def test_sliding_over_many_splits(self):
    handle = hash_filter_ops.create_hash_filter(300, 100, _thresholds(2))
    kept = self.masks(handle, [1, 1 << 17, 2 << 17, 1])
    save = hash_filter_ops.save_hash_filter(handle, self.base, True)
    restore = hash_filter_ops.restore_hash_filter(handle, self.base, True)
    with self.session() as sess:
      sess.run(save)
      metas = _metas(self.base)
      self.assertLen(metas, 100)
      for meta in metas:
        self.assertEqual((meta.total_size, meta.num_elements), (3, 0))
        self.assertEqual(meta.fill_rate, 1.2)
        sliding = meta.sliding_hash_filter_meta
        self.assertEqual(sliding.split_num, 100)
        self.assertEqual((sliding.head, sliding.head_increment), (0, 0))
        self.assertEqual(sliding.max_forward_step, 2)
        self.assertEqual(sliding.max_backward_step, 98)
        self.assertEqual(sliding.max_step, 16)

      self.assertAllEqual(sess.run(kept), [0, 0, 0, 0])
      self.assertAllEqual(sess.run(kept), [1, 0, 0, 1])
      sess.run(save)
      metas = _metas(self.base)
      self.assertEqual([meta.num_elements for meta in metas], [2] * 4 + [0] * 96)
      for meta in metas:
        sliding = meta.sliding_hash_filter_meta
        self.assertEqual((sliding.head, sliding.head_increment), (4, 4))
    with self.session() as sess:
      sess.run(restore)
      self.assertAllEqual(sess.run(kept), [1, 1, 1, 1])
      self.assertAllEqual(sess.run(kept), [1, 1, 1, 1])

  def test_threshold_zero_is_not_counted(self):
    handle = hash_filter_ops.create_hash_filter(1000, 7, _thresholds(1, {1: 0}))
    free = [(1 << 48) + i for i in range(5)]
    kept = self.masks(handle, free + list(range(5)))
    with self.session() as sess:
      self.assertAllEqual(sess.run(kept), [1] * 5 + [0] * 5)
      sess.run(hash_filter_ops.save_hash_filter(handle, self.base, True))
      self.assertEqual(sum(meta.num_elements for meta in _metas(self.base)), 5)
      self.assertAllEqual(sess.run(kept), [1] * 10)

  @parameterized.parameters(1, 2, 7, 15)
  def test_occurrence_after_the_threshold_passes(self, threshold):
    handle = hash_filter_ops.create_hash_filter(1000, 7, _thresholds(threshold))
    kept = self.masks(handle, [5] * 20)
    with self.session() as sess:
      self.assertAllEqual(sess.run(kept), [0] * threshold + [1] * (20 - threshold))

  def test_dummy_and_probabilistic_filters_keep_gradients(self):
    dummy = hash_filter_ops.create_dummy_hash_filter()
    chance = hash_filter_ops.create_probabilistic_filter(False, _thresholds(7))
    with self.session() as sess:
      self.assertAllEqual(sess.run(self.masks(dummy, [1, 2])), [1, 1])
      self.assertAllEqual(sess.run(self.masks(chance, [1, 2])), [1, 1])

  def test_forward_is_the_identity_and_shapes_stay(self):
    handle = hash_filter_ops.create_hash_filter(100, 7, _thresholds(1))
    embeddings = tf.reshape(tf.range(12.0), [2, 3, 2])
    same = hash_filter_ops.intercept_gradient(handle, tf.constant([1, 1], tf.int64), embeddings)
    (gradient,) = tf.gradients(same, embeddings)
    self.assertEqual(same.shape.as_list(), [2, 3, 2])
    with self.session() as sess:
      self.assertAllEqual(*sess.run([same, embeddings]))
      want = np.concatenate([np.zeros((1, 3, 2)), np.ones((1, 3, 2))])
      self.assertAllEqual(sess.run(gradient), want)

  def test_empty_and_bad_gradients(self):
    handle = hash_filter_ops.create_hash_filter(100, 7, _thresholds(1))
    ids = tf.compat.v1.placeholder(tf.int64)
    grad = tf.compat.v1.placeholder(tf.float32)
    out = gen_monolith_ops.monolith_hash_filter_intercept_gradient_gradient(handle, ids, grad)
    with self.session() as sess:
      self.assertEqual(sess.run(out, {ids: [], grad: np.zeros((0, 3))}).shape, (0, 3))
      self.assertEqual(sess.run(out, {ids: [7, 8], grad: np.zeros((2, 0))}).shape, (2, 0))
      for bad_ids, bad_grad in (([1, 2], [1.0, 2, 3]), ([], [1.0]), (1, [1.0]), ([[1]], [1.0])):
        with self.assertRaises(tf.errors.InvalidArgumentError):
          sess.run(out, {ids: bad_ids, grad: bad_grad})
      # A bad call counts nothing.
      self.assertAllEqual(sess.run(out, {ids: [1, 2], grad: [1.0, 1.0]}), [0, 0])


class TableTest(FilterTest):
  def _table(self, handle, name="t"):
    return hash_table_ops.hash_table_from_config(config_of(segment(1)), handle, name)

  def test_filter_and_table_saved_together(self):
    handle = hash_filter_ops.create_hash_filter(1000, 7, _thresholds(2))
    table = self._table(handle)
    add = table.assign_add([1], [[1.0]]).as_op()
    table_base = os.path.join(self.folder, "table")
    save = [
      hash_filter_ops.save_hash_filter(handle, self.base, True),
      table.save(table_base).as_op(),
    ]
    restore = [
      hash_filter_ops.restore_hash_filter(handle, self.base, True),
      table.restore(table_base).as_op(),
    ]
    with self.session() as sess:
      sess.run(add)
      sess.run(save)
      sess.run(add)
      self.assertAllEqual(sess.run(table.lookup([1])), [[0]])
      sess.run(add)
      self.assertAllEqual(sess.run(table.lookup([1])), [[1]])
      sess.run(restore)
      self.assertAllEqual(sess.run(table.lookup([1])), [[0]])
      sess.run(add)
      self.assertAllEqual(sess.run(table.lookup([1])), [[0]])
      sess.run(add)
      self.assertAllEqual(sess.run(table.lookup([1])), [[1]])

  def test_ids_in_the_table_are_not_asked_for(self):
    handle = hash_filter_ops.create_hash_filter(1000, 7, _thresholds(1))
    table = self._table(handle)
    with self.session() as sess:
      for _ in range(3):
        sess.run(table.assign_add([1], [[1.0]]).as_op())
      self.assertAllEqual(sess.run(table.lookup([1])), [[2]])

  def test_dedup_asks_once_with_the_number_of_occurrences(self):
    handle = hash_filter_ops.create_hash_filter(1000, 7, _thresholds(3))
    table = self._table(handle)
    step = tf.constant(0, tf.int64)
    update = table.apply_gradients([1] * 4, [-1.0] * 4, step, enable_dedup=True).as_op()
    with self.session() as sess:
      sess.run(update)
      self.assertEqual(sess.run(table.size()), 0)
      sess.run(update)
      self.assertAllEqual(sess.run(table.lookup([1])), [[4]])

  @parameterized.parameters((False, 1, 1428), (False, 2, 2857), (True, 1, 3481), (True, 2, 5750))
  def test_probabilistic_filter(self, equal, count, want):
    handle = hash_filter_ops.create_probabilistic_filter(equal, _thresholds(7))
    table = self._table(handle)
    ids = np.repeat(np.arange(10000), count)
    step = tf.constant(0, tf.int64)
    with self.session() as sess:
      update = table.apply_gradients(ids, np.ones(len(ids), np.float32), step, enable_dedup=True)
      sess.run(update.as_op())
      # Six standard deviations, of which one is 50 at most.
      self.assertAllClose(sess.run(table.size()), want, atol=300)
      # Those that are in stay in, whatever comes.
      inside = sess.run(table.lookup(np.arange(10000)))[:, 0] != 0
      sess.run(update.as_op())
      self.assertTrue(np.all(sess.run(table.lookup(np.arange(10000)))[inside, 0] == -2 * count))

  def test_probabilistic_filter_of_threshold_zero_admits_all(self):
    for equal in (False, True):
      handle = hash_filter_ops.create_probabilistic_filter(equal, b"", f"_{equal}")
      table = self._table(handle, name=f"t{equal}")
      with self.session() as sess:
        added = table.assign_add(np.arange(100), np.ones((100, 1), np.float32))
        self.assertEqual(sess.run(added.size()), 100)


class FilesTest(FilterTest):
  def _saved(self, sess, split_num=7, capacity=100000):
    handle = hash_filter_ops.create_hash_filter(capacity, split_num, _thresholds(1))
    self.kept = self.masks(handle, [1, 2, 3])
    sess.run(self.kept)
    sess.run(hash_filter_ops.save_hash_filter(handle, self.base, True))
    return handle

  def test_format(self):
    with self.session() as sess:
      self._saved(sess)
    self.assertEqual(
      [os.path.basename(name) for name in _split_files(self.base)],
      [f"filter-{i:05d}-of-00007" for i in range(7)],
    )
    total = int(100000 // 6 * 1.2)
    cells = []
    for i, name in enumerate(_split_files(self.base)):
      meta, *data = tf.compat.v1.io.tf_record_iterator(name)
      meta = pb.HashFilterSplitMetaDump.FromString(meta)
      self.assertEqual(meta.total_size, total)
      self.assertEqual(meta.num_elements, 3 if i == 0 else 0)
      for record in data:
        dump = pb.HashFilterSplitDataDump.FromString(record)
        self.assertEqual(dump.offset % 10000, 0)
        self.assertLen(dump.data, min(10000, total + 64 - dump.offset))
        cells += [cell for cell in dump.data if cell]
    # Three ids seen once: 12 bits of signature, 4 bits of count.
    self.assertLen(cells, 3)
    self.assertEqual([cell & 15 for cell in cells], [1, 1, 1])
    self.assertLess(max(cells), 1 << 16)

  def test_an_empty_default_filter_is_small_on_disk(self):
    handle = hash_filter_ops.create_hash_filter(
      hash_filter_ops.HASH_FILTER_CAPACITY, hash_filter_ops.HASH_FILTER_SPLIT_NUM
    )
    with self.session() as sess:
      sess.run(hash_filter_ops.save_hash_filter(handle, self.base, True))
      self.assertLess(sum(os.path.getsize(name) for name in _split_files(self.base)), 10000)
      sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))

  def test_unpacked_data_of_the_reference_is_read(self):
    with self.session() as sess:
      handle = self._saved(sess)
      remove_manifest(self.base)
      name = _split_files(self.base)[0]
      records = list(tf.compat.v1.io.tf_record_iterator(name))
      for i, record in enumerate(records[1:], 1):
        dump = pb.HashFilterSplitDataDump.FromString(record)
        unpacked = b"\x08" + _varint(dump.offset)
        records[i] = unpacked + b"".join(b"\x10" + _varint(cell) for cell in dump.data)
      write_records(name, records)
      sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))
      self.assertAllEqual(sess.run(self.kept), [1, 1, 1])

  def test_files_without_hash_version_are_usable(self):
    with self.session() as sess:
      handle = self._saved(sess)
      remove_manifest(self.base)
      for name in _split_files(self.base):
        records = list(tf.compat.v1.io.tf_record_iterator(name))
        meta = pb.HashFilterSplitMetaDump.FromString(records[0])
        meta.ClearField("hash_version")
        write_records(name, [meta.SerializeToString(), *records[1:]])
      sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))
      self.assertAllEqual(sess.run(self.kept), [1, 1, 1])

  def test_manifest_tells_what_is_wrong(self):
    with self.session() as sess:
      handle = self._saved(sess)
      restore = hash_filter_ops.restore_hash_filter(handle, self.base, True)
      name = _split_files(self.base)[3]
      size = os.path.getsize(name)
      first, *rest = tf.compat.v1.io.tf_record_iterator(_split_files(self.base)[0])
      self.assertNotEmpty(rest)
      # Without its cells a file is a filter that has counted nothing.
      write_records(_split_files(self.base)[0], [first])
      with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "filter-00000-of-.* has"):
        sess.run(restore)
      sess.run(hash_filter_ops.save_hash_filter(handle, self.base, True))
      os.truncate(name, 0)
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, f"{name} has 0 bytes, .*filter.manifest says {size}"
      ):
        sess.run(restore)
      os.remove(name)
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, f"Shard 3 .*{name} is missing, .* it has {size} bytes"
      ):
        sess.run(restore)
      self.assertAllEqual(sess.run(self.kept), [1, 1, 1])

  @parameterized.parameters(True, False)
  def test_restore_validates(self, has_manifest):
    with self.session() as sess:
      handle = self._saved(sess)
      if not has_manifest:
        remove_manifest(self.base)
      restore = hash_filter_ops.restore_hash_filter(handle, self.base, True)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no valid sharded files"):
        sess.run(hash_filter_ops.restore_hash_filter(handle, self.base + "x", True))
      name = _split_files(self.base)[3]
      with open(name, "rb") as file:
        good = file.read()
      records = list(tf.compat.v1.io.tf_record_iterator(name))
      for data in (b"", good[:-1], good[:20], good + b"x", b"\0" + good[1:]):
        with open(name, "wb") as file:
          file.write(data)
        with self.assertRaises(tf.errors.FailedPreconditionError):
          sess.run(restore)
      write_records(name, [records[0], b"\xff\xff"])
      with self.assertRaises(tf.errors.FailedPreconditionError):
        sess.run(restore)
      # Cells that do not fit.
      for offset, data in ((4294967295, [1]), (0, [65536]), (20000, [1] * 100)):
        dump = pb.HashFilterSplitDataDump(offset=offset, data=data)
        write_records(name, [records[0], dump.SerializeToString()])
        with self.assertRaises(tf.errors.OpError):
          sess.run(restore)
      os.remove(name)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Shard 3 doesn't show up"):
        sess.run(restore)
      # After all of this the counts are as they were.
      self.assertAllEqual(sess.run(self.kept), [1, 1, 1])

  @parameterized.parameters("split_num", "max_forward_step", "max_backward_step", "max_step")
  def test_meta_must_match(self, field):
    with self.session() as sess:
      handle = self._saved(sess)
      remove_manifest(self.base)
      for name in _split_files(self.base):
        records = list(tf.compat.v1.io.tf_record_iterator(name))
        meta = pb.HashFilterSplitMetaDump.FromString(records[0])
        setattr(meta.sliding_hash_filter_meta, field, 99)
        write_records(name, [meta.SerializeToString(), *records[1:]])
      with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, f"{field}.*99"):
        sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))

  def test_other_split_num(self):
    with self.session() as sess:
      self._saved(sess)
      other = hash_filter_ops.create_hash_filter(100000, 9, b"", "other")
      with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, "split_num.* 7.* 9"):
        sess.run(hash_filter_ops.restore_hash_filter(other, self.base, True))

  def test_at_least_five_splits(self):
    with self.session() as sess:
      handle = self._saved(sess, split_num=2)
      self.assertLen(_split_files(self.base), 5)
      sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))
      self.assertAllEqual(sess.run(self.kept), [1, 1, 1])

  def test_filters_without_memory(self):
    with self.session() as sess:
      for handle in (
        hash_filter_ops.create_dummy_hash_filter(),
        hash_filter_ops.create_probabilistic_filter(True),
      ):
        sess.run(hash_filter_ops.save_hash_filter(handle, self.base, True))
        self.assertEmpty(_split_files(self.base))
        with self.assertRaises(tf.errors.OpError):
          sess.run(hash_filter_ops.restore_hash_filter(handle, self.base, True))

  def test_disabled_is_a_no_op(self):
    handle = hash_filter_ops.create_hash_filter(100, 7)
    for operation in (
      hash_filter_ops.save_hash_filter(handle, self.base),
      hash_filter_ops.restore_hash_filter(handle, self.base, False),
    ):
      self.assertEqual(operation.type, "NoOp")

  def test_bad_configs(self):
    with self.session() as sess:
      for i, (config, message) in enumerate(
        [
          (
            b"\xff",
            "Unable to parse config. Make sure it is serialized version of "
            "SlotOccurrenceThresholdConfig.",
          ),
          (_thresholds(16), "16"),
          (_thresholds(0, {3: 16}), "16"),
          (_thresholds(0, {32768: 1}), "32768"),
        ]
      ):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          sess.run(hash_filter_ops.create_hash_filter(100, 7, config, f"_{i}"))
      for i, (capacity, split_num) in enumerate(((-1, 7), (100, -1), (100, 2**40), (2**62, 7))):
        with self.assertRaises(tf.errors.OpError):
          sess.run(
            hash_filter_ops.create_hash_filter(capacity, split_num, _thresholds(1), f"_b{i}")
          )
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "32768"):
        sess.run(hash_filter_ops.create_probabilistic_filter(False, _thresholds(0, {32768: 1})))


class PythonTest(FilterTest):
  def test_constants(self):
    self.assertEqual(hash_filter_ops.HASH_FILTER_CAPACITY, 300000000)
    self.assertEqual(hash_filter_ops.HASH_FILTER_SPLIT_NUM, 7)
    self.assertEqual(hash_filter_ops._TIMEOUT_IN_MS, 1800000)
    self.assertEqual(hash_filter_ops.FilterType.SLIDING_HASH_FILTER, "sliding_hash_filter")
    self.assertEqual(hash_filter_ops.FilterType.PROBABILISTIC_FILTER, "probabilistic_filter")
    self.assertEqual(hash_filter_ops.FilterType.NO_FILTER, "no_filter")

  def test_shared_names(self):
    name = lambda handle: handle.op.get_attr("shared_name").decode()  # noqa: E731
    sliding = hash_filter_ops.create_hash_filter(1, 7, b"", "_x")
    self.assertEqual(name(sliding), "MonolithHashFilter_x")
    self.assertEqual(
      name(hash_filter_ops.create_probabilistic_filter(True, name_suffix="_y")),
      "MonolithProbabilisticFilter_y",
    )
    self.assertEqual(name(hash_filter_ops.create_dummy_hash_filter()), "DummyHashFilter0")

  def test_create_hash_filters(self):
    (single,) = hash_filter_ops.create_hash_filters(0, True)
    self.assertEqual(single.op.type, "MonolithHashFilter")
    self.assertEqual(single.op.get_attr("shared_name"), b"MonolithHashFilter")
    filters = hash_filter_ops.create_hash_filters(3, True, filter_capacity=10, filter_split_num=8)
    for i, handle in enumerate(filters):
      self.assertEqual(handle.op.get_attr("shared_name"), f"MonolithHashFilter_{i}".encode())
      self.assertEqual(handle.op.get_attr("capacity"), 10)
      self.assertEqual(handle.op.get_attr("split_num"), 8)
      self.assertEqual(handle.device, utils.ps_device(i))
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      for handle in hash_filter_ops.create_hash_filters(2, True):
        self.assertEqual(handle.device, "")

  def test_filter_types(self):
    create = hash_filter_ops._create_hash_filter
    types = hash_filter_ops.FilterType
    self.assertEqual(create(False).op.type, "MonolithDummyHashFilter")
    self.assertEqual(create(np.bool_(True)).op.type, "MonolithHashFilter")
    self.assertEqual(create(True, filter_type=types.NO_FILTER).op.type, "MonolithDummyHashFilter")
    chance = create(True, filter_type=types.PROBABILISTIC_FILTER, filter_equal_probability=True)
    self.assertEqual(chance.op.type, "MonolithProbabilisticFilter")
    self.assertTrue(chance.op.get_attr("equal_probability"))
    with self.assertRaisesWithLiteralMatch(
      ValueError, "Invalid filter type, please investigate and retry!"
    ):
      create(True, filter_type="x")

  def test_listeners_on_a_finalized_graph(self):
    step = tf.compat.v1.train.create_global_step()
    filters = [hash_filter_ops.create_hash_filter(100, 7, _thresholds(1), f"_{i}") for i in (0, 1)]
    kept = [self.masks(handle, [i]) for i, handle in enumerate(filters)]
    basename = os.path.join(self.folder, "model.ckpt")
    saver = tf.compat.v1.train.CheckpointSaverHook(
      self.folder,
      save_steps=1000,
      listeners=[hash_filter_ops.HashFilterCheckpointSaverListener(basename, filters, True)],
    )
    listener = hash_filter_ops.HashFilterCheckpointRestorerListener(basename, filters, True)
    restorer = basic_restore_hook.CheckpointRestorerHook(listeners=[listener])
    count = [kept, step.assign_add(1)]
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[restorer, saver]) as sess:
      self.assertAllEqual(sess.run(count)[0], [[0], [0]])
    for i in (0, 1):
      self.assertLen(_split_files(f"{basename}-1.assets/hash_filter_{i}"), 7)
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[restorer]) as sess:
      self.assertAllEqual(sess.run(kept), [[1], [1]])
      with self.assertRaises(tf.errors.InvalidArgumentError):
        listener._restore_from_path_prefix(sess.raw_session(), "/nowhere/")

  def test_disabled_listeners_do_nothing(self):
    handle = hash_filter_ops.create_hash_filter(100, 7)
    basename = os.path.join(self.folder, "model.ckpt")
    with self.session() as sess:
      for enabled, save_restore in ((False, True), (True, False)):
        args = (basename, [handle], enabled, save_restore)
        hash_filter_ops.HashFilterCheckpointSaverListener(*args).before_save(sess, 1)
        restorer = hash_filter_ops.HashFilterCheckpointRestorerListener(*args)
        restorer.before_restore(sess)
        restorer._restore_from_path_prefix(sess, basename + "-1.assets/")
    self.assertFalse(os.path.exists(basename + "-1.assets"))


def _varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  out.append(value)
  return bytes(out)


if __name__ == "__main__":
  tf.test.main()
