"""Tests what the joiner knows about a partition."""

import itertools
import unittest
from unittest import mock

from monolith.realtime import joiner_recovery
from monolith.realtime.join_window import WindowOptions
from monolith.realtime.joiner_options import JoinerOptions
from monolith.realtime.joiner_recovery import Partition
from monolith.row_log.kafka_lib import KafkaError
from tests.realtime.event_making import START_MS, make_action, make_impression


class PartitionTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self._partition = Partition(0, WindowOptions(window_ms=20_000, lateness_ms=2_000))

  def _add(self, impressions=(), actions=()):
    return self._partition.window.add(
      [(i, make_impression(f"i{secs}", secs)) for i, secs in enumerate(impressions)],
      [(i, make_action(f"i{secs}", secs)) for i, secs in enumerate(actions)],
    )

  def _watermark_secs(self):
    return (self._partition.watermark() - START_MS) / 1000

  def test_an_end_of_before_an_outage_closes_no_window(self):
    self._add(impressions=[10], actions=[9])
    # The actions have ended, then the broker goes away; its backlog of impressions is read first.
    self._partition.actions_until = self._partition.window.newest_impression_ms
    self._add(impressions=[100])

    self.assertEqual(self._watermark_secs(), 8)
    self.assertEqual(self._partition.window.advance(self._partition.watermark()), [])
    self.assertTrue(self._partition.is_held_back())

    (sample,) = self._add(actions=[100])
    self.assertEqual(sample.request_id, "i100")
    self.assertEqual(self._watermark_secs(), 98)
    self.assertFalse(self._partition.is_held_back())

  def test_a_silent_stream_holds_nothing_back_once_it_has_ended(self):
    self._add(impressions=[10, 100])
    self.assertTrue(self._partition.is_held_back())

    self._partition.actions_until = self._partition.window.newest_impression_ms

    self.assertFalse(self._partition.is_held_back())
    self.assertEqual(self._watermark_secs(), 98)

  def test_a_restart_reads_what_must_be_known_when_it_is_repeated(self):
    self._partition.mark(0)
    self._partition.window.add(
      [(5, make_impression("a", 0)), (6, make_impression("b", 1))], [(0, make_action("a", 1))]
    )
    self._partition.impressions_next = 7

    before = self._partition.resume_point().impressions
    self._partition.window.advance(START_MS + 100_000)

    self.assertEqual(before, 5)
    self.assertEqual(self._partition.resume_point().impressions, 7)


class SampleOffsetsTest(unittest.TestCase):
  def test_brokers_that_only_refuse_are_given_up(self):
    refused = mock.Mock()
    refused.error.return_value = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    reader = mock.Mock()
    # An end: without a limit the test would not have one either.
    reader.consume.side_effect = itertools.chain([[refused]] * 100, [AssertionError("no limit")])
    clock = mock.Mock(side_effect=itertools.count(0, 10))
    with (
      mock.patch.object(joiner_recovery.kafka_client, "make_consumer", return_value=reader),
      mock.patch.object(joiner_recovery.time, "monotonic", clock),
      self.assertRaisesRegex(joiner_recovery.JoinerError, "partition 1, .* from 3 to 9: .*uthori"),
    ):
      list(joiner_recovery.read_sample_offsets(JoinerOptions("a:1"), 1, 3, 9))
    reader.close.assert_called_once()


if __name__ == "__main__":
  unittest.main()
