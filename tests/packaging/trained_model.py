"""A small model that one TensorFlow trains and exports, and another one goes on with.

  python -m tests.packaging.trained_model train FOLDER    writes FOLDER/model and FOLDER/export
  python -m tests.packaging.trained_model use FOLDER      reads both, and trains on
  python -m tests.packaging.trained_model golden FOLDER   trains in FOLDER/MONOLITH/tfVERSION, once

Each prints one line of JSON, `Predictions`. The folder may have moved in between.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import numpy as np
import tensorflow as tf

import monolith
from monolith import layers
from monolith.base_model import (
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  get_sigmoid_loss_and_pred,
)
from monolith.estimator import Estimator, RunConfig, ServingInputReceiver, import_saved_model
from monolith.native_training.model_export.export_context import ExportMode

tf.compat.v1.disable_eager_execution()

STEPS = 20
_BATCH = 32
_NAMES = ("user", "item")


@dataclasses.dataclass
class Predictions:
  """Holds what a process of `main` prints.

  Attributes:
    step: the global step of the newest checkpoint.
    of_checkpoint: what the model predicts that was restored from it.
    of_export: what the exported model answers, for the same examples.
  """

  step: int
  of_checkpoint: list[float]
  of_export: list[float]


def _ids() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(7)
  return {name: rng.integers(1, 20, size=_BATCH) + (i << 48) for i, name in enumerate(_NAMES)}


class Clicks(MonolithModel):
  """Tables with and without a bias, and a dense part with layers of Keras."""

  def input_fn(self, mode: str) -> tf.data.Dataset:
    ids = _ids()
    features = {n: tf.RaggedTensor.from_tensor(tf.constant(v)[:, None]) for n, v in ids.items()}
    features["clicked"] = tf.constant((ids["user"] + ids["item"]) % 2, tf.float32)
    dataset = tf.data.Dataset.from_tensors(features)
    return dataset.repeat() if mode == "train" else dataset

  def model_fn(self, features: dict[str, tf.Tensor], mode: str) -> EstimatorSpec:
    for name in _NAMES:
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(
      _NAMES, "vec", 4, optimizer=AdagradOptimizer(0.3), out_type="concat"
    )
    mlp = layers.MLP([6, 1], activations=["relu", None], name="mlp")
    logits = tf.squeeze(mlp(vectors), 1)
    label = features.get("clicked")
    loss, pred = get_sigmoid_loss_and_pred("click", logits, label, None, mode=mode)
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.05)
    return EstimatorSpec(label, pred, "click", loss, optimizer)

  def serving_input_receiver_fn(self) -> ServingInputReceiver:
    given = {name: tf.compat.v1.placeholder(tf.int64, [None], name) for name in _NAMES}
    ids = {name: tf.RaggedTensor.from_tensor(x[:, None]) for name, x in given.items()}
    return ServingInputReceiver(ids, given)


def _estimator(folder: str) -> Estimator:
  model = Clicks()
  model.p.serving.export_mode = ExportMode.STANDALONE
  model.p.serving.export_dir_base = os.path.join(folder, "export")
  return Estimator(model, RunConfig(is_local=True, model_dir=os.path.join(folder, "model")))


def _predictions(estimator: Estimator, folder: str) -> Predictions:
  with import_saved_model(os.path.join(folder, "export"), input_name=list(_NAMES)) as infer:
    answers = infer(_ids())["output"]
  return Predictions(
    step=int(estimator.get_variable_value("global_step")),
    of_checkpoint=[float(p) for p in estimator.predict()],
    of_export=[float(p) for p in np.ravel(answers)],
  )


def train(folder: str) -> Predictions:
  """Trains, saves and exports; returns what the model predicts then."""
  estimator = _estimator(folder)
  estimator.train(steps=STEPS)
  estimator.export_saved_model()
  return _predictions(estimator, folder)


def use(folder: str) -> Predictions:
  """Returns what checkpoint and export predict, before it trains on from the checkpoint.

  Raises:
    RuntimeError: training did not go on from there.
  """
  estimator = _estimator(folder)
  found = _predictions(estimator, folder)
  estimator.train(steps=1)
  step = estimator.get_variable_value("global_step")
  if step != found.step + 1:
    raise RuntimeError(f"One step after the checkpoint of step {found.step} came step {step}.")
  return found


def write_golden(folder: str) -> Predictions:
  """Trains in a new folder, named by the versions of Monolith and TensorFlow, for later releases.

  Raises:
    FileExistsError: these versions have files; they are not written again.
  """
  tensorflow = ".".join(tf.__version__.split(".")[:2])
  folder = os.path.join(folder, monolith.__version__, f"tf{tensorflow}")
  os.makedirs(folder)
  found = train(folder)
  with open(os.path.join(folder, "predictions.json"), "x", encoding="utf-8") as file:
    json.dump(dataclasses.asdict(found), file)
  return found


def main(command: str, folder: str) -> None:
  predictions = {"train": train, "use": use, "golden": write_golden}[command](folder)
  print(json.dumps(dataclasses.asdict(predictions)))


if __name__ == "__main__":
  main(*sys.argv[1:])
