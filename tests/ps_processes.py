"""Parameter servers as processes of their own, for tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import tensorflow as tf

_ROOT = pathlib.Path(__file__).absolute().parent.parent

# A server needs no graph of its own, only the op library; it ends with its standard input.
_PROGRAM = """
import sys
import tensorflow as tf
from monolith.native_training import distributed_serving_ops
server = tf.distribute.Server.create_local_server()
print(server.target, flush=True)
sys.stdin.read()
"""


def environment() -> dict[str, str]:
  """Returns the environment of a process that imports the package of this checkout."""
  return {**os.environ, "PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}


class PsProcesses:
  """Some servers and a master in this process.

  Args:
    count: number of servers.
  """

  def __init__(self, count: int):
    self.processes = [
      subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
      )
      for _ in range(count)
    ]
    self._addresses = [self._read_address(process) for process in self.processes]
    self._master = tf.distribute.Server.create_local_server()

  def _read_address(self, process: subprocess.Popen) -> str:
    target = process.stdout.readline().strip()
    if not target.startswith("grpc://"):
      raise RuntimeError(f"a server said {target!r} instead of its address")
    return target[len("grpc://") :]

  def session(self, num_ps: int | None = None) -> tf.compat.v1.Session:
    """Returns a session of the default graph with the first `num_ps` servers, all by default."""
    cluster_def = tf.train.ClusterDef()
    ps, worker = cluster_def.job.add(name="ps"), cluster_def.job.add(name="worker")
    for i, address in enumerate(self._addresses[:num_ps]):
      ps.tasks[i] = address
    worker.tasks[0] = self._master.target[len("grpc://") :]
    config = tf.compat.v1.ConfigProto(cluster_def=cluster_def, allow_soft_placement=True)
    config.share_cluster_devices_in_session = True
    config.experimental.share_session_state_in_clusterspec_propagation = True
    return tf.compat.v1.Session(self._master.target, config=config)

  def kill(self, index: int) -> None:
    """Kills a server without warning."""
    self.processes[index].kill()
    self.processes[index].wait()

  def stop(self) -> None:
    for process in self.processes:
      process.kill()
      process.wait()
      process.stdin.close()
      process.stdout.close()
