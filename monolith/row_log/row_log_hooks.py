"""Tells the row log of a training session when tables are restored and saved.

The writers of the log are threads on parameter servers, which do not know what the chief restores.
Tables that live in the session itself have their writer here, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from monolith.native_training.checkpoints import restored
from monolith.native_training.settings.training_config import CpuTrainingConfig
from monolith.row_log import row_log, row_publisher, sync_state

_CHECKPOINT_BASENAME = "model.ckpt"


def get_model_name(config: CpuTrainingConfig) -> str:
  """Returns the model's name in its topics.

  Raises:
    ValueError: it has none.
  """
  name = config.realtime_model_name or config.model_name
  if not name:
    raise ValueError(
      "realtime_kafka_servers is set, but the model has no name for its topic rows.<name>: set "
      "model_name or realtime_model_name"
    )
  return name


def make_publisher(
  config: CpuTrainingConfig, writer: row_log.RowLogWriter, shard: int
) -> row_publisher.RowPublisher:
  """Returns the publisher of one shard as the configuration says; it is not started."""
  return row_publisher.RowPublisher(
    writer,
    config.realtime_kafka_servers,
    get_model_name(config),
    shard,
    max(1, config.num_ps),
    interval_secs=config.sync_interval_secs,
    digest_secs=config.realtime_digest_secs,
  )


@contextlib.contextmanager
def publish_from_server(
  config: CpuTrainingConfig, target: str, shard: int
) -> Iterator[row_publisher.RowPublisher]:
  """Publishes the rows of a parameter server of this process as long as the context lasts.

  Args:
    config: the process's configuration.
    target: the address of the server.
    shard: its index.
  """
  with tf.Graph().as_default():
    writer = row_log.RowLogWriter(row_log.row_log_client(str(shard)))
    with tf.compat.v1.Session(target) as session:
      publisher = make_publisher(config, writer.bind(session), shard).start()
      try:
        yield publisher
      finally:
        publisher.stop()


class RowLogHook(tf.compat.v1.train.SessionRunHook):
  """Declares tables ready when they are restored; must come behind the hook that restores them.

  Args:
    config: the process's configuration.
    model_dir: where checkpoints are.
  """

  def __init__(self, config: CpuTrainingConfig, model_dir: str):
    self._config = config
    self._model_dir = model_dir
    self._marks: list[row_log.MarkOps] = []
    self._writer: row_log.RowLogWriter | None = None
    self._publisher: row_publisher.RowPublisher | None = None
    get_model_name(config)

  def begin(self) -> None:
    clients = row_log.create_row_log_clients(self._config.num_ps)
    self._marks = [row_log.MarkOps(client) for client in clients]
    if self._config.num_ps == 0:
      self._writer = row_log.RowLogWriter(clients[0])
    self._global_step = tf.compat.v1.train.get_or_create_global_step()

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    step = int(session.run(self._global_step))
    for shard, marks in enumerate(self._marks):
      marks.run(session, "ready", self._find_position(session, step, shard))
    if self._writer is not None:
      if self._publisher is not None:
        # Its session is gone, and rows with it.
        self._publisher.stop(flush_secs=0)
      self._publisher = make_publisher(self._config, self._writer.bind(session), 0).start()

  def stop(self) -> None:
    """Publishes what is left."""
    if self._publisher is not None:
      self._publisher.stop()
      self._publisher = None

  def mark_saved(self, session: tf.compat.v1.Session, step: int) -> None:
    """Tells all writers that a checkpoint is complete."""
    for marks in self._marks:
      marks.run(session, "saved", [step])

  def _find_position(self, session: tf.compat.v1.Session, step: int, shard: int) -> list[int]:
    """Returns epoch, seq, offset and step of what was restored; a step of -1 if not known.

    A server that was restored alone comes from the checkpoint from which the session starts, while
    others, and the step, are ahead of it.
    """
    prefixes = [os.path.join(self._model_dir, f"{_CHECKPOINT_BASENAME}-{step}")]
    restored_from = restored.find(session, self._model_dir)
    if restored_from is not None:
      prefixes.append(restored_from)
    for prefix in prefixes:
      try:
        state = sync_state.load_checkpoint(prefix, shard)
      except ValueError as error:
        logging.error("The place of a checkpoint in the row log is lost: %s", error)
        continue
      if state is not None:
        saved_step = int(prefix.rpartition("-")[2])
        return [state.epoch, state.seq, state.next_offset, saved_step]
    return [0, 0, 0, -1]


class RowLogSavedListener(tf.compat.v1.train.CheckpointSaverListener):
  """Tells the writers of a row log when a checkpoint is complete, and when training is over.

  Args:
    hook: knows the writers.
  """

  def __init__(self, hook: RowLogHook):
    super().__init__()
    self._hook = hook

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    self._hook.mark_saved(session, global_step_value)

  def end(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    # Behind the last save, which is the end of training.
    self._hook.stop()
