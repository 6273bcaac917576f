"""Tells a process that finds no servers whether training is over.

A server that does not answer may have died, may not have started yet, or was told to stop at the
end. Only the chief knows, so it keeps a record in the model's folder, which others look at when
servers are gone.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Sequence

import tensorflow as tf
from absl import logging
from tensorflow.python.lib.io import file_io

from monolith.native_training import service_discovery
from monolith.native_training.driver import server
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig

_FILE_NAME = "training_run.json"
# How long a process that has just started waits for servers that are known to have been there. A
# job that is started again has this time to bring its new servers up.
_LOST_SERVERS_SECS = 90


class TrainingIsOver(Exception):
  """The chief has finished this training run and told its servers to stop."""


class TrainingFailed(Exception):
  """The chief has told a server to stop because training failed."""


class State(enum.Enum):
  """Says how far a training run is."""

  RUNNING = "running"
  FINISHED = "finished"
  FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class TrainingRun:
  """A training run on parameter servers.

  Attributes:
    uuid: the job's id, may be empty.
    ps_addrs: its servers, sorted.
    max_steps: when it is over, `None` for the end of its data.
    state: how far it is.
    message: why it failed.
  """

  uuid: str
  ps_addrs: tuple[str, ...]
  max_steps: int | None
  state: State = State.RUNNING
  message: str = ""

  def is_same(self, other: TrainingRun) -> bool:
    """Returns whether another record, in whatever state, is about the same run.

    While this one knows no addresses, only the id of the job can tell.
    """
    if (self.uuid, self.max_steps) != (other.uuid, other.max_steps):
      return False
    return self.ps_addrs == other.ps_addrs if self.ps_addrs else bool(self.uuid)


def write(model_dir: str, run: TrainingRun) -> None:
  """Replaces the record.

  Raises:
    tf.errors.OpError: the file cannot be written.
  """
  tf.io.gfile.makedirs(model_dir)
  record = {**dataclasses.asdict(run), "state": run.state.value}
  file_io.atomic_write_string_to_file(
    os.path.join(model_dir, _FILE_NAME), json.dumps(record, indent=1)
  )


def read(model_dir: str) -> TrainingRun | None:
  """Returns the record, `None` where there is none or it cannot be read."""
  path = os.path.join(model_dir, _FILE_NAME)
  try:
    with tf.io.gfile.GFile(path) as f:
      record = json.loads(f.read())
    return TrainingRun(
      uuid=record["uuid"],
      ps_addrs=tuple(record["ps_addrs"]),
      max_steps=record["max_steps"],
      state=State(record["state"]),
      message=record["message"],
    )
  except tf.errors.NotFoundError:
    return None
  except (tf.errors.OpError, ValueError, KeyError, TypeError) as e:
    logging.warning("%s is ignored, it cannot be read: %r", path, e)
    return None


def check_not_failed(config: DistributedCpuTrainingConfig, addr: str) -> None:
  """Lets a server that was told to stop end as training did.

  Args:
    config: the server's configuration.
    addr: where others have reached it.

  Raises:
    TrainingFailed: the chief has failed, and says so in the record.
  """
  record = read(config.model_dir)
  if record is None or record.uuid != config.uuid or addr not in record.ps_addrs:
    return
  if record.state == State.FAILED:
    raise TrainingFailed(
      f"training failed, and the chief told parameter server {config.index} to stop. The failure "
      f"was: {record.message}"
    )


class RunWatch:
  """Decides how long one process waits for servers, and tells others how training ended.

  Args:
    config: the process's configuration.
    max_steps: when training is over, `None` for the end of its data.
    discovery: where servers register.
  """

  def __init__(
    self,
    config: DistributedCpuTrainingConfig,
    max_steps: int | None,
    discovery: service_discovery.ServiceDiscovery,
  ):
    self._config = config
    self._discovery = discovery
    self._run = TrainingRun(config.uuid, (), max_steps)
    self._has_met_servers = False

  def set_servers(self, ps_addrs: Sequence[str]) -> None:
    """Takes note of the servers to train with now."""
    self._run = dataclasses.replace(self._run, ps_addrs=tuple(sorted(ps_addrs)))

  def on_servers_answer(self, write: bool) -> None:
    """Takes note that all servers are there; the chief writes it down."""
    self._has_met_servers = True
    if write:
      self._write(self._run)

  def write_end(self, error: BaseException | None) -> None:
    """Writes down, on the chief, how training ended."""
    state = State.FINISHED if error is None else State.FAILED
    message = "" if error is None else f"{type(error).__name__}: {error}"
    self._write(dataclasses.replace(self._run, state=state, message=message))

  def _write(self, run: TrainingRun) -> None:
    try:
      write(self._config.model_dir, run)
    except tf.errors.OpError:
      # Training goes on, and servers are stopped, all the same.
      logging.exception(
        "Processes that come late will not know that training is %s.", run.state.value
      )

  def check_not_over(self) -> None:
    """Ends an attempt that failed because there is nothing left to do.

    Raises:
      TrainingIsOver: training with these servers is finished.
    """
    record = read(self._config.model_dir)
    if record is not None and self._run.is_same(record) and record.state == State.FINISHED:
      raise TrainingIsOver

  def check_waiting(self, waited_secs: float) -> None:
    """Ends the wait for a complete cluster that will never come.

    Args:
      waited_secs: how long it has been.

    Raises:
      TrainingIsOver: training is finished.
      server.NodeAliveCheckerError: it has failed.
    """
    if self._has_met_servers or waited_secs >= _LOST_SERVERS_SECS:
      self._check_end()

  def wait_for_servers(self, error: server.NodeAliveCheckerError, waited_secs: float) -> None:
    """Waits until the silent processes answer or are replaced, or `retry_wait_in_secs` have passed.

    Args:
      error: says which processes do not answer.
      waited_secs: how long it has been.

    Raises:
      TrainingIsOver: no process will answer, because training is finished.
      server.NodeAliveCheckerError: it has been long enough.
    """
    config = self._config
    limit = config.session_creation_timeout_secs
    if self._has_met_servers:
      self._check_end()
    elif self._have_servers_ended(error.addrs):
      limit = min(limit, _LOST_SERVERS_SECS)
    if waited_secs >= limit:
      # A wrong address does not become right by waiting.
      self._check_end()
      raise server.NodeAliveCheckerError(
        f"{error.msg} since {waited_secs:.0f} s: start it again, and then {config.server_type} "
        f"{config.index}",
        error.addrs,
      ) from error
    server.wait_until_reachable(
      error.addrs, min(config.retry_wait_in_secs, limit - waited_secs), self._discovery
    )

  def _have_servers_ended(self, dead: Sequence[str]) -> bool:
    """Returns whether a server that does not answer has been there before."""
    if not set(self._run.ps_addrs).intersection(dead):
      return False
    if not server.prescribes_addrs(self._discovery):
      return True  # A server registers when it listens.
    record = read(self._config.model_dir)
    return record is not None and (record.uuid, record.ps_addrs) == (
      self._run.uuid,
      self._run.ps_addrs,
    )

  def _check_end(self) -> None:
    record = read(self._config.model_dir)
    if record is None or not self._run.is_same(record):
      return
    if record.state == State.FINISHED:
      raise TrainingIsOver
    if record.state == State.FAILED:
      raise server.NodeAliveCheckerError(
        f"{','.join(record.ps_addrs)} is unreachable: the chief told the servers to stop before "
        f"training was over, start the whole job again. The reason was: {record.message}",
        record.ps_addrs,
      )
