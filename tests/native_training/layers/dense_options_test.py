"""Tests of `dense_options`: what the layers made of dense layers share."""

import dataclasses
import inspect

import tensorflow as tf
from absl.testing import parameterized

from monolith import _tensorflow
from monolith.native_training.layers.dense_options import DenseOptions
from monolith.native_training.layers.lhuc import LHUCTower
from monolith.native_training.layers.mlp import MLP
from monolith.native_training.layers.multi_task import MMoE

keras = _tensorflow.import_keras()

_LAYERS = {
  "mlp": lambda **options: MLP([2, 1], **options),
  "mmoe": lambda **options: MMoE(2, [2, 1], "relu", num_experts=2, **options),
  "lhuc": lambda **options: LHUCTower([2, 1], **options),
}


class DenseOptionsTest(parameterized.TestCase, tf.test.TestCase):
  @parameterized.parameters(MLP, MMoE, LHUCTower)
  def test_each_option_is_an_argument_with_the_same_default(self, cls):
    parameters = inspect.signature(cls.__init__).parameters
    for field in dataclasses.fields(DenseOptions):
      self.assertEqual(parameters[field.name].default, field.default, field.name)

  @parameterized.parameters(*_LAYERS)
  def test_options_survive_in_the_config(self, kind):
    options = {
      "kernel_regularizer": keras.regularizers.L2(0.5),
      "use_weight_norm": False,
      "use_learnable_weight_norm": False,
      "use_bias": False,
      "bias_regularizer": keras.regularizers.L1(0.25),
      "enable_batch_normalization": True,
      "batch_normalization_momentum": 0.5,
      "batch_normalization_renorm": True,
      "batch_normalization_renorm_clipping": {"rmax": 3.0},
      "batch_normalization_renorm_momentum": 0.25,
    }
    layer = _LAYERS[kind](**options)

    config = layer.get_config()
    again = type(layer).from_config(config).get_config()

    for name, value in options.items():
      if name.endswith("regularizer"):
        value = keras.regularizers.serialize(value)
      self.assertEqual(config[name], value, name)
      self.assertEqual(again[name], value, name)

  def test_regularizers_may_be_names(self):
    options = DenseOptions(kernel_regularizer="l2")

    self.assertIsInstance(options.kernel_regularizer, keras.regularizers.L2)
    self.assertIsNone(options.bias_regularizer)

  def test_a_dense_layer_follows_the_options(self):
    dense = DenseOptions(
      use_weight_norm=True, use_learnable_weight_norm=False, use_bias=False
    ).create_dense(3, "ones", "first")

    outputs = dense(tf.ones([1, 4]))

    self.assertEqual(dense.name, "first")
    self.assertIsNone(dense.bias)
    self.assertAllClose(outputs, [[2.0, 2.0, 2.0]])

  def test_a_batch_normalization_follows_the_options(self):
    norm = DenseOptions(
      batch_normalization_momentum=0.5,
      batch_normalization_renorm=True,
      batch_normalization_renorm_clipping={"rmax": 3.0},
      batch_normalization_renorm_momentum=0.25,
    ).create_batch_norm("norm")

    self.assertEqual(norm.name, "norm")
    self.assertEqual(norm.momentum, 0.5)
    self.assertTrue(norm.renorm)
    self.assertEqual(norm.renorm_clipping, {"rmax": 3.0})
    self.assertEqual(norm.renorm_momentum, 0.25)

  def test_arguments_are_handed_on_as_they_are(self):
    regularizer = keras.regularizers.L2(0.5)

    arguments = DenseOptions(kernel_regularizer=regularizer).as_arguments()

    self.assertIs(arguments["kernel_regularizer"], regularizer)
    self.assertEqual(arguments["batch_normalization_momentum"], 0.99)


if __name__ == "__main__":
  tf.test.main()
