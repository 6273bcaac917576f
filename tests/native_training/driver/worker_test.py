"""Failures of an attempt after which a worker tries again, and what an attempt is told.

The training itself is replaced.
"""

from __future__ import annotations

import json
import os
import socket
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.training import monitored_session

from monolith.native_training import cpu_training, native_task
from monolith.native_training.driver import run_record as training_run
from monolith.native_training.driver import worker
from monolith.native_training.service_discovery import HostServiceDiscovery
from monolith.native_training.tables import ps_transfer
from tests.free_ports import get_free_port


class _NumbersTask(native_task.NativeTask):
  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors({"number": tf.constant([[1.0], [2.0]])}).repeat(3)

  def create_model_fn(self):
    raise AssertionError("features are written without a model")


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

  def test_only_features(self):
    self._start_server()
    self._config.only_feature_engineering = True

    with mock.patch.object(worker, "_do_worker_feature_engineering") as write:
      self.assertIsNone(self._loop.run())

    (_, _, cluster, task), _ = write.call_args
    self.assertEqual(cluster["ps"], [self._servers[0].addr])
    self.assertEqual(task, {"type": "chief", "index": 0})


class AttemptTest(absltest.TestCase):
  _CLUSTER = {"chief": ["c:1"], "ps": ["a:1", "b:1", "d:1"]}
  _TASK = {"type": "chief", "index": 0}

  def test_cluster_is_described_to_estimator_only_meanwhile(self):
    with self.assertRaisesRegex(ValueError, "inside"):
      with worker._tf_config(self._CLUSTER, self._TASK):
        described = json.loads(os.environ["TF_CONFIG"])
        raise ValueError("inside")

    self.assertEqual(described, {"cluster": self._CLUSTER, "task": self._TASK})
    self.assertNotIn("TF_CONFIG", os.environ)

  def test_sessions_look_for_the_chief_often_only_meanwhile(self):
    original = monitored_session.sm.SessionManager

    with worker._frequent_session_polls():
      manager = monitored_session.sm.SessionManager(graph=tf.Graph())
      self.assertEqual(manager._recovery_wait_secs, 1)

    self.assertIs(monitored_session.sm.SessionManager, original)

  def test_servers_are_near_if_all_have_this_machine_s_address(self):
    task = {"type": "worker", "index": 1}
    for servers, want in (
      (["h:1"], True),
      (["h:1", "h:4"], True),
      (["h:1", "g:1"], False),
      (["g:2"], False),
      ([], False),
    ):
      with worker._near_servers({"worker": ["g:2", "h:2"], "ps": servers}, task):
        self.assertEqual(ps_transfer.are_servers_near(), want, servers)
    with mock.patch.dict(os.environ, {"MONOLITH_SHARED_MEMORY": "0"}):
      with worker._near_servers({"worker": ["g:2", "h:2"], "ps": ["h:1"]}, task):
        self.assertFalse(ps_transfer.are_servers_near())
    self.assertFalse(ps_transfer.are_servers_near())

  def test_variables_live_on_servers_and_the_rest_here(self):
    config = cpu_training.DistributedCpuTrainingConfig(num_ps=3)
    device_fn = worker._get_replica_device_setter(config, self._CLUSTER, self._TASK)
    with tf.Graph().as_default(), tf.compat.v1.device(device_fn):
      variables = [tf.compat.v1.get_variable(f"v{i}", []) for i in range(3)]
      constant = tf.constant(1)

    self.assertEqual([v.device for v in variables], [f"/job:ps/task:{i}" for i in range(3)])
    self.assertEqual(constant.device, "/job:chief/task:0")

  def test_benchmark_trains_on_all_servers_and_keeps_the_fastest(self):
    config = cpu_training.DistributedCpuTrainingConfig(
      num_ps=2, num_extra_ps=1, num_workers=1, model_dir="/model", mode="eval"
    )

    def train(config, params, cluster, task):
      self.assertEqual((config.num_ps, config.mode), (3, "train"))
      self.assertEqual(config.model_dir, "/model/benchmark_dir")
      self.assertEqual(config.operation_timeout_in_ms, 30500)
      self.assertEqual(params.bm_config.num_ps_required, 2)
      self.assertEqual(params.bm_config.benchmark_secs, 0.5)
      params.bm_config.ps_list[:] = ["d:1", "a:1"]

    with mock.patch.object(cpu_training, "_EXTRA_PS_BENCHMARK_SECS", 0.5), \
        mock.patch.object(worker, "_do_worker_train", train):  # fmt: skip
      cluster = worker._run_ps_benchmark(config, self._CLUSTER, self._TASK)

    self.assertEqual(cluster, {"chief": ["c:1"], "ps": ["d:1", "a:1"]})
    self.assertEqual((config.num_ps, config.model_dir), (2, "/model"))
    self.assertLen(self._CLUSTER["ps"], 3)

  def test_only_native_tasks(self):
    params = mock.Mock()
    params.instantiate.return_value = "a task"

    with self.assertRaisesRegex(ValueError, "only support NativeTask. Got a task"):
      worker._do_worker_train(
        cpu_training.DistributedCpuTrainingConfig(), params, self._CLUSTER, self._TASK
      )

  def test_features_are_written_on_servers(self):
    servers = [tf.distribute.Server.create_local_server() for _ in range(2)]
    addrs = [server.target[len("grpc://") :] for server in servers]
    folder = os.path.join(os.environ["TEST_TMPDIR"], "model")
    config = cpu_training.DistributedCpuTrainingConfig(num_ps=1, model_dir=folder)

    worker._do_worker_feature_engineering(
      config, _NumbersTask.params(), {"chief": addrs[:1], "ps": addrs[1:]}, self._TASK
    )

    (name,) = os.listdir(os.path.join(folder, "features"))
    self.assertStartsWith(name, "chief_")
    self.assertGreater(os.path.getsize(os.path.join(folder, "features", name)), 0)


