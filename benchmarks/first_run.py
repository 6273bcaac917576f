"""How long a newcomer waits: whole processes from start to a trained, evaluated and saved model.

  python benchmarks/first_run.py [--repeats 5] [--epochs 2]

The data is a CSV file of the size of MovieLens-100K, with planted tastes: 943 users, 1,682 films,
100,000 ratings; every tenth is kept for the evaluation. Three programs train the same model on it:
a `MonolithModel` with `Estimator`, a Keras model with our layer, and one with `Hashing` and
`Embedding` of `tf.keras`. They run in turn, each in a process of its own; the first round, in which
Python compiles modules, does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from ratio_table import Row, print_rows

ROLES = ("estimator", "keras_layer", "keras")
NAMES = {
  "estimator": "MonolithModel with Estimator",
  "keras_layer": "Keras with our layer",
  "keras": "tf.keras with Hashing",
}
BATCH, DIM, UNITS = 256, 16, 32
BUCKETS = 2_000  # of the hashed ids; users and films are fewer


def write_data(folder: str) -> float:
  """Writes `train.csv` and `test.csv`; returns the AUC that the planted tastes allow."""
  rng = np.random.default_rng(1)
  user_tastes, film_tastes = rng.normal(size=[943, 3]), rng.normal(size=[1682, 3])
  users = rng.integers(943, size=100_000)
  films = np.minimum(rng.zipf(1.2, 100_000) - 1, 1681)
  logits = 1.5 * np.sum(user_tastes[users] * film_tastes[films], axis=1) / np.sqrt(3)
  liked = rng.random(len(users)) < 1 / (1 + np.exp(-logits))
  with (
    open(os.path.join(folder, "train.csv"), "w") as train,
    open(os.path.join(folder, "test.csv"), "w") as test,
  ):
    for file in (train, test):
      print("user,film,liked", file=file)
    for i, row in enumerate(zip(users, films, liked)):
      print("u{},f{},{:d}".format(*row), file=train if i % 10 else test)
  order = np.argsort(logits[::10])
  positives = np.count_nonzero(liked[::10])
  ranks = np.flatnonzero(liked[::10][order]) + 1
  pairs = positives * (len(order) - positives)
  return float((ranks.sum() - positives * (positives + 1) / 2) / pairs)


def run_estimator(folder: str, epochs: int) -> float:
  """Trains a `MonolithModel`; returns the AUC of its evaluation."""
  import graph_layers
  import tensorflow as tf

  from monolith import data
  from monolith.base_model import (
    AdagradOptimizer,
    EstimatorSpec,
    MonolithModel,
    RandomUniformInitializer,
    get_sigmoid_loss_and_pred,
  )
  from monolith.estimator import Estimator, RunConfig

  tf.compat.v1.disable_eager_execution()

  class Likes(MonolithModel):
    def input_fn(self, mode):
      columns = {"user": data.Ids(), "film": data.Ids(), "liked": data.Number()}
      if mode == "train":
        return data.csv(os.path.join(folder, "train.csv"), columns, BATCH, epochs=epochs)
      return data.csv(os.path.join(folder, "test.csv"), columns, BATCH)

    def model_fn(self, features, mode):
      for name in ("user", "film"):
        self.create_embedding_feature_column(name)
      vectors = self.lookup_embedding_slice(
        ["user", "film"],
        "vec",
        DIM,
        initializer=RandomUniformInitializer(-0.05, 0.05),
        optimizer=AdagradOptimizer(0.1, 1e-6),
        out_type="concat",
      )
      product = vectors[:, :DIM] * vectors[:, DIM:]
      units = graph_layers.dense(tf.concat([vectors, product], 1), UNITS, tf.nn.relu)
      logits = graph_layers.dense(units, 1)[:, 0]
      label = features.get("liked")
      loss, pred = get_sigmoid_loss_and_pred("liked", logits, label, None, mode=mode)
      return EstimatorSpec(label, pred, "liked", loss, tf.compat.v1.train.AdamOptimizer(0.001))

  estimator = Estimator(
    Likes(), RunConfig(is_local=True, model_dir=os.path.join(folder, "estimator"))
  )
  estimator.train()
  return estimator.evaluate()["auc"]


def run_keras(folder: str, epochs: int, embed) -> float:
  """Trains a Keras model; returns the AUC of its evaluation.

  Args:
    folder: where the data is.
    epochs: how often it is read.
    embed: called with a name, returns a layer from strings to vectors.
  """
  import tensorflow as tf

  def read(name):
    return (
      tf.data.TextLineDataset(os.path.join(folder, name))
      .skip(1)
      .batch(BATCH)
      .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
      .prefetch(tf.data.AUTOTUNE)
    )

  def parse(lines):
    user, film, liked = tf.io.decode_csv(lines, ["", "", 0.0])
    return {"user": user, "film": film}, liked

  inputs = [tf.keras.Input([], dtype=tf.string, name=name) for name in ("user", "film")]
  vectors = [embed(tensor.name)(tensor) for tensor in inputs]
  units = tf.keras.layers.Concatenate()([*vectors, vectors[0] * vectors[1]])
  units = tf.keras.layers.Dense(UNITS, "relu")(units)
  model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, "sigmoid")(units))
  model.compile("adam", "binary_crossentropy", metrics=[tf.keras.metrics.AUC(name="auc")])
  model.fit(read("train.csv"), epochs=epochs, verbose=0)
  auc = model.evaluate(read("test.csv"), verbose=0, return_dict=True)["auc"]
  model.save(os.path.join(folder, "model.keras"))
  return auc


def run(role: str, folder: str, epochs: int) -> float:
  """Runs one of the programs in this process; returns its AUC."""
  if role == "estimator":
    return run_estimator(folder, epochs)
  if role == "keras_layer":
    import monolith.keras

    def embed(name):
      return monolith.keras.layers.Embedding(DIM, optimizer="adam", learning_rate=0.01)
  else:
    import tensorflow as tf

    def embed(name):
      return tf.keras.Sequential(
        [tf.keras.layers.Hashing(BUCKETS), tf.keras.layers.Embedding(BUCKETS, DIM)]
      )

  return run_keras(folder, epochs, embed)


def measure(repeats: int, epochs: int) -> list[Row]:
  """Returns the ratios, after printing the seconds of each program."""
  seconds: dict[str, list[float]] = {role: [] for role in ROLES}
  cpu_seconds: dict[str, list[float]] = {role: [] for role in ROLES}
  auc = {}
  with tempfile.TemporaryDirectory() as data_folder:
    possible = write_data(data_folder)
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": os.path.join(data_folder, "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for repeat in range(-1, repeats):
      for role in ROLES:
        with tempfile.TemporaryDirectory() as folder:
          for name in ("train.csv", "test.csv"):
            os.symlink(os.path.join(data_folder, name), os.path.join(folder, name))
          before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
          output = subprocess.run(
            [sys.executable, __file__, "--run", role, "--folder", folder, f"--epochs={epochs}"],
            capture_output=True,
            text=True,
            env=environment,
          )
          elapsed = time.perf_counter() - start
          after = resource.getrusage(resource.RUSAGE_CHILDREN)
          if output.returncode:
            raise RuntimeError(f"{role} ended with {output.returncode}:\n{output.stderr[-2000:]}")
          if repeat < 0:
            continue
          seconds[role].append(elapsed)
          cpu_seconds[role].append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
          )
          auc[role] = float(output.stdout.split()[-1])
  for role in ROLES:
    print(
      f"{NAMES[role]:<30} {statistics.median(seconds[role]):6.2f} s "
      f"({min(seconds[role]):.2f} to {max(seconds[role]):.2f}), AUC {auc[role]:.4f} "
      f"of {possible:.4f}",
      flush=True,
    )
  return [
    Row(
      f"process, {NAMES[role]}{what}",
      NAMES["keras"],
      statistics.median(values[role]),
      statistics.median(values["keras"]),
      wanted,
    )
    for role in ROLES[:2]
    for what, values, wanted in ((", wall", seconds, 1.0), (", CPU", cpu_seconds, None))
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--epochs", type=int, default=2)
  parser.add_argument("--run", choices=ROLES, help="only this program, in this process")
  parser.add_argument("--folder", help="where its data is")
  args = parser.parse_args()
  if args.run:
    print(run(args.run, args.folder, args.epochs))
    return
  print_rows(measure(args.repeats, args.epochs))


if __name__ == "__main__":
  main()
