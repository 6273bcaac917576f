import contextlib
import http.server
import io
import json
import os
import shutil
import socket
import socketserver
import tempfile
import threading
import time
import unittest
from http import HTTPStatus
from unittest import mock
from urllib.parse import parse_qs, unquote, urlparse

from monolith.native_training import consul
from tests.wait_until import wait_until

_NODES = [{"Host": "10.0.0.1", "Port": 2222, "Tags": {"index": "0", "name": "ps"}}]


class _Agent:
  """A real HTTP server that behaves like an agent, on TCP or on a unix socket.

  `stop` and `start` are a restart of the agent: what is registered survives, as it does in Consul's
  data folder, but nothing passes its check before the next heartbeat.
  """

  def __init__(self, unix_path=None):
    self.services = {}
    self.passes = []
    self.passing = set()
    self.requests = []
    self.answers = {}  # part of a path → (status, body), instead of the usual answer
    self.hang = threading.Event()
    self.hung = threading.Event()
    self._unix_path = unix_path
    self._server = None
    if not unix_path:
      # Bound, never listening: the port stays ours, and refuses connections, while we are stopped.
      self._port_holder = socket.socket()
      self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
      self._port_holder.bind(("127.0.0.1", 0))
      self.port = self._port_holder.getsockname()[1]
    self.start()

  def start(self):
    self._release = threading.Event()
    agent = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        self._handle()

      def do_PUT(self):
        self._handle()

      def _handle(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        agent.requests.append((self.command, self.path))
        if agent.hang.is_set():
          agent.hung.set()
          agent._release.wait(60)
          self.close_connection = True
          return
        status, answer = agent.answer(urlparse(self.path), body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        # A client that was promised no body is gone by now.
        if answer:
          self.wfile.write(answer)

      def address_string(self):
        return "client"  # A unix socket has no peer address.

      def log_message(self, *args):
        pass

    class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
      request_queue_size = 64  # a full queue refuses on a unix socket, where TCP would wait

    if self._unix_path:
      # A killed agent leaves its socket's file behind.
      with contextlib.suppress(FileNotFoundError):
        os.remove(self._unix_path)
      self._server = UnixServer(self._unix_path, Handler)
    else:
      self._server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", self.port), Handler, bind_and_activate=False
      )
      self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
      self._server.server_bind()
      self._server.server_activate()
    # Closing the server then waits for requests inside.
    self._server.daemon_threads = False
    threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

  def stop(self):
    self._release.set()
    self._server.shutdown()
    self._server.server_close()
    self.passing.clear()

  def answer(self, url, body):
    for part, answer in self.answers.items():
      if part in url.path:
        return answer
    if url.path == "/v1/lookup/name":
      (name,) = parse_qs(url.query)["name"]
      nodes = [s for s in self.services.values() if s["name"] == name]
      return 200, json.dumps(nodes).encode()
    if url.path == "/v1/agent/service/register":
      service = json.loads(body)
      self.services[service["id"]] = service
      return 200, b""
    last = unquote(url.path.split("/")[-1])
    if url.path.startswith("/v1/agent/service/deregister/"):
      self.services.pop(last, None)
      return 200, b""
    if url.path.startswith("/v1/agent/check/pass/"):
      if last[len("service:") :] not in self.services:
        return 404, b"Unknown check"
      self.passes.append(last)
      self.passing.add(last)
      return 200, b""
    return 404, b"unknown path"

  def close(self):
    self.stop()
    if not self._unix_path:
      self._port_holder.close()


def _client(**env):
  names = ("CONSUL_HTTP_HOST", "TCE_HOST_IP", "CONSUL_HTTP_PORT")
  clean = {name: value for name, value in os.environ.items() if name not in names}
  with mock.patch.dict(os.environ, {**clean, **env}, clear=True):
    return consul.Client()


def _health_threads(service_id):
  return [t for t in threading.enumerate() if t.name == f"ConsulHealthCheck-{service_id}"]


class _FailureLog(io.StringIO):
  """Stands in for stderr; `enough` is set when `wanted` heartbeats have failed."""

  def __init__(self, wanted):
    super().__init__()
    self.enough = threading.Event()
    self._wanted = wanted

  @property
  def text(self):
    return self.getvalue()

  def write(self, text):
    written = super().write(text)
    if self.getvalue().count(", in _health_check") >= self._wanted:
      self.enough.set()
    return written


class ConsulTest(unittest.TestCase):
  @mock.patch("monolith.native_training.consul.HTTPConnection")
  def test_lookup(self, connection):
    response = connection.return_value.getresponse.return_value
    response.status = HTTPStatus.OK
    response.read.return_value = json.dumps(_NODES)

    self.assertEqual(consul.Client().lookup("name"), _NODES)
    connection.return_value.request.assert_called_once_with(
      "GET", "/v1/lookup/name?name=name&addr-family=dual-stack"
    )

  @mock.patch("monolith.native_training.consul.HTTPConnection")
  def test_register(self, connection):
    connection.return_value.getresponse.return_value.status = HTTPStatus.OK
    client = consul.Client()
    self.addCleanup(client.close)

    client.register("test_name", 10)

    self.assertTrue(_health_threads("test_name-10")[0].daemon)

  @mock.patch("monolith.native_training.consul.HTTPConnection")
  def test_deregister(self, connection):
    connection.return_value.getresponse.return_value.status = HTTPStatus.OK

    self.assertIsNone(consul.Client().deregister("test_name", 10))

  def test_host_from_environment(self):
    self.assertEqual(_client(CONSUL_HTTP_HOST="h", TCE_HOST_IP="i")._consul_host, "h")
    self.assertEqual(_client(TCE_HOST_IP="i")._consul_host, "i")
    client = _client()
    self.assertEqual((client._consul_host, client._consul_port), ("127.0.0.1", 2280))
    self.assertEqual(_client(CONSUL_HTTP_PORT="1234")._consul_port, 1234)
    for port in ("x", "70000"):
      with self.assertRaisesRegex(ValueError, f"CONSUL_HTTP_PORT is .*{port}"):
        _client(CONSUL_HTTP_PORT=port)

  def test_default_socket_is_chosen_only_if_it_is_a_socket(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    path = os.path.join(folder, "s")
    with mock.patch.object(consul.Client, "_consul_sock", path):
      with open(path, "w"):
        pass
      self.assertEqual(_client()._consul_host, "127.0.0.1")
      os.remove(path)
      with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)
        self.assertEqual(_client()._consul_host, path)
        self.assertEqual(_client(CONSUL_HTTP_HOST="h")._consul_host, "h")


class AgentTest(unittest.TestCase):
  """Everything against a server that really listens, here on TCP."""

  def setUp(self):
    self.agent, self.client = self._start()
    self.addCleanup(self.agent.close)
    self.addCleanup(self.client.close)

  def _start(self):
    agent = _Agent()
    return agent, _client(CONSUL_HTTP_HOST="127.0.0.1", CONSUL_HTTP_PORT=str(agent.port))

  def test_round_trip(self):
    self.client.register("job", 1234, tags={"index": 1, "name": "ps"})

    self.assertEqual(
      self.client.lookup("job"),
      [{
        "id": "job-1234", "name": "job", "port": 1234, "check": {"ttl": "60s"},
        "tags": ["index:1", "name:ps"],
      }],
    )  # fmt: skip
    self.assertIn(("GET", "/v1/lookup/name?name=job&addr-family=dual-stack"), self.agent.requests)

    self.client.deregister("job", 1234)

    self.assertEqual(self.client.lookup("job"), [])

  def test_no_tags_and_a_script(self):
    self.client.register("job", 1, check_script="true")

    self.assertEqual(
      self.agent.services["job-1"],
      {"id": "job-1", "name": "job", "port": 1, "check": {"interval": "30s", "script": "true"}},
    )
    self.assertEqual(_health_threads("job-1"), [])

  def test_names_are_quoted(self):
    name = "a b/c&d=é"
    self.client.register(name, 1)

    self.assertEqual(self.client.lookup(name)[0]["name"], name)

    wait_until(lambda: f"service:{name}-1" in self.agent.passes)
    self.client.deregister(name, 1)
    self.assertEqual(self.agent.services, {})

  def test_cached_lookup(self):
    self.client.register("job", 1)
    lookups = lambda: sum("lookup" in path for _, path in self.agent.requests)  # noqa: E731

    first = self.client.lookup("job", cachetime=60)
    second = self.client.lookup("job", cachetime=60)

    self.assertEqual(first, second)
    self.assertEqual(lookups(), 1)
    self.assertEqual(self.client.lookup("job"), first)
    self.assertEqual(lookups(), 2)
    with mock.patch("time.time", return_value=time.time() + 61):
      self.client.lookup("job", cachetime=60)
    self.assertEqual(lookups(), 3)

  def test_empty_answer_is_not_cached(self):
    self.assertEqual(self.client.lookup("job", cachetime=60), [])
    self.client.register("job", 1)

    self.assertEqual(len(self.client.lookup("job", cachetime=60)), 1)

  def test_first_cached_lookup_has_a_longer_timeout(self):
    with mock.patch.object(self.client, "_lookup", return_value=_NODES) as lookup:
      self.client.lookup("job", timeout=3, cachetime=60)
      lookup.assert_called_with("job", 30)
      self.client.lookup("job", timeout=3)
      lookup.assert_called_with("job", 3)

  def test_concurrent_cached_lookups(self):
    self.client.register("job", 1)
    results = []
    threads = [
      threading.Thread(target=lambda: results.append(self.client.lookup("job", cachetime=60)))
      for _ in range(8)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)

    self.assertEqual([len(r) for r in results], [1] * 8)

  def test_heartbeat_and_its_end(self):
    with mock.patch.object(consul, "_HEALTH_CHECK_PERIOD_SECS", 0.01):
      self.client.register("job", 1)
      (thread,) = _health_threads("job-1")
      wait_until(lambda: len(self.agent.passes) >= 3)
      self.assertEqual(self.agent.passes[0], "service:job-1")

      self.client.deregister("job", 1)

      thread.join(60)
      self.assertFalse(thread.is_alive())

  def test_register_again_keeps_one_heartbeat(self):
    self.client.register("job", 1)
    (first,) = _health_threads("job-1")
    self.client.register("job", 1)

    first.join(60)
    self.assertEqual(len(_health_threads("job-1")), 1)

    self.client.close()
    wait_until(lambda: not _health_threads("job-1"))

  def _heartbeat_through_a_restart(self, stop):
    """Stops the agent with `stop()`, waits for three failed heartbeats, starts it again."""
    failures = _FailureLog(wanted=3)
    with mock.patch.object(consul, "_HEALTH_CHECK_PERIOD_SECS", 0.01), \
        mock.patch.object(consul, "_HEALTH_CHECK_RETRY_SECS", 0.01), \
        contextlib.redirect_stderr(failures):  # fmt: skip
      self.client.register("job", 1)
      (thread,) = _health_threads("job-1")
      wait_until(lambda: "service:job-1" in self.agent.passing)

      stop()

      self.assertTrue(failures.enough.wait(60), failures.text)
      self.assertEqual(self.agent.passing, set())
      self.assertTrue(thread.is_alive())
      with self.assertRaises(OSError):
        self.client.lookup("job")

      self.agent.start()

      wait_until(lambda: "service:job-1" in self.agent.passing)
      self.assertEqual([s["id"] for s in self.client.lookup("job")], ["job-1"])
      self.assertEqual(_health_threads("job-1"), [thread])
      self.client.deregister("job", 1)
      thread.join(60)
      self.assertFalse(thread.is_alive())
    registrations = [path for _, path in self.agent.requests if path.endswith("/service/register")]
    self.assertEqual(len(registrations), 1)
    return failures.text

  def test_heartbeat_survives_a_restart_of_the_agent(self):
    errors = self._heartbeat_through_a_restart(self.agent.stop)

    self.assertIn("ConnectionRefusedError", errors)

  def test_heartbeat_survives_an_agent_that_goes_in_the_middle_of_a_request(self):
    def stop_with_a_heartbeat_inside():
      self.agent.hang.set()
      self.assertTrue(self.agent.hung.wait(60))
      self.agent.stop()
      self.agent.hang.clear()

    errors = self._heartbeat_through_a_restart(stop_with_a_heartbeat_inside)

    self.assertIn("RemoteDisconnected", errors)
    self.assertIn("ConnectionRefusedError", errors)

  def test_heartbeat_does_not_undo_a_deregistration_by_somebody_else(self):
    # A successor with the same index takes the address of its predecessor out of the agent; if
    # that one still lives, it must not come back.
    with mock.patch.object(consul, "_HEALTH_CHECK_PERIOD_SECS", 0.01):
      self.client.register("job", 1)
      wait_until(lambda: self.agent.passes)
      del self.agent.services["job-1"]
      beats = len(self.agent.requests)
      wait_until(lambda: len(self.agent.requests) > beats + 2)

    self.assertEqual(self.client.lookup("job"), [])

  def test_http_500(self):
    self.agent.answers = {"/v1/": (500, b"no leader")}

    self.assertEqual(self.client.lookup("job"), [])
    with self.assertRaisesRegex(consul.ConsulException, "no leader"):
      self.client.register("job", 1)
    with self.assertRaisesRegex(consul.ConsulException, "no leader"):
      self.client.deregister("job", 1)
    self.assertEqual(_health_threads("job-1"), [])

  def test_malformed_json(self):
    for body in (b'[{"Port": 1', b"", b"\xff", b'{"Port": 1}'):
      self.agent.answers = {"lookup": (200, body)}
      with self.assertRaisesRegex(consul.ConsulException, "lookup of 'job' gave"):
        self.client.lookup("job")

  def test_hung_server(self):
    self.agent.hang.set()

    start = time.monotonic()
    with self.assertRaises(socket.timeout):
      self.client.lookup("job", timeout=0.2)
    with mock.patch.object(consul, "_REGISTRATION_TIMEOUT_SECS", 0.2):
      with self.assertRaises(socket.timeout):
        self.client.register("job", 1)
      with self.assertRaises(socket.timeout):
        self.client.deregister("job", 1)
    self.assertLess(time.monotonic() - start, 30)
    self.assertEqual(_health_threads("job-1"), [])

  def test_heartbeat_does_not_hang_with_the_agent(self):
    failures = _FailureLog(wanted=2)
    with mock.patch.object(consul, "_HEALTH_CHECK_PERIOD_SECS", 0.01), \
        mock.patch.object(consul, "_HEALTH_CHECK_RETRY_SECS", 0.01), \
        contextlib.redirect_stderr(failures):  # fmt: skip
      self.client.register("job", 1)
      wait_until(lambda: self.agent.passes)

      with mock.patch.object(consul, "_REGISTRATION_TIMEOUT_SECS", 0.5):
        self.agent.hang.set()
        self.assertTrue(failures.enough.wait(60), failures.text)

      self.agent.hang.clear()
      before = len(self.agent.passes)
      wait_until(lambda: len(self.agent.passes) > before)
    self.assertIn("timed out", failures.text)

  def test_port_out_of_range(self):
    with self.assertRaisesRegex(ValueError, "port is 65536"):
      self.client.register("job", 65536)


class UnixAgentTest(AgentTest):
  """The same on a unix socket."""

  def _start(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    path = os.path.join(folder, "consul.sock")
    return _Agent(path), _client(CONSUL_HTTP_HOST=path)


class NoAgentTest(unittest.TestCase):
  def test_nobody_listens(self):
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      client = _client(CONSUL_HTTP_HOST="127.0.0.1", CONSUL_HTTP_PORT=str(s.getsockname()[1]))

      with self.assertRaises(OSError):
        client.lookup("job")
      with self.assertRaises(OSError):
        client.register("job", 1)

  def test_unresolvable_host(self):
    with self.assertRaises(OSError):
      _client(CONSUL_HTTP_HOST="host.invalid").lookup("job")

  def test_no_such_socket(self):
    with self.assertRaises(OSError):
      _client(CONSUL_HTTP_HOST="/no/such/socket").lookup("job")


if __name__ == "__main__":
  unittest.main()
