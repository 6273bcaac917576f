"""Agents as real processes with a real ZooKeeper: `agent`, `agent_v1`, `agent_v3`, `agent_base`."""

from __future__ import annotations

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import unittest

import grpc
import pytest

from monolith.agent_service import agent_service_pb2 as pb
from monolith.agent_service import agent_service_pb2_grpc, backends, replica_manager
from monolith.agent_service.utils import AgentConfig, check_port_open
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.free_ports import get_free_port
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LAYOUT = "/demo/layouts/mixed"


class _Agent:
  """An agent in a process of its own, whose server loads nothing."""

  def __init__(self, name, settings, environment=()):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.port, self.server_port = get_free_port(), get_free_port()
    conf = folder / f"{name}.conf"
    conf.write_text("".join(f"{key} {value}\n" for key, value in settings))
    self.log = folder / f"{name}.log"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PORT", "TCE_"))}
    with open(self.log, "wb") as log:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "monolith.agent_service.agent", "--conf", conf],
        cwd=_ROOT,
        env={
          **kept,
          "MY_POD_NAME": name,
          "MY_HOST_IP": "127.0.0.1",
          "PORT2": str(self.port),
          "PORT3": str(self.server_port),
          "MONOLITH_SERVING_COMMAND": shlex.join(
            [sys.executable, "-m", "tests.agent_service.fake_server"]
          ),
          **dict(environment),
        },
        stdout=log,
        stderr=log,
      )

  def children(self):
    """Returns the process ids of its servers."""
    found = []

    def find():
      found.clear()
      try:
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
          found.extend(map(int, (task / "children").read_text().split()))
      except OSError:  # one of its threads ended meanwhile
        return False
      return True

    wait_until(find)
    return found

  def services(self, server_type=pb.PS):
    with grpc.insecure_channel(f"localhost:{self.port}") as channel:
      stub = agent_service_pb2_grpc.AgentServiceStub(channel)
      request = pb.HeartBeatRequest(server_type=server_type)
      answer = stub.HeartBeat(request, timeout=60, wait_for_ready=True)
    return {key: sorted(value.address) for key, value in answer.addresses.items()}

  def close(self):
    if self.process.poll() is None:
      self.process.kill()
    self.process.wait()


def _is_alive(pid):
  try:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return False
  return "State:\tZ" not in status


class AgentProcessesTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    require_zookeeper()
    cls.zookeeper = ZooKeeperServer()
    cls.addClassCleanup(cls.zookeeper.close)
    cls.zookeeper.start()

  def agent(self, name, settings, environment=()):
    agent = _Agent(name, [("zk_servers", self.zookeeper.hosts), *settings], environment)
    self.addCleanup(agent.close)
    return agent

  def wait(self, predicate, *agents):
    try:
      wait_until(predicate)
    except AssertionError as error:
      logs = "\n".join(agent.log.read_text(errors="replace")[-3000:] for agent in agents)
      answers = [agent.services() for agent in agents if agent.process.poll() is None]
      raise AssertionError(f"{error}\n{answers}\n{logs}") from None

  def test_two_agents_share_a_layout(self):
    backend = backends.ZKBackend("demo", self.zookeeper.hosts)
    backend.start()
    self.addCleanup(backend.stop)
    models = [backends.SavedModel("m", name) for name in ("entry", "ps_0", "ps_1", "ps_2")]
    for model in models:
      backend.decl_saved_model(model, backends.SavedModelDeployConfig("/nowhere", "latest"))
    settings = [
      ("bzid", "demo"),
      ("deploy_type", "unified"),
      ("agent_version", 3),
      ("layout_pattern", "mixed"),
      ("layout_filters", "ps_{i};i % ${shard_num} == ${shard_id}"),
      ("layout_filters", "entry;1"),
    ]
    first, second = (
      self.agent(f"pod{i}", settings, {"SHARD_ID": str(i), "MONOLITH_HOST_SHARD_N": "2"}.items())
      for i in range(2)
    )
    # The first answers of agents that have nothing to serve yet.
    for agent in (first, second):
      self.wait(lambda agent=agent: check_port_open(agent.port), first, second)
      self.assertEqual(agent.services(), {})

    for model in models[:3]:
      backend.add_to_layout(_LAYOUT, model)
    addresses = [f"127.0.0.1:{agent.server_port}" for agent in (first, second)]
    served = {
      "m:entry": sorted(addresses), "m:ps_0": addresses[:1], "m:ps_1": addresses[1:],
    }  # fmt: skip
    for agent in (first, second):
      self.wait(lambda agent=agent: agent.services() == served, first, second)

    backend.add_to_layout(_LAYOUT, models[3])
    backend.remove_from_layout(_LAYOUT, models[2])
    served = {
      "m:entry": sorted(addresses), "m:ps_0": addresses[:1], "m:ps_2": addresses[:1],
    }  # fmt: skip
    self.wait(lambda: first.services() == served, first, second)
    self.wait(lambda: second.services() == served, first, second)

    # They know all messages of a server; TensorFlow would take the cores from servers that start.
    for agent in (first, second):
      maps = pathlib.Path(f"/proc/{agent.process.pid}/maps").read_text()
      self.assertNotIn("tensorflow", maps)

    # A server that is killed ends its agent, which is gone from ZooKeeper at once.
    (server,) = first.children()
    os.kill(server, signal.SIGKILL)
    self.assertEqual(first.process.wait(timeout=120), 1)
    self.wait(lambda: second.services() == {"m:entry": addresses[1:]}, first, second)

    # An agent that is killed takes its server with it, and vanishes with its session.
    (server,) = second.children()
    second.process.kill()
    wait_until(lambda: not _is_alive(server))
    wait_until(lambda: backend.zk.get_children("/demo/container_service") == [])

  def test_a_pod_with_all_roles(self):
    settings = [
      ("bzid", "roles"),
      ("base_name", "m"),
      ("base_path", "/nowhere"),
      ("stand_alone_serving", "yes"),
      ("num_ps", 2),
    ]
    agent = self.agent("mixed", settings)
    zk = MonolithKazooClient(self.zookeeper.hosts)
    zk.start()
    self.addCleanup(zk.close)
    self.addCleanup(zk.stop)
    watcher = replica_manager.ReplicaWatcher(
      zk, AgentConfig(bzid="roles", base_name="m", deploy_type="ps")
    )
    watcher.watch_data()
    self.addCleanup(watcher.stop)

    # The entry comes last: when it is there, its parameter servers are.
    self.wait(lambda: watcher.get_all_replicas(pb.ENTRY), agent)
    self.assertEqual(sorted(watcher.get_all_replicas(pb.PS)), ["ps:0", "ps:1"])
    self.assertEqual(watcher.get_replicas(pb.ENTRY, 0), [f"127.0.0.1:{agent.server_port}"])
    self.assertEqual(sorted(agent.services()), ["ps:0", "ps:1"])
    servers = agent.children()
    self.assertEqual(len(servers), 2)

    agent.process.terminate()
    self.assertEqual(agent.process.wait(timeout=120), 0)
    self.assertFalse(any(_is_alive(server) for server in servers))
    wait_until(lambda: watcher.get_all_replicas(pb.PS) == {})

  def test_a_server_that_does_not_start(self):
    settings = [("bzid", "broken"), ("base_name", "m"), ("base_path", "/x"), ("deploy_type", "ps")]
    agent = self.agent("broken", settings, [("MONOLITH_SERVING_COMMAND", "/no/such/server")])
    self.assertEqual(agent.process.wait(timeout=120), 1)
    self.assertIn("/no/such/server", agent.log.read_text())


if __name__ == "__main__":
  unittest.main()
