"""Tests of the bias."""

import tensorflow as tf

from monolith.native_training.layers.add_bias import AddBias
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class AddBiasTest(LayerTestCase):
  def test_value(self):
    layer = self.round_trip(self.from_template(AddBias, initializer="ones"))
    self.assertAllClose(self.value(layer(tf.ones([1, 3]))), [[2, 2, 2]])
    first = AddBias()(tf.ones([2, 3, 4]), "channels_first")
    self.assertAllClose(self.value(first), [[[1] * 4] * 3] * 2)
    with self.assertRaisesRegex(ValueError, "Unknown data_format: x"):
      layer(tf.ones([1, 3]), data_format="x")


if __name__ == "__main__":
  tf.test.main()
