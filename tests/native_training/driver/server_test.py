"""Tests what ends parameter servers, and what may not end their pushes to serving."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from unittest import mock

import kazoo.exceptions
import pytest
import tensorflow as tf

from monolith.native_training.driver import server as training_server
from monolith.native_training.metric import cli
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from tests import free_ports, ps_processes

pytestmark = pytest.mark.thorough

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


# A server that says when its main thread waits. With an argument, one of its other threads gets the
# signal then, which does not wake the one that waits.
_SERVER = """
import signal
import sys
import threading
import time
import traceback
import tensorflow as tf
from monolith.native_training.driver import server as training_server
tf.compat.v1.disable_eager_execution()
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may start it without.
server = tf.distribute.Server.create_local_server()
main = threading.get_ident()

def watch():
  names, place, last_place = [], None, None
  # It stands still there; the wait for a thread to start is short, and not meant.
  while "_wait_until_told" not in names or "start" in names or place != last_place:
    time.sleep(0.01)
    frame = sys._current_frames()[main]
    names = [summary.name for summary in traceback.extract_stack(frame)]
    place, last_place = (names, frame.f_lasti), place
  print("waits", flush=True)
  if sys.argv[1:]:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=watch, daemon=True).start()
try:
  training_server._join_ps(server.target, 0)
except KeyboardInterrupt:
  sys.exit(2)
"""


class SignalTest(tf.test.TestCase):
  def _start(self, *args: str) -> subprocess.Popen:
    process = subprocess.Popen(
      [sys.executable, "-c", _SERVER, *args],
      stdout=subprocess.PIPE,
      env=ps_processes.environment(),
      text=True,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline(), "waits\n")
    return process

  def test_ctrl_c_ends_a_server_that_waits_for_its_chief(self):
    process = self._start()

    process.send_signal(signal.SIGINT)

    self.assertEqual(process.wait(timeout=120), 2)

  def test_ctrl_c_that_another_thread_gets_ends_it_too(self):
    process = self._start("another thread")

    self.assertEqual(process.wait(timeout=120), 2)


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


class _Backend:
  """Answers, and raises what is an exception."""

  def __init__(self, *answers):
    self._answers = list(answers)

  def get_sync_targets(self, sub_graph):
    answer = self._answers.pop(0) if self._answers else ["last:1"]
    if isinstance(answer, Exception):
      raise answer
    return sub_graph, answer


class PushTest(tf.test.TestCase):
  def test_no_error_ends_the_pushes(self):
    backend = _Backend(
      kazoo.exceptions.SessionExpiredError("before the first answer"),
      ["first:1"],
      kazoo.exceptions.SessionExpiredError("expired"),
      ValueError("nonsense in a node"),
      ["fails:1"],
    )
    pushed, counted, done = [], [], threading.Event()

    def push(config):
      (target,) = parameter_sync_pb2.ClientConfig.FromString(config).targets
      pushed.append(target)
      if target == "fails:1":
        raise RuntimeError("an error of the push")
      if target == "last:1":
        done.set()
      return b""

    self.addCleanup(cli.set_sink, None)
    cli.set_sink(lambda method, name, value, tags: counted.append(name))
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      config = tf.compat.v1.placeholder(tf.string, [])
      queue = tf.queue.FIFOQueue(1, tf.int32, shapes=[()])
      dequeue, enqueue = queue.dequeue(), queue.enqueue(1)
      ender = threading.Thread(target=lambda: (done.wait(120), sess.run(enqueue)))
      ender.start()
      with mock.patch.object(training_server, "_SYNC_INTERVAL_SECS", 0.01):
        sync = (config, tf.numpy_function(push, [config], tf.string))
        training_server._join_ps_while_syncing(sess, dequeue, sync, backend, 0)
      ender.join()

    # Targets of before are used when the backend cannot answer.
    self.assertEqual(pushed[:5], ["first:1", "first:1", "first:1", "fails:1", "last:1"])
    self.assertEqual(sum("parameter_sync_failures" in name for name in counted), 4)


if __name__ == "__main__":
  tf.test.main()
