"""Tests when a process that finds no servers waits, gives up or succeeds."""

from __future__ import annotations

import dataclasses
import os
import socket
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import service_discovery
from monolith.native_training.driver import run_record as training_run
from monolith.native_training.driver.run_record import State, TrainingRun
from monolith.native_training.driver.server import NodeAliveCheckerError, wait_until_reachable
from monolith.native_training.service_discovery import HostServiceDiscovery
from monolith.native_training.settings import training_config
from tests.free_ports import get_free_port


def _get_dead_addr():
  return f"127.0.0.1:{get_free_port()}"


class RecordTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(os.environ["TEST_TMPDIR"], "not", "there", "yet")

  def test_round_trip(self):
    run = TrainingRun("job", ("a:1", "b:2"), None, State.FAILED, "ValueError: no")
    self.assertIsNone(training_run.read(self._dir))

    training_run.write(self._dir, run)

    self.assertEqual(training_run.read(self._dir), run)

  def test_damaged_record_is_no_record(self):
    training_run.write(self._dir, TrainingRun("job", ("a:1",), 3))
    for text in ("", "{", "[]", '{"uuid": "job"}', '{"state": 7}', "\xff"):
      with open(os.path.join(self._dir, "training_run.json"), "w", encoding="latin-1") as f:
        f.write(text)
      with self.subTest(text), self.assertLogs("absl", "WARNING"):
        self.assertIsNone(training_run.read(self._dir))

  def test_same_run(self):
    run = TrainingRun("job", ("a:1",), 3)

    for other, is_same in (
      (TrainingRun("job", ("a:1",), 3, State.FINISHED), True),
      (TrainingRun("job", ("b:1",), 3), False),
      (TrainingRun("job", ("a:1",), 4), False),
      (TrainingRun("other", ("a:1",), 3), False),
    ):
      self.assertEqual(run.is_same(other), is_same)
    # A run is the same before any of its servers is known.
    self.assertTrue(TrainingRun("job", (), 3).is_same(run))
    self.assertFalse(TrainingRun("", (), 3).is_same(TrainingRun("", ("a:1",), 3)))


class ServerEndTest(absltest.TestCase):
  def test_a_server_ends_as_its_training_run_did(self):
    config = training_config.DistributedCpuTrainingConfig(
      model_dir=os.path.join(os.environ["TEST_TMPDIR"], "run"), uuid="job"
    )
    training_run.check_not_failed(config, "a:1")  # The chief has written nothing down.
    failed = TrainingRun("job", ("a:1",), None, State.FAILED, "ValueError: no such file")
    for run, addr in (
      (dataclasses.replace(failed, state=State.FINISHED), "a:1"),
      (dataclasses.replace(failed, uuid="other"), "a:1"),
      (failed, "b:2"),
    ):
      training_run.write(config.model_dir, run)
      training_run.check_not_failed(config, addr)

    training_run.write(config.model_dir, failed)
    with self.assertRaisesRegex(training_run.TrainingFailed, "ValueError: no such file"):
      training_run.check_not_failed(config, "a:1")


class RunWatchTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = os.environ["TEST_TMPDIR"]
    self._config = training_config.DistributedCpuTrainingConfig(
      model_dir=os.path.join(folder, "model"), uuid="job", retry_wait_in_secs=0
    )
    self._discovery = HostServiceDiscovery(os.path.join(folder, "discovery"))
    self._addr = _get_dead_addr()
    self._error = NodeAliveCheckerError(f"{self._addr} is unreachable", [self._addr])

  def _watch(self, discovery=None):
    watch = training_run.RunWatch(self._config, 10, discovery or self._discovery)
    watch.set_servers([self._addr])
    return watch

  def test_started_again_after_the_end(self):
    self._watch().write_end(None)

    # A new job in the same folder may be about to start: it gets time.
    self._watch().wait_for_servers(self._error, 89)
    with self.assertRaises(training_run.TrainingIsOver):
      self._watch().wait_for_servers(self._error, 90)

  def test_started_again_after_a_failure(self):
    self._watch().write_end(ValueError("bad data"))

    with self.assertRaisesRegex(
      NodeAliveCheckerError, f"{self._addr} is unreachable.*start the whole job.*ValueError: bad"
    ):
      self._watch().wait_for_servers(self._error, 90)

  def test_started_again_when_servers_died(self):
    with self.assertRaisesRegex(
      NodeAliveCheckerError, f"{self._addr} is unreachable since 90 s: .* worker 0"
    ):
      self._watch().wait_for_servers(self._error, 90)

  def test_an_attempt_that_fails_after_the_end_is_none(self):
    watch = self._watch()
    watch.check_not_over()
    watch.write_end(ValueError("bad data"))
    watch.check_not_over()

    watch.write_end(None)

    with self.assertRaises(training_run.TrainingIsOver):
      watch.check_not_over()

  def test_other_run_says_nothing(self):
    self._watch().write_end(None)
    other = training_run.RunWatch(self._config, 11, self._discovery)
    other.set_servers([self._addr])

    with self.assertRaisesRegex(NodeAliveCheckerError, "is unreachable since"):
      other.wait_for_servers(self._error, 90)

  def test_worker_that_has_trained_knows_at_once(self):
    watch = self._watch()
    watch.on_servers_answer(write=True)
    watch.wait_for_servers(self._error, 1000)

    self._watch().write_end(None)

    with self.assertRaises(training_run.TrainingIsOver):
      watch.wait_for_servers(self._error, 0)

  def test_patience_has_an_end(self):
    watch = self._watch()
    watch.on_servers_answer(write=False)

    watch.wait_for_servers(self._error, self._config.session_creation_timeout_secs - 1)
    with self.assertRaisesRegex(NodeAliveCheckerError, "is unreachable since 7200 s"):
      watch.wait_for_servers(self._error, self._config.session_creation_timeout_secs)

  def test_prescribed_servers_that_never_were_there(self):
    cluster = {"ps": [self._addr], "worker": ["127.0.0.1:1"]}
    discovery = service_discovery.TfConfigServiceDiscovery(
      {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    )

    self._watch(discovery).wait_for_servers(self._error, 1000)
    self._watch(discovery).on_servers_answer(write=True)
    with self.assertRaisesRegex(NodeAliveCheckerError, "is unreachable since 1000 s"):
      self._watch(discovery).wait_for_servers(self._error, 1000)

  def test_chief_alone_may_come_back(self):
    error = NodeAliveCheckerError("chief is unreachable", [_get_dead_addr()])

    self._watch().wait_for_servers(error, 1000)

  def test_cluster_that_is_never_complete(self):
    self._watch().write_end(None)
    watch = training_run.RunWatch(self._config, 10, self._discovery)

    watch.check_waiting(89)
    with self.assertRaises(training_run.TrainingIsOver):
      watch.check_waiting(90)

  def test_record_that_cannot_be_written(self):
    with (
      mock.patch.object(
        training_run, "write", side_effect=tf.errors.UnavailableError(None, None, "no disk")
      ),
      self.assertLogs("absl", "ERROR") as logs,
    ):
      self._watch().write_end(None)

    self.assertIn("training is finished", logs.output[0])


class WaitUntilReachableTest(absltest.TestCase):
  """Each test would take an hour if the call did not return for the right reason."""

  def test_returns_when_all_answer(self):
    discovery = HostServiceDiscovery(os.environ["TEST_TMPDIR"])
    with socket.create_server(("127.0.0.1", 0)) as server:
      addr = f"127.0.0.1:{server.getsockname()[1]}"
      discovery.register("ps", 0, addr)

      wait_until_reachable([addr], 3600, discovery)

  def test_returns_when_a_server_is_replaced(self):
    discovery = HostServiceDiscovery(os.environ["TEST_TMPDIR"])
    discovery.register("ps", 0, _get_dead_addr())

    wait_until_reachable([_get_dead_addr()], 3600, discovery)

  def test_returns_when_time_is_up(self):
    discovery = HostServiceDiscovery(os.environ["TEST_TMPDIR"])
    addr = _get_dead_addr()
    discovery.register("ps", 0, addr)

    wait_until_reachable([addr], 0.01, discovery)


if __name__ == "__main__":
  absltest.main()
