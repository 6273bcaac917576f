"""`EmbeddingGroup(concatenate=True)` does what a layer that concatenates does, without copies.

Covers `layers` and `table`.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import monolith.keras
from monolith.keras.layers import EmbeddingGroup, Feature

_DIMS = {"a": 2, "b": 3, "c": 4}
_IDS = {"a": [1, 2, 1, 5], "b": [7, 7, 7, 8], "c": [3, 4, 5, 6]}


def _count_ops(function, op_type: str) -> int:
  graph_def = function.graph.as_graph_def()
  nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
  return sum(node.op == op_type for node in nodes)


def _inputs():
  return {name: tf.constant(ids, tf.int64) for name, ids in _IDS.items()}


class ConcatenateTest(tf.test.TestCase, parameterized.TestCase):
  def _model(self, concatenate, features=None):
    features = features or {name: Feature(dim, "adagrad") for name, dim in _DIMS.items()}
    group = EmbeddingGroup(features, concatenate=concatenate)
    inputs = {name: tf.keras.Input([], dtype=tf.int64, name=name) for name in _DIMS}
    vectors = group(inputs)
    if not concatenate:
      vectors = tf.keras.layers.Concatenate()([vectors[name] for name in features])
    units = tf.keras.layers.Dense(1, kernel_initializer="ones", activation="sigmoid")(vectors)
    model = tf.keras.Model(inputs, units)
    model.compile(tf.keras.optimizers.Adagrad(0.5), "mse")
    return group, model

  def test_fit_is_the_same(self):
    labels = np.array([0, 1, 1, 0], np.float32)
    rows = []
    for concatenate in (False, True):
      group, model = self._model(concatenate)
      for name, dim in _DIMS.items():
        group.tables[name].assign(_IDS[name], np.full([4, dim], 0.1))
      model.fit(_inputs(), labels, batch_size=4, epochs=3, verbose=0, shuffle=False)
      rows.append([group.tables[name].lookup(_IDS[name]).numpy() for name in _DIMS])
      rows[-1].append(model.predict(_inputs(), verbose=0))
    for with_layer, without in zip(*rows):
      self.assertAllClose(with_layer, without, rtol=1e-6)
    self.assertGreater(np.ptp(rows[0][0]), 0.001)

  def _step(self, group, optimizer, dense):
    def step(inputs):
      variables = [*group.trainable_variables, dense]
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum((group(inputs) - 1) * dense)
      optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    return step

  def test_a_step_copies_no_vectors(self):
    group = EmbeddingGroup(_DIMS, concatenate=True)
    optimizer, dense = tf.keras.optimizers.SGD(1.0), tf.Variable(tf.ones([9]))
    optimizer.build([*group.trainable_variables, dense])
    step = self._step(group, optimizer, dense)

    function = tf.function(step).get_concrete_function(_inputs())

    self.assertEqual(_count_ops(function, "MonolithHashTableLookupConcat"), 1)
    self.assertEqual(_count_ops(function, "MonolithHashTableOptimizeConcat"), 1)
    self.assertEqual(_count_ops(function, "MonolithHashTableOptimizeList"), 0)
    function(_inputs())
    step(_inputs())  # eagerly
    for name, ids in _IDS.items():
      self.assertLen(group.tables[name], len(set(ids)))

  def test_eager_and_graph_steps_are_the_same(self):
    results = []
    for wrap in (tf.function, lambda function: function):
      group = EmbeddingGroup(
        {name: Feature(dim, initializer=0.5) for name, dim in _DIMS.items()}, concatenate=True
      )
      optimizer = tf.keras.optimizers.SGD(0.1, clipnorm=1.0)
      dense = tf.Variable(tf.ones([9]))
      optimizer.build([*group.trainable_variables, dense])
      step = wrap(self._step(group, optimizer, dense))
      for _ in range(3):
        step(_inputs())
      results.append(group(_inputs()).numpy())
    self.assertAllClose(*results)

  def test_features_that_share_a_table(self):
    group, model = self._model(
      True, {"a": Feature(2, "sgd", "zeros"), "b": Feature(table="a"), "c": 4}
    )
    model.fit(_inputs(), np.ones([4], np.float32), batch_size=4, verbose=0)
    self.assertLen(group.tables["a"], len({*_IDS["a"], *_IDS["b"]}))
    self.assertEqual(group(_inputs()).shape, [4, 8])

  def test_pooled_features(self):
    ragged = tf.ragged.constant([[1, 2], [], [1], [5]], dtype=tf.int64)
    group = EmbeddingGroup({"a": Feature(2, combiner="mean"), "b": 3}, concatenate=True)
    group.tables["a"].assign([1, 2, 5], [[1, 2], [3, 4], [5, 6]])
    group.tables["b"].assign([7, 8], [[7, 7, 7], [8, 8, 8]])

    vectors = group({"a": ragged, "b": tf.constant([7, 8, 7, 9], tf.int64)})

    self.assertAllClose(
      vectors, [[2, 3, 7, 7, 7], [0, 0, 8, 8, 8], [1, 2, 7, 7, 7], [5, 6, 0, 0, 0]]
    )

  def test_config(self):
    group = EmbeddingGroup(_DIMS, concatenate=True)
    self.assertTrue(EmbeddingGroup.from_config(group.get_config()).concatenate)
    config = EmbeddingGroup(_DIMS).get_config()
    self.assertFalse(config.pop("concatenate"))
    self.assertFalse(EmbeddingGroup.from_config(config).concatenate)  # of an earlier version

  def test_save_and_load(self):
    group, model = self._model(True)
    model.fit(_inputs(), np.ones([4], np.float32), batch_size=4, verbose=0)
    path = os.path.join(self.get_temp_dir(), "model.keras")

    model.save(path)
    loaded = tf.keras.models.load_model(path)

    self.assertAllClose(
      loaded.predict(_inputs(), verbose=0), model.predict(_inputs(), verbose=0), rtol=1e-6
    )
    loaded.fit(_inputs(), np.ones([4], np.float32), batch_size=4, verbose=0)
    self.assertLen(group.tables["a"], len(set(_IDS["a"])))

  def test_weights_of_a_group_that_does_not_concatenate(self):
    apart, before = self._model(False)
    for name, dim in _DIMS.items():
      apart.tables[name].assign(_IDS[name], np.random.default_rng(dim).normal(size=[4, dim]))
    path = os.path.join(self.get_temp_dir(), "of.weights.h5")
    _, model = self._model(True)

    before.save_weights(path)
    model.load_weights(path)

    self.assertAllClose(
      model.predict(_inputs(), verbose=0), before.predict(_inputs(), verbose=0), rtol=1e-6
    )

  @parameterized.named_parameters(
    ("ragged", tf.ragged.constant([[1, 2], [], [1], [5]], dtype=tf.int64)),
    ("matrix", tf.ones([4, 2], tf.int64)),
  )
  def test_several_ids_without_a_combiner(self, ids):
    group = EmbeddingGroup(_DIMS, concatenate=True, name="group")
    with self.assertRaisesRegex(ValueError, r"group: concatenate=True .* a \(4, .* a combiner"):
      group({**_inputs(), "a": ids})

  def test_not_finite(self):
    group = EmbeddingGroup(_DIMS, concatenate=True)
    optimizer, dense = tf.keras.optimizers.SGD(1.0), tf.Variable(np.full([9], np.nan, np.float32))
    optimizer.build([*group.trainable_variables, dense])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "NaN or infinity"):
      tf.function(self._step(group, optimizer, dense))(_inputs())

  def test_bad_input(self):
    group = EmbeddingGroup(_DIMS, concatenate=True)
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError,
      r"ids\[1\]",
    ):
      group({**_inputs(), "b": tf.constant([1, 2, 3], tf.int64)})


class BadOpInputsTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.named_parameters(
    ("place", {"places": [1]}, r"places\[0\] is 1"),
    ("column", {"columns": [2]}, r"2 columns from 2 on"),
    ("rows", {"grads": np.zeros([3, 3], np.float32)}, "want 2 rows"),
    ("count", {"columns": [0, 1]}, "one per input"),
  )
  def test_updates(self, changes, message):
    from monolith.native_training.runtime.ops import gen_monolith_ops

    table = monolith.keras.HashTable(2, "sgd")
    arguments = {"places": [0], "columns": [1], "grads": np.zeros([2, 3], np.float32), **changes}
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
      gen_monolith_ops.monolith_hash_table_optimize_concat(
        [table.resource_handle],
        [tf.constant([1, 2], tf.int64)],
        [arguments["grads"]],
        [[0.1]],
        tf.constant(0, tf.int64),
        tf.constant(0, tf.int64),
        places=arguments["places"],
        columns=arguments["columns"],
      )


if __name__ == "__main__":
  tf.test.main()
