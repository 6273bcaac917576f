import os
import socket
import unittest
from unittest import mock

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState

from monolith.native_training import service_discovery
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.free_ports import get_free_port
from tests.wait_until import wait_until

_MODULE = "monolith.native_training.service_discovery"


class FakeConsul:
  """A client that keeps registrations in memory; its parameters are in another order."""

  def __init__(self, blacklist=()):
    self._blacklist = blacklist
    self._services = {}

  def lookup(self, name, cachetime=0, timeout=3):
    return [element for (n, _), element in self._services.items() if n == name]

  def register(self, name, port, check_script=None, tags=None, host=None):
    if tags["ip"] not in self._blacklist:
      self._services[name, port] = {
        "Port": port,
        "Tags": {key: str(value) for key, value in tags.items()},
      }

  def deregister(self, name, port):
    del self._services[name, port]


class FakeKazooClient:
  """A ZooKeeper in memory with one client; watches fire inside the call that changes a node."""

  def __init__(self, servers=None):
    self._nodes = {}
    self._children_watches = {}
    self._data_watches = {}
    self.listener = None

  def add_listener(self, listener):
    self.listener = listener

  def start(self):
    pass

  def stop(self):
    pass

  def close(self):
    pass

  def ensure_path(self, path):
    pass

  def ChildrenWatch(self, path, func):
    self._children_watches[path] = func
    self._children_changed(path)

  def DataWatch(self, path, func):
    self._data_watches[path] = func
    func(self._nodes.get(path), None)

  def create(self, path, value, makepath, ephemeral):
    assert makepath and ephemeral and isinstance(value, bytes)
    if path in self._nodes:
      raise NodeExistsError
    self._nodes[path] = value
    self._data_changed(path)
    self._children_changed(os.path.dirname(path))

  def set(self, path, value):
    if path not in self._nodes:
      raise NoNodeError
    self._nodes[path] = value
    self._data_changed(path)

  def delete(self, path, recursive):
    if path not in self._nodes:
      raise NoNodeError
    del self._nodes[path]
    self._data_changed(path)
    self._children_changed(os.path.dirname(path))

  def _children_changed(self, folder):
    if folder in self._children_watches:
      children = [os.path.basename(p) for p in self._nodes if os.path.dirname(p) == folder]
      assert self._children_watches[folder](children) is None

  def _data_changed(self, path):
    if path in self._data_watches:
      assert self._data_watches[path](self._nodes.get(path), None) is None


class ConsultServiceDiscovery(unittest.TestCase):
  def setUp(self):
    self._fake = FakeConsul(blacklist=["blacklisted"])
    for target, value in (
      (f"{_MODULE}.consul.Client", lambda: self._fake),
      (f"{_MODULE}._RETRY_MAX_BACKOFF_SECS", 0),
    ):
      patch = mock.patch(target, value)
      patch.start()
      self.addCleanup(patch.stop)
    self._discovery = service_discovery.ConsulServiceDiscovery("unique_id", retry_time_secs=0)

  def test_basic(self):
    self._discovery.register("server", 0, "192.168.0.1:1001")
    self._discovery.register("server", 1, "192.168.0.2:1002")

    self.assertEqual(
      self._discovery.query("server"), {0: "192.168.0.1:1001", 1: "192.168.0.2:1002"}
    )

    self._discovery.deregister("server", 0, "192.168.0.1:1001")
    self._discovery.deregister("server", 1, "192.168.0.2:1002")
    self.assertEqual(self._discovery.query("server"), {})
    self._discovery.close()

  def test_duplicate_registration(self):
    self._discovery.register("server", 0, "192.168.0.1:1001")
    self._discovery.register("server", 0, "192.168.0.1:1002")

    self.assertEqual(self._discovery.query("server"), {0: "192.168.0.1:1002"})

  def test_multi_names(self):
    self._discovery.register("ps", 0, "192.168.0.1:1001")
    self._discovery.register("worker", 0, "192.168.0.1:1002")

    self.assertEqual(self._discovery.query("ps"), {0: "192.168.0.1:1001"})
    self.assertEqual(self._discovery.query("worker"), {0: "192.168.0.1:1002"})
    self.assertEqual(self._discovery.query("other"), {})

  def test_retry(self):
    lookup = mock.Mock(side_effect=socket.timeout)
    self._fake.lookup = lookup

    with self.assertRaises(socket.timeout):
      self._discovery.query("server")

    self.assertEqual(lookup.call_count, 5)
    lookup.assert_called_with("unique_id", timeout=15)

  def test_retry_succeeds(self):
    results = [socket.timeout, ConnectionRefusedError, []]
    self._fake.lookup = mock.Mock(side_effect=results)

    self.assertEqual(self._discovery.query("server"), {})

  def test_registration_failed(self):
    with self.assertRaisesRegex(OSError, "This machine is blacklisted by consul."):
      self._discovery.register("server", 0, "blacklisted:1001")

  def test_invalid_addr(self):
    for addr in ("no_port", "::1:80", "[::1]:80", ""):
      with self.assertRaises(ValueError) as context:
        self._discovery.register("server", 0, addr)
      self.assertEqual(str(context.exception), f"Invalid addr: {addr}")
    with self.assertRaisesRegex(ValueError, "70000"):
      self._discovery.register("server", 0, "h:70000")


