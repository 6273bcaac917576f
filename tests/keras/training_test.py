"""`monolith.keras.train` and `task.py`: one model by `fit`, here, on servers and on ranks."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import monolith.data
import monolith.keras
from monolith.keras import layers, task
from monolith.native_training import estimator
from monolith.native_training.checkpoints import files as checkpoint_files
from tests import free_ports
from tests.keras_versions import IS_KERAS_3, load_weights, needs_keras_3, weights_path
from tests.rank_processes import RankProcesses

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).absolute().parents[2]
_TIMEOUT_SECS = 300
_BATCH = 8

# A process of a cluster. Even ids are liked.
_PROGRAM = """
import os
import tensorflow as tf
import monolith.keras
from monolith import data

ids = tf.keras.Input([None], dtype=tf.int64, ragged=True, name="ids")
layer = monolith.keras.layers.Embedding(4, combiner="sum", learning_rate=0.5, name="items")
model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(layer(ids)))
model.compile(tf.keras.optimizers.Adam(0.05), "binary_crossentropy")
columns = {"ids": data.Ids(hashed=False), "liked": data.Number()}

def read(*unused):
  # Batches that begin anywhere: every other one of them has all ids.
  return data.csv(os.environ["CSV"], columns, 30, label="liked", epochs=40)

