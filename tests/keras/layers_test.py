"""Tests of `layers`, `callbacks`, `saved_rows`, `optimizers`, `rows`, `_keras` and its two sides.

`_keras_2` and `_keras_3` are those sides.

Tables in models of the Keras that TensorFlow has: 2 or 3.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

import numpy as np
import tensorflow as tf

import monolith.keras
from monolith.keras import _keras, layers
from monolith.keras.layers import Embedding, EmbeddingGroup, Feature
from monolith.native_training import entry
from tests.keras_versions import IS_KERAS_3, legacy_optimizers, needs_keras_3, ours_in_keras

NUM_IDS = 40
_PACKAGE = pathlib.Path(monolith.keras.__file__).parent


def make_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Returns ids `[256, 3]`, and labels that depend on a hidden weight of each id."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, NUM_IDS, [256, 3]) - NUM_IDS // 2
  weights = np.random.default_rng(7).normal(size=NUM_IDS)
  return ids, (weights[ids + NUM_IDS // 2].sum(1) > 0).astype(np.float32)


def make_embedding(**kwargs) -> Embedding:
  return Embedding(4, combiner="sum", learning_rate=0.5, **kwargs)


def make_sequential() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([3], dtype=tf.int64),
      make_embedding(),
      tf.keras.layers.Dense(1, dtype="float32"),
    ]
  )


def make_functional() -> tf.keras.Model:
  ids = tf.keras.Input([3], dtype=tf.int64)
  return tf.keras.Model(ids, tf.keras.layers.Dense(1)(make_embedding()(ids)))


class Subclassed(tf.keras.Model):
  def build(self, input_shape):
    self.embedding = make_embedding()
    self.dense = tf.keras.layers.Dense(1)

  def call(self, inputs):
    return self.dense(self.embedding(inputs))


def compile_and_fit(model: tf.keras.Model, optimizer=None, epochs: int = 4, **kwargs) -> float:
  """Returns the AUC of the last epoch."""
  model.compile(
    optimizer or tf.keras.optimizers.Adam(0.05),
    tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[tf.keras.metrics.AUC(from_logits=True, name="auc")],
    **kwargs,
  )
  return model.fit(*make_data(), batch_size=64, epochs=epochs, verbose=0).history["auc"][-1]


def table_of(model: tf.keras.Model) -> monolith.keras.HashTable:
  (layer,) = (layer for layer in model.layers if isinstance(layer, Embedding))
  return layer.table


def clip_together(rate: float, limit: float, make=tf.keras.optimizers.SGD):
  """Returns an optimizer that clips all gradients by the norm of them together."""
  if IS_KERAS_3:
    return monolith.keras.optimizers.GlobalClipOptimizer(make(rate), limit)
  return make(rate, global_clipnorm=limit)


def scale_loss(optimizer):
  """Returns an optimizer that scales the loss, and skips steps with infinite gradients."""
  if IS_KERAS_3:
    return monolith.keras.optimizers.LossScaleOptimizer(optimizer)
  return tf.keras.mixed_precision.LossScaleOptimizer(optimizer)


def leave_out_nan(optimizer):
  """Returns an optimizer that leaves dense variables alone where a gradient is not finite."""
  return monolith.keras.optimizers.FiniteOptimizer(optimizer) if IS_KERAS_3 else optimizer


class FitTest(tf.test.TestCase):
  def tearDown(self):
    tf.keras.mixed_precision.set_global_policy("float32")
    super().tearDown()

  def test_every_kind_of_model_learns(self):
    for make in (make_sequential, make_functional, Subclassed):
      with self.subTest(make.__name__):
        self.assertGreater(compile_and_fit(make()), 0.95)

  def test_rows_move_although_the_loss_is_a_mean(self):
    rng = np.random.default_rng(3)
    user, item = rng.integers(60, size=[2, 12_000])
    labels = (user + item) % 4 == 0
    for name in ("adagrad", "adam"):
      inputs = [tf.keras.Input([], dtype=tf.int64) for _ in range(2)]
      left, right = (Embedding(8, name, learning_rate=0.1)(ids) for ids in inputs)
      units = tf.keras.layers.Dense(16, "relu")(left * right)
      model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, "sigmoid")(units))
      model.compile(tf.keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
      model.fit([user, item], labels, batch_size=500, epochs=10, verbose=0)
      with self.subTest(name):
        self.assertGreater(model.evaluate([user, item], labels, batch_size=1000, verbose=0)[1], 0.9)

  def test_rows_learn_what_a_dense_variable_learns(self):
    ids, labels = make_data()
    ids += NUM_IDS // 2
    for row_optimizer, theirs in (
      ("sgd", tf.keras.optimizers.SGD(0.5)),
      (
        entry.AdagradOptimizer(initial_accumulator_value=0.1),
        tf.keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.1),
      ),
    ):
      ours = tf.keras.Sequential(
        [
          tf.keras.Input([3], dtype=tf.int64),
          Embedding(4, row_optimizer, "zeros", learning_rate=0.5),
        ]
      )
      peer = tf.keras.Sequential([tf.keras.layers.Embedding(NUM_IDS, 4, "zeros")])
      for model, optimizer in ((ours, tf.keras.optimizers.SGD(0.5)), (peer, theirs)):
        model.add(tf.keras.layers.GlobalAveragePooling1D())
        model.add(tf.keras.layers.Dense(1, kernel_initializer="ones", trainable=False))
        model.compile(optimizer, "mse")
        model.fit(ids, labels, batch_size=64, epochs=3, shuffle=False, verbose=0)

      if IS_KERAS_3 and row_optimizer != "sgd":
        continue  # which squares the gradients of equal ids one by one
      with self.subTest(theirs.name):
        self.assertAllClose(
          ours.layers[0].table.lookup(np.arange(NUM_IDS)), peer.layers[0].weights[0], 1e-5, 1e-5
        )

  def test_every_way_of_running_learns(self):
    for name, kwargs in (
      ("run_eagerly", {"run_eagerly": True}),
      ("steps_per_execution", {"steps_per_execution": 2}),
      ("clipnorm", {"optimizer": tf.keras.optimizers.Adam(0.05, clipnorm=5.0)}),
      *(("legacy optimizer", {"optimizer": make(0.05)}) for make in legacy_optimizers("Adam")),
    ):
      with self.subTest(name):
        self.assertGreater(compile_and_fit(make_sequential(), **kwargs), 0.95)

  def test_a_training_step_of_ones_own_learns(self):
    class Own(Subclassed):
      def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
          loss = tf.reduce_mean((self(inputs, training=True)[:, 0] - labels) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"error": loss}  # Keras 3 would show its own "loss"

    model = Own()
    model.compile(tf.keras.optimizers.Adam(0.05))
    losses = model.fit(*make_data(), batch_size=64, epochs=4, verbose=0).history["error"]
    self.assertLess(losses[-1], losses[0] / 2)
    self.assertLen(model.embedding.table, NUM_IDS)

  def test_the_global_norm_clips_gradients_of_tables(self):
    self.assertGreater(
      compile_and_fit(make_sequential(), clip_together(0.05, 5.0, tf.keras.optimizers.Adam)), 0.95
    )

  @needs_keras_3
  def test_what_an_optimizer_cannot_do_to_rows_is_refused(self):
    for kwargs, remedy in (
      ({"global_clipnorm": 5.0}, "global_clipnorm=5.0, which cannot.*GlobalClipOptimizer.*, 5.0"),
      ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*use larger batches"),
      ({"use_ema": True}, "use_ema=True.*leave averages out"),
    ):
      with self.subTest(remedy), self.assertRaisesRegex(ValueError, remedy):
        compile_and_fit(make_sequential(), tf.keras.optimizers.SGD(0.05, **kwargs), epochs=1)
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    for name in ("sgd", "adam"):
      with (
        self.subTest(name),
        self.assertRaisesRegex(ValueError, "optimizers.LossScaleOptimizer.*'mixed_bfloat16'"),
      ):
        compile_and_fit(make_sequential(), name, epochs=1)

  @needs_keras_3
  def test_every_optimizer_trains_what_is_dense(self):
    names = [
      name
      for name, cls in vars(tf.keras.optimizers).items()
      if isinstance(cls, type)
      and issubclass(cls, tf.keras.optimizers.Optimizer)
      # These three make no step of their own.
      and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    self.assertGreater(len(names), 10)
    for name in names:
      model = tf.keras.Sequential(
        [tf.keras.Input([3], dtype=tf.int64), Embedding(4, "adagrad", combiner="sum")]
      )
      model.add(tf.keras.layers.Dense(1))
      before = model.layers[1].kernel.numpy()
      model.compile(getattr(tf.keras.optimizers, name)(0.01), "mse")
      model.fit(*make_data(), verbose=0)
      with self.subTest(name):
        self.assertNotAllClose(model.layers[1].kernel, before)
        self.assertLen(table_of(model), NUM_IDS)

  @unittest.skipUnless(hasattr(tf.keras.optimizers, "MultiOptimizer"), "newer than this Keras")
  def test_rows_follow_the_one_of_several_optimizers_that_gets_them(self):
    model = make_sequential()
    rows = table_of(model).rows
    of_rows, of_others = tf.keras.optimizers.SGD(0.05), tf.keras.optimizers.Adam(0.05)
    compile_and_fit(
      model,
      tf.keras.optimizers.MultiOptimizer(
        lambda variable: of_rows if variable is rows else of_others
      ),
      epochs=1,
    )
    self.assertIsInstance(table_of(model).optimizer, entry.SgdOptimizer)
    self.assertLen(table_of(model), NUM_IDS)

  @needs_keras_3
  def test_a_fixed_loss_scale_does_not_reach_rows(self):
    layer = Embedding(1, "sgd", "zeros", learning_rate=1.0)
    optimizer = tf.keras.optimizers.SGD(0.1, loss_scale_factor=128.0)
    with tf.GradientTape() as tape:
      loss = optimizer.scale_loss(tf.reduce_sum(layer(tf.constant([5], tf.int64))))
    gradients = tape.gradient(loss, layer.trainable_variables)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    self.assertAllEqual(layer.table.lookup([5]), [[-1]])

  def test_bfloat16_learns(self):
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = make_sequential()
    self.assertGreater(compile_and_fit(model), 0.95)
    self.assertEqual(model.layers[0](make_data()[0]).dtype, tf.bfloat16)

  def test_mixed_precision_does_not_scale_what_tables_learn(self):
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    model = make_sequential()
    adam = tf.keras.optimizers.Adam(0.05)

    self.assertGreater(compile_and_fit(model, scale_loss(adam) if IS_KERAS_3 else adam), 0.95)

    self.assertEqual(model.layers[0](make_data()[0]).dtype, tf.float16)
    # Adagrad's first step is about the rate, whatever the gradient's size; the loss scale would
    # show in plain gradient descent.
    layer = Embedding(1, "sgd", "zeros", learning_rate=1.0)
    optimizer = scale_loss(tf.keras.optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
      loss = tf.cast(tf.reduce_sum(layer(tf.constant([5], tf.int64))), tf.float32)
      scaled = optimizer.scale_loss(loss) if IS_KERAS_3 else optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(scaled, layer.trainable_variables)
    if not IS_KERAS_3:
      gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    self.assertAllEqual(layer.table.lookup([5]), [[-1]])

  def test_a_step_with_infinite_gradients_is_skipped(self):
    layer = Embedding(1, "sgd", "zeros", learning_rate=1.0, dtype="mixed_float16")
    optimizer = scale_loss(tf.keras.optimizers.SGD(0.1))
    gradient = tf.IndexedSlices(tf.constant([[np.inf]]), tf.constant([5], tf.int64))

    optimizer.apply_gradients([(gradient, layer.table.rows)])

    self.assertEmpty(layer.table)

  def test_evaluate_and_predict_create_and_count_nothing(self):
    model = tf.keras.Sequential(
      [
        tf.keras.Input([3], dtype=tf.int64),
        make_embedding(admit_after=1),
        tf.keras.layers.Dense(1),
      ]
    )
    model.compile("adam", "mse")
    ids, labels = make_data()

    for _ in range(3):
      model.evaluate(ids, labels, verbose=0)
      model.predict(ids, verbose=0)
    self.assertEmpty(table_of(model))

    # One batch is one occurrence: had the calls above counted, it would create rows.
    model.train_on_batch(ids, labels)
    self.assertEmpty(table_of(model))
    model.train_on_batch(ids, labels)
    self.assertLen(table_of(model), NUM_IDS)

  def test_frozen_layers_do_not_learn(self):
    model = make_sequential()
    compile_and_fit(model, epochs=1)
    before = table_of(model).items()[1]
    model.layers[0].trainable = False

    compile_and_fit(model, epochs=1)

    self.assertAllEqual(table_of(model).items()[1], before)
    self.assertLen(model.trainable_variables, 2)

  def test_callbacks_change_a_tables_rate(self):
    model = make_sequential()

    class Stop(tf.keras.callbacks.Callback):
      def on_epoch_begin(self, epoch, logs=None):
        table_of(self.model).learning_rate.assign(0.0)

    compile_and_fit(model, epochs=1)
    before = table_of(model).items()[1]
    model.fit(*make_data(), verbose=0, callbacks=[Stop()])

    self.assertAllEqual(table_of(model).items()[1], before)

  def test_a_rate_that_was_assigned_is_saved_with_the_model(self):
    one, group = (tf.keras.Input([], dtype="int64", name=name) for name in ("one", "b"))
    features = {"b": Feature(2, "adagrad"), "c": Feature(2, "sgd", learning_rate=0.5)}
    vectors = [
      Embedding(2, "sgd", learning_rate=0.1, name="a")(one),
      *EmbeddingGroup(features, name="group")({"b": group, "c": group}).values(),
    ]
    model = tf.keras.Model([one, group], tf.keras.layers.Concatenate()(vectors))
    tables = {"a": model.get_layer("a").table, **model.get_layer("group").tables}
    self.assertEqual(model.get_layer("a").get_config()["learning_rate"], 0.1)
    tables["a"].learning_rate.assign(0.25)
    tables["b"].learning_rate.assign(0.125)
    path = os.path.join(self.get_temp_dir(), "rates.keras")

    model.save(path)
    loaded = tf.keras.models.load_model(path)

    tables = {"a": loaded.get_layer("a").table, **loaded.get_layer("group").tables}
    rates = {name: float(table.learning_rate.numpy()) for name, table in tables.items()}
    self.assertEqual(rates, {"a": 0.25, "b": 0.125, "c": 0.5})

  def test_a_label_that_is_nan_spoils_nothing(self):
    ids, labels = make_data()
    labels[100] = np.nan
    for name, kwargs in (
      ("graph", {}),
      ("eagerly", {"run_eagerly": True}),
      *(("legacy", {"optimizer": make(0.05)}) for make in legacy_optimizers("Adam")),
    ):
      model = make_sequential()
      compile_and_fit(model, **kwargs)
      before = model.evaluate(*make_data(), verbose=0)[1]
      table = table_of(model)
      self.assertEqual(table.stats()[4], 0)

      with self.subTest(f"{name}, stop"):
        message = "Table '.*': gradients with NaN or infinity were not written.*: id"
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          model.fit(ids, labels, batch_size=64, epochs=1, shuffle=False, verbose=0)
        self.assertGreater(table.stats()[4], 0)
        self.assertGreater(model.evaluate(*make_data(), verbose=0)[1], before - 0.03)

      with (
        self.subTest(f"{name}, skip"),
        unittest.mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"),
      ):
        # A function is traced anew.
        compile_and_fit(
          model, **{"optimizer": leave_out_nan(tf.keras.optimizers.Adam(0.05)), **kwargs}
        )
        steps = int(model.optimizer.iterations)
        model.fit(ids, labels, batch_size=64, epochs=2, verbose=0)
        self.assertAllInRange(table.items()[1], -100, 100)
        self.assertGreater(model.evaluate(*make_data(), verbose=0)[1], 0.95)
        self.assertEqual(int(model.optimizer.iterations), steps + 8)

      model = make_sequential()
      table = table_of(model)
      with (
        self.subTest(f"{name}, ignore"),
        unittest.mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"),
      ):
        compile_and_fit(model, **kwargs)
        model.fit(ids, labels, batch_size=64, epochs=1, shuffle=False, verbose=0)
        self.assertTrue(np.isnan(table.items()[1]).any())

  @needs_keras_3
  def test_nan_is_skipped_by_optimizers_of_ours_alone(self):
    self.enter_context(unittest.mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"))
    ours = monolith.keras.optimizers
    ids, labels = make_data()
    labels[100] = np.nan
    for name, wrap in (
      ("finite", ours.FiniteOptimizer),
      ("clipped", lambda optimizer: ours.GlobalClipOptimizer(optimizer, 5.0)),
      ("scaled", ours.LossScaleOptimizer),
    ):
      for run_eagerly in (False, True):
        model = make_sequential()
        optimizer = wrap(tf.keras.optimizers.Adam(0.05))
        compile_and_fit(model, type(optimizer).from_config(optimizer.get_config()))
        model.run_eagerly = run_eagerly
        model.fit(ids, labels, batch_size=64, epochs=2, verbose=0)
        with self.subTest(f"{name}, run_eagerly={run_eagerly}"):
          self.assertGreater(model.evaluate(*make_data(), verbose=0)[1], 0.9)

    for optimizer in (tf.keras.optimizers.Adam(), tf.keras.optimizers.SGD(clipnorm=1.0)):
      model = make_sequential()
      before = model.layers[1].kernel.numpy()
      message = f"=skip, but {type(optimizer).__name__} would write NaN.*FiniteOptimizer"
      with self.assertRaisesRegex(ValueError, message):
        compile_and_fit(model, optimizer)
      self.assertAllEqual(model.layers[1].kernel, before)
      self.assertEmpty(table_of(model))
    finite = ours.FiniteOptimizer(tf.keras.optimizers.Adam())
    with self.assertRaisesRegex(
      ValueError, "inner_optimizer is a FiniteOptimizer, want the one in"
    ):
      ours.GlobalClipOptimizer(finite, 1.0)

  @needs_keras_3
  def test_a_skipped_step_leaves_dense_variables_alone_and_finite_rows_move(self):
    layer, dense = Embedding(1, "sgd", "zeros", learning_rate=1.0), tf.keras.Variable([1.0])
    optimizer = leave_out_nan(tf.keras.optimizers.SGD(0.5))
    gradient = tf.IndexedSlices(tf.constant([[1.0], [np.nan]]), tf.constant([5, 6], tf.int64))
    step = tf.function(lambda value: optimizer.apply([gradient, value], [layer.table.rows, dense]))
    optimizer.build([layer.table.rows, dense])
    with unittest.mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
      step(tf.constant([np.inf]))
      self.assertAllEqual(dense, [1])
      step(tf.constant([1.0]))
    self.assertAllEqual(dense, [0.5])
    self.assertAllEqual(layer.table.items()[0], [5])
    self.assertAllEqual(layer.table.lookup([5]), [[-2]])
    self.assertEqual(int(optimizer.iterations), 2)

  def test_after_ctrl_c_in_the_first_step_compile_begins_anew(self):
    model = make_sequential()
    interrupt = [True]

    def loss(labels, outputs):
      if interrupt:
        interrupt.clear()
        raise KeyboardInterrupt
      return tf.keras.losses.MeanSquaredError()(labels, outputs)

    model.compile("adam", loss)
    with self.assertRaises(KeyboardInterrupt):
      model.fit(*make_data(), verbose=0)
    self.assertEmpty(table_of(model))
    model.compile("adam", loss)  # Keras keeps what it has built of the step
    model.fit(*make_data(), verbose=0)
    self.assertLen(table_of(model), NUM_IDS)

  def test_early_stopping_restores_the_rows_of_the_best_epoch(self):
    model = make_sequential()
    best = {}

    class Watch(tf.keras.callbacks.Callback):
      def on_epoch_end(self, epoch, logs=None):
        # The first epoch is the best one.
        logs["score"] = epoch
        if epoch == 0:
          best["rows"] = table_of(self.model).items()
          best["entries"] = table_of(self.model).entries()

    model.compile("adam", "mse")
    stop = tf.keras.callbacks.EarlyStopping(
      "score", patience=2, mode="min", restore_best_weights=True
    )
    model.fit(*make_data(), epochs=9, verbose=0, callbacks=[Watch(), stop])

    self.assertEqual(stop.stopped_epoch, 2)
    for got, want in zip(table_of(model).items(), best["rows"]):
      self.assertAllEqual(got, want)
    # With the state of their optimizers.
    self.assertCountEqual(table_of(model).entries(), best["entries"])

  def test_weights_go_from_model_to_model_with_their_rows(self):
    model, other = make_sequential(), make_sequential()
    for each in (model, other):
      compile_and_fit(each, epochs=1)
    ids, _ = make_data()
    want = model.predict(ids, verbose=0)
    weights = [np.array(weight, subok=True) for weight in model.get_weights()]
    self.assertEqual([weight.shape for weight in weights], [(0, 4), (4, 1), (1,)])
    compile_and_fit(model, epochs=1)

    other.set_weights(weights)
    model.layers[0].set_weights(weights[:1])
    model.layers[1].set_weights(weights[1:])

    self.assertAllEqual(other.predict(ids, verbose=0), want)
    self.assertAllEqual(model.predict(ids, verbose=0), want)

  def test_copies_of_rows_go_with_the_arrays_that_know_them(self):
    folder = self.create_tempdir().full_path
    layer = make_embedding()
    with unittest.mock.patch.object(tempfile, "tempdir", folder):
      weights = layer.get_weights()
      self.assertLen(os.listdir(folder), 1)
      kept = weights[0].copy()
      del weights
      gc.collect()
      self.assertLen(os.listdir(folder), 1)
      del kept
      gc.collect()
      self.assertEmpty(os.listdir(folder))

  def test_arrays_without_rows_are_not_set(self):
    model = make_sequential()
    compile_and_fit(model, epochs=1)
    with self.assertRaisesRegex(NotImplementedError, "rows are in what get_weights.*save_weights"):
      model.set_weights([np.zeros(weight.shape) for weight in model.weights])

  def test_summaries_show_rows_and_dim(self):
    for make in (make_sequential, make_functional):
      model = make()
      compile_and_fit(model, epochs=1)
      lines = []
      model.summary(print_fn=lines.append)
      (line,) = (line for line in lines if "Embedding" in line)
      self.assertIn(f" {NUM_IDS}x4 ", line + " ")
      (layer,) = (layer for layer in model.layers if isinstance(layer, Embedding))
      self.assertEqual(layer.count_params(), NUM_IDS * 4)

    group = EmbeddingGroup({"user": 2, "item": 3, "seen": Feature(table="item", combiner="sum")})
    group.tables["user"].assign([1, 2], np.ones([2, 2]))
    self.assertEqual(str(group.count_params()), "[2x2],[0x3]")
    self.assertEqual(group.count_params(), 4)
    for count, text in ((9999, "9999"), (12345, "12.3k"), (999_600, "1M"), (10**10, "10G")):
      self.assertEqual(layers._abbreviate(count), text)

  def test_schedules_follow_the_steps_of_the_optimizer(self):
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 10.0])
    layer = Embedding(1, "sgd", "zeros", learning_rate=schedule)
    layer = Embedding.from_config(layer.get_config())
    optimizer = tf.keras.optimizers.SGD()
    gradient = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([5], tf.int64))

    for _ in range(3):
      optimizer.apply_gradients([(gradient, layer.table.rows)])

    self.assertAllEqual(layer.table.lookup([5]), [[-12]])
    with self.assertRaisesRegex(NotImplementedError, "use a tf.keras.optimizers.schedules"):
      Embedding(1, learning_rate=lambda step: 1.0).get_config()

  @needs_keras_3
  def test_xla_is_left_out_where_keras_sees_a_table(self):
    devices = [tf.config.PhysicalDevice(f"{kind}:0", kind) for kind in ("CPU", "GPU")]
    dense = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    ours = make_sequential()
    with unittest.mock.patch.object(tf.config, "list_physical_devices", return_value=devices):
      for model in (dense, ours):
        model.compile("adam", "mse", jit_compile="auto")
    self.assertTrue(dense.jit_compile)
    self.assertFalse(ours.jit_compile)
    with self.assertWarnsRegex(UserWarning, "doesn't support `jit_compile=True`"):
      self.assertGreater(compile_and_fit(make_sequential(), jit_compile=True), 0.95)

  def test_under_xla_one_sentence_says_what_to_do(self):
    message = "do not work under XLA, which has no hash tables: .*jit_compile=False"
    # Keras 3 does not see the table, which the first step makes.
    for make in (Subclassed, *(() if IS_KERAS_3 else (make_sequential,))):
      with self.subTest(make.__name__), self.assertRaisesRegex(NotImplementedError, message):
        compile_and_fit(make(), jit_compile=True, epochs=1)
    table = monolith.keras.HashTable(2)

    def look_up():
      return table.lookup([1])

    def look_up_in_a_branch():
      return tf.cond(tf.constant(True), look_up, lambda: tf.zeros([1, 2]))

    def update():
      table.update([1], tf.ones([1, 2]))

    for function in (look_up, look_up_in_a_branch, update):
      with self.assertRaisesRegex(NotImplementedError, message):
        tf.function(function, jit_compile=True)()


def minimize(optimizer, loss: tf.Tensor, variables: list, tape: tf.GradientTape) -> None:
  optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


class GradientTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.layer = Embedding(2, "sgd", "zeros", learning_rate=1.0)
    self.dense = tf.Variable([[1.0], [1.0]])
    self.ids = tf.constant([3, 4], tf.int64)

  def loss(self):
    return tf.reduce_sum((self.layer(self.ids) + 1.0) @ self.dense)

  def test_one_call_of_the_optimizer_is_one_step(self):
    optimizer = tf.keras.optimizers.SGD(0.1)
    variables = [*self.layer.trainable_variables, self.dense]
    with tf.GradientTape(persistent=True) as tape:
      loss = self.loss()
    tape.gradient(loss, variables)

    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    self.assertAllEqual(self.layer.table.lookup([3, 4]), [[-1, -1], [-1, -1]])
    self.assertAllClose(self.dense, [[0.8], [0.8]])
    self.assertEqual(optimizer.iterations.numpy(), 1)

  def test_models_of_tables_alone_count_steps(self):
    for i, make in enumerate((tf.keras.optimizers.Adam, *legacy_optimizers("Adam"))):
      optimizer = make()
      with tf.GradientTape() as tape:
        loss = self.loss()
      minimize(optimizer, loss, self.layer.trainable_variables, tape)
      self.assertEqual(optimizer.iterations.numpy(), 1)
      self.assertAllEqual(self.layer.table.lookup([3]), [[-1 - i, -1 - i]])

  def test_clipping_holds_for_tables(self):
    for kwargs, expected in (
      ({"clipvalue": 0.5}, -0.5),
      ({"clipnorm": 1.0}, -0.5),
      ({"global_clipnorm": 1.0}, -1 / np.sqrt(4 + 8)),
    ):
      for make in (tf.keras.optimizers.SGD, *legacy_optimizers("SGD")):
        self.setUp()
        variables = [*self.layer.trainable_variables, self.dense]
        with tf.GradientTape() as tape:
          loss = self.loss()

        limit = kwargs.get("global_clipnorm")
        optimizer = clip_together(0.0, limit, make) if limit else make(0.0, **kwargs)
        minimize(optimizer, loss, variables, tape)

        with self.subTest(f"{make.__module__} {kwargs}"):
          self.assertAllClose(self.layer.table.lookup([3]), [[expected, expected]])

  def test_a_layer_that_is_called_twice_makes_one_step(self):
    table = Embedding(1, "adagrad", "zeros", learning_rate=1.0)
    once = Embedding(1, "adagrad", "zeros", learning_rate=1.0)
    with tf.GradientTape(persistent=True) as tape:
      twice = tf.reduce_sum(table(self.ids)) + tf.reduce_sum(table(self.ids))
      single = tf.reduce_sum(2 * once(self.ids))
    for loss, each in ((twice, table), (single, once)):
      minimize(tf.keras.optimizers.SGD(), loss, each.trainable_variables, tape)

    self.assertAllEqual(table.table.lookup([3]), once.table.lookup([3]))

  def test_accumulated_gradients(self):
    variable = self.layer.table.rows
    parts = []
    for _ in range(3):
      with tf.GradientTape() as tape:
        loss = self.loss()
      parts.append(tape.gradient(loss, variable))
    total = tf.IndexedSlices(
      tf.concat([part.values for part in parts], 0), tf.concat([part.indices for part in parts], 0)
    )

    tf.keras.optimizers.SGD().apply_gradients([(total, variable)])

    self.assertAllEqual(self.layer.table.lookup([3]), [[-3, -3]])

  def test_dense_gradients_of_a_table_are_refused(self):
    with self.assertRaisesRegex(TypeError, "want the tf.IndexedSlices.*concatenating"):
      tf.keras.optimizers.SGD().apply_gradients([(tf.ones([2, 2]), self.layer.table.rows)])

  def test_other_models_train_as_before(self):
    variable = tf.Variable(1.0)
    tf.keras.optimizers.SGD(1.0).apply_gradients([(tf.constant(0.25), variable)])
    self.assertAllClose(variable, 0.75)


class ShapeTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.table = monolith.keras.HashTable(1, "sgd", "zeros")
    self.table.assign([1, 2, 3], [[1], [2], [4]])

  def call(self, ids, combiner=None):
    return Embedding(table=self.table, combiner=combiner)(ids)

  def test_dense_ids(self):
    ids = tf.constant([[1, 2], [3, 3]], tf.int64)
    self.assertAllEqual(self.call([1, 3]), [[1], [4]])
    self.assertAllEqual(self.call(ids), [[[1], [2]], [[4], [4]]])
    self.assertAllEqual(self.call(ids, "sum"), [[3], [8]])
    self.assertAllEqual(self.call(ids, "mean"), [[1.5], [4]])
    self.assertAllClose(self.call(ids, "sqrtn"), [[3 / np.sqrt(2)], [8 / np.sqrt(2)]])
    self.assertAllEqual(self.call(tf.zeros([2, 0], tf.int64), "mean"), [[0], [0]])

  def test_arguments_of_keras_own_layer_are_explained(self):
    for arguments, keywords in (
      ((1000, 64), {}),
      ((1000,), {"output_dim": 64}),
      ((), {"input_dim": 1000, "output_dim": 64}),
      ((64,), {"input_dim": 1000}),
    ):
      with self.assertRaisesRegex(TypeError, r"there is no input_dim.*: Embedding\(64\)$"):
        Embedding(*arguments, **keywords)

  def test_ragged_ids(self):
    ids = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    self.assertAllEqual(self.call(ids).to_list(), [[[1], [2]], [], [[4]]])
    self.assertAllEqual(self.call(ids, "sum"), [[3], [0], [4]])
    self.assertAllEqual(self.call(ids, "mean"), [[1.5], [0], [4]])
    nested = tf.ragged.constant([[[1, 2], [3]], [], [[]]], dtype=tf.int64)
    self.assertAllEqual(self.call(nested, "sum").to_list(), [[[3], [4]], [], [[0]]])

  def test_weights(self):
    layers_by_combiner = {
      name: Embedding(table=self.table, combiner=name) for name in ("sum", "mean", "sqrtn")
    }
    ids = tf.constant([[1, 2], [3, 9], [3, 3]], tf.int64)
    weights = tf.constant([[2.0, 0.5], [0.5, 0.0], [0.0, 0.0]])
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    for combiner, dense, of_ragged in (
      ("sum", [[3], [2], [0]], [[3], [0], [8]]),
      ("mean", [[1.2], [4], [0]], [[1.2], [0], [4]]),
      ("sqrtn", [[3 / np.sqrt(4.25)], [4], [0]], [[3 / np.sqrt(4.25)], [0], [4]]),
    ):
      layer = layers_by_combiner[combiner]
      self.assertAllClose(layer(ids, weights=weights), dense)
      self.assertAllClose(
        layer(ragged, weights=ragged.with_values(tf.constant([2.0, 0.5, 2.0]))), of_ragged
      )
      self.assertAllClose(
        layer(ragged.to_sparse(), weights=ragged.with_values([2.0, 0.5, 2.0]).to_sparse()),
        of_ragged,
      )
    self.assertAllEqual(layers_by_combiner["mean"](ids, weights=ids != 1), [[2], [2], [4]])
    self.assertAllEqual(layers_by_combiner["sum"](ids[None], weights=weights[None])[0, 1], [2])
    for arguments, error, message in (
      ((ids, weights[:, :1]), ValueError, r"weights have shape \(3, 1\), want that of ids, \(3, 2"),
      ((ragged, weights), TypeError, "weights are a .*Tensor, want a RaggedTensor as ids"),
    ):
      with self.assertRaisesRegex(error, message):
        layers_by_combiner["sum"](arguments[0], weights=arguments[1])
    with self.assertRaisesRegex(ValueError, "weights need a combiner"):
      Embedding(table=self.table)(ids, weights=weights)
    group = EmbeddingGroup({"a": Feature(table=self.table, combiner="sum"), "b": 2})
    vectors = group({"a": ids, "b": ids[:, 0]}, weights={"a": weights})
    self.assertAllEqual(vectors["a"], [[3], [2], [0]])
    with self.assertRaisesRegex(ValueError, r"weights are of unknown features \['c'\]"):
      group({"a": ids, "b": ids[:, 0]}, weights={"c": weights})

  @needs_keras_3
  @unittest.skipIf(importlib.util.find_spec("keras_rs") is None, "keras-rs is not installed")
  def test_weights_pool_as_in_keras_rs_whose_layers_take_the_result(self):
    import keras_rs

    rng = np.random.default_rng(1)
    vectors, ids = rng.normal(size=[9, 4]).astype(np.float32), rng.integers(0, 9, [5, 3])
    weights = rng.uniform(0.5, 2, [5, 3]).astype(np.float32)
    table = monolith.keras.HashTable(4)
    table.assign(np.arange(9), vectors)
    pooled = []
    for combiner in ("sum", "mean", "sqrtn"):
      theirs = keras_rs.layers.EmbedReduce(9, 4, combiner=combiner)
      theirs.build([5, 3])
      theirs.set_weights([vectors])
      pooled.append(Embedding(table=table, combiner=combiner)(ids, weights=weights))
      with self.subTest(combiner):
        self.assertAllClose(pooled[-1], theirs(ids, tf.constant(weights)), 1e-5, 1e-5)
    products = keras_rs.layers.DotInteraction()(pooled)
    want = [tf.reduce_sum(pooled[a] * pooled[b], 1) for a, b in ((1, 0), (2, 0), (2, 1))]
    self.assertAllClose(products, tf.stack(want, 1), 1e-5, 1e-5)

  def test_padding_of_weight_0_gets_no_row(self):
    ids = tf.keras.Input([None], dtype=tf.int64, name="ids")
    weights = tf.keras.Input([None], name="weights")
    layer = Embedding(2, combiner="mean")
    vectors = layer(ids, weights=weights)
    self.assertEqual(list(vectors.shape), [None, 2])
    model = tf.keras.Model({"ids": ids, "weights": weights}, tf.keras.layers.Dense(1)(vectors))
    model.compile("adam", "mse")
    padded = {"ids": np.array([[5, 6], [7, 0]]), "weights": np.array([[1.0, 2], [1, 0]])}
    model.fit(padded, np.ones([2, 1]), verbose=0)
    self.assertAllEqual(layer.table.items()[0], [5, 6, 7])

  def test_ids_of_several_lengths_in_a_subclassed_model(self):
    class Bags(tf.keras.Model):
      """Takes ragged ids, or all ids and how many each example has."""

      def __init__(self):
        super().__init__()
        self.embedding = Embedding(2, combiner="sum")
        self.dense = tf.keras.layers.Dense(1)

      def call(self, inputs):
        ids = inputs["ids"]
        if "lengths" in inputs:
          ids = tf.RaggedTensor.from_row_lengths(ids, inputs["lengths"])
        return self.dense(self.embedding(ids))

    lists = [[1, 2, 3], [], [2]]
    ragged = tf.ragged.constant(lists, dtype=tf.int64)
    jagged = {"ids": ragged.values, "lengths": ragged.row_lengths()}
    found = []
    for inputs in ({"ids": ragged}, jagged):
      tf.keras.utils.set_random_seed(1)
      model = Bags()
      model.compile(tf.keras.optimizers.SGD(0.1), "mse")
      model.fit(tf.data.Dataset.from_tensors((inputs, tf.ones([3, 1]))).repeat(3), verbose=0)
      found.append(model.embedding.table.items()[0])
    self.assertAllEqual(found, [[1, 2, 3]] * 2)
    with self.assertRaisesRegex(ValueError, "several lengths.*tf.ragged.constant.*weights="):
      Embedding(2, combiner="sum")(lists)

  def test_sparse_ids(self):
    ids = tf.SparseTensor([[0, 1], [0, 5], [2, 0]], tf.constant([1, 2, 3], tf.int64), [3, 9])
    self.assertAllEqual(self.call(ids, "sum"), [[3], [0], [4]])
    self.assertAllEqual(self.call(ids, "mean"), [[1.5], [0], [4]])

  def test_shapes_are_known_to_the_next_layer(self):
    layer = Embedding(4, combiner="mean")
    self.assertEqual(list(layer(tf.keras.Input([3], dtype=tf.int64)).shape), [None, 4])
    ragged = tf.keras.Input([None], dtype=tf.string, ragged=True)
    self.assertEqual(list(layer(ragged).shape), [None, 4])
    sparse = tf.keras.Input([9], dtype=tf.int64, sparse=True)
    self.assertEqual(list(layer(sparse).shape), [None, 4])
    unpooled = Embedding(4)
    self.assertEqual(list(unpooled(tf.keras.Input([3], dtype=tf.int64)).shape), [None, 3, 4])
    self.assertEqual(layer.compute_output_shape([None, 3]).as_list(), [None, 4])
    self.assertEqual(unpooled.compute_output_shape([None, 3]).as_list(), [None, 3, 4])

  def test_bad_input_names_the_layer_and_the_remedy(self):
    with self.assertRaisesRegex(TypeError, "users: ids have dtype float32.*dtype=tf.int64"):
      Embedding(4, name="users")(tf.keras.Input([3]))
    for ids, combiner, message in (
      ([1, 2], "sum", r"shape \(2,\).*leave combiner out"),
      (tf.sparse.from_dense(tf.constant([[1]], tf.int64)), None, "sparse ids need a combiner"),
      (tf.sparse.from_dense(tf.constant([[[1]]], tf.int64)), "sum", r"want \[batch, n\]"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.call(ids, combiner)
    with self.assertRaisesRegex(ValueError, "combiner is 'max', want one of"):
      Embedding(4, combiner="max")
    with self.assertRaisesRegex(ValueError, "dim is missing"):
      Embedding()
    with self.assertRaisesRegex(ValueError, "dim is 4, but the table has 1"):
      Embedding(4, table=self.table)

  def test_strategies_that_would_copy_a_table(self):
    layer = Embedding(4)
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    with strategy.scope(), self.assertRaisesRegex(NotImplementedError, "MirroredStrategy"):
      layer(tf.constant([1], tf.int64))


class EmbeddingGroupTest(tf.test.TestCase):
  def make_model(self) -> tf.keras.Model:
    self.group = EmbeddingGroup(
      {
        "user": 4,
        "item": Feature(8, entry.AdagradOptimizer(0.5)),
        "history": Feature(table="item", combiner="mean"),
      }
    )
    inputs = {
      "user": tf.keras.Input([], dtype=tf.int64, name="user"),
      "item": tf.keras.Input([], dtype=tf.string, name="item"),
      "history": tf.keras.Input([None], dtype=tf.string, ragged=True, name="history"),
    }
    vectors = self.group(inputs)
    units = tf.keras.layers.Concatenate()([vectors[name] for name in inputs])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(units))
    model.compile("adam", "mse")
    return model

  def test_features_share_a_table_and_train(self):
    model = self.make_model()
    inputs = {
      "user": np.arange(4),
      "item": np.array(list("abcd")),
      "history": tf.ragged.constant([["a"], ["b", "z"], [], ["c"]]),
    }
    dataset = tf.data.Dataset.from_tensors((inputs, np.ones([4, 1], np.float32))).repeat(30)

    first = model.evaluate(dataset, verbose=0)
    model.fit(dataset, verbose=0)

    self.assertLess(model.evaluate(dataset, verbose=0), first / 2)
    self.assertEqual(sorted(self.group.tables), ["item", "user"])
    self.assertLen(self.group.tables["user"], 4)
    self.assertAllEqual(self.group.tables["item"].contains(list("abcdz")), [True] * 5)
    self.assertLen(self.group.trainable_variables, 2)
    again = EmbeddingGroup.from_config(self.group.get_config())
    self.assertEqual(sorted(again.tables), ["item", "user"])

  def test_features_that_the_loss_does_not_use_are_not_trained(self):
    group = EmbeddingGroup({"used": 2, "unused": 2})

    @tf.function
    def step(ids):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(group({"used": ids, "unused": ids})["used"])
      gradients = tape.gradient(loss, group.trainable_variables)
      optimizer.apply_gradients(zip(gradients, group.trainable_variables))

    optimizer = tf.keras.optimizers.SGD()
    step(tf.constant([1, 2], tf.int64))

    self.assertLen(group.tables["used"], 2)
    self.assertEmpty(group.tables["unused"])

  def test_layers_and_groups_share_tables(self):
    table = monolith.keras.HashTable(2, name="shared")
    group = EmbeddingGroup({"a": Feature(table=table), "b": Feature(table=table, combiner="sum")})
    layer = Embedding(table=table)
    both = tf.keras.layers.Layer()
    both.layer, both.group = layer, group

    table.assign([1], [[1, 2]])
    vectors = group({"a": [1], "b": [[1, 1]]})

    self.assertAllEqual(vectors["a"], layer(tf.constant([1])))
    self.assertAllEqual(vectors["b"], [[2, 4]])
    self.assertLen(both.trainable_variables, 1)
    with self.assertRaisesRegex(NotImplementedError, "shares a table that it did not make"):
      layer.get_config()
    with self.assertRaisesRegex(NotImplementedError, "Feature a of .* shares a table"):
      group.get_config()

  def test_bad_input_names_the_feature(self):
    group = EmbeddingGroup({"user": 2, "item": 2}, name="group")
    with self.assertRaisesRegex(ValueError, r"missing \['item'\], unknown \['usr', 'x'\]|missing"):
      group({"user": [1], "usr": [1], "x": [1]})
    with self.assertRaisesRegex(TypeError, "group/item: ids have dtype float"):
      group({"user": [1], "item": [1.5]})
    with self.assertRaisesRegex(TypeError, "want a dictionary of ids"):
      group(tf.constant([1]))
    one, two = (monolith.keras.HashTable(2, name="twin") for _ in range(2))
    for features, error, message in (
      ({}, ValueError, "features is empty"),
      ({"user": "16"}, TypeError, "feature 'user' is '16', want a Feature or its dim"),
      ({"user": Feature()}, ValueError, "feature 'user': dim is missing"),
      ({"user": 0}, ValueError, "feature 'user': dim is 0"),
      ({"user": Feature(2, "adamw")}, ValueError, "feature 'user': optimizer is 'adamw'"),
      ({"user": Feature(2, combiner="max")}, ValueError, "feature 'user': combiner is 'max'"),
      ({"user": Feature(table="itm"), "item": 2}, ValueError, r"table of 'itm'.*\['item'\]"),
      ({"user": Feature(2, table="item"), "item": 2}, ValueError, "feature 'user': dim is 2"),
      (
        {"a": Feature(table=one), "b": Feature(table=two)},
        ValueError,
        "Two tables of one name: features 'a' and 'b'.*'twin'",
      ),
    ):
      with self.subTest(message), self.assertRaisesRegex(error, message):
        EmbeddingGroup(features)


class KerasItselfTest(tf.test.TestCase):
  def test_nothing_of_keras_3_is_replaced_and_of_keras_2_what_one_module_lists(self):
    compile_and_fit(make_sequential(), epochs=1)
    replaced = {name.rpartition(".src.")[2] for name in ours_in_keras()}
    expected = set()
    if not IS_KERAS_3:
      expected = {
        "engine.training.Model.compile",
        "optimizers.legacy.optimizer_v2.OptimizerV2.apply_gradients",
        "optimizers.optimizer._BaseOptimizer.apply_gradients",
        "saving.legacy.hdf5_format.load_weights_from_hdf5_group",
        "saving.legacy.hdf5_format.save_weights_to_hdf5_group",
        "saving.legacy.saving_utils.trace_model_call",
      }
    self.assertEqual(replaced, expected)

  def test_one_module_alone_assigns_to_attributes_of_keras(self):
    found = {
      (path.name, line)
      for path in _PACKAGE.glob("*.py")
      for line in _assignments_to_others(path.read_text(encoding="utf-8"))
    }
    self.assertEqual({name for name, _ in found}, {"_keras_2.py"}, sorted(found))
    self.assertGreaterEqual(len(found), 4)
    for code in (
      "import keras\nkeras.Model.fit = 1",
      "import tensorflow as tf\ntf.keras.optimizers.Adam.apply: int = 1",
      "from monolith.keras._keras import keras\nsetattr(keras.layers.Layer, 'call', 1)",
      "def f(cls):\n  cls.apply = 1",
      "from keras import Model\nModel.fit += 1",
    ):
      self.assertLen(_assignments_to_others(code), 1, code)
    self.assertEmpty(_assignments_to_others("import keras\nx = keras.Model()\nx.a = keras.b"))


def _assignments_to_others(code: str) -> list[int]:
  """Returns the lines that assign to attributes of Keras or of a class that a function is given."""
  tree = ast.parse(code)
  # Classes and modules of Keras by the names that they have here.
  names = {"cls", "keras", "tf_keras"}
  for node in ast.walk(tree):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      module = getattr(node, "module", None) or ""
      for alias in node.names:
        if (module or alias.name).partition(".")[0] in ("keras", "tf_keras"):
          names.add((alias.asname or alias.name).partition(".")[0])
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
      if "import_keras" in ast.unparse(node.value.func):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names.update(ast.unparse(target) for target in targets)

  def is_of_keras(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.partition(".")[0] in names or text.startswith(("tf.keras.", "tf.compat.v1.keras."))

  lines = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
      owners = [node.args[0]]
    else:
      targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
      owners = [target.value for target in targets if isinstance(target, ast.Attribute)]
    lines += [node.lineno for owner in owners if is_of_keras(owner)]
  return lines


class BackendTest(tf.test.TestCase):
  @needs_keras_3
  def test_the_import_ends_with_one_sentence_on_other_backends(self):
    for backend, instead in (("torch", "monolith.torch"), ("jax", "monolith.jax")):
      if importlib.util.find_spec(backend) is None:
        continue
      result = subprocess.run(
        [sys.executable, "-c", "import monolith.keras"],
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(_PACKAGE.parents[1])},
        capture_output=True,
        text=True,
      )
      said = result.stderr.strip().splitlines()[-1]
      with self.subTest(backend):
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(said, f"^ImportError: .*KERAS_BACKEND is '{backend}': .*{instead}")

  def test_other_backends_are_refused_with_what_to_use_instead(self):
    _keras.check_backend("tensorflow")
    for backend, message in (
      ("torch", "KERAS_BACKEND is 'torch': set it to 'tensorflow'.*monolith.torch with PyTorch"),
      ("jax", "KERAS_BACKEND is 'jax': .*monolith.jax.Embedding with JAX"),
      ("numpy", "KERAS_BACKEND is 'numpy': set it to 'tensorflow' before keras is imported$"),
    ):
      with self.assertRaisesRegex(ImportError, message):
        _keras.check_backend(backend)


class TableCurvesTest(tf.test.TestCase):
  def _read(self, folder):
    """Returns tag -> {step: value}."""
    curves = {}
    for path in tf.io.gfile.glob(f"{folder}/events*"):
      for event in tf.compat.v1.train.summary_iterator(path):
        for value in event.summary.value:
          curves.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    return curves

  def test_points_of_epochs_and_batches(self):
    ids, labels = make_data()
    for make_model in (make_functional, Subclassed):
      model = make_model()
      model.compile("adam", "mse")
      for update_freq, steps in ((None, [0, 1]), (4, [4, 8])):
        folder = self.create_tempdir().full_path
        curves = monolith.keras.callbacks.TableCurves(folder, update_freq)
        model.fit(ids, labels, batch_size=64, epochs=2, verbose=0, callbacks=[curves])

        found = self._read(folder)
        [name] = {tag.partition("/")[2] for tag in found}
        self.assertEqual(list(found[f"rows/{name}"]), steps)
        self.assertEqual(found[f"rows/{name}"][steps[1]], NUM_IDS)
        self.assertGreater(found[f"memory_mb/{name}"][steps[1]], 0)
        self.assertEqual(found[f"expired/{name}"][steps[1]], 0)
        # In the second run all rows are there already.
        self.assertEqual(found[f"admitted/{name}"][steps[1]], 0 if update_freq else NUM_IDS)

  def test_bad_frequency(self):
    with self.assertRaisesRegex(ValueError, "update_freq is 0"):
      monolith.keras.callbacks.TableCurves("x", 0)


if __name__ == "__main__":
  tf.test.main()
