"""Which Keras a test runs under: tests of both use `tf.keras`, and mark what one of them lacks."""

from __future__ import annotations

import os
import unittest

import tensorflow as tf

IS_KERAS_3 = not issubclass(tf.keras.layers.Layer, tf.Module)

needs_keras_2 = unittest.skipIf(IS_KERAS_3, "only Keras 2 has it: TF_USE_LEGACY_KERAS=1")
needs_keras_3 = unittest.skipUnless(IS_KERAS_3, "only Keras 3 has it: TensorFlow 2.16 or newer")


def legacy_optimizers(*names: str) -> list:
  """Returns the old optimizers of Keras 2 by name; none under Keras 3."""
  return [] if IS_KERAS_3 else [getattr(tf.keras.optimizers.legacy, name) for name in names]


def weights_path(folder: str, name: str) -> str:
  """Returns where `save_weights` puts the weights: Keras 3 wants its own ending."""
  return os.path.join(folder, f"{name}.weights.h5" if IS_KERAS_3 else name)


def load_weights(model: tf.keras.Model, path: str) -> None:
  """Loads what `save_weights` wrote to `weights_path`, be it without the optimizer."""
  status = model.load_weights(path)
  if not IS_KERAS_3:
    status.expect_partial()


def export(model: tf.keras.Model, folder: str) -> None:
  """Writes a SavedModel as Keras does it."""
  (model.export if IS_KERAS_3 else model.save)(folder)
