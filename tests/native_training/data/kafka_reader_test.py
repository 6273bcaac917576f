"""Tests when a Kafka stream ends, and the consumer's settings."""

import unittest

from monolith.native_training.data import feature_utils, kafka_settings
from tests.native_training.data.mock_kafka import MockKafka


class SettingsTest(unittest.TestCase):
  def test_metadata(self):
    metadata = kafka_settings.make_metadata(
      "g", ["a:1", "b:2"], 5, ["conf.topic.x=1", "y = a=b "], "z=3, y=4,"
    )
    self.assertEqual(
      metadata,
      [
        "conf.topic.x=1",
        "y = a=b",
        "group.id=g",
        "bootstrap.servers=a:1,b:2",
        "batch.num.messages=5",
        "z=3",
        "y=4",
      ],
    )

  def test_timeouts(self):
    self.assertEqual(kafka_settings.check_timeouts(10000, -1), -1)
    self.assertEqual(kafka_settings.check_timeouts(10000, 0), 10000)
    self.assertEqual(kafka_settings.check_timeouts(10000, 25000), 25000)


class StreamTimeoutTest(unittest.TestCase):
  def read(self, message_poll_timeout, stream_timeout):
    """Returns `continue_fetch` of the fetches after the last message."""
    with MockKafka() as kafka:
      kafka.send(kafka.create_topic("t"), [b"a"])
      settings = ["conf.topic.auto.offset.reset=earliest", "enable.partition.eof=false"]
      resource = feature_utils.kafka_resource_init(
        ["t"], kafka_settings.make_metadata("g", kafka.servers, 1, settings)
      )
      first = feature_utils.kafka_read_next(resource, 0, 60000, -1)
      self.assertEqual(first.message.numpy().tolist(), [b"a"])
      result = []
      while len(result) < 5 and all(result):
        fetch = feature_utils.kafka_read_next(resource, 1, message_poll_timeout, stream_timeout)
        self.assertEqual(fetch.message.numpy().tolist(), [])
        result.append(bool(fetch.continue_fetch))
      del resource
      return result

  def test_ends_after_so_many_polls(self):
    self.assertEqual(self.read(50, 120), [True, True, False])

  def test_one_poll(self):
    self.assertEqual(self.read(50, 50), [False])

  def test_endless(self):
    self.assertEqual(self.read(20, -1), [True] * 5)


if __name__ == "__main__":
  unittest.main()
