"""Tells which Keras a test runs under.

Tests of both versions use `tf.keras`, and mark what one of them lacks.
"""

from __future__ import annotations

import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

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


def for_this_keras(code: str) -> str:
  """Returns a page's program, which is for Keras 3, with what its comments say for Keras 2."""
  # `tf_keras` where TensorFlow has it as its own.
  return code if IS_KERAS_3 else for_keras_2(code, tf.keras.Model.__module__.partition(".")[0])


def for_keras_2(code: str, package: str = "tf_keras") -> str:
  """Returns a page's program for the Keras 2 of a package."""
  code = re.sub(r"^.*  # Keras 2: (.*)$", r"\1", code, flags=re.MULTILINE)
  name = "keras" if package == "keras" else f"{package} as keras"
  return re.sub(r"^import keras$", f"import {name}", code, flags=re.MULTILINE)


def ours_in_keras() -> set[str]:
  """Returns the names in the modules of Keras and its classes that lead to code of `monolith`."""
  return {name for name, value in _members_of_keras() if _is_ours(value)}


def _members_of_keras() -> Iterator[tuple[str, Any]]:
  for module_name, module in list(sys.modules.items()):
    if module_name.partition(".")[0] in ("keras", "tf_keras"):
      for name, value in list(vars(module).items()):
        yield f"{module_name}.{name}", value
        if isinstance(value, type) and value.__module__ == module_name:
          yield from ((f"{module_name}.{name}.{key}", each) for key, each in vars(value).items())


def _is_ours(value: Any) -> bool:
  if isinstance(value, property):
    value = value.fget
  elif isinstance(value, (classmethod, staticmethod)):
    value = value.__func__
  # Not by `__module__`, which `functools.wraps` copies.
  folder = os.path.join("monolith", "keras")
  return isinstance(value, types.FunctionType) and folder in value.__code__.co_filename
