"""The driver on real processes: parameter servers, chief and workers on loopback.

They run `native_training/cpu_training_distributed_test_binary.py`, with the HTTP server of
`debugging/debugging_server.py`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import uuid

import pytest
import tensorflow as tf
from werkzeug import serving

from monolith.native_training import cpu_training, utils
from monolith.native_training.debugging import debugging_client, debugging_server
from monolith.native_training.proto import debugging_info_pb2
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).absolute().parents[3]
_BINARY = "monolith/native_training/cpu_training_distributed_test_binary"
# Far more than needed: importing TensorFlow in eight processes on two busy cores takes a while.
_TIMEOUT_SECS = 600


class _Cluster:
  """Processes of the test binary, and their output."""

  def __init__(self, test_dir, test_case, use_native_multi_hash_table, **flags):
    self.uuid = uuid.uuid4().hex
    self.test_dir = test_dir
    self.flags = {"test_case": test_case, "test_dir": test_dir, "uuid": self.uuid, **flags}
    self.native = use_native_multi_hash_table
    self.processes = {}

  @property
  def model_dir(self):
    return os.path.join(self.test_dir, self.uuid, "model")

  def start(self, server_type, index):
    args = [_BINARY, f"--server_type={server_type}", f"--index={index}"]
    args += [f"--{name}={value}" for name, value in self.flags.items()]
    if self.native:
      args.append("--use_native_multi_hash_table")
    os.makedirs(self.test_dir, exist_ok=True)
    log = open(os.path.join(self.test_dir, f"{self.uuid}_{server_type}_{index}.log"), "wb")
    environment = {**os.environ, "CLOUDNATIVE_INET_ADDR": "127.0.0.1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    # The launcher asks for `python3`: it has to be the one of this environment.
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    process = subprocess.Popen(args, cwd=_ROOT, env=environment, stdout=log, stderr=log)
    self.processes[server_type, index] = process

  def start_all(self, num_ps, num_workers):
    self.start("worker", 0)
    for i in range(num_ps):
      self.start("ps", i)
    for i in range(1, num_workers):
      self.start("worker", i)

  def log(self, key):
    with open(os.path.join(self.test_dir, f"{self.uuid}_{key[0]}_{key[1]}.log")) as f:
      return f.read()

  def ps_addrs(self):
    """Returns where each parameter server listens, by index."""
    return {
      index: re.search(f"ps {index} listens on (\\S+)", self.log(("ps", index)))[1]
      for server_type, index in self.processes
      if server_type == "ps"
    }

  def used_ps_addrs(self):
    """Returns the servers that the chief trains on, none before it does."""
    return list(self.debugging_info().cluster.ps_addrs)

  def debugging_info(self):
    info = debugging_info_pb2.DebuggingInfo()
    path = utils.get_debugging_info_file_name(self.model_dir)
    if os.path.exists(path):
      with open(path, "rb") as f:
        info.ParseFromString(f.read())
    return info

  def wait(self):
    """Waits until all processes ended well."""
    wait_until(lambda: not self._running(), timeout_secs=_TIMEOUT_SECS)

  def _running(self):
    """Returns the processes that still run; one that failed is an error."""
    running = []
    for key, process in self.processes.items():
      code = process.poll()
      if code is None:
        running.append(key)
      elif code != 0:
        raise AssertionError(f"{key} returned {code}:\n{self.log(key)[-5000:]}")
    return running

  def kill(self):
    for process in self.processes.values():
      if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


class CpuTrainingDistributedTestBase:
  use_native_multi_hash_table = False

  @contextlib.contextmanager
  def _cluster(self, test_case, **flags):
    cluster = _Cluster(
      os.path.join(utils.get_test_tmp_dir(), self.id()),
      test_case,
      self.use_native_multi_hash_table,
      **flags,
    )
    try:
      yield cluster
    finally:
      cluster.kill()

  def test_basic(self):
    with self._cluster(0, num_ps=4, num_workers=3) as cluster:
      cluster.start_all(num_ps=4, num_workers=3)
      cluster.wait()

      state = tf.train.get_checkpoint_state(cluster.model_dir)
      self.assertIsNotNone(state)
      # The outcome of the flags and the specified settings of the binary.
      folder = os.path.dirname(cluster.model_dir)
      self.assertCountEqual(os.listdir(folder), ["model", "service_discovery"])
      step = os.path.basename(state.model_checkpoint_path).rpartition("-")[2]
      self.assertTrue(os.path.exists(os.path.join(cluster.model_dir, f"ckpt.info-{step}")))
      # The last save does not wait for workers that have finished.
      self.assertNotIn("do not wait", cluster.log(("worker", 0)))

  def test_extra_ps(self):
    with self._cluster(0, num_ps=2, num_extra_ps=2, num_workers=1) as cluster:
      cluster.start_all(num_ps=4, num_workers=1)
      cluster.wait()

      log = cluster.log(("worker", 0))
      throughputs = {
        addr: float(value) for addr, value in re.findall(r"Throughput of (\S+): ([\d.]+)", log)
      }
      self.assertCountEqual(throughputs, cluster.ps_addrs().values())
      used = [throughputs[addr] for addr in cluster.used_ps_addrs()]
      # Not the addresses: the log rounds, and two servers that it shows alike may be in any order.
      self.assertEqual(used, sorted(throughputs.values(), reverse=True)[:2])

  def test_redundant_ps(self):
    with self._cluster(0, num_ps=4, num_redundant_ps=2, num_workers=2) as cluster:
      cluster.start("worker", 0)
      for i in (1, 2, 4, 5):
        cluster.start("ps", i)
      wait_until(cluster.used_ps_addrs, timeout_secs=_TIMEOUT_SECS)
      for i in (0, 3):
        cluster.start("ps", i)
      cluster.start("worker", 1)
      cluster.wait()

      addrs = cluster.ps_addrs()
      self.assertLen(addrs, 6)
      self.assertEqual(cluster.used_ps_addrs(), [addrs[i] for i in (1, 2, 4, 5)])

  def test_retry_after_deadline_exceeded(self):
    with self._cluster(2, num_ps=1, num_workers=1) as cluster:
      cluster.start_all(num_ps=1, num_workers=1)
      cluster.wait()

      self.assertIn("Training was interrupted.", cluster.log(("worker", 0)))
      self.assertIsNotNone(tf.train.latest_checkpoint(cluster.model_dir))


class CpuTrainingDistributedTest(CpuTrainingDistributedTestBase, tf.test.TestCase):
  use_native_multi_hash_table = False

  def test_debugging_server(self):
    with self._cluster(1, num_ps=2, num_workers=1) as cluster:
      cluster.start_all(num_ps=2, num_workers=1)
      wait_until(lambda: self._has_trained(cluster), timeout_secs=_TIMEOUT_SECS)

      info = cluster.debugging_info()
      self.assertEqual(info.num_workers, 1)
      self.assertLen(info.cluster.ps_addrs, 2)
      self.assertEqual([c.feature_name for c in info.feature_name_configs], ["feature"])

      worker = debugging_server.DebuggingWorker(cluster.model_dir)
      self.assertEqual(worker.fetch_variables(["global_step:0", "none:0"]), {"global_step:0": "1"})
      features = worker.fetch_features(["feature", "test"], ["0", "1", "2"])
      self.assertEqual(list(features), ["feature"])
      self.assertEqual(sorted(features["feature"]), ["0", "1"])
      self.assertEqual(features["feature"]["0"].count("num:"), 5)
      row = features["feature"]["1"]
      self.assertEqual(worker.fetch_features(["feature"], ["01"]), {"feature": {"01": row}})
      self.assertEqual(worker.fetch_features(["feature"], [1]), {"feature": {"1": row}})
      self.assertEqual(worker.fetch_features(["feature"], ["2"]), {"feature": {}})

      with self._serving(debugging_server.create_app(cluster.model_dir)) as port:
        self.assertEqual(
          debugging_client.fetch_variables("127.0.0.1", port, ["global_step:0", "none:0"]),
          {"global_step:0": "1"},
        )
        self.assertEqual(
          debugging_client.fetch_features("127.0.0.1", port, ["feature", "test"], [0, 1, 2]),
          features,
        )
        with self.assertRaisesRegex(debugging_client.DebuggingError, "ValueError.*'not a number'"):
          debugging_client.fetch_features("127.0.0.1", port, ["feature"], ["not a number"])

  @contextlib.contextmanager
  def _serving(self, app):
    server = serving.make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
      yield server.server_port
    finally:
      server.shutdown()
      thread.join()
      server.server_close()

  def _has_trained(self, cluster):
    cluster._running()
    return tf.train.latest_checkpoint(cluster.model_dir) is not None


class CpuTrainingDistributedNativeTest(CpuTrainingDistributedTestBase, tf.test.TestCase):
  use_native_multi_hash_table = True


class BinaryTest(tf.test.TestCase):
  """The flags of the test binary, in a process each."""

  def _run(self, *args):
    return subprocess.run(
      [sys.executable, _BINARY, *args], cwd=_ROOT, text=True, capture_output=True, check=False
    )

  def test_case_is_a_number(self):
    for test_case in ("3", "-1", "test0"):
      result = self._run(f"--test_case={test_case}")
      self.assertNotEqual(result.returncode, 0)
      self.assertIn("flag --test_case=", result.stderr + result.stdout)

  def test_name_of_the_task(self):
    code = (
      "import sys\n"
      "from monolith.native_training import cpu_training\n"
      "from monolith.native_training import cpu_training_distributed_test_binary as binary\n"
      "binary.FLAGS(['x', '--test_case=2', '--test_dir=d', '--uuid=u'])\n"
      "def train(config, discovery, params):\n"
      "  print(params.name, len(params.training_hooks), config.model_dir)\n"
      "cpu_training.distributed_train = train\n"
      "binary.main([])\n"
    )
    result = subprocess.run(
      [sys.executable, "-c", code], cwd=_ROOT, text=True, capture_output=True, check=True
    )
    self.assertEqual(result.stdout.split(), ["test_task", "1", "d/u/model"])


class DistributedConfigTest(tf.test.TestCase):
  """Configurations that are refused before any server starts."""

  def test_bad_configurations(self):
    good = {"model_dir": "/nowhere", "num_ps": 1, "num_workers": 1, "index": 0}
    for change, message in (
      ({"index": None}, "Index can't be none."),
      ({"num_ps": None}, "Num ps can't be none."),
      ({"num_workers": None}, "Num workers can't be none."),
      ({"server_type": "boss"}, "Unknown server type. type: boss"),
      ({"model_dir": ""}, "model dir can't be empty."),
    ):
      config = cpu_training.DistributedCpuTrainingConfig(**{**good, **change})
      with self.assertRaisesRegex(ValueError, message):
        cpu_training.distributed_train(config, None, None)

  def test_unreachable_node(self):
    error = cpu_training.NodeAliveCheckerError("a,b is unreachable")

    self.assertEqual(str(error), "a,b is unreachable")


if __name__ == "__main__":
  tf.test.main()
