"""Ops that split and reorder ids: worked examples, static shapes, gradients and bad inputs."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import distribution_ops
from tests.distribution_testing import (
  INT64_MAX,
  INT64_MIN,
  DistributionTestCase,
  int64,
  ragged,
)

tf.compat.v1.disable_eager_execution()


class ModuleTest(DistributionTestCase):
  def test_names_that_others_take_from_the_module(self):
    self.assertIs(distribution_ops.FeatureConfigs, example_pb2.FeatureConfigs)
    self.assertIs(distribution_ops.gen_distribution_ops, distribution_ops.gen_monolith_ops)


class SplitTest(DistributionTestCase):
  def test_split_by_indices(self):
    parts = distribution_ops.split_by_indices(int64([0, 1, 2, 2, 0]), int64([0, 1, 2, 2, 3]), 3)

    self.assertAllEqual(self.run_tensors(parts[0]), [0, 3])
    self.assertAllEqual(self.run_tensors(parts[1]), [1])
    self.assertAllEqual(self.run_tensors(parts[2]), [2, 2])

  def test_split_keeps_tail_shape_of_every_kernel_type(self):
    for dtype in (tf.float32, tf.int64, tf.int32, tf.bool):
      tensor = tf.cast(tf.reshape(tf.range(12), [3, 2, 2]), dtype)
      parts = distribution_ops.split_by_indices(int64([1, 0, 1]), tensor, 3)
      self.assertEqual(parts[0].shape.as_list(), [None, 2, 2])
      values, whole = self.run_tensors([parts, tensor])
      self.assertAllEqual(values[0], whole[1:2])
      self.assertAllEqual(values[1], whole[[0, 2]])
      self.assertEqual(values[2].shape, (0, 2, 2))

  def test_split_by_indices_empty(self):
    parts = distribution_ops.split_by_indices(int64([]), int64([]), 2)
    self.assertAllEqual(self.run_tensors(parts[0]), [])
    self.assertAllEqual(self.run_tensors(parts[1]), [])

  def test_split_by_indices_gradient(self):
    tensor = tf.zeros([3, 2])
    parts = distribution_ops.split_by_indices(int64([0, 1, 0]), tensor, 3)
    grad = tf.gradients(parts, tensor)[0]
    self.assertAllEqual(self.run_tensors(grad), np.ones([3, 2]))

  def test_split_by_indices_gradient_interleaves(self):
    tensor = tf.zeros([4, 2])
    parts = distribution_ops.split_by_indices(int64([1, 0, 1, 1]), tensor, 2)
    grad = tf.gradients(parts, tensor, [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]])[0]
    self.assertAllEqual(self.run_tensors(grad), [[3, 4], [1, 2], [5, 6], [7, 8]])

  def test_split_by_indices_gradient_empty(self):
    tensor = tf.constant([], tf.float32)
    parts = distribution_ops.split_by_indices(int64([]), tensor, 3)
    self.assertAllEqual(self.run_tensors(tf.gradients(parts, tensor)[0]), [])

  def test_split_bad_input(self):
    ids = int64([1, 2])
    split = distribution_ops.split_by_indices
    self.assert_invalid(split(int64([0, 2]), ids, 2), "indices[1] is 2", "[0, 2)")
    self.assert_invalid(split(int64([0, -1]), ids, 2), "indices[1] is -1")
    self.assert_invalid(split(int64([0, INT64_MAX]), ids, 2), "indices[1]")
    self.assert_invalid(split(int64([0]), ids, 2), "is 2", "= 1")
    self.assert_invalid(split(int64([[0, 1]]), ids, 2), "indices")

  def test_split_gradient_bad_input(self):
    gradient = distribution_ops.gen_distribution_ops.monolith_split_by_indices_gradient
    one = tf.ones([1, 2])
    self.assert_invalid(gradient(int64([0, 0]), tf.ones([2, 2]), [one, one]), "grads[0]")
    self.assert_invalid(gradient(int64([0, 2]), tf.ones([2, 2]), [one, one]), "indices[1] is 2")
    self.assert_invalid(gradient(int64([0, 1]), tf.ones([2, 3]), [one, one]), "[1,3]", "[1,2]")

  def test_ragged_split_by_indices(self):
    num = ragged([[], [], [4, 3, 2], [1], [], []])
    parts, positions = distribution_ops.ragged_split_by_indices(int64([0, 1, 0, 1]), num, 2)

    parts, positions = self.run_tensors([parts, positions])
    self.assertEqual(parts[0].to_list(), [[], [], [4, 2], [], [], []])
    self.assertEqual(parts[1].to_list(), [[], [], [3], [1], [], []])
    self.assertEqual(positions[0].to_list(), [[], [], [0, 2], [], [], []])
    self.assertEqual(positions[1].to_list(), [[], [], [1], [3], [], []])

  def test_ragged_split_without_rows_or_values(self):
    parts, _ = distribution_ops.ragged_split_by_indices(int64([]), ragged([[], []]), 2)
    self.assertEqual(self.run_tensors(parts[1]).to_list(), [[], []])
    parts, _ = distribution_ops.ragged_split_by_indices(int64([]), ragged([]), 1)
    self.assertEqual(self.run_tensors(parts[0]).to_list(), [])

  def test_ragged_split_bad_input(self):
    split = distribution_ops.gen_distribution_ops.monolith_ragged_split_by_indices
    self.assert_invalid(
      split(int64([0, 1, 0]), int64([5, 6]), int64([0, 2]), 2),
      "Ragged tensor values size must match indices size. Got 2 v.s. 3",
    )
    for splits in ([0, 1], [0, 3], [0, 2, 1, 2], [1, 2], []):
      self.assert_invalid(
        split(int64([0, 1]), int64([5, 6]), int64(splits), 2), "The input ragged tensor is invalid."
      )
    self.assert_invalid(split(int64([0, 2]), int64([5, 6]), int64([0, 2]), 2), "indices[1] is 2")

  def test_normalize_merged_split(self):
    result = distribution_ops.normalize_merged_split(
      int64([0, 2, 5, 5, 9, 0, 0, 3, 4]), tf.constant([5, 4])
    )
    self.assertAllEqual(self.run_tensors(result), [0, 2, 5, 5, 9, 9, 12, 13])

  def test_normalize_merged_split_edges(self):
    normalize = distribution_ops.normalize_merged_split
    empty = tf.constant([], tf.int32)
    self.assertAllEqual(self.run_tensors(normalize(int64([0]), tf.constant([1]))), [0])
    self.assertAllEqual(self.run_tensors(normalize(int64([0, 0, 3]), tf.constant([1, 2]))), [0, 3])
    self.assertAllEqual(self.run_tensors(normalize(int64([]), empty)), [0])

  def test_normalize_merged_split_bad_input(self):
    normalize = distribution_ops.normalize_merged_split
    for split, sizes in (
      ([0, 2, 0], [2]),
      ([0, 2], [3]),
      ([0, 2], [2, 0]),
      ([0, 2], [-1, 3]),
      ([0, 2, 1], [3]),
      ([1, 2], [2]),
      ([0, 1, 2], [2, 1]),
      ([0, 2], [2147483647, 2147483647]),
    ):
      self.assert_invalid(normalize(int64(split), tf.constant(sizes)), "row_split")


class ReorderTest(DistributionTestCase):
  def check(self, values, shards, num, reordered, sizes):
    result = distribution_ops.reorder_by_indices(values, tf.constant(shards, tf.int32), num)
    got, got_sizes = self.run_tensors(result)
    self.assertAllEqual(got, reordered)
    self.assertAllEqual(got_sizes, sizes)

  def test_reorder_by_indices(self):
    ids = [0, 1, 2, 2, 3, 5]
    self.check(int64(ids), [i % 3 for i in ids], 3, [3, 0, 1, 5, 2], [2, 1, 2])
    self.check(int64([1, 2, 3, 2]), [1, 0, 1, 0], 2, [2, 3, 1], [1, 2])

  def test_reorder_by_indices_of_rows(self):
    rows = int64([[1, 5], [2, 6], [1, 7]])
    self.check(rows, [0, 1, 1], 2, [[1, 5], [2, 6]], [1, 1])

  def test_reorder_floats_and_zeros(self):
    self.check(tf.constant([0.0, 1.5, -0.0, 1.5]), [0, 1, 0, 1], 2, [0.0, 1.5], [1, 1])

  def test_reorder_empty_and_unused_shards(self):
    self.check(int64([]), [], 3, [], [0, 0, 0])
    self.check(int64([INT64_MIN, INT64_MAX]), [3, 3], 5, [INT64_MAX, INT64_MIN], [0, 0, 0, 2, 0])

  def test_reorder_static_shape(self):
    out, sizes = distribution_ops.reorder_by_indices(int64([[1, 5]]), tf.constant([0]), 4)
    self.assertEqual(out.shape.as_list(), [None, 2])
    self.assertEqual(sizes.shape.as_list(), [4])

  def test_reorder_bad_input(self):
    reorder = distribution_ops.reorder_by_indices
    self.assert_invalid(reorder(int64([1, 2]), tf.constant([0, 2]), 2), "shard_ids[1] is 2")
    self.assert_invalid(reorder(int64([1, 2]), tf.constant([0, -1]), 2), "shard_ids[1] is -1")
    self.assert_invalid(reorder(int64([1, 2]), tf.constant([0]), 2), "is 1", "= 2")
    self.assert_invalid(reorder(tf.zeros([2, 0], tf.int64), tf.constant([0, 0]), 2), "column")
    self.assert_invalid(reorder(tf.zeros([1, 1, 1], tf.int64), tf.constant([0]), 2), "[1,1,1]")


class FusedReorderTest(DistributionTestCase):
  def check(self, inputs, num_shards, dims, ids, sizes, slot_sizes, offsets=None):
    result = distribution_ops.fused_reorder_by_indices(
      [int64(values) for values in inputs], num_shards, dims
    )
    self.assertEqual(result[1].shape.as_list(), [num_shards])
    self.assertEqual(result[2].shape.as_list(), [num_shards * len(inputs)])
    self.assertEqual(result[3].shape.as_list(), [len(inputs)])
    got = self.run_tensors(list(result))
    self.assertAllEqual(got[0], ids)
    self.assertAllEqual(got[1], sizes)
    if slot_sizes is not None:
      self.assertAllEqual(got[2], slot_sizes)
    self.assertAllEqual(got[3], [len(values) for values in inputs])
    if offsets is not None:
      self.assertAllEqual(got[4], offsets)

  def test_one_table(self):
    self.check(
      [[0, 1, 2, 2, 3, 5]],
      3,
      [2],
      [0, 3, 1, 2, 5],
      [2, 1, 2],
      [2, 1, 2],
      [0, 4, 6, 6, 2, 8],
    )

  def test_empty_table(self):
    self.check([[0, 1, 2, 2, 3, 5], []], 3, [2, 2], [0, 3, 1, 2, 5], [2, 1, 2], [2, 0, 1, 0, 2, 0])
    self.check([[], []], 2, [2, 2], [], [0, 0], [0, 0, 0, 0], [])

  def test_two_tables(self):
    self.check(
      [[0, 1, 2, 2, 3, 5], [6, 7, 8, 8, 9, 11]],
      3,
      [2, 2],
      [0, 3, 6, 9, 1, 7, 2, 5, 8, 11],
      [4, 2, 4],
      [2, 2, 1, 1, 2, 2],
    )
    self.check(
      [[0, 1, 4, 5], [2, 3, 6, 7]], 2, [1, 1], [0, 4, 2, 6, 1, 5, 3, 7], [4, 4], [2, 2, 2, 2]
    )

  def test_tables_of_different_width(self):
    self.check(
      [[0, 1, 0], [3, 2, 3], [5, 6, 7]],
      2,
      [1, 2, 3],
      [0, 2, 6, 1, 3, 5, 7],
      [3, 4],
      [1, 1, 1, 1, 1, 2],
      [0, 6, 0, 7, 1, 7, 9, 3, 12],
    )
    self.check(
      [[2, 3, 1, 2, 7, 2], [5, 8, 4, 4, 5, 11, 6]],
      3,
      [3, 2],
      [3, 6, 1, 7, 4, 2, 5, 8, 11],
      [2, 3, 4],
      [1, 1, 2, 1, 1, 3],
      [13, 0, 5, 13, 8, 13, 16, 18, 11, 11, 16, 20, 3],
    )

  def test_rank0_empty(self):
    self.check(
      [[0, 1, 2, 3, 4, 5, 8]],
      5,
      [2],
      [0, 4, 8, 1, 5, 2, 3],
      [0, 3, 2, 1, 1],
      None,
      [0, 6, 10, 12, 2, 8, 4],
    )

  def test_rank0_is_used_when_the_environment_says_so(self):
    with mock.patch.dict(os.environ, {"MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD": "0"}):
      self.check([[0, 1, 5, 4]], 5, [1], [0, 5, 1, 4], [2, 1, 0, 0, 1], None)

  def test_one_reading_of_the_environment_for_ops_and_driver(self):
    name = "MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD"
    for text, by_default, expected in (
      (None, True, True), (None, False, False), ("1", False, True), ("0", True, False),
      ("true", False, False),
    ):  # fmt: skip
      with mock.patch.dict(os.environ):
        os.environ.pop(name, None)
        if text is not None:
          os.environ[name] = text
        self.assertEqual(distribution_ops.is_rank0_empty(5, by_default), expected, text)
        self.assertFalse(distribution_ops.is_rank0_empty(4, by_default))

  def test_the_same_id_in_two_tables_is_kept_twice(self):
    self.check([[7, 7], [7]], 2, [1, 1], [7, 7], [0, 2], [0, 0, 1, 1], [0, 0, 1])

  def test_negative_ids_take_the_floor_modulo(self):
    self.check(
      [[-1, -3, INT64_MIN, INT64_MAX]],
      3,
      [1],
      [-3, INT64_MIN, INT64_MAX, -1],
      [1, 2, 1],
      None,
    )

  def test_bad_input(self):
    fused = distribution_ops.gen_distribution_ops.fused_reorder_by_indices
    ids = [int64([1, 2])]
    self.assert_invalid(fused(ids, 2, [1, 1], False), "slot_embedding_dims is 2", "= 1")
    self.assert_invalid(fused(ids, 2, [0], False), "slot_embedding_dims")
    self.assert_invalid(fused(ids, 1, [1], True), "num_of_shards is 1")
    self.assert_invalid(fused([int64([1]), int64([[1]])], 2, [1, 1], False), "rank 1")

  def test_offsets_beyond_int32_are_refused(self):
    result = distribution_ops.fused_reorder_by_indices([int64([1, 2, 3])], 2, [2**30])
    self.assert_invalid(result[4], str(3 * 2**30), str(2**31 - 1))

  def test_first_input_must_be_a_vector(self):
    with self.assertRaises(ValueError):
      distribution_ops.fused_reorder_by_indices([int64([[1]])], 2, [1])


if __name__ == "__main__":
  tf.test.main()
