"""Starting from the variables of another model's checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging


class WarmStartSettings(NamedTuple):
  """Gives variables their first values; the fields mean what `tf.compat.v1.train.warm_start`
  says.

  Attributes:
    ckpt_to_initialize_from: a folder, or the prefix of a checkpoint.
    vars_to_warm_start: a regular expression, a list of them, a list of variables, or `None` for
      those with a vocabulary alone.
    var_name_to_vocab_info: variable name -> `tf.compat.v1.train.VocabInfo`.
    var_name_to_prev_var_name: variable name -> the name that it has in the checkpoint.
  """

  ckpt_to_initialize_from: str
  vars_to_warm_start: Any = ".*"
  var_name_to_vocab_info: Mapping[str, Any] | None = None
  var_name_to_prev_var_name: Mapping[str, str] | None = None


def settings_of(warm_start_from: Any) -> Any:
  """Returns the settings that an Estimator's `warm_start_from` asks for; `None` for none.

  Args:
    warm_start_from: settings, those of `tf.estimator` too; or the path of a checkpoint, of a folder
      of checkpoints, or of a SavedModel.

  Raises:
    ValueError: it is something else.
  """
  if warm_start_from is None:
    return None
  if isinstance(warm_start_from, (str, bytes, os.PathLike)):
    path = tf.compat.as_str_any(os.fspath(warm_start_from))
    if tf.saved_model.contains_saved_model(path):
      path = os.path.join(path, tf.saved_model.VARIABLES_DIRECTORY, "variables")
    return WarmStartSettings(path)
  if not all(hasattr(warm_start_from, name) for name in WarmStartSettings._fields):
    raise ValueError(f"warm_start_from is {warm_start_from!r}, want a path or WarmStartSettings")
  return warm_start_from


def apply(settings: Any) -> None:
  """Lets the variables of the default graph start as the settings say."""
  logging.info("Variables start from %s", settings.ckpt_to_initialize_from)
  tf.compat.v1.train.warm_start(
    settings.ckpt_to_initialize_from,
    settings.vars_to_warm_start,
    settings.var_name_to_vocab_info,
    settings.var_name_to_prev_var_name,
  )
