"""Tests of the dense layer."""

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training.layers.dense import Dense
from tests.native_training.layers.layers_testing import LayerTestCase

keras = _tensorflow.import_keras()

tf.compat.v1.disable_eager_execution()


class DenseTest(LayerTestCase):
  def test_params(self):
    params = Dense.params()
    self.assertIsNone(params.units)
    self.assertTrue(params.use_bias)
    self.assertIs(params.cls, Dense)
    layer = self.from_template(Dense, units=3, activation="relu")
    self.assertEqual(layer.name, "Dense")
    self.assertEqual(layer(tf.ones([2, 4])).shape, [2, 3])

  def test_kernel_norm(self):
    for kwargs, want in (
      ({}, 4),
      ({"allow_kernel_norm": True}, 2),
      ({"allow_kernel_norm": True, "kernel_norm_trainable": True}, 4),
    ):
      with self.subTest(kwargs=kwargs), tf.Graph().as_default():
        layer = Dense(2, kernel_initializer="ones", **kwargs)
        self.assertAllClose(self.value(layer(tf.ones([1, 4]))), [[want, want]], rtol=1e-5)

  def test_variables(self):
    layer = Dense(2, allow_kernel_norm=True, kernel_norm_trainable=True, optimizer="o", name="d")
    layer(tf.ones([1, 4]))
    names = ["d/bias", "d/kernel", "d/trainable_kernel_norm"]
    self.assertEqual(self.variable_names(), names)
    self.assertLen(layer.trainable_weights, 3)
    self.assertEqual([v.optimizer for v in layer.trainable_weights], ["o"] * 3)

  def test_partitioner(self):
    partitioner = tf.compat.v1.variable_axis_size_partitioner(1 << 17, max_shards=5)
    for given in (True, False):
      with self.subTest(given=given), tf.Graph().as_default():
        if given:
          layer = Dense(1024, partitioner=partitioner)
          output = layer(tf.ones([100, 294]))
        else:
          with tf.compat.v1.variable_scope("", partitioner=partitioner):
            layer = Dense(1024)
            output = layer(tf.ones([100, 294]))
        self.assertEqual([part.shape[0] for part in layer.kernel_var], [59, 59, 59, 59, 58])
        self.assertEqual(self.value(output).shape, (100, 1024))
        self.assertLen(layer.trainable_weights, 6)

  def test_initial_kernels_differ(self):
    layers = [Dense(3, kernel_initializer=i) for i in [keras.initializers.GlorotUniform()] * 2]
    for layer in layers:
      layer(tf.ones([1, 2]))
    first, second = self.value([layer.kernel for layer in layers])
    self.assertNotAllClose(first, second)

  def test_inactive_relu_monitor(self):
    layer = self.from_template(
      Dense, units=2, activation="relu", kernel_initializer="ones", inactive_relu_monitor=True
    )
    output = layer(tf.constant([[1.0], [-1.0], [-1.0], [-1.0]]))
    tf.compat.v1.get_default_graph().get_operation_by_name("Dense/inactive_relu_count_moving_avg_1")
    variable = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.METRIC_VARIABLES)[0]
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(output)
      self.assertAllClose(sess.run(variable), [0.3, 0.3])
    # Has no ReLU to watch.
    Dense(2, inactive_relu_monitor=True)(tf.ones([1, 2]))

  def test_high_rank(self):
    output = Dense(2, kernel_initializer="ones")(tf.ones([3, 4, 5]))
    self.assertAllClose(self.value(output), np.full([3, 4, 2], 5.0))

  def test_errors(self):
    with self.assertRaisesRegex(ValueError, "should be defined. Found `None`"):
      Dense(2)(tf.compat.v1.placeholder(tf.float32, [2, None]))
    with self.assertRaises(TypeError):
      Dense(2, dtype="int32")(tf.ones([1, 2], tf.int32))

  def test_config(self):
    layer = Dense(
      2,
      activation="leakyrelu",
      kernel_initializer="ones",
      kernel_regularizer="l2",
      allow_kernel_norm=True,
    )
    copy = self.round_trip(layer)
    self.assertEqual(copy.units, 2)
    self.assertAllClose(self.value(copy(tf.ones([1, 4]))), [[2, 2]], rtol=1e-5)
    self.assertLen(copy.losses, 1)


if __name__ == "__main__":
  tf.test.main()
