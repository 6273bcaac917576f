"""Tests of layers that tasks share."""

import numpy as np
import tensorflow as tf

from monolith.native_training.layers.multi_task import SNR, MMoE
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class MMoETest(LayerTestCase):
  def test_fresh_gates_are_uniform(self):
    for gate_type in ("softmax", "topk"):
      layer = self.round_trip(
        MMoE(2, [4], "relu", "ones", num_experts=3, gate_type=gate_type, use_weight_norm=False)
      )
      outputs = self.value(layer(tf.ones([1, 4])))
      self.assertLen(outputs, 2)
      self.assertAllClose(outputs, [[[4] * 4]] * 2)
      self.assertLen(layer.losses, 0 if gate_type == "softmax" else 2)

  def test_two_inputs(self):
    layer = self.from_template(
      MMoE,
      num_tasks=2,
      expert_output_dims=[[5, 3], [3]],
      expert_activations="relu",
      gate_type="noise_topk",
    )
    outputs = layer([tf.ones([7, 4]), tf.ones([7, 6])])
    self.assertEqual([o.shape for o in self.value(outputs)], [(7, 3)] * 2)

  def test_experts_differ(self):
    layer = MMoE(1, [3], "relu", num_experts=2)
    layer(tf.ones([1, 4]))
    kernels = self.value([expert.get_layer(0).kernel for expert in layer._experts])
    self.assertNotAllClose(*kernels)

  def test_errors(self):
    with self.assertRaisesRegex(Exception, "num_experts not set"):
      MMoE(2, [3], "relu")
    with self.assertRaises(AssertionError):
      MMoE(2, [[3], [4]], "relu")
    with self.assertRaises(AssertionError):
      MMoE(2, [3], ["relu"], num_experts=2)
    self.assertEqual(MMoE(2, [3, 1], ["relu"] * 4).num_experts, 4)

  def test_activations_survive_a_round_trip(self):
    copy = self.round_trip(MMoE(1, [2, 2], "sigmoid2", num_experts=2))
    self.assertLen(copy._experts[0]._stacked_layers, 3)


class SNRTest(LayerTestCase):
  def test_aver(self):
    layer = self.round_trip(
      self.from_template(SNR, num_out_subnet=3, out_subnet_dim=128, snr_type="aver", mode="infer")
    )
    outputs = self.value(layer([tf.ones([100, 128])] * 4))
    self.assertLen(outputs, 3)
    self.assertAllClose(np.sum(outputs), 76800.0)
    self.assertAllClose(self.value(layer.losses[0]), 9.220051, rtol=1e-5)
    with self.assertRaises(AssertionError):
      SNR(2, 3, "aver")([tf.ones([1, 4])])

  def test_trans(self):
    for use_ste in (False, True):
      layer = SNR(2, 3, use_ste=use_ste)
      outputs = layer([tf.ones([5, 4])] * 2)
      gradient = tf.gradients(tf.add_n(outputs), layer._log_alpha)[0]
      values = self.value([*outputs, gradient])
      self.assertEqual([v.shape for v in values], [(5, 3), (5, 3), (4, 1)])


if __name__ == "__main__":
  tf.test.main()
