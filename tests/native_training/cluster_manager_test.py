import json
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import tensorflow as tf

from monolith.native_training import cluster_manager
from monolith.native_training.service_discovery import ServiceDiscovery
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()

_PS_PROCESS = """
import json, os, sys
import tensorflow as tf
folder, index = sys.argv[1:]
server = tf.distribute.Server({"local": ["127.0.0.1:0"]})
addr = server.target[len("grpc://"):]
path = os.path.join(folder, index)
with open(path + "-tmp", "w") as f:
  json.dump(addr, f)
os.rename(path + "-tmp", path)
sys.stdin.read()
os._exit(0)
"""

# Writes one list after the other until its standard input ends.
_WRITER_PROCESS = """
import sys
import threading
from monolith.native_training import cluster_manager
file_name, *lists = sys.argv[1:]
print("writing", flush=True)
stopped = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stopped.set())).start()
while not stopped.is_set():
  for addrs in lists:
    cluster_manager._save_ps_cluster_to_file(file_name, addrs.split(","))
"""


class FileServiceDiscovery(ServiceDiscovery):
  """Each task is a file `<folder>/<role>/<index>` that holds its address."""

  def __init__(self, folder):
    self._folder = folder

  def folder(self, name):
    path = os.path.join(self._folder, name)
    os.makedirs(path, exist_ok=True)
    return path

  def register(self, name, index, addr):
    with open(os.path.join(self.folder(name), str(index)), "w") as f:
      json.dump(addr, f)

  def deregister(self, name, index, addr):
    os.remove(os.path.join(self.folder(name), str(index)))

  def query(self, name):
    folder = self.folder(name)
    addrs = {}
    for index in filter(str.isdigit, os.listdir(folder)):
      with open(os.path.join(folder, index)) as f:
        addrs[int(index)] = json.load(f)
    return addrs