class TfConfigServiceDiscoveryTest(unittest.TestCase):
  def _config(self, task_type, index, chief=True):
    cluster = {"ps": ["h1:1", "h2:1"], "worker": ["h3:1", "h4:1", "h5:1"]}
    if chief:
      cluster["chief"] = ["h0:1"]
    return {"cluster": cluster, "task": {"type": task_type, "index": index}}

  def test_tf_conf_sd(self):
    discovery = service_discovery.TfConfigServiceDiscovery(self._config("worker", 1))

    self.assertEqual(discovery.query("ps"), {0: "h1:1", 1: "h2:1"})
    self.assertEqual(discovery.query("worker"), {0: "h0:1", 1: "h3:1", 2: "h4:1", 3: "h5:1"})
    self.assertEqual(discovery.addr, "h4:1")
    self.assertEqual(discovery.server_type, "worker")
    self.assertEqual(discovery.index, 2)

  def test_chief_and_ps(self):
    chief = service_discovery.TfConfigServiceDiscovery(self._config("chief", 0))
    ps = service_discovery.TfConfigServiceDiscovery(self._config("ps", 1))

    self.assertEqual((chief.server_type, chief.index, chief.addr), ("worker", 0, "h0:1"))
    self.assertEqual((ps.server_type, ps.index, ps.addr), ("ps", 1, "h2:1"))

  def test_no_chief(self):
    discovery = service_discovery.TfConfigServiceDiscovery(self._config("worker", 1, chief=False))

    self.assertEqual(discovery.query("worker"), {0: "h3:1", 1: "h4:1", 2: "h5:1"})
    self.assertEqual(discovery.index, 1)

  def test_register_changes_nothing(self):
    discovery = service_discovery.TfConfigServiceDiscovery(self._config("worker", 1))
    discovery.register("ps", 7, "h:1")
    discovery.deregister("ps", 0, "h1:1")

    self.assertEqual(discovery.query("ps"), {0: "h1:1", 1: "h2:1"})

  def test_unknown_name(self):
    discovery = service_discovery.TfConfigServiceDiscovery(self._config("worker", 1))
    with self.assertRaisesRegex(ValueError, "^name must be ps/worker$"):
      discovery.query("chief")

  def test_malformed(self):
    for tf_config in (
      None, [], {}, {"cluster": {}}, {"cluster": []}, {"cluster": {"ps": "h:1"}},
      {"cluster": {"ps": [1]}},
    ):  # fmt: skip
      with self.assertRaisesRegex(ValueError, "TF_CONFIG"):
        service_discovery.TfConfigServiceDiscovery(tf_config)

  def test_malformed_task(self):
    for task in (None, {}, {"type": "ps"}, {"type": "ps", "index": "x"}):
      config = {**self._config("ps", 0), "task": task}
      with self.assertRaisesRegex(ValueError, "TF_CONFIG"):
        service_discovery.TfConfigServiceDiscovery(config).index  # noqa: B018
    with self.assertRaisesRegex(ValueError, "task ps:2"):
      service_discovery.TfConfigServiceDiscovery(self._config("ps", 2)).addr  # noqa: B018


