"""Tests of `row_publisher` and `log_partition` on librdkafka's broker.

What needs a broker that keeps its log over `kill -9` is in row_publisher_broker_test.py.
"""

import os
import tempfile
import threading
import unittest
from unittest import mock

import tensorflow as tf

from monolith.realtime import row_log_pb2
from monolith.row_log.kafka_lib import KafkaError
from monolith.row_log.log_partition import LogPartition
from monolith.row_log.row_publisher import RowPublisher
from tests.native_training.data.mock_kafka import TIMEOUT_SECS, MockKafka
from tests.realtime.row_log_tables import ServedTable, TrainedTable
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()


class RowPublisherTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.kafka = MockKafka()
    cls.addClassCleanup(cls.kafka.close)
    temporary = tempfile.TemporaryDirectory()
    cls.addClassCleanup(temporary.cleanup)
    cls.folder = temporary.name

  def setUp(self):
    self.model = self.id().rpartition(".")[2]
    self.topic = self.kafka.create_topic(f"rows.{self.model}")
    self.log = LogPartition(self.kafka.servers, self.topic, 0)
    self.addCleanup(self.log.close)

  def _trained(self, **options):
    trained = TrainedTable(**options)
    self.addCleanup(trained.close)
    return trained

  def _publish(self, trained, **options):
    publisher = RowPublisher(
      trained.writer, self.kafka.servers, self.model, **{"interval_secs": 0.05, **options}
    ).start()
    self.addCleanup(publisher.stop, flush_secs=0)
    return publisher

  def _batches(self):
    low, high = self.log.ends()
    return [row_log_pb2.RowBatch.FromString(value[4:]) for _, value in self.log.read(low, high)]

  def _follow(self, served):
    """Applies the whole log; returns where the replica stands."""
    low, high = self.log.ends()
    return served.follower.apply([value for _, value in self.log.read(low, high)])

  def _served(self):
    served = ServedTable()
    self.addCleanup(served.close)
    return served

  def test_changed_rows_are_in_the_log_and_digests_equal(self):
    trained = self._trained()
    publisher = self._publish(trained, sample_positions=lambda: {1: 5})
    trained.train([1, 2, 3])
    trained.be_ready()
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    trained.train([3, 4], req_time=50)
    publisher.stop()

    batches = self._batches()
    state = self._follow(served := self._served())

    self.assertEqual([(b.epoch, b.seq, b.prev_seq) for b in batches], [(1, 1, 0), (1, 2, 1)])
    self.assertEqual(dict(batches[1].sample_positions), {1: 5})
    self.assertEqual(batches[1].newest_event_time, 50)
    self.assertTrue(batches[0].HasField("digest"))
    self.assertEqual((state.digest_ok, state.gaps), (1, 0))
    self.assertEqual(served.follower.digests(scan=True), trained.digests())
    self.assertEqual(
      publisher.position(),
      {"epoch": 1, "seq": 2, "topic": self.topic, "partition": 0, "next_offset": 2},
    )
    info = trained.writer.info()
    self.assertEqual((info.epoch, info.seq, info.next_offset), (1, 2, 2))

  def test_nothing_is_published_before_tables_are_restored(self):
    trained = self._trained()
    trained.train([1])
    publisher = self._publish(trained)

    self.assertFalse(publisher.flush(0.5))

    self.assertEqual(self.log.ends()[1], 0)

  def test_digests_come_also_when_nothing_changes(self):
    trained = self._trained()
    trained.be_ready()
    self._publish(trained, digest_secs=0.05)

    wait_until(lambda: self.log.ends()[1] >= 3)

    self.assertTrue(all(batch.HasField("digest") for batch in self._batches()))

  def test_a_later_writer_takes_a_higher_epoch_and_ends_the_earlier_one(self):
    first, second = self._trained(), self._trained()
    first.be_ready()
    publisher = self._publish(first)
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    second.be_ready()
    second.train([7])
    self.assertTrue(self._publish(second).flush(TIMEOUT_SECS))

    first.train([1])
    wait_until(lambda: publisher.fenced)

    self.assertEqual([batch.epoch for batch in self._batches()], [1, 2, 1])
    served = self._served()
    self.assertEqual(self._follow(served).epoch, 2)
    self.assertEqual(served.follower.digests(scan=True), second.digests())
    # A third writer sees both, whatever comes last.
    third = self._trained()
    third.be_ready()
    self.assertTrue(self._publish(third).flush(TIMEOUT_SECS))
    self.assertEqual(self._batches()[-1].epoch, 3)

  def test_two_writers_that_start_at_once_do_not_share_an_epoch(self):
    first, second = self._trained(), self._trained()
    publishers = [self._publish(table, digest_secs=0.2) for table in (first, second)]
    for publisher in publishers:
      publisher._take_epoch(first.writer.info())  # both see the same log
    first.train([1])
    second.train([2])
    first.be_ready()
    second.be_ready()

    wait_until(lambda: any(publisher.fenced for publisher in publishers))

    left = next(p for p in publishers if not p.fenced)
    winner = (first, second)[publishers.index(left)]
    left.flush(TIMEOUT_SECS)
    served = self._served()
    self._follow(served)
    self.assertEqual(served.follower.digests(scan=True), winner.digests())

  def _checkpointed(self, saved_before_last_batch):
    """Leaves a log behind a checkpoint at step 10; returns the replica and the checkpoint."""
    trained = self._trained()
    publisher = self._publish(trained)
    trained.train(range(1, 50))
    trained.be_ready()
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    position = publisher.position()
    basename = os.path.join(self.folder, self.model)
    trained.save(basename)
    if saved_before_last_batch:
      trained.writer.mark("saved", [10])
    trained.train(range(40, 60))
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    trained.train([45])  # never published
    publisher.stop(flush_secs=0)
    served = self._served()
    self._follow(served)
    return served, basename, [position["epoch"], position["seq"], position["next_offset"], 10]

  def test_after_a_restore_ids_behind_the_checkpoint_get_its_values(self):
    served, basename, position = self._checkpointed(saved_before_last_batch=True)
    restored = self._trained()
    restored.restore(basename)
    restored.be_ready(position)
    self.assertTrue(self._publish(restored).flush(TIMEOUT_SECS))

    state = self._follow(served)
    batch = next(batch for batch in self._batches() if batch.epoch == 2)

    self.assertEqual((batch.epoch, batch.seq, batch.full_scan), (2, 1, False))
    ids = len(batch.tables[0].ids) // 8, len(batch.tables[0].deleted_ids) // 8
    self.assertEqual(ids, (10, 10))
    self.assertEqual(state.epoch, 2)
    self.assertEqual(served.follower.digests(scan=True), restored.digests())

  def test_after_a_restore_all_rows_are_published_where_the_log_cannot_tell(self):
    cases = (
      # The writer died before it published rows that the checkpoint has.
      (False, lambda position: position),
      # The position is gone.
      (True, lambda position: [*position[:2], 10**6, 10]),
      # The checkpoint has no position.
      (True, lambda position: [0, 0, 0, -1]),
    )
    for number, (saved, change) in enumerate(cases):
      with self.subTest(number=number):
        self.model = f"scan{number}"
        self.topic = self.kafka.create_topic(f"rows.{self.model}")
        self.log = LogPartition(self.kafka.servers, self.topic, 0)
        self.addCleanup(self.log.close)
        served, basename, position = self._checkpointed(saved)
        restored = self._trained()
        restored.restore(basename)
        restored.be_ready(change(position))
        self.assertTrue(self._publish(restored).flush(TIMEOUT_SECS))

        state = self._follow(served)

        first = next(batch for batch in self._batches() if batch.epoch == 2)
        self.assertTrue(first.full_scan)
        self.assertEqual(state.digest_ok, 1)
        self.assertEqual(served.follower.digests(scan=True), restored.digests())

  def test_a_broker_that_is_away_delays_and_loses_nothing(self):
    trained = self._trained()
    trained.be_ready()
    publisher = self._publish(trained)
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    self.kafka.set_down(True)
    try:
      trained.train([1, 2])
      self.assertFalse(publisher.flush(1))
      trained.train([2, 3])
    finally:
      self.kafka.set_down(False)

    self.assertTrue(publisher.flush(TIMEOUT_SECS))

    served = self._served()
    self.assertEqual(self._follow(served).gaps, 0)
    self.assertEqual(served.follower.digests(scan=True), trained.digests())

  def test_no_error_ends_the_thread_and_a_torn_batch_is_replaced(self):
    trained = self._trained()
    trained.be_ready()
    publisher = self._publish(trained)
    self.assertTrue(publisher.flush(TIMEOUT_SECS))
    append, failures = publisher._log.append, []

    def fail_once(messages, stopped=None):
      if not failures:
        failures.append(1)
        raise RuntimeError("no luck")
      return append(messages, stopped)

    publisher._log.append = fail_once
    trained.train([1, 2])

    wait_until(lambda: publisher.failures == 1)
    self.assertTrue(publisher.flush(TIMEOUT_SECS))

    served = self._served()
    state = self._follow(served)
    # Number 2 was begun and is not there.
    self.assertEqual((state.seq, state.gaps), (3, 0))
    self.assertEqual(served.follower.digests(scan=True), trained.digests())

  def test_a_closed_session_ends_the_thread(self):
    trained = self._trained()
    trained.be_ready()
    publisher = self._publish(trained)
    self.assertTrue(publisher.flush(TIMEOUT_SECS))

    trained.close()

    wait_until(lambda: not publisher._thread.is_alive())
    self.assertEqual(publisher.failures, 0)

  def test_messages_that_brokers_refuse_are_named_and_sent_again(self):
    deliveries = []

    class Producer:
      def produce(self, *unused, on_delivery, **unused_options):
        deliveries.append(on_delivery)

      def poll(self, unused_secs):
        if len(deliveries) == 1:
          deliveries[0](KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)
        else:
          message = mock.Mock()
          message.partition.return_value, message.offset.return_value = 0, 7
          deliveries[1](None, message)

    self.log._producer = Producer()
    with self.assertLogs("absl", "WARNING") as logs:
      self.assertEqual(self.log.append([b"a"]), [7])
    self.assertRegex(logs.output[0], rf"{self.topic}\[0\]: brokers refuse 1 of 1 .*authori")

  def test_a_writer_whose_queue_is_full_can_be_stopped(self):
    self.log._producer = mock.Mock()
    # An end: without the check the test would not have one.
    self.log._producer.produce.side_effect = [BufferError] * 9 + [AssertionError("not stopped")]
    stopped = threading.Event()
    stopped.set()
    with self.assertRaisesRegex(InterruptedError, "1 of 1 messages did not reach"):
      self.log.append([b"a"], stopped)

  def test_a_shard_that_does_not_exist_is_refused(self):
    with self.assertRaisesRegex(ValueError, "shard is 2, want one of 2"):
      RowPublisher(self._trained().writer, self.kafka.servers, "m", shard=2, num_shards=2)


if __name__ == "__main__":
  unittest.main()
