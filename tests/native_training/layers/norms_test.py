"""Tests of norms."""

import numpy as np
import tensorflow as tf

from monolith.core import base_layer
from monolith.native_training.layers import norms
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class NormsTest(LayerTestCase):
  def test_layer_norm(self):
    layer = self.round_trip(self.from_template(norms.LayerNorm))
    self.assertAllClose(
      self.value(layer(tf.constant([[1.0, 2, 3], [1, 1, 1]]))),
      [[-1.22474, 0, 1.22474], [0, 0, 0]],
      atol=1e-5,
    )

  def test_grad_norm(self):
    w = tf.constant([[1.0, 2.0]])
    layer = self.round_trip(norms.GradNorm(["a", "b"]))
    losses = [3 * tf.reduce_sum(w), 4 * tf.reduce_sum(w)]
    for loss, total in (layer((losses, [w])), layer(losses, [w])):
      self.assertAllClose(self.value([loss, total]), [0.25, 10.5], rtol=1e-5)
    self.assertAllClose(self.value(layer.get_weights()), [0.5, 0.5])
    self.assertEqual([v.name for v in layer.weights], ["grad_norm/grad_norm_weights:0"])

  def test_grad_norm_of_a_loss_that_does_not_depend_on_all_inputs(self):
    w, other = tf.constant([[1.0, 2.0]]), tf.constant([[5.0]])
    loss, total = norms.GradNorm(["a", "b"])(
      ([3 * tf.reduce_sum(w), 4 * tf.reduce_sum(w) + tf.reduce_sum(other)], [w, other])
    )

    # The norms are 3 and 4 times the square root of 2, the latter with a 1 beside it.
    difference = (np.sqrt(33) - np.sqrt(18)) / 4
    self.assertAllClose(self.value([loss, total]), [2 * difference**2, 13.0], rtol=1e-5)

  def test_batch_norm(self):
    x = tf.constant([[1.0], [3.0]])
    layer = self.round_trip(norms.BatchNorm(name="bn"))
    output = layer(x)
    losses = base_layer.get_layer_loss()
    self.assertEqual(sorted(losses), ["bn_moving_mean", "bn_moving_variance"])
    gradient = tf.gradients(losses["bn_moving_mean"], layer.moving_mean)[0]
    self.assertAllClose(self.value([output, gradient])[0], [[-1], [1]], atol=1e-4)
    self.assertAllClose(self.value(gradient), [2.0])
    predict = norms.BatchNorm(mode="infer")(x)
    self.assertAllClose(self.value(predict), [[1], [3]], atol=1e-4)

  def test_batch_norm_of_global_distribution(self):
    x = tf.constant([[1.0], [3.0]])
    layer = norms.BatchNorm()
    batch = layer(x)
    layer.set_use_global_dist()
    mixed = layer(x)
    self.assertTrue(layer.get_config()["training_use_global_dist"])
    layer.set_use_global_dist(False)

    # The moving statistics are mean 0 and variance 1, and only they count in `mixed`.
    for output, want in ((batch, [[-1], [1]]), (mixed, [[1], [3]]), (layer(x), [[-1], [1]])):
      self.assertAllClose(self.value(output), want, atol=1e-4)


if __name__ == "__main__":
  tf.test.main()
