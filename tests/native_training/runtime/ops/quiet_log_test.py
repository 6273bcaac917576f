"""TensorFlow's lines about calls of a cancelled step stay off the screen, and no others."""

import os
import subprocess
import sys
import unittest

import pytest

pytestmark = pytest.mark.thorough

_CANCELLED = """
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

# TensorFlow logs this as an error, and the unknown flag as a fatal one, which ends the process.
_ERRORS = """
import os
import tensorflow as tf
from monolith.native_training.runtime.ops import gen_monolith_ops

assert hasattr(gen_monolith_ops, "monolith_hash_table")
try:
  tf.distribute.Server({"worker": ["localhost:none"]}, "worker", 0)
except tf.errors.InvalidArgumentError:
  print("refused", flush=True)
os.environ["TF_XLA_FLAGS"] = "--no_such_flag"
tf.function(lambda x: x + 1, jit_compile=True)(1)
"""


def _run(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
  inherited = {k: v for k, v in os.environ.items() if k not in ("MONOLITH_VERBOSE",)}
  return subprocess.run(
    [sys.executable, "-c", program],
    env={**inherited, "TF_CPP_MIN_LOG_LEVEL": "1", **environment},
    capture_output=True,
    text=True,
    timeout=300,
  )


class QuietLogTest(unittest.TestCase):
  def test_calls_of_a_cancelled_step_are_not_told(self):
    done = _run(_CANCELLED)

    self.assertEqual(done.stdout, "cancelled\n", done.stderr)
    self.assertNotIn("RecvTensor cancelled", done.stderr)
    self.assertNotIn("Local rendezvous is aborting", done.stderr)

  def test_they_are_where_the_user_wants_everything(self):
    for environment in ({"MONOLITH_VERBOSE": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}):
      with self.subTest(environment):
        done = _run(_CANCELLED, **environment)

        self.assertIn("cancelled\n", done.stdout)
        self.assertIn("RecvTensor cancelled", done.stderr)

  def test_errors_are_told_once(self):
    done = _run(_ERRORS)

    self.assertEqual(done.stdout, "refused\n", done.stderr)
    self.assertNotEqual(done.returncode, 0)
    for error in ("Could not parse port", "TF_XLA_FLAGS"):
      lines = [line for line in done.stderr.splitlines() if error in line]
      self.assertEqual(len(lines), 1, done.stderr)

  def test_the_level_of_the_user_holds(self):
    done = _run(_ERRORS, TF_CPP_MIN_LOG_LEVEL="3")

    self.assertNotIn("Could not parse port", done.stderr)
    self.assertIn("TF_XLA_FLAGS", done.stderr)


if __name__ == "__main__":
  unittest.main()
