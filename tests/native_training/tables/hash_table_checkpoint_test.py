"""Checkpoint files of one table: exact bytes, sets of files, damage, restoring across changes."""

import glob
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry, hash_table_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import (
  INT64_MAX,
  INT64_MIN,
  frame,
  list_data,
  make_table,
  read_entries,
  remove_manifest,
  segment,
  write_records,
)

tf.compat.v1.disable_eager_execution()

_SGD_RECORD = bytes.fromhex("090100000000000000150000803f1a040a0212002000")
_ADAGRAD_RECORD = bytes.fromhex(
  "09ffffffffffffffff150000003f15000000c01a0e0a0c0a0a0dcdcccc3d0d0000803e2080e2cfaa06"
)


class CheckpointTest(tf.test.TestCase, parameterized.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def setUp(self):
    super().setUp()
    self.folder = os.path.join(os.environ["TEST_TMPDIR"], "ckpt")
    self.base = os.path.join(self.folder, "table")

  def files(self) -> list[str]:
    return list_data(self.folder)

  def read(self, name: str) -> bytes:
    with open(os.path.join(self.folder, name), "rb") as file:
      return file.read()

  def write(self, name: str, data: bytes) -> None:
    os.makedirs(self.folder, exist_ok=True)
    with open(os.path.join(self.folder, name), "wb") as file:
      file.write(data)


class FormatTest(CheckpointTest):
  def test_bytes_of_an_sgd_entry(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).save(self.base).as_op())

    self.assertEqual(self.files(), ["table-00000-of-00001"])
    self.assertEqual(self.read("table-00000-of-00001"), frame(_SGD_RECORD, "4f61be28", "b8cda29f"))

  def test_bytes_of_an_adagrad_entry(self):
    table = make_table(segment(2, entry.AdagradOptimizer(initial_accumulator_value=0.1)))
    with self.session() as sess:
      # State [0.1, 0.25] is what restoring gives.
      self.write("in-00000-of-00001", b"")
      write_records(os.path.join(self.folder, "in-00000-of-00001"), [_ADAGRAD_RECORD])
      restored = table.restore(os.path.join(self.folder, "in"))
      sess.run(restored.save(self.base).as_op())

    (record,) = tf.compat.v1.io.tf_record_iterator(self.base + "-00000-of-00001")
    self.assertEqual(record, _ADAGRAD_RECORD)

  def test_records_are_what_protobuf_writes(self):
    optimizers = [
      entry.AdamOptimizer(),
      entry.AmsgradOptimizer(),
      entry.MovingAverageOptimizer(),
      entry.FtrlOptimizer(beta=1.0),
      entry.FTRLWithGroupSparsityOptimizer(),
      entry.AdaGradWithGroupLassoOptimizer(beta=1.0),
      entry.AdadeltaOptimizer(),
      entry.MomentumOptimizer(),
      entry.RmspropOptimizer(),
      entry.RmspropV2Optimizer(),
      entry.SgdOptimizer(),
      entry.AdagradOptimizer(),
      entry.DynamicWdAdagradOptimizer(enable_dynamic_wd=False),
    ]
    table = make_table(
      *[segment(2, optimizer) for optimizer in optimizers],
      segment(1, entry.BatchSoftmaxOptimizer()),
    )
    ids = [0, -1, 12345, INT64_MIN, INT64_MAX]
    grads = np.random.default_rng(0).standard_normal((5, 27)).astype(np.float32)
    with self.session() as sess:
      step = tf.constant(300, tf.int64)
      updated = table.apply_gradients(ids, grads, step, req_time=tf.constant(2**31, tf.int64))
      saved = updated.save(self.base)
      with tf.control_dependencies([saved.as_op()]):
        entries = sess.run(table.lookup_entry(ids))

    dumps = read_entries(self.base + "-00000-of-00001")
    self.assertCountEqual(dumps, ids)
    for record in tf.compat.v1.io.tf_record_iterator(self.base + "-00000-of-00001"):
      self.assertEqual(pb.EntryDump.FromString(record).SerializeToString(), record)
    for fid, serialized in zip(ids, entries):
      dump = dumps[fid]
      self.assertLen(dump.num, 27)
      self.assertEqual(dump.last_update_ts_sec, 2**31)
      self.assertEqual(
        [part.WhichOneof("type") for part in dump.opt.dump],
        [
          "adam",
          "amsgrad",
          "ftrl",
          "group_ftrl",
          "group_adagrad",
          "adadelta",
          "momentum",
          "rmsprop",
          "rmspropv2",
          "sgd",
          "adagrad",
          "dynamic_wd_adagrad",
          "batch_softmax",
        ],
      )
      self.assertEqual(dump.opt.dump[12].batch_softmax.global_step, 300)
      dump.ClearField("id")
      self.assertEqual(pb.EntryDump.FromString(serialized), dump)

  def test_state_survives_exactly(self):
    optimizers = [entry.AdamOptimizer(), entry.FtrlOptimizer(), entry.AdadeltaOptimizer()]
    ids = np.arange(100)
    grads = np.random.default_rng(1).standard_normal((100, 9)).astype(np.float32)

    def build(name):
      return make_table(*[segment(3, optimizer) for optimizer in optimizers], name=name)

    step = tf.constant(1, tf.int64)
    with self.session() as sess:
      first, second = build("first"), build("second")
      sess.run(first.apply_gradients(ids, grads, step).save(self.base).as_op())
      sess.run(second.restore(self.base).as_op())
      for table in (first, second):
        sess.run(table.apply_gradients(ids, grads, step).as_op())

      self.assertAllEqual(sess.run(first.lookup_entry(ids)), sess.run(second.lookup_entry(ids)))
      self.assertAllEqual(sess.run(first.lookup(ids)), sess.run(second.lookup(ids)))

  def test_empty_table_writes_empty_files_that_restore(self):
    table = make_table(segment(1), saver_parallel=3)
    with self.session() as sess:
      sess.run(table.save(self.base).as_op())
      self.assertEqual(self.files(), [f"table-0000{i}-of-00003" for i in range(3)])
      self.assertEqual([self.read(name) for name in self.files()], [b""] * 3)
      restored = table.assign([1], [[1.0]]).restore(self.base)
      self.assertEqual(sess.run(restored.size()), 0)

  def test_folder_is_created_and_basename_may_hold_pattern_characters(self):
    base = os.path.join(self.folder, "a", "b", "t[0]*?")
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).save(base).as_op())
      self.assertTrue(os.path.exists(base + "-00000-of-00001"))
      sess.run(table.assign([1], [[2.0]]).as_op())
      self.assertAllEqual(sess.run(table.restore(base).lookup([1])), [[1]])

  def test_random_sleep(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).save(self.base, random_sleep_ms=5).as_op())
      self.assertLen(read_entries(self.base + "-00000-of-00001"), 1)

  @parameterized.parameters(1, 2, 3, 7, 64, 100)
  def test_nshards(self, nshards):
    table = make_table(segment(1), saver_parallel=nshards)
    ids = np.arange(1000)
    with self.session() as sess:
      sess.run(table.assign(ids, ids[:, None].astype(np.float32)).save(self.base).as_op())
      self.assertLen(self.files(), nshards)
      self.assertCountEqual(read_entries(*glob.glob(self.base + "-*")), ids)
      sess.run(table.assign(ids + 500, -np.ones((1000, 1), np.float32)).as_op())
      restored = table.restore(self.base)
      self.assertAllEqual(sess.run(restored.lookup(ids)), ids[:, None])
      self.assertEqual(sess.run(table.size()), 1000)

  @parameterized.parameters(0, -2, 100000)
  def test_bad_nshards(self, nshards):
    table = make_table(segment(1), saver_parallel=nshards)
    with self.session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"nshards is {nshards}"):
        sess.run(table.save(self.base).as_op())
    self.assertFalse(os.path.exists(self.folder))

  def test_number_of_files_by_size(self):
    table = hash_table_ops.test_hash_table(1)
    n = 2_000_000
    ids = np.arange(n)
    with self.session() as sess:
      feed = tf.compat.v1.placeholder(tf.int64, [None])
      write = table.assign(feed, tf.cast(feed, tf.float32)).as_op()
      sess.run(write, {feed: ids[: n - 1]})
      sess.run(table.save(self.base).as_op())
      self.assertLen(self.files(), 1)
      sess.run(write, {feed: ids[n - 1 :]})
      sess.run(table.save(self.base).as_op())
      self.assertEqual(self.files(), ["table-00000-of-00002", "table-00001-of-00002"])
      sess.run(table.restore(self.base).as_op())
      self.assertEqual(sess.run(table.size()), n)
      self.assertAllEqual(sess.run(table.lookup(ids[::1000])), ids[::1000, None])

  def test_slot_out_of_range_in_the_expire_config(self):
    config = pb.SlotExpireTimeConfig()
    config.slot_expire_times.add(slot=32768, expire_time=1)
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      for bad in (config.SerializeToString(), b"\xff"):
        save = gen_monolith_ops.monolith_hash_table_save(
          table.table, self.base, slot_expire_time_config=bad
        )
        with self.assertRaises(tf.errors.InvalidArgumentError):
          sess.run(save)


