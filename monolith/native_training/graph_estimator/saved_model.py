"""Writes a model that was built for prediction as a SavedModel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model.model_utils import export_utils

_EXTRA = "assets.extra"


def export(
  spec: Any,
  receiver: Any,
  checkpoint_path: str,
  export_dir_base: str,
  session_config: tf.compat.v1.ConfigProto,
  assets_extra: Mapping[str, str],
  as_text: bool,
) -> bytes:
  """Exports the default graph.

  Args:
    spec: the result of the model function.
    receiver: the result of the receiver function.
    checkpoint_path: the checkpoint to take the variables from.
    export_dir_base: the model goes into a folder below it, named after the time.
    session_config: configuration of the session that restores the variables.
    assets_extra: path below `assets.extra` -> a file to copy there.
    as_text: whether the graph is written as text.

  Returns:
    The folder.

  Raises:
    ValueError: the model has no signature to export.
  """
  signatures = build_signatures(spec, receiver)
  if not signatures:
    raise ValueError("The model has no export_outputs, so there is nothing to export.")
  export_dir = tf.compat.as_bytes(export_utils.get_timestamped_export_dir(export_dir_base))
  temp_dir = tf.compat.as_bytes(export_utils.get_temp_export_dir(export_dir))
  scaffold = spec.scaffold
  with tf.compat.v1.Session(config=session_config) as session:
    saver = scaffold.saver or tf.compat.v1.train.Saver(sharded=True)
    saver.restore(session, checkpoint_path)
    local_init_op = scaffold.local_init_op or tf.compat.v1.train.Scaffold.default_local_init_op()
    builder = tf.compat.v1.saved_model.Builder(temp_dir)
    builder.add_meta_graph_and_variables(
      session,
      [tf.saved_model.SERVING],
      signature_def_map=signatures,
      assets_collection=tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.ASSET_FILEPATHS),
      main_op=local_init_op,
      saver=saver,
      strip_default_attrs=True,
    )
    builder.save(as_text)
  for path, source in assets_extra.items():
    target = os.path.join(tf.compat.as_text(temp_dir), _EXTRA, path)
    tf.io.gfile.makedirs(os.path.dirname(target))
    tf.io.gfile.copy(source, target)
  tf.io.gfile.rename(temp_dir, export_dir)
  return export_dir


def build_signatures(spec: Any, receiver: Any) -> dict[str, Any]:
  """Returns the signatures of a model, given the receiver that feeds it."""
  return export_utils.build_all_signature_defs(
    receiver.receiver_tensors,
    spec.export_outputs,
    getattr(receiver, "receiver_tensors_alternatives", None),
  )
