"""Tests of the clients in `freshness`."""

import contextlib
import http.server
import json
import threading
import unittest

from examples.realtime.freshness import Client, RequestLoad
from examples.realtime.generator import World
from tests.free_ports import get_free_port
from tests.wait_until import wait_until


class _Replica(contextlib.AbstractContextManager):
  """Answers predictions with one score; those that wait for `may_answer` stand still till then."""

  def __init__(self, score=0.5, may_answer=None):
    replica = self
    self.asked = 0

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        replica.asked += 1
        if may_answer is not None:
          may_answer.wait(60)
        content = json.dumps({"predictions": [[score]] * len(body["instances"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

      def log_message(self, *unused):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.address = f"127.0.0.1:{self._server.server_port}"
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def __exit__(self, *unused):
    self._server.shutdown()
    self._server.server_close()


class ClientTest(unittest.TestCase):
  def test_a_replica_is_asked_where_it_is_now(self):
    with _Replica(0.25) as first, _Replica(0.75) as second:
      places = iter([first.address, second.address, None])
      client = Client(lambda: next(places), "m")
      self.addCleanup(client.close)

      self.assertEqual(client.scores([b"a", b"b"]), [0.25, 0.25])
      self.assertEqual(client.scores([b"a"]), [0.75])
      with self.assertRaisesRegex(ConnectionError, "nobody says where"):
        client.scores([b"a"])


class RequestLoadTest(unittest.TestCase):
  def start(self, find):
    load = RequestLoad(World(), find, "m", rate=1000)
    load.start()
    self.addCleanup(load.stop)
    return load

  def test_one_retry_elsewhere_saves_a_request(self):
    dead = f"127.0.0.1:{get_free_port()}"
    with _Replica() as alive:
      load = self.start(lambda: ([dead, alive.address], []))

      wait_until(lambda: load.requests >= 20 and load.retried)
      load.stop()

    self.assertEqual(load.failed, 0)

  def test_a_replica_that_lost_its_registration_is_tried_at_last(self):
    dead = f"127.0.0.1:{get_free_port()}"
    with _Replica() as alive:
      load = self.start(lambda: ([dead], [alive.address]))

      wait_until(lambda: load.requests >= 20)
      load.stop()

    self.assertEqual(load.failed, 0)

  def test_a_replica_that_stands_still_holds_a_request_up_for_a_part_of_its_time(self):
    may_answer = threading.Event()
    self.addCleanup(may_answer.set)
    with _Replica(may_answer=may_answer) as still, _Replica() as alive:
      # With the real patience of two seconds: a busy machine would make the other one seem to stand
      # still, too, if it had to answer much sooner.
      load = self.start(lambda: ([still.address, alive.address], []))
      wait_until(lambda: still.asked and alive.asked >= 20)
      load.stop()
      may_answer.set()

    self.assertEqual(load.failed, 0)
    self.assertGreaterEqual(load.retried, 1)

  def test_a_request_that_nobody_answers_counts(self):
    dead = f"127.0.0.1:{get_free_port()}"
    load = self.start(lambda: ([dead], []))

    wait_until(lambda: load.failed)

    self.assertIn(dead, load.errors[0])


if __name__ == "__main__":
  unittest.main()
