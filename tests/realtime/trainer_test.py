"""The trainer on a real broker, its processes killed; covers `trainer.py` and `stream_model.py`.

`MONOLITH_SOAK=1` takes two servers, and kills one of them, too.
"""

import contextlib
import io
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.request
import uuid

import numpy as np
import pytest
import tensorflow as tf

from examples.realtime import broker
from monolith.native_training.data import stream_positions
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.realtime import trainer
from monolith.row_log import kafka_client
from tests import counting_task, stalled_counting_task
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_ROOT = pathlib.Path(__file__).absolute().parent.parent.parent
_TIMEOUT_SECS = 400
_IS_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
_NUM_PS = 2 if _IS_SOAK else 1
_NUM = 1000
_BATCH_SIZE = 4


class _Process:
  """A trainer in a process of its own, whose standard error goes to a file."""

  def __init__(self, folder, name, arguments):
    self._log = os.path.join(folder, f"{name}.log")
    with open(self._log, "wb") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "monolith.realtime.trainer", *arguments],
        stderr=log,
        stdout=log,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "1"},
        # Shells start background jobs with SIGINT ignored, and a program inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
      )

  def log(self):
    with open(self._log, encoding="utf-8", errors="replace") as f:
      return f.read()

  def is_running(self):
    return self._process.poll() is None

  def kill(self):
    self._process.kill()
    self._process.wait()

  def interrupt(self):
    self._process.send_signal(signal.SIGINT)
    return self._process.wait(_TIMEOUT_SECS)

  def metric(self, name):
    """Returns the value of a metric, 0 as long as there is none."""
    if not self.is_running():
      raise AssertionError(f"the trainer has ended:\n{self.log()[-5000:]}")
    port = re.search(r"http://127.0.0.1:(\d+)/metrics", self.log())
    if port is None:
      return 0.0
    with urllib.request.urlopen(port.group(0), timeout=60) as answer:
      text = answer.read().decode()
    value = re.search(rf"^monolith_trainer_{name}\S* (\S+)$", text, re.MULTILINE)
    return float(value.group(1)) if value else 0.0


class TrainerTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
    try:
      cls.broker = broker.make_broker(folder)
      cls.broker.start()
    except broker.BrokerError as error:
      raise unittest.SkipTest(str(error)) from error
    cls.addClassCleanup(cls.broker.stop)
    cls.producer = kafka_client.make_producer(cls.broker.servers)

  def setUp(self):
    super().setUp()
    # Also the name of the group: one that stands somewhere is where a new run begins.
    self.topic = uuid.uuid4().hex
    self.broker.create_topics({self.topic: 2})

  def send(self, messages):
    for i, message in enumerate(messages):
      self.producer.produce(self.topic, message, partition=i % 2)
    self.assertEqual(self.producer.flush(60), 0)

  def start(self, name, **options):
    options = {
      "task": "tests.counting_task:CountingTask",
      "kafka_servers": self.broker.servers,
      "topic": self.topic,
      "group": self.topic,
      "model_dir": self.model_dir,
      "num_ps": _NUM_PS,
      "discovery": os.path.join(self.folder, "discovery"),
      "batch_size": _BATCH_SIZE,
      "save_secs": 3,
      "keep_checkpoints": 1000,
      **options,
    }
    flags = [f"--{key}={value}" for key, value in options.items()]
    process = _Process(self.folder, name, [*flags, "--no_export"])
    self.addCleanup(process.kill)
    return process

  def start_worker(self, name):
    return self.start(name, role="worker", metrics_port=0)

  def counts(self, ids):
    params = counting_task.CountingTask.params()
    params.name = "CountingTask"
    stream = params.stream
    stream.servers, stream.topics, stream.group = self.broker.servers, [self.topic], "any"
    return counting_task.read_counts(params, CpuTrainingConfig(), self.model_dir, list(ids))

  def saved_position(self):
    """Returns up to where all servers have applied messages, as the newest checkpoint knows."""
    newest = tf.train.latest_checkpoint(self.model_dir)
    if newest is None:
      return 0
    try:
      reader = tf.train.load_checkpoint(newest)
      names = re.compile(rf"stream_positions/{self.topic}(/server_\d+)?")
      found = [
        reader.get_tensor(n) for n in reader.get_variable_to_shape_map() if names.fullmatch(n)
      ]
      return int(np.min(found, axis=0)[:2].sum())
    except (tf.errors.OpError, ValueError):  # a newer one replaces it
      return 0

  def assert_trained_once(self, counts):
    self.assertAllEqual(counts, np.ones(len(counts)))

  def read_on(self, server, name, shape):
    """Returns a variable of a server, asked in its process; zeros before there is one."""
    nothing = np.zeros(shape, np.int64)
    address = os.path.join(self.folder, "discovery", "ps", str(server))
    if not os.path.exists(address):
      return nothing
    with open(address, encoding="utf-8") as f:
      target = f"grpc://{f.read()}"
    with tf.Graph().as_default(), tf.compat.v1.Session(target) as session:
      variable = tf.compat.v1.get_variable(name, initializer=nothing, trainable=False)
      options = tf.compat.v1.RunOptions(timeout_in_ms=60_000)  # the server may have ended
      try:
        return session.run(variable.read_value(), options=options)
      except tf.errors.FailedPreconditionError:  # no worker has made it yet
        return nothing

  def positions_on(self, server):
    """Returns the sum of the positions of a server."""
    name = f"stream_positions/{self.topic}" + (f"/server_{server}" if server else "")
    return int(np.maximum(self.read_on(server, name, [stream_positions.MAX_PARTITIONS]), 0).sum())

  def test_killed_processes_lose_nothing(self):
    self.folder = self.get_temp_dir()
    self.model_dir = os.path.join(self.folder, "model")
    servers = [self.start(f"ps_{i}", role="ps", index=i) for i in range(_NUM_PS)]
    samples = [counting_task.make_sample(i) for i in range(_NUM)]
    self.send(samples[: _NUM // 2])
    num_messages = _NUM + 2

    # A worker that is killed, while servers live, has trained nothing twice and nothing in vain.
    worker = self.start_worker("worker_1")
    wait_until(lambda: worker.metric("samples") > 20, _TIMEOUT_SECS)
    worker.kill()
    # However fast the first one was, this is left.
    self.send([*samples[_NUM // 2 :], b"\xff poison", samples[7]])
    worker = self.start_worker("worker_2")
    wait_until(lambda: worker.metric("samples") > 0, _TIMEOUT_SECS)
    # The stream is silent, and yet all of it is saved.
    wait_until(lambda: self.saved_position() == num_messages, _TIMEOUT_SECS)
    self.assert_trained_once(self.counts(range(_NUM)))
    self.assertEqual(worker.metric("bad_messages"), 1)
    self.assertEqual(worker.metric("repeated_samples"), 1)
    self.assertRegex(
      worker.log(), rf"Skipped a message.*topic {self.topic}, partition 0, offset {_NUM // 2}"
    )

    if not _IS_SOAK:
      self.assertEqual(worker.interrupt(), trainer.INTERRUPTED, worker.log()[-5000:])
      return

    # A server that is killed gets back what it has learnt since the checkpoint.
    self.send([counting_task.make_sample(i) for i in range(_NUM, 2 * _NUM)])
    num_messages += _NUM
    wait_until(lambda: worker.metric("samples") > _NUM + 20, _TIMEOUT_SECS)
    servers[1].kill()
    self.start("ps_1_again", role="ps", index=1)
    wait_until(lambda: self.saved_position() == num_messages, _TIMEOUT_SECS)
    self.assertEqual(worker.interrupt(), trainer.INTERRUPTED, worker.log()[-5000:])
    # The server that was killed has lost what it had learnt of them, and gets it again; the other
    # one leaves out what it has.
    self.assert_trained_once(self.counts(range(2 * _NUM)))

  def test_a_kill_between_the_writes_of_two_servers_trains_nothing_twice(self):
    self.folder = self.get_temp_dir()
    self.model_dir = os.path.join(self.folder, "model")
    for i in range(2):
      self.start(f"ps_{i}", role="ps", index=i, num_ps=2)
    self.send([counting_task.make_sample(i) for i in range(_NUM)])
    before = (stalled_counting_task.STALLED_BATCH - 1) * _BATCH_SIZE

    worker = self.start(
      "worker_1",
      role="worker",
      num_ps=2,
      task="tests.stalled_counting_task:StalledTask",
      model_name="CountingTask",
      save_secs=1000,
    )

    def is_stalled():
      self.assertTrue(worker.is_running(), worker.log()[-5000:])
      batches = self.read_on(1, stalled_counting_task.BATCHES, [])
      return batches == stalled_counting_task.STALLED_BATCH

    wait_until(lambda: is_stalled() and self.positions_on(0) > self.positions_on(1), _TIMEOUT_SECS)
    worker.kill()
    ahead, behind = self.positions_on(0), self.positions_on(1)
    worker = self.start("worker_2", role="worker", num_ps=2, metrics_port=0)
    wait_until(lambda: self.saved_position() == _NUM, _TIMEOUT_SECS)

    self.assertEqual((ahead, behind), (before + _BATCH_SIZE, before))
    self.assert_trained_once(self.counts(range(_NUM)))
    self.assertEqual(worker.interrupt(), trainer.INTERRUPTED, worker.log()[-5000:])

  def test_a_signal_stops_it_although_nobody_reads_what_it_says(self):
    reader, writer = os.pipe()
    os.close(reader)
    for signo in (signal.SIGINT, signal.SIGTERM):
      with (
        open(os.dup(writer), "w", encoding="utf-8", buffering=1) as broken,
        trainer._stop_on_signals() as stopper,
      ):
        try:
          with contextlib.redirect_stderr(broken):
            signal.raise_signal(signo)
        finally:
          with contextlib.suppress(OSError):
            broken.close()
      self.assertTrue(stopper.is_requested)
    os.close(writer)

  def test_a_port_of_metrics_that_is_taken_is_named(self):
    with socket.create_server(("127.0.0.1", 0)) as taken:
      port = taken.getsockname()[1]
      with self.assertRaisesRegex(OSError, f"port {port} of the metrics: Address already in use"):
        trainer.MetricsHook(port, "m")

  def test_command_lines_that_make_no_sense_are_refused(self):
    for arguments, text in (
      (["--role=worker", "--num_ps=1"], "discovery"),
      (["--role=worker", "--discovery=d"], "needs --num_ps"),
      (["--num_workers=0"], "at least 1"),
      (["--role=ps", "--discovery=d", "--num_ps=2", "--index=2"], "less than --num_ps=2"),
      (
        ["--role=worker", "--discovery=d", "--num_ps=1", "--index=1"],
        "less than --num_workers=1",
      ),
      (["--no_such_flag=1"], "no_such_flag"),
    ):
      said = io.StringIO()
      with self.assertRaises(SystemExit), contextlib.redirect_stderr(said):
        trainer.parse_arguments(["--kafka_servers=a:1", "--model_dir=m", "--task=a:B", *arguments])
      self.assertIn(text, said.getvalue())
    with self.assertRaisesRegex(ValueError, "no_such_module"):
      trainer.load_task("no_such_module:Task")
    with self.assertRaisesRegex(ValueError, "module:Class"):
      trainer.load_task("monolith.realtime.trainer")


if __name__ == "__main__":
  tf.test.main()
