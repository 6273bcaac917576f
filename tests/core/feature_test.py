"""Tests of `monolith.core.feature`."""

import unittest

import numpy as np
import tensorflow as tf

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from monolith.core import hyperparams
from monolith.core.feature import Env, FeatureColumn3D, FeatureColumnV1, FeatureSlice, FeatureSlot

tf.compat.v1.disable_v2_behavior()


def _env(vocab_size_dict=None, **overrides):
  params = hyperparams.Params()
  defaults = {
    "qr_multi_hashing": False,
    "qr_hashing_threshold": 100000000,
    "qr_collision_rate": 4,
    "use_random_init_embedding_for_oov": False,
    "merge_vector": False,
  }
  for name, value in {**defaults, **overrides}.items():
    params.define(name, value, "")
  return Env(vocab_size_dict=vocab_size_dict or {}, params=params)


def _evaluate(tensors):
  with tf.compat.v1.Session() as session:
    return session.run(tensors)


class _GraphTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)


class FeatureSlotTest(_GraphTest):
  def test_has_bias(self):
    slot = FeatureSlot(env=_env(), slot_id=1, has_bias=True)
    self.assertEqual([(s.dim, s.slice_index) for s in slot.feature_slices], [(1, 0)])
    self.assertTrue(slot.has_bias())

  def test_add_feature_slice(self):
    slot = FeatureSlot(env=_env(), slot_id=1, has_bias=True)
    added = slot.add_feature_slice(dim=10)
    self.assertEqual([(s.dim, s.slice_index) for s in slot.feature_slices], [(1, 0), (10, 1)])
    self.assertIs(added, slot.feature_slices[1])

  def test_defaults(self):
    slot = FeatureSlot(env=_env(), slot_id=1, has_bias=True)
    vector = slot.add_feature_slice(dim=2)
    own = slot.add_feature_slice(2, "optimizer", "initializer", "rate")
    self.assertIs(slot.feature_slices[0].optimizer, slot.bias_optimizer)
    self.assertEqual(slot.bias_optimizer.learning_rate, 0.01)
    self.assertEqual(type(slot.bias_optimizer).__name__, "FtrlParameters")
    self.assertIs(vector.optimizer, slot.default_vec_optimizer)
    self.assertEqual(type(vector.optimizer).__name__, "AdagradParameters")
    self.assertIs(vector.initializer, slot.default_vec_initializer)
    self.assertIsNone(vector.learning_rate_fn)
    self.assertEqual(
      (own.optimizer, own.initializer, own.learning_rate_fn), ("optimizer", "initializer", "rate")
    )
    values = _evaluate(vector.initializer([50, 2], tf.float32))
    self.assertLessEqual(np.abs(values).max(), 0.001)
    np.testing.assert_array_equal(_evaluate(slot.bias_initializer([3, 1], tf.float32)), 0)

  def test_slot_twice(self):
    env = _env()
    first = FeatureSlot(env, 1)
    with self.assertRaises(AssertionError) as caught:
      FeatureSlot(env, 1)
    self.assertEqual(
      str(caught.exception), "Feature slot with id: 1 can not be created more than once."
    )
    env.finalize()
    FeatureSlot(env, 1)
    FeatureSlot(env, 2)
    self.assertEqual(env.slot_id_to_feature_slot, {1: first})

  def test_slice(self):
    slot = FeatureSlot(_env(), 1)
    one, other = FeatureSlice(slot, 2, 0), FeatureSlice(slot, 2, 0)
    self.assertEqual(repr(one), "[FeatureSlice][slot_1][0]")
    self.assertEqual(hash(one), hash(other))
    self.assertNotEqual(one, other)
    with self.assertRaises(AttributeError):
      one.dim = 3


