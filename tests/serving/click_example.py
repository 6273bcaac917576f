"""The model of `examples/serving`, trained a little, for tests that serve it."""

from __future__ import annotations

import importlib.util
import pathlib
import types
from typing import Any

import tensorflow as tf

_PATH = pathlib.Path(__file__).resolve().parents[2] / "examples" / "serving" / "clicks.py"


def load() -> types.ModuleType:
  """Returns the example as a module."""
  spec = importlib.util.spec_from_file_location("clicks_example", _PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def train_and_export(model_dir: str, num_ps: int, steps: int = 30) -> dict[str, str]:
  """Trains and exports the model in this process; returns folder by name of the graph."""
  estimator = load().make_estimator(model_dir, num_ps)
  estimator.train(steps=steps)
  return _export(estimator)


def export_with_dense(model_dir: str, num_ps: int) -> dict[str, str]:
  """Exports a trained model once more, with the dense part as a model of its own."""
  estimator = load().make_estimator(model_dir, num_ps)
  estimator._model.p.serving.with_remote_gpu = True
  estimator._model.p.serving.export_dir_base = "with_dense"
  return _export(estimator)


def _export(estimator: Any) -> dict[str, str]:
  exported = estimator.export_saved_model()
  return {name: tf.compat.as_str(folder) for name, folder in exported.items()}
