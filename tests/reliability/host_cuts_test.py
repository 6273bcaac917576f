"""A host that nobody can reach any more, for a while or for good.

Promise: a job goes on when the host comes back within twenty seconds, and ends right; where it
stays away, the job ends, or waits for it, with its name.
"""

from __future__ import annotations

import os
import time
import unittest

import pytest

from monolith.native_training.settings import rank_environment
from tests import host_jobs
from tests.host_jobs import SECONDS, STEPS
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough
_CUT_SECONDS = 20
_WAITS = """
import json, os, pathlib, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
(pathlib.Path(sys.argv[1]) / f"{task['type']}-{task['index']}.here").touch()
time.sleep(1000)
"""
# Program of a session that asks a server for something, and gets it when FOLDER/answer is there.
_ASKS = """
import pathlib, sys, time
import tensorflow as tf
from monolith.native_training.driver import connections

role, address, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
with connections.watched(), tf.Graph().as_default():
  queue = tf.queue.FIFOQueue(1, tf.int32, shapes=[()], shared_name="queue")
  enqueue, dequeue = queue.enqueue(7), queue.dequeue()
  if role == "server":
    server = tf.distribute.Server({"local": [address]})
    (folder / "server").touch()
    with tf.compat.v1.Session(server.target) as session:
      while not (folder / "answer").exists():
        time.sleep(0.1)
      session.run(enqueue)
    time.sleep(1000)
  with tf.compat.v1.Session("grpc://" + address) as session:
    (folder / "asks").touch()
    print("got", session.run(dequeue), flush=True)
"""


class HostCutsTest(host_jobs.HostJobs):
  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_a_server_a_worker_and_a_rank_that_were_cut_off_for_a_while(self):
    hosts = self.make_hosts(4)
    self.start_cluster(("chief", "ps", "ps", "worker"), STEPS, pause=0.1)
    ranks = {rank_environment.ENGINE_ENV: rank_environment.TENSORFLOW}
    self.start_cluster(("worker",) * 3, STEPS, pause=0.1, subfolder="ranks", **ranks)
    self.wait_for_steps("chief-0", "worker-0")
    self.wait_for_steps("worker-0", "worker-1", "worker-2", subfolder="ranks")
    for host in (2, 3):
      hosts.cut(host)
    time.sleep(_CUT_SECONDS)
    for host in (2, 3):
      hosts.join(host)
    self.wait()
    self.assert_ended_right()
    self.assertGreaterEqual(self.last_step("ranks"), STEPS, self.logs())

  def test_an_answer_that_is_lost_while_a_host_is_cut_off_comes_later(self):
    hosts = self.make_hosts(2)
    address = f"{hosts.addresses[1]}:2222"
    self.start("server", 1, "-c", _ASKS, "server", address, str(self.folder))
    wait_until((self.folder / "server").exists, SECONDS)
    client = self.start("client", 0, "-c", _ASKS, "client", address, str(self.folder))
    wait_until((self.folder / "asks").exists, SECONDS)
    # The question has to be there, which nothing tells, and its connection to be known.
    time.sleep(10)
    hosts.cut(1)
    (self.folder / "answer").touch()
    # Longer than servers of TensorFlow wait for the acknowledgement of an answer.
    time.sleep(_CUT_SECONDS + 10)
    hosts.join(1)
    self.wait("client")

    self.assertEqual(client.returncode, 0, self.logs())
    self.assertIn("got 7", self.log("client"))

  def test_launch_names_a_host_that_is_gone(self):
    hosts = self.make_hosts()
    ssh = self.start_ssh()
    script = self.folder / "waits.py"
    script.write_text(_WAITS)
    options = ["--num_ps=2", "--max_restarts=1", "--grace_seconds=1", f"--ssh={ssh}"]
    options += [f"--hosts={','.join(hosts.addresses)}", f"--log_dir={self.folder / 'logs'}"]
    arguments = [str(script), str(self.folder)]
    job = self.start("launch", 0, "-m", "monolith.launch", *options, *arguments)
    wait_until((self.folder / "ps-1.here").exists, SECONDS)
    hosts.cut(1)
    self.wait()

    # Its connection was lost, and then there was none.
    self.assertEqual(job.returncode, 255, self.logs())
    title = f"[launch] ps-1 on {hosts.addresses[1]}"
    self.assertEqual(self.log("launch").count(f"{title} ended with status 255, as ssh"), 2)
    self.assertIn(f"{title} starts again in 1 s (1 of 1 within an hour)", self.log("launch"))

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_a_rank_and_a_server_that_stay_away_are_named(self):
    hosts = self.make_hosts()
    ranks = {rank_environment.ENGINE_ENV: rank_environment.TENSORFLOW}
    self.start_cluster(("worker",) * 3, 1_000_000, subfolder="ranks", **ranks)
    self.start_cluster(("chief", "ps", "worker"), 1_000_000)
    self.wait_for_steps("worker-0", "worker-1", "worker-2", subfolder="ranks")
    self.wait_for_steps("chief-0", "worker-0")
    hosts.cut(1)
    self.wait("ranksworker-0", "ranksworker-2")

    for name in ("ranksworker-0", "ranksworker-2"):
      self.assertGreater(self.processes[name].returncode, 0, self.logs())
    self.assertIn("Rank 0 lost rank 1", self.log("ranksworker-0"))
    # Training on servers waits for a new one, and says for which.
    server = f"{hosts.addresses[1]}:2222 is unreachable"
    for name in ("chief-0", "worker-0"):
      wait_until(lambda name=name: server in self.log(name), SECONDS)


if __name__ == "__main__":
  unittest.main()
