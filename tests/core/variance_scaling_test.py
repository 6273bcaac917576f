"""Tests of `monolith.core.variance_scaling`."""

import unittest

import numpy as np

from monolith.core import variance_scaling
from monolith.core.variance_scaling import VarianceScaling


class VarianceScalingTest(unittest.TestCase):
  def test_fans(self):
    fans = variance_scaling._compute_fans
    self.assertEqual(fans((2, 3)), (2, 3))
    self.assertEqual(fans((3, 3, 4, 8)), (36, 72))
    self.assertEqual(fans((3, 3, 4, 8), "channels_first"), (96, 96))
    np.testing.assert_allclose(fans((5,)), (2.236068, 2.236068), rtol=1e-6)
    with self.assertRaisesRegex(ValueError, "^Invalid data_format: x$"):
      fans((3, 3, 4, 8), "x")

  def test_uniform(self):
    values = VarianceScaling(mode="fan_avg", distribution="uniform", seed=1)([2, 3])
    want = [[-0.18179569, 0.4827068, -1.0951946], [-0.43306765, -0.77391905, -0.8931414]]
    np.testing.assert_array_equal(values, np.array(want, np.float32))
    self.assertIsInstance(values, np.ndarray)

  def test_truncated_normal(self):
    values = VarianceScaling(seed=1)([2, 2])
    want = [[-0.16065682, 0.4455546], [-1.6061226, -0.39558068]]
    np.testing.assert_allclose(values, want, rtol=1e-6)

  def test_untruncated_normal(self):
    values = VarianceScaling(mode="fan_in", distribution="untruncated_normal", seed=1)([2, 2])
    want = [[1.1485857, -0.4325771], [-0.37347382, -0.7587034]]
    np.testing.assert_allclose(values, want, rtol=1e-6)

  def test_moments_and_limits(self):
    shape = (200, 500)
    for distribution in ("truncated_normal", "untruncated_normal", "uniform"):
      for mode, fan in (("fan_in", 200), ("fan_out", 500), ("fan_avg", 350)):
        with self.subTest(distribution=distribution, mode=mode):
          values = VarianceScaling(2.0, mode, distribution, seed=3)(shape, np.float64)
          np.testing.assert_allclose(values.std(), np.sqrt(2.0 / fan), rtol=0.02)
          if distribution == "truncated_normal":
            sigma = np.sqrt(2.0 / fan) / 0.87962566103423978
            self.assertLessEqual(np.abs(values).max(), 2 * sigma)

  def test_dtype_and_odd_shapes(self):
    for distribution in ("truncated_normal", "untruncated_normal", "uniform"):
      initializer = VarianceScaling(distribution=distribution)
      self.assertEqual(initializer((2, 2), np.float16).dtype, np.float16)
      self.assertEqual(initializer((2, 2)).dtype, np.float32)
      self.assertEqual(initializer(()).shape, ())
      self.assertEqual(initializer((0, 3)).shape, (0, 3))

  def test_global_generator_is_left_alone(self):
    np.random.seed(7)
    want = np.random.random(3)
    np.random.seed(7)
    for distribution in ("truncated_normal", "untruncated_normal", "uniform"):
      VarianceScaling(distribution=distribution)((2, 2))
      VarianceScaling(distribution=distribution, seed=1)((2, 2))
    np.testing.assert_array_equal(np.random.random(3), want)

  def test_errors(self):
    for scale in (0, -1.5):
      with self.assertRaises(ValueError) as caught:
        VarianceScaling(scale=scale)
      self.assertEqual(caught.exception.args, ("`scale` must be a positive float. Got:", scale))
    with self.assertRaises(ValueError) as caught:
      VarianceScaling(mode="fan")
    self.assertTrue(caught.exception.args[0].startswith("Invalid `mode` argument"))
    self.assertEqual(caught.exception.args[1], "fan")
    with self.assertRaises(ValueError) as caught:
      VarianceScaling(distribution="normal")
    self.assertTrue(caught.exception.args[0].startswith("Invalid `distribution` argument"))
    self.assertEqual(caught.exception.args[1], "normal")

  def test_get_config(self):
    config = VarianceScaling(2.0, "FAN_OUT", "Uniform", 5).get_config()
    self.assertEqual(
      config, {"scale": 2.0, "mode": "fan_out", "distribution": "uniform", "seed": 5}
    )


if __name__ == "__main__":
  unittest.main()
