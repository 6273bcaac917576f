"""Tests of `kafka_client` without a broker, or with the one in librdkafka."""

import os
import subprocess
import sys
import unittest
from unittest import mock

from monolith.row_log import kafka_client
from tests import free_ports
from tests.native_training.data.mock_kafka import MockKafka

_PROGRAM = """
import sys, time
from monolith.row_log import partition_reader
from monolith.row_log import kafka_client
# Plain settings: the brokers are not asked first.
extra = {"security.protocol": "plaintext"}
clients = [
  kafka_client.make_consumer(sys.argv[1], "group", extra),
  kafka_client.make_producer(sys.argv[1], extra),
]
clients[0].subscribe(["topic"])
clients[1].produce("topic", b"message")
end = time.monotonic() + 4
while time.monotonic() < end:
  for client in clients:
    client.poll(0.05)
"""


class AwayTest(unittest.TestCase):
  def test_a_broker_that_is_away_is_mentioned_and_fills_no_screen(self):
    server = f"127.0.0.1:{free_ports.get_free_port()}"

    # Killed at its end: the producer would wait for its broker.
    done = subprocess.run(
      [sys.executable, "-c", _PROGRAM + "import os; os._exit(0)", server],
      capture_output=True, text=True, check=True,
    )  # fmt: skip

    lines = [line for line in done.stderr.splitlines() if "Connection refused" in line]
    self.assertTrue(lines, done.stderr)
    self.assertIn(server, lines[0])
    self.assertLess(len(lines), 4, done.stderr)


class ProbeTest(unittest.TestCase):
  def test_broker_that_answers_needs_no_name(self):
    with MockKafka() as kafka:
      features = kafka_client.probe(kafka.servers)
      settings = kafka_client.client_settings(kafka.servers)

    self.assertEqual(features, kafka_client.Features())
    self.assertTrue(features.has_transactions and features.can_create_topics)
    self.assertNotIn("broker.version.fallback", settings)

  def test_broker_whose_version_is_named_is_not_asked(self):
    with mock.patch.dict(os.environ):
      kafka_client.remember_version("127.0.0.1:1", "0.10.1.0")
      kafka_client.remember_version("127.0.0.1:1", "0.9.0.1")
      kafka_client.remember_version("127.0.0.1:2", "0.10.2.1")

      # Nobody listens there: asking would fail.
      old = kafka_client.probe("127.0.0.1:1", timeout_secs=0)
      settings = kafka_client.client_settings("127.0.0.1:1")
      newer = kafka_client.probe("127.0.0.1:2,127.0.0.1:3", timeout_secs=0)
      mixed = kafka_client.probe("127.0.0.1:2,127.0.0.1:1", timeout_secs=0)

    self.assertEqual(
      (old.is_old, old.can_create_topics, old.has_transactions), (True, False, False)
    )
    self.assertEqual(settings["broker.version.fallback"], "0.9.0.1")
    self.assertEqual(
      (newer.is_old, newer.can_create_topics, newer.has_transactions), (False, True, False)
    )
    self.assertEqual(mixed, old)

  def test_missing_broker_is_named(self):
    with self.assertRaisesRegex(
      ConnectionError, "no Kafka broker answers at 127.0.0.1:1: .*KAFKA_VERSIONS=127.0.0.1:1=0.9"
    ):
      kafka_client.probe("127.0.0.1:1", timeout_secs=0)
    with self.assertRaisesRegex(ValueError, "want host:port"):
      kafka_client.probe("nowhere")
    with self.assertRaisesRegex(ValueError, "want host:port of at least one"):
      kafka_client.probe(" ,")

  def test_version_that_is_none_is_refused(self):
    for text in ("127.0.0.1:1", "127.0.0.1:1=new", "=0.9.0.1"):
      with mock.patch.dict(os.environ, MONOLITH_KAFKA_VERSIONS=text):
        with self.assertRaisesRegex(ValueError, "want host:port=version"):
          kafka_client.probe("127.0.0.1:1", timeout_secs=0)


if __name__ == "__main__":
  unittest.main()
