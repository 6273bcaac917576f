"""Tests of recurrent units with attention."""

import numpy as np
import tensorflow as tf

from monolith.native_training.layers import agru
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _fill(value, *shape):
  return tf.fill(shape, float(value))


class AgruTest(LayerTestCase):
  def test_cell(self):
    x, state, score = _fill(1, 1, 1), _fill(2, 1, 1), _fill(0.25, 1, 1)
    for att_type, want in (("AGRU", 1.690399), ("augru", 1.440605)):
      cell = self.round_trip(agru.AGRUCell(1, att_type=att_type, initializer="zeros"))
      output, new_state = cell((x, state, score))
      self.assertAllClose(self.value(output), [[want]], rtol=1e-5)
      self.assertIs(output, new_state)
    update = 1 / (1 + np.exp(-1.0))
    self.assertAllClose(
      self.value(cell((x, state, None))[0]),
      [[(1 - update) * 2 + update * np.tanh(1.0)]],
      rtol=1e-5,
    )
    self.assertEqual((cell.state_size, cell.output_size), (1, 1))
    with self.assertRaises(AssertionError):
      agru.AGRUCell(1, att_type="GRU")

  def test_cell_without_attention_in_a_graph(self):
    with tf.Graph().as_default():
      output, _ = agru.AGRUCell(3)((tf.ones([2, 4]), tf.ones([2, 3]), None))

      self.assertEqual(output.shape, [2, 3])

  def test_cell_called_with_separate_arguments(self):
    x, state, score = _fill(1, 1, 1), _fill(2, 1, 1), _fill(0.25, 1, 1)
    cell = agru.AGRUCell(1, initializer="zeros")
    self.assertAllClose(self.value(cell(x, state, score)[0]), [[1.690399]], rtol=1e-5)
    self.assertAllEqual(*self.value([cell(x, state)[0], cell((x, state))[0]]))

  def test_static_and_dynamic(self):
    inputs, scores = tf.random.uniform([2, 3, 4]), tf.random.uniform([2, 3])
    cell = agru.AGRUCell(5)
    dynamic = agru.dynamic_rnn_with_attention(cell, inputs, scores)
    static = agru.static_rnn_with_attention(cell, inputs, scores)
    self.assertEqual(dynamic[0].shape, [2, 3, 5])
    dynamic, static = self.value([dynamic, static])
    self.assertAllClose(dynamic, static)
    self.assertAllClose(static[0][:, -1], static[1])
    parts = ["candidate/bias", "candidate/kernel", "gates/bias", "gates/kernel"]
    self.assertEqual(self.variable_names(), [f"agru_cell/{part}" for part in parts])


if __name__ == "__main__":
  tf.test.main()
