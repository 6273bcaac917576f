"""Tests of `monolith.core.dense`, `monolith.core.testing_utils` and `monolith.core.optimizers`."""

import unittest

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.keras import backend as frozen_backend

from monolith import _tensorflow
from monolith.core import optimizers, testing_utils
from monolith.core.dense import Dense
from monolith.core.variance_scaling import VarianceScaling

keras = _tensorflow.import_keras()

tf.compat.v1.disable_eager_execution()


def _kernel(shape, dtype):
  del shape
  return np.array([[3, 0], [4, 2]], dtype.as_numpy_dtype)


class DenseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    keras.backend.clear_session()  # a new graph, names start again

  def _evaluate(self, *tensors):
    with tf.compat.v1.Session() as session:
      session.run(tf.compat.v1.global_variables_initializer())
      return session.run(tensors)

  def test_dense(self):
    for i, shape in enumerate([(3, 2), (3, 4, 2), (None, None, 2), (3, 4, 5, 2)]):
      with self.subTest(shape=shape):
        params = Dense.params().set(units=3, name=f"dense_{i}")
        output = testing_utils.layer_test(Dense, kwargs={"params": params}, input_shape=shape)
        self.assertEqual(output.shape[-1], 3)
        self.assertEqual(output.ndim, len(shape))

  def test_dense_dtype(self):
    inputs = ops.convert_to_tensor_v2(np.random.randint(low=0, high=7, size=(2, 2)))
    layer = Dense(Dense.params().set(units=5), dtype="float32")
    self.assertEqual(layer(inputs).dtype, tf.float32)

  def test_dense_on_a_variable_of_the_frozen_keras(self):
    layer = Dense.params().set(units=3).instantiate()
    output = layer(frozen_backend.variable(np.ones((2, 4))))
    self.assertEqual(self._evaluate(output)[0].shape, (2, 3))

  def test_dense_with_partitioner(self):
    params = Dense.params().set(
      units=5, partitioner=tf.compat.v1.variable_axis_size_partitioner(1024)
    )
    layer = params.instantiate()
    initial = VarianceScaling(seed=1)
    layer.kernel_initializer = initial
    data = np.random.RandomState(0).uniform(size=(2, 4096)).astype(np.float32)

    (output,) = self._evaluate(layer(frozen_backend.variable(data)))

    self.assertEqual(output.shape, (2, 5))
    self.assertAllClose(output, data @ initial((4096, 5)), rtol=1e-4, atol=1e-4)
    kernels = [w for w in layer.trainable_weights if w.name.startswith("Dense/kernel/part_")]
    self.assertGreater(len(kernels), 1)
    self.assertEqual(sum(w.shape[0] for w in kernels), 4096)

  def test_worked_example(self):
    params = Dense.params().set(name="d", units=2, kernel_initializer=_kernel)
    layer = params.instantiate()
    output = layer(tf.constant([[1.0, 1.0]]))

    names = ["d/kernel", "d/trainable_kernel_norm", "dense/d/bias"]
    self.assertEqual([v.op.name for v in tf.compat.v1.trainable_variables()], names)
    self.assertEqual([v.op.name for v in layer.trainable_weights], names)
    y, kernel, norms, bias, effective = self._evaluate(output, *layer.weights, layer.kernel)
    self.assertAllClose(y, [[7, 2]])
    self.assertAllClose(kernel, [[3, 0], [4, 2]])
    self.assertAllClose(norms, [5, 2])
    self.assertAllClose(bias, [0, 0])
    self.assertAllClose(effective, [[3, 0], [4, 2]])

  def test_kernel_norm_switches(self):
    inputs = tf.constant([[1.0, 1.0]])
    for allow, trainable, want, count in (
      (False, True, [[7, 2]], 2),
      (True, False, [[1.4, 1]], 2),
      (True, True, [[7, 2]], 3),
    ):
      with self.subTest(allow=allow, trainable=trainable):
        layer = (
          Dense.params()
          .set(
            name=f"d_{allow}_{trainable}",
            units=2,
            kernel_initializer=_kernel,
            allow_kernel_norm=allow,
            kernel_norm_trainable=trainable,
          )
          .instantiate()
        )
        output = layer(inputs)
        self.assertAllClose(self._evaluate(output)[0], want)
        self.assertLen(layer.trainable_weights, count)

  def test_zero_column_has_no_nan(self):
    layer = (
      Dense.params()
      .set(units=2, kernel_initializer=lambda shape, dtype: np.zeros(shape), allow_kernel_norm=True)
      .instantiate()
    )
    output = layer(tf.constant([[1.0, 1.0]]))
    gradients = tf.gradients(output, layer.trainable_weights)
    for value in self._evaluate(output, *gradients):
      self.assertAllEqual(np.isfinite(value), np.ones_like(value, bool))

  def test_all_weights_train(self):
    layer = Dense.params().set(name="d", units=2, kernel_initializer=_kernel).instantiate()
    loss = tf.reduce_sum(layer(tf.constant([[1.0, 2.0]])) ** 2)
    for variable, gradient in zip(
      layer.trainable_weights, tf.gradients(loss, layer.trainable_weights)
    ):
      self.assertIsNotNone(gradient, variable.name)

  def test_set_weights_includes_the_kernel(self):
    layer = Dense.params().set(units=2).instantiate()
    output = layer(tf.constant([[1.0, 1.0]]))
    layer.set_weights([np.array([[3, 0], [4, 2]]), np.array([5, 2]), np.array([1, 1])])
    self.assertAllClose(_tensorflow.import_keras_v1().backend.get_session().run(output), [[8, 3]])
    self.assertAllClose(layer.get_weights()[0], [[3, 0], [4, 2]])

  def test_activation_no_bias_and_fprop(self):
    layer = (
      Dense.params()
      .set(units=2, activation="relu", use_bias=False, kernel_initializer=_kernel)
      .instantiate()
    )
    inputs = tf.constant([[-1.0, 1.0]])
    output = layer(inputs)
    self.assertIsNone(layer.bias)
    y, again = self._evaluate(output, layer.fprop(inputs))
    self.assertAllClose(y, [[1, 2]])
    self.assertAllClose(again, y)

  def test_attributes_and_config(self):
    params = Dense.params().set(units=7, name="d")
    layer = Dense(params, input_dim=4, name="keras_name")
    self.assertIs(layer.p, params)
    self.assertEqual((layer.units, layer.var_name_prefix, layer.name), (7, "d", "keras_name"))
    self.assertTrue(layer.use_bias and layer.allow_kernel_norm and layer.kernel_norm_trainable)
    self.assertTrue(layer.supports_masking)
    self.assertIsNone(layer.partitioner)
    self.assertEqual(layer._batch_input_shape, (None, 4))
    self.assertEqual(layer.children, {})
    config = layer.get_config()
    self.assertEqual(config["units"], 7)
    self.assertEqual(config["kernel_initializer"]["config"]["mode"], "fan_avg")
    self.assertLessEqual(
      {
        "name",
        "units",
        "activation",
        "use_bias",
        "kernel_initializer",
        "bias_initializer",
        "allow_kernel_norm",
        "kernel_norm_trainable",
        "partitioner",
      },
      set(config),
    )

  def test_default_params(self):
    params = Dense.params()
    self.assertEqual((params.name, params.units, params.cls), ("Dense", 512, Dense))
    self.assertEqual((params.activation, params.use_bias), (None, True))
    self.assertEqual(params.bias_initializer, "zeros")
    self.assertEqual(
      params.kernel_initializer.get_config(),
      {"scale": 1.0, "mode": "fan_avg", "distribution": "uniform", "seed": None},
    )

  def test_bad_inputs(self):
    with self.assertRaises(TypeError) as caught:
      Dense(Dense.params(), dtype="int32")(tf.constant([[1]]))
    self.assertEqual(
      str(caught.exception),
      "Unable to build `Dense` layer with non-floating point dtype <dtype: 'int32'>",
    )
    with self.assertRaises(ValueError) as caught:
      Dense(Dense.params()).build(tf.TensorShape([None, None]))
    self.assertEqual(
      str(caught.exception),
      "The last dimension of the inputs to `Dense` should be defined. Found `None`.",
    )
    with self.assertRaisesRegex(TypeError, "returned the symbolic"):
      Dense(Dense.params().set(kernel_initializer="glorot_uniform"))(tf.constant([[1.0]]))
    with self.assertRaisesRegex(ValueError, r"returned shape \[2, 2\], want \[1, 2\]"):
      Dense(Dense.params().set(kernel_initializer=_kernel, units=2))(tf.constant([[1.0]]))


