"""Layers of Keras with their tables on a GPU, against the same with tables in main memory.

It runs without pytest, too: `python tests/gpu/keras_gpu_test.py`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import unittest
import unittest.mock

import numpy as np
import tensorflow as tf

import monolith.keras
from monolith.keras import devices
from monolith.keras import table as tables
from monolith.keras.layers import Embedding, EmbeddingGroup, Feature
from monolith.native_training import entry, hash_table_utils
from tests.keras_versions import IS_KERAS_3, export

_HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
_PLACES = ("cpu", "gpu")
_WORDS = np.array([f"word{i}" for i in range(50)], object)


def make_batches(count: int, size: int = 64, seed: int = 0):
  """Returns batches of skewed ids, texts, ragged ids, and labels that depend on them."""
  rng = np.random.default_rng(seed)
  weights = rng.standard_normal(50)
  for _ in range(count):
    user = np.minimum(rng.zipf(1.3, size), 50) - 1
    word = rng.integers(0, 50, size)
    lengths = rng.integers(0, 4, size)
    tags = rng.integers(0, 50, lengths.sum())
    label = (weights[user] + weights[word] > 0).astype(np.float32)[:, np.newaxis]
    inputs = {
      "user": tf.constant(user - 7, tf.int64),
      "word": tf.constant(_WORDS[word]),
      "tags": tf.RaggedTensor.from_row_lengths(tf.constant(tags, tf.int64), lengths),
    }
    yield inputs, tf.constant(label)


class Model(tf.keras.Model):
  """Three features in layers of their own, then a dense part."""

  def __init__(self, device: str | None, **kwargs):
    super().__init__()
    self.user = Embedding(8, name="user", device=device, **kwargs)
    self.word = Embedding(5, name="word", device=device, **kwargs)
    self.tags = Embedding(8, combiner="mean", name="tags", device=device, **kwargs)
    self.layers_ = [tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)]
    # Now, as Keras 2 draws first weights when they are built: both models shall have the same.
    for layer, width in zip(self.layers_, (21, 16)):
      layer.build([None, width])

  def call(self, inputs):
    vectors = [self.user(inputs["user"]), self.word(inputs["word"]), self.tags(inputs["tags"])]
    out = tf.concat(vectors, 1)
    for layer in self.layers_:
      out = layer(out)
    return out

  @property
  def tables(self) -> list[monolith.HashTable]:
    return [self.user.table, self.word.table, self.tags.table]


def make_functional(device: str | None) -> tf.keras.Model:
  inputs = {
    "user": tf.keras.Input([], dtype=tf.int64, name="user"),
    "word": tf.keras.Input([], dtype=tf.string, name="word"),
    "seen": tf.keras.Input([3], dtype=tf.int64, name="seen"),
  }
  group = EmbeddingGroup(
    {
      "user": 8,
      "word": Feature(5, optimizer="adagrad"),
      "seen": Feature(table="user", combiner="sum"),
    },
    device=device,
    name="group",
  )
  out = tf.keras.layers.Concatenate()(list(group(inputs).values()))
  out = tf.keras.layers.Dense(1)(tf.keras.layers.Dense(16, "relu")(out))
  return tf.keras.Model(inputs, out)


def functional_batches(count: int, size: int = 64):
  rng = np.random.default_rng(4)
  for inputs, label in make_batches(count, size):
    seen = tf.constant(rng.integers(-7, 43, [size, 3]), tf.int64)
    yield {"user": inputs["user"], "word": inputs["word"], "seen": seen}, label


@unittest.skipUnless(_HAS_GPU, "TensorFlow finds no GPU here")
class _GpuTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # New rows begin alike in both tables, and dense layers compute with all bits.
    hash_table_utils.set_table_seed(5)
    self.addCleanup(hash_table_utils.set_table_seed, None)
    tf.config.experimental.enable_tensor_float_32_execution(False)

  def made(self, make, *args, **kwargs):
    """Returns what `make` makes with each device, from the same random numbers."""
    results = []
    for place in _PLACES:
      tf.keras.utils.set_random_seed(3)
      results.append(make(place, *args, **kwargs))
    return results

  def assert_same_rows(self, want, got, tolerance: float = 1e-5) -> None:
    self.assertEqual((want.device, got.device), (devices.HOST, devices.GPU))
    for (ids, rows), (gpu_ids, gpu_rows) in [(want.items(), got.items())]:
      np.testing.assert_array_equal(gpu_ids, ids)
      np.testing.assert_allclose(gpu_rows, rows, rtol=tolerance, atol=tolerance)

  def assert_same_training(self, models, batches, tables_of) -> list[float]:
    """Trains both models batch by batch, and compares losses and rows."""
    all_losses = []
    for step, (inputs, labels) in enumerate(batches):
      losses = [float(np.ravel(m.train_on_batch(inputs, labels))[0]) for m in models]
      self.assertAllClose(losses[0], losses[1], rtol=1e-5, atol=1e-5, msg=f"step {step}")
      all_losses.append(losses[1])
    for want, got in zip(*map(tables_of, models)):
      self.assert_same_rows(want, got)
    return all_losses


class TrainingTest(_GpuTest):
  def test_every_optimizer_that_rows_follow(self):
    optimizers = tf.keras.optimizers
    for make in (
      lambda: optimizers.SGD(0.1),
      lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
      lambda: optimizers.Adagrad(0.05),
      lambda: optimizers.Adadelta(0.5),
      lambda: optimizers.Adam(0.01),
      lambda: optimizers.Adam(0.01, amsgrad=True),
      lambda: optimizers.Nadam(0.01),
      lambda: optimizers.RMSprop(0.01),
      lambda: optimizers.Ftrl(0.1),
      lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.02, 4, 0.5)),
    ):
      with self.subTest(make().get_config()):
        models = self.made(Model)
        for model in models:
          model.compile(make(), "mse")
        losses = self.assert_same_training(models, make_batches(12), lambda m: m.tables)
        self.assertLess(losses[-1], losses[0])

  def test_moments_decay_in_steps_without_the_row(self):
    pair = [monolith.HashTable(4, device=place) for place in _PLACES]
    gradients = np.random.default_rng(0).standard_normal([4, 4]).astype(np.float32)
    for step in range(30):
      ids = np.arange(4)[: 4 if step % 9 == 0 else 2]
      for table in pair:
        table.update(ids, gradients[: len(ids)])
    self.assert_same_rows(*pair)

  def test_fit_of_a_functional_model(self):
    models = self.made(make_functional)
    for model in models:
      model.compile("adam", "mse")
    self.assert_same_training(
      models, functional_batches(10), lambda m: list(m.get_layer("group").tables.values())
    )
    data = list(functional_batches(4))
    dataset = tf.data.Dataset.from_tensor_slices(
      (
        {key: tf.concat([inputs[key] for inputs, _ in data], 0) for key in data[0][0]},
        tf.concat([labels for _, labels in data], 0),
      )
    ).batch(64)
    histories = [model.fit(dataset, epochs=3, verbose=0).history["loss"] for model in models]
    self.assertAllClose(*histories, rtol=1e-5, atol=1e-5)
    results = [model.evaluate(dataset, verbose=0) for model in models]
    self.assertAllClose(*results, rtol=1e-5, atol=1e-5)
    self.assertAllClose(*[m.predict(dataset, verbose=0) for m in models], rtol=1e-4, atol=1e-4)

  def test_ways_to_run_fit(self):
    for arguments in ({"run_eagerly": True}, {"steps_per_execution": 3}):
      with self.subTest(arguments):
        models = self.made(make_functional)
        data = [*functional_batches(1, size=384)][0]
        losses = []
        for model in models:
          model.compile("adam", "mse", **arguments)
          losses.append(
            model.fit(*data, batch_size=64, epochs=2, shuffle=False, verbose=0).history["loss"]
          )
        self.assertAllClose(*losses, rtol=1e-5, atol=1e-5)

  def test_mixed_precision(self):
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    self.addCleanup(tf.keras.mixed_precision.set_global_policy, "float32")
    models = self.made(make_functional)
    losses = []
    for model in models:
      model.compile("adam", "mse")
      losses.append([float(np.ravel(model.train_on_batch(*b))[0]) for b in functional_batches(5)])
    self.assertAllClose(*losses, rtol=0.03, atol=0.03)
    for want, got in zip(*(m.get_layer("group").tables.values() for m in models)):
      np.testing.assert_array_equal(want.items()[0], got.items()[0])

  def test_loops_of_ones_own(self):
    for wrap in (lambda f: f, tf.function):
      models = self.made(Model)
      losses: list[list[float]] = [[], []]
      for model, results in zip(models, losses):
        optimizer = tf.keras.optimizers.Adam(0.01)

        def step(inputs, labels, model=model, optimizer=optimizer):
          with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - labels) ** 2)
          gradients = tape.gradient(loss, model.trainable_variables)
          for gradient, variable in zip(gradients, model.trainable_variables):
            if tables.table_of(variable) is not None:
              assert isinstance(gradient, tf.IndexedSlices)
          optimizer.apply_gradients(zip(gradients, model.trainable_variables))
          return loss

        if IS_KERAS_3:
          (inputs, _), *_ = make_batches(1)
          model(inputs)
          optimizer.build(model.trainable_variables)
        run = wrap(step)
        results += [float(run(*batch)) for batch in make_batches(8)]
      self.assertAllClose(*losses, rtol=1e-5, atol=1e-5)
      for want, got in zip(*(model.tables for model in models)):
        self.assert_same_rows(want, got)

  def test_weights_pool_and_mask(self):
    layers = self.made(
      lambda place: Embedding(4, "sgd", combiner="mean", device=place, learning_rate=0.1)
    )
    ids = tf.constant([[1, 2, 0], [3, 0, 0]], tf.int64)
    weights = tf.constant([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]])
    for layer in layers:
      layer.table.assign([1, 2, 3], np.arange(12.0).reshape(3, 4))
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids, weights=weights) ** 2)
      optimizer = tf.keras.optimizers.SGD(0.1)
      optimizer.apply_gradients([(tape.gradient(loss, layer.table.rows), layer.table.rows)])
    self.assert_same_rows(*(layer.table for layer in layers))
    self.assertEqual(len(layers[1].table), 3)

  def test_vectors_are_on_the_gpu_and_scopes_place_tables(self):
    with tf.device("GPU:0"):
      layer = Embedding(4, initializer="zeros")
    self.assertEqual(layer.table.device, devices.GPU)
    self.assertIn("GPU:0", layer(tf.constant([1, 2], tf.int64)).device)
    self.assertIn("GPU:0", tf.function(layer)(tf.constant([1, 2], tf.int64)).device)
    for scope in ("CPU:0", "GPU:0"):
      with tf.device(scope):
        self.assertAllEqual(layer([1, 2]), np.zeros([2, 4]))
        self.assertAllEqual(tf.function(lambda: layer.table.lookup([1, 2]))(), np.zeros([2, 4]))
        layer.table.update([1], np.zeros([1, 4]))
        self.assertEqual(len(layer.table), 1)
    with tf.distribute.OneDeviceStrategy("/gpu:0").scope():
      self.assertEqual(Embedding(4).table.device, devices.GPU)
    self.assertEqual(Embedding(4).table.device, devices.HOST)

  def test_tables_of_two_places_in_one_function(self):
    group = EmbeddingGroup(
      {
        "a": Feature(table=monolith.HashTable(4, device="cpu", name="a")),
        "b": Feature(table=monolith.HashTable(4, device="gpu", name="b")),
      }
    )
    optimizer = tf.keras.optimizers.Adam(0.1)
    if IS_KERAS_3:
      optimizer.build(group.trainable_variables)

    @tf.function
    def step(ids):
      with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum((v - 1) ** 2) for v in group({"a": ids, "b": ids}).values())
      variables = group.trainable_variables
      optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
      return loss

    losses = [float(step(tf.constant([1, 2, 2], tf.int64))) for _ in range(10)]
    self.assertLess(losses[-1], losses[0])
    self.assert_same_rows(*(feature.table for feature in group.features.values()))


class TableTest(_GpuTest):
  def test_methods(self):
    pair = [
      monolith.HashTable(3, "adagrad", initializer="zeros", device=place) for place in _PLACES
    ]
    values = np.random.default_rng(0).standard_normal([3, 3]).astype(np.float32)
    for table in pair:
      table.assign([1, 2, -(2**63)], values)
      table.assign_add(["tea", "milk", "tea"], values)
      table.update([1, 7, 7], values)
      table.erase([2, 99])
      self.assertEqual(table.contains([1, 2, 7]).numpy().tolist(), [True, False, True])
      self.assertIn("tea", table)
      self.assertEqual(int(table.stats()[0]), 5)
      self.assertEqual([bool(entry_) for entry_ in table.entries([1, 2])], [True, False])
      self.assertLen(table.entries(), 5)
      self.assertAllEqual(table.lookup([[2, 99]]), np.zeros([1, 2, 3]))
      self.assertEqual(tf.function(table.size)(), 5)
    self.assert_same_rows(*pair)

  def test_an_id_is_admitted_late(self):
    pair = [monolith.HashTable(2, "sgd", admit_after=2, device=place) for place in _PLACES]
    for table in pair:
      for ids in ([1, 1, 2], [1, 3]):
        table.update(ids, np.ones([len(ids), 2]))
      path = os.path.join(self.get_temp_dir(), f"filter{table.device[-5:-2]}")
      table.save(path)
      # Counts are saved, too.
      other = monolith.HashTable(2, "sgd", admit_after=2, device="cpu")
      other.load(path)
      other.update([3], np.ones([1, 2]))
      self.assertEqual(other.items()[0].tolist(), table.items()[0].tolist())
      other.update([3], np.ones([1, 2]))
      self.assertIn(3, other)
    self.assert_same_rows(*pair)

  def test_rows_expire(self):
    day = 86400
    now = int(datetime.datetime.now().timestamp())
    for place in _PLACES:
      table = monolith.HashTable(2, "sgd", expire_after="30d", device=place)
      for ids, time in (([1, 2], now - 40 * day), ([2, 3], now)):
        with unittest.mock.patch.object(
          tables, "now", lambda time=time: tf.constant(time, tf.int64)
        ):
          table.update(ids, np.ones([2, 2]))
      path = os.path.join(self.get_temp_dir(), f"expired_{place}")
      table.save(path)
      for other_place in _PLACES:
        other = monolith.HashTable(2, "sgd", expire_after="30d", device=other_place)
        other.load(path)
        self.assertEqual(other.items()[0].tolist(), [2, 3], (place, other_place))

  def test_rows_keep_values_when_a_model_is_compiled_anew(self):
    models = self.made(Model)
    # The steps of the second Adam count from 0: rows begin with new moments.
    for optimizer in ("adam", "adam", "sgd", "adagrad"):
      for model in models:
        model.compile(optimizer, "mse")
      self.assert_same_training(models, make_batches(4), lambda m: m.tables)

  def test_nan_is_refused_a_step_later(self):
    table = monolith.HashTable(2, "sgd", name="users", device="gpu")
    table.update([1, 2], np.array([[1, 1], [np.nan, 1]], np.float32))
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "users.*NaN or infinity were not written.*id 2"
    ):
      table.update([3], np.ones([1, 2]))
      table.save(os.path.join(self.get_temp_dir(), "nan"))
    self.assertNotIn(2, table)

  def test_a_gpu_has_no_serving_rows(self):
    layer = Embedding(4, device="gpu")
    config = layer.table._make_config(entry.SgdOptimizer(), devices.GPU)
    config.entry_config.entry_type = type(config.entry_config).SERVING
    with unittest.mock.patch.object(monolith.HashTable, "_make_config", lambda *args: config):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "kept in main memory"):
        Embedding(4, device="gpu")

  def test_a_library_that_is_missing(self):
    program = (
      "import monolith.keras\n"
      "try:\n  monolith.keras.layers.Embedding(4, device='gpu', name='users')\n"
      "except RuntimeError as error:\n  print('refused:', error)\n"
      "print(len(monolith.keras.layers.Embedding(4).table))\n"
    )
    environment = {**os.environ, "MONOLITH_CUDA_LIBRARY": "/nowhere/libmonolith_cuda.so"}
    done = subprocess.run(
      [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    self.assertRegex(
      done.stdout, "refused: table 'users' has device='gpu', but libmonolith_cuda", done.stderr
    )
    self.assertIn("\n0\n", done.stdout)


class FileTest(_GpuTest):
  def trained(self, place: str) -> tf.keras.Model:
    tf.keras.utils.set_random_seed(3)
    model = make_functional(place)
    model.compile("adam", "mse")
    for batch in functional_batches(5):
      model.train_on_batch(*batch)
    return model

  def assert_goes_on(self, models) -> None:
    """Checks that both models go on alike, so with the state of their rows' optimizers."""
    self.assert_same_training(
      models, functional_batches(4), lambda m: list(m.get_layer("group").tables.values())
    )

  def test_weights_go_from_one_place_to_the_other(self):
    for source in _PLACES:
      with self.subTest(source):
        folder = self.create_tempdir().full_path
        model = self.trained(source)
        path = os.path.join(folder, "model.weights.h5")
        model.save_weights(path)
        models = self.made(make_functional)
        for other in models:
          other.compile("adam", "mse")
          if IS_KERAS_3:
            other.optimizer.build(other.trainable_variables)
          other.load_weights(path)
        self.assert_goes_on(models)

  def test_checkpoints_go_from_one_place_to_the_other(self):
    for source in _PLACES:
      with self.subTest(source):
        folder = self.create_tempdir().full_path
        model = self.trained(source)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/ckpt")
        models = self.made(make_functional)
        for other in models:
          other.compile("adam", "mse")
          if IS_KERAS_3:
            other.optimizer.build(other.trainable_variables)
          read = tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(f"{folder}/ckpt")
          read.expect_partial()
        self.assert_goes_on(models)

  def test_keras_files(self):
    model = self.trained("gpu")
    path = os.path.join(self.get_temp_dir(), "model.keras")
    model.save(path)
    again = tf.keras.models.load_model(path)

    for name, table in again.get_layer("group").tables.items():
      self.assertEqual(table.device, devices.GPU)
      np.testing.assert_array_equal(
        table.items()[1], model.get_layer("group").tables[name].items()[1]
      )
    ((inputs, _),) = functional_batches(1)
    self.assertAllClose(again.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
    program = (
      "import sys, tensorflow as tf, monolith.keras\n"
      "model = tf.keras.models.load_model(sys.argv[1])\n"
      "print({n: (t.device, len(t)) for n, t in model.get_layer('group').tables.items()})\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
      [sys.executable, "-c", program, path], env=environment, capture_output=True, text=True
    )
    rows = {name: (devices.HOST, len(t)) for name, t in model.get_layer("group").tables.items()}
    self.assertIn(str(rows), done.stdout, done.stderr)
    self.assertIn("The tables of layer 'group' were on a GPU", done.stderr)

  def test_exported_models_have_tables_in_main_memory(self):
    model = self.trained("gpu")
    folder = os.path.join(self.get_temp_dir(), "exported")
    export(model, folder)
    ((inputs, _),) = functional_batches(1, size=16)
    want = model.predict(inputs, verbose=0)
    # The model itself goes on.
    model.train_on_batch(*next(functional_batches(1)))

    exported = tf.saved_model.load(folder)
    (answer,) = exported.signatures["serving_default"](**inputs).values()
    self.assertAllClose(answer, want, rtol=1e-5, atol=1e-5)
    np.savez(
      f"{folder}.npz",
      want=want,
      **{k: v.numpy().astype(str) if v.dtype == tf.string else v for k, v in inputs.items()},
    )
    program = (
      "import sys, numpy as np, tensorflow as tf, monolith.keras\n"
      "data = dict(np.load(sys.argv[1] + '.npz'))\n"
      "want = data.pop('want')\n"
      "serve = tf.saved_model.load(sys.argv[1]).signatures['serving_default']\n"
      "(answer,) = serve(**{k: tf.constant(v) for k, v in data.items()}).values()\n"
      "close = abs(answer.numpy() - want).max() < 1e-5\n"
      "print('equal', close, len(tf.config.list_physical_devices('GPU')))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
      [sys.executable, "-c", program, folder], env=environment, capture_output=True, text=True
    )
    self.assertIn("equal True 0", done.stdout, done.stderr)

  def test_get_and_set_weights(self):
    model = self.trained("gpu")
    ((inputs, labels),) = functional_batches(1)
    want = model.predict(inputs, verbose=0)
    kept = model.get_weights()
    model.fit(inputs, labels, epochs=2, verbose=0)
    model.set_weights(kept)
    self.assertAllClose(model.predict(inputs, verbose=0), want)
    clone = make_functional("cpu")
    clone.set_weights(kept)
    self.assertAllClose(clone.predict(inputs, verbose=0), want, rtol=1e-5, atol=1e-5)

  def test_groups(self):
    path = os.path.join(self.get_temp_dir(), "group")
    made = {
      place: {n: monolith.HashTable(3, "sgd", device=place, name=n) for n in ("a", "b")}
      for place in _PLACES
    }
    for name, table in made["gpu"].items():
      table.assign([1, 2], np.full([2, 3], float(ord(name))))
    monolith.keras.save_group(made["gpu"], path)
    monolith.keras.load_group(made["cpu"], path)
    for name in ("a", "b"):
      self.assert_same_rows(made["cpu"][name], made["gpu"][name])
    monolith.keras.save_group(made["cpu"], path + "_cpu")
    for table in made["gpu"].values():
      table.erase([1])
    monolith.keras.load_group(made["gpu"], path + "_cpu")
    self.assert_same_rows(made["cpu"]["a"], made["gpu"]["a"])


class DriverTest(_GpuTest):
  def test_train(self):
    data = list(functional_batches(8))
    dataset = tf.data.Dataset.from_tensor_slices(
      (
        {key: tf.concat([inputs[key] for inputs, _ in data], 0) for key in data[0][0]},
        tf.concat([labels for _, labels in data], 0),
      )
    ).batch(64)
    models = self.made(make_functional)
    before = []
    for model in models:
      model.compile(tf.keras.optimizers.Adam(0.01), "mse")
      before.append(model.evaluate(dataset, verbose=0))
      folder = self.create_tempdir().full_path
      monolith.keras.train(model, dataset.repeat(3), folder)
    after = [model.evaluate(dataset, verbose=0) for model in models]
    self.assertLess(after[1], before[1])
    # The CPU's run applies gradients a step late.
    self.assertAllClose(*after, rtol=0.1, atol=0.02)
    for name, table in models[1].get_layer("group").tables.items():
      other = models[0].get_layer("group").tables[name]
      self.assertEqual(table.device, devices.GPU)
      np.testing.assert_array_equal(table.items()[0], other.items()[0])


if __name__ == "__main__":
  tf.test.main()
