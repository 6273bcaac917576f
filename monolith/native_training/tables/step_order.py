"""Ops of the default graph that the tables of a rank wait for, so that all ranks do so alike.

`feature_utils` fills the lists and publishes them under the same names.
"""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training import graph_meta


def control_ops() -> list[tf.Operation]:
  """Returns what the gradient exchange starts after: the dense all-reduce is on its way."""
  return graph_meta.get_meta("feature_utils_control_ops", list)


def dense_opt_ops() -> list[tf.Operation]:
  """Returns what the update of rows starts after: dense variables are up to date."""
  return graph_meta.get_meta("feature_utils_dense_opt_ops", list)