class SetOfFilesTest(CheckpointTest):
  def test_saving_with_other_nshards_removes_the_old_set(self):
    many = make_table(segment(1), saver_parallel=4)
    few = make_table(segment(1), saver_parallel=2)
    with self.session() as sess:
      sess.run(many.assign([1], [[1.0]]).save(self.base).as_op())
      sess.run(few.assign([2], [[2.0]]).save(self.base).as_op())
      self.assertEqual(self.files(), ["table-00000-of-00002", "table-00001-of-00002"])
      self.assertAllEqual(sess.run(many.restore(self.base).lookup([1, 2])), [[0], [2]])

  def test_leftovers_of_an_interrupted_save_do_not_disturb(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).save(self.base).as_op())
      self.write("table-00000-of-00001-tmp-123", b"torn")
      self.write("table-00001-of-00002-tmp-9", b"torn")
      self.write("table-x", b"foreign")
      self.write("table-0000-of-00001", b"foreign")
      self.write("table-00000-of-0000a", b"foreign")
      self.assertAllEqual(sess.run(table.restore(self.base).lookup([1])), [[1]])
      # The next save cleans up its own leftovers, and nothing else.
      sess.run(table.save(self.base).as_op())
      self.assertEqual(
        self.files(),
        ["table-0000-of-00001", "table-00000-of-00001", "table-00000-of-0000a", "table-x"],
      )

  def test_base_name_that_is_a_prefix_of_another(self):
    one, ten = hash_table_ops.test_hash_table(1), make_table(segment(1), saver_parallel=3)
    with self.session() as sess:
      sess.run(ten.assign([1], [[10.0]]).save(self.base + "10").as_op())
      sess.run(ten.assign([1], [[11.0]]).save(self.base + "-x").as_op())
      sess.run(one.assign([1], [[1.0]]).save(self.base).as_op())
      self.assertLen(self.files(), 7)
      self.assertAllEqual(sess.run(one.restore(self.base).lookup([1])), [[1]])
      self.assertAllEqual(sess.run(ten.restore(self.base + "10").lookup([1])), [[10]])
      self.assertAllEqual(sess.run(ten.restore(self.base + "-x").lookup([1])), [[11]])

  @parameterized.named_parameters(
    ("missing", ["table-00000-of-00002"], "Shard 1 doesn't show up for .*table"),
    ("exceeding", ["table-00002-of-00002"], "Shard 2 exceeds 2"),
    ("mixed", ["table-00000-of-00001", "table-00000-of-00002"], "doesn't match nshards. "),
    ("zero", ["table-00000-of-00000"], "Shard 0 exceeds 0"),
    ("none", ["table-00000-of-00001-tmp-1"], "There is no valid sharded files for .*table"),
  )
  def test_bad_set(self, names, message):
    table = hash_table_ops.test_hash_table(1)
    for name in names:
      self.write(name, b"")
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).as_op())
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        sess.run(table.restore(self.base).as_op())
      self.assertAllEqual(sess.run(table.lookup([1])), [[1]])

  def test_a_failed_save_keeps_the_old_files(self):
    table = make_table(segment(1), saver_parallel=2)
    with self.session() as sess:
      sess.run(table.assign([1], [[1.0]]).save(self.base).as_op())
      before = {name: self.read(name) for name in self.files()}
      # A folder in the place of a file of another table's set: renaming onto it fails.
      os.makedirs(os.path.join(self.folder, "other-00001-of-00002", "full"))
      with self.assertRaises(tf.errors.OpError):
        sess.run(table.save(os.path.join(self.folder, "other")).as_op())
      self.assertEqual({name: self.read(name) for name in before}, before)
      self.assertEmpty(glob.glob(os.path.join(self.folder, "*-tmp-*")))
      # A file in the place of the folder.
      with self.assertRaises(tf.errors.OpError):
        sess.run(table.save(os.path.join(self.base + "-00000-of-00002", "x")).as_op())

  def test_a_time_in_milliseconds_empties_no_save(self):
    table = hash_table_ops.test_hash_table(1)
    seconds = 1700000000
    with self.session() as sess:
      ids, values = np.arange(1000), np.ones((1000, 1), np.float32)
      table = table.assign(ids, values, req_time=tf.constant(seconds, tf.int64))
      table = table.assign([7], [[1.0]], req_time=tf.constant(seconds * 1000, tf.int64))
      sess.run(table.save(self.base).as_op())
      self.assertEqual(sess.run(table.restore(self.base).size()), 1000)

  def test_bad_basename(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "basename is empty"):
        sess.run(table.save("").as_op())
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "basename has shape"):
        sess.run(table.restore(tf.constant([self.base])).as_op())


