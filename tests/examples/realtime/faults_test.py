"""Promises about events, on a real broker: what is killed or stands still loses no sample.

The short run; `make demo-realtime-faults` and `make soak` hurt every process of the whole system.
Also tests of `audit`, `broker`, `zookeeper` and `serving_directory`.
"""

import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import unittest

import pytest
from confluent_kafka import KafkaException, TopicPartition

from examples.realtime import broker
from examples.realtime.audit import audit_samples
from examples.realtime.generator import EventSender, World
from examples.realtime.processes import Command, Supervisor
from examples.realtime.serving_directory import ServingDirectory
from monolith.agent_service.backends import Container, ContainerServiceInfo, SavedModel, ZKBackend
from monolith.row_log import kafka_client, topics
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

_PARTITIONS = 2
_WINDOW_SECS, _LATENESS_SECS, _RATE = 2.0, 0.5, 0.5
_STILL_SECS = 3.0
# A request that an old broker leaves without an answer costs ten seconds.
_TIMEOUT_SECS = 300


def _audit(servers):
  return audit_samples(servers, _PARTITIONS, _WINDOW_SECS, _LATENESS_SECS, _RATE)


class FaultsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    try:
      cls.broker = broker.LocalBroker(cls.folder / "broker")
      cls.broker.start()
    except broker.BrokerError as error:
      if os.environ.get("CI") == "true":
        raise
      pytest.skip(str(error))
    cls.addClassCleanup(cls.broker.stop)
    names = (topics.IMPRESSIONS, topics.ACTIONS, topics.SAMPLES)
    cls.broker.create_topics(dict.fromkeys(names, _PARTITIONS))

  def _add(self, supervisor, module, *flags):
    arguments = [sys.executable, "-m", module]
    arguments += [f"--kafka_servers={self.broker.servers}", *flags]
    name = module.rpartition(".")[2]
    supervisor.add(Command(name, arguments))

  def test_samples_are_those_of_an_undisturbed_run_whatever_dies(self):
    supervisor = Supervisor(self.folder / "logs", restart_secs=0.2)
    self.addCleanup(supervisor.stop)
    self._add(supervisor, "examples.realtime.generator", "--rate=100")
    self._add(
      supervisor,
      "monolith.realtime.joiner",
      *(f"--window_secs={_WINDOW_SECS}", f"--lateness_secs={_LATENESS_SECS}"),
      *(f"--sample_rate={_RATE}", "--partitions=all", "--commit_secs=0.3"),
    )
    self._wait_for_samples(100)

    supervisor.kill("joiner")
    self._wait_for_samples(100)
    os.kill(supervisor["joiner"].pid, signal.SIGSTOP)
    time.sleep(_STILL_SECS)  # the fault itself
    os.kill(supervisor["joiner"].pid, signal.SIGCONT)
    self.broker.kill_broker()
    self.broker.start_broker()
    supervisor.kill("joiner")
    self._poison()
    self._wait_for_samples(200)
    supervisor["generator"].stop()

    wait_until(lambda: not _audit(self.broker.servers).missing, _TIMEOUT_SECS)
    result = _audit(self.broker.servers)
    self.assertEqual((result.missing, result.unexpected), ([], []))
    self.assertEqual(result.unreadable, 2)
    self.assertGreater(result.expected, 200)
    self.assertGreaterEqual(supervisor["joiner"].starts, 3)
    self.assertRegex(
      supervisor["joiner"].log_tail(100_000),
      f"message \\d+ of {topics.IMPRESSIONS}, partition 0, is skipped",
    )
    self._check_that_the_audit_can_fail(supervisor)

  def _check_that_the_audit_can_fail(self, supervisor):
    supervisor["joiner"].stop()
    sender, world, now = EventSender(self.broker.servers), World(), time.time()
    # Events of two times: those of the second end the windows of the first.
    for when in (now, now + 4 * _WINDOW_SECS):
      for item in range(20):
        sender.action(sender.impression(world, 1, item, when), when)
    self.assertEqual(sender.flush(), 0)

    result = _audit(self.broker.servers)

    # Besides impressions whose windows were open when the joiner ended.
    self.assertGreaterEqual(len(result.missing), 20)
    self.assertEqual(result.unexpected, [])

  def _wait_for_samples(self, count):
    """Returns when this number of samples more is in the topic."""
    consumer = kafka_client.make_consumer(self.broker.servers, "test")
    self.addCleanup(consumer.close)
    ends = []

    def have_come():
      try:
        ends.append(
          sum(
            consumer.get_watermark_offsets(TopicPartition(topics.SAMPLES, i), timeout=30)[1]
            for i in range(_PARTITIONS)
          )
        )
      except KafkaException:  # a broker that has just come back may not answer
        return False
      return ends[-1] >= ends[0] + count

    wait_until(have_come, _TIMEOUT_SECS)

  def _poison(self):
    producer = kafka_client.make_producer(self.broker.servers)
    for topic in (topics.IMPRESSIONS, topics.ACTIONS):
      producer.produce(topic, b"\xffpoison", "key", partition=0)
    self.assertEqual(producer.flush(60), 0)

  def test_directory_answers_while_zookeeper_is_away(self):
    backend = ZKBackend("test", self.broker.zookeeper)
    backend.start()
    self.addCleanup(backend.stop)
    container = Container("cluster", "entry_0")
    backend.report_service_info(container, ContainerServiceInfo("a:1", "a:2"))
    backend.sync_available_saved_models(container, {SavedModel("m", "entry")})
    directory = ServingDirectory("test", self.broker.zookeeper, "m")
    directory.start()
    self.addCleanup(directory.stop)
    wait_until(lambda: directory.find("entry") == ({"entry_0": "a:2"}, {}))

    self.broker.kill_zookeeper()
    found = directory.find("entry")
    self.broker.start_zookeeper()
    backend.report_service_info(container, ContainerServiceInfo("a:1", "a:3"))

    self.assertEqual(found, ({"entry_0": "a:2"}, {}))
    wait_until(lambda: directory.registered("entry") == {"entry_0": "a:3"})
    # One that is no longer registered may only have lost its session.
    directory.find("entry")
    backend.sync_available_saved_models(container, set())
    wait_until(lambda: directory.find("entry") == ({}, {"entry_0": "a:3"}))


class KraftTest(unittest.TestCase):
  def test_newer_brokers_need_no_zookeeper(self):
    folder = pathlib.Path(tempfile.mkdtemp())
    self.addCleanup(shutil.rmtree, folder)
    (folder / "home" / "libs").mkdir(parents=True)
    for name in ("kafka_2.13-3.7.0.jar", "kafka-raft-3.7.0.jar"):
      (folder / "home" / "libs" / name).touch()
    if shutil.which("java") is None:
      pytest.skip("needs Java: apt-get install default-jre-headless")

    local = broker.LocalBroker(folder / "data", str(folder / "home"))
    settings = dict(line.split("=", 1) for line in local.make_settings().splitlines())

    self.assertEqual(local.zookeeper, "")
    self.assertEqual(settings["process.roles"], "broker,controller")
    self.assertNotIn("zookeeper.connect", settings)
    controller = settings["controller.quorum.voters"].split("@")[1]
    self.assertEqual(
      settings["listeners"], f"PLAINTEXT://{local.servers},CONTROLLER://{controller}"
    )
    self.assertEqual(settings["advertised.listeners"], f"PLAINTEXT://{local.servers}")
    self.assertEqual(settings["transaction.state.log.replication.factor"], "1")


if __name__ == "__main__":
  unittest.main()
