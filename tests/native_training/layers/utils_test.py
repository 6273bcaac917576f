"""Tests of helpers that the layers share."""

import numpy as np
import tensorflow as tf

from monolith.native_training.layers import utils as layer_utils
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _fill(value, *shape):
  return tf.fill(shape, float(value))


class MergeTest(LayerTestCase):
  def test_merge_tensor_list(self):
    stacked = _fill(1, 2, 3, 4)
    merge = layer_utils.merge_tensor_list
    self.assertIs(merge(stacked, "stack"), stacked)
    self.assertEqual(merge([stacked], "concat").shape, [2, 12])
    self.assertEqual([t.shape.as_list() for t in merge(stacked, None)], [[2, 4]] * 3)
    flat = _fill(1, 2, 12)
    self.assertEqual(merge(flat, "stack", num_feature=3).shape, [2, 3, 4])
    self.assertEqual([t.shape.as_list() for t in merge(flat, None, 3)], [[2, 4]] * 3)
    self.assertIs(merge(flat, None), flat)
    self.assertEqual(merge([flat, flat], "stack").shape, [2, 2, 12])
    self.assertEqual(merge([flat, flat], "concat").shape, [2, 24])
    self.assertEqual(merge([flat, flat], None), [flat, flat])
    self.assertEqual(merge(flat, keep_list=True), [flat])
    with self.assertRaisesRegex(Exception, "shape error: "):
      merge(_fill(1, 2))
    with self.assertRaises(AssertionError):
      merge(flat, "sum")

  def test_sample_subset(self):
    self.assertAllClose(
      self.value(layer_utils.continuous_topk(tf.constant([1.0, 5.0, 3.0]), 2, 0.01)), [0, 1, 1]
    )
    sample = self.value(layer_utils.sample_subset(tf.zeros([10]), 3))
    self.assertAllClose(np.sum(sample), 3.0)


if __name__ == "__main__":
  tf.test.main()
