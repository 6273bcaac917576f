"""Tests of layers over sequences."""

import numpy as np
import tensorflow as tf

from monolith.native_training.layers import feature_seq
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _fill(value, *shape):
  return tf.fill(shape, float(value))


class FeatureSeqTest(LayerTestCase):
  def test_din(self):
    query, keys = _fill(1, 1, 2), _fill(1, 1, 3, 2)
    din = self.round_trip(self.from_template(feature_seq.DIN, hidden_units=[1], initializer="ones"))
    self.assertAllClose(self.value(din((query, keys))), [[18, 18]], rtol=1e-5)
    self.assertAllClose(
      self.value(din((query, keys), mask=tf.constant([[1, 1, 0]]))), [[12, 12]], rtol=1e-5
    )
    din = self.round_trip(feature_seq.DIN([1], initializer="ones", mode="none", decay=True))
    self.assertAllClose(self.value(din((query, keys))), [[[4.242640] * 2] * 3], rtol=1e-5)
    with self.assertRaises(AssertionError):
      feature_seq.DIN([2])

  def test_dien(self):
    query, keys = tf.random.uniform([2, 3]), tf.random.uniform([2, 4, 5])
    layer = self.round_trip(self.from_template(feature_seq.DIEN, num_units=3))
    outputs = self.value([layer((query, keys)), layer(query, keys=keys)])
    self.assertEqual(outputs[0].shape, (2, 3))
    self.assertAllClose(*outputs)

  def test_dien_mask(self):
    """Masked positions do not matter."""
    query, keys = tf.ones([1, 3]), np.random.random([1, 4, 5]).astype(np.float32)
    other = keys.copy()
    other[:, 2:] = 7
    layer = feature_seq.DIEN(3)
    mask = tf.constant([[True, True, False, False]])
    self.assertAllClose(*self.value([layer((query, x, mask)) for x in (keys, other)]))

  def test_dmr(self):
    layer = self.round_trip(
      self.from_template(feature_seq.DMR_U2I, cmp_dim=2, activation="linear", initializer="ones")
    )
    self.assertAllClose(self.value(layer((_fill(2, 1, 3), _fill(1, 1, 4, 5)))), [[10] * 3])


if __name__ == "__main__":
  tf.test.main()