class DamageTest(CheckpointTest):
  # Odd, so that two files never have the same size, however this process's hash divides the ids.
  _ROWS = 1001

  def _saved(self, sess, rows=_ROWS):
    table = make_table(segment(2, entry.AdagradOptimizer()), saver_parallel=2, name="t")
    ids = np.arange(rows)
    sess.run(table.assign(ids, np.ones((rows, 2), np.float32)).save(self.base).as_op())
    sess.run(table.assign([5], [[7.0, 7.0]]).as_op())
    return table

  def _assert_unchanged(self, sess, table, rows=_ROWS):
    self.assertEqual(sess.run(table.size()), rows)
    self.assertAllEqual(sess.run(table.lookup([4, 5])), [[1, 1], [7, 7]])

  @parameterized.parameters(True, False)
  def test_every_kind_of_damage_is_found(self, has_manifest):
    corrupt = "Unable to parse data. Data might be corrupted"
    with self.session() as sess:
      table = self._saved(sess)
      if not has_manifest:
        remove_manifest(self.base)
      name = "table-00001-of-00002"
      good = self.read(name)
      restore = table.restore(self.base).as_op()
      rng = np.random.default_rng(3)
      damaged = [good[:-1], good[: len(good) // 2 + 3], good[:5], good + b"x", b"\0" * 100]
      for _ in range(60):
        at, bit = rng.integers(len(good)), rng.integers(8)
        flipped = bytearray(good)
        flipped[at] ^= 1 << bit
        damaged.append(bytes(flipped))
      for data in damaged:
        self.write(name, data)
        with self.assertRaisesRegex(tf.errors.FailedPreconditionError, corrupt):
          sess.run(restore)
        self._assert_unchanged(sess, table)
      self.write(name, good)
      sess.run(restore)
      self.assertAllEqual(sess.run(table.lookup([4, 5])), [[1, 1], [1, 1]])

  def test_what_only_the_manifest_can_tell(self):
    with self.session() as sess:
      table = self._saved(sess)
      restore = table.restore(self.base).as_op()
      name, other = "table-00001-of-00002", "table-00000-of-00002"
      good = self.read(name)
      record = len(next(iter(tf.compat.v1.io.tf_record_iterator(self.base + name[5:])))) + 16
      for data in (good[: -3 * record], b"", good + good[:record], self.read(other)):
        self.write(name, data)
        with self.assertRaisesRegex(
          tf.errors.FailedPreconditionError,
          f"corrupted: .*{name} has {len(data)} bytes, .*table.manifest says {len(good)}",
        ):
          sess.run(restore)
        self._assert_unchanged(sess, table)
      os.remove(os.path.join(self.folder, name))
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        f"Shard 1 doesn't show up for .*{name} is missing, .* says that it has {len(good)} bytes",
      ):
        sess.run(restore)
      self.write(name, good)
      self.write("table-00002-of-00003", b"")
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, "table-00002-of-00003 doesn't belong to .*table"
      ):
        sess.run(restore)
      os.remove(self.base + "-00002-of-00003")
      self.write(".table.manifest", self.read(".table.manifest")[:-2])
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "table.manifest cannot be used"
      ):
        sess.run(restore)
      self._assert_unchanged(sess, table)
      remove_manifest(self.base)
      sess.run(restore)
      self.assertAllEqual(sess.run(table.lookup([4, 5])), [[1, 1], [1, 1]])

  @parameterized.named_parameters(
    ("garbage", b"\xff\xff\xff\xff"),
    ("truncated", _ADAGRAD_RECORD[:-1]),
    ("length_too_long", b"\x12\x7fabc"),
    ("group", b"\x0b\x0c"),
  )
  def test_a_record_that_is_no_entry(self, record):
    with self.session() as sess:
      table = self._saved(sess)
      remove_manifest(self.base)
      write_records(os.path.join(self.folder, "table-00001-of-00002"), [record])
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "Unable to parse data. Data might be corrupted"
      ):
        sess.run(table.restore(self.base).as_op())
      self._assert_unchanged(sess, table)

  @parameterized.parameters(0, 1, 3, 1000)
  def test_wrong_dimension(self, dim):
    with self.session() as sess:
      table = self._saved(sess)
      record = pb.EntryDump(id=42, num=[1.0] * dim).SerializeToString()
      remove_manifest(self.base)
      write_records(os.path.join(self.folder, "table-00001-of-00002"), [record])
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"42.*{dim}.*2"):
        sess.run(table.restore(self.base).as_op())
      self._assert_unchanged(sess, table)

  def test_missing_file_permissions(self):
    with self.session() as sess:
      table = self._saved(sess)
      os.remove(self.base + "-00001-of-00002")
      os.mkdir(self.base + "-00001-of-00002")
      with self.assertRaises(tf.errors.OpError):
        sess.run(table.restore(self.base).as_op())
      self._assert_unchanged(sess, table)

  def test_random_records_never_crash(self):
    rng = np.random.default_rng(7)
    good = pb.EntryDump(id=3, num=[1.0, 2.0], last_update_ts_sec=9)
    good.opt.dump.add().adagrad.norm.extend([0.5, 0.5])
    base = good.SerializeToString()
    with self.session() as sess:
      table = make_table(segment(2, entry.AdagradOptimizer()))
      restore = table.restore(self.base).as_op()
      os.makedirs(self.folder)
      outcomes = {"ok": 0, "error": 0}
      for _ in range(300):
        data = bytearray(base)
        for _ in range(rng.integers(1, 4)):
          data[rng.integers(len(data))] = rng.integers(256)
        record = bytes(data[: rng.integers(1, len(data) + 1)])
        write_records(self.base + "-00000-of-00001", [record])
        try:
          sess.run(restore)
          outcomes["ok"] += 1
        except (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError):
          outcomes["error"] += 1
      self.assertGreater(outcomes["ok"], 0)
      self.assertGreater(outcomes["error"], 0)


