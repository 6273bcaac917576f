"""Tests notes of serving in ZooKeeper for training: `backends`, `bindings`, `layouts`."""

import json
import unittest

from monolith.agent_service import backends, layouts
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


class LayoutTest(unittest.TestCase):
  def setUp(self):
    self.backend = backends.ZKBackend("demo", None)
    self.zk = self.backend._zk = FakeKazooClient()
    self.backend.start()
    self.addCleanup(self.backend.stop)
    self.layout = "/demo/layouts/one"

  def declare(self, *sub_graphs, overwrite=False, base="/exports"):
    for sub_graph in sub_graphs:
      self.backend.decl_saved_model(
        backends.SavedModel(_MODEL, sub_graph),
        backends.SavedModelDeployConfig(f"{base}/{sub_graph}", "latest"),
        overwrite,
      )

  def test_declare(self):
    self.declare("entry", "ps_0")
    self.assertEqual(
      self.backend.list_saved_models(_MODEL),
      [backends.SavedModel(_MODEL, "entry"), backends.SavedModel(_MODEL, "ps_0")],
    )
    with self.assertRaisesRegex(ValueError, "model:entry is declared already"):
      self.declare("entry")
    self.declare("entry", overwrite=True, base="/other")
    data, _ = self.zk.get("/demo/saved_models/model/entry")
    self.assertEqual(
      json.loads(data), {"model_base_path": "/other/entry", "version_policy": "latest"}
    )

  def test_a_layout_is_followed(self):
    self.declare("entry", "ps_0")
    seen = []
    self.backend.register_layout_callback(
      self.layout, lambda layout: seen.append([(str(m), c.model_base_path) for m, c in layout])
    )
    entry, unknown = backends.SavedModel(_MODEL, "entry"), backends.SavedModel("else", "entry")
    self.backend.add_to_layout(self.layout, entry)
    self.backend.add_to_layout(self.layout, entry)
    # Left out, with an error: nobody declared it.
    self.backend.add_to_layout(self.layout, unknown)
    self.backend.remove_from_layout(self.layout, entry)
    self.backend.remove_from_layout(self.layout, entry)
    self.assertEqual(seen, [[], [("model:entry", "/exports/entry")], []])

  def test_a_new_declaration_is_found(self):
    self.declare("entry")
    self.backend.add_to_layout(self.layout, backends.SavedModel(_MODEL, "entry"))
    seen = []
    self.backend.register_layout_callback(
      self.layout, lambda layout: seen.append([c.model_base_path for _, c in layout])
    )
    self.declare("entry", overwrite=True, base="/other")
    self.backend._refresh(False)
    self.backend._refresh(True)
    self.assertEqual(seen, [["/exports/entry"], ["/other/entry"]])

  def test_a_callback_that_fails_is_called_again(self):
    calls = []

    def callback(layout):
      calls.append(layout)
      if len(calls) == 1:
        raise RuntimeError("the disk is full")

    self.backend.register_layout_callback(self.layout, callback)
    self.backend._refresh(False)
    self.backend._refresh(False)
    self.assertEqual(len(calls), 2)

  def test_service_map_has_all_models_of_the_layout(self):
    self.declare("ps_0", "entry")
    self.backend.add_to_layout(self.layout, backends.SavedModel(_MODEL, "ps_0"))
    self.backend.register_layout_callback(self.layout, lambda layout: None)
    self.backend.report_service_info(_CONTAINER, backends.ContainerServiceInfo(grpc="a:1"))
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_0", "entry"))
    self.assertEqual(
      self.backend.get_service_map(), {"model:ps_0": ["a:1"], "model:entry": ["a:1"]}
    )
    self.backend.remove_from_layout(self.layout, backends.SavedModel(_MODEL, "ps_0"))
    self.assertEqual(self.backend.get_service_map(), {})

  def test_bzid_info(self):
    self.declare("ps_0")
    self.backend.add_to_layout(self.layout, backends.SavedModel(_MODEL, "ps_0"))
    self.backend.report_service_info(_CONTAINER, backends.ContainerServiceInfo(grpc="a:1"))
    self.backend.sync_available_saved_models(_CONTAINER, _saved_models("ps_0"))
    info = json.loads(json.dumps(self.backend.bzid_info()))
    self.assertEqual(info["layout_info"], {"one": ["model:ps_0"]})
    self.assertEqual(info["model_info"]["model"]["ps_0"]["bindings"], ["default:asdf"])
    self.assertEqual(info["container_info"]["default:asdf"]["saved_models"], ["model:ps_0"])
    self.assertEqual(info["container_info"]["default:asdf"]["service_info"]["grpc"], "a:1")

  def test_nonsense_in_nodes(self):
    self.zk.create("/demo/saved_models/model/entry", b'{"model_base_path": 7}', makepath=True)
    self.zk.ensure_path(f"{self.layout}/model:entry")
    self.zk.ensure_path(f"{self.layout}/no_colon")
    seen = []
    self.backend.register_layout_callback(self.layout, seen.append)
    self.assertEqual(seen, [[]])


class LayoutFilterTest(unittest.TestCase):
  def accepted(self, *filters):
    layout_filter = layouts.LayoutFilter(filters, shard_id=1, shard_num=3)
    return [name for name in ("entry", "ps_0", "ps_1", "ps_4") if layout_filter.accepts(name)]

  def test_accepts(self):
    self.assertEqual(self.accepted(), ["entry", "ps_0", "ps_1", "ps_4"])
    by_shard = "ps_{i};i % ${shard_num} == ${shard_id}"
    self.assertEqual(self.accepted(by_shard), ["ps_1", "ps_4"])
    self.assertEqual(self.accepted(by_shard, "entry;1"), ["entry", "ps_1", "ps_4"])
    self.assertEqual(self.accepted("entry;${shard_id} == 0"), [])
    self.assertEqual(self.accepted("ps_{i};i == 0 or i > 3"), ["ps_0", "ps_4"])

  def test_a_filter_is_code_of_nobody(self):
    for text in ("ps_{i};__import__('os')", "ps_{i};j == 1", "ps_{i}", "ps_(;1", "ps_{i}; "):
      with self.assertRaises(ValueError, msg=text):
        self.accepted(text)


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
