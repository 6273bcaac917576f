"""Tests of the steps of several tables under Keras 3: when each is updated, and in how many ops."""

from __future__ import annotations

import gc

import numpy as np
import tensorflow as tf

import monolith.keras
from monolith.keras.layers import Embedding, EmbeddingGroup
from tests.keras_versions import IS_KERAS_3, needs_keras_3

if IS_KERAS_3:
  from monolith.keras import _keras_3

_NAMES = ("a", "b", "c")


def count_ops(function, op_type: str) -> int:
  graph_def = function.graph.as_graph_def()
  nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
  return sum(node.op == op_type for node in nodes)


@needs_keras_3
class StepsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.group = EmbeddingGroup(dict.fromkeys(_NAMES, 2))
    self.dense = tf.Variable([1.0, 1.0])
    self.optimizer = tf.keras.optimizers.SGD(1.0)
    self.optimizer.build([*self.group.trainable_variables, self.dense])

  def step(self, used=_NAMES, ids=(1, 2)):
    """Makes a step on features of some names alone."""
    inputs = {name: tf.constant(ids, tf.int64) for name in _NAMES}
    variables = [*self.group.trainable_variables, self.dense]
    with tf.GradientTape() as tape:
      vectors = self.group(inputs)
      loss = sum(tf.reduce_sum((vectors[name] - 1) * self.dense) for name in used)
    self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

  def sizes(self) -> list[int]:
    return [len(self.group.tables[name]) for name in _NAMES]

  def test_one_op_updates_all_tables(self):
    function = tf.function(self.step).get_concrete_function()
    self.assertEqual(count_ops(function, "MonolithHashTableOptimizeList"), 1)
    self.assertEqual(count_ops(function, "Timestamp"), 1)

    function()
    self.assertEqual(self.sizes(), [2, 2, 2])

  def test_eager_steps_update_all_tables(self):
    self.step()
    self.assertEqual(self.sizes(), [2, 2, 2])

  def test_tables_without_a_gradient_are_left_alone(self):
    for used in (["a"], ["b"], ["c"], ["a", "c"], ["a", "b"], ["b", "c"]):
      for wrap in (lambda f: f, tf.function):
        with self.subTest(used):
          before = self.sizes()
          ids = (100 + sum(before), 200 + sum(before))
          wrap(lambda used=used, ids=ids: self.step(used, ids))()
          grown = [name for name, i, j in zip(_NAMES, before, self.sizes()) if j > i]
          self.assertEqual(grown, list(used))

  def test_tables_alone(self):
    layer = Embedding(2, "sgd", learning_rate=1.0, initializer="zeros")
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(layer([1, 2]))
    optimizer = tf.keras.optimizers.SGD()
    optimizer.apply_gradients(
      zip(tape.gradient(loss, layer.trainable_variables), [layer.table.rows])
    )
    self.assertAllEqual(layer([1, 2]), -np.ones([2, 2]))

  def test_no_gradient_waits_in_another_order(self):
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([7], tf.int64))

    class Scope:
      caller = self.optimizer

    # "?" asks whether a variable takes its gradient, a name hands it over, "-a" without one.
    for order in (
      "?a c b a",  # Keras 3 today
      "?c c ?b b ?a a",
      "?a a ?b b ?c c",
      "?a ?b ?c a b c",
      "?c ?b ?a a b c",
      "a b c",
      "?a c b -a",
    ):
      with self.subTest(order):
        tables = {name: monolith.HashTable(2, "sgd") for name in _NAMES}
        scope = Scope()
        step = _keras_3.Step(scope)
        for word in order.split():
          rows = tables[word[-1]].rows
          if word[0] == "?":
            step.expect(rows)
          else:
            step.take(rows, None if word[0] == "-" else gradient)
        want = [int(f"-{name}" not in order) for name in _NAMES]
        self.assertEqual([len(tables[name]) for name in _NAMES], want)

  def test_a_step_that_ends_before_its_time_is_named(self):
    class Scope:
      caller = self.optimizer

    table = monolith.HashTable(2, "sgd", name="users")
    scope = Scope()
    step = _keras_3.Step(scope)
    step.expect(self.group.tables["a"].rows)
    step.take(table.rows, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([7], tf.int64)))
    with self.assertLogs(level="ERROR") as logs:
      del scope
      gc.collect()
    self.assertIn("before the rows of tables ['users'] were updated", logs.output[0])


if __name__ == "__main__":
  tf.test.main()
