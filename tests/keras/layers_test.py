"""Tests of `layers`, `callbacks`, `saved_rows`, `optimizer_hook`, `rows`, `_keras` and `_keras_3`.

Tables in models of the Keras that TensorFlow has: 2 or 3.
"""

from __future__ import annotations

import gc
import os
import tempfile
import unittest.mock

import numpy as np
import tensorflow as tf

import monolith.keras
from monolith.keras import layers
from monolith.keras.layers import Embedding, EmbeddingGroup, Feature
from monolith.native_training import entry
from tests.keras_versions import IS_KERAS_3, legacy_optimizers, needs_keras_2, needs_keras_3

NUM_IDS = 40


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

  @needs_keras_2
  def test_the_global_norm_clips_gradients_of_tables(self):
    optimizer = tf.keras.optimizers.Adam(0.05, global_clipnorm=5.0)
    self.assertGreater(compile_and_fit(make_sequential(), optimizer), 0.95)

  @needs_keras_3
  def test_what_an_optimizer_cannot_do_to_rows_is_refused(self):
    for kwargs, remedy in (
      ({"global_clipnorm": 5.0}, "global_clipnorm=5.0, which cannot reach the rows.*use clipnorm"),
      ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*use larger batches"),
      ({"use_ema": True}, "use_ema=True.*leave averages out"),
    ):
      with self.subTest(remedy), self.assertRaisesRegex(ValueError, remedy):
        compile_and_fit(make_sequential(), tf.keras.optimizers.SGD(0.05, **kwargs), epochs=1)
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    for name in ("sgd", "adam"):
      with (
        self.subTest(name),
        self.assertRaisesRegex(ValueError, "use the policy 'mixed_bfloat16'"),
      ):
        compile_and_fit(make_sequential(), name, epochs=1)

  @needs_keras_3
  def test_every_optimizer_trains_what_is_dense(self):
    names = "SGD Adam AdamW Adadelta Adagrad Adamax Adafactor Nadam RMSprop Ftrl Lion".split()
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

  @needs_keras_2
  def test_mixed_precision_does_not_scale_what_tables_learn(self):
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    model = make_sequential()

    self.assertGreater(compile_and_fit(model), 0.95)

    self.assertEqual(model.layers[0](make_data()[0]).dtype, tf.float16)
    # Adagrad's first step is about the rate, whatever the gradient's size; the loss scale would
    # show in plain gradient descent.
    layer = Embedding(1, "sgd", "zeros", learning_rate=1.0)
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(layer(tf.constant([5], tf.int64)))
      scaled = optimizer.get_scaled_loss(tf.cast(loss, tf.float32))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, layer.trainable_variables))
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
    self.assertAllEqual(layer.table.lookup([5]), [[-1]])

  @needs_keras_2
  def test_a_step_with_infinite_gradients_is_skipped(self):
    layer = Embedding(1, "sgd", "zeros", learning_rate=1.0, dtype="mixed_float16")
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
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
        compile_and_fit(model, **kwargs)  # a function is traced anew
        model.fit(ids, labels, batch_size=64, epochs=2, verbose=0)
        self.assertAllInRange(table.items()[1], -100, 100)
        if not IS_KERAS_3:  # where it is for rows alone
          self.assertGreater(model.evaluate(*make_data(), verbose=0)[1], 0.95)

      model = make_sequential()
      table = table_of(model)
      with (
        self.subTest(f"{name}, ignore"),
        unittest.mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"),
      ):
        compile_and_fit(model, **kwargs)
        model.fit(ids, labels, batch_size=64, epochs=1, shuffle=False, verbose=0)
        self.assertTrue(np.isnan(table.items()[1]).any())

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

  def test_jit_compile_leaves_xla_out_or_names_the_op_that_cannot(self):
    if IS_KERAS_3:
      with self.assertWarnsRegex(UserWarning, "doesn't support `jit_compile=True`"):
        self.assertGreater(compile_and_fit(make_sequential(), jit_compile=True), 0.95)
      return
    with self.assertRaisesRegex(Exception, "MonolithHashTableLookupList"):
      compile_and_fit(make_sequential(), jit_compile=True, epochs=1)


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
      if IS_KERAS_3 and "global_clipnorm" in kwargs:
        continue
      for make in (tf.keras.optimizers.SGD, *legacy_optimizers("SGD")):
        self.setUp()
        variables = [*self.layer.trainable_variables, self.dense]
        with tf.GradientTape() as tape:
          loss = self.loss()

        minimize(make(0.0, **kwargs), loss, variables, tape)

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
