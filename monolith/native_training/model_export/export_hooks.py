"""Exports each checkpoint once it is saved, and deletes exports whose checkpoint is gone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging

from monolith.native_training import utils
from monolith.native_training.metric import cli
from monolith.native_training.model_export import export_pb2, export_state_utils

_CHECKPOINT_NAME = re.compile(r"model\.ckpt-(\d+)$")


def get_global_step(checkpoint_path: str) -> int:
  """Returns the step in `<folder>/model.ckpt-<step>`."""
  match = _CHECKPOINT_NAME.search(os.path.basename(checkpoint_path))
  assert match is not None, f"{checkpoint_path} is not called model.ckpt-<step>"
  return int(match.group(1))


class ExportSaverListener(tf.compat.v1.train.CheckpointSaverListener):
  """Exports each saved checkpoint; only one process may keep the list of exports.

  Args:
    save_path: path of the checkpoints, without step.
    serving_input_receiver_fn: makes the inputs of the exported model.
    exporter: has `export_saved_model(receiver_fn, checkpoint_path, global_step)`.
    exempt_checkpoint_paths: checkpoints whose exports are never deleted.
    dense_only: exports of full checkpoints, two folders up, are kept too.
  """

  def __init__(
    self,
    save_path: str,
    serving_input_receiver_fn: Callable[[], Any],
    exporter: Any,
    exempt_checkpoint_paths: Iterable[str] | None = None,
    dense_only: bool = False,
  ):
    super().__init__()
    self._save_path = save_path
    self._serving_input_receiver_fn = serving_input_receiver_fn
    self._exporter = exporter
    self._exempt_steps = {get_global_step(path) for path in exempt_checkpoint_paths or []}
    self._dense_only = dense_only
    self._metrics = cli.get_cli(utils.get_metric_prefix())

  def after_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
    """Exports the checkpoint of this step, and deletes old exports."""
    checkpoint_path = f"{self._save_path}-{global_step_value}"
    export_dirs = self._exporter.export_saved_model(
      self._serving_input_receiver_fn, checkpoint_path, global_step_value
    )
    if isinstance(export_dirs, dict):
      export_dirs = list(export_dirs.values())
    elif isinstance(export_dirs, (bytes, str)):
      export_dirs = [export_dirs]
    for export_dir in export_dirs:
      export_dir = tf.compat.as_str(export_dir)
      self._add_entry(export_dir, global_step_value)
      self._maybe_delete_old_entries(os.path.dirname(export_dir))

  def _add_entry(self, export_dir: str, global_step: int) -> None:
    base = os.path.dirname(export_dir)
    state = export_state_utils.get_export_saver_listener_state(base)
    if not any(entry.export_dir == export_dir for entry in state.entries):
      state.entries.add(export_dir=export_dir, global_step=global_step)
      export_state_utils.overwrite_export_saver_listener_state(base, state)
    version = os.path.basename(export_dir).split("-")[0]
    if version.isdigit():
      self._metrics.emit_store("export_models.latest_version", int(version))

  def _maybe_delete_old_entries(self, base: str) -> None:
    kept_steps = self._get_kept_steps()
    state = export_state_utils.get_export_saver_listener_state(base)
    kept = export_pb2.ServingModelState()
    old_dirs = []
    for entry in state.entries:
      if entry.global_step in kept_steps:
        kept.entries.add().CopyFrom(entry)
      else:
        old_dirs.append(entry.export_dir)
    if not old_dirs:
      return
    # The list comes first: a folder without an entry does no harm, an entry without a folder would.
    export_state_utils.overwrite_export_saver_listener_state(base, kept)
    for old_dir in old_dirs:
      try:
        tf.io.gfile.rmtree(old_dir)
      except tf.errors.NotFoundError:
        logging.warning("The export %s was gone already.", old_dir)

  def _get_kept_steps(self) -> set[int]:
    folder = os.path.dirname(self._save_path)
    steps = self._exempt_steps | _get_checkpoint_steps(folder)
    if self._dense_only:
      steps |= _get_checkpoint_steps(os.path.dirname(folder))
    return steps


def _get_checkpoint_steps(folder: str) -> set[int]:
  state = tf.train.get_checkpoint_state(folder)
  if state is None:
    return set()
  return {
    get_global_step(path)
    for path in state.all_model_checkpoint_paths
    if _CHECKPOINT_NAME.search(os.path.basename(path))
  }
