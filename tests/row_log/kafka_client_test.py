"""Tests of `kafka_client` without a broker."""

import subprocess
import sys
import unittest

from tests import free_ports

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


if __name__ == "__main__":
  unittest.main()
