"""Saves and restores the item pools of negative generation with checkpoints."""

from __future__ import annotations

import re

import tensorflow as tf
from absl import logging

from monolith.native_training import graph_estimator
from monolith.native_training.checkpoints import restored
from monolith.native_training.data import feature_utils
from monolith.native_training.data.datasets import POOL_KEY

_STEP = re.compile(r"model\.ckpt-(\d+)")


class ItemPoolSaveRestoreHook(tf.compat.v1.train.SessionRunHook):
  """Restores pools after the session is created and saves them from time to time.

  Args:
    model_dir: the folder of checkpoints.
    save_steps: pools are saved when the step moved on by more than this.
    mode: pools are saved in `"train"` mode only.
  """

  def __init__(self, model_dir: str, save_steps: int, mode: str = graph_estimator.ModeKeys.TRAIN):
    self._model_dir = model_dir
    self._save_steps = save_steps
    self._mode = mode
    self._last_step: int | None = None
    self._restored = False

  def begin(self) -> None:
    self._global_step = tf.compat.v1.train.get_or_create_global_step()
    self._step_placeholder = tf.compat.v1.placeholder(tf.int64, [])
    pools = tf.compat.v1.get_collection(POOL_KEY)
    # The op's name depends on its position, which a checkpoint must not: order pools by creation.
    self._save_op = tf.group(
      *[
        feature_utils.save_item_pool(pool, self._step_placeholder, self._pool_dir(i))
        for i, pool in enumerate(pools)
      ]
    )
    self._restore_op = tf.group(
      *[
        feature_utils.restore_item_pool(pool, self._step_placeholder, self._pool_dir(i))
        for i, pool in enumerate(pools)
      ]
    )

  def _pool_dir(self, i: int) -> str:
    # Several pools in one folder would overwrite each other.
    return self._model_dir if i == 0 else f"{self._model_dir}/item_pool_{i}"

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._last_step = int(session.run(self._global_step))
    if self._restored:
      return
    self._restored = True
    checkpoint = restored.find(session, self._model_dir)
    match = _STEP.search(checkpoint or "")
    if match is None:
      logging.info("no checkpoint in %s: item pools start empty", self._model_dir)
      return
    session.run(self._restore_op, {self._step_placeholder: int(match.group(1))})

  def before_run(
    self, run_context: tf.compat.v1.train.SessionRunContext
  ) -> tf.compat.v1.train.SessionRunArgs:
    return tf.compat.v1.train.SessionRunArgs(self._global_step)

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    # Nothing orders the read of the step and the train op within a run: what was read may be the
    # step before. When a save may be due, the step is read again, by itself.
    assert self._last_step is not None  # set when the session was made
    if int(run_values.results) + 1 - self._last_step <= self._save_steps:
      return
    step = int(run_context.session.run(self._global_step))
    if step - self._last_step > self._save_steps:
      self._save(run_context.session, step)

  def end(self, session: tf.compat.v1.Session) -> None:
    self._save(session, int(session.run(self._global_step)))

  def _save(self, session: tf.compat.v1.Session, step: int) -> None:
    if self._mode != graph_estimator.ModeKeys.TRAIN:
      return
    session.run(self._save_op, {self._step_placeholder: step})
    self._last_step = step