class EndTest(absltest.TestCase):
  """How the chief ends training for all."""

  def setUp(self):
    super().setUp()
    self._config = cpu_training.DistributedCpuTrainingConfig(num_ps=1)
    self._loop = mock.Mock(cluster={"ps": ["a:1"]}, task={"type": "chief", "index": 0})
    self._loop.is_over = False
    for name in ("maybe_finish_application", "maybe_kill_application"):
      patch = mock.patch.object(worker.yarn_runtime, name)
      setattr(self, name, patch.start())
      self.addCleanup(patch.stop)
    # As programs do.
    patch = mock.patch.object(cpu_training, "_shutdown_ps")
    self._shutdown_ps = patch.start()
    self.addCleanup(patch.stop)

  def _end(self, error=None):
    worker._end_training(self._config, mock.Mock(), self._loop, "grpc://c:1", "c:1", error)

  def test_success(self):
    self._end()

    self._shutdown_ps.assert_called_once_with(
      "grpc://c:1", {"ps": ["a:1"]}, {"type": "chief", "index": 0}, 1
    )
    self._loop.run_watch.write_end.assert_called_once_with(None)
    self.maybe_finish_application.assert_called_once_with()

  def test_failure_is_told_to_the_platform(self):
    error = ValueError("bad data")

    self._end(error)

    self._loop.run_watch.write_end.assert_called_once_with(error)
    self.maybe_kill_application.assert_called_once_with("bad data")
    self.maybe_finish_application.assert_not_called()

  def test_error_of_the_shutdown_does_not_hide_that_of_training(self):
    self._shutdown_ps.side_effect = tf.errors.UnavailableError(None, None, "gone")

    with self.assertLogs("absl", "ERROR"):
      self._end(ValueError("bad data"))
    self.maybe_kill_application.assert_called_once_with("bad data")
    with self.assertRaises(tf.errors.UnavailableError):
      self._end()

  def test_servers_of_realtime_training_go_on(self):
    self._config.enable_realtime_training = True
    self._end()
    self._shutdown_ps.assert_not_called()

    self._config.force_shutdown_ps = True
    self._end()
    self._shutdown_ps.assert_called_once()

  def test_nothing_to_stop(self):
    self._loop.is_over = True
    self._end()
    self._loop.is_over, self._loop.cluster = False, {}
    self._end()

    self._shutdown_ps.assert_not_called()


if __name__ == "__main__":
  absltest.main()
