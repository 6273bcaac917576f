"""What serving says in ZooKeeper, and training reads there."""

import unittest

from monolith.agent_service import backends
from monolith.agent_service.mocked_zkclient import FakeKazooClient
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

_MODEL = "model"
_CONTAINER = backends.Container("default", "asdf")


def _saved_models(*sub_graphs):
  return {backends.SavedModel(_MODEL, sub_graph) for sub_graph in sub_graphs}


class DataTest(unittest.TestCase):
  def test_text(self):
    self.assertEqual(str(_CONTAINER), "default:asdf")
    self.assertEqual(str(backends.SavedModel("m", "ps_0")), "m:ps_0")
    self.assertEqual(len({backends.Container("a", "b"), backends.Container("a", "b")}), 1)

  def test_service_info(self):
    info = backends.ContainerServiceInfo(grpc="a:1", http="b:2", idc="lf", debug_info="{}")
    self.assertEqual(backends.ContainerServiceInfo.deserialize(info.serialize()), info)


class ZKBackendTest(unittest.TestCase):
  def setUp(self):
    # Constructing does not connect: nothing listens there.
    self.backend = backends.ZKBackend("demo", zk_servers="127.0.0.1:1")
    self.assertIsInstance(self.backend._zk, MonolithKazooClient)
    self.zk = self.backend._zk = FakeKazooClient()
    self.backend.start()
    self.addCleanup(self.backend.stop)

  def test_sync_targets(self):
    self.backend.subscribe_model(_MODEL)
    other = backends.Container("default", "other")
    for container, address in ((_CONTAINER, "localhost:8888"), (other, "localhost:9999")):
      self.backend.report_service_info(container, backends.ContainerServiceInfo(grpc=address))
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_1", "entry"))
    self.backend.sync_available_saved_models(other, _saved_models("ps_1", "ps_11"))

    targets = ["localhost:8888", "localhost:9999"]
    self.assertEqual(self.backend.get_sync_targets("ps_1"), ("model:ps_1", targets))
    self.assertEqual(self.backend.get_sync_targets("ps_11"), ("model:ps_11", targets[1:]))
    self.assertEqual(self.backend.get_sync_targets("ps_2"), ("model:ps_2", []))

  def test_bindings_are_added_and_removed(self):
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_0", "ps_1"))
    folder = f"/demo/binding/{_MODEL}"
    self.assertEqual(self.zk.get_children(folder), ["ps_0:default:asdf", "ps_1:default:asdf"])
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_1", "ps_2"))
    self.assertEqual(self.zk.get_children(folder), ["ps_1:default:asdf", "ps_2:default:asdf"])
    self.backend.sync_available_saved_models(_CONTAINER, set())
    self.assertEqual(self.zk.get_children(folder), [])

  def test_service_info_is_replaced(self):
    for address in ("a:1", "b:1"):
      self.backend.report_service_info(_CONTAINER, backends.ContainerServiceInfo(grpc=address))
    self.assertEqual(self.backend.get_service_info(_CONTAINER).grpc, "b:1")
    self.assertIsNotNone(self.zk.exists("/demo/container_service/default:asdf"))

  def test_a_container_that_does_not_say_where_it_is(self):
    self.backend.subscribe_model(_MODEL)
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_0"))
    self.assertEqual(self.backend.get_sync_targets("ps_0"), ("model:ps_0", []))

  def test_one_model(self):
    self.backend.subscribe_model(_MODEL)
    self.backend.subscribe_model(_MODEL)
    with self.assertRaisesRegex(AssertionError, "model"):
      self.backend.subscribe_model("another")

  def test_subscribe_before_start(self):
    backend = backends.ZKBackend("demo", zk_servers=None)
    backend._zk = FakeKazooClient()
    with self.assertRaisesRegex(AssertionError, "subscribe_model"):
      backend.get_sync_targets("ps_0")
    backend.subscribe_model(_MODEL)
    backend.start()
    self.addCleanup(backend.stop)
    backend.report_service_info(_CONTAINER, backends.ContainerServiceInfo(grpc="a:1"))
    backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_0"))
    self.assertEqual(backend.get_sync_targets("ps_0"), ("model:ps_0", ["a:1"]))


class RealZooKeeperTest(unittest.TestCase):
  def test_sync_targets(self):
    require_zookeeper()
    server = ZooKeeperServer()
    server.start()
    self.addCleanup(server.stop)
    trainer, serving = (backends.ZKBackend("demo", server.hosts) for _ in range(2))
    trainer.start()
    self.addCleanup(trainer.stop)
    serving.start()
    trainer.subscribe_model(_MODEL)
    serving.report_service_info(_CONTAINER, backends.ContainerServiceInfo(grpc="a:1"))
    serving.sync_available_saved_models(_CONTAINER, _saved_models("ps_0"))

    wait_until(lambda: trainer.get_sync_targets("ps_0") == ("model:ps_0", ["a:1"]))
    serving.stop()
    wait_until(lambda: trainer.get_sync_targets("ps_0") == ("model:ps_0", []))


if __name__ == "__main__":
  unittest.main()
