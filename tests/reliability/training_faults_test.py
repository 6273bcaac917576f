"""Promise: a training process that is killed comes back, and what is wrong is said."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import unittest

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training import cpu_training, graph_estimator, utils
from tests.free_ports import get_free_port
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Far more than needed, for a busy machine.
_TIMEOUT_SECS = 600
_SERVER_KILLS = 20


class _Training:
  """Processes of one training run, by role and index.

  Args:
    folder: where checkpoints, the discovery and logs go; must not exist.
    num_ps: parameter servers.
    num_workers: workers, the chief included.
    fixed: whether addresses are prescribed, so that a process that is started again has its own.
    flags: what all processes get.
  """

  def __init__(self, folder, num_ps=2, num_workers=1, fixed=False, **flags):
    self.folder = folder
    self.model_dir = os.path.join(folder, "model")
    self.num_ps, self.num_workers = num_ps, num_workers
    self.flags = {
      "model_dir": self.model_dir,
      "discovery_dir": os.path.join(folder, "discovery"),
      "num_ps": num_ps,
      "num_workers": num_workers,
      **flags,
    }
    self.processes = {}
    self.cluster = None
    if fixed:
      self.cluster = {
        "ps": [f"127.0.0.1:{get_free_port()}" for _ in range(num_ps)],
        "worker": [f"127.0.0.1:{get_free_port()}" for _ in range(num_workers)],
      }
    os.makedirs(folder)

  def roles(self):
    return [("ps", i) for i in range(self.num_ps)] + [
      ("worker", i) for i in range(self.num_workers)
    ]

  def start(self, role, **flags):
    server_type, index = role
    values = {**self.flags, "server_type": server_type, "index": index, **flags}
    if self.cluster is not None:
      task = {"type": server_type, "index": index}
      values["tf_config"] = json.dumps({"cluster": self.cluster, "task": task})
    environment = {**os.environ, "CLOUDNATIVE_INET_ADDR": "127.0.0.1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with open(self._log_path(role), "ab") as log:
      self.processes[role] = subprocess.Popen(
        [sys.executable, "-m", "tests.reliability.training_process"]
        + [f"--{name}={value}" for name, value in values.items()],
        cwd=_ROOT,
        env=environment,
        stdout=log,
        stderr=log,
      )

  def start_all(self):
    for role in self.roles():
      self.start(role)

  def kill(self, role):
    self.processes[role].send_signal(signal.SIGKILL)
    self.processes[role].wait()

  def _log_path(self, role):
    return os.path.join(self.folder, f"{role[0]}_{role[1]}.log")

  def log(self, role):
    with open(self._log_path(role), errors="replace") as f:
      return f.read()

  def registered(self, server_type):
    folder = os.path.join(self.flags["discovery_dir"], server_type)
    return [pathlib.Path(folder, name).read_text() for name in os.listdir(folder)]

  def saved_step(self):
    checkpoint = tf.train.latest_checkpoint(self.model_dir)
    return 0 if checkpoint is None else int(checkpoint.rsplit("-", 1)[1])

  def wait_for_step(self, step):
    def reached():
      self._check_alive()
      return self.saved_step() >= step

    wait_until(reached, timeout_secs=_TIMEOUT_SECS)

  def _check_alive(self):
    for role, process in self.processes.items():
      if process.poll() not in (None, 0):
        raise AssertionError(f"{role} ended with {process.poll()}:\n{self.log(role)[-5000:]}")

  def wait(self):
    def all_ended():
      self._check_alive()
      return all(process.poll() is not None for process in self.processes.values())

    wait_until(all_ended, timeout_secs=_TIMEOUT_SECS)

  def close(self):
    for process in self.processes.values():
      if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


class TrainingFaultsTest(tf.test.TestCase):
  def _training(self, name="", **kwargs):
    training = _Training(os.path.join(utils.get_test_tmp_dir(), self.id() + name), **kwargs)
    self.addCleanup(training.close)
    return training

  def _read_rows(self, training):
    """Returns the values of ids 0 to 3 in the newest checkpoint."""
    from tests.reliability import training_process

    conf = cpu_training.CpuTrainingConfig(num_ps=training.num_ps)
    with cpu_training._local_cluster(training.num_ps) as (session_config, _):
      driver = cpu_training.CpuTraining(conf, training_process.create_params().instantiate())
      estimator = graph_estimator.Estimator(
        driver.create_model_fn(),
        config=graph_estimator.RunConfig(
          model_dir=training.model_dir, session_config=session_config
        ),
      )
      predictions = estimator.predict(driver.create_input_fn(graph_estimator.ModeKeys.PREDICT))
      return np.array(next(predictions))

  def test_killed_worker_comes_back(self):
    training = self._training(num_ps=1, num_workers=2, max_steps=150)
    training.start_all()
    training.wait_for_step(20)

    training.kill(("worker", 1))
    training.start(("worker", 1))
    training.wait()

    self.assertGreaterEqual(training.saved_step(), 150)

  def _test_killed_ps(self, partial_recovery):
    training = self._training(num_ps=2, max_steps=120, partial_recovery=partial_recovery)
    training.start_all()
    training.wait_for_step(40)

    training.kill(("ps", 1))
    training.start(("ps", 1))
    training.wait()

    self.assertGreaterEqual(training.saved_step(), 120)
    self.assertIn("Training was interrupted.", training.log(("worker", 0)))
    return self._read_rows(training)

  def test_killed_ps_with_partial_recovery(self):
    rows = self._test_killed_ps(partial_recovery=True)

    # Ids 0 and 2 live on the server that survived, with the global step: no update of them is lost.
    # The other server lost at most what it learnt since the newest checkpoint, 20 steps.
    self.assertEqual(rows[0], rows[2])
    self.assertEqual(rows[1], rows[3])
    self.assertGreaterEqual(rows[0], 120)
    self.assertBetween(rows[0] - rows[1], 0, 21)

  def test_killed_ps_without_partial_recovery(self):
    rows = self._test_killed_ps(partial_recovery=False)

    # Everything went back to the same checkpoint.
    self.assertAllEqual(rows, [rows[0]] * 4)
    self.assertGreaterEqual(rows[0], 120)

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_servers_are_killed_again_and_again(self):
    """Promise: whichever server dies, and whenever, all workers recover."""
    rng = random.Random(os.getpid())
    # After the first checkpoint, two workers need at least 5.5 s for the other steps: a server is
    # killed before training is over. One that is started after that waits for a chief that never
    # comes.
    max_steps = 240
    for i in range(_SERVER_KILLS):
      training = self._training(
        name=str(i), num_ps=2, num_workers=2, max_steps=max_steps, prefetch=True, fixed=i % 2 == 1
      )
      training.start_all()
      training.wait_for_step(20)
      time.sleep(rng.uniform(0, 3))
      victim = ("ps", rng.randrange(2))
      training.kill(victim)
      time.sleep(rng.uniform(0, 5) if i else 0)

      training.start(victim)
      training.wait()

      self.assertGreaterEqual(training.saved_step(), max_steps)

  def test_killed_chief_resumes_at_the_saved_step(self):
    training = self._training(num_ps=1, max_steps=120)
    training.start_all()
    training.wait_for_step(40)

    training.kill(("worker", 0))
    saved = training.saved_step()
    training.start(("worker", 0))
    training.wait()

    self.assertIn(f"model.ckpt-{saved}", training.log(("worker", 0)))
    self.assertEqual(training.saved_step(), 120)
    self.assertAllEqual(self._read_rows(training), [120] * 4)

  def test_a_signal_lets_the_chief_save_before_it_ends_the_run(self):
    for signo in (signal.SIGTERM, signal.SIGINT):
      # Neither the limit nor the next checkpoint is ever reached.
      training = self._training(
        name=signo.name, num_ps=1, num_workers=2, max_steps=10**6, save_steps=10**6
      )
      training.start_all()
      chief, worker = training.processes["worker", 0], training.processes["worker", 1]
      begun = pathlib.Path(training.model_dir, "worker_1_has_started")
      wait_until(begun.exists, timeout_secs=_TIMEOUT_SECS)
      time.sleep(2)

      chief.send_signal(signo)

      self.assertEqual(chief.wait(timeout=_TIMEOUT_SECS), signo)
      # Not through: who starts failed processes again starts these.
      self.assertEqual(training.processes["ps", 0].wait(timeout=_TIMEOUT_SECS), 1)
      self.assertEqual(worker.wait(timeout=_TIMEOUT_SECS), 1)
      step = training.saved_step()
      self.assertGreater(step, 0, training.log(("worker", 0))[-3000:])
      reason = f"{signo.name} ended it. The newest checkpoint is {training.model_dir}/model.ckpt-"
      self.assertIn(reason, training.log(("worker", 1)))
      self.assertIn(reason, training.log(("ps", 0)))
      # On a busy machine a worker may still train while the chief saves.
      self.assertAllGreater(self._read_rows(training), 0)

  def test_a_signal_lets_a_worker_say_that_it_is_gone(self):
    training = self._training(num_ps=1, num_workers=2, max_steps=150)
    training.start_all()
    training.wait_for_step(20)

    training.processes["worker", 1].send_signal(signal.SIGTERM)
    self.assertEqual(training.processes.pop(("worker", 1)).wait(_TIMEOUT_SECS), signal.SIGTERM)
    # The chief would wait for it two minutes longer than this.
    training.wait()

    self.assertIn("All other workers had been finished.", training.log(("worker", 0)))

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_stopped_server_goes_on(self):
    training = self._training(num_ps=1, max_steps=100)
    training.start_all()
    training.wait_for_step(20)

    training.processes["ps", 0].send_signal(signal.SIGSTOP)
    time.sleep(20)
    training.processes["ps", 0].send_signal(signal.SIGCONT)
    training.wait()

    self.assertAllEqual(self._read_rows(training), [100] * 4)

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_random_start_order(self):
    training = self._training(num_ps=2, num_workers=2, max_steps=40)
    roles = training.roles()
    random.Random(os.getpid()).shuffle(roles)
    for role in roles:
      training.start(role)
      time.sleep(random.random())
    training.wait()

    self.assertGreaterEqual(training.saved_step(), 40)

  def test_servers_that_start_after_the_chief_cost_no_pause(self):
    training = self._training(num_ps=1, max_steps=20, fixed=True, retry_wait_secs=2 * _TIMEOUT_SECS)
    training.start(("worker", 0))
    message = f"{training.cluster['ps'][0]} is unreachable"
    wait_until(lambda: message in training.log(("worker", 0)), _TIMEOUT_SECS)

    training.start(("ps", 0))
    # A pause would be longer than this waits.
    training.wait()

    self.assertEqual(training.saved_step(), 20)

  def test_processes_started_again_after_the_end_are_content(self):
    training = self._training(num_ps=1, num_workers=2, max_steps=20)
    training.start_all()
    training.wait()

    for role in (("worker", 0), ("worker", 1)):
      training.start(role, lost_servers_secs=2)
    training.wait()

    for role in (("worker", 0), ("worker", 1)):
      self.assertIn("is finished and its servers have ended", training.log(role))

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_chief_started_again_without_servers_says_who_is_missing(self):
    training = self._training(num_ps=2, max_steps=100000)
    training.start_all()
    training.wait_for_step(20)
    for role in training.roles():
      training.kill(role)

    training.start(("worker", 0), lost_servers_secs=2)
    code = training.processes["worker", 0].wait(timeout=_TIMEOUT_SECS)

    self.assertNotEqual(code, 0)
    addrs = training.registered("ps")
    self.assertLen(addrs, 2)
    self.assertIn(f"{','.join(sorted(addrs))} is unreachable since", training.log(("worker", 0)))


class BadClusterTest(tf.test.TestCase):
  """A clear message and an exit in bounded time."""

  def _run_worker(self, **flags):
    training = _Training(os.path.join(utils.get_test_tmp_dir(), self.id()), num_ps=1, **flags)
    self.addCleanup(training.close)
    training.start(("worker", 0))
    code = training.processes["worker", 0].wait(timeout=_TIMEOUT_SECS)
    self.assertNotEqual(code, 0)
    return training.log(("worker", 0))

  def test_discovery_never_answers(self):
    log = self._run_worker(timeout_secs=3)

    self.assertIn("the cluster is not complete after 3 s", log)

  def test_wrong_cluster(self):
    cluster = {
      "ps": [f"127.0.0.1:{get_free_port()}"],
      "worker": [f"127.0.0.1:{get_free_port()}"],
    }
    tf_config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}

    log = self._run_worker(timeout_secs=3, tf_config=json.dumps(tf_config))

    self.assertIn(f"{cluster['ps'][0]} is unreachable", log)

  def test_port_in_use(self):
    with socket.socket() as taken:
      taken.bind(("127.0.0.1", 0))
      taken.listen()
      addr = f"127.0.0.1:{taken.getsockname()[1]}"
      tf_config = {"cluster": {"worker": [addr]}, "task": {"type": "worker", "index": 0}}
      log = self._run_worker(timeout_secs=3, tf_config=json.dumps(tf_config))

    self.assertIn("Could not start gRPC server", log)


if __name__ == "__main__":
  tf.test.main()
