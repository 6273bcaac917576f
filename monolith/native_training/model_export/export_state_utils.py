"""The file that lists which exports exist, and of which step."""

from __future__ import annotations

import os

import tensorflow as tf
from google.protobuf import text_format

from monolith.native_training.model_export import export_pb2

_STATE_FILE_NAME = "ExportSaverListenerState"


def get_export_saver_listener_state(export_dir_base: str) -> export_pb2.ServingModelState:
  """Reads the list of a folder; empty if there is none."""
  state = export_pb2.ServingModelState()
  path = os.path.join(export_dir_base, _STATE_FILE_NAME)
  if tf.io.gfile.exists(path):
    with tf.io.gfile.GFile(path) as f:
      text_format.Parse(f.read(), state)
  return state


def overwrite_export_saver_listener_state(
  export_dir_base: str, state: export_pb2.ServingModelState
) -> None:
  """Replaces the list of a folder in one step; the folder is created if missing."""
  tf.io.gfile.makedirs(export_dir_base)
  path = os.path.join(export_dir_base, _STATE_FILE_NAME)
  with tf.io.gfile.GFile(path + "-tmp", "w") as f:
    f.write(text_format.MessageToString(state))
  tf.io.gfile.rename(path + "-tmp", path, overwrite=True)
