"""Promise: a broker that is killed costs the row log no row, whatever is trained meanwhile."""

import os
import tempfile
import unittest

import pytest
import tensorflow as tf

from examples.realtime import broker
from monolith.row_log.log_partition import LogPartition
from monolith.row_log.row_publisher import RowPublisher
from tests.realtime.row_log_tables import ServedTable, TrainedTable
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TIMEOUT_SECS = 120


class KilledBrokerTest(unittest.TestCase):
  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    try:
      self.broker = broker.LocalBroker(folder.name)
      self.addCleanup(self.broker.stop)
      self.broker.start()
    except broker.BrokerError as error:
      if os.environ.get("CI"):
        raise
      self.skipTest(str(error))
    self.broker.create_topics({"rows.m": 2})

  def test_rows_are_in_the_log_after_a_kill(self):
    trained, served = TrainedTable(), ServedTable()
    self.addCleanup(trained.close)
    self.addCleanup(served.close)
    trained.be_ready()
    publisher = RowPublisher(
      trained.writer, self.broker.servers, "m", shard=1, num_shards=2, interval_secs=0.05
    ).start()
    self.addCleanup(publisher.stop, flush_secs=0)
    trained.train(range(1, 1000))
    self.assertTrue(publisher.flush(_TIMEOUT_SECS))

    self.broker.kill_broker()
    trained.train(range(500, 1500))
    wait_until(lambda: trained.writer.info().waiting_ids == 0)  # a batch is on its way
    trained.train(range(1400, 2000))
    self.broker.start_broker()
    self.assertTrue(publisher.flush(_TIMEOUT_SECS))
    publisher.stop()

    log = LogPartition(self.broker.servers, "rows.m", 1)
    self.addCleanup(log.close)
    for _, value in log.read(*log.ends()):
      state = served.follower.apply([value])
    self.assertEqual((state.epoch, state.gaps, state.torn), (1, 0, 0))
    self.assertEqual(served.follower.digests(scan=True), trained.digests())
    self.assertEqual(publisher.position()["next_offset"], log.ends()[1])


if __name__ == "__main__":
  unittest.main()
