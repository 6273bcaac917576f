"""Tests of `monolith.keras.signatures`: what an exported Keras model takes, also over REST."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from monolith.keras.layers import Embedding
from tests.keras_versions import needs_keras_2, needs_keras_3
from tests.serving.server_process import ServerProcess

HISTORY = tf.ragged.constant([[7, 9], [], [9]], dtype=tf.int64)
FILM = tf.constant(["tea", "milk", "tea"])


def make_functional() -> tf.keras.Model:
  history = tf.keras.Input([None], dtype=tf.int64, ragged=True, name="history")
  film = tf.keras.Input([], dtype=tf.string, name="film")
  vectors = [Embedding(4, combiner="sum")(history), Embedding(4)(film)]
  score = tf.keras.layers.Dense(1, name="score")(tf.concat(vectors, 1))
  return tf.keras.Model({"history": history, "film": film}, score)


class Subclassed(tf.keras.Model):
  def __init__(self, combiner: str | None = "sum"):
    super().__init__()
    self.embedding = Embedding(2, combiner=combiner)

  def call(self, inputs):
    ids = inputs["history"] if isinstance(inputs, dict) else inputs
    return tf.reduce_sum(self.embedding(ids), -1)


def train(model: tf.keras.Model, inputs: object) -> tf.keras.Model:
  model.compile("sgd", "mse")
  model.fit(inputs, np.ones([3, 1]), verbose=0)
  return model


@needs_keras_3
class ExportTest(tf.test.TestCase):
  def test_padded_ids_and_weights_in_requests_over_rest(self):
    history = tf.keras.Input([None], dtype=tf.int64, name="history")
    weights = tf.keras.Input([None], name="weights")
    film = tf.keras.Input([], dtype=tf.string, name="film")
    vectors = [Embedding(4, combiner="mean")(history, weights=weights), Embedding(4)(film)]
    score = tf.keras.layers.Dense(1, name="score")(tf.keras.layers.Concatenate()(vectors))
    model = tf.keras.Model({"history": history, "weights": weights, "film": film}, score)
    inputs = {
      "history": HISTORY.to_tensor(),
      "weights": tf.sequence_mask(HISTORY.row_lengths(), dtype=tf.float32),
      "film": FILM,
    }
    train(model, inputs)
    folder = os.path.join(self.create_tempdir().full_path, "model")
    model.export(os.path.join(folder, "1"), verbose=False)

    with ServerProcess(
      f"--model_base_path={folder}", "--model_name=films"
    ).wait_until_listening() as server:
      server.wait_until_available("films")
      rows = [
        {"history": [7, 9], "weights": [1, 1], "film": "tea"},
        {"history": [0, 0], "weights": [0, 0], "film": "milk"},
        {"history": [9, 0], "weights": [1, 0], "film": "tea"},
      ]
      status, answer = server.post("/v1/models/films:predict", {"instances": rows})

    self.assertEqual(status, 200, answer)
    self.assertAllClose(answer["predictions"], model.predict(inputs, verbose=0), 1e-5, 1e-5)


@needs_keras_2  # Keras 3 names the inputs of what it exports
class SignatureTest(tf.test.TestCase):
  def save(self, model: tf.keras.Model) -> str:
    path = os.path.join(self.create_tempdir().full_path, "model", "1")
    model.save(path)
    return path

  def signature_of(self, model: tf.keras.Model):
    self.loaded = tf.saved_model.load(self.save(model))
    return self.loaded.signatures["serving_default"]

  def test_ragged_inputs_have_their_names_in_requests_over_rest(self):
    inputs = {"history": HISTORY, "film": FILM}
    model = train(make_functional(), inputs)
    folder = os.path.dirname(self.save(model))

    with ServerProcess(
      f"--model_base_path={folder}", "--model_name=films"
    ).wait_until_listening() as server:
      server.wait_until_available("films")
      request = {
        "film": ["tea", "milk", "tea"],
        "history": [7, 9, 9],
        "history_row_splits": [0, 2, 2, 3],
      }
      status, answer = server.post("/v1/models/films:predict", {"inputs": request})

    self.assertEqual(status, 200, answer)
    self.assertAllClose(answer["outputs"], model.predict(inputs, verbose=0), 1e-5, 1e-5)

  def test_inputs_of_subclassed_models(self):
    for name, inputs in (("history", {"history": HISTORY}), ("input_1", HISTORY)):
      model = train(Subclassed(), inputs)
      serve = self.signature_of(model)
      got = serve(**{name: HISTORY.flat_values, f"{name}_row_splits": HISTORY.row_splits})
      self.assertAllClose(*got.values(), model.predict(inputs, verbose=0))

  def test_sparse_inputs(self):
    sparse = HISTORY.to_sparse()
    model = train(Subclassed(), sparse)

    serve = self.signature_of(model)

    got = serve(
      input_1=sparse.values,
      input_1_indices=sparse.indices,
      input_1_dense_shape=sparse.dense_shape,
    )
    self.assertAllClose(*got.values(), model(sparse))

  def test_deeper_ragged_inputs(self):
    ids = tf.keras.Input([None, None], dtype=tf.int64, ragged=True, name="baskets")
    vectors = Embedding(2, combiner="sum")(ids)
    model = tf.keras.Model(ids, tf.reduce_sum(tf.reduce_sum(vectors, 1), 1))
    baskets = tf.ragged.constant([[[1, 2], []], [], [[3]]], dtype=tf.int64)
    train(model, baskets)

    serve = self.signature_of(model)

    got = serve(
      baskets=baskets.flat_values,
      baskets_row_splits=baskets.row_splits,
      baskets_row_splits_1=baskets.values.row_splits,
    )
    self.assertAllClose(*got.values(), model(baskets))

  def test_other_models_are_exported_as_ever(self):
    ids = tf.keras.Input([None], dtype=tf.int64, ragged=True, name="history")
    total = tf.reduce_sum(tf.cast(ids, tf.float32), 1)
    without_tables = self.signature_of(tf.keras.Model(ids, total))
    self.assertNotIn("history", without_tables.structured_input_signature[1])
    film = tf.keras.Input([], dtype=tf.string, name="film")
    dense = self.signature_of(tf.keras.Model(film, Embedding(2)(film)))
    self.assertEqual(list(dense.structured_input_signature[1]), ["film"])


if __name__ == "__main__":
  tf.test.main()
