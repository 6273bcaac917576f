"""Tests of the stack of dense layers."""

import tensorflow as tf

from monolith.native_training.layers.advanced_activations import PReLU
from monolith.native_training.layers.mlp import MLP
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _tanh(x):
  return tf.tanh(x)


class MLPTest(LayerTestCase):
  def test_value_and_names(self):
    output = MLP([3, 1], initializers="ones")(tf.ones([2, 4]))
    self.assertAllClose(self.value(output), [[12], [12]], rtol=1e-5)
    self.assertEqual(
      self.variable_names(),
      [
        f"mlp/dense_{i}/{name}"
        for i in (0, 1)
        for name in ("bias", "kernel", "trainable_kernel_norm")
      ],
    )

  def test_stack(self):
    mlp = MLP(
      [100, 50, 10, 1],
      enable_batch_normalization=True,
      activations=["relu", _tanh, PReLU, None],
    )
    self.assertLen(mlp._stacked_layers, 11)
    self.assertIs(mlp.get_layer(6), _tanh)
    self.assertEqual(mlp(tf.ones([2, 4])).shape, [2, 1])
    self.assertEqual(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS), [])

  def test_training_updates_statistics(self):
    mlp = MLP([2, 1], enable_batch_normalization=True)
    output = mlp(tf.constant([[0.0, 1.0], [2.0, 3.0]]), training=True)
    updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    mean = next(v for v in mlp.non_trainable_weights if "BatchNorm/in/moving_mean" in v.name)
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run([output, updates])
      self.assertAllClose(sess.run(mean), [0.01, 0.02])

  def test_activations(self):
    self.assertLen(MLP([2, 1])._stacked_layers, 3)
    self.assertLen(MLP([2, 1, 1], activations="tanh")._stacked_layers, 5)
    self.assertLen(MLP([2, 1], activations=[None, None])._stacked_layers, 2)
    with self.assertRaises(AssertionError):
      MLP([2, 1], activations=["relu"])

  def test_config(self):
    mlp = MLP([3, 1], activations=["sigmoid2", None], initializers="ones", use_weight_norm=False)
    copy = self.round_trip(mlp)
    x = tf.ones([2, 4])
    self.assertAllClose(*self.value([mlp(x), copy(x)]))
    template = self.from_template(MLP, output_dims=[3, 1], initializers="ones")
    self.assertAllClose(self.value(template(x)), [[12], [12]], rtol=1e-5)

  def test_feature_insight(self):
    output = MLP([3, 1])(tf.ones([2, 4]), segment_names=["a", "b"], segment_sizes=[1, 3])
    self.assertEqual(output.shape, [2, 1])
    self.assertLen(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES), 1)


if __name__ == "__main__":
  tf.test.main()