class AcrossChangesTest(CheckpointTest):
  def _dump(self, *opts, num=(1.0, 2.0), **kwargs) -> bytes:
    dump = pb.EntryDump(id=8, num=num, **kwargs)
    for opt in opts:
      dump.opt.dump.append(opt)
    return dump.SerializeToString()

  def _restore(self, record: bytes, *segments) -> pb.EntryDump:
    os.makedirs(self.folder, exist_ok=True)
    write_records(self.base + "-00000-of-00001", [record])
    table = make_table(*segments)
    with self.session() as sess:
      restored = table.restore(self.base)
      return pb.EntryDump.FromString(sess.run(restored.lookup_entry([8]))[0])

  def test_a_record_without_time_gets_zero(self):
    dump = self._restore(self._dump(), segment(2))
    self.assertEqual(dump.last_update_ts_sec, 0)
    self.assertTrue(dump.HasField("last_update_ts_sec"))

  def test_packed_floats_are_read(self):
    packed = b"\x09" + (8).to_bytes(8, "little") + b"\x12\x08" + np.float32([3, 4]).tobytes()
    dump = self._restore(packed, segment(2))
    self.assertAllEqual(dump.num, [3, 4])

  def test_missing_state_starts_anew(self):
    adagrad = entry.AdagradOptimizer(initial_accumulator_value=0.5)
    dump = self._restore(self._dump(), segment(2, adagrad))
    self.assertAllEqual(dump.num, [1, 2])
    self.assertAllEqual(dump.opt.dump[0].adagrad.norm, [0.5, 0.5])

  def test_state_of_another_length_starts_anew(self):
    adagrad = entry.AdagradOptimizer(initial_accumulator_value=0.5)
    opt = pb.OptimizerDump().dump.add()
    opt.adagrad.norm.extend([9.0, 9.0, 9.0])
    dump = self._restore(self._dump(opt), segment(2, adagrad))
    self.assertAllEqual(dump.opt.dump[0].adagrad.norm, [0.5, 0.5])

  def test_another_optimizer_keeps_the_vector(self):
    opt = pb.OptimizerDump().dump.add()
    opt.adagrad.norm.extend([9.0, 9.0])
    dump = self._restore(self._dump(opt, last_update_ts_sec=5), segment(2, entry.AdamOptimizer()))
    self.assertAllEqual(dump.num, [1, 2])
    self.assertEqual(dump.last_update_ts_sec, 5)
    adam = dump.opt.dump[0].adam
    self.assertAllEqual(adam.m, [0, 0])
    self.assertAllClose([adam.beta1_power, adam.beta2_power], [0.9, 0.99])

  def test_adam_powers_are_kept_apart(self):
    opt = pb.OptimizerDump().dump.add()
    opt.adam.m.extend([1.0, 2.0])
    opt.adam.v.extend([3.0, 4.0])
    opt.adam.beta1_power, opt.adam.beta2_power = 0.25, 0.75
    dump = self._restore(self._dump(opt), segment(2, entry.AdamOptimizer()))
    self.assertEqual(dump.opt.dump[0], opt)

  def test_state_goes_to_segments_by_position(self):
    first, second = pb.OptimizerDump().dump.add(), pb.OptimizerDump().dump.add()
    first.adagrad.norm.extend([7.0])
    second.adagrad.norm.extend([8.0])
    dump = self._restore(
      self._dump(first, second, num=(1.0, 2.0, 3.0)),
      segment(1, entry.AdagradOptimizer()),
      segment(1, entry.MovingAverageOptimizer()),
      segment(1, entry.AdagradOptimizer()),
    )
    self.assertEqual(list(dump.opt.dump), [first, second])

  def test_combined_segments_continue_from_their_state(self):
    opts = [entry.AdagradOptimizer(initial_accumulator_value=v) for v in (1.0, 2.0)]
    segments = [segment(1, opts[0]), segment(2, opts[1])]
    table = make_table(*segments, learning_rates=[1.0, 2.0])
    step = tf.constant(0, tf.int64)
    with self.session() as sess:
      updated = table.apply_gradients([8], [[1.0, 2.0, 3.0]], step)
      self.assertAllClose(
        sess.run(updated.lookup([8])), [[-0.70710677, -1.6329931, -1.8090681]], atol=1e-6
      )
      again = table.assign([8], [[0.0, 0, 0]]).save(self.base).restore(self.base)
      again = again.apply_gradients([8], [[1.0, 2.0, 3.0]], step)
      self.assertAllClose(
        sess.run(again.lookup([8])), [[-0.57735026, -1.264911, -1.3416407]], atol=1e-6
      )

  def test_training_files_into_a_serving_table(self):
    table = make_table(segment(2, entry.AdagradOptimizer(), compressor=entry.Fp16Compressor()))
    with self.session() as sess:
      sess.run(table.assign([1, 2], [[0.1, 10000.0], [0.0, 0.0]]).save(self.base).as_op())
      serving = make_table(segment(2, compressor=entry.Fp16Compressor()), serving=True)
      sess.run(serving.restore(self.base).as_op())
      self.assertAllEqual(
        sess.run(serving.lookup([1, 2])), np.float32([[0.0999755859, 10000], [0, 0]])
      )
      self.assertEqual(sess.run(serving.size()), 2)
      skipping = make_table(segment(2), serving=True, skip_zero_embedding=True)
      sess.run(skipping.restore(self.base).as_op())
      self.assertEqual(sess.run(skipping.size()), 1)

  def test_later_duplicates_win(self):
    os.makedirs(self.folder)
    records = [pb.EntryDump(id=1, num=[float(i)]).SerializeToString() for i in range(5)]
    write_records(self.base + "-00000-of-00001", records)
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      self.assertAllEqual(sess.run(table.restore(self.base).lookup([1])), [[4]])
      self.assertEqual(sess.run(table.size()), 1)

  def test_restored_times_count_for_expiry(self):
    os.makedirs(self.folder)
    day = 86400
    records = [
      pb.EntryDump(id=i, num=[1.0], last_update_ts_sec=ts).SerializeToString()
      for i, ts in ((1, 5), (2, 5 + day))
    ]
    write_records(self.base + "-00000-of-00001", records)
    table = hash_table_ops.test_hash_table(1, expire_time=1)
    with self.session() as sess:
      # Restoring does not check; saving does.
      sess.run(table.restore(self.base).as_op())
      self.assertEqual(sess.run(table.size()), 2)
      sess.run(table.save(self.base).as_op())
      self.assertEqual(sess.run(table.size()), 2)
      self.assertCountEqual(read_entries(self.base + "-00000-of-00001"), [2])

  def test_unknown_fields_are_ignored(self):
    record = self._dump(last_update_ts_sec=3) + b"\x9a\x06\x03abc\xa0\x06\x05"
    dump = self._restore(record, segment(2))
    self.assertAllEqual(dump.num, [1, 2])
    self.assertEqual(dump.last_update_ts_sec, 3)


if __name__ == "__main__":
  tf.test.main()
