"""Tests of `joiner`, `joiner_metrics`, `row_log/topics.py` and `row_log/kafka_client.py`.

The broker is a real one.
"""

import collections
import contextlib
import io
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from examples.realtime import broker
from idl.matrix.proto.example_pb2 import Example
from monolith.realtime.join_window import WindowOptions
from monolith.realtime.joiner import Joiner, JoinerOptions, main, parse_rates
from monolith.row_log import kafka_client, topics
from tests.native_training.data.mock_kafka import MockKafka
from tests.realtime.event_making import make_action, make_impression
from tests.wait_until import wait_until

_PARTITIONS = 2
_SECONDS = 120
_PER_SECOND = 20
# Ten seconds for each request that an old broker leaves without an answer, on a busy machine.
_END_SECS = 300


def _require_broker(folder: str) -> broker.LocalBroker:
  """Returns a broker that runs; skips the tests where none can be had, fails on CI."""
  try:
    result = broker.LocalBroker(folder)
    result.start()
    return result
  except broker.BrokerError as error:
    if os.environ.get("CI") == "true":
      raise
    pytest.skip(str(error))


def _partition(key: str) -> int:
  return int(key.split(".")[0]) % _PARTITIONS


def _events(first: int, last: int):
  """Yields `topic, key, value` of seconds `first` to `last`: every tenth impression is clicked."""
  for second in range(first, last):
    for i in range(_PER_SECOND):
      key = f"{second * _PER_SECOND + i}.r"
      yield topics.IMPRESSIONS, key, make_impression(key, second).SerializeToString()
      if i % 10 == 0:
        yield topics.ACTIONS, key, make_action(key, second + 3).SerializeToString()
    if second % 10 == 0:  # before its impression
      key = f"{(second + 1) * _PER_SECOND + 5}.r"
      yield topics.ACTIONS, key, make_action(key, second + 1).SerializeToString()


def _send(servers: str, names: dict, first: int, last: int) -> None:
  producer = kafka_client.make_producer(servers)
  for topic, key, value in _events(first, last):
    producer.produce(names[topic], value, key, partition=_partition(key))
  assert producer.flush(60) == 0


def _read_samples(servers: str, topic: str) -> collections.Counter:
  """Returns how often each sample, by id and label, is in a topic."""
  consumer = kafka_client.make_consumer(
    servers, "reader", {"enable.partition.eof": True, "isolation.level": "read_committed"}
  )
  consumer.assign([TopicPartition(topic, p, 0) for p in range(_PARTITIONS)])
  found, ended = collections.Counter(), set()
  while len(ended) < _PARTITIONS:
    for message in consumer.consume(1000, timeout=1):
      if message.error() is None:
        example = Example.FromString(message.value())
        found[example.line_id.req_id, example.label[0]] += 1
      elif message.error().code() == KafkaError._PARTITION_EOF:
        ended.add(message.partition())
  consumer.close()
  return found


def _topic_names(suffix: str) -> dict:
  return {t: t + suffix for t in (topics.IMPRESSIONS, topics.ACTIONS, topics.SAMPLES)}


def _send_end(servers: str, names: dict) -> None:
  """Sends one impression to each partition that ends all windows before it, and stays open."""
  producer = kafka_client.make_producer(servers)
  for p in range(_PARTITIONS):
    key = f"{p}.end"
    event = make_impression(key, 10 * _SECONDS).SerializeToString()
    producer.produce(names[topics.IMPRESSIONS], event, key, partition=p)
  assert producer.flush(60) == 0


def _expected_samples(last: int = _SECONDS) -> set:
  """Returns ids and labels of the samples that `_events` become, worked out by hand."""
  clicked, offsets = set(), {}
  nexts = [0] * _PARTITIONS
  for topic, key, _ in _events(0, last):
    if topic == topics.ACTIONS:
      clicked.add(key)
    else:
      partition = _partition(key)
      offsets[key] = f"{partition}:{nexts[partition]}"
      nexts[partition] += 1
  return {
    (f"{where}:p", 1.0) if key in clicked else (f"{where}:n", 0.0) for key, where in offsets.items()
  }


class _JoinerProcess:
  """A joiner in a process of its own."""

  def __init__(self, servers: str, names: dict, log: pathlib.Path, *flags: str, **popen):
    self._log = log
    with open(log, "ab") as file:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "monolith.realtime.joiner", f"--kafka_servers={servers}",
         f"--impressions_topic={names[topics.IMPRESSIONS]}",
         f"--actions_topic={names[topics.ACTIONS]}", f"--samples_topic={names[topics.SAMPLES]}",
         f"--group={names[topics.SAMPLES]}", "--window_secs=10", "--commit_secs=0.1",
         "--partitions=all", *flags],
        stdout=file, stderr=file, **popen,
      )  # fmt: skip

  def kill(self) -> None:
    self.process.send_signal(signal.SIGKILL)
    self.process.wait()

  def log(self) -> str:
    return self._log.read_text(errors="replace")


class JoinerTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.broker = _require_broker(os.path.join(cls.folder, "broker"))
    cls.servers = cls.broker.servers
    cls.sizes = kafka_client.make_consumer(cls.servers, "sizes")

  @classmethod
  def tearDownClass(cls):
    cls.sizes.close()
    cls.broker.stop()
    shutil.rmtree(cls.folder)

  def _make_topics(self) -> dict:
    names = _topic_names("." + self.id().rpartition(".")[2])
    self.broker.create_topics(dict.fromkeys(names.values(), _PARTITIONS))
    return names

  def _start(self, names: dict, *flags: str, **popen) -> _JoinerProcess:
    log = pathlib.Path(self.folder, names[topics.SAMPLES] + ".log")
    joiner = _JoinerProcess(self.servers, names, log, *flags, **popen)
    self.addCleanup(joiner.kill)
    return joiner

  def _size(self, topic: str) -> int:
    try:
      return sum(
        self.sizes.get_watermark_offsets(TopicPartition(topic, p), timeout=30)[1]
        for p in range(_PARTITIONS)
      )
    except KafkaException:  # while the broker is away
      return 0

  def test_killed_joiner_and_broker_leave_the_samples_of_an_undisturbed_run(self):
    names = self._make_topics()
    expected = _expected_samples()
    joiner = self._start(names)

    for part in range(3):
      first, last = part * _SECONDS // 3, (part + 1) * _SECONDS // 3
      _send(self.servers, names, first, last)
      # Somewhere in the middle: samples of this part have begun to come.
      wanted = int(len(expected) * (first + 12) / _SECONDS)
      wait_until(lambda wanted=wanted: self._size(names[topics.SAMPLES]) >= wanted, poll_secs=0.1)
      joiner.kill()
      if part == 1:
        self.broker.kill_broker()
        joiner = self._start(names)
        self.broker.start_broker()
      else:
        joiner = self._start(names)
    _send_end(self.servers, names)
    wait_until(lambda: self._size(names[topics.SAMPLES]) >= len(expected))
    joiner.process.send_signal(signal.SIGTERM)

    self.assertEqual(joiner.process.wait(_END_SECS), 0, joiner.log())
    found = _read_samples(self.servers, names[topics.SAMPLES])
    self.assertEqual(set(found), expected)
    self.assertEqual({k: n for k, n in found.items() if n > 1}, {})

  def test_poisoned_message_is_skipped_counted_and_named(self):
    names = self._make_topics()
    producer = kafka_client.make_producer(self.servers)
    producer.produce(names[topics.IMPRESSIONS], b"\xff poison", "x", partition=1)
    producer.flush(30)
    joiner = self._start(names, "--metrics_port=0")
    _send(self.servers, names, 0, 5)

    wait_until(lambda: self._size(names[topics.SAMPLES]) >= 9)
    port = re.search(r"metrics at http://127.0.0.1:(\d+)", joiner.log())[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
      metrics = answer.read().decode()

    self.assertIn("monolith_joiner_poisoned_total 1.0", metrics)
    self.assertRegex(metrics, r"monolith_joiner_joined_total (9|1\d)\.0")
    self.assertRegex(metrics, r'monolith_joiner_lag_messages\{partition="1",topic=')
    self.assertIn(
      f"message 0 of {names[topics.IMPRESSIONS]}, partition 1, is skipped", joiner.log()
    )

  def test_full_disk_stops_it_with_a_message_and_loses_nothing(self):
    names = self._make_topics()
    _send(self.servers, names, 0, 60)
    _send_end(self.servers, names)
    expected = _expected_samples(60)

    # Files cannot be made there, which is as good as a disk without room.
    full = self._start(names, "--memory_mb=0", "--spill_dir=/proc")

    self.assertEqual(full.process.wait(_END_SECS), 1, full.log())
    self.assertRegex(full.log(), "cannot keep open impressions in .*Nothing is lost")
    joiner = self._start(names, "--memory_mb=0")
    wait_until(lambda: self._size(names[topics.SAMPLES]) >= len(expected))
    joiner.process.send_signal(signal.SIGTERM)

    self.assertEqual(joiner.process.wait(_END_SECS), 0, joiner.log())
    found = _read_samples(self.servers, names[topics.SAMPLES])
    self.assertEqual(found, collections.Counter(expected))


class TransactionTest(unittest.TestCase):
  """Tests without a durable broker. The mock keeps no offsets of transactions: no restart here."""

  def test_samples_and_offsets_are_one_transaction_where_brokers_can(self):
    with MockKafka() as kafka:
      names = _topic_names("")
      for name in names.values():
        kafka.create_topic(name, _PARTITIONS)
      _send(kafka.servers, names, 0, 30)
      _send_end(kafka.servers, names)
      options = JoinerOptions(
        kafka.servers, window=WindowOptions(window_ms=10_000), partitions=[], commit_secs=0.1
      )
      expected = _expected_samples(30)

      joiner = Joiner(options)
      wait_until(lambda: joiner.step() == 0 and joiner.num_open() == _PARTITIONS)
      joiner.stop()
      joiner.run()

      self.assertTrue(joiner.is_transactional)
      self.assertEqual(joiner.counters().joined + joiner.counters().negatives, len(expected))
      self.assertEqual(
        _read_samples(kafka.servers, names[topics.SAMPLES]), collections.Counter(expected)
      )

  def test_a_broker_that_leaves_after_a_commit_does_not_end_it(self):
    with MockKafka() as kafka:
      for name in _topic_names("").values():
        kafka.create_topic(name, _PARTITIONS)
      joiner = Joiner(JoinerOptions(kafka.servers, partitions=[], commit_secs=0))
      self.addCleanup(joiner.close)
      away = KafkaException(KafkaError(KafkaError._TIMED_OUT))

      with mock.patch.object(joiner, "_end_of", side_effect=away) as asked:
        joiner.step()
      asked.assert_called()
      joiner.step()

      self.assertTrue(joiner.is_transactional)

  def test_partitions_that_are_none_are_refused(self):
    with MockKafka() as kafka:
      for name in _topic_names("").values():
        kafka.create_topic(name, _PARTITIONS)

      with self.assertRaisesRegex(ValueError, "partition 2 is asked for, but .* has 2"):
        Joiner(JoinerOptions(kafka.servers, partitions=[0, 2]))

  def test_a_port_of_metrics_that_is_taken_is_named(self):
    with MockKafka() as kafka, socket.create_server(("127.0.0.1", 0)) as taken:
      for name in _topic_names("").values():
        kafka.create_topic(name, _PARTITIONS)
      port = taken.getsockname()[1]

      with self.assertLogs("monolith.joiner", "ERROR") as logs:
        status = main([f"--kafka_servers={kafka.servers}", f"--metrics_port={port}"])

    self.assertEqual(status, 1)
    self.assertRegex(logs.output[-1], f"--metrics_port={port}: .*in use")

  def test_topics_of_different_sizes_are_refused(self):
    with MockKafka() as kafka:
      for name, partitions in zip(_topic_names("").values(), (2, 2, 3)):
        kafka.create_topic(name, partitions)

      with self.assertRaisesRegex(ValueError, "numbers of partitions are .*want equal"):
        Joiner(JoinerOptions(kafka.servers))

  def test_flags_that_make_no_sense_are_named(self):
    for flag, message in (
      ("--window_secs=nan", "--window_secs is nan, want a number of seconds"),
      ("--commit_secs=-1", "--commit_secs is -1.0, want a number of seconds"),
      ("--memory_mb=-1", "memory is -1048576 bytes, want none or more"),
      ("--spill_dir=/nowhere", "--spill_dir is '/nowhere', want a folder"),
    ):
      with self.subTest(flag), self.assertLogs("monolith.joiner", "ERROR") as logs:
        self.assertEqual(main(["--kafka_servers=a:1", flag]), 1)
      self.assertIn(message, logs.output[-1])
    with (
      self.assertRaises(SystemExit),
      contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
      main(["--kafka_servers=a:1", "--sample_rate=2"])
    self.assertIn("sample rate is 2.0, want 0 to 1", errors.getvalue())

  def test_rules_of_sampling_are_parsed(self):
    rates = parse_rates("0.1, channel:3=0.5,slot:200=0")

    self.assertEqual(rates.of(3, 200 << 48), 0.5)
    self.assertEqual(rates.of(1, 200 << 48), 0)
    self.assertEqual(rates.of(1, 1 << 48), 0.1)
    for bad in ("x", "user:3=0.1", "channel:a=1"):
      with self.assertRaisesRegex(ValueError, "want a rate"):
        parse_rates(bad)


if __name__ == "__main__":
  unittest.main()
