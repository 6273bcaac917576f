"""The process of a server and what watches beside it: `tfs_wrapper`, `session_watch`, `ports`."""

from __future__ import annotations

import os
import pathlib
import queue
import shlex
import socket
import subprocess
import sys
import unittest
from unittest import mock

from kazoo.protocol.states import KazooState

from monolith.agent_service import ports, tfs_wrapper
from monolith.agent_service.session_watch import SessionWatch
from monolith.agent_service.utils import AgentConfig
from tests.free_ports import get_free_port
from tests.wait_until import wait_until

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Listens on its port and says what it was given; `stubborn` ignores SIGTERM.
_SERVER = """
import os, signal, socket, sys, time
if "stubborn" in sys.argv:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = next(a.split("=")[1] for a in sys.argv if a.startswith("--port="))
listener = socket.create_server(("127.0.0.1", int(port)))
print(os.environ["PORT2"], os.environ.get("EXTRA"), flush=True)
time.sleep(1000)
"""


class TFSWrapperTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.config = AgentConfig(
      bzid="demo",
      base_name="m",
      base_path=str(self.folder),
      deploy_type="ps",
      num_ps=1,
      agent_port=4242,
      tfs_ps_port=get_free_port(),
    )
    self.log = self.folder / "server.log"

  def wrapper(self, *words, **kwargs):
    command = shlex.join([sys.executable, "-S", "-c", _SERVER, *words])
    wrapper = tfs_wrapper.TFSWrapper(self.config, command=command, log_path=str(self.log), **kwargs)
    self.addCleanup(wrapper.stop)
    return wrapper

  def test_life_of_a_server(self):
    wrapper = self.wrapper(environment={"EXTRA": "here"})
    self.assertEqual((wrapper.pid, wrapper.poll(), wrapper.model_config_file), (None, None, None))
    self.assertFalse(wrapper.is_listening())
    wrapper.start()
    wait_until(wrapper.is_listening)
    self.assertIsNone(wrapper.poll())
    wait_until(lambda: "4242 here" in self.log.read_text())
    config_file = wrapper.model_config_file
    self.assertIn("ps_0", pathlib.Path(config_file).read_text())
    wrapper.stop()
    self.assertEqual(wrapper.poll(), -15)
    self.assertFalse(wrapper.is_listening())
    self.assertFalse(os.path.exists(config_file))
    self.assertIsNone(wrapper.model_config_file)
    wrapper.stop()  # a second time

  def test_a_server_that_does_not_end_is_killed(self):
    wrapper = self.wrapper("stubborn")
    wrapper.start()
    wait_until(wrapper.is_listening)
    with mock.patch.object(tfs_wrapper, "_STOP_SECS", 0.01):
      wrapper.stop()
    self.assertEqual(wrapper.poll(), -9)

  def test_a_configuration_of_the_caller_stays(self):
    path = str(self.folder / "models.config")
    wrapper = self.wrapper(config_path=path)
    wrapper.start()
    wait_until(wrapper.is_listening)
    self.assertEqual(wrapper.model_config_file, path)
    wrapper.stop()
    self.assertEqual(wrapper.model_config_file, path)

  def test_a_program_that_is_not_there(self):
    wrapper = tfs_wrapper.TFSWrapper(self.config, command="/no/such/server")
    with self.assertRaisesRegex(FileNotFoundError, "'/no/such/server' is not found"):
      wrapper.start()
    self.assertIsNone(wrapper.pid)
    wrapper.stop()

  def test_server_types(self):
    with self.assertRaisesRegex(AssertionError, "hosts 'ps'"):
      tfs_wrapper.TFSWrapper(self.config, "entry")
    self.config.deploy_type = "mixed"
    with self.assertRaisesRegex(RuntimeError, "say which one"):
      tfs_wrapper.TFSWrapper(self.config)
    self.assertEqual(tfs_wrapper.TFSWrapper(self.config, "entry").server_type, "entry")

  def test_the_server_ends_with_a_killed_agent(self):
    program = (
      "import sys, time; from monolith.agent_service import tfs_wrapper, utils\n"
      f"config = utils.AgentConfig(bzid='demo', base_name='m', base_path={str(self.folder)!r}, "
      f"deploy_type='ps', num_ps=1, tfs_ps_port={self.config.tfs_ps_port})\n"
      "wrapper = tfs_wrapper.TFSWrapper(config, command=sys.argv[1])\n"
      "wrapper.start(); print(wrapper.pid, flush=True); time.sleep(1000)"
    )
    server = shlex.join([sys.executable, "-S", "-c", _SERVER])
    agent = subprocess.Popen(
      [sys.executable, "-c", program, server], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    self.addCleanup(agent.stdout.close)
    self.addCleanup(agent.kill)
    wait_until(lambda: ports.check_port_open(self.config.tfs_ps_port))
    agent.kill()
    agent.wait()
    wait_until(lambda: not ports.check_port_open(self.config.tfs_ps_port))

  def test_command(self):
    with mock.patch.dict(os.environ, MONOLITH_SERVING_COMMAND="other --flag"):
      self.assertEqual(tfs_wrapper.get_server_command("h"), "other --flag")
    with mock.patch.dict(os.environ, MONOLITH_SERVING_COMMAND=""):
      words = shlex.split(tfs_wrapper.get_server_command("h"))
    self.assertEqual(words[1:], ["-m", "monolith.serving.model_server", "--bind_address=h"])

  def test_jemalloc(self):
    environment = {"LD_PRELOAD": "other.so"}
    with mock.patch("ctypes.util.find_library", return_value=None):
      tfs_wrapper._preload_jemalloc(environment)
    self.assertEqual(environment, {"LD_PRELOAD": "other.so"})
    with mock.patch("ctypes.util.find_library", return_value="libjemalloc.so.2"):
      tfs_wrapper._preload_jemalloc(environment)
      tfs_wrapper._preload_jemalloc(empty := {})
    self.assertEqual(environment, {"LD_PRELOAD": "libjemalloc.so.2:other.so"})
    self.assertEqual(empty, {"LD_PRELOAD": "libjemalloc.so.2"})


class _Client:
  """The listeners of a client, called by the test."""

  def __init__(self):
    self.listeners = []

  def add_listener(self, listener):
    self.listeners.append(listener)

  def remove_listener(self, listener):
    self.listeners.remove(listener)

  def become(self, *states):
    for state in states:
      for listener in self.listeners:
        listener(state)


class SessionWatchTest(unittest.TestCase):
  def setUp(self):
    self.zk = _Client()
    self.calls = queue.Queue()
    self.errors = []

  def refresh(self, lost):
    self.calls.put(lost)
    if self.errors:
      raise self.errors.pop()

  def watch(self, **kwargs):
    watch = SessionWatch(self.zk, self.refresh, "test-watch", **kwargs)
    watch.start()
    self.addCleanup(watch.stop)
    return watch

  def test_rounds_by_time(self):
    self.watch(interval_secs=0.01)
    self.assertEqual([self.calls.get(timeout=60) for _ in range(3)], [False] * 3)

  def test_a_lost_session_calls_once_it_is_back(self):
    self.watch(interval_secs=1000)
    # A connection that was only interrupted has lost nothing.
    self.zk.become(KazooState.SUSPENDED, KazooState.CONNECTED)
    self.zk.become(KazooState.LOST)
    self.assertTrue(self.calls.empty())
    self.zk.become(KazooState.CONNECTED)
    self.assertIs(self.calls.get(timeout=60), True)
    self.assertTrue(self.calls.empty())

  def test_a_round_that_failed_is_tried_again_and_the_loss_not_forgotten(self):
    self.errors = [ValueError("a second time"), RuntimeError("away")]
    watch = self.watch(interval_secs=1000, retry_secs=0.01)
    with self.assertLogs("absl", "WARNING") as logs:
      self.zk.become(KazooState.LOST, KazooState.CONNECTED)
      self.assertEqual([self.calls.get(timeout=60) for _ in range(3)], [True] * 3)
      wait_until(lambda: len(logs.output) == 2)
    self.assertIn("RuntimeError('away'), trying again in 0.01 s", logs.output[0])
    self.assertEqual(watch.failures, 2)

  def test_stop_and_start(self):
    watch = self.watch(interval_secs=1000)
    watch.stop()
    self.assertEqual(self.zk.listeners, [])
    self.assertTrue(self.calls.empty())
    watch.start()
    self.assertEqual(len(self.zk.listeners), 1)

  def test_stop_from_the_round_itself(self):
    done = queue.Queue()

    def refresh(_):
      watch.stop()
      done.put(True)

    watch = SessionWatch(self.zk, refresh, "test-watch", interval_secs=0.01)
    watch.start()
    self.assertTrue(done.get(timeout=60))
    self.assertEqual(self.zk.listeners, [])


class PortsTest(unittest.TestCase):
  def test_open_ports(self):
    with socket.create_server(("127.0.0.1", 0)) as listener:
      port = listener.getsockname()[1]
      self.assertTrue(ports.check_port_open(port))
    self.assertFalse(ports.check_port_open(get_free_port()))
    self.assertFalse(ports.check_port_open(1, host="no.such.host.invalid"))
    self.assertGreater(ports.find_free_port(), 0)

  def test_address_of_this_host(self):
    with mock.patch.dict(os.environ, MY_HOST_IP="10.0.0.1", MY_POD_IP="10.0.0.2"):
      self.assertEqual(ports.get_local_ip(), "10.0.0.1")
    with mock.patch.dict(os.environ, MY_HOST_IP="", MY_POD_IP="10.0.0.2"):
      self.assertEqual(ports.get_local_ip(), "10.0.0.2")
    with mock.patch.dict(os.environ, MY_HOST_IP="", MY_POD_IP=""):
      self.assertTrue(ports.get_local_ip())


if __name__ == "__main__":
  unittest.main()
