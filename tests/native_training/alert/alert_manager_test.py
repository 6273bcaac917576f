"""Tests of the alert manager, a flag without effect."""

import unittest

from absl import flags
from google.protobuf import text_format

from monolith.native_training.alert import alert_manager, alert_pb2


class AlertManagerTest(unittest.TestCase):
  def test_no_manager_whatever_the_flag_says(self):
    self.assertEqual(flags.FLAGS.monolith_alert_proto, "")
    proto = alert_pb2.AlertProto(kafka_alert=alert_pb2.KafkaAlertProto(topic="t", group="g"))
    flags.FLAGS.monolith_alert_proto = text_format.MessageToString(proto)
    try:
      self.assertIsNone(alert_manager.get_default_alert_manager())
      self.assertEqual(
        text_format.Parse(flags.FLAGS.monolith_alert_proto, alert_pb2.AlertProto()), proto
      )
    finally:
      flags.FLAGS.monolith_alert_proto = ""


if __name__ == "__main__":
  unittest.main()
