"""Checkpoints of a group of tables: files, damage, listeners."""

import os
import struct

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from google.protobuf import text_format
from tensorflow.python.lib.io import _pywrap_record_io

from monolith.native_training import entry, multi_hash_table_ops, test_utils
from monolith.native_training.multi_hash_table_ops import MultiHashTable
from monolith.native_training.proto import ckpt_info_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from tests.hash_table_testing import (
  GraphTest,
  config_of,
  list_data,
  remove_manifest,
  segment,
  write_records,
)

tf.compat.v1.disable_eager_execution()

_config = test_utils.generate_test_hash_table_config


class GroupTest(GraphTest):
  def setUp(self):
    super().setUp()
    self.folder = os.environ["TEST_TMPDIR"]
    self.base = os.path.join(self.folder, "ckpt", "group")


class FilesTest(GroupTest):
  def _group(self, saver_parallel=-1, name_suffix="", **dims) -> MultiHashTable:
    configs = {
      name: config_of(segment(dim, entry.AdagradOptimizer())) for name, dim in dims.items()
    }
    return MultiHashTable.from_configs(
      configs, saver_parallel=saver_parallel, name_suffix=name_suffix
    )

  def _meta(self, name: str) -> list[tuple[str, int]]:
    metas = [
      pb.MultiHashTableMetadata.FromString(record)
      for record in tf.compat.v1.io.tf_record_iterator(name)
    ]
    return [(meta.table_name, meta.num_entries) for meta in metas]

  def _records(self, name: str) -> list[bytes] | None:
    """Returns what TensorFlow's own reader finds in a data file, None if that is damaged."""
    try:
      return list(_pywrap_record_io.RecordIterator(name, "SNAPPY"))
    except tf.errors.OpError:
      return None

  def _fill(self, sess, group, rows):
    pairs = {}
    for name, dim in zip(group.table_names, group.get_table_dim_sizes()):
      ids = np.arange(rows)
      values = np.random.default_rng(dim).standard_normal((rows, dim)).astype(np.float32)
      pairs[name] = (ids, values)
    sess.run(group.initializer)
    sess.run(group.assign(pairs).as_op())
    return pairs

  @parameterized.parameters(1, 3)
  def test_data_and_meta_files(self, nshards):
    group = self._group(nshards, a=1, b=100, c=2)
    with self.session() as sess:
      pairs = self._fill(sess, group, 5000)
      sess.run(group.save(self.base).as_op())
      names = list_data(os.path.dirname(self.base))
      of = f"of-{nshards:05d}"
      want = [f"group{part}-{i:05d}-{of}" for part in ("", ".meta") for i in range(nshards)]
      self.assertEqual(names, sorted(want))
      totals = {"a": 0, "b": 0, "c": 0}
      for i in range(nshards):
        meta = self._meta(f"{self.base}.meta-{i:05d}-{of}")
        self.assertEqual([name for name, _ in meta], ["a", "b", "c"])
        for name, count in meta:
          totals[name] += count
      self.assertEqual(totals, {"a": 5000, "b": 5000, "c": 5000})
      features, counts = sess.run(group.feature_stat(self.base))
      self.assertEqual(list(features), [b"a", b"b", b"c"])
      self.assertAllEqual(counts, [5000] * 3)
      self.assertEqual(counts.dtype, np.uint64)

      zero = {name: (ids, np.zeros_like(values)) for name, (ids, values) in pairs.items()}
      sess.run(group.assign(zero).as_op())
      restored = group.restore(self.base).lookup({name: pairs[name][0] for name in pairs})
      for name, values in sess.run(restored).items():
        self.assertAllEqual(values, pairs[name][1])

  def test_snappy_framing(self):
    # [4 bytes length, big-endian][block of at most 256 KiB], as TensorFlow's own writer does.
    group = self._group(1, a=100)
    with self.session() as sess:
      self._fill(sess, group, 3000)
      sess.run(group.save(self.base).as_op())
    with open(self.base + "-00000-of-00001", "rb") as file:
      data = file.read()
    at, total = 0, 0
    while at < len(data):
      (length,) = struct.unpack(">I", data[at : at + 4])
      block = data[at + 4 : at + 4 + length]
      self.assertLen(block, length)
      uncompressed, shift = 0, 0
      for byte in block:  # a varint: the uncompressed length
        uncompressed |= (byte & 127) << shift
        shift += 7
        if byte < 128:
          break
      self.assertLessEqual(uncompressed, 262144)
      total += uncompressed
      at += 4 + length
    # id, 100 values, state and time of each row, and 16 bytes of framing.
    record = pb.EntryDump(id=1, num=[1.0] * 100, last_update_ts_sec=0)
    record.opt.dump.add().adagrad.norm.extend([0.1] * 100)
    self.assertEqual(total, 3000 * (len(record.SerializeToString()) + 16))

  def test_restore_replaces_present_tables_and_leaves_absent_ones(self):
    old = self._group(a=1, name_suffix="old")
    new = self._group(a=1, b=1, name_suffix="new")
    with self.session() as sess:
      sess.run([old.initializer, new.initializer])
      sess.run(old.assign({"a": ([1], [1.0])}).save(self.base).as_op())
      sess.run(new.assign({"a": ([1, 2], [5.0, 5.0]), "b": ([1], [6.0])}).as_op())
      values = sess.run(new.restore(self.base).lookup({"a": [1, 2], "b": [1]}))
      self.assertAllEqual(values["a"], [[1], [0]])
      self.assertAllEqual(values["b"], [[6]])

  def test_other_nshards_leave_no_old_set(self):
    many, few = self._group(4, "many", a=1), self._group(2, "few", a=1)
    with self.session() as sess:
      sess.run([many.initializer, few.initializer])
      sess.run(many.assign({"a": ([1], [1.0])}).save(self.base).as_op())
      sess.run(few.assign({"a": ([1], [2.0])}).save(self.base).as_op())
      self.assertLen(list_data(os.path.dirname(self.base)), 4)
      self.assertAllEqual(sess.run(many.restore(self.base).lookup({"a": [1]}))["a"], [[2]])

  def test_expired_rows_are_left_out_by_each_tables_own_time(self):
    expire = {"default_expire_time": 1}
    group = MultiHashTable.from_configs(
      {"a": config_of(segment(1), **expire), "b": config_of(segment(1), **expire)}
    )
    at = lambda value: tf.constant(value, tf.int64)  # noqa: E731
    with self.session() as sess:
      sess.run(group.initializer)
      written = group.assign({"a": ([1], [1.0]), "b": ([1], [1.0])}, req_time=at(100))
      written = written.assign({"a": ([2], [1.0])}, req_time=at(100 + 86400))
      sess.run(written.save(self.base).as_op())
      _, counts = sess.run(group.feature_stat(self.base))
      self.assertAllEqual(counts, [1, 1])
      values = sess.run(group.restore(self.base).lookup({"a": [1, 2], "b": [1]}))
      self.assertAllEqual(values["a"], [[0], [1]])
      self.assertAllEqual(values["b"], [[1]])

  @parameterized.parameters(True, False)
  def test_damage(self, has_manifest):
    group = self._group(2, a=1, b=20)
    with self.session() as sess:
      self._fill(sess, group, 2000)
      sess.run(group.save(self.base).as_op())
      if not has_manifest:
        remove_manifest(self.base)
      sess.run(group.assign({"a": ([1], [77.0])}).as_op())
      restore = group.restore(self.base).as_op()
      unchanged = group.lookup({"a": [1]})["a"]
      rng = np.random.default_rng(0)
      for part, errors in (
        ("", (tf.errors.DataLossError, tf.errors.FailedPreconditionError)),
        (".meta", (tf.errors.DataLossError,)),
      ):
        name = f"{self.base}{part}-00001-of-00002"
        with open(name, "rb") as file:
          good = file.read()
        records = None if part == ".meta" or has_manifest else self._records(name)
        damaged = [b"", good[:-1], good[: len(good) // 2], good[:3], b"\xff" * 50]
        for _ in range(30):
          flipped = bytearray(good)
          flipped[rng.integers(len(good))] ^= 1 << rng.integers(8)
          damaged.append(bytes(flipped))
        for data in damaged:
          if part == ".meta" and not data and not has_manifest:
            continue  # A shard without tables is legal, and then there are rows too many.
          with open(name, "wb") as file:
            file.write(data)
          # Snappy can say the same in several ways: of 60,000 flipped bits, one makes it copy equal
          # bytes from another place. No record has changed then, and only a manifest can tell.
          if records is not None and self._records(name) == records:
            continue
          with self.assertRaises(errors):
            sess.run(restore)
          self.assertAllEqual(sess.run(unchanged), [[77]])
        with open(name, "wb") as file:
          file.write(good)
      sess.run(restore)
      self.assertNotEqual(sess.run(unchanged)[0][0], 77)

  def test_messages_of_the_manifest(self):
    group = self._group(2, a=1)
    with self.session() as sess:
      # Enough that neither file is empty, whatever this process's hash is: then there is something
      # that the second one can lack.
      self._fill(sess, group, 200)
      sess.run(group.save(self.base).as_op())
      restore = group.restore(self.base).as_op()
      for part, message in (
        (".meta", "Read table metadata failed! .*group.meta-00001-of-00002 has 0 bytes, .* says"),
        ("", "Parse entry failed! .*group-00001-of-00002 has 0 bytes, .* says"),
      ):
        path = f"{self.base}{part}-00001-of-00002"
        with open(path, "rb") as file:
          good = file.read()
        with open(path, "wb"):
          pass
        with self.assertRaisesRegex(tf.errors.DataLossError, message):
          sess.run(restore)
        os.remove(path)
        with self.assertRaisesRegex(
          tf.errors.InvalidArgumentError, f"Shard 1 doesn't show up for .*group{part}: .*missing"
        ):
          sess.run(restore)
        with open(path, "wb") as file:
          file.write(good)
      sess.run(restore)

  @parameterized.parameters(True, False)
  def test_messages(self, has_manifest):
    group = self._group(1, a=1)
    with self.session() as sess:
      self._fill(sess, group, 10)
      sess.run(group.save(self.base).as_op())
      restore = group.restore(self.base).as_op()
      meta = self.base + ".meta-00000-of-00001"
      if not has_manifest:
        remove_manifest(self.base)
      with open(meta, "ab") as file:
        file.write(b"x")
      with self.assertRaisesRegex(tf.errors.DataLossError, "Read table metadata failed!"):
        sess.run(restore)
      with self.assertRaisesRegex(tf.errors.DataLossError, "Read table metadata failed!"):
        sess.run(group.feature_stat(self.base))
      if has_manifest:
        os.remove(meta)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no valid sharded files"):
          sess.run(restore)
        return
      write_records(meta, [b"\xff"])
      with self.assertRaisesRegex(tf.errors.DataLossError, "Parse table metadata failed!"):
        sess.run(restore)
      for count in (11, 2**40, 2**63, 2**64 - 1):
        wrong = pb.MultiHashTableMetadata(table_name="a", num_entries=count)
        write_records(meta, [wrong.SerializeToString()])
        with self.assertRaisesRegex(tf.errors.DataLossError, "Parse entry failed!"):
          sess.run(restore)
      os.remove(meta)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no valid sharded files"):
        sess.run(restore)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no valid sharded files"):
        sess.run(group.feature_stat(self.base))

  def test_rows_beyond_the_metadata_are_an_error(self):
    group = self._group(1, a=1)
    with self.session() as sess:
      self._fill(sess, group, 10)
      sess.run(group.save(self.base).as_op())
      remove_manifest(self.base)
      wrong = pb.MultiHashTableMetadata(table_name="a", num_entries=9)
      write_records(self.base + ".meta-00000-of-00001", [wrong.SerializeToString()])
      with self.assertRaises(tf.errors.DataLossError):
        sess.run(group.restore(self.base).as_op())

  def test_wrong_dimension(self):
    one, two = self._group(a=1, name_suffix="1"), self._group(a=2, name_suffix="2")
    with self.session() as sess:
      sess.run([one.initializer, two.initializer])
      sess.run(one.assign({"a": ([1], [1.0])}).save(self.base).as_op())
      sess.run(two.assign({"a": ([1], [1.0, 2.0])}).as_op())
      with self.assertRaises(tf.errors.InvalidArgumentError):
        sess.run(two.restore(self.base).as_op())
      self.assertAllEqual(sess.run(two.lookup({"a": [1]}))["a"], [[1, 2]])

  def test_empty_group(self):
    group = self._group(2, a=1, b=1)
    with self.session() as sess:
      sess.run(group.initializer)
      sess.run(group.save(self.base).as_op())
      sess.run(group.restore(self.base).as_op())
      self.assertAllEqual(sess.run(group.feature_stat(self.base))[1], [0, 0])


class ListenersTest(GroupTest):
  def test_restorer_saver_listener_purges(self):
    tf.compat.v1.train.create_global_step()
    group = MultiHashTable.from_configs({"a": config_of(segment(1), default_expire_time=1)})
    at = lambda value: tf.constant(value, tf.int64)  # noqa: E731
    write = group.assign({"a": ([1], [1.0])}, req_time=at(0))
    write = write.assign({"a": ([2], [2.0])}, req_time=at(86400)).as_op()
    values = group.lookup({"a": [1, 2]})["a"]
    basename = os.path.join(self.folder, "model.ckpt")
    hook = tf.compat.v1.train.CheckpointSaverHook(
      self.folder,
      save_steps=1000,
      listeners=[
        multi_hash_table_ops.MultiHashTableCheckpointSaverListener(basename, write_ckpt_info=False),
        multi_hash_table_ops.MultiHashTableRestorerSaverListener(basename),
      ],
    )
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(write)
      self.assertAllEqual(sess.run(values), [[1], [2]])
      hook._save(sess.raw_session(), 1)
      self.assertAllEqual(sess.run(values), [[0], [2]])
    self.assertFalse(os.path.exists(os.path.join(self.folder, "ckpt.info-1")))

  def test_counts_are_summed_over_groups(self):
    groups = [
      MultiHashTable.from_configs({"a": _config(1), f"only{i}": _config(1)}, name_suffix=str(i))
      for i in range(2)
    ]
    listener = multi_hash_table_ops.MultiHashTableCheckpointSaverListener(
      os.path.join(self.folder, "model.ckpt")
    )
    self.assertEqual(
      tf.compat.v1.get_default_graph().get_operation_by_name("multi_hashtable_save_all").type,
      "NoOp",
    )
    writes = [group.assign({"a": ([1, 2, 3], [1.0] * 3)}).as_op() for group in groups]
    tf.compat.v1.get_default_graph().finalize()
    with self.session() as sess:
      sess.run([group.initializer for group in groups])
      sess.run(writes)
      listener.before_save(sess, 5)
    info = ckpt_info_pb2.CkptInfo()
    with open(os.path.join(self.folder, "ckpt.info-5")) as file:
      text_format.Parse(file.read(), info)
    self.assertEqual(dict(info.feature_counts), {"a": 6, "only0": 0, "only1": 0})

  def _save_and_restore(self, saved_suffixes, restored_suffix):
    """Saves groups and restores another one; returns the value of an id of each saved group."""
    basename = os.path.join(self.folder, "model.ckpt")
    with tf.Graph().as_default(), self.session() as sess:
      step = tf.compat.v1.train.create_global_step()
      groups = [
        MultiHashTable.from_configs({"a": _config(1)}, name_suffix=suffix)
        for suffix in saved_suffixes
      ]
      listener = multi_hash_table_ops.MultiHashTableCheckpointSaverListener(basename)
      writes = [group.assign({"a": ([i], [i + 1.0])}).as_op() for i, group in enumerate(groups)]
      sess.run([group.initializer for group in groups] + [step.initializer])
      sess.run(writes)
      listener.before_save(sess, 1)
      tf.compat.v1.train.Saver([step]).save(sess, basename, global_step=1)
    with tf.Graph().as_default(), self.session() as sess:
      group = MultiHashTable.from_configs({"a": _config(1)}, name_suffix=restored_suffix)
      values = group.lookup({"a": np.arange(len(saved_suffixes))})["a"]
      listener = multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(basename)
      listener.before_restore(sess)
      return sess.run(values)

  def test_a_local_group_has_two_names(self):
    for saved, restored in (("", "0"), ("0", ""), ("", ""), ("0", "0")):
      with self.subTest(saved=saved, restored=restored):
        self.assertAllEqual(self._save_and_restore([saved], restored), [[1]])
        tf.io.gfile.rmtree(self.folder)

  def test_a_group_of_many_is_not_taken_for_the_only_one(self):
    for saved, restored in ((["0", "1"], ""), (["x"], ""), ([""], "x"), (["1"], "0")):
      with self.subTest(saved=saved, restored=restored):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no valid sharded files"):
          self._save_and_restore(saved, restored)
        tf.io.gfile.rmtree(self.folder)

  def test_nothing_to_restore(self):
    group = MultiHashTable.from_configs({"a": _config(1)})
    listener = multi_hash_table_ops.MultiHashTableCheckpointRestorerListener(
      os.path.join(self.folder, "model.ckpt")
    )
    os.mkdir(os.path.join(self.folder, "x.assets"))
    with self.session() as sess:
      sess.run(group.initializer)
      listener.before_restore(sess)


if __name__ == "__main__":
  tf.test.main()