class ZKServiceDiscoveryTest(unittest.TestCase):
  def setUp(self):
    self._fake = FakeKazooClient()
    patch = mock.patch(f"{_MODULE}.MonolithKazooClient", lambda servers: self._fake)
    patch.start()
    self.addCleanup(patch.stop)

  def _discovery(self):
    discovery = service_discovery.ZKServiceDiscovery("test_model")
    self.addCleanup(discovery.close)
    return discovery

  def test_basic(self):
    discovery = self._discovery()
    discovery.register("server", 0, "192.168.0.1:1001")
    discovery.register("server", 1, "192.168.0.2:1002")

    self.assertEqual(discovery.query("server"), {0: "192.168.0.1:1001", 1: "192.168.0.2:1002"})

    discovery.deregister("server", 0, "192.168.0.1:1001")
    discovery.deregister("server", 1, "192.168.0.2:1002")
    self.assertEqual(discovery.query("server"), {})

  def test_duplicate_registration(self):
    discovery = self._discovery()
    discovery.register("server", 0, "192.168.0.1:1001")
    discovery.register("server", 0, "192.168.0.1:1002")

    self.assertEqual(discovery.query("server"), {0: "192.168.0.1:1002"})

  def test_duplicate_registration_stops_the_first_thread(self):
    with mock.patch(f"{_MODULE}._ZK_REGISTRATION_PERIOD", 0.01):
      discovery = self._discovery()
      discovery.register("server", 0, "old:1")
      (first,) = discovery._threads.values()
      discovery.register("server", 0, "new:1")

      self.assertFalse(first.thread.is_alive())
      self._fake.set("/monolith/test_model/server.0", b"wrongdata")
      wait_until(lambda: discovery.query("server") == {0: "new:1"})

  def test_multi_names(self):
    discovery = self._discovery()
    discovery.register("ps", 0, "192.168.0.1:1001")
    discovery.register("worker", 0, "192.168.0.1:1002")

    self.assertEqual(discovery.query("ps"), {0: "192.168.0.1:1001"})
    self.assertEqual(discovery.query("worker"), {0: "192.168.0.1:1002"})
    self.assertEqual(discovery.query("other"), {})

  def test_periodic_registration(self):
    with mock.patch(f"{_MODULE}._ZK_REGISTRATION_PERIOD", 0.01):
      discovery = self._discovery()
      discovery.register("server", 0, "192.168.0.1:1001")
      self._fake.set("/monolith/test_model/server.0", b"wrongdata")

      wait_until(lambda: discovery.query("server") == {0: "192.168.0.1:1001"})

  def test_listener(self):
    discovery = self._discovery()
    discovery.register("server", 0, "192.168.0.1:1001")
    self._fake.set("/monolith/test_model/server.0", b"wrongdata")
    listener = self._fake.listener
    self.assertIsInstance(listener, service_discovery.ZKListener)

    for state in (KazooState.CONNECTED, KazooState.SUSPENDED, KazooState.CONNECTED):
      listener(state)
    (thread,) = discovery._threads.values()
    self.assertFalse(thread.wakeup.is_set())
    self.assertEqual(discovery.query("server"), {0: "wrongdata"})

    listener(KazooState.LOST)
    listener(KazooState.CONNECTED)
    wait_until(lambda: discovery.query("server") == {0: "192.168.0.1:1001"})

  def test_query_returns_a_copy(self):
    discovery = self._discovery()
    discovery.register("server", 0, "192.168.0.1:1001")
    discovery.query("server").clear()

    self.assertEqual(discovery.query("server"), {0: "192.168.0.1:1001"})

  def test_deregister_unknown(self):
    self._discovery().deregister("server", 5, "192.168.0.1:1001")

  def test_node_that_comes_back_is_seen(self):
    discovery = self._discovery()
    for addr in ("192.168.0.1:1001", "192.168.0.1:1002"):
      discovery.register("server", 0, addr)
      self.assertEqual(discovery.query("server"), {0: addr})
      discovery.deregister("server", 0, addr)
      self.assertEqual(discovery.query("server"), {})

  def test_foreign_and_empty_nodes_are_ignored(self):
    discovery = self._discovery()
    for name, value in (("nodot", b"a:1"), ("ps.x", b"a:1"), ("ps.0", b""), ("ps.1", b"a:1")):
      self._fake.create(f"/monolith/test_model/{name}", value, True, True)

    self.assertEqual(discovery.query("ps"), {1: "a:1"})

  def test_close_stops_threads_and_may_be_repeated(self):
    discovery = self._discovery()
    discovery.register("server", 0, "192.168.0.1:1001")
    (thread,) = discovery._threads.values()
    self.assertTrue(thread.thread.daemon)

    discovery.close()
    discovery.close()

    self.assertFalse(thread.thread.is_alive())
    with self.assertRaisesRegex(RuntimeError, "closed"):
      discovery.register("server", 0, "192.168.0.1:1001")

  def test_failure_in_the_constructor(self):
    self._fake.start = mock.Mock(side_effect=TimeoutError("no server"))
    self._fake.stop = mock.Mock()

    with self.assertRaisesRegex(TimeoutError, "no server"):
      service_discovery.ZKServiceDiscovery("test_model")
    self._fake.stop.assert_called_once()

  def test_del_does_not_raise(self):
    service_discovery.ZKServiceDiscovery.__new__(service_discovery.ZKServiceDiscovery).__del__()


