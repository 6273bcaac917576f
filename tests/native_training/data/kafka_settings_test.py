"""Tests of the settings of a Kafka consumer."""

import unittest

from monolith.native_training.data import kafka_settings


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


if __name__ == "__main__":
  unittest.main()
