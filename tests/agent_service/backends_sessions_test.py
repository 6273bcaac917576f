"""Tests that lost sessions and a ZooKeeper that is away do no harm: real server, real processes.

Covers `zk_nodes`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
from unittest import mock

import pytest

from monolith.agent_service import agent_service_pb2, backends, replica_manager, zk_nodes
from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.utils import AgentConfig, ModelState
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MODEL = "model"
# Long enough for clients that a busy machine lets wait; the server allows ten.
_SESSION_SECS = 5
_AWAY_SECS = 60 if os.environ.get("MONOLITH_SOAK") == "1" else 3
_SERVING_PROCESS = """
import sys, threading
from monolith.agent_service import backends
from monolith.native_training.zk_utils import MonolithKazooClient
backend = backends.ZKBackend("demo", None)
backend._zk = MonolithKazooClient(sys.argv[1], timeout=float(sys.argv[2]))
backend.start()
container = backends.Container("stopped", "process")
backend.report_service_info(container, backends.ContainerServiceInfo(grpc="stopped:1"))
backend.sync_available_saved_models(container, {backends.SavedModel("model", "ps_7")})
print("ready", flush=True)
threading.Event().wait()
"""


def _expire(client):
  """Ends a client's session as the server does when it was silent for too long."""
  thief = MonolithKazooClient(client._hosts_text, client_id=client.client_id)
  thief.start()
  thief.stop()
  thief.close()


class SessionsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    require_zookeeper()
    cls.server = ZooKeeperServer()
    cls.addClassCleanup(cls.server.close)
    cls.server.start()

  def client(self):
    client = MonolithKazooClient(self.server.hosts, timeout=_SESSION_SECS)
    client._hosts_text = self.server.hosts
    return client

  def backend(self):
    backend = backends.ZKBackend("demo", None)
    backend._zk = self.client()
    backend.start()
    self.addCleanup(backend.stop)
    return backend

  def serving(self, name):
    backend = self.backend()
    container = backends.Container("default", name)
    backend.report_service_info(container, backends.ContainerServiceInfo(grpc=f"{name}:1"))
    backend.sync_available_saved_models(container, {backends.SavedModel(_MODEL, f"ps_{name}")})
    return backend

  def trainer(self):
    backend = self.backend()
    backend.subscribe_model(_MODEL)
    return backend

  def wait_for_target(self, trainer, name):
    wait_until(lambda: trainer.get_sync_targets(f"ps_{name}")[1] == [f"{name}:1"])

  def test_serving_writes_its_bindings_again_after_its_session_expired(self):
    reader, serving = self.trainer(), self.serving("a")
    self.wait_for_target(reader, "a")
    path = f"/demo/binding/{_MODEL}/ps_a:default:a"
    old_session = reader._zk.exists(path).ephemeralOwner

    _expire(serving._zk)

    def is_written_again():
      stat = reader._zk.exists(path)
      return stat is not None and stat.ephemeralOwner != old_session

    wait_until(is_written_again)
    self.wait_for_target(reader, "a")

  def test_a_trainer_goes_on_after_its_session_expired(self):
    trainer = self.trainer()
    self.serving("b")
    self.wait_for_target(trainer, "b")

    _expire(trainer._zk)
    self.assertEqual(trainer.get_sync_targets("ps_b"), ("model:ps_b", ["b:1"]))

    self.serving("c")
    self.wait_for_target(trainer, "c")
    self.assertEqual(trainer.get_sync_targets("ps_b"), ("model:ps_b", ["b:1"]))

  def test_a_process_that_stood_still_longer_than_its_session(self):
    trainer = self.trainer()
    process = subprocess.Popen(
      [sys.executable, "-c", _SERVING_PROCESS, self.server.hosts, str(_SESSION_SECS)],
      stdout=subprocess.PIPE,
      text=True,
      cwd=_ROOT,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline().strip(), "ready")
    wait_until(lambda: trainer.get_sync_targets("ps_7")[1] == ["stopped:1"])

    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: trainer.get_sync_targets("ps_7")[1] == [])
    process.send_signal(signal.SIGCONT)

    wait_until(lambda: trainer.get_sync_targets("ps_7")[1] == ["stopped:1"])

  def test_targets_come_from_memory_while_zookeeper_is_away(self):
    trainer = self.trainer()
    watcher = replica_manager.ReplicaWatcher(
      trainer._zk, AgentConfig(bzid="demo", base_name=_MODEL, deploy_type="ps")
    )
    watcher.watch_data()
    self.addCleanup(watcher.stop)
    registering = self.serving("d")
    meta = ReplicaMeta(address="old_style:1", stat=ModelState.AVAILABLE)
    registering._zk.create("/demo/service/model/ps:0/0", meta.serialize(), makepath=True)
    self.wait_for_target(trainer, "d")
    wait_until(lambda: watcher.get_replicas(agent_service_pb2.PS, 0) == ["old_style:1"])

    self.server.stop()
    try:
      wait_until(lambda: not trainer._zk.connected)
      deadline = time.monotonic() + _AWAY_SECS
      while time.monotonic() < deadline:
        self.assertEqual(trainer.get_sync_targets("ps_d")[1], ["d:1"])
        self.assertEqual(watcher.to_sync_wrapper().get_sync_targets("ps_0")[0], "ps_0")
        self.assertEqual(watcher.get_replicas(agent_service_pb2.PS, 0), ["old_style:1"])
        time.sleep(0.2)
    finally:
      self.server.start()

    self.serving("e")
    self.wait_for_target(trainer, "e")
    self.wait_for_target(trainer, "d")

  def test_nodes_that_somebody_deleted_are_made_again(self):
    with mock.patch.object(backends, "_REFRESH_INTERVAL_SECS", 0.2):
      trainer = self.trainer()
      serving = self.serving("f")
    self.wait_for_target(trainer, "f")

    serving._zk.delete("/demo/binding", recursive=True)
    serving._zk.delete("/demo/container_service", recursive=True)

    wait_until(lambda: serving._zk.exists(f"/demo/binding/{_MODEL}/ps_f:default:f"))
    self.wait_for_target(trainer, "f")
    self.serving("g")
    self.wait_for_target(trainer, "g")

  def test_a_node_of_an_earlier_session_is_replaced(self):
    before, after = self.client(), self.client()
    for client in (before, after):
      client.start()
      self.addCleanup(client.close)
      self.addCleanup(client.stop)
    zk_nodes.write_ephemeral(before, "/demo/own/node", b"same")

    zk_nodes.write_ephemeral(after, "/demo/own/node", b"same")
    before.stop()

    self.assertEqual(after.get("/demo/own/node")[0], b"same")


if __name__ == "__main__":
  unittest.main()
