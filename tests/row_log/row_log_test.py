"""Ops of the row log through `row_log`: what one session writes, another one applies.

Batches, chunks, scans and digests themselves are tested in C++ (row_log_test.cc).
"""

import struct
import unittest

import numpy as np
import tensorflow as tf

from monolith.realtime import row_log_pb2
from monolith.row_log import row_log
from tests.realtime.row_log_tables import DIM, NAME, ServedTable, TrainedTable

tf.compat.v1.disable_eager_execution()


def _build(trained, seq, **options):
  header = row_log_pb2.RowBatch(
    model="m", num_shards=1, epoch=1, seq=seq, prev_seq=seq - 1, sample_positions={2: 30}
  )
  counts = trained.writer.begin(header, **options)
  messages = []
  while True:
    some, _, _ = trained.writer.take()
    if not some:
      break
    messages += some
  assert len(messages) == counts.num_chunks
  return messages, counts


class RowLogTest(unittest.TestCase):
  def _tables(self, **options):
    trained = TrainedTable(**options)
    self.addCleanup(trained.close)
    served = ServedTable(group=options.get("group", False))
    self.addCleanup(served.close)
    return trained, served

  def test_rows_of_a_single_table_arrive(self):
    trained, served = self._tables()
    trained.train([1, 2, 3], req_time=77)

    messages, counts = _build(trained, 1, digest=True)
    state = served.follower.apply(messages)

    self.assertEqual(counts, (1, 3, True))
    np.testing.assert_array_equal(served.lookup([1, 3, 9]), [[1] * DIM, [3] * DIM, [0] * DIM])
    self.assertEqual((state.epoch, state.seq, state.rows), (1, 1, 3))
    self.assertEqual(state.newest_event_time, 77)
    self.assertEqual(state.digest_ok, 1)
    self.assertEqual(served.follower.digests(), trained.digests())
    self.assertEqual(served.follower.digests(scan=True), trained.digests())
    self.assertEqual(served.follower.digests()[NAME][1], 3)

  def test_rows_of_a_group_arrive(self):
    trained, served = self._tables(group=True)
    trained.train([5])
    served.follower.apply(_build(trained, 1)[0])
    trained.train([6, -7])

    messages, counts = _build(trained, 2, digest=True)
    state = served.follower.apply(messages)

    self.assertEqual(counts, (1, 2, False))
    self.assertEqual(state.digest_ok, 1)
    np.testing.assert_array_equal(served.lookup([5, 6, -7])[:, 0], [5, 6, -7])
    self.assertEqual(served.follower.digests(scan=True), trained.digests())

  def test_python_reads_what_the_engine_writes(self):
    trained, _ = self._tables()
    trained.train([8, 9])

    (message,), _ = _build(trained, 1, digest=True)

    batch = row_log_pb2.RowBatch.FromString(message[4:])
    self.assertEqual(dict(batch.sample_positions), {2: 30})
    self.assertTrue(batch.full_scan)
    self.assertEqual((batch.chunk, batch.num_chunks), (0, 1))
    (table,) = batch.tables
    self.assertEqual((table.name, table.dim), (NAME, DIM))
    ids = np.frombuffer(table.ids, "<i8")
    rows = np.frombuffer(table.rows, "<f4").reshape(-1, DIM)
    np.testing.assert_array_equal(rows[:, 0], ids)
    self.assertEqual(batch.digest.seq, 1)
    self.assertEqual(batch.digest.tables[NAME], trained.digests()[NAME][0])
    self.assertEqual(batch.digest.row_counts[NAME], 2)
    (crc,) = struct.unpack("<I", message[:4])
    self.assertNotEqual(crc, 0)

  def test_overflow_makes_a_scan(self):
    trained, served = self._tables(capacity=4)
    served.follower.apply(_build(trained, 1)[0])
    trained.train(range(1, 100))

    messages, counts = _build(trained, 2, digest=True)

    self.assertTrue(counts.full_scan)
    self.assertEqual(served.follower.apply(messages).digest_ok, 1)
    self.assertEqual(served.follower.digests(scan=True), trained.digests())

  def test_info_tells_what_waits_and_what_was_marked(self):
    trained, _ = self._tables()
    _build(trained, 1)
    trained.train([1, 2])
    trained.writer.mark("position", [3, 4, 5])
    trained.writer.mark("saved", [100])
    trained.be_ready([1, 2, 30, 99])

    info = trained.writer.info()

    self.assertEqual((info.num_tables, info.waiting_ids, info.scan_reasons), (1, 2, 0))
    self.assertEqual(info.waiting_bytes, 2 * (8 + 4 * DIM))
    self.assertEqual((info.epoch, info.seq, info.next_offset, info.saved_step), (3, 4, 5, 100))
    self.assertEqual((info.ready_count, info.restored_offset, info.restored_step), (1, 30, 99))

  def test_damaged_messages_are_refused(self):
    trained, served = self._tables()
    trained.train([1])
    (message,), _ = _build(trained, 1)
    damaged = message[:-1] + bytes([message[-1] ^ 1])
    for take in (served.follower.apply, trained.writer.touch):
      with self.assertRaisesRegex(tf.errors.DataLossError, "checksum"):
        take([damaged])
      with self.assertRaisesRegex(tf.errors.DataLossError, "0 bytes"):
        take([b""])
    self.assertEqual(served.follower.apply([]).rows, 0)

  def test_wrong_arguments_are_named(self):
    trained, served = self._tables()
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "epoch 0"):
      trained.writer.begin(row_log_pb2.RowBatch(seq=1))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "has 1 tables, want none"):
      trained.writer.begin(
        row_log_pb2.RowBatch(epoch=1, seq=1, tables=[row_log_pb2.TableRows(dim=1)])
      )
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "size of values is 1, want"):
      trained.writer.mark("position", [1])
    _build(trained, 1)
    trained.train([1])
    header = row_log_pb2.RowBatch(epoch=1, seq=2, prev_seq=1)
    trained.writer.begin(header)
    with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "1 chunks left"):
      trained.writer.begin(header)
    trained.writer.abandon()
    self.assertTrue(trained.writer.begin(header).full_scan)

  def test_other_resources_are_refused(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      dummy = row_log.gen_monolith_ops.monolith_dummy_sync_client(shared_name="d")
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "dummy sync client, want one of"):
        session.run(row_log.gen_monolith_ops.monolith_row_log_info(dummy))
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"tables\[0\]"):
        session.run(row_log.gen_monolith_ops.monolith_row_log_digests([dummy]))


if __name__ == "__main__":
  unittest.main()
