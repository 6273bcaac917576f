"""Tests of layers that transform features."""

import numpy as np
import tensorflow as tf

from monolith.core import base_layer
from monolith.native_training.layers import feature_trans
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _fill(value, *shape):
  return tf.fill(shape, float(value))


class FeatureTransTest(LayerTestCase):
  def test_auto_int(self):
    layer = self.round_trip(self.from_template(feature_trans.AutoInt))
    self.assertAllClose(
      self.value(layer(tf.constant([[[1.0, 0], [0, 1]]]))),
      [[0.731059, 0.268941, 0.268941, 0.731059]],
    )

  def test_irazor(self):
    x = tf.reshape(tf.range(6.0), [1, 2, 3])
    layer = self.round_trip(
      feature_trans.iRazor([0, 1, 3], initializer="zeros", feature_weight=[[1.0, 2.0]], name="i")
    )
    self.assertAllClose(self.value(layer(x)), [np.arange(6) / 3])
    self.assertAllClose(self.value(base_layer.get_layer_loss()["i"]), 3.0)
    with self.assertRaises(AssertionError):
      feature_trans.iRazor([0, 4])(x)

  def test_senet(self):
    features = [_fill(1, 1, 2), _fill(2, 1, 2)]
    for kwargs, want in (
      ({"cmp_dim": 3, "initializer": "ones"}, [0.999877, 0.999877, 1.999753, 1.999753]),
      ({"cmp_dim": None}, [1, 1, 4, 4]),
    ):
      for on_gpu in (False, True):
        layer = self.round_trip(feature_trans.SeNet(2, on_gpu=on_gpu, **kwargs))
        self.assertAllClose(self.value(layer(features)), [want], rtol=1e-5)
        self.assertAllClose(self.value(layer(tf.stack(features, axis=1))), [want], rtol=1e-5)


if __name__ == "__main__":
  tf.test.main()