class FeatureColumnTest(_GraphTest):
  def test_first_pass(self):
    slot = FeatureSlot(_env(), 1, has_bias=True)
    vector = slot.add_feature_slice(3)
    column = FeatureColumnV1(slot, "fc")
    placeholder = column.embedding_lookup(vector)
    self.assertEqual(placeholder.shape.as_list(), [None, 3])
    self.assertIs(column.embedding_lookup(vector), placeholder)
    self.assertEqual(column.get_bias().shape.as_list(), [None, 1])
    self.assertEqual(slot._feature_columns, [column])
    self.assertEqual(set(column.feature_slice_to_tf_placeholder), {slot.feature_slices[0], vector})

  def test_second_pass(self):
    env = _env()
    slot = FeatureSlot(env, 1, has_bias=True)
    FeatureColumnV1(slot, "fc").embedding_lookup(slot.add_feature_slice(3))
    env.finalize()
    features = {"fc_0": tf.ones([2, 1]), "fc_1": tf.ones([2, 3])}
    env.set_tpu_features(features)
    slot = FeatureSlot(env, 1, has_bias=True)
    column = FeatureColumnV1(slot, "fc")
    self.assertIs(column.get_bias(), features["fc_0"])
    self.assertIs(column.embedding_lookup(slot.add_feature_slice(3)), features["fc_1"])
    with self.assertRaisesRegex(KeyError, "fc_2"):
      column.embedding_lookup(slot.add_feature_slice(3))

  def test_errors(self):
    env = _env()
    slot, other = FeatureSlot(env, 1), FeatureSlot(env, 2)
    column = FeatureColumnV1(slot, "fc")
    with self.assertRaisesRegex(AssertionError, "not a slice of slot 1"):
      column.embedding_lookup(other.add_feature_slice(2))
    with self.assertRaisesRegex(AssertionError, "has no bias"):
      column.get_bias()

  def test_qr(self):
    env = _env({1: 1000, 2: 5}, qr_multi_hashing=True, qr_hashing_threshold=100)
    self.assertEqual(env.qr_sizes(1), (251, 5))
    slot, small = FeatureSlot(env, 1), FeatureSlot(env, 2)
    env.finalize()
    env.set_tpu_features(
      {"a_0_0": tf.constant([[1.0]]), "a_0_1": tf.constant([[2.0]]), "b_0": tf.constant([[5.0]])}
    )
    a = FeatureColumnV1(slot, "a").embedding_lookup(slot.add_feature_slice(1))
    b = FeatureColumnV1(small, "b").embedding_lookup(small.add_feature_slice(1))
    self.assertEqual(_evaluate([a, b]), [[[3.0]], [[5.0]]])
    with self.assertRaisesRegex(KeyError, "c_0_0"):
      FeatureColumnV1(slot, "c").embedding_lookup(slot.feature_slices[0])

  def test_oov(self):
    env = _env(use_random_init_embedding_for_oov=True)
    slot = FeatureSlot(env, 1)
    vector = slot.add_feature_slice(2)
    env.finalize()
    env.set_tpu_features({"fc_0": tf.constant([[0.0, 0.0], [1.0, 2.0]])})
    column = FeatureColumnV1(slot, "fc")
    replaced, plain = _evaluate(
      [column.embedding_lookup(vector, 5.0, 6.0), column.embedding_lookup(vector)]
    )
    self.assertTrue(((5 <= replaced[0]) & (replaced[0] < 6)).all())
    np.testing.assert_array_equal(replaced[1], [1, 2])
    np.testing.assert_array_equal(plain, [[0, 0], [1, 2]])
    with self.assertRaisesRegex(AssertionError, "init_maxval_for_oov"):
      column.embedding_lookup(vector, 5.0)

  def test_3d(self):
    env = _env(use_random_init_embedding_for_oov=True)
    slot = FeatureSlot(env, 1, has_bias=True)
    vector = slot.add_feature_slice(2)
    column = FeatureColumn3D(slot, 3, "fc")
    self.assertEqual(column.embedding_lookup(vector, 99).shape.as_list(), [None, 3, 2])
    self.assertEqual(column.get_bias().shape.as_list(), [None, 3, 1])
    mask = column.size_tensor_lookup()
    self.assertEqual((mask.dtype, mask.shape.as_list()), (tf.int32, [None, 3]))
    self.assertEqual(column.max_seq_length, 3)

    env.finalize()
    env.set_tpu_features(
      {
        "fc_0": tf.zeros([3, 3, 1]),
        "fc_1": tf.constant([[[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]]),
        "fc_0_row_lengths": tf.constant([4, 0, 1]),
      }
    )
    column = FeatureColumn3D(slot, 3, "fc")
    mask = column.size_tensor_lookup()
    self.assertEqual(mask.dtype, tf.int32)
    mask, embedding = _evaluate([mask, column.embedding_lookup(vector, 3, 7.0, 8.0)])
    np.testing.assert_array_equal(mask, [[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(embedding[0][[0, 2]], [[1, 0], [0, 1]])
    self.assertTrue(((7 <= embedding[0][1]) & (embedding[0][1] < 8)).all())


class EnvTest(_GraphTest):
  def _four_slots(self, env):
    """Slots 1: bias, 2; 2: bias; 3: 2, 3; 4: bias, 2, 3, 4, with two columns."""
    slots = {}
    for slot_id, has_bias, dims in (
      (1, True, [2]),
      (2, True, []),
      (3, False, [2, 3]),
      (4, True, [2, 3, 4]),
    ):
      slot = slots[slot_id] = FeatureSlot(env, slot_id, has_bias=has_bias)
      slices = [slot.add_feature_slice(dim) for dim in dims]
      names = [f"fc_name_{slot_id}"] + (["fc_name_5"] if slot_id == 4 else [])
      for name in names:
        column = FeatureColumnV1(slot, name)
        for feature_slice in slices:
          column.embedding_lookup(feature_slice)
    return slots

  def test_merge_vector(self):
    env = _env(merge_vector=True)
    slots = self._four_slots(env)
    env._merge_vector_in_same_slot()

    merged = {i: [s.dim for s in slot._merged_feature_slices] for i, slot in slots.items()}
    self.assertEqual(merged, {1: [1, 2], 2: [1], 3: [5], 4: [1, 9]})
    self.assertEqual(env._slot_to_merged_dims, merged)
    self.assertEqual(env._slot_to_dims, {1: [1, 2], 2: [1], 3: [2, 3], 4: [1, 2, 3, 4]})
    for slot in slots.values():
      self.assertEqual(
        [s.slice_index for s in slot._merged_feature_slices],
        list(range(len(slot._merged_feature_slices))),
      )
      for column in slot._feature_columns:
        placeholders = column._merged_feature_slice_to_tf_placeholder
        self.assertEqual(list(placeholders), slot._merged_feature_slices)
        self.assertEqual(
          [p.shape.as_list() for p in placeholders.values()],
          [[None, s.dim] for s in slot._merged_feature_slices],
        )
        self.assertIs(column.feature_slice_to_tf_placeholder, placeholders)

  def test_split_merged_embedding(self):
    env = _env(merge_vector=True)
    slots = self._four_slots(env)
    env._merge_vector_in_same_slot()
    env._tpu_features = {
      "fc_name_1_0": tf.constant([[1]]),
      "fc_name_1_1": tf.constant([[2, 3]]),
      "fc_name_2_0": tf.constant([[4]]),
      "fc_name_3_0": tf.constant([[7, 8, 9, 10, 11]]),
      "fc_name_4_0": tf.constant([[12]]),
      "fc_name_4_1": tf.constant([list(range(13, 22))]),
      "fc_name_5_0": tf.constant([[22]]),
      "fc_name_5_1": tf.constant([list(range(23, 32))]),
    }
    for slot in slots.values():
      env._split_merged_embedding(slot)
    self.assertEqual(
      {name: value.tolist()[0] for name, value in _evaluate(env._tpu_features).items()},
      {
        "fc_name_1_0": [1],
        "fc_name_1_1": [2, 3],
        "fc_name_2_0": [4],
        "fc_name_3_0": [7, 8],
        "fc_name_3_1": [9, 10, 11],
        "fc_name_4_0": [12],
        "fc_name_4_1": [13, 14],
        "fc_name_4_2": [15, 16, 17],
        "fc_name_4_3": [18, 19, 20, 21],
        "fc_name_5_0": [22],
        "fc_name_5_1": [23, 24],
        "fc_name_5_2": [25, 26, 27],
        "fc_name_5_3": [28, 29, 30, 31],
      },
    )

  def test_merged_3d_is_split_on_the_last_axis(self):
    env = _env(merge_vector=True)
    slot = FeatureSlot(env, 1)
    slices = [slot.add_feature_slice(1), slot.add_feature_slice(2)]
    column = FeatureColumn3D(slot, 2, "fc")
    for feature_slice in slices:
      column.embedding_lookup(feature_slice)
    env.finalize()
    (placeholder,) = column.feature_slice_to_tf_placeholder.values()
    self.assertEqual(placeholder.shape.as_list(), [None, 2, 3])
    env.set_tpu_features({"fc_0": tf.constant([[[1, 2, 3], [4, 5, 6]]])})
    first, second = _evaluate([column.embedding_lookup(s) for s in slices])
    np.testing.assert_array_equal(first, [[[1], [4]]])
    np.testing.assert_array_equal(second, [[[2, 3], [5, 6]]])

  def test_merged_qr(self):
    env = _env({1: 10}, merge_vector=True, qr_multi_hashing=True, qr_hashing_threshold=1)
    slot = FeatureSlot(env, 1, has_bias=True)
    column = FeatureColumnV1(slot, "fc")
    slices = [slot.add_feature_slice(1), slot.add_feature_slice(2)]
    env.finalize()
    env.set_tpu_features(
      {
        "fc_0_0": tf.constant([[1]]),
        "fc_0_1": tf.constant([[10]]),
        "fc_1_0": tf.constant([[1, 2, 3]]),
        "fc_1_1": tf.constant([[10, 20, 30]]),
      }
    )
    values = _evaluate([column._lookup(s) for s in slot.feature_slices])
    self.assertEqual([v.tolist() for v in values], [[[11]], [[11]], [[22, 33]]])
    self.assertEqual(slices[1].slice_index, 2)

  def test_finalize(self):
    env = _env()
    self.assertFalse(env.is_finalized())
    for name in ("slot_id_to_feature_slot", "features"):
      with self.assertRaises(AssertionError):
        getattr(env, name)
    env.finalize()
    self.assertIs(env.is_finalized(), True)
    self.assertEqual((env.slot_id_to_feature_slot, env.features), ({}, None))
    with self.assertRaises(AssertionError) as caught:
      env.finalize()
    self.assertEqual(str(caught.exception), "Env can't be finalized more than once")


if __name__ == "__main__":
  unittest.main()
