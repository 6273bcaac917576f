"""Tests of layers that cross features."""

import tensorflow as tf

from monolith.native_training.layers import feature_cross
from tests.native_training.layers.layers_testing import LayerTestCase

tf.compat.v1.disable_eager_execution()


def _fill(value, *shape):
  return tf.fill(shape, float(value))


class FeatureCrossTest(LayerTestCase):
  def test_group_int(self):
    left = [_fill(v, 1, 2) for v in (1, 2)]
    right = [_fill(v, 1, 2) for v in (1, 3, 5)]
    for kind, want in (
      ("multiply", [1, 1, 3, 3, 5, 5, 2, 2, 6, 6, 10, 10]),
      ("dot", [2, 6, 10, 4, 12, 20]),
    ):
      layer = self.round_trip(self.from_template(feature_cross.GroupInt, interaction_type=kind))
      self.assertAllClose(self.value(layer((left, right))), [want])
    layer = self.round_trip(
      feature_cross.GroupInt(use_attention=True, attention_units=[4, 1], out_type="stack")
    )
    self.assertEqual(layer((left, right)).shape.as_list()[1:], [6, 2])
    with self.assertRaises(AssertionError):
      feature_cross.GroupInt("dot", use_attention=True, attention_units=[1])

  def test_all_int(self):
    layer = self.round_trip(self.from_template(feature_cross.AllInt, cmp_dim=2, initializer="ones"))
    self.assertAllClose(self.value(layer(_fill(1, 1, 3, 4))), [[12] * 6])

  def test_cdot(self):
    layer = self.round_trip(
      self.from_template(feature_cross.CDot, project_dim=2, compress_units=[5], initializer="ones")
    )
    self.assertAllClose(self.value(layer(_fill(1, 1, 3, 4))), [[480] * 6 + [120] * 8], rtol=1e-4)

  def test_can(self):
    item = _fill(1, 1, 12)
    for is_seq, is_stacked, shape, want in (
      (False, False, [1, 3], [[4] * 3]),
      (True, False, [1, 5, 3], [[20] * 3]),
      (False, True, [1, 2, 3], [[[4] * 3] * 2]),
      (True, True, [1, 2, 5, 3], [[[20] * 3] * 2]),
    ):
      layer = self.round_trip(feature_cross.CAN(layer_num=1, is_seq=is_seq, is_stacked=is_stacked))
      self.assertAllClose(self.value(layer((tf.ones(shape), item))), want)
    with self.assertRaises(AssertionError):
      feature_cross.CAN(layer_num=2)((tf.ones([1, 2, 3]), item))

  def test_dcn(self):
    x = _fill(1, 1, 3)
    for kwargs, want in (
      ({"dcn_type": "vector"}, 4),
      ({}, 4),
      ({"layer_num": 2}, 16),
      ({"allow_kernel_norm": True}, 4),
      # The experts are averaged, 4.853288 is their sum.
      ({"dcn_type": "mixed", "num_experts": 2, "low_rank": 2}, 1 + 3.853288 / 2),
    ):
      with self.subTest(kwargs=kwargs), tf.Graph().as_default():
        layer = self.round_trip(feature_cross.DCN(initializer="ones", **kwargs))
        self.assertAllClose(self.value(layer(tf.ones([1, 3]))), [[want] * 3], rtol=1e-5)
    dropped = feature_cross.DCN(use_dropout=True, keep_prob=0.5, mode="infer", initializer="ones")
    self.assertAllClose(self.value(dropped(x)), [[4] * 3])

  def test_cin(self):
    layer = self.round_trip(
      self.from_template(feature_cross.CIN, hidden_uints=[2, 1], initializer="ones", name="cin")
    )
    self.assertAllClose(self.value(layer(_fill(1, 1, 3, 4))), [[36, 36, 216]])
    self.assertIn("cin/conv1d_1/kernel", self.variable_names())


if __name__ == "__main__":
  tf.test.main()
