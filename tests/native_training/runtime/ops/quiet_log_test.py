"""TensorFlow's line about a call of a cancelled step stays off the screen."""

import os
import pathlib
import subprocess
import sys
import unittest

import tensorflow as tf

_HEADERS = ("tsl/platform/default/logging.h", "xla/tsl/platform/default/logging.h")
_PROGRAM = """
import json, sys
import tensorflow as tf
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.free_ports import get_free_port

assert hasattr(gen_monolith_ops, "monolith_hash_table")
tf.compat.v1.disable_eager_execution()
cluster = {"worker": [f"localhost:{get_free_port()}" for _ in range(2)]}
servers = [tf.distribute.Server(cluster, "worker", i) for i in range(2)]
with tf.device("/job:worker/task:1"):
  nothing = tf.queue.FIFOQueue(1, [tf.float32], [[]], name="nothing").dequeue()
with tf.device("/job:worker/task:0"):
  waits = tf.identity(nothing)
with tf.compat.v1.Session(servers[0].target) as session:
  try:
    session.run(waits, options=tf.compat.v1.RunOptions(timeout_in_ms=2000))
  except tf.errors.DeadlineExceededError:
    print("cancelled")
"""


def _run(**environment: str) -> "subprocess.CompletedProcess[str]":
  inherited = {k: v for k, v in os.environ.items() if k not in ("MONOLITH_VERBOSE",)}
  return subprocess.run(
    [sys.executable, "-c", _PROGRAM],
    env={**inherited, "TF_CPP_MIN_LOG_LEVEL": "1", **environment},
    capture_output=True,
    text=True,
    timeout=300,
  )


@unittest.skipUnless(
  any(pathlib.Path(tf.sysconfig.get_include(), name).exists() for name in _HEADERS),
  "this TensorFlow logs through Abseil, which cannot leave lines out",
)
class QuietLogTest(unittest.TestCase):
  def test_calls_of_a_cancelled_step_are_not_told(self):
    done = _run()

    self.assertEqual(done.stdout, "cancelled\n", done.stderr)
    self.assertNotIn("RecvTensor cancelled", done.stderr)

  def test_they_are_where_the_user_wants_everything(self):
    done = _run(MONOLITH_VERBOSE="1")

    self.assertIn("cancelled\n", done.stdout)
    self.assertIn("RecvTensor cancelled", done.stderr)


if __name__ == "__main__":
  unittest.main()
