"""Training over several hosts, each in a network of its own.

Promise: a job on hosts that share a folder ends right, whatever its processes find one another by,
also over a slow network that loses frames; and one host reads what another has saved.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Sequence

import pytest

from monolith.native_training.settings import rank_environment
from tests import host_jobs, zookeeper_server
from tests.host_jobs import PROGRAM, STEPS

pytestmark = pytest.mark.thorough
_RANK_STEPS = 100  # each of which waits for several messages


class HostsTest(host_jobs.HostJobs):
  def test_launch_trains_on_three_hosts_over_ssh(self):
    hosts = self.make_hosts()
    ssh = self.start_ssh()
    options = ["--num_ps=2", "--num_workers=3", f"--ssh={ssh}"]
    options += [f"--hosts={','.join(hosts.addresses)}", f"--log_dir={self.folder / 'logs'}"]
    arguments = [PROGRAM, "train", str(self.folder), str(STEPS)]
    job = self.start("launch", 0, "-m", "monolith.launch", *options, *arguments)
    self.wait()

    logs = {path.stem: path.read_text() for path in (self.folder / "logs").iterdir()}
    self.assertEqual(job.returncode, 0, self.logs() + str(logs)[-5000:])
    self.assertEqual(sorted(logs), ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"])
    self.assertIn("ended", logs["chief-0"])
    self.assertGreaterEqual(self.last_step(), STEPS)

  def test_processes_that_meet_by_zookeeper(self):
    zookeeper_server.require_zookeeper()
    hosts = self.make_hosts()
    with zookeeper_server.ZooKeeperServer(
      address=hosts.addresses[0], prefix=hosts.prefix(0)
    ) as server:
      self._run_discovered("zk", [server.hosts])
    self.assert_ended_right()

  def test_processes_that_meet_by_files_and_what_they_learnt_on_other_hosts(self):
    self.make_hosts()
    self._run_discovered("files")
    self.assert_ended_right()

    self.start("export", 1, PROGRAM, "export", str(self.folder))
    self.wait()
    self.assertEqual(self.processes["export"].returncode, 0, self.logs())
    self.start("predict", 2, PROGRAM, "predict", str(self.folder))
    self.wait()
    self.assertIn("checkpoint is right for 100%", self.log("predict"), self.logs())
    self.assertIn("export is right for 100%", self.log("predict"), self.logs())

  def _run_discovered(self, mode: str, extra: Sequence[str] = ()) -> None:
    """Runs a server and two workers that learn their addresses from one another."""
    for host, (role, index) in enumerate((("worker", 0), ("ps", 0), ("worker", 1))):
      self.start(
        f"{role}-{index}",
        host,
        *(PROGRAM, mode, str(self.folder), str(STEPS), role, str(index), *extra),
      )
    self.wait()

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_servers_and_ranks_over_a_network_that_is_slow_and_loses_frames(self):
    self.make_hosts(delay_seconds=0.02, loss=0.01)
    self.start_cluster(("chief", "ps", "worker"), STEPS)
    self.start_cluster(
      ("worker", "worker", "worker"),
      _RANK_STEPS,
      subfolder="ranks",
      **{rank_environment.ENGINE_ENV: rank_environment.TENSORFLOW},
    )
    self.wait()
    self.assert_ended_right()
    self.assertGreaterEqual(self.last_step("ranks"), _RANK_STEPS, self.logs())


if __name__ == "__main__":
  unittest.main()
