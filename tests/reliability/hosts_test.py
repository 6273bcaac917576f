"""Training over several hosts, each in a network of its own.

Promise: `monolith.launch` trains over ssh on hosts that share a folder.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import unittest

import pytest

from tests import ssh_server
from tests.network_hosts import NetworkHosts

pytestmark = pytest.mark.thorough
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 300
_PROGRAM = """
import pathlib, sys
import monolith
import tensorflow as tf

folder, end = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ids = tf.keras.Input([], dtype=tf.int64, name="ids")
rows = monolith.keras.layers.Embedding(4, "adagrad", learning_rate=0.5, name="items")(ids)
model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(rows))
model.compile(tf.keras.optimizers.Adam(0.05), "binary_crossentropy")

def read(index, count):
  pairs = tf.data.Dataset.range(100).map(lambda i: ({"ids": i}, tf.cast(i % 2 == 0, tf.float32)))
  return pairs.batch(10).repeat()

monolith.keras.train(model, read, str(folder / "model"), max_steps=end, save_checkpoints_steps=50)
print("ended", flush=True)
"""


class HostsTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.hosts = NetworkHosts(3)
    self.addCleanup(self.hosts.close)
    self.program = self.folder / "program.py"
    self.program.write_text(_PROGRAM)
    self.environment = {
      **os.environ,
      "PYTHONPATH": str(_ROOT),
      "TF_CPP_MIN_LOG_LEVEL": "2",
    }

  def _last_step(self) -> int:
    state = self.folder / "model" / "checkpoint"
    steps = re.findall(r"ckpt-(\d+)", state.read_text()) if state.exists() else []
    return max(map(int, steps), default=0)

  def test_launch_trains_on_three_hosts_over_ssh(self):
    ssh_server.require()
    for host, address in enumerate(self.hosts.addresses):
      server = ssh_server.SshServer(
        self.folder / "ssh", address, port=2200, prefix=self.hosts.prefix(host)
      )
      self.addCleanup(server.stop)

    job = subprocess.run(
      [*self.hosts.prefix(0), sys.executable, "-m", "monolith.launch", "--num_ps=2"]
      + ["--num_workers=3", f"--hosts={','.join(self.hosts.addresses)}", f"--ssh={server.command}"]
      + [f"--log_dir={self.folder / 'logs'}", str(self.program), str(self.folder), "300"],
      env=self.environment,
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=_SECONDS,
    )

    logs = {path.stem: path.read_text() for path in (self.folder / "logs").iterdir()}
    self.assertEqual(job.returncode, 0, job.stderr + str(logs)[-5000:])
    self.assertEqual(sorted(logs), ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"])
    self.assertIn("ended", logs["chief-0"])
    self.assertGreaterEqual(self._last_step(), 300)


if __name__ == "__main__":
  unittest.main()
