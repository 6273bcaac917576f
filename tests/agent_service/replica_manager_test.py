"""Following replicas, with a ZooKeeper in memory and a real one."""

import time
import unittest
from unittest import mock

from monolith.agent_service import agent_service_pb2, replica_manager
from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.mocked_zkclient import FakeKazooClient
from monolith.agent_service.utils import AgentConfig, ModelState
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

_PS, _ENTRY = agent_service_pb2.ServerType.PS, agent_service_pb2.ServerType.ENTRY


def _meta(address, stat=ModelState.AVAILABLE, **kwargs):
  return ReplicaMeta(address=address, stat=stat, **kwargs).serialize()


def _config(**kwargs):
  return AgentConfig(bzid="demo", base_name="model", deploy_type="ps", **kwargs)


class ReplicaWatcherTest(unittest.TestCase):
  def setUp(self):
    self.zk = FakeKazooClient()
    self.zk.start()

  def watch(self, **kwargs):
    config = _config(dc_aware=kwargs.pop("dc_aware", False))
    watcher = replica_manager.ReplicaWatcher(self.zk, config, **kwargs)
    watcher.watch_data()
    self.addCleanup(watcher.stop)
    return watcher

  def create(self, path, data):
    self.zk.create(f"/demo/service/model/{path}", data, makepath=True)

  def test_replicas_come_and_go(self):
    self.create("ps:0/0", _meta("a:1"))
    watcher = self.watch()
    self.create("ps:0/10", _meta("c:1"))
    self.create("ps:0/2", _meta("b:1"))
    self.create("ps:1/0", _meta("d:1"))
    self.create("entry:0/0", _meta("e:1"))

    self.assertEqual(watcher.get_replicas(_PS, 0), ["a:1", "b:1", "c:1"])
    self.assertEqual(watcher.get_replicas(_PS, 7), [])
    self.assertEqual(
      watcher.get_all_replicas(_PS), {"ps:0": ["a:1", "b:1", "c:1"], "ps:1": ["d:1"]}
    )
    self.assertEqual(watcher.get_replica(_PS, 0, 2), "b:1")
    self.assertIsNone(watcher.get_replica(_PS, 0, 3))
    self.assertEqual(watcher.get_replicas(_ENTRY, 0), ["e:1"])

    self.zk.set("/demo/service/model/ps:0/2", _meta("b:1", ModelState.UNLOADING))
    self.zk.delete("/demo/service/model/ps:0/0")
    self.assertEqual(watcher.get_replicas(_PS, 0), ["c:1"])
    self.create("ps:0/0", _meta("f:1"))
    self.assertEqual(watcher.get_replicas(_PS, 0), ["f:1", "c:1"])

  def test_a_task_that_comes_back(self):
    watcher = self.watch()
    self.create("ps:0/0", _meta("a:1"))
    self.zk.delete("/demo/service/model/ps:0")
    self.assertEqual(watcher.get_replicas(_PS, 0), [])
    self.create("ps:0/1", _meta("b:1"))
    self.assertEqual(watcher.get_replicas(_PS, 0), ["b:1"])

  def test_data_centres(self):
    watcher = self.watch(dc_aware=True)
    self.create("lf:default/ps:0/0", _meta("a:1"))
    self.create("hl:other/ps:0/1", _meta("b:1"))

    self.assertEqual(watcher.get_replicas(_PS, 0, "lf", "default"), ["a:1"])
    self.assertEqual(watcher.get_replicas(_PS, 0, "lf", "other"), [])
    info = watcher.get_replicas_with_extra_info(_PS, 0)
    self.assertEqual(set(info), {"a:1", "b:1"})
    self.assertEqual((info["b:1"].idc, info["b:1"].cluster), ("hl", "other"))
    self.assertEqual(info["b:1"].replica_id, 1)

  def test_address_kinds(self):
    self.create("ps:0/0", _meta("a:1", address_ipv6="[b]:1", archon_address="c:1"))
    self.assertEqual(self.watch(use_archon=True).get_replicas(_PS, 0), ["c:1"])
    watcher = self.watch(zk_watch_address_family="ipv6")
    self.assertEqual(watcher.get_replicas(_PS, 0), ["[b]:1"])

  def test_nonsense_is_ignored(self):
    watcher = self.watch()
    self.create("ps:0/0", b"not json")
    self.create("ps:0/1", b"")
    self.create("something/else", b"{}")
    self.assertEqual(watcher.get_all_replicas(_PS), {})

  def test_sync_wrapper(self):
    watcher = replica_manager.ReplicaWatcher(self.zk, _config())
    backend = watcher.to_sync_wrapper()
    backend.start()
    self.create("ps:1/0", _meta("a:1"))
    backend.subscribe_model("anything")
    name, targets = backend.get_sync_targets("ps_1")
    backend.stop()

    self.assertEqual(name, "ps_1")
    self.assertEqual(list(targets), ["a:1"])
    self.assertFalse(targets["a:1"].HasField("idc"))
    self.assertFalse(targets["a:1"].HasField("cluster"))
    self.assertEqual(targets["a:1"].replica_id, 0)

  def test_stop_wakes_the_poller(self):
    watcher = self.watch()
    start = time.monotonic()
    watcher.stop()
    self.assertLess(time.monotonic() - start, 30)
    self.assertIsNone(watcher._poller)

  def test_polling_finds_what_watches_missed(self):
    watcher = self.watch()
    self.create("ps:0/0", _meta("a:1"))
    with mock.patch.object(self.zk, "_notify_children"), mock.patch.object(self.zk, "_notify_data"):
      self.create("ps:3/0", _meta("b:1"))
      self.zk.delete("/demo/service/model/ps:0/0")
    self.assertEqual(watcher.get_all_replicas(_PS), {"ps:0": ["a:1"]})
    watcher._read_all()
    self.assertEqual(watcher.get_all_replicas(_PS), {"ps:3": ["b:1"]})


class RealZooKeeperTest(unittest.TestCase):
  def test_replicas_come_and_go(self):
    require_zookeeper()
    server = ZooKeeperServer()
    server.start()
    self.addCleanup(server.stop)
    reader, writer = (MonolithKazooClient(server.hosts) for _ in range(2))
    for client in (reader, writer):
      client.start()
      self.addCleanup(client.close)
      self.addCleanup(client.stop)
    watcher = replica_manager.ReplicaWatcher(reader, _config())
    watcher.watch_data()
    self.addCleanup(watcher.stop)

    path = "/demo/service/model/ps:0/0"
    writer.create(path, _meta("a:1"), makepath=True)
    wait_until(lambda: watcher.get_replicas(_PS, 0) == ["a:1"])
    writer.set(path, _meta("b:1"))
    wait_until(lambda: watcher.get_replicas(_PS, 0) == ["b:1"])
    writer.delete("/demo/service/model/ps:0", recursive=True)
    wait_until(lambda: watcher.get_replicas(_PS, 0) == [])
    writer.create(path, _meta("c:1"), makepath=True)
    wait_until(lambda: watcher.get_replicas(_PS, 0) == ["c:1"])


if __name__ == "__main__":
  unittest.main()
