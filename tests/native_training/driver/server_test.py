"""Tests how the chief ends parameter servers."""

from __future__ import annotations

import subprocess
import sys

import tensorflow as tf

from monolith.native_training.driver import server as training_server
from tests import free_ports, ps_processes

tf.compat.v1.disable_eager_execution()

# A server that dies at the very moment it is told to stop.
_HASTY_SERVER = """
import os
import tensorflow as tf
from monolith.native_training.driver import server as training_server
tf.compat.v1.disable_eager_execution()
training_server._LINGER_SECS = 0
server = tf.distribute.Server.create_local_server()
print(server.target, flush=True)
training_server._join_ps(server.target, 0)
os.kill(os.getpid(), 9)
"""


class ShutdownTest(tf.test.TestCase):
  def test_server_that_ends_faster_than_it_answers(self):
    process = subprocess.Popen(
      [sys.executable, "-c", _HASTY_SERVER],
      stdout=subprocess.PIPE,
      env=ps_processes.environment(),
      text=True,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    addr = process.stdout.readline().strip()[len("grpc://") :]

    # This once waited forever.
    training_server._shutdown_ps("", {"ps": [addr]}, {}, 1)

    self.assertEqual(process.wait(timeout=120), -9)

  def test_servers_that_are_gone_are_left_out(self):
    addrs = [f"127.0.0.1:{free_ports.get_free_port()}" for _ in range(2)]

    with self.assertLogs("absl", "WARNING") as logs:
      training_server._shutdown_ps("", {"ps": addrs}, {}, 2)

    self.assertIn(f"gone already: {sorted(addrs)}", logs.output[0])


if __name__ == "__main__":
  tf.test.main()
