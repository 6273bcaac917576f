"""Jobs whose processes run on hosts in network namespaces, for tests."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
from collections.abc import Sequence

from tests import ssh_server
from tests.network_hosts import NetworkHosts
from tests.wait_until import wait_until

_ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = str(_ROOT / "tests" / "reliability" / "host_program.py")
SECONDS = 1200  # of anything that is waited for; only a busy machine comes near
STEPS = 300
_PORT = 2222


class HostJobs(unittest.TestCase):
  """Starts processes on hosts, and ends them after the test.

  Attributes:
    folder: that all hosts see.
    hosts: what `make_hosts` has made.
    processes: by name.
  """

  def setUp(self):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.environment = {
      **os.environ,
      "PYTHONPATH": str(_ROOT),
      "TF_CPP_MIN_LOG_LEVEL": "2",
      "PYTHONUNBUFFERED": "1",
    }
    self.processes: dict[str, subprocess.Popen] = {}
    self.addCleanup(self._kill)

  def _kill(self) -> None:
    for process in self.processes.values():
      process.kill()
      process.communicate()

  def make_hosts(self, count: int = 3, **network: float) -> NetworkHosts:
    """Makes hosts; the test is skipped where it may not."""
    self.hosts = NetworkHosts(count, **network)
    # Cleanups run in reverse order, and processes must have ended before.
    self.addCleanup(self.hosts.close)
    self.addCleanup(self._kill)
    return self.hosts

  def start(self, name: str, host: int, *command: str, **environment: str) -> subprocess.Popen:
    """Starts a process on a host; what it prints goes to a file with its name."""
    with (self.folder / f"{name}.log").open("wb") as log:
      self.processes[name] = subprocess.Popen(
        [*self.hosts.prefix(host), sys.executable, *command],
        # As a cluster tells a container: the name of this machine is none of the hosts.
        env={
          **self.environment,
          "YARN_INET_ADDR": self.hosts.addresses[host],
          **environment,
        },
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # As on another machine: out of the reach of Ctrl-C here, and with its own share of cores.
        start_new_session=True,
      )
    return self.processes[name]

  def start_cluster(
    self,
    roles: Sequence[str],
    steps: int,
    pause: float = 0,
    subfolder: str = "",
    **environment: str,
  ) -> None:
    """Starts a process of `TF_CONFIG` on each host.

    Args:
      roles: of the processes, by host.
      steps: after which the job ends.
      pause: seconds after each step.
      subfolder: of the job; its processes are called "ROLE-INDEX" with it in front.
      environment: more of it.
    """
    folder = self.folder / subfolder
    folder.mkdir(exist_ok=True)
    # Two jobs may be on the same hosts.
    port = _PORT + 10 * bool(subfolder)
    cluster: dict[str, list[str]] = {}
    for role, address in zip(roles, self.hosts.addresses):
      cluster.setdefault(role, []).append(f"{address}:{port}")
    for host, role in enumerate(roles):
      index = roles[:host].count(role)
      config = {"cluster": cluster, "task": {"type": role, "index": index}}
      command = [PROGRAM, "train", str(folder), str(steps), str(pause)]
      name = f"{subfolder}{role}-{index}"
      self.start(name, host, *command, **{"TF_CONFIG": json.dumps(config), **environment})

  def wait(self, *names: str) -> None:
    """Waits until processes have ended."""
    processes = [self.processes[name] for name in names or self.processes]
    try:
      wait_until(lambda: all(process.poll() is not None for process in processes), SECONDS)
    except BaseException as e:
      raise AssertionError(f"some processes still run: {self.logs()}") from e

  def logs(self) -> str:
    """Returns the ends of all logs."""
    return "\n".join(
      f"--- {name}, status {process.poll()}:\n{self.log(name)[-4000:]}"
      for name, process in self.processes.items()
    )

  def log(self, name: str) -> str:
    """Returns what a process has printed."""
    return (self.folder / f"{name}.log").read_text(errors="replace")

  def assert_ended_right(self) -> None:
    """Fails unless all processes ended with success, after all steps."""
    for process in self.processes.values():
      self.assertEqual(process.returncode, 0, self.logs())
    self.assertGreaterEqual(self.last_step(), STEPS, self.logs())

  def last_step(self, subfolder: str = "") -> int:
    """Returns the step of the newest checkpoint, 0 without one."""
    state = self.folder / subfolder / "model" / "checkpoint"
    steps = re.findall(r"ckpt-(\d+)", state.read_text()) if state.exists() else []
    return max(map(int, steps), default=0)

  def wait_for_steps(self, *names: str, subfolder: str = "") -> None:
    """Waits until processes of `start_cluster` have made a step."""
    for name in names:
      path = self.folder / subfolder / f"{name}.steps"
      wait_until(lambda path=path: path.exists() or self._has_one_ended(), SECONDS)
      self.assertTrue(path.exists(), self.logs())

  def _has_one_ended(self) -> bool:
    return any(process.poll() is not None for process in self.processes.values())

  def start_ssh(self) -> str:
    """Starts sshd on all hosts; returns the command that reaches them."""
    ssh_server.require()
    for host, address in enumerate(self.hosts.addresses):
      server = ssh_server.SshServer(
        self.folder / "ssh", address, port=2200, prefix=self.hosts.prefix(host)
      )
      self.addCleanup(server.stop)
    return server.command
