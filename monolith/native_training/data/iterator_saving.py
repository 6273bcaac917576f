"""Keeps datasets whose position cannot be saved out of checkpoints."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.checkpoints import ckpt_hooks


def leave_out_of_checkpoints() -> None:
  """Lets checkpoints of the graph that is being built leave out all iterators.

  Does nothing in eager mode, where the user says what is saved, and inside a function.
  """
  if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
    return
  ckpt_hooks.disable_iterator_save_restore()