class Twice(keras.layers.Layer):
  def call(self, inputs):
    return inputs * 2

  def compute_output_shape(self, input_shape):
    return tf.TensorShape(input_shape)


class LyingShape(Twice):
  def compute_output_shape(self, input_shape):
    return tf.TensorShape([9, 9])


class LayerTestTest(unittest.TestCase):
  def test_returns_the_prediction(self):
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    output = testing_utils.layer_test(Twice, input_data=data, expected_output=2 * data)
    np.testing.assert_array_equal(output, 2 * data)

  def test_neither_data_nor_shape(self):
    with self.assertRaisesRegex(ValueError, "^input_shape is None$"):
      testing_utils.layer_test(Twice)

  def test_failures(self):
    data = np.ones((2, 3), np.float32)
    for kwargs in (
      {"expected_output": 3 * data},
      {"expected_output_dtype": "int32"},
      {"expected_output_shape": (None, 4)},
    ):
      with self.subTest(kwargs=kwargs):
        with self.assertRaisesRegex(AssertionError, "^When testing layer Twice"):
          testing_utils.layer_test(Twice, input_data=data, **kwargs)
    with self.assertRaisesRegex(AssertionError, "^When testing layer LyingShape"):
      testing_utils.layer_test(LyingShape, input_data=data)

  def test_random_data(self):
    for dtype in ("float32", "int64"):
      data = testing_utils._random_data((None, 50), dtype)
      self.assertEqual(data.dtype, dtype)
      self.assertIn(data.shape[0], (1, 2, 3))
      self.assertGreaterEqual(data.min(), -0.5 if dtype == "float32" else 0)


class OptimizersTest(unittest.TestCase):
  def test_names(self):
    train = tf.compat.v1.train
    self.assertEqual(
      optimizers.optimizers,
      {
        "adagrad": train.AdagradOptimizer,
        "momentum": train.MomentumOptimizer,
        "rmsprop": train.RMSPropOptimizer,
        "adam": train.AdamOptimizer,
      },
    )
    self.assertIs(optimizers.AdamOptimizer, train.AdamOptimizer)


if __name__ == "__main__":
  tf.test.main()
