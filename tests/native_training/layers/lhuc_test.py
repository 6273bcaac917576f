"""Tests of gated towers."""

import tensorflow as tf

from monolith.native_training.layers.lhuc import LHUCTower
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


class LHUCTowerTest(LayerTestCase):
  def test_value_and_names(self):
    tower = self.round_trip(
      self.from_template(
        LHUCTower, output_dims=[2, 1], lhuc_output_dims=[3], initializers="ones", name="t"
      )
    )
    output = tower([tf.ones([1, 2]), tf.ones([1, 5])])
    self.assertAllClose(self.value(output), [[15.99999]], rtol=1e-4)
    names = self.variable_names()
    for name in ("t/layer_1/layer_1/dense/kernel", "t/layer_2/lhuc/dense_1/bias"):
      self.assertIn(name, names)

  def test_dims(self):
    self.assertEqual(LHUCTower([2, 1]).lhuc_output_dims, [[2], [1]])
    self.assertEqual(LHUCTower([2, 1], [3]).lhuc_output_dims, [[3, 2], [3, 1]])
    self.assertEqual(LHUCTower([2, 1], ((4, 2), (1,))).lhuc_output_dims, [[4, 2], [1]])
    with self.assertRaisesRegex(AssertionError, "must be identity with dense output"):
      LHUCTower([2, 1], [[3], [1]])
    with self.assertRaisesRegex(Exception, "lhuc_output_dims is error"):
      LHUCTower([2, 1], [3, [1]])

  def test_gate_options(self):
    tower = LHUCTower([2, 1], lhuc_use_bias=False, enable_batch_normalization=True)
    copy = self.round_trip(tower)
    for params in (tower.lhuc_params, copy.lhuc_params):
      self.assertFalse(params["use_bias"])
      self.assertTrue(params["enable_batch_normalization"])
    self.assertTrue(LHUCTower([1]).lhuc_params["use_bias"])
    copy(tf.ones([2, 3]), training=True)
    names = self.variable_names()
    self.assertTrue(any("dense/bias" in name for name in names))
    self.assertFalse(any("lhuc/dense_0/bias" in name for name in names))


if __name__ == "__main__":
  tf.test.main()
