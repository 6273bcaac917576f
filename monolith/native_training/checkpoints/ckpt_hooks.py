"""Hooks around a checkpoint in asynchronous training.

The chief stops the workers while it saves (`BarrierSaverListener`), and each worker saves how far
its input has come when it stops (`WorkerCkptHelper`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import tensorflow as tf
from absl import logging
from tensorflow.python.data.ops import iterator_ops

from monolith.native_training import barrier_ops, graph_meta
from monolith.native_training.hooks import ckpt_hooks_pb2

SAVE_ACTION = "Save"


class WorkerCkptMetaInfo:
  """Tells the workers the chief's news of a checkpoint, in a variable of the default graph."""

  def __init__(self) -> None:
    self.enable_iter_save_restore = True
    # At the top level of the graph: the first use may be deep inside a scope.
    with tf.control_dependencies(None):
      self.info_var = tf.compat.v1.get_variable(
        "WorkerCkptMetaInfo",
        initializer="",
        dtype=tf.string,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
      )
      self.info_placeholder = tf.compat.v1.placeholder(tf.string, [])
      self.assign_op = self.info_var.assign(self.info_placeholder).op
      self.value = self.info_var.read_value()


def _get_meta() -> WorkerCkptMetaInfo:
  return graph_meta.get_meta("worker_ckpt_meta", WorkerCkptMetaInfo)


def assign_ckpt_info(session: tf.compat.v1.Session, info: ckpt_hooks_pb2.WorkerCkptInfo) -> None:
  """Publishes the facts of the checkpoint that is about to be saved."""
  with session.graph.as_default():
    meta = _get_meta()
  session.run(meta.assign_op, {meta.info_placeholder: info.SerializeToString()})


def get_ckpt_info(session: tf.compat.v1.Session) -> ckpt_hooks_pb2.WorkerCkptInfo:
  """Returns what `assign_ckpt_info` published."""
  with session.graph.as_default():
    meta = _get_meta()
  return ckpt_hooks_pb2.WorkerCkptInfo.FromString(session.run(meta.value))


def disable_iterator_save_restore() -> None:
  """Makes helpers created later in the default graph save and restore nothing."""
  _get_meta().enable_iter_save_restore = False


class BarrierSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Stops the workers before a checkpoint is saved and lets them go on after it."""

  def __init__(
    self,
    barrier_op: barrier_ops.BarrierOp,
    wait_seconds: float = 1,
    max_pending_seconds: float = 30,
    get_running_workers: Callable[[tf.compat.v1.Session], Iterable[int]] | None = None,
  ):
    """Constructs the listener.

    Args:
      barrier_op: the barrier between chief and workers.
      wait_seconds: seconds between looks at the workers.
      max_pending_seconds: the time after which the checkpoint is saved although workers still run.
      get_running_workers: returns the indices of the workers that train. Others, which have
        finished or not started yet, do not stop at the barrier. By default all train.
    """
    self._barrier_op = barrier_op
    self._wait_seconds = wait_seconds
    self._max_pending_seconds = max_pending_seconds
    self._get_running_workers = get_running_workers
    self._placed_by_us = False
    _get_meta()

  def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    assign_ckpt_info(session, ckpt_hooks_pb2.WorkerCkptInfo(global_step=global_step_value))
    try:
      self._barrier_op.place_barrier(session, SAVE_ACTION)
      self._placed_by_us = True
    except barrier_ops.BarrierAlreadyPlacedError:
      # Our barrier may have stayed if its server could not be reached after the last save.
      if not self._placed_by_us:
        logging.info("The barrier is placed already; it will not be removed after saving.")
    self._wait_for_workers(session)

  def _wait_for_workers(self, session: tf.compat.v1.Session) -> None:
    deadline = time.monotonic() + self._max_pending_seconds
    while unblocked := self._get_unblocked(session):
      remaining = deadline - time.monotonic()
      if remaining <= 0:
        logging.warning("Saving although these workers do not wait: %s", unblocked)
        return
      time.sleep(min(self._wait_seconds, remaining))

  def _get_unblocked(self, session: tf.compat.v1.Session) -> list[int]:
    """Returns the workers that train and do not wait at the barrier."""
    unblocked = set(self._barrier_op.get_unblocked_indices(session))
    if unblocked and self._get_running_workers is not None:
      unblocked.intersection_update(int(i) for i in self._get_running_workers(session))
    return sorted(unblocked)

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    if self._placed_by_us:
      self._barrier_op.remove_barrier(session)
      self._placed_by_us = False


class WorkerCkptHelper:
  """Saves and restores the input iterators of one worker."""

  def __init__(self, model_dir: str, index: int):
    """Builds a saver for the iterators that the default graph has now.

    Args:
      model_dir: where to save.
      index: the worker's index.
    """
    self._model_dir = model_dir
    self._save_path = os.path.join(model_dir, f"input_worker_{index}.ckpt")
    self._state_file = f"checkpoint_input_worker_{index}"
    self._saver = None
    _get_meta()
    iterators = tf.compat.v1.get_collection(iterator_ops.GLOBAL_ITERATORS)
    if iterators and _get_meta().enable_iter_save_restore:
      self._saver = tf.compat.v1.train.Saver(
        [
          iterator_ops._IteratorSaveable(
            iterator, iterator.name, tf.data.experimental.ExternalStatePolicy.IGNORE
          )
          for iterator in iterators
        ],
        sharded=True,
      )

  def create_save_iterator_callback(self) -> barrier_ops.BarrierCallback:
    """Returns a callback that saves the iterators when a barrier is placed for a checkpoint."""

    def save_iterators(action: str, session: tf.compat.v1.Session) -> None:
      if action == SAVE_ACTION and self._saver is not None:
        self._save(session)

    return save_iterators

  def _save(self, session: tf.compat.v1.Session) -> None:
    assert self._saver is not None
    tf.io.gfile.makedirs(self._model_dir)
    try:
      self._saver.save(
        session,
        self._save_path,
        global_step=get_ckpt_info(session).global_step,
        latest_filename=self._state_file,
        write_meta_graph=False,
      )
    except tf.errors.UnimplementedError:
      logging.exception("The input cannot be saved.")

  def create_restorer_hook(self) -> tf.compat.v1.train.SessionRunHook:
    """Returns a hook that restores the latest saved iterators, if there are any."""
    return _IteratorRestorerHook(self._saver, self._model_dir, self._state_file)


class _IteratorRestorerHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self, saver: tf.compat.v1.train.Saver | None, model_dir: str, state_file: str):
    self._saver = saver
    self._model_dir = model_dir
    self._state_file = state_file

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    if self._saver is None:
      return
    checkpoint = tf.train.latest_checkpoint(self._model_dir, self._state_file)
    if checkpoint is not None:
      logging.info("Restoring the input from %s", checkpoint)
      self._saver.restore(session, checkpoint)