class MLPServiceDiscoveryTest(unittest.TestCase):
  def setUp(self):
    self._server = socket.socket()
    self._server.bind(("127.0.0.1", 0))
    self._server.listen()
    self.addCleanup(self._server.close)
    self._port = self._server.getsockname()[1]
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("MLP_", "MPI_", "OMPI_"))}
    env = {
      **clean,
      "YARN_INET_ADDR": "127.0.0.1",
      "MLP_ROLE": "worker",
      "MLP_ROLE_INDEX": "1",
      "MLP_PORT": "3334",
      "MLP_WORKER_NUM": "2",
      "MLP_WORKER_0_PRIMARY_HOST": "w0",
      "MLP_WORKER_0_PORT": "3333",
      "MLP_WORKER_1_PRIMARY_HOST": "w1",
      "MLP_WORKER_1_HOST": "w1-secondary",
      "MLP_WORKER_1_PORT": "3334",
      "MLP_PS_NUM": "1",
      "MLP_PS_0_PRIMARY_HOST": "127.0.0.1",
      "MLP_PS_0_PORT": str(self._port),
    }
    patch = mock.patch.dict(os.environ, env, clear=True)
    patch.start()
    self.addCleanup(patch.stop)
    self._discovery = service_discovery.MLPServiceDiscovery()

  def test_query(self):
    self.assertEqual(self._discovery.query("worker"), {0: "w0:3333", 1: "w1:3334"})
    self.assertEqual(self._discovery.query("ps"), {0: f"127.0.0.1:{self._port}"})
    self.assertEqual(self._discovery.query("chief"), {})
    self.assertEqual(self._discovery.addr, "127.0.0.1:3334")
    self.assertEqual((self._discovery.server_type, self._discovery.index), ("worker", 1))
    self.assertEqual(
      self._discovery.query_all(),
      {"ps": {0: f"127.0.0.1:{self._port}"}, "worker": {0: "w0:3333", 1: "w1:3334"}, "chief": {}},
    )

  def test_ps_that_does_not_answer(self):
    addr = f"127.0.0.1:{get_free_port()}"
    with mock.patch.dict(os.environ, {"MLP_PS_0_PORT": addr.rpartition(":")[2]}):
      discovery = service_discovery.MLPServiceDiscovery()
      with mock.patch(f"{_MODULE}._PS_PORT_TIMEOUT_SECS", 0.01):
        with self.assertRaisesRegex(AssertionError, f"^{addr} connect error!$"):
          discovery.query("ps")
      self.assertEqual(discovery.query("ps", skip_port_check=True), {0: addr})
      with mock.patch(f"{_MODULE}.check_port", side_effect=AssertionError("must not ask")):
        self.assertEqual(discovery.query_all()["ps"], {0: addr})

  def test_task_without_an_address(self):
    with mock.patch.dict(os.environ, {"MLP_WORKER_NUM": "3"}):
      discovery = service_discovery.MLPServiceDiscovery()
    for query in (lambda: discovery.query("worker"), discovery.query_all):
      with self.assertRaisesRegex(AssertionError, "no address of worker 2 in the environment"):
        query()

  def test_register_and_deregister(self):
    self._discovery.deregister("worker", 1, "w1:3334")
    self.assertEqual(self._discovery.query("worker"), {0: "w0:3333"})
    self.assertEqual(self._discovery._filters, {"worker:1"})

    for host in ("w1", "w1-secondary", "localhost", "127.0.0.1", "0.0.0.0", "local"):
      self._discovery.register("worker", 1, f"{host}:3334")
    self.assertEqual(self._discovery.query("worker"), {0: "w0:3333", 1: "w1:3334"})

  def test_wrong_registrations(self):
    for name, index, addr in (
      ("unknown", 0, "w0:3333"), ("worker", 2, "w1:3334"), ("worker", -1, "w1:3334"),
      ("worker", 1, "other:3334"), ("worker", 1, "w1:3335"),
    ):  # fmt: skip
      with self.assertRaises(AssertionError):
        self._discovery.register(name, index, addr)

  def test_deregister_all(self):
    self._discovery.deregister_all()

    self.assertEqual(self._discovery.query_all(), {"ps": {}, "worker": {}, "chief": {}})

  def test_close(self):
    self._discovery.close()

    self.assertEqual(self._discovery.query("worker"), {})
    self.assertEqual(self._discovery.query_all(), {})
    self.assertIsNone(self._discovery.server_type)
    self.assertIsNone(self._discovery.index)


