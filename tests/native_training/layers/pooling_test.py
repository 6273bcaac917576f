"""Tests of pooling."""

import tensorflow as tf

from monolith.native_training.layers import pooling
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class PoolingTest(LayerTestCase):
  def test_values(self):
    x = [tf.ones([2, 2]), 2 * tf.ones([2, 2])]
    for cls, want in ((pooling.SumPooling, 3), (pooling.AvgPooling, 1.5), (pooling.MaxPooling, 2)):
      with self.subTest(cls=cls):
        layer = self.round_trip(self.from_template(cls))
        self.assertAllClose(self.value(layer(x)), [[want] * 2] * 2)
        self.assertAllClose(self.value(layer(x[:1])), [[1, 1]] * 2)

  def test_errors(self):
    with self.assertRaises(TypeError):
      pooling.SumPooling().call(tf.ones([2]))
    with self.assertRaises(ValueError):
      pooling.SumPooling().call([])


if __name__ == "__main__":
  tf.test.main()
