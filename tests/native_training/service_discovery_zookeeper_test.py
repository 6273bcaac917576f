"""ZooKeeper discovery against a server that is really started, stopped and made to forget."""

import signal
import subprocess
import sys
import threading
import unittest
from unittest import mock

from monolith.native_training import service_discovery
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

_MODULE = "monolith.native_training.service_discovery"


class RealZooKeeperTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    require_zookeeper()

  def setUp(self):
    self.server = ZooKeeperServer()
    self.addCleanup(self.server.close)
    self.server.start()

  def _discovery(self, job="job"):
    discovery = service_discovery.ZKServiceDiscovery(job, self.server.hosts, delay=0.1)
    self.addCleanup(discovery.close)
    return discovery

  def _client(self):
    client = MonolithKazooClient(self.server.hosts)
    self.addCleanup(client.close)
    self.addCleanup(client.stop)
    client.start()
    return client

  def _start_process(self, job, name, index, addr):
    """Starts a process of its own that registers and then waits to be killed."""
    process = subprocess.Popen(
      [sys.executable, "-c",
       "import sys\n"
       "from monolith.native_training import service_discovery\n"
       "job, hosts, name, index, addr = sys.argv[1:]\n"
       "discovery = service_discovery.ZKServiceDiscovery(job, hosts)\n"
       "discovery.register(name, int(index), addr)\n"
       "print('registered', flush=True)\n"
       "sys.stdin.read()\n",
       job, self.server.hosts, name, str(index), addr],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.stdin.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline(), b"registered\n")
    return process

  def test_register_query_watch(self):
    first, second, other_job = self._discovery(), self._discovery(), self._discovery("other")

    first.register("ps", 0, "h0:1")
    second.register("ps", 1, "h1:1")
    first.register("worker", 0, "h2:1")

    for discovery in (first, second, self._discovery()):
      wait_until(lambda d=discovery: d.query("ps") == {0: "h0:1", 1: "h1:1"})
      wait_until(lambda d=discovery: d.query("worker") == {0: "h2:1"})
    self.assertEqual(other_job.query("ps"), {})

    first.deregister("ps", 0, "h0:1")
    wait_until(lambda: second.query("ps") == {1: "h1:1"})
    second.close()
    wait_until(lambda: first.query("ps") == {})

  def test_duplicate_registration(self):
    first, second = self._discovery(), self._discovery()
    first.register("ps", 0, "old:1")
    second.register("ps", 0, "new:1")

    wait_until(lambda: first.query("ps") == {0: "new:1"})
    first.register("ps", 0, "newest:1")
    wait_until(lambda: second.query("ps") == {0: "newest:1"})

  def test_corrupted_data_is_repaired(self):
    with mock.patch(f"{_MODULE}._ZK_REGISTRATION_PERIOD", 0.2):
      owner, observer = self._discovery(), self._discovery()
      owner.register("ps", 0, "h0:1")
      wait_until(lambda: observer.query("ps") == {0: "h0:1"})

      client = self._client()
      client.set("/monolith/job/ps.0", b"wrongdata")

      wait_until(lambda: client.get("/monolith/job/ps.0")[0] == b"h0:1")
      wait_until(lambda: observer.query("ps") == {0: "h0:1"})

  def test_server_restart_keeps_the_session(self):
    owner, observer = self._discovery(), self._discovery()
    owner.register("ps", 0, "h0:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1"})

    self.server.stop()
    wait_until(lambda: not owner._client.connected)
    self.server.start()

    owner.register("ps", 1, "h1:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1", 1: "h1:1"})

  def test_lost_session_registers_again(self):
    owner, observer = self._discovery(), self._discovery()
    owner.register("ps", 0, "h0:1")
    observer.register("worker", 0, "h1:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1"})
    old_session = owner._client.client_id[0]

    # A server that knows nothing of its past answers that the session has expired.
    self.server.stop()
    self.server.forget()
    self.server.start()

    wait_until(lambda: self._discovery().query("ps") == {0: "h0:1"})
    self.assertNotEqual(owner._client.client_id[0], old_session)
    owner.register("ps", 1, "h2:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1", 1: "h2:1"})

  def test_nodes_of_a_killed_process_vanish(self):
    observer = self._discovery()
    process = self._start_process("job", "ps", 0, "h0:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1"})

    process.send_signal(signal.SIGKILL)

    wait_until(lambda: observer.query("ps") == {})

  def test_node_of_an_older_session_is_replaced_when_it_ends(self):
    # A restarted server registers while the session of its killed predecessor is still alive.
    predecessor = MonolithKazooClient(self.server.hosts)
    self.addCleanup(predecessor.close)
    self.addCleanup(predecessor.stop)
    predecessor.start()
    predecessor.create("/monolith/job/ps.0", b"old:1", makepath=True, ephemeral=True)
    successor = self._discovery()
    successor.register("ps", 0, "new:1")
    wait_until(lambda: successor.query("ps") == {0: "new:1"})

    predecessor.stop()

    session = successor._client.client_id[0]
    client = self._client()

    def is_owned_by_successor():
      stat = client.exists("/monolith/job/ps.0")
      return stat is not None and stat.ephemeralOwner == session

    wait_until(is_owned_by_successor)
    wait_until(lambda: successor.query("ps") == {0: "new:1"})

  def test_removed_job_folder_comes_back(self):
    owner, observer = self._discovery(), self._discovery()
    owner.register("ps", 0, "h0:1")
    observer.register("worker", 0, "h1:1")
    client = self._client()
    wait_until(lambda: client.exists("/monolith/job/worker.0"))

    client.delete("/monolith/job", recursive=True)

    wait_until(lambda: self._discovery().query("ps") == {0: "h0:1"})
    owner.register("ps", 1, "h2:1")
    wait_until(lambda: observer.query("ps") == {0: "h0:1", 1: "h2:1"})

  def test_many_threads_register(self):
    discovery, observer = self._discovery(), self._discovery()
    threads = [
      threading.Thread(target=discovery.register, args=("ps", i, f"h{i}:1")) for i in range(16)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    wait_until(lambda: observer.query("ps") == {i: f"h{i}:1" for i in range(16)})

  def test_close_while_the_server_is_down(self):
    discovery = self._discovery()
    discovery.register("ps", 0, "h0:1")
    (thread,) = discovery._threads.values()
    self.server.stop()
    wait_until(lambda: not discovery._client.connected)
    discovery.do_all_registrations()

    discovery.close()

    self.assertFalse(thread.thread.is_alive())


if __name__ == "__main__":
  unittest.main()