class UtilsTest(unittest.TestCase):
  def test_deregister_all(self):
    fake = FakeConsul()
    with mock.patch(f"{_MODULE}.consul.Client", lambda: fake):
      discovery = service_discovery.ConsulServiceDiscovery("id", retry_time_secs=0)
      discovery.register("ps", 0, "192.168.0.1:1001")
      discovery.register("worker", 0, "192.168.0.1:1002")

      self.assertIsNone(service_discovery.deregister_all("id"))

      self.assertEqual(discovery.query_all(), {})

  def test_service_discovery_type(self):
    self.assertEqual(
      {t.name: t.value for t in service_discovery.ServiceDiscoveryType},
      {"PRIMUS": 1, "CONSUL": 2, "ZK": 3, "MLP": 4},
    )

  def test_unreachable_zookeeper(self):
    with mock.patch(
      f"{_MODULE}.MonolithKazooClient", lambda servers: _ImpatientKazooClient(servers)
    ), self.assertRaises(Exception) as context:  # fmt: skip
      service_discovery.ZKServiceDiscovery("job", f"127.0.0.1:{get_free_port()}")
    self.assertEqual(type(context.exception).__name__, "KazooTimeoutError")


class _ImpatientKazooClient(MonolithKazooClient):
  def start(self, timeout=0.5):
    super().start(timeout)


if __name__ == "__main__":
  unittest.main()
