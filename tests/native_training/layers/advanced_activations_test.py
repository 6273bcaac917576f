"""Tests of activations as layers."""

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import layers
from monolith.native_training.layers import advanced_activations as activations
from tests.native_training.layers.layers_testing import LayerTestCase

keras = _tensorflow.import_keras()

tf.compat.v1.disable_eager_execution()


class AdvancedActivationsTest(LayerTestCase):
  def test_all_names(self):
    self.assertLen(activations.ALL_ACTIVATION_NAMES, 18)
    x = tf.constant([[-1.0, 0.5]])
    for name in activations.ALL_ACTIVATION_NAMES:
      with self.subTest(name=name):
        layer = activations.get(name.upper())
        self.assertEqual(type(layer).__name__.lower(), name.replace("_", ""))
        self.assertIsNot(activations.get(name), layer)
        self.assertEqual(layer(x).shape, x.shape)
        copy = activations.deserialize(activations.serialize(layer))
        self.assertIs(type(copy), type(layer))
        self.assertIs(type(self.from_template(type(layer))), type(layer))

  def test_values(self):
    x = np.array([[-2.0, 0.0, 3.0]], np.float32)
    sigmoid = 1 / (1 + np.exp(-x))
    for name, want in (
      ("sigmoid2", 2 * sigmoid),
      ("swish", x * sigmoid),
      ("softsign", x / (1 + np.abs(x))),
      ("exponential", np.exp(x)),
      ("linear", x),
      ("hard_sigmoid", [[0.1, 0.5, 1.0]]),
    ):
      with self.subTest(name=name):
        self.assertAllClose(self.value(activations.get(name)(x)), want)

  def test_serialize(self):
    self.assertEqual(
      activations.serialize(activations.get("relu")),
      "{'name': 'ReLU', 'max_value': None, 'negative_slope': 0.0, 'threshold': 0.0}",
    )
    self.assertEqual(
      activations.serialize(activations.LeakyReLU(alpha=0.5)), "{'name': 'LeakyReLU', 'alpha': 0.5}"
    )
    self.assertIsNone(activations.serialize(None))
    self.assertIsNone(activations.serialize(lambda x: x))
    self.assertEqual(activations.get("{'name': 'Softmax', 'axis': 1}").axis, 1)
    self.assertIsNone(activations.deserialize(None))

  def test_get(self):
    self.assertIsNone(activations.get(None))
    self.assertIsInstance(activations.get(tf.nn.relu), activations.ReLU)
    self.assertIsInstance(activations.get(activations.Tanh), activations.Tanh)
    layer = activations.PReLU()
    self.assertIs(activations.get(layer), layer)

    def own(x):
      return x

    self.assertIs(activations.get(own), own)
    for wrong in ("nonsense", "__import__('os')", 3, "[1]"):
      with (
        self.subTest(wrong=wrong),
        self.assertRaisesRegex(TypeError, "Could not interpret activation function identifier: "),
      ):
        activations.get(wrong)
    with self.assertRaisesRegex(AssertionError, "unknown"):
      activations.deserialize({"name": "nonsense"})


class PackageTest(LayerTestCase):
  def test_exports(self):
    for name in (
      "MLP GroupInt FFM AllInt CDot CAN DCN CIN AutoInt iRazor SeNet DIN DIEN DMR_U2I AddBias "
      "LHUCTower LogitCorrection LayerNorm GradNorm SumPooling AvgPooling MaxPooling MergeType "
      "DCNType MMoE SNR Dense Sigmoid2 Conv2D Embedding"
    ).split():
      self.assertTrue(hasattr(layers, name), name)
      self.assertIn(name, dir(layers))
    self.assertIs(layers.FFM, layers.GroupInt)
    self.assertIsNot(layers.Dense, keras.layers.Dense)
    self.assertNotIn("Layer", layers.keras_layers)
    self.assertIs(layers.keras_layers["Conv2D"], keras.layers.Conv2D)
    self.assertEqual(layers.Conv2D.params().set(filters=2, kernel_size=1).instantiate().filters, 2)
    self.assertFalse(hasattr(layers, "NoSuchLayer"))
    names = {}
    exec("from monolith.native_training.layers import *", names)
    self.assertIs(names["MLP"], layers.MLP)


if __name__ == "__main__":
  tf.test.main()