class ClusterManagerTest(unittest.TestCase):
  def setUp(self):
    self._folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    self._file = os.path.join(self._folder, "ps_cluster_dir", "ps_info")
    self._discovery = FileServiceDiscovery(os.path.join(self._folder, "discovery"))

  def _get_cluster(self, index, num_redundant_ps=0, num_required_ps=2, num_workers=3, **kwargs):
    return cluster_manager.get_training_cluster(
      self._discovery, f"me{index}:1", index, num_redundant_ps, num_required_ps, num_workers,
      self._folder, **kwargs,
    )  # fmt: skip

  def testBasic(self):
    file_name = os.path.join(os.environ["TEST_TMPDIR"], "test_folder", "ps_info")
    ps_addrs = ["192.168.0.1:1001", "192.168.0.2:1002"]

    cluster_manager._save_ps_cluster_to_file(file_name, ps_addrs)

    self.assertEqual(cluster_manager._fetch_ps_cluster_from_file(file_name), ps_addrs)
    self.assertEqual(os.listdir(os.path.dirname(file_name)), ["ps_info"])

  def test_file_name(self):
    self.assertEqual(cluster_manager._get_ps_cluster_file_name("d", "u"), "d/ps_cluster_dir/u")
    self.assertEqual(cluster_manager._get_ps_cluster_file_name("d", ""), "d/ps_cluster_dir/ps_info")

  def test_chief(self):
    for i in (2, 0, 1):
      self._discovery.register("ps", i, f"ps{i}:1")

    cluster, task = self._get_cluster(0)

    self.assertEqual(
      cluster,
      {"chief": ["me0:1"], "worker": ["0.0.0.0:1", "0.0.0.0:2"], "ps": ["ps0:1", "ps1:1"]},
    )
    self.assertEqual(task, {"type": "chief", "index": 0})
    self.assertFalse(os.path.exists(self._file))

  def test_worker(self):
    for name, index in (("ps", 0), ("ps", 1), ("worker", 0)):
      self._discovery.register(name, index, f"{name}{index}:1")

    cluster, task = self._get_cluster(2)

    self.assertEqual(
      cluster,
      {"chief": ["worker0:1"], "worker": ["0.0.0.0:1", "me2:1"], "ps": ["ps0:1", "ps1:1"]},
    )
    self.assertEqual(task, {"type": "worker", "index": 1})

  def test_redundant_ps_are_agreed_on_through_the_file(self):
    for name, index in (("ps", 1), ("ps", 2), ("worker", 0)):
      self._discovery.register(name, index, f"{name}{index}:1")

    chief_cluster, _ = self._get_cluster(0, num_redundant_ps=1)
    self._discovery.register("ps", 0, "late:1")
    worker_cluster, _ = self._get_cluster(1, num_redundant_ps=1)
    retried_cluster, _ = self._get_cluster(0, num_redundant_ps=1)

    self.assertEqual(chief_cluster["ps"], ["ps1:1", "ps2:1"])
    self.assertEqual(worker_cluster["ps"], ["ps1:1", "ps2:1"])
    self.assertEqual(retried_cluster, chief_cluster)

  def test_file_of_a_smaller_job_is_replaced(self):
    for i in range(2):
      self._discovery.register("ps", i, f"ps{i}:1")
    cluster_manager._save_ps_cluster_to_file(self._file, ["old:1"])

    cluster, _ = self._get_cluster(0, num_redundant_ps=1)

    self.assertEqual(cluster["ps"], ["ps0:1", "ps1:1"])
    self.assertEqual(cluster_manager._fetch_ps_cluster_from_file(self._file), cluster["ps"])

  def test_waits_until_all_are_there(self):
    arrivals = [("ps", 1), ("worker", 0), ("ps", 0)]

    def one_more():
      name, index = arrivals.pop(0)
      self._discovery.register(name, index, f"{name}{index}:1")

    with mock.patch.object(cluster_manager, "_cluster_query_failure_handler", one_more):
      cluster, _ = self._get_cluster(1)

    self.assertEqual(cluster["ps"], ["ps0:1", "ps1:1"])
    self.assertEqual(cluster["chief"], ["worker0:1"])

  def test_no_file_in_time(self):
    self._discovery.register("worker", 0, "c:1")
    with mock.patch.object(cluster_manager, "_fetch_ps_cluster_from_file", return_value=[]):
      with self.assertRaisesRegex(AssertionError, "got 0 parameter servers .*, want 2"):
        self._get_cluster(1, num_redundant_ps=1)

  def test_fetch_reads_once_with_timeout_0(self):
    with mock.patch.object(cluster_manager, "_cluster_query_failure_handler") as wait:
      self.assertEqual(cluster_manager._fetch_ps_cluster_from_file(self._file, timeout=0), [])
    wait.assert_not_called()

  def test_half_written_file_is_not_used(self):
    full = ["10.0.0.1:1001", "10.0.0.2:1002"]
    os.makedirs(os.path.dirname(self._file))
    for part in ("", "10.0.0.1:1001,", "10.0.0.1:1001,10.0", "10.0.0.1:1001,10.0.0.2:"):
      with open(self._file, "w") as f:
        f.write(part)

      self.assertEqual(cluster_manager._fetch_ps_cluster_from_file(self._file, timeout=0), [])

      def complete():
        cluster_manager._save_ps_cluster_to_file(self._file, full)

      with mock.patch.object(cluster_manager, "_cluster_query_failure_handler", complete):
        self.assertEqual(cluster_manager._fetch_ps_cluster_from_file(self._file), full)

  def test_list_with_too_few_addresses_is_not_complete(self):
    cluster_manager._save_ps_cluster_to_file(self._file, ["a:1"])

    fetch = cluster_manager._fetch_ps_cluster_from_file
    self.assertEqual(fetch(self._file, timeout=0, num_addrs=2), [])
    self.assertEqual(fetch(self._file, timeout=0, num_addrs=1), ["a:1"])

  def test_reader_never_sees_a_part(self):
    lists = [",".join(f"10.{n}.{i // 256}.{i % 256}:{10000 + i}" for i in range(size))
             for n, size in enumerate((3, 800))]  # fmt: skip
    cluster_manager._save_ps_cluster_to_file(self._file, lists[0].split(","))
    writer = subprocess.Popen(
      [sys.executable, "-c", _WRITER_PROCESS, self._file, *lists],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    self.addCleanup(writer.stdin.close)
    self.addCleanup(writer.stdout.close)
    self.addCleanup(writer.wait)
    self.addCleanup(writer.kill)
    self.assertEqual(writer.stdout.readline(), b"writing\n")

    seen = []

    def has_read_enough():
      with open(self._file) as f:
        seen.append(f.read())
      addrs = cluster_manager._fetch_ps_cluster_from_file(self._file, timeout=0)
      self.assertIn(len(addrs), (3, 800))
      self.assertIsNone(writer.poll())
      return len(seen) >= 400 and set(seen) >= set(lists)

    wait_until(has_read_enough, poll_secs=0)
    writer.stdin.close()

    self.assertEqual(writer.wait(), 0)
    self.assertEqual(set(seen), set(lists))

  def test_index_out_of_range(self):
    with self.assertRaisesRegex(ValueError, "index is 3, want one of 3 workers"):
      self._get_cluster(3)

  def test_metrics(self):
    self._discovery.register("ps", 0, "ps0:1")

    def last_one():
      self._discovery.register("ps", 1, "ps1:1")

    with mock.patch.object(cluster_manager, "_MCLI") as mcli:
      self._get_cluster(0, num_required_ps=1)
      mcli.emit_store.assert_not_called()
      with mock.patch.object(cluster_manager, "_cluster_query_failure_handler", last_one):
        self._get_cluster(0, model_name="m", cluster_type="tide")
    tagkv = {"deep_insight_name": "m", "cluster_type": "tide"}
    self.assertEqual(
      mcli.emit_store.mock_calls,
      [
        mock.call("num_left_ps", 1, tagkv),
        mock.call("job_waiting", 1, tagkv),
        mock.call("num_left_ps", 0, tagkv),
        mock.call("job_waiting", 0, tagkv),
      ],
    )

  def test_session_config_of_one_process(self):
    self.assertEqual(
      cluster_manager.generate_session_config(),
      tf.compat.v1.ConfigProto(allow_soft_placement=True),
    )

  def test_session_config(self):
    cluster = {"chief": ["c:1"], "worker": ["0.0.0.0:1", "w:1"], "ps": ["p:1"]}

    chief = cluster_manager.generate_session_config((cluster, {"type": "chief", "index": 0}))
    worker = cluster_manager.generate_session_config((cluster, {"type": "worker", "index": 1}))

    self.assertEqual(list(chief.device_filters), ["/job:ps", "/job:chief"])
    self.assertEqual(list(worker.device_filters), ["/job:ps", "/job:chief", "/job:worker/task:1"])
    for config in (chief, worker):
      self.assertEqual(tf.train.ClusterSpec(config.cluster_def).as_dict(), cluster)
      self.assertTrue(config.share_cluster_devices_in_session)
      self.assertTrue(config.experimental.share_session_state_in_clusterspec_propagation)
      self.assertTrue(config.graph_options.rewrite_options.disable_meta_optimizer)

  def test_session_config_of_a_task_outside_the_cluster(self):
    for cluster in ({}, {"chief": ["c:1"]}, {"worker": []}):
      with self.assertRaisesRegex(ValueError, "task worker:0 is not in the cluster"):
        cluster_manager.generate_session_config((cluster, {"type": "worker", "index": 0}))

  def test_two_real_servers(self):
    folder = self._discovery.folder("ps")
    for index in range(2):
      process = subprocess.Popen(
        [sys.executable, "-c", _PS_PROCESS, folder, str(index)], stdin=subprocess.PIPE
      )
      self.addCleanup(process.stdin.close)
      self.addCleanup(process.wait)
      self.addCleanup(process.kill)
    chief = tf.distribute.Server({"local": ["127.0.0.1:0"]})
    wait_until(lambda: len(self._discovery.query("ps")) == 2, timeout_secs=120)

    cluster, task = cluster_manager.get_training_cluster(
      self._discovery, chief.target[len("grpc://") :], 0, 1, 2, 3, self._folder, "uuid"
    )
    with tf.Graph().as_default():
      enqueue_ops = []
      for index in range(2):
        with tf.device(f"/job:ps/task:{index}"):
          queue = tf.queue.FIFOQueue(1, tf.int32, shared_name="queue")
          enqueue_ops.append(queue.enqueue(100 + index))
      config = cluster_manager.generate_session_config((cluster, task))
      with tf.compat.v1.Session(chief.target, config=config) as session:
        session.run(enqueue_ops)
        jobs = {d.name.split("/replica")[0] for d in session.list_devices()}

    # The fake workers are filtered out, otherwise the session would wait for them forever.
    self.assertEqual(jobs, {"/job:chief", "/job:ps"})
    self.assertEqual(
      cluster_manager._fetch_ps_cluster_from_file(
        os.path.join(self._folder, "ps_cluster_dir", "uuid"), timeout=0
      ),
      cluster["ps"],
    )
    # Each server has its own element: the op really ran there.
    for index, addr in self._discovery.query("ps").items():
      with tf.Graph().as_default(), tf.compat.v1.Session(f"grpc://{addr}") as session:
        queue = tf.queue.FIFOQueue(1, tf.int32, shared_name="queue")
        self.assertEqual(session.run(queue.dequeue()), 100 + index)


if __name__ == "__main__":
  unittest.main()
