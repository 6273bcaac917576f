"""Starts ranks as children of this process, all on this machine.

For Horovod it does what `horovodrun --gloo` does, for TensorFlow's collectives what `torchrun`
does, but the ranks are ordinary children: their output goes where the caller says, and when one
ends the others are left to end by themselves.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from monolith.native_training.ranks import meeting
from monolith.native_training.settings import rank_environment

_GLOO_TIMEOUT_SECS = 120


class LocalRanks:
  """Ranks that run the same command, until `close`.

  Args:
    count: how many ranks to start.
    command: arguments of the Python interpreter.
    env: what to add to the environment.
    outputs: rank -> where its standard output and error go, `None` for where this process's go.
    engine: `rank_environment.HOROVOD` or `TENSORFLOW`; by default Horovod where it is installed.

  Attributes:
    processes: the ranks' processes, in their order.
    engine: what carries out their exchanges.

  Raises:
    ImportError: Horovod is asked for and not installed.
  """

  def __init__(
    self,
    count: int,
    command: Sequence[str],
    env: dict[str, str] | None = None,
    outputs: Sequence[Any] | None = None,
    engine: str | None = None,
  ):
    self.engine = engine or rank_environment.find_local_engine()
    start = _start_horovod if self.engine == rank_environment.HOROVOD else _start_tensorflow
    rank_envs, self._stop = start(count)
    outputs = [None] * count if outputs is None else outputs
    inherited = dict(os.environ)
    for name in rank_environment.LAUNCHER_VARIABLES:
      # A launcher that may have started this process knows nothing of these ranks.
      inherited.pop(name, None)
    common = {"PYTHONUNBUFFERED": "1", rank_environment.ENGINE_ENV: self.engine}
    self.processes = [
      subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, **common, **rank_env, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
      )
      for rank_env, output in zip(rank_envs, outputs)
    ]

  def close(self) -> None:
    """Kills the ranks that still run."""
    for process in self.processes:
      if process.poll() is None:
        process.kill()
        process.wait()
    self._stop()

  def __enter__(self) -> LocalRanks:
    return self

  def __exit__(self, *unused_args: Any) -> None:
    self.close()


def _start_horovod(count: int) -> tuple[list[dict[str, str]], Callable[[], Any]]:
  """Starts what Horovod's ranks meet at; returns their environments, and what ends it."""
  try:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
  except ModuleNotFoundError as error:
    from monolith.native_training import hvd_lib

    raise ImportError(
      f"{rank_environment.ENGINE_ENV} is {rank_environment.HOROVOD!r}, "
      "and Horovod is not installed: "
      f"{hvd_lib.INSTALL_HOROVOD}"
    ) from error

  server = RendezvousServer()
  port = server.start()
  slots = get_host_assignments(parse_hosts(f"localhost:{count}"), count)
  server.init(slots)
  return [_horovod_env(slot, port) for slot in slots], server.stop


def _horovod_env(slot: Any, port: int) -> dict[str, str]:
  return {
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


def _start_tensorflow(count: int) -> tuple[list[dict[str, str]], Callable[[], Any]]:
  """Does the same for ranks that meet by themselves."""
  listener = socket.create_server(("127.0.0.1", 0))
  port = listener.getsockname()[1]
  thread = threading.Thread(target=meeting.serve, args=(listener, count), daemon=True)
  thread.start()
  envs = [
    {
      "RANK": str(rank),
      "WORLD_SIZE": str(count),
      "LOCAL_RANK": str(rank),
      "LOCAL_WORLD_SIZE": str(count),
      "MASTER_ADDR": "127.0.0.1",
      "MASTER_PORT": str(port),
    }
    for rank in range(count)
  ]

  def stop() -> None:
    # Wakes up a meeting to which not all came.
    try:
      listener.shutdown(socket.SHUT_RDWR)
    except OSError:
      pass  # It is over.
    thread.join()

  return envs, stop
