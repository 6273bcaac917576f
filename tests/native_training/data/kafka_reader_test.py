"""The reader below the Kafka data sets: settings, and when a stream ends."""

import unittest

from monolith.native_training.data import kafka_reader, kafka_settings
from tests.native_training.data.mock_kafka import MockKafka


class SettingsTest(unittest.TestCase):
  def test_metadata(self):
    metadata = kafka_settings.make_metadata(
      "g", ["a:1", "b:2"], 5, ["conf.topic.x=1", "y = a=b "], "z=3, y=4,"
    )
    settings, size = kafka_settings.parse_metadata(metadata)
    self.assertEqual(size, 5)
    self.assertEqual(
      settings,
      {
        "enable.partition.eof": "true",
        "x": "1",
        "y": "4",
        "z": "3",
        "group.id": "g",
        "bootstrap.servers": "a:1,b:2",
      },
    )
    self.assertEqual(kafka_settings.parse_metadata(["y=a=b"])[0]["y"], "a=b")
    self.assertEqual(kafka_settings.parse_metadata([])[1], 1024)
    with self.assertRaisesRegex(ValueError, "batch.num.messages is 0"):
      kafka_settings.parse_metadata(["batch.num.messages=0"])

  def test_timeouts(self):
    self.assertEqual(kafka_settings.check_timeouts(10000, -1), -1)
    self.assertEqual(kafka_settings.check_timeouts(10000, 0), 10000)
    self.assertEqual(kafka_settings.check_timeouts(10000, 25000), 25000)


class StreamTimeoutTest(unittest.TestCase):
  def read(self, message_poll_timeout, stream_timeout):
    """Returns what fetches after the last message say about going on."""
    with MockKafka() as kafka:
      kafka.send(kafka.create_topic("t"), [b"a"])
      settings = ["conf.topic.auto.offset.reset=earliest", "enable.partition.eof=false"]
      reader = kafka_reader.KafkaReader(
        ["t"], kafka_settings.make_metadata("g", kafka.servers, 1, settings)
      )
      first = reader.fetch(60000, -1)
      self.assertEqual(first.messages, [b"a"])
      self.assertEqual(first.origins, ["Kafka topic t, partition 0, offset 0"])
      result = []
      while len(result) < 5 and all(result):
        fetch = reader.fetch(message_poll_timeout, stream_timeout)
        self.assertEqual(fetch.messages, [])
        result.append(fetch.continue_fetch)
      reader.close()
      self.assertIsNone(reader.fetch(message_poll_timeout, stream_timeout))
      return result

  def test_ends_after_so_many_polls(self):
    self.assertEqual(self.read(50, 120), [True, True, False])

  def test_one_poll(self):
    self.assertEqual(self.read(50, 50), [False])

  def test_endless(self):
    self.assertEqual(self.read(20, -1), [True] * 5)


if __name__ == "__main__":
  unittest.main()