# The chief has its share of a dataset, the other worker what a function gives it.
is_worker = '"type": "worker"' in os.environ.get("TF_CONFIG", "")
saved = monolith.keras.train(model, read if is_worker else read(), os.environ["MODEL_DIR"])
print("saved", saved, "rows", len(layer.table))
"""


class Mixed(tf.keras.Model):
  """Looks up dense, ragged, sparse and text ids, one table from two layers."""

  def __init__(self):
    super().__init__()
    self.shared = monolith.keras.HashTable(
      3, optimizer="sgd", initializer=0.1, learning_rate=0.2, name="shared"
    )
    self.first = layers.Embedding(table=self.shared)
    self.group = layers.EmbeddingGroup(
      {
        "bag": layers.Feature(table=self.shared, combiner="mean"),
        "words": layers.Feature(3, "sgd", initializer=0.2, combiner="sum", learning_rate=0.1),
      }
    )
    self.pair = layers.Embedding(2, "sgd", initializer=0.3, learning_rate=0.1, name="pair")
    self.normalize = tf.keras.layers.BatchNormalization()
    self.hidden = tf.keras.layers.Dense(4, "swish")
    self.top = tf.keras.layers.Dense(1)

  def call(self, inputs, training=None):
    grouped = self.group({"bag": inputs["bag"], "words": inputs["words"]})
    units = tf.concat(
      [
        self.first(inputs["id"]),
        grouped["bag"],
        grouped["words"],
        tf.reshape(self.pair(inputs["pair"]), [-1, 4]),
        inputs["number"],
      ],
      axis=1,
    )
    return self.top(self.hidden(self.normalize(units, training=training)))[:, 0]


def _mixed_model(data):
  tf.keras.utils.set_random_seed(1)
  model = Mixed()
  model(next(iter(data))[0])  # Draws its weights.
  model.compile(tf.keras.optimizers.SGD(0.1, clipvalue=0.5), "mse")
  return model


def _mixed_data(num_batches):
  rng = np.random.default_rng(2)

  def draw(_):
    ids = rng.integers(-20, 20, _BATCH)
    lengths = rng.integers(0, 3, _BATCH)
    inputs = {
      "id": tf.constant(ids, tf.int32),
      "bag": tf.RaggedTensor.from_row_lengths(rng.integers(0, 30, lengths.sum()), lengths),
      "words": tf.sparse.from_dense(rng.choice(["", "a", "b"], [_BATCH, 2])),
      "pair": tf.constant(rng.integers(0, 9, [_BATCH, 2])),
      "number": tf.constant(rng.normal(size=[_BATCH, 1]), tf.float32),
    }
    return inputs, tf.constant(ids % 2, tf.float32)

  batches = [draw(i) for i in range(num_batches)]
  datasets = [tf.data.Dataset.from_tensors(batch) for batch in batches]
  dataset = datasets[0]
  for other in datasets[1:]:
    dataset = dataset.concatenate(other)
  return dataset


def _make_model(name="items"):
  ids = tf.keras.Input([], dtype=tf.int64, name="ids")
  vectors = layers.Embedding(4, learning_rate=0.5, name=name)(ids)
  model = tf.keras.Model(ids, tf.keras.layers.Dense(1, "sigmoid")(vectors))
  model.compile("adam", "binary_crossentropy")
  return model


def _make_columns_model():
  """Returns a model that takes what `csv` makes of columns."""

  def ragged(name):
    return tf.keras.Input([None], dtype=tf.int64, ragged=True, name=name)

  inputs = {name: ragged(name) for name in ("tags", "id", "age", "clicks")}
  units = [layers.Embedding(2, combiner="sum", name=f"{n}_rows")(x) for n, x in inputs.items()]
  inputs["name"] = tf.keras.Input([], dtype=tf.string, name="name")
  units.append(layers.Embedding(2, name="name_rows")(inputs["name"]))
  inputs["price"] = tf.keras.Input([], name="price")
  units.append(inputs["price"][:, tf.newaxis])
  model = tf.keras.Model(
    inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(units))[:, 0]
  )
  model.compile("sgd", "mse")
  return model


def _make_data():
  return tf.data.Dataset.range(16).map(lambda i: (i, tf.cast(i % 2 == 0, tf.float32))).batch(8)


class TrainTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self._dir = os.path.join(folder.name, "model")
    self._csv = os.path.join(folder.name, "liked.csv")
    with open(self._csv, "w") as file:
      file.write("ids,liked\n" + "".join(f"{i},{int(i % 2 == 0)}\n" for i in range(100)))

  def test_does_what_fit_does(self):
    data = _mixed_data(5)
    fitted, trained = _mixed_model(data), _mixed_model(data)

    fitted.fit(data, shuffle=False, verbose=0)
    # Without lookups ahead, which the drivers' defaults have and `fit` has not.
    config = estimator.RunnerConfig(is_local=True)
    checkpoint = monolith.keras.train(trained, data, self._dir, config=config)

    self.assertEqual(checkpoint, os.path.join(self._dir, "model.ckpt-5"))
    for name, (ids, rows) in _items(fitted).items():
      got_ids, got_rows = _items(trained)[name]
      np.testing.assert_array_equal(got_ids, ids, name)
      np.testing.assert_allclose(got_rows, rows, rtol=1e-4, atol=1e-6, err_msg=name)
    for got, want in zip(trained.weights, fitted.weights):
      np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-6)

  def test_begins_with_the_models_rows_and_goes_on_from_its_checkpoint_on_servers(self):
    model = _make_model()
    model.fit(_make_data(), verbose=0)
    model.get_layer("items").table.assign([1000], np.full([1, 4], 7.0))

    monolith.keras.train(model, _make_data(), self._dir, max_steps=1)
    table = model.get_layer("items").table
    np.testing.assert_array_equal(table.lookup([1000]), np.full([1, 4], 7.0))
    checkpoint = monolith.keras.train(
      model, _make_data().repeat(), self._dir, max_steps=3, num_ps=2
    )

    self.assertEqual(checkpoint, os.path.join(self._dir, "model.ckpt-3"))
    self.assertEqual(len(table), 17)
    np.testing.assert_array_equal(table.lookup([1000]), np.full([1, 4], 7.0))
    fresh = _make_model()
    monolith.keras.load_trained(fresh, _make_data(), self._dir)
    np.testing.assert_array_equal(
      fresh.predict(tf.range(16), verbose=0), model.predict(tf.range(16), verbose=0)
    )
    # Keras goes on as if it had trained all along.
    path = weights_path(self._dir, "weights")
    model.save_weights(path)
    load_weights(fresh, path)
    self.assertEqual(len(fresh.get_layer("items").table), 17)
    model.fit(_make_data(), verbose=0)

  def test_loads_rows_and_variables_of_one_checkpoint_while_a_run_on_servers_saves(self):
    model = _make_model()
    prefixes = [
      monolith.keras.train(model, _make_data().repeat(), self._dir, max_steps=steps, num_ps=2)
      for steps in (1, 40)
    ]
    wanted = [self._load_named(prefix, prefixes) for prefix in prefixes]
    self.assertFalse(np.array_equal(*wanted))

    def load_while(change):
      """Changes the folder as soon as the first of the two has been opened."""
      load_checkpoint, changes = tf.train.load_checkpoint, [change]

      def open_and_change(prefix):
        opened = load_checkpoint(prefix)
        if changes:
          changes.pop()()
        return opened

      with mock.patch.object(tf.train, "load_checkpoint", open_and_change):
        return self._load_named(prefixes[0], prefixes)

    def save_the_second():
      self._name(prefixes[1], prefixes)

    def replace_the_first():
      self._name(prefixes[1], prefixes[1:])
      checkpoint_files.delete_checkpoint(prefixes[0])

    np.testing.assert_array_equal(load_while(save_the_second), wanted[0])
    np.testing.assert_array_equal(load_while(replace_the_first), wanted[1])

  def _name(self, newest, prefixes):
    others = [prefix for prefix in prefixes if prefix != newest]
    tf.compat.v1.train.update_checkpoint_state(self._dir, newest, [*others, newest])

  def _load_named(self, newest, prefixes):
    """Returns what a model predicts with rows and variables of what the state file names."""
    self._name(newest, prefixes)
    model = _make_model()
    monolith.keras.load_trained(model, _make_data(), self._dir)
    return model.predict(tf.range(16), verbose=0)

  def test_does_not_begin_anew_beside_checkpoints_without_their_state_file(self):
    model = _make_model()
    monolith.keras.train(model, _make_data(), self._dir)
    os.remove(os.path.join(self._dir, "checkpoint"))

    with self.assertRaisesRegex(ValueError, "model.ckpt-2 are there, but the file .* is missing"):
      monolith.keras.train(model, _make_data(), self._dir)

    self.assertFalse(os.path.exists(os.path.join(self._dir, "checkpoint")))

  def test_a_schedule_and_frozen_parts_hold(self):
    ids = tf.keras.Input([], dtype=tf.int64)
    falling = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
    moving = layers.Embedding(2, "sgd", 0.5, learning_rate=falling, name="moving")
    frozen = layers.Embedding(2, "sgd", 0.5, learning_rate=1.0, name="frozen")
    frozen.trainable = False
    dense = tf.keras.layers.Dense(1, trainable=False)
    model = tf.keras.Model(ids, dense(moving(ids) + frozen(ids)))
    model.compile("sgd", "mse")
    kernel = dense.kernel.numpy()

    for max_steps in (1, 3):
      # A push during the next step would see the rate of that one.
      config = estimator.RunnerConfig(is_local=True)
      data = _make_data().repeat(2)
      monolith.keras.train(model, data, self._dir, max_steps=max_steps, config=config)
      if max_steps == 1:
        after_one = moving.table.items()[1]

    self.assertEqual(len(frozen.table), 0)
    np.testing.assert_array_equal(dense.kernel.numpy(), kernel)
    self.assertTrue(np.any(after_one != 0.5))
    np.testing.assert_array_equal(moving.table.lookup(tf.range(8)), after_one)

  @needs_keras_3
  def test_clips_by_the_global_norm_and_does_not_scale(self):
    found = []
    for optimizer in (
      tf.keras.optimizers.SGD(0.5),
      monolith.keras.optimizers.GlobalClipOptimizer(
        tf.keras.optimizers.SGD(0.5, loss_scale_factor=64.0), 1e6
      ),
      monolith.keras.optimizers.GlobalClipOptimizer(tf.keras.optimizers.SGD(0.5), 1e-6),
    ):
      ids = tf.keras.Input([], dtype=tf.int64)
      layer = layers.Embedding(2, initializer=0.5, name="items")
      model = tf.keras.Model(ids, tf.keras.layers.Dense(1, kernel_initializer="ones")(layer(ids)))
      model.compile(optimizer, "mse")
      monolith.keras.train(model, _make_data(), os.path.join(self._dir, str(len(found))))
      found.append(layer.table.items()[1])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    self.assertGreater(np.abs(found[0] - 0.5).max(), 1e-3)
    np.testing.assert_allclose(found[2], 0.5, atol=1e-5)

  def test_gradients_that_are_not_finite_leave_dense_variables_finite(self):
    skip = mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip")
    skip.start()
    self.addCleanup(skip.stop)
    optimizer = tf.keras.optimizers.Adam()
    if IS_KERAS_3:
      optimizer = monolith.keras.optimizers.FiniteOptimizer(optimizer)

    def loss(labels, outputs):
      # A root of 0, whose gradient is infinite, for the label 7. A loss of NaN ends training.
      zero = tf.where(labels == 7, outputs - tf.stop_gradient(outputs), 1.0)
      return tf.reduce_mean((outputs - labels) ** 2 + tf.sqrt(zero))

    for num_ps in (0, 2):
      ids = tf.keras.Input([], dtype=tf.int64)
      layer = layers.Embedding(2, name="items")
      model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(layer(ids)))
      model.compile(type(optimizer).from_config(optimizer.get_config()), loss)
      labels = np.where(np.arange(64) == 20, 7.0, 1.0).astype(np.float32)[:, None]
      data = tf.data.Dataset.from_tensor_slices((np.arange(64), labels)).batch(8)

      monolith.keras.train(model, data, os.path.join(self._dir, str(num_ps)), num_ps=num_ps)

      with self.subTest(num_ps=num_ps):
        kernel, bias = model.layers[-1].get_weights()
        self.assertTrue(np.isfinite(kernel).all())
        self.assertGreater(bias[0], 0)
        self.assertTrue(np.isfinite(layer.table.items()[1]).all())

  def test_says_what_it_cannot_train(self):
    with self.assertRaisesRegex(ValueError, "looks up no table"):
      plain = tf.keras.Sequential([tf.keras.layers.Dense(1)])
      plain.compile("sgd", "mse")
      data = tf.data.Dataset.from_tensors((tf.ones([2, 2]), tf.ones([2, 1])))
      monolith.keras.train(plain, data, self._dir)
    with self.assertRaisesRegex(ValueError, "call compile before train"):
      monolith.keras.train(tf.keras.Sequential([layers.Embedding(2)]), _make_data(), self._dir)
    with self.assertRaisesRegex(TypeError, "want a tf.data.Dataset of batches"):
      monolith.keras.train(_make_model(), [1, 2], self._dir)
    with self.assertRaisesRegex(ValueError, "has use_ema: .*leave them out"):
      averaged = _make_model()
      averaged.compile(tf.keras.optimizers.SGD(use_ema=True), "mse")
      monolith.keras.train(averaged, _make_data(), self._dir)
    with self.assertRaisesRegex(ValueError, "compute ids in the dataset"):
      ids = tf.keras.Input([], dtype=tf.int64)
      cast = tf.keras.layers.Lambda(lambda rows: tf.cast(rows[:, 0], tf.int64), dtype="int64")
      learnt = cast(layers.Embedding(1)(ids))
      nested = tf.keras.Model(ids, layers.Embedding(1)(learnt))
      nested.compile("sgd", "mse")
      monolith.keras.train(nested, _make_data(), self._dir)
    with self.assertRaisesRegex(ValueError, "such as a HashTable.*give train a function"):
      held = monolith.HashTable(1)
      looked_up = _make_data().map(lambda i, liked: (i, liked + held.lookup(i)[:, 0]))
      monolith.keras.train(_make_model(), looked_up, self._dir)
    with self.assertRaisesRegex(ValueError, "no checkpoint in .*: the folder does not exist"):
      monolith.keras.load_trained(_make_model(), _make_data(), self._dir)
    monolith.keras.train(_make_model(), _make_data(), self._dir)
    with self.assertRaises(tf.errors.NotFoundError):
      monolith.keras.load_trained(_make_model("others"), _make_data(), self._dir)

  def test_trains_on_datasets_of_every_kind_of_column_as_fit_does(self):
    path = os.path.join(os.path.dirname(self._csv), "columns.csv")
    with open(path, "w") as file:
      file.write("tags,id,price,age,clicks,name,liked\n")
      file.write("this is no row\n")
      file.writelines(f"a{i}|b,{i},{i}.5,{i},{i * i},n{i % 3},{i % 2}\n" for i in range(16))
    columns = {
      "tags": monolith.data.Ids("|"),
      "id": monolith.data.Ids(hashed=False),
      "price": monolith.data.Number(),
      "age": monolith.data.Buckets([3, 9]),
      "clicks": monolith.data.LogBuckets(),
      "name": monolith.data.Text(),
      "liked": monolith.data.Number(),
    }
    counter = monolith.data.BadRows()
    data = monolith.data.csv(path, columns, 4, label="liked", on_bad_row="skip", bad_rows=counter)
    models = [_make_columns_model() for _ in range(2)]

    models[0].fit(data, verbose=0)
    monolith.keras.train(models[1], data, self._dir, num_ps=2)

    for name in ("tags", "id", "age", "clicks", "name"):
      want, got = (model.get_layer(f"{name}_rows").table for model in models)
      np.testing.assert_array_equal(got.items()[0], want.items()[0], name)
    # The driver reads a little more than it trains on.
    self.assertGreaterEqual(counter.count, 2)

  def test_trains_on_data_that_python_makes_with_the_objects_it_uses(self):
    batches = [(np.arange(4) + 4 * i, np.ones(4, np.float32)) for i in range(3)]
    data = tf.data.Dataset.from_generator(
      lambda: iter(batches), output_signature=(tf.TensorSpec([4], tf.int64), tf.TensorSpec([4]))
    )
    start = tf.Variable(100, dtype=tf.int64)
    names = tf.keras.layers.IntegerLookup(vocabulary=np.arange(100, 112))
    data = data.map(lambda ids, liked: (names(ids + start), liked))
    model = _make_model()

    monolith.keras.train(model, data, self._dir, num_ps=2)

    np.testing.assert_array_equal(model.get_layer("items").table.items()[0], np.arange(1, 13))

  def test_equality_of_tensors_is_by_element_while_a_thread_builds_and_no_longer(self):
    original = tf.Tensor.__eq__
    entered, go_on = threading.Event(), threading.Event()
    found = {}

    def compare(name):
      with tf.Graph().as_default():
        one = tf.constant([1])
        found[name] = one == tf.constant([1])

    def build():
      with task._equality_by_element():
        compare("first")
        entered.set()
        go_on.wait(_TIMEOUT_SECS)

    def build_meanwhile():
      with task._equality_by_element():
        compare("second")

    first = threading.Thread(target=build)
    first.start()
    self.assertTrue(entered.wait(_TIMEOUT_SECS))
    second = threading.Thread(target=build_meanwhile)
    second.start()
    compare("beside")
    go_on.set()
    first.join()
    second.join()

    self.assertIsInstance(found["first"], tf.Tensor)
    self.assertIsInstance(found["second"], tf.Tensor)
    self.assertIs(found["beside"], False)
    self.assertIs(tf.Tensor.__eq__, original)

  def test_a_server_fails_with_its_chief(self):
    with open(self._csv, "a") as file:
      file.write("seven,1\n")
    processes = self._start_cluster("ps", "chief")

    for job in ("chief", "ps"):
      output = processes[job].communicate(timeout=_TIMEOUT_SECS)[1]
      self.assertNotEqual(processes[job].returncode, 0)
      self.assertIn("liked.csv:102: column `ids` is `seven`", output)
    self.assertIn("told parameter server 0 to stop", output)

  def test_trains_on_two_workers_and_a_server_of_tf_config(self):
    processes = self._start_cluster("ps", "chief", "worker")

    # The chief first: if it fails, nobody tells the others to stop.
    outputs = {}
    for job in ("chief", "worker", "ps"):
      outputs[job] = processes[job].communicate(timeout=_TIMEOUT_SECS)
      self.assertEqual(processes[job].returncode, 0, outputs[job][1])

    # The chief has read its half of 134 batches, the other worker as many as it came to.
    pattern = rf"saved {re.escape(self._dir)}/model\.ckpt-(\d+) rows 0"
    self.assertRegex(outputs["chief"][0], pattern)
    self.assertIn(int(re.search(pattern, outputs["chief"][0]).group(1)), range(67, 202))
    for job in ("worker", "ps"):
      self.assertIn("saved None", outputs[job][0])
    self._check_learnt()

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "starts ranks: make soak")
  def test_trains_on_ranks(self):
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
      program.write(_PROGRAM)
      program.flush()
      with mock.patch.dict(os.environ, MODEL_DIR=self._dir, CSV=self._csv):
        ranks = RankProcesses(2, [program.name])
      self.addCleanup(ranks.close)
      self.assertEqual(ranks.wait(_TIMEOUT_SECS), [0, 0], ranks.report())

    # Each rank has its half of 134 batches.
    self.assertIn(f"saved {os.path.join(self._dir, 'model.ckpt-67')}", ranks.output(0))
    self.assertIn("saved None", ranks.output(1))
    self._check_learnt()

  def _start_cluster(self, *jobs):
    cluster = {job: [f"localhost:{free_ports.get_free_port()}"] for job in jobs}
    return {
      job: self._start({"TF_CONFIG": json.dumps({"cluster": cluster, "task": _task(job)})})
      for job in cluster
    }

  def _start(self, env):
    process = subprocess.Popen(
      [sys.executable, "-c", _PROGRAM],
      env={
        **os.environ,
        **env,
        "CSV": self._csv,
        "MODEL_DIR": self._dir,
        "PYTHONPATH": str(_ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(process.kill)
    return process

  def _check_learnt(self):
    model = _make_model()  # of the same names, for one id per example
    monolith.keras.load_trained(model, _make_data(), self._dir)
    self.assertEqual(len(model.get_layer("items").table), 100)
    liked = model.predict(tf.range(100), verbose=0)[:, 0] > 0.5
    np.testing.assert_array_equal(liked, np.arange(100) % 2 == 0)


def _task(job):
  return {"type": job, "index": 0}


def _items(model):
  found = {"shared": model.shared, "words": model.group.tables["words"], "pair": model.pair.table}
  return {name: table.items() for name, table in found.items()}


if __name__ == "__main__":
  unittest.main()
