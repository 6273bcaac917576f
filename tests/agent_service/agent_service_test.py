"""Tests what agents say: `tfs_monitor`, `mocked_tfserving`, `zk_mirror`, `client` with it.

Covers `replica_updater`, too.
"""

from __future__ import annotations

import os
import queue
import tempfile
import unittest
from unittest import mock

import grpc

from monolith.agent_service import agent_service_pb2 as pb
from monolith.agent_service import agent_service_pb2_grpc, serving_protos
from monolith.agent_service.agent_service import AgentDataProvider, AgentService
from monolith.agent_service.client import LoadSate, ServingClient
from monolith.agent_service.data_def import EventType, PublishMeta, ReplicaMeta, ResourceSpec
from monolith.agent_service.mocked_tfserving import FakeTFServing
from monolith.agent_service.mocked_zkclient import FakeKazooClient
from monolith.agent_service.replica_manager import ReplicaUpdater, ReplicaWatcher
from monolith.agent_service.tfs_monitor import TFSMonitor
from monolith.agent_service.utils import AgentConfig, ModelState
from monolith.agent_service.zk_mirror import ZKMirror
from tests.wait_until import wait_until


def _meta(address, stat=ModelState.AVAILABLE):
  return ReplicaMeta(address=address, stat=int(stat)).serialize()


class AgentServiceTest(unittest.TestCase):
  def setUp(self):
    self.zk = FakeKazooClient()
    self.zk.start()

  def serve(self, *args, **kwargs):
    service = AgentService(*args, **kwargs)
    service.start()
    self.addCleanup(service.stop)
    channel = grpc.insecure_channel(f"localhost:{service.port}")
    self.addCleanup(channel.close)
    return service, agent_service_pb2_grpc.AgentServiceStub(channel)

  def beat(self, stub, server_type=pb.PS):
    answer = stub.HeartBeat(pb.HeartBeatRequest(server_type=server_type))
    return {key: list(value.address) for key, value in answer.addresses.items()}

  def watch(self, **kwargs):
    config = AgentConfig(bzid="demo", base_name="m", deploy_type="ps", **kwargs)
    watcher = ReplicaWatcher(self.zk, config)
    watcher.watch_data()
    self.addCleanup(watcher.stop)
    return watcher

  def test_version_1(self):
    for path, data in (
      ("ps:0/0", _meta("a:1")),
      ("ps:0/1", _meta("b:1")),
      ("ps:1/0", _meta("c:1")),
      ("ps:1/1", _meta("d:1", ModelState.LOADING)),
      ("dense:0/0", _meta("e:1")),
    ):
      self.zk.create(f"/demo/service/m/{path}", data, makepath=True)
    _, stub = self.serve(self.watch())

    self.assertEqual(self.beat(stub), {"ps:0": ["a:1", "b:1"], "ps:1": ["c:1"]})
    self.assertEqual(self.beat(stub, pb.DENSE), {"dense:0": ["e:1"]})
    answer = stub.GetReplicas(pb.GetReplicasRequest(server_type=pb.PS, task=1, model_name="m"))
    self.assertEqual(answer.address_list.address, ["c:1"])
    self.assertEqual(stub.GetResource(pb.GetResourceRequest()), pb.GetResourceResponse())

  def test_version_1_answers_for_its_own_place(self):
    place = {"TCE_INTERNAL_IDC": "lf", "TCE_LOGICAL_CLUSTER": "default"}
    with mock.patch.dict("os.environ", place):
      self.zk.create("/demo/service/m/lf:default/ps:0/0", _meta("a:1"), makepath=True)
      # The same replica id elsewhere.
      self.zk.create("/demo/service/m/hl:default/ps:0/0", _meta("b:1"), makepath=True)
      _, stub = self.serve(self.watch(dc_aware=True))
      self.assertEqual(self.beat(stub), {"ps:0": ["a:1"]})
      answer = stub.GetReplicas(pb.GetReplicasRequest(server_type=pb.PS, task=0))
      self.assertEqual(answer.address_list.address, ["a:1"])

  def test_version_3(self):
    services = {"m:ps_0": ["a:1", "b:1"], "n:entry": ["c:1"]}
    with mock.patch.dict("os.environ", {"SHARD_ID": "2", "REPLICA_ID": "5"}):
      conf = AgentConfig(deploy_type="unified", agent_version=3)
      service, stub = self.serve(AgentDataProvider(lambda: services), conf=conf)
      for server_type in (pb.PS, pb.ENTRY, pb.DENSE):
        self.assertEqual(self.beat(stub, server_type), services)
      resource = stub.GetResource(pb.GetResourceRequest())
    self.assertEqual(resource.address, service.address)
    self.assertEqual((resource.shard_id, resource.replica_id), (2, 5))
    self.assertGreater(resource.memory, 0)
    self.assertEqual((resource.cpu, resource.network, resource.work_load), (-1, -1, -1))
    with self.assertRaises(grpc.RpcError) as caught:
      stub.GetReplicas(pb.GetReplicasRequest())
    self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

  def test_a_mirror(self):
    mirror = ZKMirror(self.zk, "demo")
    mirror.start()
    self.zk.create("/demo/service/m/ps:0/0", _meta("a:1"), makepath=True)
    conf = AgentConfig(deploy_type="unified", agent_version=3)
    _, stub = self.serve(mirror, conf=conf)
    self.assertEqual(self.beat(stub), {"m:ps:0": ["a:1"]})

  def test_what_a_mirror_knows(self):
    events = queue.Queue()
    mirror = ZKMirror(self.zk, "demo", events)
    mirror.start()
    client = ServingClient(None, "demo", zk_client=self.zk)
    client.load("m", "/exports/m", num_shard=2)
    publish = PublishMeta(shard_id=0, replica_id=1, model_name="m", sub_models={"ps_0": "/p"})
    path = publish.get_path("/demo/publish")
    self.zk.create(path, publish.serialize(), makepath=True)
    self.zk.create("/demo/resource/0:1", ResourceSpec("a:1", 0, 1, 7).serialize())
    self.zk.create("/demo/resource/0:2", b"nonsense")

    self.assertEqual(mirror.models["m"].num_shard, 2)
    self.assertEqual(mirror.publishes, [publish])
    self.assertEqual([resource.memory for resource in mirror.resources], [7])
    self.assertEqual(client.get_status("m"), LoadSate(portal=True, publish=True, service=False))
    self.zk.create("/demo/service/m/ps:0/0", _meta("a:1"), makepath=True)
    self.assertTrue(client.get_status("m").service)
    self.assertTrue(client.unload("m"))
    self.assertFalse(client.unload("m"))
    self.assertEqual(mirror.models, {})
    kinds = [events.get_nowait().etype for _ in range(events.qsize())]
    self.assertEqual({EventType.PORTAL, EventType.PUBLISH, EventType.RESOURCE, EventType.SERVICE},
                     set(kinds))  # fmt: skip
    self.zk.delete(path)
    gone = events.get_nowait()
    self.assertEqual((gone.path, gone.data, gone.etype), (path, b"", EventType.PUBLISH))
    client.load("m", "/exports/m", num_shard=3)
    self.assertEqual(mirror.models["m"].num_shard, 3)

  def test_bad_arguments(self):
    with self.assertRaises(TypeError):
      AgentService(object())
    with self.assertRaisesRegex(ValueError, "conf"):
      AgentService(AgentDataProvider(dict))
    service, _ = self.serve(self.watch())
    self.assertEqual(service.address, f"127.0.0.1:{service.port}")


