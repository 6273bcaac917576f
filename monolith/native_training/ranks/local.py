"""Starts ranks of Horovod as children of this process, all on this machine.

Does what `horovodrun --gloo` does, but the ranks are ordinary children: their output goes where the
caller says, and when one ends the others are left to end by themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_GLOO_TIMEOUT_SECS = 120


class LocalRanks:
  """Ranks that run the same command, until `close`.

  Args:
    count: how many ranks to start.
    command: arguments of the Python interpreter.
    env: what to add to the environment.
    outputs: rank -> where its standard output and error go, `None` for where this process's go.

  Attributes:
    processes: the ranks' processes, in their order.

  Raises:
    ImportError: Horovod is not installed.
  """

  def __init__(
    self,
    count: int,
    command: Sequence[str],
    env: dict[str, str] | None = None,
    outputs: Sequence[Any] | None = None,
  ):
    try:
      from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
      from horovod.runner.http.http_server import RendezvousServer
    except ModuleNotFoundError as error:
      from monolith.native_training import hvd_lib

      raise ImportError(
        f"Several ranks need Horovod, which is not installed: {hvd_lib.INSTALL_HOROVOD}"
      ) from error

    self._server = RendezvousServer()
    port = self._server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{count}"), count)
    self._server.init(slots)
    outputs = [None] * count if outputs is None else outputs
    self.processes = [
      subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **_rank_env(slot, port), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
      )
      for slot, output in zip(slots, outputs)
    ]

  def close(self) -> None:
    """Kills the ranks that still run."""
    for process in self.processes:
      if process.poll() is None:
        process.kill()
        process.wait()
    self._server.stop()

  def __enter__(self) -> LocalRanks:
    return self

  def __exit__(self, *unused_args: Any) -> None:
    self.close()


def _rank_env(slot: Any, port: int) -> dict[str, str]:
  return {
    "PYTHONUNBUFFERED": "1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_GLOO_TIMEOUT_SECS),
    "HOROVOD_HOSTNAME": slot.hostname,
    "HOROVOD_RANK": str(slot.rank),
    "HOROVOD_SIZE": str(slot.size),
    "HOROVOD_LOCAL_RANK": str(slot.local_rank),
    "HOROVOD_LOCAL_SIZE": str(slot.local_size),
    "HOROVOD_CROSS_RANK": str(slot.cross_rank),
    "HOROVOD_CROSS_SIZE": str(slot.cross_size),
  }
