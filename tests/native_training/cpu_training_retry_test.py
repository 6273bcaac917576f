"""Which failures of an attempt let a worker try again. The training itself is replaced."""

from __future__ import annotations

import os
import socket
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import cpu_training, native_task
from monolith.native_training.driver import run_record as training_run
from monolith.native_training.service_discovery import HostServiceDiscovery
from tests.free_ports import get_free_port


class _Server:
  """Something that listens, and is registered as parameter server 0."""

  def __init__(self, discovery):
    self._socket = socket.create_server(("127.0.0.1", 0))
    self.addr = f"127.0.0.1:{self._socket.getsockname()[1]}"
    discovery.register("ps", 0, self.addr)

  def close(self):
    self._socket.close()


class RetryTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = os.environ["TEST_TMPDIR"]
    self._discovery = HostServiceDiscovery(os.path.join(folder, "discovery"))
    self._config = cpu_training.DistributedCpuTrainingConfig(
      num_ps=1,
      model_dir=os.path.join(folder, "model"),
      max_retry_times=1,
      retry_wait_in_secs=0,
    )
    self._servers = []
    self.addCleanup(lambda: [server.close() for server in self._servers])
    # The chief is this process.
    chief = _Server(HostServiceDiscovery(os.path.join(folder, "chief")))
    self.addCleanup(chief.close)
    params = native_task.NativeTask.params()
    self._loop = cpu_training._WorkerLoop(self._config, self._discovery, params, chief.addr, None)

  def _start_server(self):
    self._servers.append(_Server(self._discovery))

  def _replace_server(self):
    self._servers[-1].close()
    self._start_server()

  def _run(self, *attempts):
    """Runs the loop; each attempt is a function. Returns the servers of each attempt."""
    clusters = []

    def train(config, params, cluster, *args):
      clusters.append(cluster["ps"])
      return attempts[len(clusters) - 1]()

    with mock.patch.object(cpu_training, "_do_worker_train", train):
      self.assertEqual(self._loop.run(), "trained")
    return clusters

  def _fail(self, error_type, lose_server=False):
    def attempt():
      if lose_server:
        self._replace_server()
      raise error_type(None, None, "an error")

    return attempt

  def test_any_error_of_a_lost_server(self):
    for error_type in (tf.errors.CancelledError, tf.errors.NotFoundError, tf.errors.InternalError):
      with self.subTest(error_type.__name__):
        self._start_server()

        clusters = self._run(self._fail(error_type, lose_server=True), lambda: "trained")

        self.assertEqual(clusters, [[server.addr] for server in self._servers[-2:]])

  def test_other_errors_are_raised_while_all_servers_are_there(self):
    self._start_server()

    with self.assertRaises(tf.errors.CancelledError):
      self._run(self._fail(tf.errors.CancelledError))

  def test_temporary_errors_are_free(self):
    self._start_server()
    types = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError)

    clusters = self._run(*[self._fail(error_type) for error_type in types], lambda: "trained")

    self.assertLen(clusters, 4)

  def test_more_changes_than_retries(self):
    self._start_server()
    lost = self._fail(tf.errors.UnavailableError, lose_server=True)

    with self.assertLogs("absl", "ERROR") as logs, self.assertRaises(tf.errors.UnavailableError):
      self._run(lost, lost)

    self.assertIn("none of 1 retries is left: start this worker 0 again", logs.output[-1])

  def test_addresses_that_an_older_job_left_are_no_failure(self):
    self._config.max_retry_times = 0
    self._discovery.register("ps", 0, f"127.0.0.1:{get_free_port()}")

    with mock.patch.object(
      training_run.RunWatch, "wait_for_servers", lambda *args: self._start_server()
    ):
      clusters = self._run(lambda: "trained")

    self.assertEqual(clusters, [[self._servers[0].addr]])

  def test_chief_writes_down_how_far_training_is(self):
    self._start_server()
    states = []

    self._run(lambda: states.append(training_run.read(self._config.model_dir)) or "trained")
    self._loop.run_watch.write_end(None)

    states.append(training_run.read(self._config.model_dir))
    self.assertEqual(
      [(run.ps_addrs, run.state.value) for run in states],
      [((self._servers[0].addr,), "running"), ((self._servers[0].addr,), "finished")],
    )


if __name__ == "__main__":
  absltest.main()
