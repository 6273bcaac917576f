"""A training run that `python -m monolith.launch` starts, and that loses a server and a worker.

Tests `launch/supervisor.py` with what it is for.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest

import pytest

from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 300
_PROGRAM = """
import os, pathlib, sys
import monolith
from monolith import data
import tensorflow as tf

folder = pathlib.Path(sys.argv[1])
role = sys.argv[2]
(folder / f"{role}.pid").write_text(str(os.getpid()))
ids = tf.keras.Input([], dtype=tf.int64, name="ids")
rows = monolith.keras.layers.Embedding(4, "adagrad", learning_rate=0.5, name="items")(ids)
model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(rows))
model.compile(tf.keras.optimizers.Adam(0.05), "binary_crossentropy")

def read(index, count):
  pairs = tf.data.Dataset.range(100).map(lambda i: ({"ids": i}, tf.cast(i % 2 == 0, tf.float32)))
  return pairs.batch(10).repeat()

end = 2000
monolith.keras.train(model, read, str(folder / "model"), max_steps=end, save_checkpoints_steps=50)
"""


class TrainingTest(unittest.TestCase):
  def test_a_run_goes_on_after_a_server_and_a_worker_have_died(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    job = subprocess.Popen(
      [sys.executable, "-m", "monolith.launch", "--num_ps=1", "--num_workers=2"]
      + [f"--log_dir={folder / 'logs'}", str(program), str(folder), "{server_type}-{index}"],
      env={**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.addCleanup(job.kill)
    saved = folder / "model" / "checkpoint"
    wait_until(lambda: saved.exists() or job.poll() is not None, _SECONDS)
    wait_until(lambda: (folder / "worker-1.pid").exists() or job.poll() is not None, _SECONDS)

    for role in ("worker-1", "ps-0"):
      os.kill(int((folder / f"{role}.pid").read_text()), signal.SIGKILL)
    output, _ = job.communicate(timeout=_SECONDS)

    logs = "\n".join(path.read_text() for path in (folder / "logs").iterdir())
    self.assertEqual(job.returncode, 0, output + logs[-5000:])
    for name in ("worker-0", "ps-0"):
      self.assertIn(f"[launch] {name} ended with status 137", output)
      self.assertIn(f"[launch] {name} starts again", output)
    last = max(int(step) for step in re.findall(r"ckpt-(\d+)", saved.read_text()))
    self.assertGreaterEqual(last, 2000)


if __name__ == "__main__":
  unittest.main()