class MonitorTest(unittest.TestCase):
  def setUp(self):
    self.server = FakeTFServing("ps_0", "", num_versions=2, port=0)
    self.server.start()
    self.addCleanup(self.server.stop)
    self.config = AgentConfig(
      bzid="demo", base_name="m", deploy_type="ps", tfs_ps_port=self.server.port, num_ps=1
    )
    self.monitor = TFSMonitor(self.config)
    self.monitor.connect()
    self.addCleanup(self.monitor.stop)

  def test_states(self):
    wait_until(lambda: self.monitor.get_state("ps_0") == (ModelState.AVAILABLE, 2))
    statuses = self.monitor.get_model_status("ps_0")
    self.assertEqual([status.version for status in statuses], [2, 1])
    (unknown,) = self.monitor.get_model_status("ps_1")
    self.assertEqual((unknown.version, unknown.status.error_code), (-1, 5))
    self.assertEqual(self.monitor.get_addr("ps_0"), f"127.0.0.1:{self.server.port}")
    with self.assertRaises(ValueError):
      self.monitor.get_addr("entry")
    self.assertTrue(self.monitor.is_serving("ps"))

  def test_versions_of_a_folder_that_has_none(self):
    with tempfile.TemporaryDirectory() as folder:
      status = self.monitor.handle_reload_config_request(
        "ps", [serving_protos.gen_model_config("ps_3", folder)]
      )
      self.assertEqual(status.error_code, 0)
      wait_until(lambda: self.monitor.get_state("ps_3") == (ModelState.AVAILABLE, 2))

  def test_reload(self):
    wait_until(lambda: self.monitor.get_state("ps_0")[0] == ModelState.AVAILABLE)
    status = self.monitor.handle_reload_config_request(
      "ps", [serving_protos.gen_model_config("ps_3", "")]
    )
    self.assertEqual(status.error_code, 0)
    wait_until(lambda: self.monitor.get_state("ps_3")[0] == ModelState.AVAILABLE)
    wait_until(lambda: self.monitor.get_state("ps_0")[0] == ModelState.END)

  def test_a_server_that_is_gone_is_unknown(self):
    self.server.stop()
    self.assertEqual(self.monitor.get_state("ps_0"), (ModelState.UNKNOWN, -1))
    self.assertFalse(self.monitor.is_serving("ps"))

  def test_a_config_file_is_followed(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "models.conf")

    def write(*names):
      models = [serving_protos.gen_model_config(name, "") for name in names]
      with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(str(serving_protos.gen_model_server_config(models)))
      os.replace(f"{path}.new", path)

    write()
    server = FakeTFServing(port=0, model_config_file=path)
    server.start()
    self.addCleanup(server.stop)
    self.config.tfs_ps_port = server.port
    self.assertEqual(self.monitor.get_state("ps_8"), (ModelState.UNKNOWN, -1))
    write("ps_8")
    wait_until(lambda: self.monitor.get_state("ps_8")[0] == ModelState.AVAILABLE)


class UpdaterTest(unittest.TestCase):
  def setUp(self):
    self.zk = FakeKazooClient()
    self.zk.start()
    self.states = {}

  def updater(self, **kwargs):
    config = AgentConfig(**{"bzid": "demo", "base_name": "m", "deploy_type": "ps", **kwargs})
    monitor = mock.create_autospec(TFSMonitor, instance=True)
    monitor.get_state.side_effect = lambda name: self.states.get(name, (ModelState.UNKNOWN, -1))
    return ReplicaUpdater(self.zk, config, monitor, "10.0.0.1")

  def read(self, path):
    return ReplicaMeta.deserialize(self.zk.get(f"/demo/service/m/{path}")[0])

  def test_state_is_kept_up_to_date(self):
    updater = self.updater(num_ps=2, replica_id=3, tfs_ps_port=8500, tfs_ps_archon_port=8501)
    updater.register()
    meta = self.read("ps:1/3")
    self.assertEqual((meta.stat, meta.address), (ModelState.UNKNOWN, "10.0.0.1:8500"))
    self.assertEqual((meta.archon_address, meta.model_name), ("10.0.0.1:8501", "m"))
    self.assertEqual((meta.server_type, meta.task, meta.replica), ("ps", 1, 3))
    self.states["ps_1"] = (ModelState.AVAILABLE, 7)
    updater.update()
    self.assertEqual(self.read("ps:0/3").stat, ModelState.UNKNOWN)
    self.assertEqual(self.read("ps:1/3").stat, ModelState.AVAILABLE)
    self.states.clear()
    updater.update()
    self.assertEqual(self.read("ps:1/3").stat, ModelState.UNKNOWN)
    self.assertEqual(self.read("ps:1/3").address, "10.0.0.1:8500")

  def test_a_missing_node_is_made_again(self):
    updater = self.updater(replica_id=3)
    updater.register()
    self.zk.delete("/demo/service/m/ps:0/3")
    updater.update()
    self.assertEqual(self.read("ps:0/3").replica, 3)
    updater.deregister()
    self.assertIsNone(self.zk.exists("/demo/service/m/ps:0/3"))

  def test_zookeeper_counts_replicas_without_an_id(self):
    first, second = (self.updater(deploy_type="entry") for _ in range(2))
    for updater in (first, second):
      updater.register()
    self.assertEqual((first.replica_id, second.replica_id), (0, 1))
    self.assertEqual(
      self.zk.get_children("/demo/service/m/entry:0"), ["00000000000", "00000000001"]
    )
    ps = self.updater(num_ps=2)
    ps.register()
    self.assertEqual(self.zk.get_children("/demo/service/m/ps:1"), ["0"])

  def test_an_id_that_another_process_has(self):
    self.updater(replica_id=3, tfs_ps_port=8500).register()
    with self.assertRaisesRegex(Exception, "belongs to another process"):
      self.updater(replica_id=3, tfs_ps_port=8600).register()
    self.assertEqual(self.read("ps:0/3").address, "10.0.0.1:8500")


if __name__ == "__main__":
  unittest.main()
